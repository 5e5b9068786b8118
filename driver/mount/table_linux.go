package mount

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Table is what is mounted in the driver's mount namespace; it is all the node's memory.
type Table []*mountinfo.Info

// ReadTable reads until two readings agree: one alone is not a snapshot, and a mount that is
// missed here would be a volume detached in use.
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
	// On a machine where mounts come and go all the time the last reading has to do: the kernel
	// keeps the place of a reader, so it misses no mount that was there throughout.
	return parseTable(before)
}

func parseTable(b []byte) (Table, error) {
	infos, err := mountinfo.GetMountsFromReader(bytes.NewReader(b), nil)
	if err != nil {
		return nil, fmt.Errorf("read the mount table: %w", err)
	}
	return infos, nil
}

// At lists the mounts at path, the topmost last.
func (t Table) At(path string) []*mountinfo.Info {
	var layers []*mountinfo.Info
	for _, m := range t {
		if m.Mountpoint == path {
			layers = append(layers, m)
		}
	}
	// A mount on top of another one at the same path is its child.
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

// Top is the mount that one sees at path, or nil.
func (t Table) Top(path string) *mountinfo.Info {
	layers := t.At(path)
	if len(layers) == 0 {
		return nil
	}
	return layers[len(layers)-1]
}

// Of lists the mounts of the device's filesystem and the publications of its node.
//
// A filesystem holds its device, so its number is the device's as long as it is mounted. A node
// holds nothing: its number may have become another disk's. So a node counts when it is from the
// directory where this instance has its nodes, even if it is deleted there; a node of another
// instance (those of a simulated rack share a kernel) does not.
func (t Table) Of(d blockdev.Device) Table {
	home, known := t.locate(filepath.Dir(d.Path))
	var found Table
	for _, m := range t {
		if showsDevice(m, d, home, known) {
			found = append(found, m)
		}
	}
	return found
}

// showsDevice says whether a mount is of the device, or of its node; home is where this instance
// has its nodes.
func showsDevice(m *mountinfo.Info, d blockdev.Device, home location, known bool) bool {
	if m.FSType == volume.Btrfs && !IsNode(m) {
		// Ask no other volume's mount: that would hold it for a moment.
		if major, minor, err := blockdev.NumberAt(m.Source); err != nil || major != d.Major ||
			minor != d.Minor {
			return false
		}
	}
	major, minor, ok := Device(m)
	if !ok || major != d.Major || minor != d.Minor {
		return false
	}
	return !IsNode(m) || !known || locationOf(m) == home
}

// location is a directory by its place in its filesystem.
type location struct {
	major, minor int
	dir          string
}

// locate finds the filesystem and the place in it of a directory.
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

// locationOf is the directory of the node that a mount shows.
func locationOf(m *mountinfo.Info) location {
	return location{m.Major, m.Minor, filepath.Dir(nodePath(m))}
}

// nodePath is the node that a mount shows, in the filesystem of the nodes.
func nodePath(m *mountinfo.Info) string { return strings.TrimSuffix(m.Root, "//deleted") }

// Paths are the mount points, for an error.
func (t Table) Paths() string {
	var paths []string
	for _, m := range t {
		paths = append(paths, fmt.Sprintf("%q", m.Mountpoint))
	}
	return strings.Join(paths, ", ")
}

// diskNode matches the root of a mount that shows a disk's node: a raw block volume.
var diskNode = regexp.MustCompile(`/nvme\d+n\d+(//deleted)?$`)

// NodeRoot reports whether a mount is of a disk's node, and whether that node is deleted.
func NodeRoot(m *mountinfo.Info) (node, deleted bool) {
	node = diskNode.MatchString(m.Root)
	return node, node && nodePath(m) != m.Root
}

// IsDiskPath reports whether the path is that of a disk's node.
func IsDiskPath(path string) bool { return diskNode.MatchString(path) }

// shownNode is the number of the device whose node the mount shows, if it is a mount of a single
// node. Its root in the filesystem of the nodes has the node's name; only such a mount is looked
// at, for to stat every mount of a node may hang on a dead server.
func shownNode(m *mountinfo.Info) (major, minor uint32, ok bool) {
	if !diskNode.MatchString(m.Root) {
		return 0, 0, false
	}
	major, minor, err := blockdev.NumberAt(m.Mountpoint)
	return major, minor, err == nil
}

func IsNode(m *mountinfo.Info) bool {
	_, _, ok := shownNode(m)
	return ok
}

// Device is the number of the device that a mount is of.
func Device(m *mountinfo.Info) (major, minor uint32, ok bool) {
	if major, minor, ok := shownNode(m); ok {
		return major, minor, true
	}
	if m.FSType == volume.Btrfs {
		major, minor, err := btrfsMountNumber(m)
		return major, minor, err == nil
	}
	return uint32(m.Major), uint32(m.Minor), m.Major != 0
}

// SameFilesystem lists the other mounts of the filesystem that m shows, by the number that the
// kernel gives to it, whether or not the device is still there.
func (t Table) sameFilesystem(m *mountinfo.Info) Table {
	var found Table
	for _, other := range t {
		if other.ID != m.ID && other.Major == m.Major && other.Minor == m.Minor {
			found = append(found, other)
		}
	}
	return found
}

// Flags are the flags of a mount that two mounts are compared by.
func Flags(m *mountinfo.Info) []string {
	return volume.ShownFlags(m.Options,
		m.VFSOptions)
}

// Condition is how a mounted filesystem is.
type Condition int

const (
	Healthy Condition = iota
	ReadOnlyAfterErrors
	Dead
)

func (c Condition) String() string {
	return [...]string{"well", "read-only after errors", "shut down after errors"}[c]
}

// ConditionOf says what errors made of a filesystem. It looks at the mount point, so it is asked of
// volumes only, whose disks are local.
//
// The kernel shows a filesystem that it made read-only as one whose mount is not, and ext4 (since
// Linux 6.14) by a word of its own.
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

// ReadOnly says whether the mount itself, not its filesystem, is read-only.
func ReadOnly(m *mountinfo.Info) bool {
	return slices.Contains(strings.Split(m.Options, ","), "ro")
}

// Canonical is the path as the mount table writes it: links on the way to it resolved. Its last
// part is left as it is, for that may be a mount that answers no question any more.
func Canonical(path string) (string, error) {
	path = filepath.Clean(path)
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, filepath.Base(path)), nil
}

// IsMissing says that an error means that there is no such path.
func IsMissing(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR)
}

// Shows reports whether a mount is of the device or of its node.
func Shows(m *mountinfo.Info, d blockdev.Device) bool {
	major, minor, ok := Device(m)
	return ok && major == d.Major && minor == d.Minor
}
