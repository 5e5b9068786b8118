//go:build linux

package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// twoVolumes returns a published volume and another one, which is staged if known is set.
func twoVolumes(t *testing.T, fsType string, known bool) (v, other testVolume) {
	g := statefulGuest(t)
	v = g.disk(512, fsType)
	if fsType == volume.Btrfs {
		fsType = volume.Ext4 // mkfs.btrfs cannot read the mount table of a guest with such a path
	}
	other = g.disk(512, fsType, guesttest.OtherSerial)
	v.up("pod")
	if known {
		must(t, other.stage())
	}
	return v, other
}

func (v testVolume) unstageAt(path string) error {
	return v.ask(&csi.NodeUnstageVolumeRequest{VolumeId: v.ID, StagingTargetPath: path})
}

func TestAVolumeUnderAnotherMountIsNotUnmounted(t *testing.T) {
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
			must(t, origin.unstage()) // repeated
			must(t, restored.unstage())
		})
	}
}

func TestAMountThatContradictsTheRecordIsAnError(t *testing.T) {
	v := statefulGuest(t).disk(64, volume.Ext4)
	v.up("pod")
	record := filepath.Join(v.guest.state, v.ID+".json")
	right, err := os.ReadFile(record)
	must(t, err)
	wrong := strings.ReplaceAll(string(right), guesttest.Serial, guesttest.OtherSerial)
	must(t, os.WriteFile(record, []byte(wrong), 0o600))
	same := v.guest.mounts()
	csitest.Want(t, v.unpublish("pod"), codes.Internal, csierr.PublishedDifferently)
	csitest.Want(t, v.unstage(), codes.Internal, csierr.StagedDifferently)
	same()
	must(t, os.WriteFile(record, right, 0o600))
	v.down("pod")
}

// replaced gives the number and the name of the volume's device to another disk, as the kernel may
// do when the volume's disk is gone. It returns the volume of that disk.
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

func TestARawTargetWhoseDeviceNumberIsReused(t *testing.T) {
	setUp := func(t *testing.T, fsType string) (v, w testVolume) {
		g := statefulGuest(t)
		v = g.disk(16, "block")
		v.up("dev")
		return v, v.replaced(guesttest.OtherSerial, fsType)
	}
	t.Run("it does not show this volume (VS-5)", func(t *testing.T) {
		v, _ := setUp(t, "block")
		csitest.Want(t, v.stats("dev"), codes.NotFound, csierr.VolumeNotAtPath)
		csitest.Want(t, v.ask(&csi.NodeGetVolumeHealthRequest{VolumeId: v.ID,
			VolumePublishPath: v.guest.path("dev")}), codes.NotFound, csierr.VolumeNotAtPath)
	})
	t.Run("it is not published again (NP-5)", func(t *testing.T) {
		v, _ := setUp(t, "block")
		csitest.Want(t, v.publish("dev"), codes.NotFound, csierr.DeviceNotFound)
		v.disk = v.guest.Attach(guesttest.Serial, 16*guesttest.MiB) // under another number
		csitest.Want(t, v.publish("dev"), codes.AlreadyExists, csierr.PublishedDifferently)
		must(t, v.unpublish("dev"))
		must(t, v.publish("dev"))
		must(t, v.stats("dev"))
	})
	t.Run("the other volume is neither formatted nor published at it", func(t *testing.T) {
		v, w := setUp(t, volume.Ext4)
		same := w.disk.Same(t)
		csitest.Want(t, w.stage(), codes.FailedPrecondition, csierr.DeviceHeld)
		w.FSType = "block"
		csitest.Want(t, w.publish("other"), codes.FailedPrecondition, csierr.PublishedElsewhere)
		same()
		v.down("dev")
		must(t, w.publish("other"))
	})
	t.Run("it is unpublished, and the other disk does not change (UP-3)", func(t *testing.T) {
		v, w := setUp(t, "block")
		same := w.disk.Same(t)
		v.down("dev")
		same()
		v.guest.hasMounts(0)
	})
}

func TestPublishRefusesAStagingPathWithAnotherMount(t *testing.T) { // NP-5
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
	t.Run("a new device with the same number", func(t *testing.T) {
		v := statefulGuest(t).disk(16, volume.Ext4)
		must(t, v.stage())
		sequence := filepath.Join(v.guest.Dir, "sys/block", v.disk.Name, "diskseq")
		must(t, os.WriteFile(sequence, []byte("999999999\n"), 0o644))
		csitest.Want(t, v.publish("pod"), codes.FailedPrecondition, csierr.DeviceChanged)
	})
}

func TestStatsNeverCountTheFilesystemBelow(t *testing.T) { // VS-2
	for _, fsType := range []string{volume.Ext4, volume.Btrfs} {
		v := newGuest(t).disk(128, fsType)
		must(t, v.stage())
		shown, err := shownAt(v.guest.node().host(), v.staging())
		must(t, err)
		_, err = shown.statfs(v.staging())
		must(t, err)
		must(t, v.unstage())
		_, err = shown.statfs(v.staging())
		csitest.Want(t, csierr.Convert(err, csierr.NodeToolFailed), codes.NotFound,
			csierr.VolumeNotAtPath)
	}
}

// The kernel reuses names of devices, and the mount of a btrfs shows only the name of its device,
// not the number.
func TestStageADiskWithTheNameOfADeadBtrfs(t *testing.T) {
	g := statefulGuest(t)
	v := g.disk(128, volume.Btrfs)
	v.up("pod")
	g.Unplug(v.disk)
	other := g.Attach(guesttest.OtherSerial, 128*guesttest.MiB)
	g.Unplug(other)
	other.Name = v.disk.Name
	g.Plug(other)
	w := g.volume(other, volume.Ext4) // mkfs.btrfs would refuse the name
	must(t, w.stage())
	must(t, w.unstage())
	v.down("pod")
}
