//go:build linux

package node

import (
	"bufio"
	"bytes"
	"errors"
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

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// twoVolumes returns a published volume, and an unpublished one that is staged if known is true.
func twoVolumes(t *testing.T, fsType string, known bool) (v, other testVolume) {
	g := statefulGuest(t)
	v = g.disk(512, fsType)
	if fsType == volume.Btrfs {
		fsType = volume.Ext4 // mkfs.btrfs cannot parse this guest's escaped paths in the mount table
	}
	other = g.disk(512, fsType, guesttest.OtherSerial)
	v.up("pod")
	if known {
		must(t, other.stage())
	}
	return v, other
}

func TestAVolumeUnderAnotherVolumesMountIsNotUnmounted(t *testing.T) {
	v, other := twoVolumes(t, volume.Ext4, true)
	guesttest.Run(t, "mount", "--bind", other.staging(), v.guest.path("pod"))
	guesttest.Run(t, "mount", "--bind", other.staging(), v.staging())
	same := v.guest.mounts()
	csitest.Want(t, v.unpublish("pod"), codes.Internal, csierr.PublishedDifferently)
	csitest.Want(t, v.unstage(), codes.Internal, csierr.StagedDifferently)
	same()
	guesttest.Run(t, "umount", v.guest.path("pod"))
	guesttest.Run(t, "umount", v.staging())
	v.down("pod")
}

func TestStatsNeverShowAnotherVolume(t *testing.T) { // VS-5
	for _, fsType := range []string{volume.Ext4, volume.Btrfs, "block"} {
		for _, known := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, known to the node %t", fsType, known), func(t *testing.T) {
				v, other := twoVolumes(t, fsType, known)
				_, recorded := v.guest.node().records().of(other.ID).load()
				paths := []string{v.guest.path("pod"), v.staging()}
				if fsType == "block" {
					paths = paths[:1]
				}
				for _, path := range paths {
					stats := func(id string) error {
						return v.ask(&csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: path})
					}
					health := func(id string) error {
						return v.ask(&csi.NodeGetVolumeHealthRequest{VolumeId: id, VolumePublishPath: path})
					}
					must(t, errors.Join(stats(v.ID), health(v.ID)))
					csitest.Want(t, stats(other.ID), codes.NotFound, csierr.VolumeNotAtPath)
					if err := health(other.ID); err == nil ||
						recorded && !csierr.Has(err, csierr.VolumeNotAtPath) {
						t.Errorf("the health of another volume: %v", err)
					}
				}
			})
		}
	}
}

func TestUnstageIgnoresARestoredVolumeWithTheSameUUID(t *testing.T) { // NU-5
	// The filesystem of a restored volume has the UUID of its origin.
	for _, fsType := range []string{volume.Ext4, volume.XFS} {
		t.Run(fsType, func(t *testing.T) {
			origin, _ := twoVolumes(t, fsType, false)
			origin.down("pod")
			g := origin.guest
			copied := g.Attach("csi-restored00000000", 512*guesttest.MiB)
			guesttest.Run(t, "dd", "if="+origin.disk.File, "of="+copied.File, "bs=1M", "conv=notrunc,sparse")
			g.Unplug(origin.disk)
			restored := g.volume(copied, fsType)
			restored.Tag = map[string]string{volume.CtxFilesystemUUID: origin.ID}
			must(t, restored.stage())
			must(t, os.RemoveAll(g.state))
			must(t, origin.unstage()) // a repeated call
			must(t, restored.unstage())
		})
	}
}

func TestUnpublishAndUnstageFailIfTheRecordNamesAnotherDisk(t *testing.T) {
	v := statefulGuest(t).disk(64, volume.Ext4)
	v.up("pod")
	record := filepath.Join(v.guest.state, v.ID+".json")
	right := csitest.Got(os.ReadFile(record))(t)
	wrong := strings.ReplaceAll(string(right), guesttest.Serial, guesttest.OtherSerial)
	must(t, os.WriteFile(record, []byte(wrong), 0o600))
	same := v.guest.mounts()
	csitest.Want(t, v.unpublish("pod"), codes.Internal, csierr.PublishedDifferently)
	csitest.Want(t, v.unstage(), codes.Internal, csierr.StagedDifferently)
	same()
	must(t, os.WriteFile(record, right, 0o600))
	v.down("pod")
}

