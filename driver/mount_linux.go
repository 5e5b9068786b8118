package driver

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
	"unsafe"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// looseMount is a mount that has no place yet. It is proven and finished there, and then appears at
// its path whole: a process that dies leaves no half mount, for the kernel undoes a loose one with
// its last descriptor. The calls need Linux 5.12.
type looseMount struct {
	fd     int
	fsType string
}

// mountLoose mounts the filesystem of an open device without a place.
func (h *heldDevice) mountLoose(fsType string, o volume.MountOptions) (*looseMount, error) {
	fs, err := unix.Fsopen(fsType, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, csierr.New(csierr.NodeToolFailed, "the kernel does not offer filesystem %s: %w",
			fsType,
			err)
	}
	defer func() { _ = unix.Close(fs) }()
	if err := configure(fs, h.Path, o); err != nil {
		return nil, csierr.New(csierr.NodeToolFailed, "mount %s as %s: %w%s", h.Path, fsType, err,
			kernelMessages(fs, o))
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, int(o.Attr))
	if err != nil {
		return nil, csierr.New(csierr.NodeToolFailed, "mount %s as %s: %w%s", h.Path, fsType, err,
			kernelMessages(fs, o))
	}
	m := &looseMount{fd: fd, fsType: fsType}
	if err := m.prove(h.device); err != nil {
		_ = m.Close()
		return nil, err
	}
	return m, nil
}

// configure gives a filesystem context its source and its options, and opens the filesystem.
func configure(fs int, source string, o volume.MountOptions) error {
	if err := unix.FsconfigSetString(fs, "source", source); err != nil {
		return err
	}
	for _, f := range o.Super {
		if err := unix.FsconfigSetFlag(fs, f); err != nil {
			return err
		}
	}
	for _, d := range o.Data {
		var err error
		if d.HasValue {
			err = unix.FsconfigSetString(fs, d.Key, d.Value)
		} else {
			err = unix.FsconfigSetFlag(fs, d.Key)
		}
		if err != nil {
			return err
		}
	}
	return unix.FsconfigCreate(fs)
}

// kernelMessages is what the kernel has to say of a failed mount. It may quote mount flags, so
// nothing is shown when there were any.
func kernelMessages(fs int, o volume.MountOptions) string {
	if o.Given {
		return " (the kernel's log may say more)"
	}
	var said []string
	buf := make([]byte, 1024)
	for len(said) < 8 {
		n, err := unix.Read(fs, buf)
		if err != nil || n <= 0 {
			break
		}
		// Each read is one message: "e " for an error, "w " or "i ", then the text.
		said = append(said, strings.TrimSpace(strings.TrimPrefix(string(buf[:n]), "e ")))
	}
	if len(said) == 0 {
		return ""
	}
	return ": " + lastWords(strings.Join(said, "; "))
}

// cloneMount makes a loose copy of the mount at path, as a bind mount would be. path may be a file:
// so a device node is published. A symbolic link as its last part is not followed.
func cloneMount(path, fsType string) (*looseMount, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path,
		unix.OPEN_TREE_CLONE|unix.O_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return nil, csierr.New(csierr.NodeToolFailed, "copy the mount of %q: %w", path, err)
	}
	return &looseMount{fd: fd, fsType: fsType}, nil
}

// prove shows that the mount is of that device, and not of whatever else is at the path.
func (m *looseMount) prove(d device) error {
	major, minor, err := m.device()
	if err != nil {
		return fmt.Errorf("find the device of the mount: %w", err)
	}
	if major != d.Major || minor != d.Minor {
		return csierr.New(csierr.DeviceChanged, "the mount is of device %d:%d, not of %s (%s) with "+
			"serial %q",
			major, minor, d.Path, d.number(), d.Serial)
	}
	return nil
}

// device is the number of the device that the mount's filesystem lives on, or of the device node
// that it shows.
func (m *looseMount) device() (major, minor uint32, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(m.fd, &st); err != nil {
		return 0, 0, err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFBLK {
		return unix.Major(st.Rdev), unix.Minor(st.Rdev), nil
	}
	if m.fsType != volume.Btrfs {
		return unix.Major(st.Dev), unix.Minor(st.Dev), nil
	}
	// btrfs numbers its mounts by itself, so it is asked for its device.
	info, err := m.btrfsDevice()
	if err != nil {
		return 0, 0, err
	}
	root, err := m.root()
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = root.Close() }()
	return btrfsNumber(root, info.path)
}

