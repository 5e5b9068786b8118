//go:build linux

package node

import (
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func TestNodeUnpublishVolume(t *testing.T) { // D-36, D-37
	setUp := func(t *testing.T, fsType string) testVolume {
		v := newGuest(t).disk(512, fsType)
		must(t, v.stage())
		must(t, v.publish("pod"))
		return v
	}
	t.Run("UP-2 what is not published, and a path not there, are successes", func(t *testing.T) {
		v := setUp(t, volume.Ext4)
		must(t, v.unpublish("other"))
		must(t, v.unpublish("no/such/path"))
		must(t, os.Mkdir(v.guest.path("empty"), 0o755))
		must(t, v.unpublish("empty"))
		absent(t, v.guest.path("empty"))
	})
	t.Run("UP-4 an unknown volume has nothing to unpublish", func(t *testing.T) {
		v := testVolume{guest: newGuest(t), ID: "no-uuid"}
		must(t, v.unpublish("pod"))
	})
	t.Run("UP-3 every layer of mounts goes", func(t *testing.T) {
		v := setUp(t, volume.Ext4)
		guesttest.Run(t, "mount", "--bind", v.staging(), v.guest.path("pod"))
		must(t, v.unpublish("pod"))
		must(t, v.unstage())
	})
	for _, fsType := range []string{volume.Ext4, volume.XFS} {
		t.Run("UP-5 a dead "+fsType+" filesystem is taken down all the same", func(t *testing.T) {
			v := setUp(t, fsType)
			shutDown(t, v.staging())
			if err := os.WriteFile(filepath.Join(v.guest.path("pod"), "x"), nil, 0o600); err == nil {
				t.Fatal("the filesystem still takes files")
			}
			must(t, v.unpublish("pod"))
			must(t, v.unstage())
			v.guest.hasMounts(0)
		})
	}
	t.Run("UP-6 a busy target is an error, and everything stays", func(t *testing.T) {
		v := setUp(t, volume.Ext4)
		f, err := os.Create(filepath.Join(v.guest.path("pod"), "open"))
		must(t, err)
		csitest.Want(t, v.unpublish("pod"), codes.Internal, csierr.StillMounted)
		must(t, f.Close())
		must(t, v.unpublish("pod"))
	})
	t.Run("UP-6 files below a target that is not mounted are never removed", func(t *testing.T) {
		v := setUp(t, volume.Ext4)
		must(t, v.unpublish("pod"))
		must(t, os.Mkdir(v.guest.path("pod"), 0o755))
		file := filepath.Join(v.guest.path("pod"), "precious")
		must(t, os.WriteFile(file, []byte("x"), 0o600))
		csitest.Want(t, v.unpublish("pod"), codes.Internal, csierr.TargetNotEmpty)
		csitest.Want(t, v.unpublish("pod/precious"), codes.Internal, csierr.TargetNotEmpty)
		if _, err := os.Stat(file); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("a block volume whose disk was yanked away is unpublished", func(t *testing.T) {
		v := setUp(t, "block")
		v.guest.Unplug(v.disk)
		must(t, v.unpublish("pod"))
		must(t, v.unstage())
	})
}

// breakExt makes ext4 find an error, after which it is read-only.
func breakExt(t *testing.T, v testVolume) {
	t.Helper()
	guesttest.Run(t, "mount", "-o", "remount,errors=remount-ro", v.staging())
	trigger := filepath.Join("/sys/fs/ext4", filepath.Base(v.disk.Loop), "trigger_fs_error")
	must(t, os.WriteFile(trigger, []byte("x"), 0o200))
}

// turnReadOnly does to a mounted filesystem what ext4 does after errors: the filesystem becomes
// read-only, not the mount.
func turnReadOnly(t *testing.T, path string) {
	t.Helper()
	guesttest.Run(t, "mount", "-o", "remount,ro", path)
	must(t, unix.MountSetattr(unix.AT_FDCWD, path, 0,
		&unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY}))
}

// shutDown makes a mounted ext4 or xfs answer everything with EIO, as a lost device does.
func shutDown(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer func() { _ = f.Close() }()
	const shutdown = 0x8004587d // EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN
	flags := uint32(2)          // without flushing the log
	must(t, blockdev.Ioctl(int(f.Fd()), shutdown, unsafe.Pointer(&flags)))
}
