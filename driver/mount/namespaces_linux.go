package mount

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
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
	pid    int // a process that has this view; 0 for the driver's own
	table  Table
	byID   func() map[int]*mountinfo.Info
	unread bool // a part of the table is missing
}

func newView(pid int, table Table, unread bool) view {
	return view{pid, table, sync.OnceValue(table.byID), unread}
}

// Views are the mount tables of all visible mount namespaces, the driver's own first.
type Views []view

// Limits for reading other mount namespaces. Any user can create namespaces with many mounts, many
// root directories and long paths. An open mount table keeps in use the devices that are mounted in
// its namespace. So tableTime is shorter than Service.ReleaseTimeout of package node.
const (
	maxRoots      = 4        // root directories of one namespace
	maxTableBytes = 16 << 20 // 100,000 mounts, which is the kernel's limit, with ordinary paths
	maxViewsBytes = 32 << 20
	tableTime     = 2 * time.Second
	viewsTime     = 5 * time.Second
)

// ReadViews reads the mount table of every namespace that a process is in: one table for each
// namespace and root directory, because a process sees only what is mounted below its root.
//
// It misses some namespaces: in a container without the host's process ids it sees few processes,
// and a namespace may belong only to a thread or a descriptor. It reads only a part of a namespace
// that exceeds the limits. A mount that it misses still keeps the device in use, so the exclusive
// open at the end of NodeUnstageVolume fails.
func ReadViews(log *slog.Logger) (Views, error) {
	table, err := ReadTable()
	if err != nil {
		return nil, err
	}
	own, err := os.Readlink("/proc/thread-self/ns/mnt")
	if err != nil {
		return nil, fmt.Errorf("find the driver's mount namespace: %w", err)
	}
	views := Views{newView(0, table, false)}
	pids, err := blockdev.Processes()
	if err != nil {
		return nil, err
	}
	// Read in random order, so that each call omits different processes if the time is too short.
	rand.Shuffle(len(pids), func(i, j int) { pids[i], pids[j] = pids[j], pids[i] })
	roots, hidden := map[string][]string{}, 0 // the roots of each namespace
	end, left := time.Now().Add(viewsTime), maxViewsBytes
	for _, pid := range pids {
		dir := filepath.Join("/proc", strconv.Itoa(pid))
		namespace, err := os.Readlink(filepath.Join(dir, "ns/mnt"))
		if errors.Is(err, fs.ErrPermission) {
			hidden++
		}
		if err != nil || namespace == own {
			continue // the process has ended, or is in the driver's own namespace
		}
		known, most := roots[namespace], min(left, maxTableBytes)
		root, err := os.Readlink(filepath.Join(dir, "root"))
		many := len(known) >= maxRoots && root != "/"
		if err != nil || slices.Contains(known, root) || many && len(known) > maxRoots {
			continue
		}
		if many {
			most = 0
		}
		b, err := readOther(namespace, filepath.Join(dir, "mountinfo"), most, end)
		if err != nil && !errors.Is(err, errUnread) {
			continue
		}
		table, bad := parseTable(b)
		roots[namespace] = append(known, root)
		views, left = append(views, newView(pid, table, err != nil || bad != nil)), left-len(b)
	}
	if hidden > 0 {
		log.Info("the mount namespaces of some processes are not visible", "processes", hidden)
	}
	if unread := views.Unread(); unread != "" {
		log.Info("the mounts of some namespaces are too many or too slow to read", "processes", unread)
	}
	return views, nil
}

var errUnread = errors.New("the mount table is too long or does not answer")

// readOther reads a namespace's mount table. It returns errUnread if the limits allow only a part.
func readOther(namespace, path string, most int, end time.Time) (b []byte, err error) {
	if soon := time.Now().Add(tableTime); soon.Before(end) {
		end = soon
	}
	const grace = time.Second / 2 // for the last read, which may start just before end
	var read []byte
	var readErr error
	if !async.Within(namespace, time.Until(end)+grace, func() {
		read, readErr = readUntil(path, most, end)
	}) {
		return nil, errUnread
	}
	return read, readErr
}

// readUntil reads whole lines of a mount table. If it stops at a limit, it also returns errUnread.
func readUntil(path string, most int, end time.Time) (b []byte, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	for len(b) < most && time.Now().Before(end) {
		b = slices.Grow(b, os.Getpagesize()) // one read returns at most a page
		n, err := f.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		if errors.Is(err, io.EOF) {
			return b, nil
		}
		if err != nil {
			break
		}
	}
	return b[:bytes.LastIndexByte(b, '\n')+1], errUnread
}

