package dataplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// ErrWrittenMeanwhile means that no consistent copy of a disk could be made: the filesystem of the
// simulator's directory has no reflinks, and the disk was written during every attempt to copy it.
var ErrWrittenMeanwhile = errors.New("the disk was written while it was copied")

// snapshotAttempts is the number of times that a disk is copied if it is written in the meantime.
const snapshotAttempts = 20

// SnapshotDisk copies the disk's bytes as they are at one moment during the call. It does not
// change an existing snapshot. If it returns ErrWrittenMeanwhile, there is no snapshot.
//
// As on a rack, the guest does not flush its caches first, so a filesystem in the snapshot is in
// the state after a power cut.
func (p *Plane) SnapshotDisk(ctx context.Context, snapshotID, diskID string) error {
	defer p.disks.Lock(diskID)()
	err := p.makeBacking(p.SnapshotPath(snapshotID), func(f *os.File) error {
		src, err := os.Open(p.DiskPath(diskID))
		if err != nil {
			return err
		}
		defer src.Close()
		d := p.guests.disk(diskID)
		plugged := d != nil && d.loop != nil
		if d != nil { // stop a virtual machine meanwhile
			resume, err := p.still(d.guest)
			if err != nil {
				return err
			}
			defer resume()
		}
		switch {
		case shareBlocks(f, src):
		case plugged && p.tampering.tamper().copied == nil:
			err = p.copyStill(ctx, f, src, d)
		default: // no guest writes, or a tamper damages the copy
			err = copyKeepingHoles(ctx, f, src)
		}
		if err != nil || !plugged {
			return err
		}
		if err := p.tampering.copied(ctx, f, d); err != nil {
			return err
		}
		return f.Truncate(d.spec.SizeBytes)
	})
	err = errors.Join(err, p.tampering.life(
		event{what: snapshotTaken, disk: diskID, snapshot: p.SnapshotPath(snapshotID)}, err))
	if err != nil {
		return fmt.Errorf("snapshot %s of disk %s: %w", snapshotID, diskID, err)
	}
	return nil
}

// copyStill copies the disk of a guest, and repeats the copy if there were writes in the meantime.
func (p *Plane) copyStill(ctx context.Context, dst, src *os.File, d *plugged) error {
	// Without precedence, a copy on a busy machine takes longer than the pauses between two writes.
	defer hurry()()
	for attempt := range snapshotAttempts {
		if err := pause(ctx, time.Duration(attempt)*10*time.Millisecond); err != nil {
			return err
		}
		if err := dst.Truncate(0); err != nil {
			return err
		}
		still, err := copyOnce(ctx, dst, src, d)
		if err != nil || still {
			return err
		}
		p.log.Info("copying a disk again that was written to meanwhile",
			slog.String("disk", d.spec.DiskID), slog.Int("attempt", attempt+1))
	}
	return ErrWrittenMeanwhile
}

// copyOnce copies once, and reports whether there were no writes in the meantime.
func copyOnce(ctx context.Context, dst, src *os.File, d *plugged) (still bool, err error) {
	before, idle, err := writesBegin(*d.loop)
	if err != nil || !idle {
		return false, err
	}
	if err := copyKeepingHoles(ctx, dst, src); err != nil {
		return false, err
	}
	after, idle, err := writesEnd(*d.loop)
	return idle && after == before, err
}

// writes counts the write requests of a block device. The kernel counts a request when it is done.
type writes struct{ requests, sectors, discards, discardedSectors uint64 }

// writesBegin reads the counters first and then the requests in flight. A request that ends or
// begins later is then in the counters or in flight at the end.
func writesBegin(loop loopdev.Device) (w writes, idle bool, err error) {
	if w, err = countWrites(loop); err != nil {
		return w, false, err
	}
	idle, err = noWriteInFlight(loop)
	return w, idle, err
}

// writesEnd reads in the opposite order, for the reason given at writesBegin.
func writesEnd(loop loopdev.Device) (w writes, idle bool, err error) {
	if idle, err = noWriteInFlight(loop); err != nil {
		return w, false, err
	}
	w, err = countWrites(loop)
	return w, idle, err
}

// countWrites reads the counters (Documentation/block/stat.rst). It fails if accounting is
// switched off.
func countWrites(loop loopdev.Device) (writes, error) {
	accounted, err := loopNumbers(loop, "queue/iostats", 1)
	if err != nil {
		return writes{}, err
	}
	if accounted[0] == 0 {
		return writes{}, fmt.Errorf("%w: %s counts no requests (queue/iostats is 0)",
			ErrWrittenMeanwhile, loop.Path)
	}
	n, err := loopNumbers(loop, "stat", 15)
	if err != nil {
		return writes{}, err
	}
	return writes{requests: n[4], sectors: n[6], discards: n[11], discardedSectors: n[13]}, nil
}

func noWriteInFlight(loop loopdev.Device) (bool, error) {
	n, err := loopNumbers(loop, "inflight", 2)
	if err != nil {
		return false, err
	}
	return n[1] == 0, nil
}

// loopNumbers reads an attribute that consists of at least the given number of numbers.
func loopNumbers(loop loopdev.Device, attribute string, least int) ([]uint64, error) {
	path := fmt.Sprintf("/sys/block/loop%d/%s", loop.Number, attribute)
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var numbers []uint64
	for _, field := range bytes.Fields(text) {
		n, err := strconv.ParseUint(string(field), 10, 64)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", path, err)
		}
		numbers = append(numbers, n)
	}
	if len(numbers) < least {
		return nil, fmt.Errorf("read %s: %d numbers, want at least %d", path, len(numbers), least)
	}
	return numbers, nil
}

// pause waits for d, or returns ctx's error if ctx ends before.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}
