//go:build linux

package node

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// neighbour is another process of the node, which runs until leave.
type neighbour struct {
	t     *testing.T
	pid   int
	leave func()
}

func startNeighbour(t *testing.T, command string, args ...string) *neighbour {
	t.Helper()
	return begin(t, exec.Command(command, args...))
}

// begin starts a process that prints a line when it is ready and ends with its input.
func begin(t *testing.T, cmd *exec.Cmd) *neighbour {
	t.Helper()
	input, err := cmd.StdinPipe()
	must(t, err)
	output, err := cmd.StdoutPipe()
	must(t, err)
	var complaints strings.Builder
	cmd.Stderr = &complaints
	must(t, cmd.Start())
	if _, err := bufio.NewReader(output).ReadString('\n'); err != nil {
		_ = cmd.Wait()
		t.Fatalf("%s: %v\n%s", cmd, err, complaints.String())
	}
	n := &neighbour{t: t, pid: cmd.Process.Pid}
	n.leave = sync.OnceFunc(func() {
		_ = input.Close()
		_, _ = io.Copy(io.Discard, output)
		_ = cmd.Wait()
	})
	t.Cleanup(n.leave)
	return n
}

// inNamespace starts a process that runs the script in a copy of the test's mount namespace, and
// then stays there.
func inNamespace(t *testing.T, propagation, script string, args ...string) *neighbour {
	t.Helper()
	return startNeighbour(t, "unshare", append([]string{"--mount", "--propagation", propagation,
		"sh", "-c", "set -e; " + script + "\necho ready; read -r x || true", "sh"}, args...)...)
}

func (n *neighbour) mounts(dir string) []string {
	n.t.Helper()
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(n.pid), "mountinfo"))
	must(n.t, err)
	table, err := mountinfo.GetMountsFromReader(bytes.NewReader(b), mountinfo.PrefixFilter(dir))
	must(n.t, err)
	var paths []string
	for _, m := range table {
		paths = append(paths, m.Mountpoint)
	}
	return paths
}

func (g *testGuest) impatient() *Service {
	n := g.node()
	n.ReleaseTimeout = 50 * time.Millisecond
	return n
}

func (v testVolume) unstageSoon() error {
	return csitest.Call(v.guest.t.Context(), v.guest.impatient(), v.unstageRequest())
}

func (v testVolume) unpublishSoon(target string) error {
	return csitest.Call(v.guest.t.Context(), v.guest.impatient(), v.unpublishRequest(target))
}

// held checks that unstage fails with an error that contains the names, and unmounts nothing.
func (v testVolume) held(names ...string) {
	t := v.guest.t
	t.Helper()
	same := v.guest.mounts()
	csitest.Want(t, v.unstageSoon(), codes.Internal, csierr.StillMounted, names...)
	same()
}

func TestUnstageRefusesAVolumeThatIsMountedInAnotherNamespace(t *testing.T) { // NU-5
	const moved = `mount --bind "$1" "$2"; umount "$1"`
	leaveIt := func(testVolume) {}
	for name, c := range map[string]struct {
		fsType, script string
		then           func(v testVolume)
	}{
		"an ext4": {volume.Ext4, "", leaveIt}, "an xfs": {volume.XFS, "", leaveIt},
		"a btrfs": {volume.Btrfs, "", leaveIt},
		"one at another path, unmounted at the first": {volume.Ext4, moved, leaveIt},
		"one whose disk was removed": {volume.Ext4, "", func(v testVolume) {
			v.guest.Unplug(v.disk)
		}},
		"a raw one": {"block", moved, func(v testVolume) { must(v.guest.t, v.unpublish("dev")) }},
	} {
		t.Run(name, func(t *testing.T) {
			v := statefulGuest(t).disk(smallest(c.fsType), c.fsType)
			must(t, v.stage())
			path, aside := v.staging(), v.guest.path("aside")
			if c.fsType == "block" {
				must(t, v.publish("dev"))
				path = v.guest.path("dev")
				must(t, os.WriteFile(aside, nil, 0o600))
			} else {
				must(t, os.Mkdir(aside, 0o755))
			}
			n := inNamespace(t, "private", c.script, path, aside)
			c.then(v)
			names := []string{fmt.Sprintf("process %d", n.pid)}
			if c.script != "" {
				names = append(names, "aside")
			}
			v.held(names...)
			n.leave()
			must(t, v.unstage())
		})
	}
	t.Run("unstage waits for a namespace that ends in time", func(t *testing.T) {
		v := statefulGuest(t).disk(16, volume.Ext4)
		must(t, v.stage())
		n := inNamespace(t, "private", "")
		time.AfterFunc(50*time.Millisecond, n.leave) // while unstage waits
		must(t, v.unstage())
	})
}

