//go:build linux

package node

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func TestAMountThatIsNotTheVolumesIsLeftAlone(t *testing.T) {
	foreign := map[string]func(t *testing.T, g *testGuest, path string){
		"UP-6 NU-5 a tmpfs": func(t *testing.T, _ *testGuest, path string) {
			guesttest.Run(t, "mount", "-t", "tmpfs", "none", path)
		},
		"a disk of no instance": func(t *testing.T, g *testGuest, path string) {
			d := g.Attach(guesttest.OtherSerial, 16*guesttest.MiB)
			g.Unplug(d)
			guesttest.Run(t, "mke2fs", "-q", "-t", "ext4", d.Loop)
			guesttest.Run(t, "mount", d.Loop, path)
		},
		"an administrator's bind of a disk's node": func(t *testing.T, g *testGuest, path string) {
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

// TestAWorkloadsFUSEHoldsUpNoUnstage has a mount namespace in which a file named like a disk's node
// is mounted below a FUSE that does not answer.
func TestAWorkloadsFUSEHoldsUpNoUnstage(t *testing.T) {
	v := statefulGuest(t).disk(64, volume.Ext4)
	must(t, v.stage())
	x := filepath.Join(t.TempDir(), "x")
	tm, over := filepath.Join(x, "t"), filepath.Join(x, "over")
	must(t, os.MkdirAll(tm, 0o755))
	must(t, os.MkdirAll(over, 0o755))
	must(t, unix.Mount("tmpfs", tm, "tmpfs", 0, ""))
	must(t, os.WriteFile(filepath.Join(tm, "nvme0n1"), nil, 0o600))
	must(t, os.WriteFile(filepath.Join(over, "f"), nil, 0o600))
	must(t, unix.Mount(filepath.Join(tm, "nvme0n1"), filepath.Join(over, "f"), "", unix.MS_BIND, ""))
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	must(t, err)
	defer func() { _ = fuse.Close() }()
	must(t, unix.Mount("hung", over, "fuse", 0, fmt.Sprintf(
		"fd=%d,rootmode=40000,user_id=0,group_id=0", fuse.Fd())))
	inNamespace(t, "private", "true")
	must(t, unix.Unmount(over, unix.MNT_DETACH))
	must(t, unix.Unmount(filepath.Join(over, "f"), unix.MNT_DETACH))
	must(t, unix.Unmount(tm, unix.MNT_DETACH))
	// The other namespace has a copy of the staging mount, so the call is refused.
	csitest.Want(t, inTime(t, v.unstageSoon), codes.Internal, csierr.StillMounted)
}

func TestARefusedStageThawsNothingThatADirectoryNamedLikeADiskShows(t *testing.T) {
	v := statefulGuest(t).disk(64, volume.Ext4)
	must(t, v.stage())
	sub := filepath.Join(v.staging(), "nvme0n1")
	must(t, os.Mkdir(sub, 0o755))
	mnt := filepath.Join(t.TempDir(), "m")
	must(t, os.Mkdir(mnt, 0o755))
	must(t, unix.Mount(sub, mnt, "", unix.MS_BIND, ""))
	// the neighbour keeps only that mount
	inNamespace(t, "private", `umount "$1"`, v.staging())
	must(t, unix.Unmount(mnt, 0))
	guesttest.Run(t, "fsfreeze", "--freeze", v.staging())
	defer func() {
		// thaw by a fresh mount
		_ = unix.Mount(v.disk.Loop, mnt, "ext4", 0, "")
		if f, err := os.Open(mnt); err == nil {
			const ioctlThaw = 0xC0045878
			_ = unix.IoctlSetInt(int(f.Fd()), ioctlThaw, 0)
			_ = f.Close()
		}
		_ = unix.Unmount(mnt, 0)
	}()
	// as after an unmount by hand
	must(t, unix.Unmount(v.staging(), 0))
	if err := v.stage(); err == nil {
		t.Error("the call says OK")
	}
	must(t, unix.Mount(v.disk.Loop, mnt, "ext4", 0, ""))
	if !frozen(t, mnt) {
		t.Error("a refused NodeStage has thawed the filesystem")
	}
	_ = unix.Unmount(mnt, 0)
}