// change sets and clears attributes of the mount.
func (m *looseMount) change(set, unset uint64) error {
	attr := unix.MountAttr{Attr_set: set, Attr_clr: unset}
	if err := unix.MountSetattr(m.fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return csierr.New(csierr.NodeToolFailed, "set the attributes of the mount: %w", err)
	}
	return nil
}

// place puts the mount at path.
func (m *looseMount) place(path string) error {
	err := unix.MoveMount(m.fd, "", unix.AT_FDCWD, path, unix.MOVE_MOUNT_F_EMPTY_PATH)
	if err != nil {
		return csierr.New(csierr.NodeToolFailed, "mount at %q: %w", path, err)
	}
	return nil
}

// Close lets a loose mount go; one that has its place stays.
func (m *looseMount) Close() error { return unix.Close(m.fd) }

// grow makes xfs and btrfs use the whole device. Both do nothing when they already do.
func (m *looseMount) grow(d device) error {
	var err error
	switch m.fsType {
	case volume.XFS:
		err = m.growXFS(d.SizeBytes)
	case volume.Btrfs:
		err = m.growBtrfs(d.SizeBytes)
	}
	if err != nil {
		return csierr.New(csierr.NodeToolFailed, "grow the %s filesystem on %s: %w", m.fsType, d.Path,
			err)
	}
	return nil
}

// root opens the mount's root directory for ioctls, which a mount descriptor does not take.
func (m *looseMount) root() (*os.File, error) {
	fd, err := unix.Openat(m.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "."), nil
}

// The ioctls of XFS (fs/xfs/libxfs/xfs_fs.h) and btrfs (include/uapi/linux/btrfs.h).
const (
	xfsGeometryV1 = 0x80705864 // _IOR('X', 100, struct xfs_fsop_geom_v1)
	xfsGrowData   = 0x4010586e // _IOW('X', 110, struct xfs_growfs_data)
	btrfsResize   = 0x50009403 // _IOW(0x94, 3, struct btrfs_ioctl_vol_args)
	btrfsForget   = 0x50009405 // _IOW(0x94, 5, struct btrfs_ioctl_vol_args)
	btrfsDevInfo  = 0xd000941e // _IOWR(0x94, 30, struct btrfs_ioctl_dev_info_args)
	btrfsFSInfo   = 0x8400941f // _IOR(0x94, 31, struct btrfs_ioctl_fs_info_args)
)

// xfsGeometry is what an xfs says of itself: its blocks, and the part of the space that may hold
// inodes.
type xfsGeometry struct {
	blockBytes, blocks int64
	inodePercent       uint32
}

func xfsGeometryOf(root *os.File) (xfsGeometry, error) {
	var b [112]byte
	if err := ioctl(int(root.Fd()), xfsGeometryV1, unsafe.Pointer(&b)); err != nil {
		return xfsGeometry{}, err
	}
	return xfsGeometry{
		blockBytes:   int64(binary.NativeEndian.Uint32(b[0:])),
		blocks:       int64(binary.NativeEndian.Uint64(b[32:])),
		inodePercent: binary.NativeEndian.Uint32(b[28:]),
	}, nil
}

func (g xfsGeometry) size() superblock {
	return superblock{Type: volume.XFS, SizeBytes: g.blocks * g.blockBytes,
		UnitBytes: xfsMinimumAGBlocks * g.blockBytes}
}

// size is how large an xfs or a btrfs is, and what growing adds at least.
func (m *looseMount) size() (superblock, error) {
	if m.fsType == volume.Btrfs {
		info, err := m.btrfsDevice()
		return info.size(), err
	}
	root, err := m.root()
	if err != nil {
		return superblock{}, err
	}
	defer func() { _ = root.Close() }()
	geometry, err := xfsGeometryOf(root)
	return geometry.size(), err
}

