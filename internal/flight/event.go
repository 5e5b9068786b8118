package flight

import "sync"

// Event is a kind of change.
type Event string

// The events of a controller are changes of the rack, those of a node changes of a disk's bytes and
// of mounts.
const (
	DiskCreated     Event = "DiskCreated"
	DiskDeleted     Event = "DiskDeleted"
	DiskAttached    Event = "DiskAttached"
	DiskDetached    Event = "DiskDetached"
	SnapshotCreated Event = "SnapshotCreated"
	SnapshotDeleted Event = "SnapshotDeleted"

	ProvenBlank        Event = "ProvenBlank"
	FormatResumed      Event = "FormatResumed"
	Formatted          Event = "Formatted"
	RecordErased       Event = "RecordErased"
	FilesystemChecked  Event = "FilesystemChecked"
	FilesystemRepaired Event = "FilesystemRepaired"
	FilesystemGrown    Event = "FilesystemGrown"
	Mounted            Event = "Mounted"
	Published          Event = "Published"
	Unpublished        Event = "Unpublished"
	Unmounted          Event = "Unmounted"
)

// explained is an event with its message in the log, and what it means to an operator.
type explained struct {
	Event         Event
	Says, Meaning string
}

// Events lists every event, in the order of a volume's life.
var Events = []explained{
	{DiskCreated, "disk created",
		"The rack made the volume's disk. With `seen=true` the answer had been lost, " +
			"and a repeated call found the disk."},
	{DiskAttached, "disk attached",
		"The rack attached the disk to the node's instance."},
	{ProvenBlank, "disk proven blank",
		"The driver has read the disk, as far as `detail` says, and found nothing but " +
			"zeroes. Only then does it format."},
	{FormatResumed, "unfinished format resumed",
		"An earlier format of this volume was cut off. What it left is erased, and the " +
			"disk is formatted anew."},
	{Formatted, "disk formatted",
		"The disk has a new filesystem; `detail` has the command's options."},
	{RecordErased, "record of a format erased",
		"The rest of an unfinished format was erased before a workload got the disk as " +
			"a raw device."},
	{FilesystemChecked, "filesystem checked",
		"e2fsck has looked at a filesystem that was not unmounted in order, and changed " +
			"nothing."},
	{FilesystemRepaired, "filesystem repaired",
		"e2fsck has corrected errors that need no decision."},
	{FilesystemGrown, "filesystem grown",
		"The filesystem was smaller than its disk, for example after a restore to a " +
			"larger volume."},
	{Mounted, "volume mounted",
		"The filesystem is mounted at the staging path."},
	{Published, "volume published",
		"A workload has the volume at the target path."},
	{Unpublished, "volume unpublished",
		"The target path is unmounted."},
	{Unmounted, "volume unmounted",
		"The staging path is unmounted, and what was cached is written."},
	{DiskDetached, "disk detached",
		"The rack detached the disk from the instance."},
	{SnapshotCreated, "snapshot created",
		"The rack took a snapshot of the disk."},
	{SnapshotDeleted, "snapshot deleted",
		"The rack deleted the snapshot."},
	{DiskDeleted, "disk deleted",
		"The rack deleted the disk and its data."},
}

// Says is the event's message in the log.
func (e Event) Says() string {
	for _, known := range Events {
		if known.Event == e {
			return known.Says
		}
	}
	return string(e)
}

// openLimit is how many changes with an unknown outcome are remembered.
const openLimit = 1000

// memory remembers the open changes of one process. It is for a controller, which keeps nothing.
type memory struct {
	mu sync.Mutex
	// guarded by mu
	open map[string]int
}

func (m *memory) add(e Entry, always bool) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	known := m.open[e.key] > 0
	switch {
	case e.Outcome == Failed && m.open[e.key] > 1:
		m.open[e.key]-- // the outcome of an earlier one is still unknown
		return true, nil
	case e.Outcome != Begun:
		delete(m.open, e.key)
		return known || always, nil
	case m.open == nil:
		m.open = map[string]int{}
	}
	if len(m.open) >= openLimit {
		for key := range m.open { // any: nobody asked for a thousand of them again
			delete(m.open, key)
			break
		}
	}
	m.open[e.key]++
	return true, nil
}
