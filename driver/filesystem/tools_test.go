//go:build linux

package filesystem

import (
	"bufio"
	"context"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

// driverOf is set in a child process of TestDriverDeathKillsToolsButNotRepairs. The child acts as
// the driver and runs a program.
const driverOf = "TEST_DRIVER_OF"

func TestDriverDeathKillsToolsButNotRepairs(t *testing.T) {
	run := map[string]func([]*os.File, string, ...string) (toolResult, error){"mkfs": runTool,
		"repair": runRepair}[os.Getenv(driverOf)]
	if run != nil {
		_, err := run([]*os.File{os.NewFile(3, "out")}, "sh", "-c", "exec >&3; echo $$; exec sleep 1000")
		t.Fatal("the program ended: ", err)
	}
	for _, c := range []struct {
		kind string
		dies bool
	}{{"mkfs", true}, {"repair", false}} {
		t.Run("the driver is killed during a "+c.kind, func(t *testing.T) {
			r, w, err := os.Pipe()
			csitest.Must(t, err)
			driver := exec.Command(os.Args[0], "-test.run=^TestDriverDeathKillsToolsButNotRepairs$")
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
			if c.dies {
				csitest.Await(t, "it has ended", func() bool { return !alive(pid) })
			} else if !alive(pid) {
				t.Fatal("it died")
			}
		})
	}
}

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

func TestMain(m *testing.M) { namespace.Main(m) }

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

// openLocked opens and locks the guest's disk, as a node call does.
func openLocked(ctx context.Context, t *testing.T, g *guesttest.Guest) *blockdev.OpenDevice {
	t.Helper()
	host := blockdev.Host{Sysfs: g.Sys(""), Dev: g.Dev("")}
	found, err := host.Lookup(guesttest.Serial)
	csitest.Must(t, err)
	d, err := host.OpenLocked(ctx, found, false)
	csitest.Must(t, err)
	return d
}

func imageTools(t *testing.T) []string {
	t.Helper()
	b, err := os.ReadFile("../../Dockerfile")
	csitest.Must(t, err)
	found := regexp.MustCompile(`(?m)^ARG TOOLS="([^"]+)"$`).FindSubmatch(b)
	if found == nil {
		t.Fatal(`Dockerfile has no line ARG TOOLS="…"`)
	}
	return strings.Fields(string(found[1]))
}

func TestDockerfileListsTheProgramsThatTheNodeRuns(t *testing.T) {
	got, want := imageTools(t), slices.Clone(Tools)
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("the Dockerfile's TOOLS are %v, but Tools are %v", got, want)
	}
	run := programsInSource(t)
	for _, fsType := range []string{volume.Ext3, volume.Ext4, volume.XFS, volume.Btrfs} {
		name, _, err := mkfsCommand(Volume{FSType: fsType})
		csitest.Must(t, err)
		run = append(run, name)
	}
	slices.Sort(run)
	if run = slices.Compact(run); !slices.Equal(run, want) {
		t.Errorf("the source runs %v, but Tools are %v", run, want)
	}
}

// programRun matches a program's name in the source. The names of mkfs programs are not literals.
var programRun = regexp.MustCompile(`(?:runTool|runRepair|Command|Context)\([^"()]*"([^"]+)"`)

func programsInSource(t *testing.T) []string {
	t.Helper()
	paths, err := filepath.Glob("*.go")
	csitest.Must(t, err)
	var names []string
	for _, path := range paths {
		source, err := os.ReadFile(path)
		csitest.Must(t, err)
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		for _, found := range programRun.FindAllSubmatch(source, -1) {
			names = append(names, string(found[1]))
		}
	}
	return names
}

// The node's image contains only files that tools/node-root copies. The test runs node-root with
// this machine's programs, and then each program with the copy as its root directory.
func TestNodeImageProgramsNeedNoOtherFiles(t *testing.T) {
	root := filepath.Join(t.TempDir(), "root")
	out, err := exec.CommandContext(t.Context(), "../../tools/node-root",
		append([]string{root}, imageTools(t)...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("node-root: %v\n%s", err, out)
	}
	// A container runtime mounts /proc. The programs read only /proc/mounts of it.
	mounts, err := os.ReadFile("/proc/mounts")
	csitest.Must(t, err)
	csitest.Must(t, os.MkdirAll(filepath.Join(root, "proc/self"), 0o700))
	csitest.Must(t, os.WriteFile(filepath.Join(root, "proc/self/mounts"), mounts, 0o600))
	csitest.Must(t, os.Symlink("self/mounts", filepath.Join(root, "proc/mounts")))
	for _, disk := range []string{"ext4", "xfs", "btrfs"} {
		csitest.Must(t, os.WriteFile(filepath.Join(root, disk), nil, 0o600))
		csitest.Must(t, os.Truncate(filepath.Join(root, disk), 512<<20))
	}
	for _, line := range []string{
		"mke2fs -q -t ext4 -E nodiscard -m 0 /ext4", "e2fsck -f -n /ext4", "resize2fs /ext4",
		"mkfs.xfs -q -K /xfs",
		"mkfs.btrfs -q -K /btrfs", "btrfs check --readonly /btrfs",
		"blkid -p -o export /ext4", "blkid -p -o export /xfs", "blkid -p -o export /btrfs",
	} {
		words := strings.Fields(line)
		cmd := exec.CommandContext(t.Context(), pathIn(t, root, words[0]), words[1:]...)
		cmd.Dir, cmd.Env = "/", []string{"PATH=/usr/sbin:/usr/bin"}
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v\n%s", line, err, out)
		}
		if disk := words[len(words)-1][1:]; words[0] == "blkid" &&
			!strings.Contains(string(out), "TYPE="+disk+"\n") {
			t.Errorf("%s does not find it:\n%s", line, out)
		}
	}
	wantNoShell(t, root)
}

func pathIn(t *testing.T, root, name string) string {
	t.Helper()
	for _, dir := range []string{"/usr/sbin", "/usr/bin"} {
		if _, err := os.Stat(filepath.Join(root, dir, name)); err == nil {
			return filepath.Join(dir, name)
		}
	}
	t.Fatalf("%s is not in %s", name, root)
	return ""
}

// wantNoShell fails the test if the image contains programs that are not in its list of tools.
func wantNoShell(t *testing.T, root string) {
	t.Helper()
	wanted := imageTools(t)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		library := strings.Contains(path, "/lib")
		if err == nil && info.Mode()&0o111 != 0 && !library && !slices.Contains(wanted, d.Name()) {
			t.Errorf("%s is in the image", strings.TrimPrefix(path, root))
		}
		return err
	})
	csitest.Must(t, err)
}
