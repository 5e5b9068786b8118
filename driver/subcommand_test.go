package driver

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// canaryToken is the driver's token. It has no prefix by which it could be recognized.
const canaryToken = "tweetytweety-without-a-prefix"

const canaryObjects = `{"kind":"List","items":[{"kind":"PersistentVolume",` +
	`"metadata":{"name":"pv-` + canaryToken + `"},"spec":{"csi":{"driver":"` + volume.DriverName +
	`","volumeHandle":"` + racktest.Disk + `"}},"status":{"phase":"Failed","message":"no ` +
	canaryToken + `"}}]}`

func echoingRack(t *testing.T) string {
	t.Helper()
	return racktest.At(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Request-Id", "r-1")
		body := map[string]string{racktest.ViewProject: racktest.ProjectOf(),
			racktest.ViewUser: racktest.UserOf(racktest.Silo)}["GET "+r.URL.Path]
		if body == "" {
			w.WriteHeader(http.StatusBadRequest)
			body = racktest.Error(400, "InvalidRequest", "you sent "+r.Header.Get("Authorization")).Body
		}
		_, _ = io.WriteString(w, body)
	})
}

func command(t *testing.T, env map[string]string, args ...string) (status int, out, errs string) {
	t.Helper()
	var toOut, toErr bytes.Buffer
	status = Main(t.Context(), args, func(key string) string { return env[key] }, &toOut, &toErr)
	return status, toOut.String(), toErr.String()
}

func TestTheDoctorRedactsTheToken(t *testing.T) { // B-26
	env := map[string]string{"OXIDE_HOST": echoingRack(t), "OXIDE_TOKEN": canaryToken,
		"OXIDE_PROJECT": racktest.Project, "OXIDE_CLUSTER_ID": "blue"}
	dir := t.TempDir()
	objects := filepath.Join(dir, "objects")
	must(t, os.WriteFile(objects, []byte(canaryObjects), 0o600))
	for _, format := range []string{"text", "json"} {
		for want, question := range map[int][]string{2: {"volume", racktest.Disk}, 3: {"rack"}} {
			path := filepath.Join(dir, question[0]+format)
			args := append(append([]string{"doctor"}, question...), "--output="+format,
				"--bundle="+path, "--objects="+objects)
			status, out, errs := command(t, env, args...)
			if status != want {
				t.Errorf("%v: status %d\n%s%s", question, status, out, errs)
			}
			written := csitest.Got(os.ReadFile(path))(t)
			info := csitest.Got(os.Stat(path))(t)
			var b struct {
				Version   string
				Diagnosis struct{ Chains []any }
				Evidence  struct {
					Cluster struct{ Objects []any }
					Rack    struct{ Project string }
				}
			}
			must(t, json.Unmarshal(written, &b))
			if info.Mode().Perm() != 0o600 || b.Version != Version() || len(b.Diagnosis.Chains) == 0 ||
				b.Evidence.Rack.Project == "" || question[0] != "rack" && len(b.Evidence.Cluster.Objects) != 1 {
				t.Errorf("%v: the bundle, of the mode %v, is %s", question, info.Mode(), written)
			}
			for where, text := range map[string]string{"output": out, "errors": errs,
				"bundle": string(written)} {
				if strings.Contains(text, canaryToken) {
					t.Errorf("%v: the %s has the token:\n%s", question, where, text)
				}
			}
			if !strings.Contains(string(written), "you sent Bearer ***") {
				t.Errorf("%v: the rack's echo is not in the bundle: %s", question, written)
			}
			if format == "json" && !json.Valid([]byte(out)) {
				t.Errorf("%v: no JSON: %s", question, out)
			}
		}
	}
}

func TestTheDoctorWithoutARackRedactsTheToken(t *testing.T) { // B-26
	tools, bundle := t.TempDir(), filepath.Join(t.TempDir(), "bundle")
	must(t, os.WriteFile(filepath.Join(tools, "kubectl"),
		[]byte("#!/bin/sh\necho '"+canaryObjects+"'"), 0o755))
	t.Setenv("PATH", tools)
	status, out, errs := command(t, map[string]string{"OXIDE_TOKEN": canaryToken}, "doctor", "volume",
		racktest.Disk, "--bundle="+bundle)
	written := csitest.Got(os.ReadFile(bundle))(t)
	for _, text := range []string{out, string(written)} {
		if status != 2 || strings.Contains(text, canaryToken) || !strings.Contains(text, "pv-***") {
			t.Errorf("status %d: %s\n%s", status, errs, text)
		}
	}
}

