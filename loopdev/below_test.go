//go:build linux

package loopdev_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// attachIn makes the directory and attaches a new file in it.
func attachIn(t *testing.T, dir string) loopdev.Device {
	t.Helper()
	path := filepath.Join(dir, "disk")
	must(t, os.MkdirAll(dir, 0o755))
	must(t, os.Rename(newFile(t, mib), path))
	t.Cleanup(func() { releaseBelow(t, dir) })
	return attach(t, loopdev.Config{Path: path, Serial: serial(t)})
}

func TestDetachBelowReleasesTheDevicesOfADirectoryAndNoOther(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "work")
	inside := attachIn(t, filepath.Join(dir, "rack", "disks"))
	outside := attachIn(t, dir+"-2")
	found, err := loopdev.DetachBelow(t.Context(), dir)
	must(t, err)
	if diff := cmp.Diff([]loopdev.Device{inside}, found); diff != "" {
		t.Errorf("DetachBelow differs from what was attached below (-attached +found):\n%s", diff)
	}
	if left := mustFind(t, inside.Serial); len(left) != 0 {
		t.Errorf("after DetachBelow there is %+v", left)
	}
	if left := mustFind(t, outside.Serial); len(left) != 1 {
		t.Errorf("DetachBelow(%s) released %s", dir, outside.BackingFile)
	}
}

func TestDetachBelowFindsAFileThatWasOpenedAtAnotherPath(t *testing.T) {
	file := newFile(t, mib)
	dir, elsewhere := filepath.Dir(file), t.TempDir()
	must(t, unix.Mount(dir, elsewhere, "", unix.MS_BIND, ""))
	d, err := loopdev.Attach(t.Context(), loopdev.Config{
		Path: filepath.Join(elsewhere, filepath.Base(file)), Serial: serial(t),
	})
	// The file stays open in a mount that does not exist any more, as in a container's mount.
	must(t, errors.Join(err, unix.Unmount(elsewhere, unix.MNT_DETACH)))
	if told := mustFind(t, d.Serial)[0].BackingFile; strings.HasPrefix(told, dir+"/") {
		t.Fatalf("the kernel tells %s, want a path that is not in %s", told, dir)
	}
	if n := releaseBelow(t, dir); n != 1 || len(mustFind(t, d.Serial)) != 0 {
		t.Errorf("DetachBelow found %d devices, want 1; left: %+v", n, mustFind(t, d.Serial))
	}
}

func TestDetachBelowReleasesADeviceOnTheNodeOfAnother(t *testing.T) {
	dir := t.TempDir()
	lower := attachIn(t, dir)
	node := filepath.Join(dir, "node")
	number := int(unix.Mkdev(lower.Major, lower.Minor))
	must(t, unix.Mknod(node, unix.S_IFBLK|0o600, number))
	if out, err := exec.Command("losetup", "--find", node).CombinedOutput(); err != nil {
		t.Fatalf("losetup --find %s: %v: %s", node, err, out)
	}
	if n := releaseBelow(t, dir); n != 2 {
		t.Errorf("DetachBelow found %d devices, want both", n)
	}
	if left := mustFind(t, lower.Serial); len(left) != 0 {
		t.Errorf("after DetachBelow there is %+v", left)
	}
}

func TestOnReportsWhetherADeviceBacksAnother(t *testing.T) {
	own, foreign, dir := attachIn(t, t.TempDir()), attachIn(t, t.TempDir()), t.TempDir()
	t.Cleanup(func() { releaseBelow(t, dir) })
	// In a pod, the node has another path, too.
	node := filepath.Join(dir, "volume")
	must(t, unix.Mknod(node, unix.S_IFBLK|0o600, int(unix.Mkdev(own.Major, own.Minor))))
	out, err := exec.Command("losetup", "--find", "--show", node).CombinedOutput()
	if err != nil {
		t.Fatalf("losetup --find %s: %v: %s", node, err, out)
	}
	all, err := loopdev.List()
	must(t, err)
	i := slices.IndexFunc(all, func(d loopdev.Device) bool {
		return d.Path == strings.TrimSpace(string(out))
	})
	upper := all[i]
	if !upper.On(own) || upper.On(foreign) || own.On(foreign) || own.On(own) {
		t.Errorf("%s with the number %x: on its own %t, on another %t; that on another %t", upper.Path,
			upper.BackingNumber, upper.On(own), upper.On(foreign), own.On(foreign))
	}
}
