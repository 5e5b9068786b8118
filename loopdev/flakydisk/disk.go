// Package flakydisk serves disks that fail as real disks do. A disk is a file of a FUSE filesystem,
// to which package loopdev can attach a block device. No kernel module is needed.
//
// A [Disk] keeps a log of the writes, discards and flushes that reached it, in their order, and of
// notes that the caller adds. From the log, [Replay] and [Apply] rebuild every content that the
// disk could have after a power cut: everything that was flushed, and any choice of the sectors
// ([SectorBytes]) that were written since.
//
// The log has requests in the order in which the disk serves them. So a flush covers all earlier
// writes of the log, including a write that was in progress when the flush arrived. A real disk
// may lose that write.
//
// A process that serves disks must not wait for them: it must not call sync(2). If one of its
// threads needs memory, the kernel may make this thread wait for a write to such a disk. Go's
// garbage collector may wait for this thread after it has stopped the threads that serve the write.
// The process then hangs for ever. So a process that allocates much must collect garbage while its
// disks are idle (runtime/debug.SetGCPercent).
//
// A process that serves disks may be killed at any time, even while it waits for one of them. Then
// a small guard process unmounts the filesystem by force, and every process that waits for these
// disks gets an error. A loop device stays until a process detaches it.
//
// Server needs Linux, /dev/fuse, CAP_SYS_ADMIN, a shell and umount. All else is portable.
package flakydisk

import (
	"io"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
)

// Store contains the content of a disk.
type Store interface {
	io.ReaderAt
	io.WriterAt
	Zero(offset, n int64) error
	// Flush makes all earlier writes durable.
	Flush() error
	Size() int64
	Resize(sizeBytes int64) error
}

// Disk is a disk that can fail. It is safe for use by several goroutines.
type Disk struct {
	mu      sync.Mutex // guards the fields below
	store   Store
	logging bool
	reads   bool
	log     []LogEntry
	faults  []*armed
	cut     bool
	// recent counts operations by second, at the index Unix time modulo ActivitySeconds.
	recent [ActivitySeconds]second
}

// NewDisk returns a disk with the content of a store.
func NewDisk(store Store) *Disk { return &Disk{store: store} }

// Op tells which operations a Fault affects. Values can be combined with |.
type Op uint8

// The operations. OnWrite includes discards.
const (
	OnRead Op = 1 << iota
	OnWrite
	OnFlush
)

// Fault makes operations of a disk fail with EIO, unless Delay, Hang or Lie is set.
type Fault struct {
	On Op
	// From and To limit the fault to reads and writes that touch the bytes From to To-1. If both are
	// 0, there is no limit. Flushes ignore them.
	From, To int64
	// Times limits how often the fault takes effect; 0 means until the caller removes it.
	Times int
	// Delay makes operations take longer. They succeed.
	Delay time.Duration
	// Hang makes operations wait until the caller removes the fault. Then they succeed.
	Hang bool
	// Lie makes a write or a flush do nothing and report success.
	Lie bool
	// Fired is how often the fault has taken effect.
	Fired int
}

// armed is a fault that AddFault added to a disk. Heal closes its channel.
type armed struct {
	Fault
	removed chan struct{}
}

func (f *armed) strikes(op Op, offset, n int64) bool {
	return f.On&op != 0 && (f.Times == 0 || f.Fired < f.Times) &&
		(op == OnFlush || f.From == 0 && f.To == 0 || offset < f.To && offset+n > f.From)
}

// AddFault adds a fault. fired() returns how often the fault has taken effect.
func (d *Disk) AddFault(f Fault) (fired func() int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	a := &armed{Fault: f, removed: make(chan struct{})}
	d.faults = append(d.faults, a)
	return func() int {
		d.mu.Lock()
		defer d.mu.Unlock()
		return a.Fired
	}
}

// Faults returns the faults that AddFault has added and Heal has not removed.
func (d *Disk) Faults() []Fault {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []Fault
	for _, f := range d.faults {
		all = append(all, f.Fault)
	}
	return all
}

// Heal removes all faults. Hanging operations continue.
func (d *Disk) Heal() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, f := range d.faults {
		close(f.removed)
	}
	d.faults = nil
}

// Cut cuts the disk's power. Every later operation and every hanging one fails.
func (d *Disk) Cut() {
	d.mu.Lock()
	d.cut = true
	d.mu.Unlock()
	d.Heal()
}

// StartLog starts an empty log. The log contains reads only if the argument is true.
func (d *Disk) StartLog(reads bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.logging, d.reads, d.log = true, reads, nil
}

// Log returns a copy of the log.
func (d *Disk) Log() []LogEntry {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.log)
}

// Note adds a note to the log.
func (d *Disk) Note(text string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.add(LogEntry{Kind: Note, Text: text})
}