func TestTheDoctorWritesABundleToANewFileOnly(t *testing.T) {
	dir := t.TempDir()
	file, target := filepath.Join(dir, "file"), filepath.Join(dir, "target")
	must(t, os.WriteFile(file, []byte("mine"), 0o644))
	for name, to := range map[string]string{"link": file, "dangling": target} {
		must(t, os.Symlink(to, filepath.Join(dir, name)))
	}
	for _, name := range []string{"file", "link", "dangling"} {
		status, _, errs := command(t, nil, "doctor", "rack", "--bundle="+filepath.Join(dir, name))
		if status != 1 || !strings.Contains(errs, "--bundle: has to name a new file") {
			t.Errorf("%s: status %d: %s", name, status, errs)
		}
	}
	if text, err := os.ReadFile(file); string(text) != "mine" || err != nil {
		t.Errorf("the file holds %q, %v", text, err)
	}
	if _, err := os.Lstat(target); err == nil {
		t.Error("the link's target was made")
	}
}

func TestTheDoctorsExitStatusIsOneForAnErrorAndThreeWithoutData(t *testing.T) {
	for name, test := range map[string]struct {
		args []string
		want int
		says string
	}{
		"nothing could be seen": {[]string{"volume", racktest.Disk, "--kubectl=false"}, 3, "OXIDE_HOST"},
		"flags first": {[]string{"--kubectl=false", "volume", racktest.Disk}, 3,
			"could not be seen"},
		"no question":       {nil, 1, "pvc NAMESPACE/NAME"},
		"a bad question":    {[]string{"pvc", "data"}, 1, "NAMESPACE/NAME"},
		"a flag too many":   {[]string{"rack", "--delete"}, 1, "delete"},
		"a bad format":      {[]string{"rack", "--output=yaml"}, 1, "text or json"},
		"no such file":      {[]string{"pvc", "a/b", "--objects=/nonexistent"}, 1, "--objects"},
		"no such directory": {[]string{"rack", "--bundle=/nonexistent/b"}, 1, "--bundle"},
		"help":              {[]string{"--help"}, 0, "Exit status: 0"},
	} {
		got, out, errs := command(t, nil, append([]string{"doctor"}, test.args...)...)
		if got != test.want || !strings.Contains(out+errs, test.says) {
			t.Errorf("%s: status %d, want %d\n%s%s", name, got, test.want, out, errs)
		}
	}
}

func TestInspectRefusesInvalidArguments(t *testing.T) {
	for _, arg := range []string{"x", "--volume=", "--host=x"} {
		if status, _, _ := command(t, nil, "inspect", arg); status != 1 {
			t.Errorf("%q: status %d", arg, status)
		}
	}
}

func TestTheHelpListsAllSubcommands(t *testing.T) {
	status, out, _ := command(t, nil, "--help")
	if status != 0 {
		t.Errorf("status %d", status)
	}
	for name := range subcommands {
		if !strings.Contains(out, "oxide-csi-plugin "+name) {
			t.Errorf("it does not name %s", name)
		}
	}
}

func TestInvalidAuditOptionsAreRefused(t *testing.T) {
	for _, test := range []struct {
		name, without, args string
		want                string // a word of the error; empty: fine
	}{
		{"a file", "", "--volumes=f", ""},
		{"kubectl, as JSON", "OXIDE_CLUSTER_ID", "--kubectl --output=json", ""},
		{"deleting", "", "--kubectl --delete=f --min-age=1h", ""},
		{"neither", "", "", "--kubectl"},
		{"both", "", "--kubectl --volumes=f", "exactly one"},
		{"no rack", "OXIDE_HOST", "--kubectl", "OXIDE_HOST"},
		{"no token", "OXIDE_TOKEN", "--kubectl", "OXIDE_TOKEN"},
		{"no project", "OXIDE_PROJECT", "--kubectl", "OXIDE_PROJECT"},
		{"deleting by a list that may be truncated", "", "--volumes=- --delete=f", "needs --kubectl"},
		{"deleting without a cluster's id", "OXIDE_CLUSTER_ID", "--kubectl --delete=f",
			"OXIDE_CLUSTER_ID"},
		{"deleting without a list", "", "--kubectl --delete", "needs an argument"},
		{"a negative age", "", "--kubectl --min-age=-1s", "--min-age"},
		{"another format", "", "--kubectl --output=yaml", "table, json or pv"},
		{"a word too many", "", "--kubectl now", "flags only"},
		{"a flag of the plugin's", "", "--kubectl --mode=node", "mode"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := parseAudit(invocation{args: strings.Fields(test.args),
				getenv: goodEnv(map[string]string{test.without: ""})})
			if test.want == "" {
				must(t, err)
				return
			}
			csitest.Says(t, err, test.want)
		})
	}
}