func (m *looseMount) growXFS(deviceBytes int64) error {
	root, err := m.root()
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	geometry, err := xfsGeometryOf(root)
	if err != nil || !geometry.size().grows(deviceBytes) {
		return err
	}
	request := struct {
		blocks  uint64
		percent uint32 // kept as it is
		_       uint32
	}{blocks: uint64(deviceBytes / geometry.blockBytes), percent: geometry.inodePercent}
	return ioctl(int(root.Fd()), xfsGrowData, unsafe.Pointer(&request))
}

// btrfsPathArg is struct btrfs_ioctl_vol_args: a number we leave 0 and a text.
type btrfsPathArg struct {
	_    int64
	text [4088]byte
}

func (m *looseMount) growBtrfs(deviceBytes int64) error {
	info, err := m.btrfsDevice()
	if err != nil {
		return err
	}
	if !info.size().grows(deviceBytes) {
		return nil
	}
	root, err := m.root()
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	var arg btrfsPathArg
	copy(arg.text[:], fmt.Sprintf("%d:max", info.id))
	if err := ioctl(int(root.Fd()), btrfsResize, unsafe.Pointer(&arg)); err != nil {
		return err
	}
	// Files may be written to what was added before the new size is on the disk.
	return unix.Syncfs(int(root.Fd()))
}

// btrfsMember is the one device of a btrfs filesystem.
type btrfsMember struct {
	id        uint64
	sizeBytes int64
	path      string
}

func (b btrfsMember) size() superblock {
	const sector = 4096
	return superblock{Type: volume.Btrfs, SizeBytes: b.sizeBytes, UnitBytes: sector}
}

// btrfsDevice asks a mounted btrfs for its device; one with several is not ours.
func (m *looseMount) btrfsDevice() (btrfsMember, error) {
	root, err := m.root()
	if err != nil {
		return btrfsMember{}, err
	}
	defer func() { _ = root.Close() }()
	var fs [1024]byte // max_id, num_devices, …
	if err := ioctl(int(root.Fd()), btrfsFSInfo, unsafe.Pointer(&fs)); err != nil {
		return btrfsMember{}, err
	}
	id := binary.NativeEndian.Uint64(fs[0:])
	if n := binary.NativeEndian.Uint64(fs[8:]); n != 1 {
		return btrfsMember{}, fmt.Errorf("the filesystem has %d devices, a volume has one", n)
	}
	var info [4096]byte // devid, uuid[16], bytes_used, total_bytes, …, path at 3072
	binary.NativeEndian.PutUint64(info[:], id)
	if err := ioctl(int(root.Fd()), btrfsDevInfo, unsafe.Pointer(&info)); err != nil {
		return btrfsMember{}, err
	}
	return btrfsMember{
		id:        id,
		sizeBytes: int64(binary.NativeEndian.Uint64(info[32:])),
		path:      unix.ByteSliceToString(info[3072:]),
	}, nil
}

// forgetBtrfs makes the kernel drop what it remembers of an unmounted btrfs device. Otherwise a
// copy of the volume (a restored snapshot has the same filesystem id) could not be mounted while
// the remembered one is newer. A kernel without btrfs, and one that remembers nothing, have nothing
// to forget.
func forgetBtrfs(path string) {
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
	_ = ioctl(int(control.Fd()), btrfsForget, unsafe.Pointer(&arg))
}

// unmountTop takes down the topmost mount at path. It never does so lazily: a lazy unmount reports
// success while the filesystem is still in use. errNotMounted means there was none.
func unmountTop(path string) error {
	err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
	// Who asks a filesystem for its usage or its device has it for a moment.
	for pause := 5 * time.Millisecond; errors.Is(err, unix.EBUSY) && pause < 100*time.Millisecond; {
		<-time.After(pause)
		err, pause = unix.Unmount(path, unix.UMOUNT_NOFOLLOW), 2*pause
	}
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		return errNotMounted
	}
	if errors.Is(err, unix.EBUSY) {
		return csierr.New(csierr.StillMounted, "unmount %q: files are open below it: %w", path, err)
	}
	if err != nil {
		return csierr.New(csierr.NodeToolFailed, "unmount %q: %w", path, err)
	}
	return nil
}