// shared gives the orchestrator's directory copies in other namespaces, as kubelet's has in the
// driver's container.
func (g *testGuest) shared() {
	g.t.Helper()
	dir := filepath.Join(g.Dir, "kubelet")
	guesttest.Run(g.t, "mount", "--bind", dir, dir)
	guesttest.Run(g.t, "mount", "--make-shared", dir)
}

func TestPropagatedCopiesOfTheDriversMountAreNoUsers(t *testing.T) { // B-32
	for _, c := range []struct{ name, propagation, script string }{
		{"a peer", "unchanged", ""},
		{"a slave", "slave", ""},
		{"a slave that is shared itself", "slave", `mount --make-rshared "$1"`},
		{"a peer that shows the directory elsewhere", "unchanged", `mount --bind "$1" "$2"`},
	} {
		for _, fsType := range []string{volume.Ext4, volume.Btrfs, "block"} {
			t.Run(c.name+", "+fsType, func(t *testing.T) {
				g := statefulGuest(t)
				g.shared()
				kubelet := filepath.Join(g.Dir, "kubelet")
				must(t, os.Mkdir(filepath.Join(g.Dir, "aside"), 0o755))
				n := inNamespace(t, c.propagation, c.script, kubelet, filepath.Join(g.Dir, "aside"))
				v := g.disk(128, fsType)
				v.up("pod")
				if got := n.mounts(g.Dir); len(got) < 2 {
					t.Fatalf("nothing has reached the other namespace: %q", got)
				}
				v.down("pod")
				for _, path := range n.mounts(g.Dir) {
					if path != kubelet && path != filepath.Join(g.Dir, "aside") {
						t.Errorf("the other namespace still has %q", path)
					}
				}
			})
		}
	}
	t.Run("a copy that was moved in its namespace is a user", func(t *testing.T) {
		g := statefulGuest(t)
		g.shared()
		v := g.disk(16, volume.Ext4)
		must(t, v.stage())
		must(t, os.Mkdir(filepath.Join(g.Dir, "aside"), 0o755))
		n := inNamespace(t, "unchanged", `mount --bind "$1" "$2"; mount --make-private "$2"`, v.staging(),
			filepath.Join(g.Dir, "aside"))
		v.held(fmt.Sprintf("process %d", n.pid), "aside")
		n.leave()
		must(t, v.unstage())
	})
	t.Run("a copy that stays because of a mount in it is found afterwards",
		func(t *testing.T) {
			g := statefulGuest(t)
			g.shared()
			v := g.disk(16, volume.Ext4)
			must(t, v.stage())
			n := inNamespace(t, "unchanged",
				`mount --make-private "$1"; mount -t tmpfs none "$1/lost+found"`, v.staging())
			for range 2 {
				csitest.Want(t, v.unstageSoon(), codes.Internal, csierr.StillMounted, fmt.Sprintf("process %d",
					n.pid))
			}
			n.leave()
			must(t, v.unstage())
		})
	t.Run("a copy in the driver's own namespace is no user", func(t *testing.T) {
		g := statefulGuest(t)
		g.shared()
		aside := filepath.Join(g.Dir, "aside")
		must(t, os.Mkdir(aside, 0o755))
		guesttest.Run(t, "mount", "--bind", filepath.Join(g.Dir, "kubelet"), aside)
		v := g.disk(16, volume.Ext4)
		must(t, v.stage())
		g.hasMounts(4)
		must(t, v.unstage())
		g.hasMounts(2)
	})
}

