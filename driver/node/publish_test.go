//go:build linux

package node

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"unsafe"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

const (
	writer       = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	singleWriter = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	multiWriter  = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
)

func TestNodePublishVolumeProvesTheStagingMount(t *testing.T) { // D-29
	t.Run("a volume staged with another filesystem is not published (NP-5)", func(t *testing.T) {
		v := newGuest(t).disk(8, volume.Ext4)
		must(t, v.stage())
		v.FSType = volume.XFS
		csitest.Want(t, v.publish("pod"), codes.FailedPrecondition, csierr.NotStaged)
	})
	forceDetach := func(t *testing.T, v testVolume) {
		copied := v.disk.Copy(t)
		v.guest.Unplug(v.disk)
		*v.disk = *v.guest.AttachFile(guesttest.Serial, copied)
	}
	for _, c := range []struct {
		name, fsType string
		fail         func(*testing.T, testVolume)
	}{
		{"an ext4 that is read-only after errors", volume.Ext4, breakExt},
		{"an ext4 that was shut down", volume.Ext4, func(t *testing.T, v testVolume) {
			shutDown(t, v.staging())
		}},
		{"an xfs that was shut down", volume.XFS, func(t *testing.T, v testVolume) {
			shutDown(t, v.staging())
		}},
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

func TestRepeatedPublishesFollowCSIsTable(t *testing.T) { // NP-6, NP-7, NP-8
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
	t.Run("the same target with other mount flags is refused (NP-7)", func(t *testing.T) {
		v := newGuest(t).disk(8, volume.Ext4)
		v.up("pod")
		v.Flags = []string{"noexec"}
		csitest.Want(t, v.publish("pod"), codes.AlreadyExists, csierr.PublishedDifferently)
	})
	t.Run("a second target with another capability is refused (NP-8)", func(t *testing.T) {
		v := newGuest(t).disk(8, volume.Ext4)
		v.Mode = multiWriter
		v.up("pod")
		v.Flags = []string{"noexec"}
		csitest.Want(t, v.publish("pod2"), codes.FailedPrecondition, csierr.PublishedElsewhere)
	})
	t.Run("a workload's own mount of a directory of the volume is no publication", func(t *testing.T) {
		v := newGuest(t).disk(8, volume.Ext4)
		must(t, v.stage())
		// A name that looks like a disk's node.
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
	t.Run("mount flags of a publication apply to it alone", func(t *testing.T) {
		v := newGuest(t).disk(8, volume.Ext4)
		v.Flags = []string{"nodev"}
		must(t, v.stage())
		v.Flags = []string{"noexec", "noatime", selinuxFlag} // the label is the staging mount's
		for range 2 {
			must(t, v.publish("pod"))
		}
		table, err := mount.ReadTable()
		must(t, err)
		if got := mount.Flags(table.Top(v.guest.path("pod"))); !slices.Equal(got,
			[]string{"noatime", "nodev", "noexec"}) {
			t.Fatalf("flags are %q", got)
		}
	})
}

func TestReadOnlyPublications(t *testing.T) {
	for _, fsType := range volume.Filesystems {
		t.Run("a read-only "+fsType+" publication refuses writes, another one takes them (NP-9)",
			func(t *testing.T) {
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
	t.Run("a read-only block publication makes the device read-only until it ends (NP-9)",
		func(t *testing.T) {
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

func TestAccessTypesDoNotMix(t *testing.T) {
	v := newGuest(t).disk(8, "block")
	v.Mode = multiWriter
	v.up("dev")
	v.FSType = volume.Ext4
	csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DeviceHeld)
	must(t, v.unpublish("dev"))
	must(t, v.stage())
	v.FSType = "block"
	csitest.Want(t, v.publish("dev"), codes.FailedPrecondition, csierr.DeviceHeld)
}

func TestAMountOfAnotherInstancesDeviceNodeIsNoPublication(t *testing.T) {
	g := newGuest(t)
	v := g.disk(8, "block")
	// Another instance of a simulated rack has published a device whose number is now this disk's.
	other := newGuest(t)
	stale := filepath.Join(other.Dir, "dev/nvme1n1")
	major, minor, err := blockdev.NumberAt(v.disk.Loop)
	must(t, err)
	must(t, unix.Mknod(stale, unix.S_IFBLK|0o660, int(unix.Mkdev(major, minor))))
	must(t, os.WriteFile(other.path("pod"), nil, 0o600))
	guesttest.Run(t, "mount", "--bind", stale, other.path("pod"))
	must(t, v.publish("pod"))
	must(t, v.unpublish("pod"))

	// A mount of this instance's node is a publication, also after the node was replaced.
	must(t, os.WriteFile(g.path("old"), nil, 0o600))
	guesttest.Run(t, "mount", "--bind", filepath.Join(g.Dir, "dev", v.disk.Name), g.path("old"))
	g.Unplug(v.disk)
	g.Plug(v.disk)
	csitest.Want(t, v.publish("pod"), codes.FailedPrecondition, csierr.PublishedElsewhere)
	v.FSType = volume.Ext4
	csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DeviceHeld)
}

func TestNodePublishVolumeHandlesItsTarget(t *testing.T) { // NP-10
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

func TestNodeUnpublishVolume(t *testing.T) { // D-36, D-37
	v := newGuest(t).disk(16, volume.Ext4)
	v.up("pod")
	t.Run("a volume or a target that is not published is a success (UP-2, UP-4)", func(t *testing.T) {
		must(t, testVolume{guest: newGuest(t), ID: "no-uuid"}.unpublish("pod"))
		must(t, os.Mkdir(v.guest.path("empty"), 0o755))
		for _, target := range []string{"other", "no/such/path", "empty"} {
			must(t, v.unpublish(target))
			absent(t, v.guest.path(target))
		}
	})
	t.Run("a busy target is an error, and everything stays (UP-6)", func(t *testing.T) {
		f, err := os.Create(filepath.Join(v.guest.path("pod"), "open"))
		must(t, err)
		csitest.Want(t, v.unpublish("pod"), codes.Internal, csierr.StillMounted)
		must(t, f.Close())
	})
	t.Run("every layer of mounts goes (UP-3)", func(t *testing.T) {
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

// breakExt makes ext4 find an error, after which it is read-only.
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

// shutDown makes a mounted ext4 or xfs answer every call with EIO, as after the loss of its device.
func shutDown(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer func() { _ = f.Close() }()
	const shutdown = 0x8004587d // EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN
	flags := uint32(2)          // without flushing the log
	must(t, blockdev.Ioctl(int(f.Fd()), shutdown, unsafe.Pointer(&flags)))
}
