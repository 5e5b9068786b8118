package driver

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// The secrets that are planted in what a doctor reads. None may be in what it writes.
const (
	canaryToken = "tweetytweety-without-a-prefix"
	canaryFlag  = "context=canary-of-a-mount-flag"
	otherToken  = "oxide-token-canary-of-another"
)

var canaries = []string{canaryToken, "canary-of-a-mount-flag", otherToken, "canary-of-a-secret",
	"canary-of-an-environment", "canary-of-an-annotation", "canary-of-a-report"}

// plantedObjects is a claim, its volume, its pod and a Secret, with canaries wherever one could be.
func plantedObjects() string {
	text := `{"kind":"List","items":[` +
		`{"kind":"Secret","metadata":{"name":"oxide-csi"},"data":{"token":"canary-of-a-secret"},` +
		`"stringData":{"x":"` + canaryToken + `"}},` +
		`{"kind":"PersistentVolumeClaim","metadata":{"name":"data","namespace":"default",` +
		`"creationTimestamp":"2026-01-01T00:00:00Z","annotations":{"note":"canary-of-an-annotation"}},` +
		`"spec":{"volumeName":"pv-1"},"status":{"phase":"Bound"}},` +
		`{"kind":"PersistentVolume","metadata":{"name":"pv-1","annotations":{"kubectl.kubernetes.io/` +
		`last-applied-configuration":"canary-of-an-annotation"}},"spec":{"mountOptions":["` + canaryFlag +
		`"],"claimRef":{"namespace":"default","name":"data"},"csi":{"driver":"` + volume.DriverName +
		`","volumeHandle":"` + racktest.Disk + `","volumeAttributes":{"token":"canary-of-a-secret"}}},` +
		`"status":{"phase":"Bound"}},` +
		`{"kind":"VolumeAttachment","metadata":{"name":"csi-1"},"spec":{"attacher":"` +
		volume.DriverName + `","nodeName":"worker-1","source":{"persistentVolumeName":"pv-1"}},` +
		`"status":{"attached":true,"attachmentMetadata":{"x":"canary-of-a-secret"}}},` +
		`{"kind":"CSINode","metadata":{"name":"worker-1"},"spec":{"drivers":[{"name":"` +
		volume.DriverName + `","nodeID":"` + racktest.Instance + `"}]}},` +
		`{"kind":"Pod","metadata":{"name":"db","namespace":"default","uid":"u-1","creationTimestamp":` +
		`"2026-01-01T00:00:00Z"},"spec":{"nodeName":"worker-1","containers":[{"env":[{"name":"P",` +
		`"value":"canary-of-an-environment"}],"args":["` + canaryToken + `"]}],"volumes":[` +
		`{"name":"data","persistentVolumeClaim":{"claimName":"data"}}]},"status":{"phase":"Pending",` +
		`"containerStatuses":[{"name":"db","lastState":{"terminated":{"message":` +
		`"canary-of-a-secret"}}}]}}`
	for reason, message := range map[string]string{
		"FailedMount": `MountVolume.MountDevice failed for volume "pv-1" : rpc error: code = Internal ` +
			`desc = NodeToolFailed: mount with ` + canaryFlag + ` and ` + otherToken + ` and ` + canaryToken,
		"FailedScheduling": "a node has " + canaryToken + " and " + canaryFlag,
		"Failed":           "failed to pull with canary-of-a-secret",
	} {
		text += `,{"kind":"Event","metadata":{"name":"` + strings.ToLower(reason) + `","namespace":` +
			`"default"},"reason":"` + reason + `","message":` + racktest.JSON(message) + `,` +
			`"involvedObject":{"kind":"Pod","namespace":"default","name":"db"},"lastTimestamp":` +
			`"2026-01-01T00:00:00Z"}`
	}
	return text + "]}"
}

// plantedReport is a report of the node, with fields that this release does not know.
func plantedReport() string {
	return `{"format":1,"instance":"` + racktest.Instance + `","environment":"canary-of-a-report",` +
		`"devices":[],"volumes":[{"id":"` + racktest.Disk + `","serial":"x","mountFlags":` +
		`"canary-of-a-report","unseen":[{"part":"flight","why":"` + canaryToken + `"}]}]}`
}

// echoingRack answers every request with an error that holds what it was sent.
func echoingRack(t *testing.T) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if strings.HasPrefix(r.URL.Path, "/v1/projects/") {
			_, _ = io.WriteString(w, racktest.ProjectOf())
			return
		}
		w.WriteHeader(http.StatusBadRequest)
		_, _ = io.WriteString(w, `{"request_id":"r-1","error_code":"InvalidRequest","message":`+
			racktest.JSON("you sent "+r.Header.Get("Authorization"))+`}`)
	}))
	t.Cleanup(server.Close)
	return server.URL
}

