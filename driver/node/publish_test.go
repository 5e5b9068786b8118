//go:build linux

package node

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

const (
	writer       = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	singleWriter = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	multiWriter  = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
)

func TestPublishVerifiesTheStagingMount(t *testing.T) { // D-29
	t.Run("a volume staged with another filesystem is not published (NP-5)", func(t *testing.T) {
		v := newGuest(t).disk(8, volume.Ext4)
		must(t, v.stage())
		v.FSType = volume.XFS
		csitest.Want(t, v.publish("pod"), codes.FailedPrecondition, csierr.NotStaged)
	})
	for _, c := range []struct {
		name, fsType string
		fail         func(*testing.T, testVolume)
	}{
		{"an ext4 that is read-only after errors", volume.Ext4, breakExt},
		{"an ext4 that was shut down", volume.Ext4, shutDown},
		{"an xfs that was shut down", volume.XFS, shutDown},
		{"an ext4 whose disk went and came back", volume.Ext4, forceDetach},
		{"an xfs whose disk went and came back", volume.XFS, forceDetach},
		{"a btrfs whose disk went and came back", volume.Btrfs, forceDetach},
	} {
		t.Run(c.name+" is staged again after its last unpublish", func(t *testing.T) {
			v := newGuest(t).disk(512, c.fsType)
			v.Mode = multiWriter
			v.up("pod")
			guesttest.Run(t, "sync", "--file-system", v.staging())
			c.fail(t, v)
			csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.FilesystemFailed)
			if err := v.publish("pod2"); err == nil {
				t.Fatal("it is published to one more workload")
			}
			must(t, v.unpublish("pod"))
			v.up("pod")
			must(t, os.WriteFile(filepath.Join(v.guest.path("pod"), "x"), nil, 0o600))
			v.down("pod")
		})
	}
	t.Run("a filesystem that turned read-only can be published for reading", func(t *testing.T) {
		v := newGuest(t).disk(8, volume.Ext4)
		must(t, v.stage())
		turnReadOnly(t, v.staging())
		csitest.Want(t, v.publish("pod"), codes.FailedPrecondition, csierr.FilesystemFailed)
		must(t, v.publishReadOnly("pod"))
	})
}

func TestRepeatedPublishesReturnTheCodesThatCSIRequires(t *testing.T) { // NP-6, NP-7, NP-8
	for _, fsType := range []string{volume.Ext4, volume.Btrfs, "block"} {
		for _, mode := range []csi.VolumeCapability_AccessMode_Mode{writer, singleWriter, multiWriter} {
			t.Run(fsType+" with "+mode.String(), func(t *testing.T) {
				v := newGuest(t).disk(128, fsType)
				v.Mode = mode
				v.up("pod")
				same := v.guest.mounts()
				must(t, v.publish("pod"))
				csitest.Want(t, v.publishReadOnly("pod"), codes.AlreadyExists, csierr.PublishedDifferently)
				same()
				if err := v.publish("pod2"); mode == multiWriter {
					must(t, err)
				} else {
					csitest.Want(t, err, codes.FailedPrecondition, csierr.PublishedElsewhere)
					absent(t, v.guest.path("pod2"))
				}
			})
		}
	}
	t.Run("another capability is refused at any target (NP-7, NP-8)", func(t *testing.T) {
		v := newGuest(t).disk(8, volume.Ext4)
		v.Mode = multiWriter
		v.up("pod")
		v.Flags = []string{"noexec"}
		csitest.Want(t, v.publish("pod"), codes.AlreadyExists, csierr.PublishedDifferently)
		csitest.Want(t, v.publish("pod2"), codes.FailedPrecondition, csierr.PublishedElsewhere)
	})
	t.Run("a workload's mount of a directory in the volume is no publication", func(t *testing.T) {
		v := newGuest(t).disk(8, volume.Ext4)
		must(t, v.stage())
		// The name of the directory looks like that of a disk's device node.
		sub := filepath.Join(v.staging(), "nvme0n1")
		must(t, os.Mkdir(sub, 0o755))
		must(t, os.Mkdir(v.guest.path("sub"), 0o755))
		guesttest.Run(t, "mount", "--bind", sub, v.guest.path("sub"))
		must(t, v.publish("pod"))
		must(t, v.unpublish("pod"))
		csitest.Want(t, v.unstage(), codes.Internal, csierr.StillMounted)
		guesttest.Run(t, "umount", v.guest.path("sub"))
		must(t, v.unstage())
	})
	t.Run("a publication has its own mount flags and the staging mount's", func(t *testing.T) {
		v := newGuest(t).disk(8, volume.Ext4)
		v.Flags = []string{"nodev"}
		must(t, v.stage())
		v.Flags = []string{"noexec", "noatime", selinuxFlag} // the label has no effect here
		for range 2 {
			must(t, v.publish("pod"))
		}
		table := csitest.Got(mount.ReadTable())(t)
		if got := mount.Flags(table.Top(v.guest.path("pod"))); !slices.Equal(got,
			[]string{"noatime", "nodev", "noexec"}) {
			t.Fatalf("flags are %q", got)
		}
	})
}