// Unread names a process of each namespace that was not read completely, or returns "".
func (vs Views) Unread() string {
	var names []string
	for _, v := range vs {
		if v.unread {
			names = append(names, v.process())
		}
	}
	return Describe(names)
}

// Found is a mount and the view that it is in.
type Found struct {
	*mountinfo.Info
	view view
}

// String returns the mount point and, unless it is in the driver's own namespace, the namespace.
func (m Found) String() string {
	process := m.Process()
	if process == "" {
		return fmt.Sprintf("%.500q", m.Mountpoint)
	}
	return fmt.Sprintf("%.500q in the mount namespace of process %s", m.Mountpoint, process)
}

// Process names a process that sees the mount; "" if it is in the driver's own namespace.
func (m Found) Process() string {
	if m.view.pid == 0 {
		return ""
	}
	return m.view.process()
}

func (v view) process() string {
	return fmt.Sprintf("%d (%s)", v.pid, blockdev.ProcessName(v.pid))
}

// Describe returns text for errors: the first eight mounts or processes, and the number of others.
func Describe[T any](all []T) string {
	var words []string
	for i, one := range all {
		if i == 8 {
			words = append(words, fmt.Sprintf("%d more", len(all)-i))
			break
		}
		words = append(words, fmt.Sprint(one))
	}
	return strings.Join(words, ", ")
}

// Of lists the mounts of a disk in all mount namespaces: the mounts of the filesystem on d, of d's
// device node, and of the filesystem that layer mounts. It finds the mounts of layer's filesystem
// even if the device is gone. d may be the zero device, and layer may be nil.
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

// CopiesAt lists the mounts of other namespaces on the directory or file to which path leads in the
// driver's own namespace.
func (vs Views) CopiesAt(path string) []Found {
	dir, ok := vs[0].table.locate(filepath.Dir(path))
	if !ok {
		return nil
	}
	at := location{dir.major, dir.minor, filepath.Join(dir.dir, filepath.Base(path))}
	var found []Found
	for _, view := range vs[1:] {
		for _, m := range view.table {
			if view.attachedAt(m, at) {
				found = append(found, Found{m, view})
			}
		}
	}
	return found
}

// SameFilesystem reports whether two mounts, of any namespaces, have the same filesystem. An
// anonymous device number (major 0) alone does not prove that, because the kernel may give it to
// another filesystem after an unmount. So the sources have to be the same, too.
func SameFilesystem(a, b *mountinfo.Info) bool {
	return a.Major == b.Major && a.Minor == b.Minor && a.FSType == b.FSType &&
		(a.Major != 0 || a.Source == b.Source)
}

// shows reports whether m mounts the filesystem on d, or d's device node. If the parameter known is
// true, the device node has to be in this instance's device directory, home.
func (v view) shows(m *mountinfo.Info, d blockdev.Device, home location, known bool) bool {
	switch {
	case m.Major != 0 && uint32(m.Major) == d.Major && uint32(m.Minor) == d.Minor:
		return true // a filesystem, even if the mounted directory is named like a disk
	case diskNode.MatchString(m.Root):
		// A file outside of the device directory is not the device node. Do not stat it: that may hang.
		if known && locationOf(m) != home {
			return false
		}
	case m.FSType != volume.Btrfs:
		return false
	}
	if v.pid != 0 && diskNode.MatchString(m.Root) {
		major, minor, err := v.device(m)
		if err != nil {
			// The process has ended, or the kernel has not cached the path to the mount. Compare the name of
			// the device node instead of its number.
			return known && filepath.Base(nodePath(m)) == d.Name
		}
		return major == d.Major && minor == d.Minor
	}
	named := false
	if m.FSType == volume.Btrfs && !IsNode(m) {
		// Do not open another volume's mount: an open keeps it busy, and hangs if its disk hangs.
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
	case err != nil: // the filesystem cannot be asked, so the source's name decides
		return named && v.pid != 0 && !errors.Is(err, errNoBtrfsDevice) && !IsMissing(err)
	}
	return major == d.Major && minor == d.Minor
}

// resolveCached is RESOLVE_CACHED of linux/openat2.h, which x/sys lacks.
const resolveCached = 0x20

