package mount

import (
	"fmt"
	"os"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// Mount is a mount that has no place yet. It is proven and finished there, and then appears at
// its path whole: a process that dies leaves no half mount, for the kernel undoes a loose one with
// its last descriptor. The calls need Linux 5.12.
type Mount struct {
	fd     int
	FSType string
}

// New mounts the filesystem of an open device without a place.
func New(h *blockdev.OpenDevice, fsType string, o volume.MountOptions) (*Mount, error) {
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
	m := &Mount{fd: fd, FSType: fsType}
	if err := m.Verify(h.Device); err != nil {
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
	return ": " + csierr.LastWords(strings.Join(said, "; "))
}

// Clone makes a loose copy of the mount at path, as a bind mount would be. path may be a file:
// so a device node is published. A symbolic link as its last part is not followed.
func Clone(path, fsType string) (*Mount, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path,
		unix.OPEN_TREE_CLONE|unix.O_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return nil, csierr.New(csierr.NodeToolFailed, "copy the mount of %q: %w", path, err)
	}
	return &Mount{fd: fd, FSType: fsType}, nil
}

// Open opens the mount that a path leads to.
func Open(path, fsType string) (*Mount, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return &Mount{fd: fd, FSType: fsType}, nil
}

// Statfs asks the filesystem for its statistics.
func (m *Mount) Statfs() (st unix.Statfs_t, err error) {
	err = unix.Fstatfs(m.fd, &st)
	return st, err
}

// Verify shows that the mount is of that device, and not of whatever else is at the path.
func (m *Mount) Verify(d blockdev.Device) error {
	major, minor, err := m.number()
	if err != nil {
		return fmt.Errorf("find the device of the mount: %w", err)
	}
	if major != d.Major || minor != d.Minor {
		return csierr.New(csierr.DeviceChanged, "the mount is of device %d:%d, not of %s (%s) with "+
			"serial %q",
			major, minor, d.Path, d.Number(), d.Serial)
	}
	return nil
}

// device is the number of the device that the mount's filesystem lives on, or of the device node
// that it shows.
func (m *Mount) number() (major, minor uint32, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(m.fd, &st); err != nil {
		return 0, 0, err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFBLK {
		return unix.Major(st.Rdev), unix.Minor(st.Rdev), nil
	}
	if m.FSType != volume.Btrfs {
		return unix.Major(st.Dev), unix.Minor(st.Dev), nil
	}
	root, err := m.Root()
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = root.Close() }()
	return btrfsNumber(root)
}

// SetAttributes sets and clears attributes of the mount.
func (m *Mount) SetAttributes(set, unset uint64) error {
	attr := unix.MountAttr{Attr_set: set, Attr_clr: unset}
	if err := unix.MountSetattr(m.fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return csierr.New(csierr.NodeToolFailed, "set the attributes of the mount: %w", err)
	}
	return nil
}

// Attach puts the mount at path.
func (m *Mount) Attach(path string) error {
	err := unix.MoveMount(m.fd, "", unix.AT_FDCWD, path, unix.MOVE_MOUNT_F_EMPTY_PATH)
	if err != nil {
		return csierr.New(csierr.NodeToolFailed, "mount at %q: %w", path, err)
	}
	return nil
}

// Close lets a loose mount go; one that has its place stays.
func (m *Mount) Close() error { return unix.Close(m.fd) }

// Root opens the mount's root directory for ioctls, which a mount descriptor does not take.
func (m *Mount) Root() (*os.File, error) {
	fd, err := unix.Openat(m.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "."), nil
}