func TestReadOnlyPublicationsRefuseWrites(t *testing.T) {
	for _, fsType := range volume.Filesystems {
		t.Run(fsType+": only a read-only publication refuses writes (NP-9)", func(t *testing.T) {
			v := newGuest(t).disk(512, fsType)
			v.Mode = multiWriter
			must(t, v.stage())
			for range 2 {
				must(t, v.publishReadOnly("reader"))
			}
			must(t, v.publish("writer"))
			if err := os.WriteFile(filepath.Join(v.guest.path("reader"), "x"), nil, 0o600); !errors.Is(err,
				unix.EROFS) {
				t.Fatalf("a write through the read-only publication: %v", err)
			}
			must(t, os.WriteFile(filepath.Join(v.guest.path("writer"), "x"), nil, 0o600))
			must(t, v.unpublish("reader"))
			v.down("writer")
		})
	}
	t.Run("a device is read-only until its last publication ends (NP-9)", func(t *testing.T) {
		v := newGuest(t).disk(8, "block")
		v.Mode = multiWriter
		must(t, v.stage())
		for range 2 {
			must(t, v.publishReadOnly("a"))
		}
		must(t, v.publishReadOnly("b"))
		if err := writeTo(v.guest.path("a")); err == nil {
			t.Fatal("the read-only device was written")
		}
		csitest.Want(t, v.publish("c"), codes.FailedPrecondition, csierr.PublishedElsewhere)
		must(t, v.unpublish("a"))
		if err := writeTo(v.guest.path("b")); err == nil {
			t.Fatal("the device became writable while a read-only publication is left")
		}
		must(t, v.unpublish("b"))
		must(t, v.publish("c"))
		must(t, writeTo(v.guest.path("c")))
		csitest.Want(t, v.publishReadOnly("d"), codes.FailedPrecondition, csierr.PublishedElsewhere)
	})
}

func TestAMountOfAnotherInstancesDeviceIsNotTakenForAPublication(t *testing.T) {
	g := newGuest(t)
	v := g.disk(8, "block")
	// Another instance has published a device node that has the same number as this disk's device.
	other := newGuest(t)
	stale := filepath.Join(other.Dir, "dev/nvme1n1")
	major, minor, err := blockdev.NumberAt(v.disk.Loop)
	must(t, err)
	must(t, unix.Mknod(stale, unix.S_IFBLK|0o660, int(unix.Mkdev(major, minor))))
	must(t, os.WriteFile(other.path("pod"), nil, 0o600))
	guesttest.Run(t, "mount", "--bind", stale, other.path("pod"))
	must(t, v.publish("pod"))
	must(t, v.unpublish("pod"))

	// A bind mount of a device node is a publication, even after Unplug and Plug replaced the node.
	must(t, os.WriteFile(g.path("old"), nil, 0o600))
	guesttest.Run(t, "mount", "--bind", filepath.Join(g.Dir, "dev", v.disk.Name), g.path("old"))
	g.Unplug(v.disk)
	g.Plug(v.disk)
	csitest.Want(t, v.publish("pod"), codes.FailedPrecondition, csierr.PublishedElsewhere)
	v.FSType = volume.Ext4
	csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DeviceHeld)
}

func TestPublishRefusesAnInvalidTarget(t *testing.T) { // NP-10
	v := newGuest(t).disk(8, volume.Ext4)
	must(t, v.stage())
	must(t, os.WriteFile(v.guest.path("file"), []byte("mine"), 0o600))
	must(t, os.Symlink("/etc", v.guest.path("link")))
	for _, target := range []string{"file", "link", "no/such/pod"} {
		csitest.Want(t, v.publish(target), codes.InvalidArgument, csierr.PathInvalid)
	}
	holds(t, v.guest.path("file"), "mine")
	must(t, os.Mkdir(v.guest.path("pod"), 0o755)) // left empty by a call that was cut off
	must(t, v.publish("pod"))
}

