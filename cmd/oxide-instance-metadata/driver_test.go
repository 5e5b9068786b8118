package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// plugin returns the driver's program: the one in OXIDE_CSI_PLUGIN, or one that is built now.
func plugin(t *testing.T) string {
	t.Helper()
	if ready := os.Getenv("OXIDE_CSI_PLUGIN"); ready != "" {
		return ready
	}
	path := filepath.Join(t.TempDir(), "oxide-csi-plugin")
	out, err := exec.CommandContext(t.Context(), "go", "build", "-o", path, "../oxide-csi-plugin").
		CombinedOutput()
	if err != nil {
		t.Fatalf("build the driver: %v\n%s", err, out)
	}
	return path
}

// nodeProgram returns the driver's command as a node, with more variables, on a machine without
// disks that is no instance.
func nodeProgram(t *testing.T, program, dir string, variables ...string) (*exec.Cmd,
	*bytes.Buffer) {
	t.Helper()
	if err := os.Mkdir(filepath.Join(dir, "block"), 0o700); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), program, "--mode=node",
		"--endpoint=unix://"+filepath.Join(dir, "csi.sock"), "--state-dir="+filepath.Join(dir, "s"),
		"--sysfs-root="+dir, "--dev-root="+dir)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, variables...)
	said := &bytes.Buffer{}
	cmd.Stderr = said
	return cmd, said
}

func TestD67TheDriverReadsTheFileAndTheVariable(t *testing.T) {
	program := plugin(t)
	config := apiServer(t, nodeWith("oxide://"+testID))
	written := tell(t.Context(), t, config, testNode)
	if written.err != nil {
		t.Fatal(written.err)
	}
	// Parse the file as the kubelet does for a fileKeyRef.
	value := strings.TrimSuffix(strings.TrimPrefix(written.file, "OXIDE_INSTANCE_ID='"), "'\n")
	for _, test := range []struct {
		name      string
		variables []string
	}{
		{"the file", []string{"OXIDE_INSTANCE_METADATA_FILE=" +
			file(t, "config.env", written.file)}},
		{"the variable that the kubelet reads from it", []string{"OXIDE_INSTANCE_ID=" + value}},
		{"both", []string{"OXIDE_INSTANCE_ID=" + value, "OXIDE_INSTANCE_METADATA_FILE=" +
			file(t, "config.env", written.file)}},
	} {
		t.Run(test.name, func(t *testing.T) {
			// The path of a socket has to be short.
			dir, err := os.MkdirTemp("", "node")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			cmd, said := nodeProgram(t, program, dir, test.variables...)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() {
				_ = cmd.Process.Signal(syscall.SIGTERM)
				if err := cmd.Wait(); err != nil || t.Failed() {
					t.Errorf("the driver ended with %v and said %s", err, said)
				}
			}()
			if got := nodeID(t, filepath.Join(dir, "csi.sock")); got != testID {
				t.Errorf("the driver is node %q, want %s", got, testID)
			}
		})
	}
}

// nodeID returns the node id of the driver at a socket.
func nodeID(t *testing.T, socket string) string {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	deadline := time.After(10 * time.Second)
	for {
		answer, err := csi.NewNodeClient(conn).NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
		if err == nil {
			return answer.GetNodeId()
		}
		select {
		case <-deadline:
			t.Fatalf("no answer: %v", err)
		case <-time.After(20 * time.Millisecond):
			conn.ResetConnectBackoff()
		}
	}
}
