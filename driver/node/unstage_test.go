//go:build linux

package node

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func TestNodeUnstageVolume(t *testing.T) {
	v := newGuest(t).disk(16, volume.Ext4)
	must(t, v.stage())
	t.Run("every layer is unmounted, and the data are on the disk (NU-4)", func(t *testing.T) {
		must(t, os.WriteFile(filepath.Join(v.staging(), "hello"), []byte("rack-data-here"), 0o600))
		guesttest.Run(t, "mount", "--bind", v.staging(), v.staging())
		must(t, v.unstage())
		v.guest.hasMounts(0)
		if b, err := os.ReadFile(v.disk.File); err != nil || !strings.Contains(string(b),
			"rack-data-here") {
			t.Fatalf("the data are not on the disk: %v", err)
		}
	})
	t.Run("it succeeds for an unstaged volume and a missing disk (NU-2, NU-3)", func(t *testing.T) {
		must(t, v.unstage())
		must(t, exists(v.staging())) // the directory is the orchestrator's
		must(t, os.Remove(v.staging()))
		must(t, v.unstage())
		must(t, testVolume{guest: newGuest(t), ID: "no-uuid"}.unstageAt(t.TempDir()))
	})
	must(t, v.stage())
	t.Run("a volume with a hidden mount is not released (NU-5)", func(t *testing.T) {
		// A detached mount is in no mount table, like one of another mount namespace.
		elsewhere, err := mount.Clone(v.staging(), volume.Ext4)
		must(t, err)
		n, req := v.guest.impatient(), v.unstageRequest()
		for range 2 {
			csitest.Want(t, csitest.Call(t.Context(), n, req), codes.Internal, csierr.StillMounted)
		}
		must(t, elsewhere.Close())
		must(t, csitest.Call(t.Context(), n, req))
	})
	must(t, v.stage())
	t.Run("the error names a mount that hides the staging mount", func(t *testing.T) {
		guesttest.Run(t, "mount", "-t", "tmpfs", "none", v.guest.path(""))
		csitest.Want(t, v.unstage(), codes.Internal, csierr.StillMounted, "is hidden by one")
		must(t, unix.Unmount(v.guest.path(""), 0))
		must(t, v.unstage())
	})
}

func TestUnstageFailsIfTheDeviceCannotBeOpened(t *testing.T) { // NU-5
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

// freeze freezes the filesystem of the volume at path. At the end of the test it thaws a filesystem
// that is still frozen, whether or not it is mounted.
func (v testVolume) freeze(path string) {
	t := v.guest.t
	t.Helper()
	guesttest.Run(t, "fsfreeze", "--freeze", v.guest.path(path))
	t.Cleanup(func() {
		if !errors.Is(v.exclusive(), unix.EBUSY) {
			return
		}
		aside := t.TempDir()
		for _, flags := range []string{"ro", "rw"} {
			if exec.Command("mount", "-o", flags, v.disk.Loop, aside).Run() == nil {
				_ = exec.Command("fsfreeze", "--unfreeze", aside).Run()
				guesttest.Run(t, "umount", aside)
			}
		}
	})
}

// frozen reports whether the filesystem is frozen: FIFREEZE fails with EBUSY if it is.
func frozen(t *testing.T, path string) bool {
	t.Helper()
	root, err := os.Open(path)
	must(t, err)
	defer func() { _ = root.Close() }()
	const ioctlFreeze = 0xC0045877 // FIFREEZE
	err = unix.IoctlSetInt(int(root.Fd()), ioctlFreeze, 0)
	if errors.Is(err, unix.EBUSY) {
		return true
	}
	must(t, err)
	must(t, mount.Thaw(root))
	return false
}

func inTime(t *testing.T, act func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- act() }()
	select {
	case err := <-done:
		return err
	case <-time.After(20 * time.Second):
		t.Fatal("the call hangs")
		return nil
	}
}

func (v testVolume) exclusive() error {
	f, err := os.OpenFile(v.disk.Loop, os.O_RDONLY|unix.O_EXCL, 0)
	if err != nil {
		return err
	}
	return f.Close()
}

