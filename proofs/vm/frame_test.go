//go:build linux

package vm_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/machine"
)

func TestMain(m *testing.M) { namespace.Main(m) }

// bootTime is how long a guest may take until its sshd answers.
const bootTime = 10 * time.Minute

// sshd is the address of a guest's sshd, which answers or will, and the file of a key to it.
type sshd struct{ address, key string }

// imageDir returns the directory of the machines' image, or skips the test without one.
func imageDir(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("OXIDE_VM_IMAGE")
	if dir == "" {
		t.Skip("virtual machines boot in make vm, and need minutes")
	}
	return dir
}

// openHost returns a host, or skips the test without an image.
func openHost(t *testing.T) *machine.Host {
	t.Helper()
	h, err := machine.Open(t.Context(), imageDir(t))
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// options are those of ssh and scp, but for the port.
func (s sshd) options() []string {
	return []string{"-i", s.key, "-o", "StrictHostKeyChecking=no", "-o",
		"UserKnownHostsFile=/dev/null", "-o", "LogLevel=error"}
}

// command returns an ssh that runs a command in the guest, without having started it. Further
// options, such as -L, come first.
func (s sshd) command(ctx context.Context, command string, options ...string) *exec.Cmd {
	host, port, _ := strings.Cut(s.address, ":")
	args := append(s.options(), "-p", port)
	args = append(append(args, options...), "root@"+host, command)
	return exec.CommandContext(ctx, "ssh", args...)
}

// run returns what a command prints in the guest. It waits until the guest's sshd answers.
func (s sshd) run(t *testing.T, command string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bootTime)
	defer cancel()
	for {
		c := s.command(ctx, command)
		var out, failure bytes.Buffer
		c.Stdout, c.Stderr = &out, &failure
		err := c.Run()
		if err == nil {
			return out.String()
		}
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
			if c.ProcessState.ExitCode() == 255 { // ssh has not reached the guest
				continue
			}
		}
		t.Fatalf("%s: %v: %s%s", command, err, out.String(), failure.String())
	}
}
