package filesystem

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/async"
)

const (
	// rangeReaders read chunks of chunkBytes at once. That keeps a disk behind a network busy, and one
	// reader compares while another waits.
	rangeReaders = 4
	chunkBytes   = 1 << 20
)

// foreignBytes returns the index of the first byte in b, read at that offset, that may not be
// there, or -1.
type foreignBytes func(b []byte, at int64) (int, error)

// allZero allows nothing but zeroes.
func allZero(b []byte, _ int64) (int, error) { return nonZero(b), nil }

// findForeign reads [from, to) of the device whole and returns the offset of the first byte that may
// not be there, or -1. It stops there. progress is told, from several goroutines, how many bytes
// more were found well.
func findForeign(ctx context.Context, h *blockdev.OpenDevice, from, to int64, foreign foreignBytes,
	progress func(n int64)) (int64, error) {
	if from < 0 || to > h.SizeBytes || from > to {
		return 0, fmt.Errorf("read %s from %d to %d: it has %d bytes", h.Path, from, to, h.SizeBytes)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := rangeScan{h: h, from: from, to: to, foreign: foreign, progress: progress}
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
	// What one reader failed at comes before what the others were stopped by.
	for _, err := range errs {
		if err != nil && !errors.Is(err, context.Canceled) {
			return 0, err
		}
	}
	return -1, errors.Join(errs...)
}

// rangeScan is a range that is being read. Chunks are handed out in their order, and a reader
// finishes the one it has, so the lowest byte that any reader finds is the first of the range.
type rangeScan struct {
	h        *blockdev.OpenDevice
	from, to int64
	foreign  foreignBytes
	progress func(n int64)

	next  atomic.Int64 // where the next chunk begins
	found atomic.Int64 // the first byte known to be foreign; to if there is none
}

// run reads chunks until none is left that could hold an earlier byte than the one found.
func (s *rangeScan) run(ctx context.Context) error {
	room := blockdev.Aligned(chunkBytes)
	for {
		at := s.next.Add(chunkBytes) - chunkBytes
		if at >= s.found.Load() {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := s.chunk(room, at); err != nil {
			return err
		}
	}
}

// chunk reads whole spots, as O_DIRECT wants it, and judges what is in the range.
func (s *rangeScan) chunk(room []byte, at int64) error {
	end := min(at+chunkBytes, s.to)
	b := room[:min((end+sectorBytes-1)&^(sectorBytes-1), s.h.SizeBytes)-at]
	if err := s.h.ReadInto(b, at); err != nil {
		return err
	}
	first := max(at, s.from)
	i, err := s.foreign(b[first-at:end-at], first)
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

// lower stores n unless less is there.
func lower(to *atomic.Int64, n int64) {
	for old := to.Load(); n < old; old = to.Load() {
		if to.CompareAndSwap(old, n) {
			return
		}
	}
}
