//go:build linux

package model

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

const (
	// blocks is the number of places in a volume to which the pods write, and blockSize the size
	// of each.
	blocks    = 8
	blockSize = 4096
)

// content is the content of a volume. For each block, acked has the value that was acknowledged,
// and later the values that were written after it without acknowledgment. A block that was never
// written has the value 0.
type content struct {
	acked map[int]uint64
	later map[int][]uint64
	// partial is set if the volume was detached from its node while in use. Then any part of the
	// later values may exist.
	partial bool
	// formatted is set if the volume has a filesystem, or data in its first or last block.
	formatted bool
	// forged contains the files with forged records, or is nil if there are none.
	forged proof.ForgedFiles
}

func newContent() *content {
	return &content{acked: map[int]uint64{}, later: map[int][]uint64{}}
}

// clone returns the content of a snapshot of the volume, which may have been in use.
func (c *content) clone() *content {
	copied := &content{acked: maps.Clone(c.acked), later: map[int][]uint64{}, partial: true,
		formatted: c.formatted, forged: c.forged}
	for b, values := range c.later {
		copied.later[b] = slices.Clone(values)
	}
	return copied
}

// wrote records a write. A synced write is acknowledged, and replaces all earlier writes.
func (c *content) wrote(block int, value uint64, synced bool) {
	if synced {
		// The driver does not notice data in the middle of a raw device.
		c.formatted = c.formatted || block == 0 || block == blocks-1
		c.acked[block] = value
		delete(c.later, block)
		return
	}
	c.later[block] = append(c.later[block], value)
}

// flushed records that all data are on the disk, because a call that flushes them answered OK.
func (c *content) flushed() {
	if c.partial {
		return
	}
	for b, values := range c.later {
		c.acked[b] = values[len(values)-1]
	}
	c.later = map[int][]uint64{}
}

// values returns the values that a block may have, the most likely one first.
func (c *content) values(block int) []uint64 {
	all := append([]uint64{c.acked[block]}, c.later[block]...)
	if !c.partial {
		return all[len(all)-1:]
	}
	slices.Reverse(all)
	return all
}

// read compares the blocks with the model, and records the values that were read.
func (c *content) read(v int, data [][]byte) error {
	for b, got := range data {
		values := c.values(b)
		i := slices.IndexFunc(values, func(value uint64) bool {
			return bytes.Equal(got, pattern(v, b, value))
		})
		if i < 0 {
			return fmt.Errorf("v%d block %d contains %s, the model allows value %v (acknowledged: %d)",
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

// pattern returns the bytes of a value. A restored volume has the bytes of the volume from which
// its snapshot was taken.
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

// origin returns the volume from whose snapshots a volume was restored, or the volume itself if it
// was created blank.
func origin(v int) int {
	if s := kinds[v].snap; s != 0 {
		return origin(snapOf[s])
	}
	return v
}

// describe describes the wrong content of a block.
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

// place opens the file that contains a block, and returns the offset of the block: in a file of the
// filesystem, or in the device, from its first bytes to its last ones.
func place(path string, v, block, flags int) (*os.File, int64, error) {
	if !kinds[v].block() {
		file, err := os.OpenFile(filepath.Join(path, "blocks"), flags, 0o640)
		return file, int64(block) * blockSize, err
	}
	file, err := os.OpenFile(path, flags&^os.O_CREATE, 0)
	offset := int64(block) * gib / blocks
	if block == blocks-1 {
		offset = gib - blockSize
	}
	return file, offset, err
}

// put writes a block as a pod does.
func put(path string, v, block int, value uint64, synced bool) error {
	file, offset, err := place(path, v, block, os.O_WRONLY|os.O_CREATE)
	if err != nil {
		return err
	}
	_, err = file.WriteAt(pattern(v, block, value), offset)
	if err == nil && synced {
		err = file.Sync()
	}
	err = errors.Join(err, file.Close())
	if err != nil || !synced || kinds[v].block() {
		return err
	}
	// The file may be new, so the directory with its name must be synced, too.
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// contents reads all blocks. A block that was never written reads as zeros.
func contents(path string, v int) ([][]byte, error) {
	data := make([][]byte, blocks)
	for b := range data {
		data[b] = make([]byte, blockSize)
		file, offset, err := place(path, v, b, os.O_RDONLY)
		if errors.Is(err, fs.ErrNotExist) && !kinds[v].block() {
			continue
		}
		if err != nil {
			return nil, err
		}
		_, err = file.ReadAt(data[b], offset)
		if closing := file.Close(); err == nil {
			err = closing
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
	}
	return data, nil
}