func leaving(t *testing.T) (listener net.Listener, socket string) {
	t.Helper()
	socket = filepath.Join(shortDir(t), "leave.sock")
	listener = csitest.Got(net.Listen("unix", socket))(t)
	t.Cleanup(func() { _ = listener.Close() })
	return listener, socket
}

func prestop(ctx context.Context, socket string, args ...string) (status int, says string) {
	var said bytes.Buffer
	status = Main(ctx, append([]string{"prestop"}, args...), goodEnv(map[string]string{
		"OXIDE_LEAVE_SOCKET": socket}), &said, &said)
	return status, said.String()
}

func TestPrestopWaitsUntilTheConnectionIsClosed(t *testing.T) {
	listener, socket := leaving(t)
	type ended struct {
		status int
		says   string
	}
	result := make(chan ended, 1)
	go func() {
		status, says := prestop(t.Context(), socket)
		result <- ended{status, says}
	}()
	conn := csitest.Got(listener.Accept())(t)
	// Data from the other end does not end the wait.
	csitest.Got(conn.Write([]byte("two volumes left\n")))(t)
	select {
	case got := <-result:
		t.Errorf("it has not waited: %+v", got)
	case <-time.After(50 * time.Millisecond):
	}
	must(t, conn.Close())
	if got := <-result; got != (ended{}) {
		t.Errorf("got %+v, want status 0 and nothing said", got)
	}
}

func TestPrestopEndsWithoutAPeerOrAfterItsTimeout(t *testing.T) {
	listener, none := leaving(t)
	left := filepath.Join(filepath.Dir(none), "left.sock")
	must(t, os.Rename(none, left)) // so closing the listener does not remove it
	must(t, listener.Close())
	silence, silent := leaving(t)
	ctx, cancel := context.WithCancel(t.Context())
	kept := make(chan net.Conn, 2) // keeps connections open; the second one cancels ctx
	go func() {
		for conn, err := silence.Accept(); err == nil; conn, err = silence.Accept() {
			if kept <- conn; len(kept) == 2 {
				cancel()
			}
		}
	}()
	for _, test := range []struct {
		socket string
		args   []string
		ctx    context.Context
		status int
		says   string
	}{
		{left, nil, t.Context(), 0, "no program serves at OXIDE_LEAVE_SOCKET"},
		{none, nil, t.Context(), 0, "no program serves at OXIDE_LEAVE_SOCKET"},
		{silent, []string{"--timeout=20ms"}, t.Context(), 1, "not closed the connection within 20ms"},
		{silent, nil, ctx, 1, "context canceled"},
		{"", nil, t.Context(), 1, "OXIDE_LEAVE_SOCKET (--leave-socket) is not set"},
		{"leave.sock", nil, t.Context(), 1, "has to be an absolute path"},
		{"/leave.sock", []string{"--timeout=0s"}, t.Context(), 1, "--timeout has to be positive"},
		{"/leave.sock", []string{"now"}, t.Context(), 1, "expected flags only"},
	} {
		status, says := prestop(test.ctx, test.socket, test.args...)
		if status != test.status || !strings.Contains(says, test.says) {
			t.Errorf("%q %q: status %d, %q; want %d, %q", test.socket, test.args, status, says,
				test.status, test.says)
		}
	}
}

func readiness(t *testing.T, endpoint string) (status int, says string) {
	t.Helper()
	status, _, says = command(t, map[string]string{"CSI_ENDPOINT": endpoint}, "ready")
	return status, says
}

func probeAt(t *testing.T, endpoint string) (*csi.ProbeResponse, error) {
	t.Helper()
	conn := csitest.Got(grpc.NewClient(endpoint,
		grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
	defer func() { _ = conn.Close() }()
	return csi.NewIdentityClient(conn).Probe(t.Context(), &csi.ProbeRequest{})
}

func TestTheReadyCommandFailsIfNoPluginServesTheEndpoint(t *testing.T) {
	for endpoint, want := range map[string]string{
		"":                                     "CSI_ENDPOINT",
		"tcp://127.0.0.1:1":                    "unix:///path/name.sock",
		"unix://" + t.TempDir() + "/none.sock": "no plugin serves at CSI_ENDPOINT",
	} {
		if status, says := readiness(t, endpoint); status != 1 || !strings.Contains(says, want) {
			t.Errorf("%q: status %d, %q; want %q", endpoint, status, says, want)
		}
	}
}