// replaced gives the volume's device number and name to another disk, and returns a volume on it.
func (v testVolume) replaced(serial, fsType string) testVolume {
	v.guest.t.Helper()
	v.guest.Unplug(v.disk)
	other := *v.disk
	other.Serial = serial
	v.guest.Plug(&other)
	w := v.guest.volume(&other, fsType)
	w.ID = strings.Replace(w.ID, "0b54", "0b55", 1)
	return w
}

func (v testVolume) stats(path string) error {
	return v.ask(&csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: v.guest.path(path)})
}

func TestVolumesAreDistinguishedIfADeviceNumberIsReused(t *testing.T) {
	setUp := func(t *testing.T, fsType string) (v, w testVolume) {
		v = statefulGuest(t).disk(16, "block")
		v.up("dev")
		return v, v.replaced(guesttest.OtherSerial, fsType)
	}
	t.Run("the old target shows no volume and is not republished (VS-5, NP-5)", func(t *testing.T) {
		v, _ := setUp(t, "block")
		csitest.Want(t, v.stats("dev"), codes.NotFound, csierr.VolumeNotAtPath)
		csitest.Want(t, v.ask(&csi.NodeGetVolumeHealthRequest{VolumeId: v.ID,
			VolumePublishPath: v.guest.path("dev")}), codes.NotFound, csierr.VolumeNotAtPath)
		csitest.Want(t, v.publish("dev"), codes.NotFound, csierr.DeviceNotFound)
		v.disk = v.guest.Attach(guesttest.Serial, 16*guesttest.MiB) // with another device number
		csitest.Want(t, v.publish("dev"), codes.AlreadyExists, csierr.PublishedDifferently)
		must(t, v.unpublish("dev"))
		must(t, v.publish("dev"))
		must(t, v.stats("dev"))
	})
	t.Run("the new disk is not used until the old target is unpublished (UP-3)", func(t *testing.T) {
		v, w := setUp(t, volume.Ext4)
		same := w.disk.Same(t)
		csitest.Want(t, w.stage(), codes.FailedPrecondition, csierr.DeviceHeld)
		w.FSType = "block"
		csitest.Want(t, w.publish("other"), codes.FailedPrecondition, csierr.PublishedElsewhere)
		v.down("dev")
		same()
		v.guest.hasMounts(0)
		must(t, w.publish("other"))
	})
}

func TestPublishRefusesAStagingPathWithoutTheVolume(t *testing.T) { // NP-5
	for name, cover := range map[string]func(t *testing.T, v, other testVolume){
		"a directory of the root disk": func(t *testing.T, v, _ testVolume) {
			must(t, unix.Unmount(v.staging(), 0))
		},
		"a bind mount of the root disk": func(t *testing.T, v, _ testVolume) {
			must(t, unix.Unmount(v.staging(), 0))
			guesttest.Run(t, "mount", "--bind", v.guest.path(""), v.staging())
		},
		"a tmpfs over the volume": func(t *testing.T, v, _ testVolume) {
			guesttest.Run(t, "mount", "-t", "tmpfs", "none", v.staging())
		},
		"another volume over the volume": func(t *testing.T, v, other testVolume) {
			guesttest.Run(t, "mount", "--bind", other.staging(), v.staging())
		},
		"a raw device": func(t *testing.T, v, other testVolume) {
			must(t, unix.Unmount(v.staging(), 0))
			must(t, os.Remove(v.staging()))
			must(t, os.WriteFile(v.staging(), nil, 0o600))
			guesttest.Run(t, "mount", "--bind", filepath.Join(v.guest.Dir, "dev", other.disk.Name),
				v.staging())
		},
	} {
		for _, fsType := range []string{volume.Ext4, volume.Btrfs} {
			t.Run(name+", of a "+fsType, func(t *testing.T) {
				v := statefulGuest(t).disk(128, fsType)
				other := v.guest.disk(16, volume.Ext4, guesttest.OtherSerial)
				must(t, v.stage())
				must(t, other.stage())
				cover(t, v, other)
				same := v.guest.mounts()
				csitest.Want(t, v.publish("pod"), codes.FailedPrecondition, csierr.NotStaged)
				same()
				absent(t, v.guest.path("pod"))
				if err := v.stats("staging " + v.Name); err == nil {
					t.Error("the stats show it as the volume's usage")
				}
			})
		}
	}
	t.Run("a new device with the same number is refused", func(t *testing.T) {
		v := statefulGuest(t).disk(16, volume.Ext4)
		must(t, v.stage())
		sequence := filepath.Join(v.guest.Dir, "sys/block", v.disk.Name, "diskseq")
		must(t, os.WriteFile(sequence, []byte("999999999\n"), 0o644))
		csitest.Want(t, v.publish("pod"), codes.FailedPrecondition, csierr.DeviceChanged)
	})
}