// add appends an entry to the log, if the log keeps entries of this kind. The caller holds mu.
func (d *Disk) add(e LogEntry) {
	if d.logging && (e.Kind != Read || d.reads) {
		d.log = append(d.log, e)
	}
}

// begin counts an operation and applies its faults. The caller holds mu, which begin releases while
// the operation hangs or is delayed. If lie is true, the caller only reports success.
func (d *Disk) begin(op Op, offset, n int64) (lie bool, err error) {
	d.count(op, time.Now())
	for _, f := range slices.Clone(d.faults) {
		if !f.strikes(op, offset, n) {
			continue
		}
		f.Fired++
		switch {
		case f.Hang, f.Delay > 0:
			d.mu.Unlock()
			await(f)
			d.mu.Lock()
		case f.Lie:
			lie = true
		default:
			return false, syscall.EIO
		}
	}
	if d.cut {
		return false, syscall.EIO
	}
	return lie, nil
}

func await(f *armed) {
	if f.Hang {
		<-f.removed
		return
	}
	timer := time.NewTimer(f.Delay)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-f.removed:
	}
}

// ReadAt reads from the disk.
func (d *Disk) ReadAt(b []byte, offset int64) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.add(LogEntry{Kind: Read, Offset: offset, Bytes: int64(len(b))})
	if _, err := d.begin(OnRead, offset, int64(len(b))); err != nil {
		return 0, err
	}
	return d.store.ReadAt(b, offset)
}

// WriteAt writes to the disk.
func (d *Disk) WriteAt(b []byte, offset int64) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	lie, err := d.begin(OnWrite, offset, int64(len(b)))
	if lie || err != nil {
		return len(b), err
	}
	if d.logging {
		d.add(LogEntry{Kind: Write, Offset: offset, Bytes: int64(len(b)), Data: slices.Clone(b)})
	}
	return d.store.WriteAt(b, offset)
}

// Zero sets a range to zero, as a discard does.
func (d *Disk) Zero(offset, n int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	lie, err := d.begin(OnWrite, offset, n)
	if lie || err != nil {
		return err
	}
	d.add(LogEntry{Kind: Discard, Offset: offset, Bytes: n})
	return d.store.Zero(offset, n)
}

// Flush makes all earlier writes durable.
func (d *Disk) Flush() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	lie, err := d.begin(OnFlush, 0, 0)
	if lie || err != nil {
		return err
	}
	d.add(LogEntry{Kind: Flush})
	return d.store.Flush()
}

// Size returns the size in bytes.
func (d *Disk) Size() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.store.Size()
}

// Resize changes the size.
func (d *Disk) Resize(sizeBytes int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.store.Resize(sizeBytes)
}

// WithStore calls do() with the disk's content. Operations on the disk wait meanwhile.
func (d *Disk) WithStore(do func(Store)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	do(d.store)
}

// ActivitySeconds is the number of seconds that Activity returns.
const ActivitySeconds = 60

// Activity counts the operations of one second, including those that fail or hang.
type Activity struct{ Reads, Writes, Flushes int }

// second counts the operations of one second.
type second struct {
	at int64 // the Unix time
	Activity
}

// count adds an operation to the present second. The caller holds mu.
func (d *Disk) count(op Op, at time.Time) {
	s := &d.recent[at.Unix()%ActivitySeconds]
	if s.at != at.Unix() {
		*s = second{at: at.Unix()}
	}
	switch op {
	case OnRead:
		s.Reads++
	case OnWrite:
		s.Writes++
	case OnFlush:
		s.Flushes++
	}
}

// Activity returns the operations in each of the last ActivitySeconds seconds, the oldest first.
func (d *Disk) Activity(now time.Time) []Activity {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := make([]Activity, ActivitySeconds)
	for i := range all {
		at := now.Unix() - ActivitySeconds + 1 + int64(i)
		if s := d.recent[at%ActivitySeconds]; s.at == at {
			all[i] = s.Activity
		}
	}
	return all
}

// File is a [Store] that keeps the content in a file.
type File struct{ *os.File }

// OpenFile opens an existing file as a store.
func OpenFile(path string) (File, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	return File{f}, err
}

// Zero sets a range to zero by punching a hole into the file.
func (f File) Zero(offset, n int64) error { return punch(f.File, offset, n) }

// Flush makes all earlier writes durable.
func (f File) Flush() error { return f.Sync() }

// Size returns the size in bytes, or 0 if the file cannot be inspected.
func (f File) Size() int64 {
	st, err := f.Stat()
	if err != nil {
		return 0
	}
	return st.Size()
}

// Resize changes the size.
func (f File) Resize(sizeBytes int64) error { return f.Truncate(sizeBytes) }
