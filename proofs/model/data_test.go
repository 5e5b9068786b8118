//go:build linux

package model

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

const (
	// blocks is how many places of a volume the pods write to, and blockSize how much of it.
	blocks    = 8
	blockSize = 4096
)

// content is what a volume holds: for each block the value that was acknowledged, and those that
// were written since and not acknowledged. 0 is a block that was never written.
type content struct {
	acked map[int]uint64
	later map[int][]uint64
	// partial reports whether the volume lost its node: of what was not acknowledged, any part may be
	// there.
	partial bool
	// formatted reports whether the volume holds a filesystem, or what a pod wrote to its edges.
	formatted bool
	// forged are the files with forged records; nil if there are none.
	forged proof.ForgedFiles
}

func newContent() *content {
	return &content{acked: map[int]uint64{}, later: map[int][]uint64{}}
}

// clone is the content of a copy that somebody took while the volume was perhaps in use.
func (c *content) clone() *content {
	copied := &content{acked: maps.Clone(c.acked), later: map[int][]uint64{}, partial: true,
		formatted: c.formatted, forged: c.forged}
	for b, values := range c.later {
		copied.later[b] = slices.Clone(values)
	}
	return copied
}

// wrote notes a write. A synced one is acknowledged, and all before it are overwritten.
func (c *content) wrote(block int, value uint64, synced bool) {
	if synced {
		// What lies in the middle of a raw device nobody can tell from nothing.
		c.formatted = c.formatted || block == 0 || block == blocks-1
		c.acked[block] = value
		delete(c.later, block)
		return
	}
	c.later[block] = append(c.later[block], value)
}

// flushed notes that the driver has promised that everything is on the disk.
func (c *content) flushed() {
	if c.partial {
		return
	}
	for b, values := range c.later {
		c.acked[b] = values[len(values)-1]
	}
	c.later = map[int][]uint64{}
}

// values are those that a block may have now, the likeliest first.
func (c *content) values(block int) []uint64 {
	all := append([]uint64{c.acked[block]}, c.later[block]...)
	if !c.partial {
		return all[len(all)-1:]
	}
	slices.Reverse(all)
	return all
}

// read compares what the blocks hold with the model, which it makes as narrow as what was seen.
func (c *content) read(v int, data [][]byte) error {
	for b, got := range data {
		values := c.values(b)
		i := slices.IndexFunc(values, func(value uint64) bool {
			return bytes.Equal(got, pattern(v, b, value))
		})
		if i < 0 {
			return fmt.Errorf("v%d block %d holds %s, the model says value %v (acknowledged: %d)",
				v, b, describe(v, b, got), values, c.acked[b])
		}
		if c.partial {
			c.acked[b] = values[i]
			delete(c.later, b)
		}
	}
	c.partial = false
	return nil
}

// pattern is what a value is in bytes; those of a restored volume are its origin's.
func pattern(v, block int, value uint64) []byte {
	data := make([]byte, blockSize)
	if value == 0 {
		return data
	}
	var key [32]byte
	copy(key[:], fmt.Sprintf("value %d block %d", value, block))
	_, _ = rand.NewChaCha8(key).Read(data)
	copy(data, fmt.Sprintf("v%d block %d value %d\n", origin(v), block, value))
	return data
}

// origin is the volume that a restored one comes from; its own number for a blank one.
func origin(v int) int {
	if s := kinds[v].snap; s != 0 {
		return origin(snapOf[s])
	}
	return v
}

// describe says what a block holds that should hold something else.
func describe(v, block int, data []byte) string {
	if bytes.Equal(data, make([]byte, len(data))) {
		return "zeros"
	}
	head, _, _ := bytes.Cut(data, []byte("\n"))
	var w, b int
	var value uint64
	n, err := fmt.Sscanf(string(head), "v%d block %d value %d", &w, &b, &value)
	switch {
	case err != nil || n != 3:
		return fmt.Sprintf("foreign bytes (%.16x…)", data)
	case w == origin(v) && b == block && bytes.Equal(data, pattern(v, b, value)):
		return fmt.Sprintf("value %d", value)
	}
	return fmt.Sprintf("a damaged or misplaced copy of v%d block %d value %d", w, b, value)
}
