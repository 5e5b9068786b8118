//go:build linux

package vm_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/machine"
)

func TestMain(m *testing.M) { namespace.Main(m) }

// bootTime is how long a guest may take until its sshd answers.
const bootTime = 3 * time.Minute

// guest is a machine whose sshd answers, or will.
type guest struct {
	*machine.Machine
	host *machine.Host
}

// openHost returns a host, or skips the test where no machine can run.
func openHost(t *testing.T) *machine.Host {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	h, err := machine.Open(t.Context(), filepath.Join(cache, "oxide-simulator", "vm"))
	if err != nil {
		t.Skip(err)
	}
	return h
}

// start starts a machine with one CPU and 512 MiB in a directory, with what it has written there
// before. The machine ends with the test, if not before.
func start(t *testing.T, h *machine.Host, dir, id, name string, disks ...machine.Disk) guest {
	t.Helper()
	m, err := h.Start(t.Context(), dir, machine.Guest{ID: id, Name: name, CPUs: 1,
		MemoryBytes: 512 << 20}, disks)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Stop(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return guest{m, h}
}

// options are those of ssh and scp, but for the port.
func (g guest) options() []string {
	return []string{"-i", g.host.Key(), "-o", "StrictHostKeyChecking=no", "-o",
		"UserKnownHostsFile=/dev/null", "-o", "LogLevel=error"}
}

// command returns an ssh that runs a command in the guest, without having started it. Further
// options, such as -L, come first.
func (g guest) command(ctx context.Context, command string, options ...string) *exec.Cmd {
	args := append(g.options(), "-p", strconv.Itoa(g.SSHPort()))
	args = append(append(args, options...), "root@127.0.0.1", command)
	return exec.CommandContext(ctx, "ssh", args...)
}

// run returns what a command prints in the guest. It waits until the guest's sshd answers.
func (g guest) run(t *testing.T, command string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bootTime)
	defer cancel()
	for {
		c := g.command(ctx, command)
		var out, failure bytes.Buffer
		c.Stdout, c.Stderr = &out, &failure
		err := c.Run()
		if err == nil {
			return out.String()
		}
		select {
		case <-g.Ended():
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
			if c.ProcessState.ExitCode() == 255 { // ssh has not reached the guest
				continue
			}
		}
		t.Fatalf("%s: %v: %s%s", command, err, out.String(), failure.String())
	}
}

// put copies files to a directory of the guest, whose sshd answers.
func (g guest) put(t *testing.T, dir string, files ...string) {
	t.Helper()
	args := append(g.options(), "-P", strconv.Itoa(g.SSHPort()))
	args = append(append(args, files...), "root@127.0.0.1:"+dir)
	if out, err := exec.CommandContext(t.Context(), "scp", args...).CombinedOutput(); err != nil {
		t.Fatalf("copy %s to %s: %v: %s", files, dir, err, out)
	}
}