func writeTo(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt([]byte("writeTo"), 4096)
	return errors.Join(err, f.Sync(), f.Close())
}

func TestUnpublishUnmountsTheVolumeAndRemovesTheTarget(t *testing.T) { // D-36, D-37
	v := newGuest(t).disk(16, volume.Ext4)
	v.up("pod")
	t.Run("unpublish succeeds without a volume or a target (UP-2, UP-4)", func(t *testing.T) {
		must(t, testVolume{guest: newGuest(t), ID: "no-uuid"}.unpublish("pod"))
		must(t, os.Mkdir(v.guest.path("empty"), 0o755))
		for _, target := range []string{"other", "no/such/path", "empty"} {
			must(t, v.unpublish(target))
			absent(t, v.guest.path(target))
		}
	})
	t.Run("a busy target is an error and stays mounted (UP-6)", func(t *testing.T) {
		f := csitest.Got(os.Create(filepath.Join(v.guest.path("pod"), "open")))(t)
		csitest.Want(t, v.unpublish("pod"), codes.Internal, csierr.StillMounted)
		must(t, f.Close())
	})
	t.Run("all mounts at the target are unmounted (UP-3)", func(t *testing.T) {
		guesttest.Run(t, "mount", "--bind", v.staging(), v.guest.path("pod"))
		must(t, v.unpublish("pod"))
		v.guest.hasMounts(1)
	})
	t.Run("files below a target that is not mounted are never removed (UP-6)", func(t *testing.T) {
		file := filepath.Join(v.guest.path("pod"), "precious")
		must(t, os.Mkdir(v.guest.path("pod"), 0o755))
		must(t, os.WriteFile(file, []byte("x"), 0o600))
		csitest.Want(t, v.unpublish("pod"), codes.Internal, csierr.TargetNotEmpty)
		csitest.Want(t, v.unpublish("pod/precious"), codes.Internal, csierr.TargetNotEmpty)
		holds(t, file, "x")
	})
	must(t, v.unstage())
}

func breakExt(t *testing.T, v testVolume) {
	t.Helper()
	guesttest.Run(t, "mount", "-o", "remount,errors=remount-ro", v.staging())
	trigger := filepath.Join("/sys/fs/ext4", filepath.Base(v.disk.Loop), "trigger_fs_error")
	must(t, os.WriteFile(trigger, []byte("x"), 0o200))
}

// turnReadOnly makes a mounted filesystem read-only, but not its mount, as ext4 does after errors.
func turnReadOnly(t *testing.T, path string) {
	t.Helper()
	guesttest.Run(t, "mount", "-o", "remount,ro", path)
	must(t, unix.MountSetattr(unix.AT_FDCWD, path, 0,
		&unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY}))
}

// forceDetach removes the disk of a mounted volume, and attaches a copy of it with the same serial
// and device name.
func forceDetach(t *testing.T, v testVolume) {
	t.Helper()
	name, copied := v.disk.Name, v.disk.Copy(t)
	v.guest.Unplug(v.disk)
	*v.disk = *v.guest.AttachFile(guesttest.Serial, copied)
	v.guest.Unplug(v.disk)
	v.disk.Name = name
	v.guest.Plug(v.disk)
}

// shutDown makes a mounted ext4 or xfs answer every call with EIO, as after the loss of its device.
func shutDown(t *testing.T, v testVolume) {
	t.Helper()
	f := csitest.Got(os.Open(v.staging()))(t)
	defer func() { _ = f.Close() }()
	const shutdown = 0x8004587d // EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN
	flags := uint32(2)          // without flushing the log
	must(t, blockdev.Ioctl(int(f.Fd()), shutdown, unsafe.Pointer(&flags)))
}