// device returns the device number of a mount in the view, as Device does. In another namespace it
// asks the filesystem itself, because the source of a btrfs may name a disk that is gone. It
// resolves only paths in the kernel's cache and opens only the mount itself, so it never waits for
// another filesystem of the namespace.
func (v view) device(m *mountinfo.Info) (major, minor uint32, err error) {
	if v.pid == 0 {
		return Device(m, blockdev.Device{})
	}
	top, err := os.OpenFile(filepath.Join("/proc", strconv.Itoa(v.pid), "root"), unix.O_PATH, 0)
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = top.Close() }()
	fd, err := unix.Openat2(int(top.Fd()), "."+m.Mountpoint, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC,
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
	return (&Mount{int(root.Fd()), m.FSType}).number(blockdev.Device{})
}

func (t Table) byID() map[int]*mountinfo.Info {
	mounts := make(map[int]*mountinfo.Info, len(t))
	for _, m := range t {
		mounts[m.ID] = m
	}
	return mounts
}

// parent returns m's parent mount, or nil for the root mount and for a parent that the view lacks.
func (v view) parent(m *mountinfo.Info) *mountinfo.Info {
	if m.Parent == m.ID {
		return nil
	}
	return v.byID()[m.Parent]
}

// attachedAt reports whether m is mounted at the given location. If propagation copies a mount to
// other namespaces, the copies have the same location.
func (v view) attachedAt(m *mountinfo.Info, at location) bool {
	parent := v.parent(m)
	return parent != nil && parent.Major == at.major && parent.Minor == at.minor &&
		strings.HasPrefix(at.dir, parent.Root) && pathIn(parent, m) == at.dir
}

func pathIn(parent, m *mountinfo.Info) string {
	return filepath.Join(parent.Root, strings.TrimPrefix(m.Mountpoint, parent.Mountpoint))
}

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

// receivers returns the peer groups that receive the mount events of a group: the group itself, its
// slaves, their slaves, and so on.
func (vs Views) receivers(group string) map[string]bool {
	slaves := map[string][]string{}
	for _, view := range vs {
		for _, m := range view.table {
			if shared, master := peers(m); shared != "" && master != "" {
				slaves[master] = append(slaves[master], shared)
			}
		}
	}
	groups := map[string]bool{}
	for next := []string{group}; len(next) > 0; {
		group, next = next[0], next[1:]
		if group != "" && !groups[group] {
			groups[group] = true
			next = append(next, slaves[group]...)
		}
	}
	return groups
}

// Elsewhere returns mounts without those that the kernel unmounts when the driver unmounts own.
//
// If kubelet and the driver's container share a directory, both have a copy of a mount there. When
// the driver unmounts its copy, the kernel also unmounts kubelet's, which is thus no user of the
// volume. After the unmount the caller searches again, in case a copy has stayed.
func (vs Views) Elsewhere(mounts []Found, own []*mountinfo.Info) []Found {
	for _, layer := range own {
		var at location
		var groups map[string]bool
		if parent := vs[0].parent(layer); parent != nil {
			at = location{parent.Major, parent.Minor, pathIn(parent, layer)}
			group, _ := peers(parent)
			groups = vs.receivers(group)
		}
		mounts = slices.DeleteFunc(mounts, func(m Found) bool {
			if m.view.pid == 0 && m.ID == layer.ID {
				return true
			}
			if groups == nil || !m.view.attachedAt(m.Info, at) {
				return false
			}
			shared, master := peers(m.view.parent(m.Info))
			return groups[shared] || groups[master]
		})
	}
	return mounts
}

// AwaitNone waits until find() returns no mounts. It fails at once for a mount in the driver's own
// namespace, because that is a publication, which stays until it is unpublished. A mount in another
// namespace may end soon: a starting container has mounts that it removes. The result unread names
// the processes whose namespaces may have further mounts.
func AwaitNone(ctx context.Context, log *slog.Logger, wait time.Duration,
	find func(Views) []Found) (unread string, err error) {
	backoff := async.Backoff{Pause: 20 * time.Millisecond, Max: 500 * time.Millisecond,
		End: time.Now().Add(wait)}
	for {
		views, err := ReadViews(log)
		if err != nil {
			return "", err
		}
		left := find(views)
		if len(left) == 0 {
			return views.Unread(), nil
		}
		again := !slices.ContainsFunc(left, func(m Found) bool { return m.view.pid == 0 })
		if again {
			if again, err = backoff.Wait(ctx); err != nil {
				return "", fmt.Errorf("wait until the volume is not mounted at %s: %w", Describe(left), err)
			}
		}
		if !again {
			return "", csierr.New(csierr.StillMounted, "the volume is still mounted at %s; unpublish it "+
				"there first", Describe(left))
		}
	}
}
