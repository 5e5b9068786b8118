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

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"

	"github.com/moby/sys/mountinfo"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// view is what is mounted in one mount namespace.
type view struct {
	Namespace string // mnt:[4026531841]
	// PID is a process that sees it so; 0 for the driver's own namespace.
	PID   int
	table Table
}

// Views are all mount namespaces that can be seen, the driver's own first.
type Views []view

// ReadViews reads the mount table of every namespace that some process lives in: one table for
// each namespace and root directory, for a process sees only what is mounted below its root.
//
// In a container without the host's processes that is little, and a namespace may live in a thread
// or a descriptor alone. What is not seen here still holds the device, and the exclusive open at
// the end of NodeUnstageVolume finds that.
func ReadViews(ctx context.Context, log *slog.Logger) (Views, error) {
	table, err := ReadTable()
	if err != nil {
		return nil, err
	}
	own, err := os.Readlink("/proc/thread-self/ns/mnt")
	if err != nil {
		return nil, fmt.Errorf("find the driver's mount namespace: %w", err)
	}
	views := Views{{Namespace: own, table: table}}
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
			continue // a process that is gone by now sees nothing
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
		views = append(views, view{Namespace: namespace, PID: pid, table: table})
	}
	if hidden > 0 {
		log.InfoContext(ctx, "the mount namespaces of some processes cannot be seen",
			"processes", hidden)
	}
	return views, nil
}

// own is the driver's own mount table.
func (vs Views) own() Table { return vs[0].table }

// Found is a mount in a namespace.
type Found struct {
	*mountinfo.Info
	view view
}

func (m Found) String() string {
	if m.view.PID == 0 {
		return fmt.Sprintf("%q", m.Mountpoint)
	}
	return fmt.Sprintf("%q in the mount namespace of process %d (%s)", m.Mountpoint, m.view.PID,
		blockdev.ProcessName(m.view.PID))
}

func describe(mounts []Found) string {
	var words []string
	for i, m := range mounts {
		if i == 8 {
			words = append(words, fmt.Sprintf("%d more places", len(mounts)-i))
			break
		}
		words = append(words, m.String())
	}
	return strings.Join(words, ", ")
}

// Of lists the mounts of a disk in all namespaces: of its device, its node, and of the filesystem
// that the mount layer shows, which stays the same where the device is gone. The device or the layer
// may be missing.
func (vs Views) Of(d blockdev.Device, layer *mountinfo.Info) []Found {
	home, known := location{}, false
	if d.Path != "" {
		home, known = vs.own().locate(filepath.Dir(d.Path))
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

// CopiesAt lists what other namespaces have mounted on the path that is this one in the driver's.
func (vs Views) CopiesAt(path string) []Found {
	dir, ok := vs.own().locate(filepath.Dir(path))
	if !ok {
		return nil
	}
	at := location{dir.major, dir.minor, filepath.Join(dir.dir, filepath.Base(path))}
	var found []Found
	for _, view := range vs[1:] {
		for _, m := range view.table {
			if _, place, ok := view.table.placeOf(m); ok && place == at {
				found = append(found, Found{m, view})
			}
		}
	}
	return found
}

// SameFilesystem says whether two mounts, of whatever namespaces, show one filesystem. Its number
// alone may be another's by now, when the first is no longer mounted.
func SameFilesystem(a, b *mountinfo.Info) bool {
	return a.Major == b.Major && a.Minor == b.Minor && a.FSType == b.FSType && a.Source == b.Source
}

// shows says whether a mount is of the device, or of its node in home.
func (v view) shows(m *mountinfo.Info, d blockdev.Device, home location, known bool) bool {
	if v.PID == 0 {
		return showsDevice(m, d, home, known)
	}
	if !diskNode.MatchString(m.Root) {
		return showsDevice(m, d, home, known)
	}
	major, minor, err := blockdev.NumberAt(filepath.Join("/proc", strconv.Itoa(v.PID), "root",
		m.Mountpoint))
	if err != nil {
		// The process is gone, or does not let us look; the node's place has to do.
		return known && locationOf(m) == home && filepath.Base(nodePath(m)) == d.Name
	}
	return major == d.Major && minor == d.Minor && (!known || locationOf(m) == home)
}

// placeOf is where in its parent's filesystem a mount sits: its copies in the parent's peers sit in
// the same place.
func (t Table) placeOf(m *mountinfo.Info) (parent *mountinfo.Info, at location, ok bool) {
	i := slices.IndexFunc(t, func(p *mountinfo.Info) bool { return p.ID == m.Parent && p.ID != m.ID })
	if i < 0 {
		return nil, location{}, false // it is the root, or hidden by a process's root
	}
	parent = t[i]
	rest := strings.TrimPrefix(m.Mountpoint, parent.Mountpoint)
	return parent, location{parent.Major, parent.Minor, filepath.Join(parent.Root, rest)}, true
}

// peers are the peer groups of a mount: where it sends what happens on it, and from where it gets.
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

// reached are the peer groups that hear of what happens on a mount of that group: the group itself,
// the slaves' own groups, and so on.
func (vs Views) reached(group string) map[string]bool {
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

// goesWith says whether the kernel takes m down together with the driver's own mount: where kubelet
// and the driver's container share a directory, each sees the other's mounts as copies. Such a copy
// is no user of the volume. What is left of it after all is seen after the unmount.
func (vs Views) goesWith(m Found, own *mountinfo.Info, groups map[string]bool) bool {
	if m.view.PID == 0 && m.ID == own.ID {
		return true
	}
	_, place, ok := vs.own().placeOf(own)
	copyParent, copyPlace, copyOK := m.view.table.placeOf(m.Info)
	if !ok || !copyOK || place != copyPlace {
		return false
	}
	shared, master := peers(copyParent)
	return groups[shared] || groups[master]
}

// Elsewhere lists those of the mounts that do not go when the driver's own mounts do.
func (vs Views) Elsewhere(mounts []Found, own []*mountinfo.Info) []Found {
	for _, layer := range own {
		var group string
		if parent, _, ok := vs.own().placeOf(layer); ok {
			group, _ = peers(parent)
		}
		groups := vs.reached(group)
		mounts = slices.DeleteFunc(mounts, func(m Found) bool {
			return vs.goesWith(m, layer, groups)
		})
	}
	return mounts
}

// AwaitNone waits until look finds no mounts, and refuses with those that stay. Mounts in the
// driver's own namespace are somebody's publications and do not go by themselves; a copy in another
// namespace may be one of a moment, as when a container starts.
func AwaitNone(ctx context.Context, log *slog.Logger, wait time.Duration,
	look func(Views) []Found) error {
	deadline := time.Now().Add(wait)
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, 500*time.Millisecond) {
		views, err := ReadViews(ctx, log)
		if err != nil {
			return err
		}
		left := look(views)
		if len(left) == 0 {
			return nil
		}
		here := slices.ContainsFunc(left, func(m Found) bool { return m.view.PID == 0 })
		if here || time.Now().After(deadline) {
			return csierr.New(csierr.StillMounted, "the volume is still mounted at %s; unpublish it there "+
				"first", describe(left))
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until the volume is not mounted at %s: %w", describe(left), ctx.Err())
		case <-time.After(pause):
		}
	}
}
