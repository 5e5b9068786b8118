//go:build linux

package corpus_test

import (
	"fmt"
	"math/rand/v2"
)

// provenStart and provenEnd are the sizes of the parts at a disk's start and end that are
// always read completely.
const (
	provenStart = mib
	provenEnd   = mib
)

// noise returns disks that are blank except for some bytes at a place that the driver promises
// to read.
func noise() []generator {
	all := []generator{
		oneByte("the first byte", func(*trial) int64 { return 0 }),
		oneByte("the last byte", func(t *trial) int64 { return t.Size - 1 }),
		oneByte("the last byte of the first MiB", func(*trial) int64 { return provenStart - 1 }),
		oneByte("the first byte of the last MiB", func(t *trial) int64 { return t.Size - provenEnd }),
	}
	all = append(all, each(6, "one byte somewhere in the first MiB", func(t *trial) {
		fillByte(t, t.Rand.Int64N(provenStart))
	})...)
	all = append(all, each(6, "one byte somewhere in the last MiB", func(t *trial) {
		fillByte(t, t.Size-1-t.Rand.Int64N(provenEnd))
	})...)
	return append(all, each(4, "random bytes over an edge", func(t *trial) {
		n := int64(1 + t.Rand.IntN(256<<10))
		at := t.Rand.Int64N(provenStart)
		if t.Rand.IntN(2) == 0 {
			at = t.Size - max(n, t.Rand.Int64N(provenEnd))
		}
		t.Fill = func(im *image) { im.write(at, randomBytes(t.Rand, n)...) }
		t.Want = foreign()
	})...)
}

func oneByte(where string, at func(*trial) int64) generator {
	return generator{"one byte: " + where, func(t *trial) { fillByte(t, at(t)) }}
}

// fillByte sets one byte of the disk to a value other than zero. The evidence must name its
// offset.
func fillByte(t *trial, at int64) {
	t.Fill = func(im *image) { im.write(at, byte(1+t.Rand.IntN(255))) }
	t.Want = foreign()
	t.Want.Says = []string{fmt.Sprintf("offset %d", at)}
}

func randomBytes(r *rand.Rand, n int64) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	b[0] |= 1 // at least the first byte is not zero
	return b
}
