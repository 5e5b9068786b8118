package filesystem

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/async"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

const (
	// watchInterval is how often a read looks whether its disk is still attached, and logInterval how often
	// it says how far it is.
	watchInterval = time.Second
	logInterval   = 10 * time.Second
	// answerMargin is how long before its caller's patience ends a call answers, so that the answer
	// is heard.
	answerMargin = 2 * time.Second
	// maxReads is how often a call has a disk read: once for an old result that is worth nothing,
	// and once more when something was written meanwhile.
	maxReads = 3
)

// proveZero proves that the range [from, to) of the device holds nothing but zeroes, by reading it
// whole. The read goes on when the caller gives up; a repeated call joins it, and takes its result
// as long as nothing can have been written since: it is the same birth of the same device, the
// kernel's counts of writes and discards are what they were before the read began, and no process
// has the device open for writing.
func (p *Preparation) proveZero(ctx context.Context, from, to int64) error {
	return p.proveRange(ctx, p.rangeOf(from, to))
}

// proveBlank proves in that way that there is nothing on the whole disk, or, beside the mark of an
// unfinished format, nothing but what a mkfs of the driver's has left. A disk that was made blank,
// for filesystems alone, needs no such proof: the areas, which were read before, are the places
// where mkfs and the driver write first.
func (p *Preparation) proveBlank(ctx context.Context, unfinished bool) error {
	if p.Volume.madeBlank() {
		return nil
	}
	r := p.rangeOf(0, p.Device.SizeBytes)
	r.Unfinished = unfinished
	return p.proveRange(ctx, r)
}

func (p *Preparation) rangeOf(from, to int64) zeroRange {
	h := p.Device
	return zeroRange{Volume: p.Volume.ID, Serial: h.Serial, Major: h.Major, Minor: h.Minor,
		Sequence: h.Sequence, From: from, To: to}
}

func (p *Preparation) proveRange(ctx context.Context, r zeroRange) error {
	h := disk{p.Device}
	for range maxReads {
		if err := h.AwaitNoWriters(); err != nil {
			return err
		}
		job, joined := p.Scans.join(r, func(ctx context.Context, j *zeroScan) {
			runScan(ctx, p.Log, h,
				j)
		})
		if job == nil {
			return scanPending(h, "the driver is about to end")
		}
		old := joined && job.ended()
		if err := awaitScan(ctx, h, job); err != nil {
			return err
		}
		again, err := h.judgeScan(job, joined, old)
		if again || err != nil && !csierr.Has(err, csierr.DiskNotBlank) {
			p.Scans.dropIf(func(j *zeroScan) bool { return j == job })
		}
		if !again {
			return err
		}
	}
	return csierr.New(csierr.DeviceHeld, "%s was written to again and again while it was read whole; "+
		"end what writes to it", h.Path)
}

// awaitScan waits until the job has ended or the caller's patience is about to.
func awaitScan(ctx context.Context, h disk, job *zeroScan) error {
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
	return scanPending(h, fmt.Sprintf("%d of %d MiB (%d %%) were read in %s", job.read.Load()>>20,
		size>>20, job.read.Load()*100/max(size, 1), time.Since(job.began).Round(time.Second)))
}

func scanPending(h disk, how string) error {
	return csierr.New(csierr.DiskProofPending, "%s is being read whole, to prove that nothing is on "+
		"it: %s; the reading goes on, and the repeated call waits for it", h.Path, how)
}