func TestAFrozenFilesystemIsThawedAndReleased(t *testing.T) { // NU-4
	setUp := func(t *testing.T, fsType string) testVolume {
		v := statefulGuest(t).disk(512, fsType)
		v.up("pod")
		must(t, os.WriteFile(filepath.Join(v.guest.path("pod"), "hello"), []byte("x"), 0o600))
		must(t, os.Mkdir(filepath.Join(v.guest.path("pod"), "nvme0n1"), 0o700))
		v.freeze("staging " + v.Name)
		return v
	}
	for _, fsType := range short.Some(t, 2, volume.Filesystems) {
		t.Run(fsType+" that was unmounted while frozen (NU-5)", func(t *testing.T) {
			v := setUp(t, fsType)
			must(t, v.unpublish("pod"))
			must(t, unix.Unmount(v.staging(), 0))
			if err := v.exclusive(); !errors.Is(err, unix.EBUSY) {
				t.Fatalf("the device is free without a thaw (%v); this test shows nothing", err)
			}
			must(t, inTime(t, v.unstage))
			must(t, v.exclusive())
		})
		t.Run(fsType+" that was unmounted while frozen is staged (NS-7)", func(t *testing.T) {
			v := setUp(t, fsType)
			must(t, v.unpublish("pod"))
			must(t, unix.Unmount(v.staging(), 0))
			must(t, inTime(t, v.stage))
			must(t, inTime(t, func() error {
				return os.WriteFile(filepath.Join(v.staging(), "more"), nil, 0o600)
			}))
			must(t, v.unstage())
		})
	}
	t.Run("it stays frozen while a process has its staging path open (NU-5)", func(t *testing.T) {
		v := setUp(t, volume.Ext4)
		must(t, v.unpublish("pod"))
		root, err := os.Open(v.staging())
		must(t, err)
		csitest.Want(t, inTime(t, v.unstage), codes.Internal, csierr.StillMounted)
		must(t, root.Close())
		if !frozen(t, v.staging()) {
			t.Error("the refused call has thawed the filesystem")
		}
		must(t, v.unstage())
	})
	// The other namespace has the staging mount, or only a directory of it whose name is a disk's.
	for shown, script := range map[string]string{
		"staging mount": "", "directory": `mount --bind "$1/nvme0n1" "$2"; umount "$1"`,
	} {
		fsTypes := short.Some(t, 1, volume.Filesystems)
		if script != "" {
			fsTypes = []string{volume.Ext4} // the mount of a btrfs does not have the number of its disk
		}
		for _, fsType := range fsTypes {
			t.Run("a refused stage does not thaw the "+shown+" of another namespace: "+fsType,
				func(t *testing.T) { // NS-7
					v := setUp(t, fsType)
					must(t, v.unpublish("pod"))
					path := v.staging()
					if script != "" {
						path = t.TempDir()
					}
					n := inNamespace(t, "private", script, v.staging(), path)
					must(t, unix.Unmount(v.staging(), 0))
					csitest.Want(t, inTime(t, v.stage), codes.FailedPrecondition, csierr.DeviceHeld,
						fmt.Sprintf("process %d", n.pid))
					if !frozen(t, fmt.Sprintf("/proc/%d/root/%s", n.pid, path)) {
						t.Error("the filesystem is thawed")
					}
					n.leave()
					must(t, inTime(t, v.stage))
					must(t, v.unstage())
				})
		}
	}
	t.Run("of a disk that is read-only (NU-4)", func(t *testing.T) {
		v := statefulGuest(t).disk(64, volume.Ext4)
		v.Flags = []string{"ro"}
		guesttest.Run(t, "mke2fs", "-q", "-t", "ext4", v.disk.Loop)
		must(t, v.stage())
		v.freeze("staging " + v.Name)
		must(t, unix.Unmount(v.staging(), 0))
		must(t, inTime(t, v.unstage))
		must(t, v.exclusive())
	})
}

func TestStatsOfAFrozenFilesystem(t *testing.T) { // VS-3
	for _, fsType := range short.Some(t, 2, volume.Filesystems) {
		v := newGuest(t).disk(512, fsType)
		v.up("pod")
		v.freeze("staging " + v.Name)
		file := filepath.Join(v.guest.path("pod"), "file")
		written := make(chan error, 1)
		go func() { written <- os.WriteFile(file, []byte("x"), 0o600) }()
		// The writer holds the filesystem's locks while it sleeps in the system call.
		awaitBlocked(t)
		for _, path := range []string{"pod", "staging " + v.Name} {
			must(t, inTime(t, func() error { return v.stats(path) }))
		}
		guesttest.Run(t, "fsfreeze", "--unfreeze", v.staging())
		must(t, <-written)
		v.down("pod")
	}
}

// awaitBlocked waits until a thread of this process sleeps where no signal reaches it.
func awaitBlocked(t *testing.T) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); {
		stats, err := filepath.Glob("/proc/self/task/*/stat")
		must(t, err)
		for _, path := range stats {
			b, err := os.ReadFile(path)
			if err == nil && containsState(b, 'D') {
				return
			}
		}
		<-time.After(time.Millisecond)
	}
	t.Fatal("no writer waits for the thaw")
}

func containsState(stat []byte, state byte) bool {
	i := bytes.LastIndexByte(stat, ')')
	return i >= 0 && i+2 < len(stat) && stat[i+2] == state
}

func exists(path string) error {
	_, err := os.Lstat(path)
	return err
}
