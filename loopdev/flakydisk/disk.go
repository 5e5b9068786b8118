package flakydisk

import (
	"io"
	"slices"
	"sync"
	"syscall"
	"time"
)

// Store is where a disk has its content.
type Store interface {
	io.ReaderAt
	io.WriterAt
	Zero(offset, n int64) error
	// Flush makes durable what was written.
	Flush() error
	Size() int64
	Resize(sizeBytes int64) error
}

// Disk is a disk that can fail. It is safe for use by several goroutines.
type Disk struct {
	// mu guards the rest.
	mu      sync.Mutex
	store   Store
	logging bool
	reads   bool
	log     []Record
	faults  []*armed
	cut     bool
}

// NewDisk returns a disk with that content.
func NewDisk(store Store) *Disk { return &Disk{store: store} }

// Op is what a fault strikes.
type Op uint8

// The operations of a disk. A discard is a write.
const (
	OnRead Op = 1 << iota
	OnWrite
	OnFlush
)

// Fault lets operations of a disk fail. Without a Delay, a Hang or a Lie it is EIO.
type Fault struct {
	On Op
	// From and To are the bytes that it strikes; both 0 are all. A flush has no place.
	From, To int64
	// Times is how often it strikes; 0 is until it is removed.
	Times int
	// Delay lets operations take longer, and succeed.
	Delay time.Duration
	// Hang lets operations wait until the fault is removed, and then succeed.
	Hang bool
	// Lie answers that a write or a flush is done, and does nothing.
	Lie bool
	// Fired is how often it has struck.
	Fired int
}

// armed is a fault in force.
type armed struct {
	Fault
	removed chan struct{}
}

func (f *armed) strikes(op Op, offset, n int64) bool {
	return f.On&op != 0 && (f.Times == 0 || f.Fired < f.Times) &&
		(op == OnFlush || f.From == 0 && f.To == 0 || offset < f.To && offset+n > f.From)
}

// AddFault puts a fault in force. The function returned reports how often it has struck.
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

// Faults returns the faults in force.
func (d *Disk) Faults() []Fault {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []Fault
	for _, f := range d.faults {
		all = append(all, f.Fault)
	}
	return all
}

// Heal removes all faults. What hangs goes on.
func (d *Disk) Heal() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, f := range d.faults {
		close(f.removed)
	}
	d.faults = nil
}

// Cut cuts the disk's power: every operation fails from now on, also one that hangs. Its faults are
// gone.
func (d *Disk) Cut() {
	d.mu.Lock()
	d.cut = true
	d.mu.Unlock()
	d.Heal()
}

// StartLog begins an empty log, with reads in it or not.
func (d *Disk) StartLog(reads bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.logging, d.reads, d.log = true, reads, nil
}

// Log returns a copy of the log so far.
func (d *Disk) Log() []Record {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.log)
}

// Note adds a note to the log.
func (d *Disk) Note(text string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.add(Record{Kind: Note, Text: text})
}

// add adds to the log. The caller holds mu.
func (d *Disk) add(r Record) {
	if d.logging && (r.Kind != Read || d.reads) {
		d.log = append(d.log, r)
	}
}

// begin applies the faults that an operation meets. The caller holds mu, which begin gives up while
// the operation hangs or is delayed.
func (d *Disk) begin(op Op, offset, n int64) (lie bool, err error) {
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

// await waits until a hanging operation may go on.
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
	d.add(Record{Kind: Read, Offset: offset, Bytes: int64(len(b))})
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
		d.add(Record{Kind: Write, Offset: offset, Bytes: int64(len(b)), Data: slices.Clone(b)})
	}
	return d.store.WriteAt(b, offset)
}

// Zero makes a range zero, as a discard does.
func (d *Disk) Zero(offset, n int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	lie, err := d.begin(OnWrite, offset, n)
	if lie || err != nil {
		return err
	}
	d.add(Record{Kind: Discard, Offset: offset, Bytes: n})
	return d.store.Zero(offset, n)
}

// Flush makes durable what was written.
func (d *Disk) Flush() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	lie, err := d.begin(OnFlush, 0, 0)
	if lie || err != nil {
		return err
	}
	d.add(Record{Kind: Flush})
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

// WithStore calls do with the disk's content, while nothing is read or written.
func (d *Disk) WithStore(do func(Store)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	do(d.store)
}
