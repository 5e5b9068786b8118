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
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// The ioctls of XFS (fs/xfs/libxfs/xfs_fs.h) and btrfs (include/uapi/linux/btrfs.h).
const (
	xfsGeometryV1 = 0x80705864 // _IOR('X', 100, struct xfs_fsop_geom_v1)
	xfsGrowData   = 0x4010586e // _IOW('X', 110, struct xfs_growfs_data)
	btrfsResize   = 0x50009403 // _IOW(0x94, 3, struct btrfs_ioctl_vol_args)
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

// xfsGeometry returns what a mounted xfs reports about itself: its blocks and size, and the
// percentage of its space that may hold inodes.
func xfsGeometry(root *os.File) (sb Superblock, inodePercent uint32, err error) {
	var b [112]byte
	err = blockdev.Ioctl(int(root.Fd()), xfsGeometryV1, unsafe.Pointer(&b))
	block := uint64(binary.NativeEndian.Uint32(b[0:]))
	return Superblock{Type: volume.XFS, BlockBytes: int64(block),
		SizeBytes: product(binary.NativeEndian.Uint64(b[32:]), block),
		UnitBytes: product(xfsMinimumAGBlocks, block)}, binary.NativeEndian.Uint32(b[28:]), err
}

// Uncovered returns the size of a mounted xfs that leaves a part of its device unused, and
// otherwise 0. Its superblock may show less until its log is replayed.
func Uncovered(m *mount.Mount, d blockdev.Device) (sizeBytes int64, err error) {
	root, err := m.Root()
	if err != nil {
		return 0, err
	}
	defer func() { _ = root.Close() }()
	sb, _, err := xfsGeometry(root)
	if err == nil && sb.leavesRoom(d.SizeBytes) {
		return sb.SizeBytes, nil
	}
	return 0, err
}

func growXFS(root *os.File, deviceBytes int64) error {
	sb, percent, err := xfsGeometry(root)
	if err != nil || !sb.canGrow(deviceBytes) {
		return err
	}
	request := struct {
		blocks  uint64
		percent uint32 // unchanged
		_       uint32
	}{blocks: uint64(deviceBytes / sb.BlockBytes), percent: percent}
	return blockdev.Ioctl(int(root.Fd()), xfsGrowData, unsafe.Pointer(&request))
}

func growBtrfs(root *os.File) error {
	member, err := mount.BtrfsDevice(root)
	if err != nil {
		return err
	}
	var arg [4096]byte // a number that is always 0, and a text
	copy(arg[8:], fmt.Sprintf("%d:max", member.ID))
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