func TestStatsFailIfTheVolumeIsNoLongerMounted(t *testing.T) { // VS-2
	for _, fsType := range []string{volume.Ext4, volume.Btrfs} {
		v := newGuest(t).disk(128, fsType)
		must(t, v.stage())
		shown, err := shownAt(v.guest.node().host(), v.staging())
		must(t, err)
		must(t, csitest.Err(shown.statfs(v.staging())))
		must(t, v.unstage())
		_, err = shown.statfs(v.staging())
		csitest.Want(t, csierr.Convert(err, csierr.NodeToolFailed), codes.NotFound,
			csierr.VolumeNotAtPath)
	}
}

// The kernel reuses device names, and for a btrfs the mount table shows the device's name, but not
// the device's number.
func TestStageAcceptsADiskWithTheDeviceNameOfARemovedBtrfs(t *testing.T) {
	g := statefulGuest(t)
	v := g.disk(128, volume.Btrfs)
	v.up("pod")
	g.Unplug(v.disk)
	other := g.Attach(guesttest.OtherSerial, 128*guesttest.MiB)
	g.Unplug(other)
	other.Name = v.disk.Name
	g.Plug(other)
	w := g.volume(other, volume.Ext4) // mkfs.btrfs refuses a device name that is in the mount table
	must(t, w.stage())
	must(t, w.unstage())
	v.down("pod")
}

type neighbour struct {
	t     *testing.T
	pid   int
	leave func()
}