// planted is a file with a text.
func planted(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	must(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func TestB26NoSecretIsInWhatADoctorWrites(t *testing.T) {
	env := func(key string) string {
		return map[string]string{"OXIDE_HOST": echoingRack(t), "OXIDE_TOKEN": canaryToken,
			"OXIDE_PROJECT": racktest.Project, "OXIDE_CLUSTER_ID": "blue"}[key]
	}
	for _, format := range []string{"text", "json"} {
		for _, question := range [][]string{{"pvc", "default/data"}, {"pod", "default/db"},
			{"volume", racktest.Disk}, {"node", "worker-1"}, {"rack"}} {
			var out, errs bytes.Buffer
			path := filepath.Join(t.TempDir(), "bundle.json")
			args := append(append([]string{"doctor"}, question...), "--output="+format,
				"--bundle="+path, "--objects="+planted(t, "objects", plantedObjects()),
				"--node-report="+planted(t, "report", plantedReport()))
			status := Main(t.Context(), args, env, &out, &errs)
			if want := map[bool]int{true: 3, false: 2}[question[0] == "rack"]; status != want {
				t.Errorf("%v: status %d\n%s%s", question, status, out.String(), errs.String())
			}
			written, err := os.ReadFile(path)
			must(t, err)
			info, err := os.Stat(path)
			must(t, err)
			if info.Mode().Perm() != 0o600 {
				t.Errorf("the bundle's mode is %v", info.Mode())
			}
			for _, canary := range canaries {
				for where, text := range map[string]string{"output": out.String(), "errors": errs.String(),
					"bundle": string(written)} {
					if strings.Contains(text, canary) {
						t.Errorf("%v: the %s has %s:\n%s", question, where, canary, text)
					}
				}
			}
			if !strings.Contains(string(written), "you sent Bearer ***") {
				t.Errorf("%v: the rack's echo is not in the bundle: %s", question, written)
			}
			checkBundle(t, question[0], written)
			if format == "json" && !json.Valid(out.Bytes()) {
				t.Errorf("%v: no JSON: %s", question, out.String())
			}
		}
	}
}

func TestABundleIsWrittenToANewFileOnly(t *testing.T) {
	dir := t.TempDir()
	file, target := filepath.Join(dir, "file"), filepath.Join(dir, "target")
	must(t, os.WriteFile(file, []byte("mine"), 0o644))
	for name, to := range map[string]string{"link": file, "dangling": target} {
		must(t, os.Symlink(to, filepath.Join(dir, name)))
	}
	for _, name := range []string{"file", "link", "dangling"} {
		var out, errs bytes.Buffer
		status := Main(t.Context(), []string{"doctor", "rack", "--bundle=" + filepath.Join(dir, name)},
			func(string) string { return "" }, &out, &errs)
		if status != 1 || !strings.Contains(errs.String(), "--bundle: has to name a new file") {
			t.Errorf("%s: status %d: %s", name, status, errs.String())
		}
	}
	if text, err := os.ReadFile(file); string(text) != "mine" || err != nil {
		t.Errorf("the file holds %q, %v", text, err)
	}
	if _, err := os.Lstat(target); err == nil {
		t.Error("the link's target was made")
	}
}

// checkBundle checks that a bundle holds what a support case needs.
func checkBundle(t *testing.T, kind string, text []byte) {
	t.Helper()
	var b struct {
		Version   string `json:"version"`
		Diagnosis struct{ Chains []any }
		Evidence  struct {
			Cluster struct{ Objects []struct{ Kind string } }
			Nodes   struct{ Reports map[string]any }
			Rack    map[string]any
		}
	}
	must(t, json.Unmarshal(text, &b))
	kinds := map[string]bool{}
	for _, o := range b.Evidence.Cluster.Objects {
		kinds[o.Kind] = true
	}
	if kinds["Secret"] || b.Version != Version() || len(b.Diagnosis.Chains) == 0 {
		t.Errorf("%s: got %s", kind, text)
	}
	if kind == "rack" {
		return
	}
	if !kinds["PersistentVolume"] || !kinds["Event"] && kind != "node" && kind != "volume" ||
		len(b.Evidence.Nodes.Reports) != 1 || b.Evidence.Rack["project"] == nil {
		t.Errorf("%s: got %s", kind, text)
	}
}

func TestTheExitStatusOfADoctor(t *testing.T) {
	none := func(string) string { return "" }
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
		var out, errs bytes.Buffer
		got := Main(t.Context(), append([]string{"doctor"}, test.args...), none, &out, &errs)
		if got != test.want || !strings.Contains(out.String()+errs.String(), test.says) {
			t.Errorf("%s: status %d, want %d\n%s%s", name, got, test.want, out.String(), errs.String())
		}
	}
}

func TestInspectPrintsAReportThatADoctorReads(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Log("the report says that a node needs Linux")
	}
	dir := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(dir, "sys", "block"), 0o755))
	env := func(key string) string {
		return map[string]string{"OXIDE_SYSFS_ROOT": filepath.Join(dir, "sys"), "OXIDE_DEV_ROOT": dir,
			"OXIDE_STATE_DIR": filepath.Join(dir, "state"), "OXIDE_INSTANCE_ID": racktest.Instance}[key]
	}
	var out, errs bytes.Buffer
	if status := Main(t.Context(), []string{"inspect", "--volume=" + racktest.Disk + "=csi-x"}, env,
		&out, &errs); status != 0 {
		t.Fatalf("status %d: %s", status, errs.String())
	}
	r, err := inspection.Parse(out.Bytes())
	must(t, err)
	if r.Version != Version() || runtime.GOOS == "linux" && (r.Instance != racktest.Instance ||
		len(r.Volumes) != 1 || r.Volumes[0].Serial != "csi-x") {
		t.Errorf("got %+v", r)
	}
	if _, err := os.Stat(filepath.Join(dir, "state")); !os.IsNotExist(err) {
		t.Errorf("it made the state directory: %v", err)
	}
	for _, args := range [][]string{{"inspect", "x"}, {"inspect", "--volume="},
		{"inspect", "--host=x"}} {
		if status := Main(t.Context(), args, env, &out, &errs); status != 1 {
			t.Errorf("%q: status %d", args, status)
		}
	}
}

func TestTheHelpNamesTheProgramsOfAnOperator(t *testing.T) {
	var out bytes.Buffer
	if status := Main(t.Context(), []string{"--help"}, os.Getenv, &out, &out); status != 0 {
		t.Errorf("status %d", status)
	}
	for name := range subcommands {
		if !strings.Contains(out.String(), "oxide-csi-plugin "+name) {
			t.Errorf("it does not name %s", name)
		}
	}
}
