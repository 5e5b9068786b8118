package main

import (
	"bytes"
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
)

const (
	testNode  = "oxide-csi-worker"
	testID    = "0a1de000-0000-4000-8000-000000000001"
	testToken = "a-service-account's-token"
)

// apiServer starts a Kubernetes API with the node testNode. A request for this node is answered by
// answer() if it carries testToken.
func apiServer(t *testing.T, answer http.HandlerFunc) *rest.Config {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/v1/nodes/{name}", func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Header.Get("Authorization") != "Bearer "+testToken:
			refuse(w, http.StatusUnauthorized, "Unauthorized")
		case r.PathValue("name") != testNode:
			refuse(w, http.StatusNotFound, `nodes "`+r.PathValue("name")+`" not found`)
		default:
			answer(w, r)
		}
	})
	server := httptest.NewUnstartedServer(mux)
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	t.Cleanup(server.Close)
	return &rest.Config{
		Host:        server.URL,
		BearerToken: testToken,
		TLSClientConfig: rest.TLSClientConfig{CAData: pem.EncodeToMemory(&pem.Block{
			Type: "CERTIFICATE", Bytes: server.Certificate().Raw})},
	}
}

func refuse(w http.ResponseWriter, code int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_, _ = fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","message":%q}`,
		message)
}

func nodeWith(providerID string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, `{"kind":"Node","apiVersion":"v1","metadata":{"name":%q,"labels":{
			"node.kubernetes.io/instance-type":"4-16"}},"spec":{"podCIDR":"10.244.1.0/24","providerID":%q},
			"status":{"addresses":[{"type":"InternalIP","address":"172.30.0.5"}]}}`, testNode, providerID)
	}
}

// patience is a log whose first line cancels the command's context.
type patience struct {
	bytes.Buffer
	end context.CancelFunc
}

func (p *patience) Write(b []byte) (int, error) {
	p.end()
	return p.Buffer.Write(b)
}

// tell runs the command until it ends or begins to wait. It returns the content of the written file
// ("" if there is none), the log and the error.
func tell(t *testing.T, config *rest.Config, name string, args ...string) (string, string, error) {
	t.Helper()
	out := filepath.Join(t.TempDir(), "config.env")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	said := &patience{end: cancel}
	err := run(ctx, append([]string{"--out=" + out}, args...), environment(nodeNameKey, name),
		func() (*rest.Config, error) { return config, nil }, io.Discard, said)
	b, readErr := os.ReadFile(out)
	if readErr != nil && !errors.Is(readErr, fs.ErrNotExist) {
		t.Fatal(readErr)
	}
	return string(b), said.String(), err
}

func environment(key, value string) func(string) string {
	return func(asked string) string {
		if asked == key {
			return value
		}
		return ""
	}
}

func TestTheInstanceIDComesFromTheProviderID(t *testing.T) { // D-65
	for _, id := range []string{testID, strings.ToUpper(testID)} {
		file, said, err := tell(t, apiServer(t, nodeWith("oxide://"+id)), testNode)
		// D-67: the kubelet reads a value only if it is in single quotes.
		if want := "OXIDE_INSTANCE_ID='" + testID + "'\n"; err != nil || file != want {
			t.Errorf("wrote %q, %v, want %q", file, err, want)
		}
		if strings.Count(said, "\n") != 1 || !strings.Contains(said, testID) {
			t.Errorf("said %q, want one line with the instance", said)
		}
	}
}

