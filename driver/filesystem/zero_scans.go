package filesystem

import (
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
)

// ZeroScans are the reads of whole disks that are in progress, and the results of those that have
// ended. A read goes on when the call that began it gives up; the next call joins it. The zero
// value is ready for use.
type ZeroScans struct {
	mu sync.Mutex
	// guarded by mu
	jobs   map[zeroRange]*zeroScan
	closed bool

	running async.Group
}

// zeroRange identifies what a job reads: a range of one attachment of a disk.
type zeroRange struct {
	Volume, Serial string
	Major, Minor   uint32
	DiskSeq        uint64
	From, To       int64
	expected
}

// expected describes the bytes other than zero that may be in a range of a disk; the zero value
// means none.
type expected struct {
	Mkfs bool // what a mkfs of the driver writes, of any filesystem
	// Growth is what the growth of a filesystem of this type and UUID writes behind its old end.
	Growth    string
	UUID      uuid.UUID
	NodeBytes int64 // of a btrfs
}

type zeroScan struct {
	zeroRange
	began  time.Time
	read   atomic.Int64    // bytes that passed
	ctx    context.Context // the job's own, because the next call joins a job whose caller gave up
	cancel context.CancelFunc
	done   chan struct{}

	// written before done is closed

	leftMu sync.Mutex
	left   []int64 // the chunks with expected bytes; guarded by leftMu until then

	found   int64 // the offset of the first unexpected byte; -1 if there is none
	err     error
	before  blockdev.Counters // when the read began
	counted bool              // the kernel's counters include the read
}

func (j *zeroScan) ended() bool {
	select {
	case <-j.done:
		return true
	default:
		return false
	}
}

// join returns the job for the range, and whether it existed before. It starts a new job by calling
// run in the background. After Close it returns nil.
func (z *ZeroScans) join(r zeroRange, run func(*zeroScan)) (job *zeroScan, joined bool) {
	z.mu.Lock()
	defer z.mu.Unlock()
	if job := z.jobs[r]; job != nil || z.closed {
		return job, true
	}
	job = &zeroScan{zeroRange: r, began: time.Now(), done: make(chan struct{})}
	job.ctx, job.cancel = context.WithCancel(context.Background())
	if z.jobs == nil {
		z.jobs = map[zeroRange]*zeroScan{}
	}
	z.jobs[r] = job
	z.running.Go(func() {
		defer close(job.done)
		defer job.cancel()
		run(job)
	})
	return job, false
}

// Drop stops the jobs of a volume and drops their results, because the volume is published or
// unstaged. It returns when the jobs have closed the device.
func (z *ZeroScans) Drop(volume string) {
	z.dropIf(func(j *zeroScan) bool { return j.Volume == volume })
}

func (z *ZeroScans) dropIf(unwanted func(*zeroScan) bool) {
	z.mu.Lock()
	jobs := slices.DeleteFunc(slices.Collect(maps.Values(z.jobs)),
		func(j *zeroScan) bool { return !unwanted(j) })
	for _, job := range jobs {
		delete(z.jobs, job.zeroRange)
		job.cancel()
	}
	z.mu.Unlock()
	for _, job := range jobs {
		<-job.done
	}
}

// Close stops all jobs and starts no more.
func (z *ZeroScans) Close() {
	z.mu.Lock()
	z.closed = true
	z.mu.Unlock()
	z.dropIf(func(*zeroScan) bool { return true })
	z.running.Wait()
}
