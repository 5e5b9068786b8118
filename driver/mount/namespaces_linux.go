package mount

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// view is the mount table of one mount namespace, as seen from one root directory.
type view struct {
	pid   int // a process that has this view; 0 for the driver's own
	table Table
}

// Views are the mount tables of all visible mount namespaces, the driver's own first.
type Views []view

// ReadViews reads the mount table of every namespace that a process is in: one table for each
// namespace and root directory, because a process sees only what is mounted below its root.
//
// A container without the host's processes sees few of them, and a namespace may be kept by a
// thread or a descriptor only. A mount that is missed here still keeps the device in use, and the
// exclusive open at the end of NodeUnstageVolume finds that.
func ReadViews(log *slog.Logger) (Views, error) {
	table, err := ReadTable()
	if err != nil {
		return nil, err
	}
	own, err := os.Readlink("/proc/thread-self/ns/mnt")
	if err != nil {
		return nil, fmt.Errorf("find the driver's mount namespace: %w", err)
	}
	views := Views{{table: table}}
	pids, err := blockdev.Processes()
	if err != nil {
		return nil, err
	}
	type root struct{ namespace, path string }
	read, hidden := map[root]bool{}, 0
	for _, pid := range pids {
		dir := filepath.Join("/proc", strconv.Itoa(pid))
		namespace, err := os.Readlink(filepath.Join(dir, "ns/mnt"))
		if errors.Is(err, fs.ErrPermission) {
			hidden++
		}
		if err != nil || namespace == own {
			continue // the process has ended, or is in the driver's own namespace
		}
		path, err := os.Readlink(filepath.Join(dir, "root"))
		if err != nil || read[root{namespace, path}] {
			continue
		}
		b, err := os.ReadFile(filepath.Join(dir, "mountinfo"))
		if err != nil {
			continue
		}
		if table, err = parseTable(b); err != nil {
			return nil, err
		}
		read[root{namespace, path}] = true
		views = append(views, view{pid: pid, table: table})
	}
	if hidden > 0 {
		log.Info("the mount namespaces of some processes are not visible",
			"processes", hidden)
	}
	return views, nil
}

// Found is a mount in a namespace.
type Found struct {
	*mountinfo.Info
	view view
}

// String returns the mount point and, unless it is in the driver's own namespace, the namespace.
func (m Found) String() string {
	process := m.Process()
	if process == "" {
		return fmt.Sprintf("%q", m.Mountpoint)
	}
	return fmt.Sprintf("%q in the mount namespace of process %s", m.Mountpoint, process)
}

// Process names the process by which the mount is visible, or is empty for a mount in the driver's
// own namespace.
func (m Found) Process() string {
	if m.view.pid == 0 {
		return ""
	}
	return fmt.Sprintf("%d (%s)", m.view.pid, blockdev.ProcessName(m.view.pid))
}

// Describe lists mounts for an error.
func Describe(mounts []Found) string {
	var words []string
	for i, m := range mounts {
		if i == 8 {
			words = append(words, fmt.Sprintf("%d more", len(mounts)-i))
			break
		}
		words = append(words, m.String())
	}
	return strings.Join(words, ", ")
}

// Of lists the mounts of a disk in all namespaces: of its device, of its node, and of the
// filesystem of the mount layer, which can be compared even after the device is gone. Either the
// device or the layer may be missing.
func (vs Views) Of(d blockdev.Device, layer *mountinfo.Info) []Found {
	home, known := location{}, false
	if d.Path != "" {
		home, known = vs[0].table.locate(filepath.Dir(d.Path))
	}
	var found []Found
	for _, view := range vs {
		for _, m := range view.table {
			if d.Path != "" && view.shows(m, d, home, known) || layer != nil && SameFilesystem(m, layer) {
				found = append(found, Found{m, view})
			}
		}
	}
	return found
}

