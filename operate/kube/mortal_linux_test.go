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

func TestKubectlEndsIfItsParentProcessIsKilled(t *testing.T) {
	const child = "KUBECTL_OF_A_CHILD"
	if os.Getenv(child) != "" {
		_, err := Kubectl(t.Context(), "get", "pods")
		t.Fatalf("kubectl ended: %v", err)
	}
	// The script keeps the FIFO open, so the test reads EOF when kubectl has ended.
	dir := kubectlThat(t, "exec 3>\"$0.pipe\"\necho runs >&3\nexec sleep 600\n")
	pipe := filepath.Join(dir, "kubectl.pipe")
	must(t, syscall.Mkfifo(pipe, 0o600))
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), child+"=1")
	must(t, cmd.Start())
	file, err := os.Open(pipe)
	must(t, err)
	defer func() { _ = file.Close() }()
	lines := bufio.NewReader(file)
	if line, err := lines.ReadString('\n'); err != nil || line != "runs\n" {
		t.Fatalf("got %q, %v", line, err)
	}
	must(t, cmd.Process.Kill())
	_ = cmd.Wait()                                                   // it was killed
	if rest, err := io.ReadAll(lines); err != nil || len(rest) > 0 { // EOF after kubectl has ended
		t.Errorf("got %q, %v", rest, err)
	}
}