func TestEachErrorIsOneLineAndStatesTheProblem(t *testing.T) { // D-65 D-66
	status := func(code int, message string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { refuse(w, code, message) }
	}
	elsewhere := func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "https://elsewhere.example", http.StatusFound)
	}
	gone := func(c *rest.Config) {
		server := httptest.NewServer(http.NotFoundHandler())
		server.Close()
		*c = rest.Config{Host: server.URL}
	}
	works := nodeWith("oxide://" + testID)
	for _, test := range []struct {
		name   string
		node   string
		answer http.HandlerFunc
		args   []string
		change func(*rest.Config)
		want   string
	}{
		{"no variable", "", works, nil, nil, "K8S_NODE_NAME is not set: set it to the node's name"},
		{"a variable with an invalid name", "../secrets", works, nil, nil, "which is not a node's name"},
		{"a missing node", "other", works, nil, nil, `the cluster has no node "other"`},
		{"a service account without permission", testNode, status(http.StatusForbidden,
			`nodes "x" is forbidden`), nil, nil, `resources: ["nodes"], verbs: ["get"]`},
		{"a refused token", testNode, status(http.StatusUnauthorized, ""), nil, nil,
			"does not accept the token"},
		{"a redirect", testNode, elsewhere, nil, nil, "status 302"},
		{"an internal error of the API", testNode, status(http.StatusInternalServerError,
			"etcd is\naway"), nil, nil, "status 500: etcd is away"},
		{"too many requests", testNode, status(http.StatusTooManyRequests, ""), nil, nil,
			"stopped while waiting: the Kubernetes API has too many requests"},
		{"an answer that is not JSON", testNode, func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{"spec":`)
		}, nil, nil, "not JSON"},
		{"an API that does not respond", testNode, works, nil, gone,
			"while waiting: the Kubernetes API does not answer: dial tcp"},
		{"an API that refuses connections", testNode, works, nil, gone, "connection refused"},
		{"an API with another certificate", testNode, works, nil,
			func(c *rest.Config) { c.CAData = nil }, "certificate"},
		{"a timeout of 0s", testNode, works, []string{"--timeout=0s"}, nil, "--timeout"},
		{"an unknown flag", testNode, works, []string{"--node=x"}, nil, "-node; see --help"},
		{"an argument", testNode, works, []string{"x"}, nil, "expected flags only"},
		{"a provider ID of another cloud", testNode, nodeWith("aws:///us-east-1a/i-0123456789"), nil, nil,
			`"aws:///us-east-1a/i-0123456789", of another cloud`},
		{"a provider ID without a scheme", testNode, nodeWith(testID), nil, nil, "of another cloud"},
		{"a scheme in capitals", testNode, nodeWith("OXIDE://" + testID), nil, nil, "of another cloud"},
		{"a name instead of a UUID", testNode, nodeWith("oxide://worker-1"), nil, nil,
			"expected oxide:// and an instance's UUID"},
		{"a scheme without a UUID", testNode, nodeWith("oxide://"), nil, nil, "expected oxide:// and an"},
		{"a UUID without hyphens", testNode, nodeWith("oxide://" + strings.ReplaceAll(testID, "-", "")),
			nil, nil, "expected oxide://"},
		{"braces", testNode, nodeWith("oxide://{" + testID + "}"), nil, nil, "expected oxide://"},
		{"a UUID of zeros", testNode, nodeWith("oxide://00000000-0000-0000-0000-000000000000"), nil, nil,
			"expected oxide://"},
		{"a quote", testNode, nodeWith("oxide://'" + testID[1:]), nil, nil, "expected oxide://"},
	} {
		t.Run(test.name, func(t *testing.T) {
			config := apiServer(t, test.answer)
			if test.change != nil {
				test.change(config)
			}
			file, _, err := tell(t, config, test.node, test.args...)
			if text := fmt.Sprint(err); err == nil || !strings.Contains(text, test.want) ||
				strings.Contains(text, "\n") || strings.Contains(text, testToken) || file != "" {
				t.Errorf("got %q, and the file %q; want one line with %q, without the token, and no file",
					text, file, test.want)
			}
		})
	}
	err := run(t.Context(), nil, environment(nodeNameKey, testNode),
		func() (*rest.Config, error) { return nil, rest.ErrNotInCluster }, io.Discard, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "service account's token is mounted") {
		t.Errorf("without a service account: got %v", err)
	}
}

func TestTheCommandWaitsForTheProviderID(t *testing.T) { // D-66
	asked := 0
	config := apiServer(t, func(w http.ResponseWriter, r *http.Request) {
		if asked++; asked < 4 {
			nodeWith("")(w, r)
			return
		}
		nodeWith("oxide://"+testID)(w, r)
	})
	n, err := newNode(config, testNode)
	if err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	n.Interval, n.Log = time.Millisecond, &said
	id, err := n.instance(t.Context(), time.Minute)
	if err != nil || id != testID {
		t.Errorf("got %q, %v", id, err)
	}
	if strings.Count(said.String(), "\n") != 1 ||
		!strings.Contains(said.String(), "no spec.providerID; the Oxide cloud controller manager") {
		t.Errorf("said %q, want one line for three questions", said.String())
	}
}

func TestTheTimeoutErrorNamesWhatTheCommandWaitedFor(t *testing.T) { // D-66
	n, err := newNode(apiServer(t, nodeWith("")), testNode)
	if err != nil {
		t.Fatal(err)
	}
	n.Interval = time.Millisecond
	_, err = n.instance(t.Context(), time.Second)
	want := "waited 1s (--timeout): node oxide-csi-worker has no spec.providerID"
	if err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("got %v, want %s…", err, want)
	}
}

func TestWriteReplacesAFileAndLeavesNoTemporaryFile(t *testing.T) { // D-67
	dir := t.TempDir()
	path := filepath.Join(dir, "config.env")
	if err := os.WriteFile(path, []byte("what an earlier container wrote, and longer than that\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	if err := write(path, testID); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("left %v, %v; want the file alone", entries, err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o644 || info.Size() != int64(len("OXIDE_INSTANCE_ID=''\n")+
		len(testID)) {
		t.Errorf("got %v of %d bytes, %v", info.Mode(), info.Size(), err)
	}
	if err := write(filepath.Join(dir, "missing", "config.env"), testID); err == nil {
		t.Error("a directory that is not there was written to")
	}
	// A file cannot replace a directory, so write() fails, and has to remove its temporary file.
	if err := os.Mkdir(filepath.Join(dir, "taken"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := write(filepath.Join(dir, "taken"), testID); err == nil {
		t.Error("a directory was replaced")
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 2 {
		t.Errorf("left %v", entries)
	}
}