// judgeZero decides what the result of a job is worth now; again asks for another read. joined says
// that the call did not begin the read, old that the read had ended when the call came.
func (h disk) judgeScan(job *zeroScan, joined, old bool) (again bool, err error) {
	switch {
	case old && (job.err != nil || job.Sequence == 0):
		return true, nil //nolint:nilerr // an old failure says nothing of now
	case errors.Is(job.err, context.Canceled):
		return false, scanPending(h, "the driver is about to end")
	case csierr.ReasonOf(job.err) != "":
		return false, job.err
	case job.err != nil:
		return false, unreadable(job.err)
	case job.found >= 0:
		return h.judgeFound(job, old)
	}
	if err := h.AwaitNoWriters(); err != nil {
		return false, err
	}
	now, err := h.Counters()
	switch {
	case err != nil:
		return false, unreadable(err)
	case job.counted && now.Known():
		return !job.before.SameWrites(now), nil
	}
	// A call that has held the device since before the first byte was read goes without the counts.
	return joined, nil
}

// judgeFound refuses for the byte that a job has found, if it is still there.
func (h disk) judgeFound(job *zeroScan, old bool) (again bool, err error) {
	if old {
		b, err := h.Read(job.found&^(sectorBytes-1), sectorBytes)
		if err != nil {
			return false, unreadable(err)
		}
		if b[job.found%sectorBytes] == 0 {
			return true, nil
		}
	}
	what := "is not zero"
	if job.Unfinished {
		what = "no mkfs of the driver has written"
	}
	return false, csierr.New(csierr.DiskNotBlank, "%s is not blank: read whole, its first byte from "+
		"%d to %d that %s is at offset %d; %w", h.Path, job.From, job.To, what, job.found, errNotBlank)
}

// runScan is the job. It has a descriptor of its own, for the call's ends with the call, and the
// job is not to keep others from the device.
func runScan(ctx context.Context, log *slog.Logger, h disk, j *zeroScan) {
	log = log.With("device", h.Path, "serial", h.Serial, "from", j.From, "to", j.To)
	log.Info("reading a disk whole, to prove that nothing is on it")
	j.found = -1
	j.err = async.Guard(ctx, log, "the read of a disk", func() error {
		device, err := h.Reopen()
		if err != nil {
			return err
		}
		defer func() { _ = device.Close() }()
		own := disk{device}
		ctx, stop := context.WithCancel(ctx)
		defer stop()
		attached := async.Start(func() (struct{}, error) {
			defer stop()
			return struct{}{}, own.watchScan(ctx, j, log)
		})
		err = own.readCounted(ctx, j)
		stop()
		if _, gone := attached(); gone != nil {
			return gone
		}
		return err
	})
	end := log.With("mib_zero", j.read.Load()>>20, "took", time.Since(j.began))
	switch {
	case j.err != nil:
		end.Warn("the disk was not read to the end", "error", j.err)
	case j.found >= 0:
		end.Info("the disk is not blank", "first_not_zero", j.found)
	default:
		end.Info("nothing is on the disk")
	}
}

// readCounted reads the range between two looks at the counters. They count only if they have seen
// the reading itself.
func (h disk) readCounted(ctx context.Context, j *zeroScan) error {
	before, err := h.Counters()
	if err != nil {
		return err
	}
	foreign := foreignBytes(allZero)
	if j.Unfinished {
		foreign = h.traces().foreign
	}
	j.found, err = findForeign(ctx, h.OpenDevice, j.From, j.To, foreign,
		func(n int64) { j.read.Add(n) })
	if err != nil {
		return err
	}
	after, err := h.Counters()
	j.before = before
	j.counted = before.Known() && after.Known() &&
		after.ReadSectors-before.ReadSectors >= uint64(j.read.Load())/blockdev.SysfsSectorBytes
	return err
}

// watchZero returns an error when the device is no longer where it was, and says how far the read
// is.
func (h disk) watchScan(ctx context.Context, j *zeroScan, log *slog.Logger) error {
	tick := time.NewTicker(watchInterval)
	defer tick.Stop()
	said := time.Now()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if err := h.Reverify(); err != nil {
			return err
		}
		if time.Since(said) >= logInterval {
			said = time.Now()
			log.Info("reading the disk", "mib_zero", j.read.Load()>>20, "of_mib", (j.To-j.From)>>20)
		}
	}
}
