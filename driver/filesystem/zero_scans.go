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

// ZeroScans contains the reads of whole disks that are in progress, and the results of those that
// ended. The zero value is ready for use.
type ZeroScans struct {
	mu sync.Mutex
	// guarded by mu
	jobs   map[zeroRange]*zeroScan
	closed bool

	running async.Group
}

// zeroRange identifies a job: the range that it reads, and the attachment of the disk.
type zeroRange struct {
	Volume, Serial string
	Major, Minor   uint32
	DiskSeq        uint64
	From, To       int64
	expected
}

// expected describes the bytes other than zero that are allowed in a range of a disk. The zero
// value allows none.
type expected struct {
	Mkfs bool // allows what any mkfs of the driver writes
	// Growth, if set, is a filesystem type. What its growth writes behind the old end is allowed.
	Growth    string
	UUID      uuid.UUID
	NodeBytes int64 // of a btrfs
}

type zeroScan struct {
	zeroRange
	began  time.Time
	read   atomic.Int64    // bytes read and checked
	ctx    context.Context // not the caller's, because another call may join the job
	cancel context.CancelFunc
	done   chan struct{}

	// The job writes the fields below before it closes done. Then they can be read without a lock.

	leftMu sync.Mutex
	left   []int64 // offsets of chunks that are not zero; guarded by leftMu while the job runs

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

// join returns the job for the range, and whether the job existed before. For a new job it calls
// run() in a goroutine. After Close, it returns a nil job.
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

// Drop stops the volume's jobs and forgets their results. It returns when the jobs have closed the
// device.
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

// Close stops all jobs, and prevents new ones.
func (z *ZeroScans) Close() {
	z.mu.Lock()
	z.closed = true
	z.mu.Unlock()
	z.dropIf(func(*zeroScan) bool { return true })
	z.running.Wait()
}
