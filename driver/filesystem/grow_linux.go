package filesystem

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// The ioctls of XFS (fs/xfs/libxfs/xfs_fs.h) and btrfs (include/uapi/linux/btrfs.h).
const (
	xfsGeometryV1 = 0x80705864 // _IOR('X', 100, struct xfs_fsop_geom_v1)
	xfsGrowData   = 0x4010586e // _IOW('X', 110, struct xfs_growfs_data)
	btrfsResize   = 0x50009403 // _IOW(0x94, 3, struct btrfs_ioctl_vol_args)
	btrfsForget   = 0x50009405 // _IOW(0x94, 5, struct btrfs_ioctl_vol_args)
)

// GrowMounted grows a mounted xfs or btrfs to the whole device. It does nothing if the filesystem
// already covers it, or is of a type that grows before it is mounted.
func GrowMounted(ctx context.Context, m *mount.Mount, d blockdev.Device) error {
	if m.FSType != volume.XFS && m.FSType != volume.Btrfs {
		return nil
	}
	change := flight.Begin(ctx, flight.FilesystemGrown, flight.Fields{Filesystem: m.FSType})
	root, err := m.Root()
	if err == nil {
		if m.FSType == volume.Btrfs {
			err = growBtrfs(root)
		} else {
			err = growXFS(root, d.SizeBytes)
		}
		_ = root.Close()
	}
	change.End(err, flight.Fields{})
	if err != nil {
		return csierr.New(csierr.NodeToolFailed, "grow the %s filesystem on %s: %w", m.FSType, d.Path,
			err)
	}
	return nil
}

// xfsGeometry is what an xfs reports about itself: its blocks, and the percentage of its space that
// may hold inodes.
type xfsGeometry struct {
	blockBytes, blocks int64
	inodePercent       uint32
}

func xfsGeometryOf(root *os.File) (xfsGeometry, error) {
	var b [112]byte
	if err := blockdev.Ioctl(int(root.Fd()), xfsGeometryV1, unsafe.Pointer(&b)); err != nil {
		return xfsGeometry{}, err
	}
	return xfsGeometry{
		blockBytes:   int64(binary.NativeEndian.Uint32(b[0:])),
		blocks:       int64(binary.NativeEndian.Uint64(b[32:])),
		inodePercent: binary.NativeEndian.Uint32(b[28:]),
	}, nil
}

func (g xfsGeometry) size() Superblock {
	return Superblock{Type: volume.XFS, SizeBytes: g.blocks * g.blockBytes,
		UnitBytes: xfsMinimumAGBlocks * g.blockBytes}
}

// Uncovered returns the size of a mounted xfs that leaves a part of its device unused, and
// otherwise 0. Its superblock may show less until its log is replayed.
func Uncovered(m *mount.Mount, d blockdev.Device) (sizeBytes int64, err error) {
	root, err := m.Root()
	if err != nil {
		return 0, err
	}
	defer func() { _ = root.Close() }()
	geometry, err := xfsGeometryOf(root)
	if sb := geometry.size(); err == nil && sb.leavesRoom(d.SizeBytes) {
		return sb.SizeBytes, nil
	}
	return 0, err
}

func growXFS(root *os.File, deviceBytes int64) error {
	geometry, err := xfsGeometryOf(root)
	if err != nil || !geometry.size().canGrow(deviceBytes) {
		return err
	}
	request := struct {
		blocks  uint64
		percent uint32 // unchanged
		_       uint32
	}{blocks: uint64(deviceBytes / geometry.blockBytes), percent: geometry.inodePercent}
	return blockdev.Ioctl(int(root.Fd()), xfsGrowData, unsafe.Pointer(&request))
}

// btrfsPathArg is struct btrfs_ioctl_vol_args: a number that is always 0, and a text.
type btrfsPathArg struct {
	_    int64
	text [4088]byte
}

func growBtrfs(root *os.File) error {
	member, err := mount.BtrfsDevice(root)
	if err != nil {
		return err
	}
	var arg btrfsPathArg
	copy(arg.text[:], fmt.Sprintf("%d:max", member.ID))
	if err := blockdev.Ioctl(int(root.Fd()), btrfsResize, unsafe.Pointer(&arg)); err != nil {
		return err
	}
	// The kernel has committed the new size, so that it is durable before file data can be written to
	// the new space. It does not return the error of this commit (btrfs_ioctl_resize), but makes the
	// filesystem read-only.
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(root.Fd()), &st); err != nil {
		return err
	}
	if st.Flags&unix.ST_RDONLY != 0 {
		return errors.New("its new size could not be committed, and it became read-only")
	}
	return nil
}

// ForgetBtrfs makes the kernel drop what it remembers of an unmounted btrfs device. Otherwise a
// copy of the volume (a restored snapshot has the same filesystem id) could not be mounted while
// the remembered device is newer. Errors are ignored: without btrfs in the kernel, or without a
// remembered device, there is nothing to drop.
func ForgetBtrfs(path string) {
	control, err := os.OpenFile("/dev/btrfs-control", os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer func() { _ = control.Close() }()
	var arg btrfsPathArg
	copy(arg.text[:], path)
	_ = blockdev.Ioctl(int(control.Fd()), btrfsForget, unsafe.Pointer(&arg))
}
