package filesystem

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

const (
	watchInterval = time.Second
	logInterval   = 10 * time.Second
	// A call returns answerMargin before its deadline, so that the caller still receives the answer.
	answerMargin = 2 * time.Second
	// maxReads limits the reads that one call awaits: a read that an earlier call began, a new one if
	// that result is out of date, and another if the disk was written to during the new one.
	maxReads = 3
)

// proveBlank proves that the whole disk is blank. If unfinished is true, the disk may also hold
// records, and bytes that a mkfs of the driver writes. If it is false and the disk was created
// blank for filesystems, nothing is read: a format begins in regions that inspect has found blank.
// The result left contains the offsets of the chunks that mkfs has written to.
func (p *Preparation) proveBlank(ctx context.Context, unfinished bool) (left []int64, err error) {
	if p.Volume.madeBlank() && !unfinished {
		return nil, nil
	}
	return p.proveRange(ctx, 0, p.Device.SizeBytes, expected{Mkfs: unfinished})
}

// proveRange reads the range [from, to) of the device and proves that it holds only zeroes and
// expected bytes. The read continues when the caller gives up, and a repeated call joins it. A call
// accepts the result if nobody can have written to the device since the read began: the device's
// number and diskseq are the same, the kernel's counters of writes and discards have not changed,
// and no process has the device open for writing.
//
// It returns the offsets of the chunks of chunkBytes that have expected bytes which are not zero.
func (p *Preparation) proveRange(ctx context.Context, from, to int64, e expected) ([]int64, error) {
	d := disk{p.Device}
	r := zeroRange{Volume: p.Volume.ID, Serial: d.Serial, Major: d.Major, Minor: d.Minor,
		DiskSeq: d.DiskSeq, From: from, To: to, expected: e}
	for range maxReads {
		if err := d.AwaitNoWriters(); err != nil {
			return nil, err
		}
		own, err := d.Reopen() // the call closes its descriptor when it returns
		if err != nil {
			return nil, unread(err)
		}
		job, joined := p.Scans.join(r, func(j *zeroScan) {
			defer func() { _ = own.Close() }()
			j.run(p.Log, disk{own}, p.Volume)
		})
		if joined {
			_ = own.Close()
		}
		if job == nil {
			return nil, scanPending(d, "the driver is shutting down")
		}
		old := joined && job.ended()
		if err := awaitScan(ctx, d, job); err != nil {
			return nil, err
		}
		again, err := d.judgeScan(job, joined, old)
		if again || err != nil && !csierr.Has(err, csierr.DiskNotBlank) {
			p.Scans.dropIf(func(j *zeroScan) bool { return j == job })
		}
		if !again {
			return job.left, err
		}
	}
	return nil, csierr.New(csierr.DeviceHeld, "%s was written to each time while it was read whole; "+
		"stop the process that writes to it", d.Path)
}

func awaitScan(ctx context.Context, d disk, job *zeroScan) error {
	if deadline, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		left := time.Until(deadline)
		ctx, cancel = context.WithTimeout(ctx, left-min(answerMargin, left/10))
		defer cancel()
	}
	select {
	case <-job.done:
		return nil
	case <-ctx.Done():
	}
	size := job.To - job.From
	return scanPending(d, fmt.Sprintf("%d of %d MiB (%d %%) were read in %s", job.read.Load()>>20,
		size>>20, job.read.Load()*100/max(size, 1), time.Since(job.began).Round(time.Second)))
}

func scanPending(d disk, progress string) error {
	return csierr.New(csierr.DiskProofPending, "%s is being read whole, to prove that it is blank: "+
		"%s; the read goes on, and the repeated call waits for it", d.Path, progress)
}

// judgeScan checks a job's result. If again is true, the caller has to read again. joined means
// that another call started the job, and old that the job ended before this call.
func (d disk) judgeScan(job *zeroScan, joined, old bool) (again bool, err error) {
	switch {
	case old && (job.err != nil || job.DiskSeq == 0):
		return true, nil //nolint:nilerr // an old failure does not mean that another read fails
	case errors.Is(job.err, context.Canceled):
		return false, scanPending(d, "the driver is shutting down")
	case job.err != nil:
		return false, unread(job.err)
	case job.found >= 0:
		return d.judgeFound(job, old)
	}
	if err := d.AwaitNoWriters(); err != nil {
		return false, err
	}
	now, err := d.Counters()
	switch {
	case err != nil:
		return false, unreadable(err)
	case job.counted && now.Known():
		return !job.before.SameWrites(now), nil
	}
	// Without counters, only the call that began the job trusts the result: it held the device's lock.
	return joined, nil
}

func unread(err error) error {
	if csierr.ReasonOf(err) != "" {
		return err
	}
	return unreadable(err)
}

// judgeFound returns an error, or true if the unexpected byte that an old job found is zero by now.
func (d disk) judgeFound(job *zeroScan, old bool) (again bool, err error) {
	if old {
		b, err := d.Read(job.found&^(sectorBytes-1), sectorBytes)
		if err != nil {
			return false, unreadable(err)
		}
		if b[job.found%sectorBytes] == 0 {
			return true, nil
		}
	}
	return false, csierr.New(csierr.DiskNotBlank, "%s is not blank: read whole, its first byte from "+
		"%d to %d that is not expected is at offset %d; %w", d.Path, job.From, job.To, job.found,
		errNotBlank)
}

