package mount

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"github.com/google/uuid"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// Table is the mount table of a mount namespace.
type Table []*mountinfo.Info

// ReadTable reads the mount table of the driver's namespace. It reads until two results agree: a
// single read is not atomic, and a volume whose mount is missed could be detached while in use.
func ReadTable() (Table, error) {
	const path = "/proc/thread-self/mountinfo"
	before, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the mount table: %w", err)
	}
	for range 20 {
		now, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("read the mount table: %w", err)
		}
		if bytes.Equal(before, now) {
			return parseTable(now)
		}
		before = now
	}
	// If the mounts change all the time, use the last result. It contains each mount that existed
	// during the whole read, because the kernel keeps the reader's position.
	return parseTable(before)
}

// parseTable parses a mount table with lines of any length. Any user can mount deep directories in
// a user namespace, which makes a line that is too long for a bufio.Scanner.
func parseTable(b []byte) (table Table, err error) {
	for line := range strings.Lines(string(b)) {
		if line = strings.TrimSuffix(line, "\n"); line == "" {
			continue
		}
		m, bad := parseMount(line)
		if bad != nil {
			err = fmt.Errorf("read the mount table: %w in %.200q", bad, line)
			continue
		}
		table = append(table, m)
	}
	return table, err
}

func parseMount(line string) (*mountinfo.Info, error) {
	fields := strings.Split(line, " ")
	end := slices.Index(fields, "-") // no earlier field can be a hyphen
	if end < 6 || len(fields) < end+4 {
		return nil, errors.New("expected ten fields, one of them a hyphen")
	}
	m := &mountinfo.Info{Root: unescape(fields[3]), Mountpoint: unescape(fields[4]),
		Options: fields[5], Optional: strings.Join(fields[6:end], " "),
		FSType: unescape(fields[end+1]), Source: unescape(fields[end+2]),
		VFSOptions: strings.Join(fields[end+3:], " ")}
	major, minor, ok := strings.Cut(fields[2], ":")
	if !ok {
		return nil, errors.New("expected a device number")
	}
	for _, number := range []struct {
		at   *int
		text string
	}{{&m.ID, fields[0]}, {&m.Parent, fields[1]}, {&m.Major, major}, {&m.Minor, minor}} {
		var err error
		if *number.at, err = strconv.Atoi(number.text); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// escaped matches a character that the kernel writes as an octal number, such as a space.
var escaped = regexp.MustCompile(`\\[0-3][0-7]{2}`)

func unescape(field string) string {
	if !strings.Contains(field, `\`) {
		return field
	}
	return escaped.ReplaceAllStringFunc(field, func(octal string) string {
		c, _ := strconv.ParseUint(octal[1:], 8, 8) // cannot fail: the pattern allows at most \377
		return string([]byte{byte(c)})
	})
}

// At lists the mounts at path, the topmost last.
func (t Table) At(path string) []*mountinfo.Info {
	var layers []*mountinfo.Info
	for _, m := range t {
		if m.Mountpoint == path {
			layers = append(layers, m)
		}
	}
	// A mount on top of another mount at the same path is the child of the lower mount.
	top := slices.IndexFunc(layers, func(m *mountinfo.Info) bool {
		return !slices.ContainsFunc(layers, func(child *mountinfo.Info) bool {
			return child.Parent == m.ID && child.ID != m.ID
		})
	})
	if top >= 0 && top != len(layers)-1 {
		layers = append(slices.Delete(slices.Clone(layers), top, top+1), layers[top])
	}
	return layers
}

// Top returns the topmost mount at path, or nil.
func (t Table) Top(path string) *mountinfo.Info {
	layers := t.At(path)
	if len(layers) == 0 {
		return nil
	}
	return layers[len(layers)-1]
}

// Of lists the mounts of the filesystem on the device and the bind mounts of its device node.
//
// A mounted filesystem keeps its device open, so no other disk gets its device number. A bind mount
// of a device node keeps nothing open, so another disk may have the node's number by now. Because
// the instances of a simulated rack share a kernel, a bind mount counts only if its device node is
// in this instance's device directory, or was deleted there.
func (t Table) Of(d blockdev.Device) Table {
	var found Table
	for _, m := range (Views{{table: t}}).Of(d, nil) {
		found = append(found, m.Info)
	}
	return found
}

// location is a filesystem and a directory's path in it. It is the same in all namespaces.
type location struct {
	major, minor int
	dir          string
}

func (t Table) locate(dir string) (location, bool) {
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return location{}, false
	}
	for at := dir; ; at = filepath.Dir(at) {
		if top := t.Top(at); top != nil {
			rest := strings.TrimPrefix(dir, at)
			return location{top.Major, top.Minor, filepath.Join(top.Root, rest)}, true
		}
		if at == "/" || at == "." {
			return location{}, false
		}
	}
}

func locationOf(m *mountinfo.Info) location {
	return location{m.Major, m.Minor, filepath.Dir(nodePath(m))}
}

func nodePath(m *mountinfo.Info) string { return strings.TrimSuffix(m.Root, "//deleted") }

// Paths returns the mount points, for an error.
func (t Table) Paths() string {
	var paths []string
	for _, m := range t {
		paths = append(paths, fmt.Sprintf("%q", m.Mountpoint))
	}
	return strings.Join(paths, ", ")
}

// diskNode matches the root, in mountinfo, of a bind mount of a disk's device node.
var diskNode = regexp.MustCompile(`/nvme\d+n\d+(//deleted)?$`)

// NodeRoot reports whether a mount is of a disk's device node, and whether the node was deleted.
func NodeRoot(m *mountinfo.Info) (node, deleted bool) {
	node = diskNode.MatchString(m.Root)
	return node, node && nodePath(m) != m.Root
}

// IsDiskPath reports whether path looks like the path of a disk's device node.
func IsDiskPath(path string) bool { return diskNode.MatchString(path) }

// shownNode returns the number of the disk whose device node is mounted. For any other mount ok is
// false, and shownNode does not call stat, which may hang if a network server is dead.
func shownNode(m *mountinfo.Info) (major, minor uint32, ok bool) {
	if !diskNode.MatchString(m.Root) {
		return 0, 0, false
	}
	major, minor, err := blockdev.NumberAt(m.Mountpoint)
	return major, minor, err == nil
}

// IsNode reports whether a mount is of a disk's device node, and not of a filesystem.
func IsNode(m *mountinfo.Info) bool {
	_, _, ok := shownNode(m)
	return ok
}

// Device returns the number of the disk that is mounted. If the kernel lists several devices for a
// btrfs, Device checks whether the device likely is the right one.
func Device(m *mountinfo.Info, likely blockdev.Device) (major, minor uint32, err error) {
	if major, minor, ok := shownNode(m); ok {
		return major, minor, nil
	}
	if m.FSType == volume.Btrfs {
		return btrfsMountNumber(m, likely)
	}
	if m.Major == 0 {
		return 0, 0, fmt.Errorf("a mount of type %s has no device", m.FSType)
	}
	return uint32(m.Major), uint32(m.Minor), nil
}

// Flags returns m's flags that the driver compares with those of a request or of another mount.
func Flags(m *mountinfo.Info) []string { return volume.ShownFlags(m.Options, m.VFSOptions) }

// Condition tells what errors have done to a mounted filesystem.
type Condition int

// The conditions of a filesystem.
const (
	Healthy Condition = iota
	ReadOnlyAfterErrors
	Dead
)

// String returns the condition in words.
func (c Condition) String() string {
	return [...]string{"healthy", "read-only after errors", "shut down after errors"}[c]
}

// ConditionOf reports whether errors have made a filesystem read-only or shut it down. It calls
// stat on the mount point, which may hang for a network filesystem. So use it only for volumes.
//
// A filesystem that errors have made read-only differs from its mount, whose flags still allow
// writes. Since Linux 6.14 ext4 also shows the option emergency_ro.
func ConditionOf(m *mountinfo.Info) Condition {
	super := strings.Split(m.VFSOptions, ",")
	var st unix.Stat_t
	err := unix.Stat(m.Mountpoint, &st)
	switch {
	case slices.Contains(super, "shutdown"), blockdev.Lost(err):
		return Dead
	case slices.Contains(super, "emergency_ro"), slices.Contains(super, "ro") && !ReadOnly(m):
		return ReadOnlyAfterErrors
	}
	return Healthy
}

// FilesystemReadOnly reports whether the filesystem itself is read-only.
func FilesystemReadOnly(m *mountinfo.Info) bool {
	return slices.Contains(strings.Split(m.VFSOptions, ","), "ro")
}

// ReadOnly reports whether the mount itself, not its filesystem, is read-only.
func ReadOnly(m *mountinfo.Info) bool {
	return slices.Contains(strings.Split(m.Options, ","), "ro")
}

// Canonical returns the path as the mount table writes it, with symbolic links resolved. It does
// not resolve the last element, which may be a mount that no longer answers.
func Canonical(path string) (string, error) {
	path = filepath.Clean(path)
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, filepath.Base(path)), nil
}

// IsMissing reports whether an error means that a path does not exist.
func IsMissing(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR)
}

// Shows reports whether a mount is of the device or of its device node.
func Shows(m *mountinfo.Info, d blockdev.Device) bool {
	major, minor, err := Device(m, d)
	return err == nil && major == d.Major && minor == d.Minor
}

const btrfsDir = "/sys/fs/btrfs"

// Ioctls of include/uapi/linux/btrfs.h.
const (
	btrfsDevInfo = 0xd000941e // _IOWR(0x94, 30, struct btrfs_ioctl_dev_info_args)
	btrfsFSInfo  = 0x8400941f // _IOR(0x94, 31, struct btrfs_ioctl_fs_info_args)
	btrfsScan    = 0x50009404 // _IOW(0x94, 4, struct btrfs_ioctl_vol_args)
	btrfsForget  = 0x50009405 // _IOW(0x94, 5, struct btrfs_ioctl_vol_args)
)

// btrfsControl is BTRFS_MINOR of include/linux/miscdevice.h.
var btrfsControl = int(unix.Mkdev(10, 234))

var errNoBtrfsDevice = errors.New("the filesystem's device is gone")

// TwinsError reports that the kernel lists several devices for the UUID of a mounted btrfs. If a
// volume and a copy of it, such as a restored snapshot, are both mounted, a device scan may make
// the kernel list the copy with the volume's UUID.
type TwinsError struct{ devices []string }

// Error names the devices by their numbers.
func (e *TwinsError) Error() string {
	return "the kernel gives the UUID of this btrfs to those of the devices " +
		strings.Join(e.devices, " and ") + ", and does not tell which it is on; unmount one of them"
}

// ErrBtrfsDevices reports a btrfs of several devices, which cannot be a volume.
var ErrBtrfsDevices = errors.New("a volume's btrfs has one device, this one has another number")

// BtrfsMember describes the only device of a mounted btrfs.
type BtrfsMember struct {
	ID   uint64    // the number that the filesystem gives to the device
	fsid uuid.UUID // the filesystem's UUID according to the kernel
	path string    // the device's path when it was mounted or scanned last
}

// BtrfsDevice returns the device of the btrfs that root is in, or an error if it has several.
func BtrfsDevice(root *os.File) (BtrfsMember, error) {
	var info [1024]byte // max_id, num_devices, fsid[16], …
	if err := blockdev.Ioctl(int(root.Fd()), btrfsFSInfo, unsafe.Pointer(&info)); err != nil {
		return BtrfsMember{}, err
	}
	if n := binary.NativeEndian.Uint64(info[8:]); n != 1 {
		return BtrfsMember{}, fmt.Errorf("%w: %d", ErrBtrfsDevices, n)
	}
	var device [4096]byte // devid, uuid[16], bytes_used, total_bytes, …, path at 3072
	copy(device[:8], info[:8])
	if err := blockdev.Ioctl(int(root.Fd()), btrfsDevInfo, unsafe.Pointer(&device)); err != nil {
		return BtrfsMember{}, err
	}
	return BtrfsMember{
		ID:   binary.NativeEndian.Uint64(info[:]),
		fsid: uuid.UUID(info[16:32]),
		path: unix.ByteSliceToString(device[3072:]),
	}, nil
}

// btrfsMountNumber returns the number of the disk that a mounted btrfs is on. The mount table does
// not contain it: a btrfs mount has a device number of its own, and its source is only a path,
// which may lead to another disk by now. So btrfsMountNumber asks the filesystem. It uses the path
// only if the mount cannot be opened, because it is hidden or in another namespace.
func btrfsMountNumber(m *mountinfo.Info, likely blockdev.Device) (major, minor uint32, err error) {
	root, err := openMount(m)
	if err != nil {
		return blockdev.NumberAt(m.Source)
	}
	defer func() { _ = root.Close() }()
	return btrfsNumber(root, likely)
}

// btrfsNumber returns the number of the disk that an open directory's btrfs is on. If several disks
// have the UUID, and neither sysfs nor isOn(root, likely) shows the right one, the error is a
// TwinsError, and the number is that of the device at the path that the kernel recorded.
func btrfsNumber(root *os.File, likely blockdev.Device) (major, minor uint32, err error) {
	member, err := BtrfsDevice(root)
	if err != nil {
		return 0, 0, err
	}
	pathMajor, pathMinor, pathErr := blockdev.NumberAt(member.path)
	dirs, err := member.dirs()
	if err != nil {
		return 0, 0, err
	}
	if len(dirs) == 0 { // sysfs does not list the filesystem
		return pathMajor, pathMinor, pathErr
	}
	var twins TwinsError
	for _, dir := range dirs {
		major, minor, err = numberIn(filepath.Join(dir, "devices"))
		onPath := err == nil && pathErr == nil && major == pathMajor && minor == pathMinor
		if len(dirs) == 1 || onPath && filepath.Base(dir) == member.fsid.String() {
			return major, minor, err
		}
		twins.devices = append(twins.devices, fmt.Sprintf("%d:%d", major, minor))
	}
	if slices.Contains(twins.devices, likely.Number()) && isOn(root, likely) {
		return likely.Major, likely.Minor, nil
	}
	return pathMajor, pathMinor, &twins
}

// dirs returns the sysfs directories of the mounted filesystems that have m's UUID now. The name of
// a directory is the UUID that its filesystem had when it was mounted.
func (m BtrfsMember) dirs() ([]string, error) {
	names, err := blockdev.ReadNames(btrfsDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var dirs []string
	for _, name := range names {
		dir := filepath.Join(btrfsDir, name)
		b, err := os.ReadFile(filepath.Join(dir, "devinfo", fmt.Sprint(m.ID), "fsid"))
		fsid := string(bytes.TrimSpace(b))
		if err != nil { // Linux before 5.17 has no such file, and mounts no two btrfs with one UUID
			fsid = name
		}
		if fsid == m.fsid.String() {
			dirs = append(dirs, dir)
		}
	}
	return dirs, nil
}

func numberIn(dir string) (major, minor uint32, err error) {
	names, err := blockdev.ReadNames(dir)
	if err != nil {
		return 0, 0, err
	}
	if len(names) != 1 {
		return 0, 0, errNoBtrfsDevice
	}
	b, err := os.ReadFile(filepath.Join(dir, names[0], "dev"))
	if errors.Is(err, fs.ErrNotExist) || blockdev.Vanished(err) {
		return 0, 0, errNoBtrfsDevice
	}
	if err != nil {
		return 0, 0, err
	}
	return blockdev.ParseNumber(b)
}

// isOn reports whether the btrfs of an open directory is proven to be on the device. It makes the
// kernel scan the device at a unique path: only a btrfs on this device then reports that path as
// the path of its device. A second scan restores the source of the mount (madeOf).
func isOn(root *os.File, d blockdev.Device) (shown bool) {
	private, err := d.Root()
	if err != nil {
		return false
	}
	defer func() { _ = private.Close() }()
	err = inRoot(private, func() error {
		path := "/" + uuid.NewString()
		if err := errors.Join(makeControl(), unix.Link(d.Path, path)); err != nil {
			return err
		}
		if err := callControl(privateControl, btrfsScan, path); err != nil {
			return err
		}
		member, err := BtrfsDevice(root)
		shown = err == nil && member.path == path
		return callControl(privateControl, btrfsScan, madeOf(d.Path))
	})
	return shown && err == nil
}

const privateControl = "/btrfs-control"

func makeControl() error { return unix.Mknod(privateControl, unix.S_IFCHR|0o600, btrfsControl) }

// forgetMount makes the kernel forget a btrfs that a failed mount, or mkfs, has registered with a
// device's number. If another disk gets the number, Linux 6.18 confuses the two btrfs and refuses
// to mount that disk. forgetMount has to run in inRoot, where path leads to the device.
func forgetMount(path, fsType string) error {
	if fsType != volume.Btrfs {
		return nil
	}
	err := makeControl()
	ForgetBtrfs(privateControl, path)
	return err
}

// ForgetBtrfs makes the kernel forget the btrfs on a device, unless it is mounted. While the kernel
// remembers a newer btrfs with the same UUID, it refuses to mount a copy of the volume, such as a
// restored snapshot. Errors are ignored: a kernel without btrfs, or without a remembered device,
// has nothing to forget.
func ForgetBtrfs(control, path string) { _ = callControl(control, btrfsForget, path) }

func callControl(control string, request uintptr, path string) error {
	f, err := os.OpenFile(control, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	var args [4096]byte // fd, name
	copy(args[8:len(args)-1], path)
	return blockdev.Ioctl(int(f.Fd()), request, unsafe.Pointer(&args))
}