func TestUnstageUnmountsAndReleasesTheVolume(t *testing.T) {
	v := newGuest(t).disk(16, volume.Ext4)
	must(t, v.stage())
	t.Run("all mounts are unmounted, and the data are on the disk (NU-4)", func(t *testing.T) {
		must(t, os.WriteFile(filepath.Join(v.staging(), "hello"), []byte("rack-data-here"), 0o600))
		guesttest.Run(t, "mount", "--bind", v.staging(), v.staging())
		must(t, v.unstage())
		v.guest.hasMounts(0)
		if b, err := os.ReadFile(v.disk.File); err != nil || !strings.Contains(string(b),
			"rack-data-here") {
			t.Fatalf("the data are not on the disk: %v", err)
		}
	})
	t.Run("unstage succeeds without a staged volume or a disk (NU-2, NU-3)", func(t *testing.T) {
		must(t, v.unstage())
		must(t, exists(v.staging())) // the directory is the orchestrator's
		must(t, os.Remove(v.staging()))
		must(t, v.unstage())
		must(t, testVolume{guest: newGuest(t), ID: "no-uuid", Staging: t.TempDir()}.unstage())
	})
	must(t, v.stage())
	t.Run("a volume with a hidden mount is not released (NU-5)", func(t *testing.T) {
		// A detached mount is in no mount table, like a mount in a namespace that is not visible.
		elsewhere := csitest.Got(mount.Clone(v.staging(), volume.Ext4))(t)
		n, req := v.guest.impatient(), v.unstageRequest()
		for range 2 {
			csitest.Want(t, csitest.Call(t.Context(), n, req), codes.Internal, csierr.StillMounted)
		}
		must(t, elsewhere.Close())
		must(t, csitest.Call(t.Context(), n, req))
	})
	must(t, v.stage())
	t.Run("the error tells that another mount hides the staging mount", func(t *testing.T) {
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
	d := csitest.Got(v.node.host().Lookup(guesttest.Serial))(t)
	held, err := v.node.host().Open(d)
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

// freeze freezes a filesystem until the test ends. Then it is thawed, even if it is not mounted.
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

func TestStageAndUnstageThawAFrozenFilesystem(t *testing.T) { // NU-4
	setUp := func(t *testing.T, fsType string) testVolume {
		v := statefulGuest(t).disk(512, fsType)
		v.up("pod")
		must(t, os.WriteFile(filepath.Join(v.guest.path("pod"), "hello"), []byte("x"), 0o600))
		must(t, os.Mkdir(filepath.Join(v.guest.path("pod"), "nvme0n1"), 0o700))
		v.freeze("staging " + v.Name)
		return v
	}
	for _, fsType := range short.Some(t, 2, volume.Filesystems) {
		t.Run(fsType+" unmounted while frozen is staged and unstaged (NS-7, NU-5)", func(t *testing.T) {
			v := setUp(t, fsType)
			must(t, v.unpublish("pod"))
			unmount := func() {
				t.Helper()
				must(t, unix.Unmount(v.staging(), 0))
				if err := v.exclusive(); !errors.Is(err, unix.EBUSY) {
					t.Fatalf("the device is free without a thaw (%v); this test shows nothing", err)
				}
			}
			unmount()
			must(t, inTime(t, v.stage))
			must(t, inTime(t, func() error {
				return os.WriteFile(filepath.Join(v.staging(), "more"), nil, 0o600)
			}))
			v.freeze("staging " + v.Name)
			unmount()
			must(t, inTime(t, v.unstage))
			must(t, v.exclusive())
		})
	}
	t.Run("a filesystem stays frozen while its staging path is open (NU-5)", func(t *testing.T) {
		v := setUp(t, volume.Ext4)
		must(t, v.unpublish("pod"))
		root := csitest.Got(os.Open(v.staging()))(t)
		csitest.Want(t, inTime(t, v.unstage), codes.Internal, csierr.StillMounted)
		must(t, root.Close())
		if !frozen(t, v.staging()) {
			t.Error("the refused call has thawed the filesystem")
		}
		must(t, v.unstage())
	})
	// Another mount namespace keeps the staging mount, or a bind mount of its directory nvme0n1.
	for shown, script := range map[string]string{
		"staging mount": "", "directory": `mount --bind "$1/nvme0n1" "$2"; umount "$1"`,
	} {
		fsTypes := short.Some(t, 1, volume.Filesystems)
		if script != "" {
			fsTypes = []string{volume.Ext4} // the mount of a btrfs does not have the number of its disk
		}
		for _, fsType := range fsTypes {
			t.Run(shown+" of another namespace is not thawed by a refused stage: "+fsType,
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
	t.Run("a read-only mount is thawed and released, too (NU-4)", func(t *testing.T) {
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

func TestStatsDoNotWaitForAFrozenFilesystem(t *testing.T) { // VS-3
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

func awaitBlocked(t *testing.T) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); {
		stats := csitest.Got(filepath.Glob("/proc/self/task/*/stat"))(t)
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
