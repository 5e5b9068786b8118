package filesystem

import (
	"encoding/binary"
	"fmt"
	"os"
	"unsafe"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// The ioctls of XFS (fs/xfs/libxfs/xfs_fs.h) and btrfs (include/uapi/linux/btrfs.h).
const (
	xfsGeometryV1 = 0x80705864 // _IOR('X', 100, struct xfs_fsop_geom_v1)
	xfsGrowData   = 0x4010586e // _IOW('X', 110, struct xfs_growfs_data)
	btrfsResize   = 0x50009403 // _IOW(0x94, 3, struct btrfs_ioctl_vol_args)
	btrfsForget   = 0x50009405 // _IOW(0x94, 5, struct btrfs_ioctl_vol_args)
)

// GrowMounted makes a mounted xfs or btrfs use the whole device. It does nothing when the
// filesystem already does, or is of a type that grows before it is mounted.
func GrowMounted(m *mount.Mount, d blockdev.Device) error {
	grow := map[string]func(*os.File, int64) error{volume.XFS: growXFS,
		volume.Btrfs: growBtrfs}[m.FSType]
	if grow == nil {
		return nil
	}
	root, err := m.Root()
	if err == nil {
		err = grow(root, d.SizeBytes)
		_ = root.Close()
	}
	if err != nil {
		return csierr.New(csierr.NodeToolFailed, "grow the %s filesystem on %s: %w", m.FSType, d.Path,
			err)
	}
	return nil
}

// xfsGeometry is what an xfs reports of itself: its blocks, and the part of the space that may hold
// inodes.
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

func growXFS(root *os.File, deviceBytes int64) error {
	geometry, err := xfsGeometryOf(root)
	if err != nil || !geometry.size().grows(deviceBytes) {
		return err
	}
	request := struct {
		blocks  uint64
		percent uint32 // kept as it is
		_       uint32
	}{blocks: uint64(deviceBytes / geometry.blockBytes), percent: geometry.inodePercent}
	return blockdev.Ioctl(int(root.Fd()), xfsGrowData, unsafe.Pointer(&request))
}

// btrfsPathArg is struct btrfs_ioctl_vol_args: a number that stays 0 and a text.
type btrfsPathArg struct {
	_    int64
	text [4088]byte
}

func btrfsSize(member mount.BtrfsMember) Superblock {
	const sector = 4096
	return Superblock{Type: volume.Btrfs, SizeBytes: member.SizeBytes, UnitBytes: sector}
}

func growBtrfs(root *os.File, deviceBytes int64) error {
	member, err := mount.BtrfsDevice(root)
	if err != nil || !btrfsSize(member).grows(deviceBytes) {
		return err
	}
	var arg btrfsPathArg
	copy(arg.text[:], fmt.Sprintf("%d:max", member.ID))
	if err := blockdev.Ioctl(int(root.Fd()), btrfsResize, unsafe.Pointer(&arg)); err != nil {
		return err
	}
	// Files may be written to what was added before the new size is on the disk.
	return unix.Syncfs(int(root.Fd()))
}

// ForgetBtrfs makes the kernel drop what it remembers of an unmounted btrfs device. Otherwise a
// copy of the volume (a restored snapshot has the same filesystem id) could not be mounted while
// the remembered one is newer. A kernel without btrfs, and one that remembers nothing, have nothing
// to forget.
func ForgetBtrfs(path string) {
	control, err := os.OpenFile("/dev/btrfs-control", os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer func() { _ = control.Close() }()
	var arg btrfsPathArg
	if len(path) >= len(arg.text) {
		return
	}
	copy(arg.text[:], path)
	_ = blockdev.Ioctl(int(control.Fd()), btrfsForget, unsafe.Pointer(&arg))
}

// Ungrown reports the size of a mounted filesystem that leaves a part of its device unused. The
// second result is false when the filesystem covers its device, cannot be asked, or is read-only:
// that one is not expected to grow.
func Ungrown(ds blockdev.Host, m *mountinfo.Info, d blockdev.Device) (sizeBytes int64, found bool) {
	if mount.IsNode(m) || mount.FilesystemReadOnly(m) {
		return 0, false
	}
	sb, err := mountedSize(ds, m, d)
	return sb.SizeBytes, err == nil && sb.leavesRoom(d.SizeBytes)
}

// mountedSize asks a mounted filesystem how large it is, and what growing adds at least.
func mountedSize(ds blockdev.Host, m *mountinfo.Info, d blockdev.Device) (Superblock, error) {
	if m.FSType == volume.Ext3 || m.FSType == volume.Ext4 {
		return extOn(ds, d)
	}
	mnt, err := mount.Open(m.Mountpoint, m.FSType)
	if err != nil {
		return Superblock{}, err
	}
	defer func() { _ = mnt.Close() }()
	if err := mnt.Verify(d); err != nil {
		return Superblock{}, err
	}
	root, err := mnt.Root()
	if err != nil {
		return Superblock{}, err
	}
	defer func() { _ = root.Close() }()
	if m.FSType == volume.Btrfs {
		member, err := mount.BtrfsDevice(root)
		return btrfsSize(member), err
	}
	geometry, err := xfsGeometryOf(root)
	return geometry.size(), err
}

// extOn reads the superblock of a mounted ext, which holds the size that it was mounted with.
func extOn(ds blockdev.Host, d blockdev.Device) (Superblock, error) {
	h, err := ds.Open(d)
	if err != nil {
		return Superblock{}, err
	}
	defer func() { _ = h.Close() }()
	found, err := Find(h)
	if err == nil && len(found) != 1 {
		err = fmt.Errorf("%s shows %d filesystems", d.Path, len(found))
	}
	if err != nil {
		return Superblock{}, err
	}
	return found[0], nil
}