// CopiesAt lists what other namespaces have mounted on the path that is path in the driver's own.
func (vs Views) CopiesAt(path string) []Found {
	dir, ok := vs[0].table.locate(filepath.Dir(path))
	if !ok {
		return nil
	}
	at := location{dir.major, dir.minor, filepath.Join(dir.dir, filepath.Base(path))}
	var found []Found
	for _, view := range vs[1:] {
		parents := view.table.byID()
		for _, m := range view.table {
			if _, location, ok := locationIn(parents, m); ok && location == at {
				found = append(found, Found{m, view})
			}
		}
	}
	return found
}

// SameFilesystem reports whether two mounts, of any namespaces, are of one filesystem. A number
// that is no device's is not enough: another filesystem may have it once the first is no longer
// mounted.
func SameFilesystem(a, b *mountinfo.Info) bool {
	return a.Major == b.Major && a.Minor == b.Minor && a.FSType == b.FSType &&
		(a.Major != 0 || a.Source == b.Source)
}

// shows reports whether a mount is of the device, or of its node in this instance's device
// directory home.
func (v view) shows(m *mountinfo.Info, d blockdev.Device, home location, known bool) bool {
	switch {
	case m.Major != 0 && uint32(m.Major) == d.Major && uint32(m.Minor) == d.Minor:
		return true // a filesystem, whatever the name of the directory that is mounted
	case diskNode.MatchString(m.Root):
		// What is not in the device directory is no node, and may not answer.
		if known && locationOf(m) != home {
			return false
		}
	case m.FSType != volume.Btrfs:
		return false
	}
	if v.pid != 0 && diskNode.MatchString(m.Root) {
		major, minor, err := blockdev.NumberAt(filepath.Join("/proc", strconv.Itoa(v.pid), "root",
			m.Mountpoint))
		if err != nil {
			// The process has ended or its root may not be read. Compare the path of the node instead.
			return known && filepath.Base(nodePath(m)) == d.Name
		}
		return major == d.Major && minor == d.Minor
	}
	named := false
	if m.FSType == volume.Btrfs && !IsNode(m) {
		// Do not open another volume's mount: that would keep it busy for a moment, and its disk may
		// hang.
		major, minor, err := blockdev.NumberAt(m.Source)
		named = err == nil
		if named && (major != d.Major || minor != d.Minor) ||
			!named && Made(m) && filepath.Clean(m.Source) != d.Path {
			return false
		}
	}
	major, minor, err := v.device(m)
	twins, isTwin := errors.AsType[*TwinsError](err)
	switch {
	case isTwin:
		return slices.Contains(twins.devices, d.Number())
	case err != nil: // the path may be of a disk that is gone, unless nobody could ask
		return named && v.pid != 0 && !errors.Is(err, errNoBtrfsDevice) && !IsMissing(err)
	}
	return major == d.Major && minor == d.Minor
}

// resolveCached is RESOLVE_CACHED of linux/openat2.h, which x/sys lacks.
const resolveCached = 0x20

// device is Device for a mount of the view. A btrfs is asked, also in another namespace: its source
// would name the disk long after the disk is gone. Only what the kernel has cached is opened, so
// that no path of that namespace is waited for.
func (v view) device(m *mountinfo.Info) (major, minor uint32, err error) {
	if v.pid == 0 || m.FSType != volume.Btrfs {
		return Device(m, blockdev.Device{})
	}
	top, err := os.OpenFile(filepath.Join("/proc", strconv.Itoa(v.pid), "root"), unix.O_PATH, 0)
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = top.Close() }()
	fd, err := unix.Openat2(int(top.Fd()), "."+m.Mountpoint, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NONBLOCK | unix.O_CLOEXEC,
		Resolve: resolveCached | unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return 0, 0, err
	}
	root, err := checkMount(os.NewFile(uintptr(fd), m.Mountpoint), m)
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = root.Close() }()
	return btrfsNumber(root, blockdev.Device{})
}

// byID returns the mounts by their numbers.
func (t Table) byID() map[int]*mountinfo.Info {
	mounts := make(map[int]*mountinfo.Info, len(t))
	for _, m := range t {
		mounts[m.ID] = m
	}
	return mounts
}

