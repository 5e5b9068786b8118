package corpus_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// scene is a trial under way: its disk in the guest, and the request that is going to be made.
type scene struct {
	*trial
	bench *bench
	image *image
	loop  loopdev.Device
	// decoy is a blank disk of the same size, whose name differs in the last byte. Nothing may
	// happen to it.
	decoy *image
	// Device is the disk's name in the guest.
	Device   string
	DiskName string
	VolumeID string
	Publish  map[string]string
	Staging  string

	dir string
	// kept says that the disk's bytes are evidence, and stay.
	kept bool
	// mark is what learnMark has learned.
	mark []piece
	// happened, if it is set, says whether what had to happen during the call did.
	happened func() error
	cleanup  []func() error
}

// the disk's and the decoy's names in the guest.
const (
	diskDevice  = "nvme2n1"
	decoyDevice = "nvme1n1"
)

// newScene makes the disk and shows it to the guest.
func (b *bench) newScene(ctx context.Context, t *trial) (s *scene, err error) {
	dir, err := os.MkdirTemp(b.dir, "trial-")
	if err != nil {
		return nil, err
	}
	s = &scene{trial: t, bench: b, Device: diskDevice, dir: dir,
		Staging: filepath.Join(dir, "staging")}
	s.atEnd(func() error {
		if s.kept {
			return nil
		}
		return os.RemoveAll(dir)
	})
	s.image = newImage(filepath.Join(dir, "disk"), t.Size)
	s.image.bases = b.bases
	t.Fill(s.image)
	if s.image.err != nil {
		return s, fmt.Errorf("make the disk: %w", s.image.err)
	}
	name := fmt.Sprintf("csi-%016x", t.Rand.Uint64())
	s.DiskName, s.VolumeID = name, randomUUID(t)
	s.Publish = map[string]string{"diskName": s.DiskName, "sizeBytes": fmt.Sprint(s.image.Size)}
	maps.Copy(s.Publish, t.History)
	if s.loop, err = s.attach(ctx, s.image, false); err != nil {
		return s, err
	}
	s.decoy = newImage(filepath.Join(dir, "decoy"), s.image.Size)
	decoy, err := s.attach(ctx, s.decoy, false)
	if err != nil {
		return s, err
	}
	other := name[:serialBytes-1] + "z"
	s.atEnd(b.guest.unplug)
	err = errors.Join(b.guest.plug(decoyDevice, other, decoy),
		b.guest.plug(s.Device, s.DiskName, s.loop))
	if err == nil && t.Set != nil {
		err = t.Set(s)
	}
	return s, err
}

// attach gives an image a loop device until the end of the scene.
func (s *scene) attach(ctx context.Context, im *image, readOnly bool) (loopdev.Device, error) {
	if im.err != nil {
		return loopdev.Device{}, im.err
	}
	loop, err := loopdev.Attach(ctx, loopdev.Config{
		// btrfs takes two loop devices with one serial for one file.
		Path: im.Path, Serial: "corpus-" + filepath.Base(s.dir) + "-" + filepath.Base(im.Path),
		BlockSize: s.BlockSize, ReadOnly: readOnly,
	})
	if err == nil {
		s.atEnd(func() error { return loop.Detach(context.Background()) })
	}
	return loop, err
}

// atEnd remembers what has to be done at the end, in the opposite order.
func (s *scene) atEnd(f func() error) { s.cleanup = append(s.cleanup, f) }

// end takes the scene down.
func (s *scene) end() error {
	var errs []error
	if err := unmountBelow(s.dir); err != nil {
		errs = append(errs, err)
	}
	for _, f := range slices.Backward(s.cleanup) {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}

// stage is the call that all is about.
func (s *scene) stage(ctx context.Context) error {
	_, err := s.bench.plugin.Node().NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: s.VolumeID, StagingTargetPath: s.Staging, PublishContext: s.Publish,
		VolumeCapability: &csi.VolumeCapability{
			AccessMode: &csi.VolumeCapability_AccessMode{
				Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
			AccessType: &csi.VolumeCapability_Mount{
				Mount: &csi.VolumeCapability_MountVolume{FsType: s.FS}},
		},
	})
	return err
}

func (s *scene) unstage(ctx context.Context) error {
	_, err := s.bench.plugin.Node().NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{
		VolumeId: s.VolumeID, StagingTargetPath: s.Staging})
	return err
}

// staged is what is mounted at the staging path; nil if nothing is.
func (s *scene) staged() (*mountinfo.Info, error) {
	mounts, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(s.Staging))
	if err != nil || len(mounts) == 0 {
		return nil, err
	}
	return mounts[len(mounts)-1], nil
}

// shows says whether the mount is one of the device. Each btrfs has a number of its own, so its
// source tells.
func shows(m *mountinfo.Info, loop loopdev.Device) bool {
	if m.FSType != btrfs {
		return m.Major == int(loop.Major) && m.Minor == int(loop.Minor)
	}
	var st unix.Stat_t
	return unix.Stat(m.Source, &st) == nil && st.Rdev == unix.Mkdev(loop.Major, loop.Minor)
}

// unmountBelow takes down what is mounted below a directory, the last mounted first.
func unmountBelow(dir string) error {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil {
		return err
	}
	var errs []error
	for _, m := range slices.Backward(mounts) {
		errs = append(errs, unix.Unmount(m.Mountpoint, unix.UMOUNT_NOFOLLOW))
	}
	return errors.Join(errs...)
}

func randomUUID(t *trial) string {
	a, b := t.Rand.Uint64(), t.Rand.Uint64()
	return fmt.Sprintf("%08x-%04x-4%03x-8%03x-%012x", a>>32, a>>16&0xFFFF, a&0xFFF, b>>48&0xFFF,
		b&0xFFFFFFFFFFFF)
}