// begin starts a process and waits for its first line. The process must end when its input ends.
func begin(t *testing.T, cmd *exec.Cmd) *neighbour {
	t.Helper()
	input := csitest.Got(cmd.StdinPipe())(t)
	output := csitest.Got(cmd.StdoutPipe())(t)
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

func inNamespace(t *testing.T, propagation, script string, args ...string) *neighbour {
	t.Helper()
	return begin(t, exec.Command("unshare", append([]string{"--mount", "--propagation", propagation,
		"sh", "-c", "set -e; " + script + "\necho ready; read -r x || true", "sh"}, args...)...))
}

func (n *neighbour) name(program string) string {
	return fmt.Sprintf("process %d (%s)", n.pid, program)
}

func (n *neighbour) mounts(dir string) []string {
	n.t.Helper()
	b := csitest.Got(os.ReadFile(filepath.Join("/proc", strconv.Itoa(n.pid), "mountinfo")))(n.t)
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

// held checks that unstage unmounts nothing, and that its error contains the names.
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
		"a btrfs":                                {volume.Btrfs, "", leaveIt},
		"an ext4 that was moved to another path": {volume.Ext4, moved, leaveIt},
		"an ext4 whose disk was removed": {volume.Ext4, "", func(v testVolume) {
			v.guest.Unplug(v.disk)
		}},
		"a raw device": {"block", moved, func(v testVolume) { must(v.guest.t, v.unpublish("dev")) }},
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
	t.Run("unstage waits until another mount namespace has ended", func(t *testing.T) {
		v := statefulGuest(t).disk(16, volume.Ext4)
		must(t, v.stage())
		n := inNamespace(t, "private", "")
		time.AfterFunc(50*time.Millisecond, n.leave) // while unstage waits
		must(t, v.unstage())
	})
}

// sharedGuest returns a guest whose kubelet directory propagates its mounts to other namespaces, as
// on a node whose driver runs in a container. aside is a directory outside of kubelet's directory.
func sharedGuest(t *testing.T) (g *testGuest, aside string) {
	t.Helper()
	g = statefulGuest(t)
	guesttest.Run(t, "mount", "--bind", g.path(""), g.path(""))
	guesttest.Run(t, "mount", "--make-shared", g.path(""))
	aside = filepath.Join(g.Dir, "aside")
	must(t, os.Mkdir(aside, 0o755))
	return g, aside
}

func TestPropagatedCopiesOfAMountDoNotBlockUnstage(t *testing.T) { // B-32
	for _, c := range []struct{ name, propagation, script string }{
		{"a peer", "unchanged", ""},
		{"a slave", "slave", ""},
		{"a slave that is shared itself", "slave", `mount --make-rshared "$1"`},
		{"a peer that shows the directory elsewhere", "unchanged", `mount --bind "$1" "$2"`},
	} {
		for _, fsType := range []string{volume.Ext4, volume.Btrfs, "block"} {
			t.Run(c.name+", "+fsType, func(t *testing.T) {
				g, aside := sharedGuest(t)
				n := inNamespace(t, c.propagation, c.script, g.path(""), aside)
				v := g.disk(128, fsType)
				v.up("pod")
				if got := n.mounts(g.Dir); len(got) < 2 {
					t.Fatalf("nothing has reached the other namespace: %q", got)
				}
				v.down("pod")
				for _, path := range n.mounts(g.Dir) {
					if path != g.path("") && path != aside {
						t.Errorf("the other namespace still has %q", path)
					}
				}
			})
		}
	}
	t.Run("unstage fails for a copy at another path of its namespace", func(t *testing.T) {
		g, aside := sharedGuest(t)
		v := g.disk(16, volume.Ext4)
		must(t, v.stage())
		n := inNamespace(t, "unchanged", `mount --bind "$1" "$2"; mount --make-private "$2"`, v.staging(),
			aside)
		v.held(fmt.Sprintf("process %d", n.pid), "aside")
		n.leave()
		must(t, v.unstage())
	})
	t.Run("a copy that stays mounted is found after the unmount", func(t *testing.T) {
		g, _ := sharedGuest(t)
		v := g.disk(16, volume.Ext4)
		must(t, v.stage())
		n := inNamespace(t, "unchanged",
			`mount --make-private "$1"; mount -t tmpfs none "$1/lost+found"`, v.staging())
		for range 2 {
			csitest.Want(t, v.unstageSoon(), codes.Internal, csierr.StillMounted,
				fmt.Sprintf("process %d", n.pid))
		}
		n.leave()
		must(t, v.unstage())
	})
	t.Run("unstage ignores a copy in the driver's own namespace", func(t *testing.T) {
		g, aside := sharedGuest(t)
		guesttest.Run(t, "mount", "--bind", g.path(""), aside)
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
			// Unpublish also fails if only the other namespace has the mount, because removing the path
			// would unmount it there.
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

func TestNodeCallsFailAtAForeignMountWithoutUnmountingIt(t *testing.T) {
	foreign := map[string]func(t *testing.T, g *testGuest, path string){
		"a tmpfs (UP-6, NU-5)": func(t *testing.T, _ *testGuest, path string) {
			guesttest.Run(t, "mount", "-t", "tmpfs", "none", path)
		},
		"a disk that the guest lacks": func(t *testing.T, g *testGuest, path string) {
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
