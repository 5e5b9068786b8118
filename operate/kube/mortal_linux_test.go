package kube

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

func TestKubectlDoesNotOutliveTheCommand(t *testing.T) {
	const child = "KUBECTL_OF_A_CHILD"
	if os.Getenv(child) != "" {
		_, err := Kubectl(t.Context(), "get", "pods")
		t.Fatalf("kubectl ended: %v", err)
	}
	// It holds the pipe open as long as it lives.
	dir := kubectlThat(t, "exec 3>\"$0.pipe\"\necho runs >&3\nexec sleep 600\n")
	pipe := filepath.Join(dir, "kubectl.pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), child+"=1")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(pipe)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	lines := bufio.NewReader(file)
	if line, err := lines.ReadString('\n'); err != nil || line != "runs\n" {
		t.Fatalf("got %q, %v", line, err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()                                                   // it was killed
	if rest, err := io.ReadAll(lines); err != nil || len(rest) > 0 { // it returns when kubectl ends
		t.Errorf("got %q, %v", rest, err)
	}
}