// locationIn returns where in its parent's filesystem a mount is attached, given the mounts of its
// namespace. Its copies in the parent's peers are attached at the same location.
func locationIn(mounts map[int]*mountinfo.Info, m *mountinfo.Info) (parent *mountinfo.Info,
	at location, ok bool) {
	parent = mounts[m.Parent]
	if parent == nil || m.Parent == m.ID {
		return nil, location{}, false // it is the root, or its parent is outside the process's root
	}
	rest := strings.TrimPrefix(m.Mountpoint, parent.Mountpoint)
	return parent, location{parent.Major, parent.Minor, filepath.Join(parent.Root, rest)}, true
}

// peers returns the peer groups of a mount: the one it propagates events to, and the one it
// receives them from.
func peers(m *mountinfo.Info) (shared, master string) {
	for _, field := range strings.Fields(m.Optional) {
		if group, ok := strings.CutPrefix(field, "shared:"); ok {
			shared = group
		}
		if group, ok := strings.CutPrefix(field, "master:"); ok {
			master = group
		}
	}
	return shared, master
}

// receivers returns the peer groups that events on a mount of that group propagate to: the group
// itself, the groups of its slaves, and so on.
func (vs Views) receivers(group string) map[string]bool {
	groups := map[string]bool{}
	if group == "" {
		return groups
	}
	groups[group] = true
	for grown := true; grown; {
		grown = false
		for _, view := range vs {
			for _, m := range view.table {
				shared, master := peers(m)
				if groups[master] && shared != "" && !groups[shared] {
					groups[shared], grown = true, true
				}
			}
		}
	}
	return groups
}

// unmountsWith reports whether the kernel unmounts m together with the driver's own mount. Where
// kubelet and the driver's container share a directory, each sees the other's mounts as copies.
// Such a copy does not use the volume. The caller looks again after the unmount, which finds a copy
// that stayed.
func (vs Views) unmountsWith(m Found, own *mountinfo.Info, groups map[string]bool) bool {
	if m.view.pid == 0 && m.ID == own.ID {
		return true
	}
	_, at, ok := locationIn(vs[0].table.byID(), own)
	copyParent, copyAt, copyOK := locationIn(m.view.table.byID(), m.Info)
	if !ok || !copyOK || at != copyAt {
		return false
	}
	shared, master := peers(copyParent)
	return groups[shared] || groups[master]
}

// Elsewhere lists those of the mounts that stay when the driver's own mounts are unmounted.
func (vs Views) Elsewhere(mounts []Found, own []*mountinfo.Info) []Found {
	for _, layer := range own {
		var group string
		if parent, _, ok := locationIn(vs[0].table.byID(), layer); ok {
			group, _ = peers(parent)
		}
		groups := vs.receivers(group)
		mounts = slices.DeleteFunc(mounts, func(m Found) bool {
			return vs.unmountsWith(m, layer, groups)
		})
	}
	return mounts
}

// AwaitNone waits until find returns no mounts, and returns an error that lists those that stay. A
// mount in the driver's own namespace is a publication and does not go away by itself, so it is not
// waited for. A copy in another namespace may be brief, as when a container starts.
func AwaitNone(ctx context.Context, log *slog.Logger, wait time.Duration,
	find func(Views) []Found) error {
	backoff := async.Backoff{Pause: 20 * time.Millisecond, Max: 500 * time.Millisecond,
		End: time.Now().Add(wait)}
	for {
		views, err := ReadViews(log)
		if err != nil {
			return err
		}
		left := find(views)
		if len(left) == 0 {
			return nil
		}
		again := !slices.ContainsFunc(left, func(m Found) bool { return m.view.pid == 0 })
		if again {
			if again, err = backoff.Wait(ctx); err != nil {
				return fmt.Errorf("wait until the volume is not mounted at %s: %w", Describe(left), err)
			}
		}
		if !again {
			return csierr.New(csierr.StillMounted, "the volume is still mounted at %s; unpublish it there "+
				"first", Describe(left))
		}
	}
}
