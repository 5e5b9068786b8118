//go:build linux

package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func TestNodeUnstageVolume(t *testing.T) {
	setUp := func(t *testing.T, fsType string) testVolume {
		v := newGuest(t).disk(512, fsType)
		must(t, v.stage())
		return v
	}
	t.Run("NU-2 what is not staged, and a path that is not there, are successes", func(t *testing.T) {
		v := setUp(t, volume.Ext4)
		must(t, v.unstage())
		must(t, v.unstage())
		if _, err := os.Stat(v.staging()); err != nil {
			t.Fatalf("the CO's directory is gone: %v", err)
		}
		must(t, os.Remove(v.staging()))
		must(t, v.unstage())
	})
	t.Run("NU-3 an unknown volume has nothing to unstage", func(t *testing.T) {
		must(t, testVolume{guest: newGuest(t), ID: "no-uuid"}.unstageAt(t.TempDir()))
	})
	t.Run("NU-4 every layer goes, and the data are on the disk", func(t *testing.T) {
		v := newGuest(t).disk(16, volume.Ext4)
		must(t, v.stage())
		must(t, os.WriteFile(filepath.Join(v.staging(), "hello"), []byte("rack-data-here"), 0o600))
		guesttest.Run(t, "mount", "--bind", v.staging(), v.staging())
		must(t, v.unstage())
		v.guest.hasMounts(0)
		if b, err := os.ReadFile(v.disk.File); err != nil || !strings.Contains(string(b),
			"rack-data-here") {
			t.Fatalf("the data are not on the disk: %v", err)
		}
	})
	for _, fsType := range volume.Filesystems {
		t.Run("NU-5 a published "+fsType+" volume stays staged", func(t *testing.T) {
			v := setUp(t, fsType)
			must(t, v.publish("pod"))
			same := v.guest.mounts()
			csitest.Want(t, v.unstage(), codes.Internal, csierr.StillMounted)
			same()
			must(t, v.unpublish("pod"))
			must(t, v.unstage())
		})
	}
	t.Run("NU-5 a volume that is mounted where it cannot be seen is not released", func(t *testing.T) {
		v := setUp(t, volume.Ext4)
		// A detached mount is in no mount table, like one of another mount namespace.
		elsewhere, err := mount.Clone(v.staging(), volume.Ext4)
		must(t, err)
		n, req := v.guest.impatient(), v.unstageRequest()
		csitest.Want(t, csitest.Call(t.Context(), n, req), codes.Internal, csierr.StillMounted)
		csitest.Want(t, csitest.Call(t.Context(), n, req), codes.Internal, csierr.StillMounted)
		must(t, elsewhere.Close())
		must(t, csitest.Call(t.Context(), n, req))
	})
	t.Run("a staging mount that another mount hides is told as that", func(t *testing.T) {
		v := setUp(t, volume.Ext4)
		guesttest.Run(t, "mount", "-t", "tmpfs", "none", v.guest.path(""))
		csitest.Want(t, v.unstage(), codes.Internal, csierr.StillMounted, "hides")
		must(t, unix.Unmount(v.guest.path(""), 0))
		must(t, v.unstage())
	})
	t.Run("a volume whose disk was yanked away is unstaged", func(t *testing.T) {
		for _, fsType := range volume.Filesystems {
			v := setUp(t, fsType)
			v.guest.Unplug(v.disk)
			must(t, v.unstage())
		}
	})
}

func TestNU5ADeviceThatCannotBeAskedIsNotTakenForFree(t *testing.T) {
	g := newGuest(t)
	g.Attach(guesttest.Serial, 8*guesttest.MiB)
	v := heldVolume{node: g.node()}
	ds := g.node().host()
	d, err := ds.Lookup(guesttest.Serial)
	must(t, err)
	held, err := ds.Open(d)
	must(t, err)
	defer func() { _ = held.Close() }()
	must(t, v.awaitFree(t.Context(), held, false))
	var files unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &files))
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Max: files.Max}))
	err = csierr.Convert(v.awaitFree(t.Context(), held, false), csierr.NodeToolFailed)
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &files))
	csitest.Want(t, err, codes.Internal, csierr.NodeToolFailed)
}