func TestUnpublishRefusesATargetThatIsMountedInAnotherNamespace(t *testing.T) { // UP-6
	for _, fsType := range []string{volume.Ext4, "block"} {
		t.Run(fsType, func(t *testing.T) {
			v := statefulGuest(t).disk(16, fsType)
			v.up("pod")
			n := inNamespace(t, "private", "")
			before := n.mounts(v.guest.Dir)
			csitest.Want(t, v.unpublishSoon("pod"), codes.Internal, csierr.StillMounted, strconv.Itoa(n.pid))
			// The same holds if nothing is mounted here: the kernel would unmount the other namespace's
			// mount when the path is removed.
			guesttest.Run(t, "umount", v.guest.path("pod"))
			csitest.Want(t, v.unpublishSoon("pod"), codes.Internal, csierr.StillMounted)
			if after := n.mounts(v.guest.Dir); !slices.Equal(after, before) {
				t.Errorf("there was %q and is %q", before, after)
			}
			n.leave()
			v.down("pod")
		})
	}
}

func TestUnstageAndUnpublishLeaveForeignMountsAlone(t *testing.T) {
	foreign := map[string]func(t *testing.T, g *testGuest, path string){
		"a tmpfs (UP-6, NU-5)": func(t *testing.T, _ *testGuest, path string) {
			guesttest.Run(t, "mount", "-t", "tmpfs", "none", path)
		},
		"a disk of no instance": func(t *testing.T, g *testGuest, path string) {
			d := g.Attach(guesttest.OtherSerial, 16*guesttest.MiB)
			g.Unplug(d)
			guesttest.Run(t, "mke2fs", "-q", "-t", "ext4", d.Loop)
			guesttest.Run(t, "mount", d.Loop, path)
		},
		"an administrator's bind mount of a disk's node": func(t *testing.T, g *testGuest, path string) {
			d := g.Attach(guesttest.OtherSerial, 16*guesttest.MiB)
			must(t, os.Remove(path))
			must(t, os.WriteFile(path, nil, 0o600))
			guesttest.Run(t, "mount", "--bind", g.Dev(d.Name), path)
		},
		"a btrfs of two disks": func(t *testing.T, g *testGuest, path string) {
			a, b := g.Attach("backup-a", 512*guesttest.MiB), g.Attach("backup-b", 512*guesttest.MiB)
			guesttest.Run(t, "mkfs.btrfs", "-q", "-d", "raid0", a.Loop, b.Loop)
			scanBtrfs(t, g.Dev(b.Name))
			must(t, unix.Mount(g.Dev(a.Name), path, "btrfs", 0, ""))
		},
	}
	for _, fsType := range volume.Filesystems {
		foreign["an administrator's "+fsType] = func(t *testing.T, g *testGuest, path string) {
			d := g.Attach("backup", 512*guesttest.MiB)
			guesttest.Run(t, "mkfs."+fsType, "-q", d.Loop)
			must(t, unix.Mount(g.Dev(d.Name), path, fsType, 0, ""))
		}
	}
	for name, mountAt := range foreign {
		t.Run(name, func(t *testing.T) {
			v := statefulGuest(t).disk(64, volume.Ext4)
			must(t, os.Mkdir(v.staging(), 0o755))
			mountAt(t, v.guest, v.staging())
			csitest.Want(t, v.unpublish("staging "+v.disk.Serial), codes.Internal,
				csierr.PublishedDifferently)
			csitest.Want(t, v.unstage(), codes.Internal, csierr.StagedDifferently)
			csitest.Want(t, v.stage(), codes.AlreadyExists, csierr.StagedDifferently)
			csitest.Want(t, v.publish("pod"), codes.FailedPrecondition, csierr.NotStaged)
			v.guest.hasMounts(1)
		})
	}
}
