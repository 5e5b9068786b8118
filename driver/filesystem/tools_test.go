//go:build linux

package filesystem

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

// driverOf, if set, makes TestDriverDeathKillsToolsOnly act as the driver, which runs a program.
const driverOf = "TEST_DRIVER_OF"

func TestDriverDeathKillsToolsOnly(t *testing.T) {
	const program = "echo $$; exec sleep 1000"
	switch os.Getenv(driverOf) {
	case "mkfs":
		out := os.NewFile(3, "out")
		_, err := runTool([]*os.File{out}, "sh", "-c", "exec >&3; "+program)
		t.Fatal("the program ended: ", err)
	case "repair":
		out := os.NewFile(3, "out")
		_, err := runRepair([]*os.File{out}, "sh", "-c", "exec >&3; "+program)
		t.Fatal("the program ended: ", err)
	}
	for _, c := range []struct {
		kind string
		dies bool
	}{{"mkfs", true}, {"repair", false}} {
		t.Run("a "+c.kind+" when the driver is killed", func(t *testing.T) {
			r, w, err := os.Pipe()
			csitest.Must(t, err)
			driver := exec.Command(os.Args[0], "-test.run=^TestDriverDeathKillsToolsOnly$")
			driver.Env = append(os.Environ(), driverOf+"="+c.kind)
			driver.ExtraFiles = []*os.File{w}
			csitest.Must(t, driver.Start())
			csitest.Must(t, w.Close())
			line, err := bufio.NewReader(r).ReadString('\n')
			csitest.Must(t, err)
			pid, err := strconv.Atoi(strings.TrimSpace(line))
			csitest.Must(t, err)
			t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
			csitest.Must(t, driver.Process.Kill())
			_ = driver.Wait()
			if !c.dies {
				if !alive(pid) {
					t.Fatal("it died")
				}
				return
			}
			for deadline := time.Now().Add(10 * time.Second); alive(pid); {
				if time.Now().After(deadline) {
					t.Fatal("it is still running")
				}
				<-time.After(time.Millisecond)
			}
		})
	}
}

// alive reports whether the process is running. A zombie is not.
func alive(pid int) bool {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return !strings.HasPrefix(rest, "Z") && !strings.HasPrefix(rest, "X")
}

func TestRunToolReturnsOutputAndExitCode(t *testing.T) {
	result, err := runTool(nil, "sh", "-c", "echo out; echo err >&2; exit 3")
	csitest.Must(t, err)
	if result != (toolResult{Exit: 3, Stdout: "out\n", Stderr: "err\n"}) {
		t.Fatalf("%+v", result)
	}
	if _, err := runTool(nil, "sh", "-c", "kill -9 $$"); !csierr.Has(err, csierr.NodeToolFailed) {
		t.Fatalf("a killed program: %v", err)
	}
	if _, err := runTool(nil, "no-such-program"); !csierr.Has(err, csierr.NodeToolFailed) {
		t.Fatalf("a missing program: %v", err)
	}
}

func TestMissingTools(t *testing.T) {
	if got := MissingTools(); len(got) != 0 {
		t.Fatalf("missing here: %q", got)
	}
	t.Setenv("PATH", t.TempDir())
	if got := MissingTools(); !slices.Equal(got, Tools) {
		t.Fatalf("missing without a PATH: %q", got)
	}
}

func TestMain(m *testing.M) { namespace.Main(m) }

// openDisk returns an open blank disk of that size.
func openDisk(tb testing.TB, sizeBytes int64, options ...guesttest.Option) *blockdev.OpenDevice {
	tb.Helper()
	g := guesttest.New(tb)
	attached := g.Attach(guesttest.Serial, sizeBytes, options...)
	host := blockdev.Host{Sysfs: g.Sys(""), Dev: g.Dev("")}
	found, err := host.Lookup(attached.Serial)
	csitest.Must(tb, err)
	d, err := host.Open(found)
	csitest.Must(tb, err)
	tb.Cleanup(func() { csitest.Must(tb, d.Close()) })
	return d
}

// openLocked opens and locks the guest's disk as a call does.
func openLocked(ctx context.Context, t *testing.T, g *guesttest.Guest) *blockdev.OpenDevice {
	t.Helper()
	host := blockdev.Host{Sysfs: g.Sys(""), Dev: g.Dev("")}
	found, err := host.Lookup(guesttest.Serial)
	csitest.Must(t, err)
	d, err := host.OpenLocked(ctx, found, false)
	csitest.Must(t, err)
	return d
}