// run executes the job. The descriptor d holds no lock, so the job blocks no other calls.
func (j *zeroScan) run(log *slog.Logger, d disk, v Volume) {
	log = log.With("device", d.Path, "serial", d.Serial, "from", j.From, "to", j.To)
	log.Info("reading a whole disk to prove that it is blank")
	j.found = -1
	j.err = async.Guard(j.ctx, log, "the read of a disk", func() error {
		ctx, stop := context.WithCancel(j.ctx)
		defer stop()
		watch := async.Start(func() (struct{}, error) {
			defer stop()
			return struct{}{}, d.watchScan(ctx, j, log)
		})
		err := d.readCounted(ctx, v, j)
		stop()
		if _, gone := watch(); gone != nil {
			return gone
		}
		return err
	})
	end := log.With("mib_zero", j.read.Load()>>20, "took", time.Since(j.began))
	switch {
	case j.err != nil:
		end.Warn("the disk was not read to the end", "error", j.err)
	case j.found >= 0:
		end.Info("the disk is not blank", "first_nonzero", j.found)
	default:
		end.Info("the disk is blank")
	}
}

// readCounted reads the job's range, and sets j.counted if the kernel's counters include the read.
func (d disk) readCounted(ctx context.Context, v Volume, j *zeroScan) error {
	before, err := d.Counters()
	if err != nil {
		return err
	}
	check := j.note(d.traces(v, j.expected).check)
	j.found, err = findUnexpected(ctx, d.OpenDevice, j.From, j.To, check,
		func(n int64) { j.read.Add(n) })
	if err != nil {
		return err
	}
	after, err := d.Counters()
	j.before = before
	j.counted = before.Known() && after.Known() &&
		after.ReadSectors-before.ReadSectors >= uint64(j.read.Load())/blockdev.SysfsSectorBytes
	return err
}

func (j *zeroScan) note(check byteCheck) byteCheck {
	return func(b []byte, at int64) (int, error) {
		if nonZero(b) < 0 {
			return -1, nil
		}
		j.leftMu.Lock()
		j.left = append(j.left, at&^(chunkBytes-1))
		j.leftMu.Unlock()
		return check(b, at)
	}
}

// watchScan logs the progress, and fails if the device is detached or replaced.
func (d disk) watchScan(ctx context.Context, j *zeroScan, log *slog.Logger) error {
	tick := time.NewTicker(watchInterval)
	defer tick.Stop()
	logged := time.Now()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if err := d.Reverify(); err != nil {
			return err
		}
		if time.Since(logged) >= logInterval {
			logged = time.Now()
			log.Info("reading the disk", "mib_zero", j.read.Load()>>20, "of_mib", (j.To-j.From)>>20)
		}
	}
}

const (
	// rangeReaders is the number of goroutines that read chunks of chunkBytes. Several requests keep a
	// disk behind a network busy, and one goroutine compares bytes while another waits for the disk.
	rangeReaders = 4
	chunkBytes   = 1 << 20
)

// byteCheck returns the index of the first unexpected byte in b, or -1. The parameter at is the
// offset of b.
type byteCheck func(b []byte, at int64) (int, error)

// findUnexpected returns the offset of the first byte in [from, to) that check() rejects, or -1.
// Several goroutines call progress(), with the number of bytes that passed the check.
func findUnexpected(ctx context.Context, d *blockdev.OpenDevice, from, to int64, check byteCheck,
	progress func(n int64)) (int64, error) {
	if from < 0 || to > d.SizeBytes || from > to {
		return 0, fmt.Errorf("read %s from %d to %d: it has %d bytes", d.Path, from, to, d.SizeBytes)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := rangeScan{device: d, from: from, to: to, check: check, progress: progress}
	s.next.Store(from &^ (sectorBytes - 1))
	s.found.Store(to)
	errs := make([]error, rangeReaders)
	var group async.Group
	for i := range errs {
		group.Go(func() {
			errs[i] = s.run(ctx)
			if errs[i] != nil {
				cancel()
			}
		})
	}
	group.Wait()
	if found := s.found.Load(); found < to {
		return found, nil
	}
	// Return the error of the reader that failed, not of the readers that it canceled.
	for _, err := range errs {
		if err != nil && !errors.Is(err, context.Canceled) {
			return 0, err
		}
	}
	return -1, errors.Join(errs...)
}

// rangeScan is the state of findUnexpected. Readers take chunks in order and finish each, so the
// lowest unexpected byte that they find is the first of the range.
type rangeScan struct {
	device   *blockdev.OpenDevice
	from, to int64
	check    byteCheck
	progress func(n int64)

	next  atomic.Int64 // the offset of the next chunk
	found atomic.Int64 // offset of the first unexpected byte so far, or to
}

func (s *rangeScan) run(ctx context.Context) error {
	buf := blockdev.Aligned(chunkBytes)
	for {
		at := s.next.Add(chunkBytes) - chunkBytes
		if at >= s.found.Load() {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := s.chunk(buf, at); err != nil {
			return err
		}
	}
}

// chunk reads whole sectors, as O_DIRECT requires, and checks the bytes that are in the range.
func (s *rangeScan) chunk(buf []byte, at int64) error {
	end := min(at+chunkBytes, s.to)
	b := buf[:min((end+sectorBytes-1)&^(sectorBytes-1), s.device.SizeBytes)-at]
	if err := s.device.ReadInto(b, at); err != nil {
		return err
	}
	first := max(at, s.from)
	i, err := s.check(b[first-at:end-at], first)
	if err != nil {
		return err
	}
	if i >= 0 {
		lower(&s.found, first+int64(i))
		return nil
	}
	s.progress(end - first)
	return nil
}

func lower(to *atomic.Int64, n int64) {
	for old := to.Load(); n < old; old = to.Load() {
		if to.CompareAndSwap(old, n) {
			return
		}
	}
}
