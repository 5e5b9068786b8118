package filesystem

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
)

const (
	// rangeReaders is how many goroutines read chunks of chunkBytes at once. Several keep a disk
	// behind a network busy, and one compares while another waits.
	rangeReaders = 4
	chunkBytes   = 1 << 20
)

// byteCheck returns the index of the first unexpected byte in b, which was read at that offset, or
// -1.
type byteCheck func(b []byte, at int64) (int, error)

// findUnexpected reads the range [from, to) of the device whole and returns the offset of the first
// byte that check does not expect, or -1. It stops there. It calls progress, from several
// goroutines, with the number of bytes that passed.
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
	// Return the error of the reader that failed rather than those that it canceled.
	for _, err := range errs {
		if err != nil && !errors.Is(err, context.Canceled) {
			return 0, err
		}
	}
	return -1, errors.Join(errs...)
}

// rangeScan is a range that is being read. Chunks are handed out in order, and a reader finishes
// the chunk it has, so the lowest byte that any reader finds is the first of the range.
type rangeScan struct {
	device   *blockdev.OpenDevice
	from, to int64
	check    byteCheck
	progress func(n int64)

	next  atomic.Int64 // the offset of the next chunk
	found atomic.Int64 // the offset of the first unexpected byte so far; to if there is none
}

// run reads chunks until none is left that could hold an earlier byte than the one found.
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

// chunk reads whole sectors, as O_DIRECT requires, and checks those bytes that are in the range.
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

// lower stores n unless the stored value is lower.
func lower(to *atomic.Int64, n int64) {
	for old := to.Load(); n < old; old = to.Load() {
		if to.CompareAndSwap(old, n) {
			return
		}
	}
}
