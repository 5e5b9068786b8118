package filesystem

import (
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/async"
)

// ZeroScans are the reads of whole disks that are under way, and the results of those that have
// ended. A read goes on when the call that began it gives up; the next call joins it. The zero
// value is ready for use.
type ZeroScans struct {
	mu sync.Mutex
	// guarded by mu
	jobs   map[zeroRange]*zeroScan
	closed bool

	running async.Group
}

// zeroRange is what a job reads: a part of one attachment of a disk.
type zeroRange struct {
	Volume, Serial string
	Major, Minor   uint32
	Sequence       uint64
	From, To       int64
	Unfinished     bool // traces of a format are allowed
}

// zeroScan is one read. What stands behind done is written before done is closed.
type zeroScan struct {
	zeroRange
	began  time.Time
	read   atomic.Int64 // bytes that were found zero
	cancel context.CancelFunc
	done   chan struct{}

	found   int64 // the first byte that is not zero; -1 if there is none
	err     error
	before  blockdev.Counters // when the read began
	counted bool              // the kernel has counted the read
}

// ended reports whether the job's result is there.
func (j *zeroScan) ended() bool {
	select {
	case <-j.done:
		return true
	default:
		return false
	}
}

// join returns the job for the range and whether it was there before. A new one runs on its own.
// There is none when the driver is about to end.
func (z *ZeroScans) join(r zeroRange, run func(context.Context, *zeroScan)) (job *zeroScan,
	joined bool) {
	z.mu.Lock()
	defer z.mu.Unlock()
	if job := z.jobs[r]; job != nil || z.closed {
		return job, true
	}
	// No caller's context: the read is for whoever asks next.
	ctx, cancel := context.WithCancel(context.Background())
	job = &zeroScan{zeroRange: r, began: time.Now(), cancel: cancel, done: make(chan struct{})}
	if z.jobs == nil {
		z.jobs = map[zeroRange]*zeroScan{}
	}
	z.jobs[r] = job
	z.running.Go(func() {
		defer close(job.done)
		defer cancel()
		run(ctx, job)
	})
	return job, false
}

// Drop stops the jobs of a volume and forgets their results, for the volume is shown to somebody or
// goes away. It returns when they no longer have the device.
func (z *ZeroScans) Drop(volume string) {
	z.dropIf(func(j *zeroScan) bool { return j.Volume == volume })
}

// dropIf does so for the jobs that unwanted picks.
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

// Close stops all jobs, and takes no more.
func (z *ZeroScans) Close() {
	z.mu.Lock()
	z.closed = true
	z.mu.Unlock()
	z.dropIf(func(*zeroScan) bool { return true })
	z.running.Wait()
}
