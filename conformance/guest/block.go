package guest

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
)

// BlockBytes is the size of a block of a pattern: a multiple of every disk's block size.
const BlockBytes = 4096

// The layout of a block: a mark, the seed, the number, the generation, random bytes, and the
// SHA-256 of everything before it.
const (
	blockMark   = "oxideblk"
	payloadAt   = 8 + 8 + 8 + 8
	checksumAt  = BlockBytes - sha256.Size
	maxBlocks   = 1 << 20
	maxFindings = 8
)

// Place is the place at which a volume is published for a workload.
type Place struct {
	// Path is a file in a filesystem, or a device.
	Path string
	// Serial is the serial of a raw volume's device; "" means that Path is a file. The agent compares
	// the serial before it writes, so that it never writes another disk through a stale path.
	Serial string
}

// Raw reports whether the place is a device.
func (p Place) Raw() bool { return p.Serial != "" }

// Pattern describes the blocks that a workload keeps in a volume.
type Pattern struct {
	// Seed makes the blocks of one volume differ from those of another.
	Seed uint64
	// Generation counts the writes of the blocks. A block of generation 0 is zero.
	Generation uint64
	// First is the number of the first block, and Count the number of blocks.
	First, Count int64
	// Stride is the distance from one block to the next; 0 means BlockBytes.
	Stride int64
}

// At returns the pattern in another generation.
func (p Pattern) At(generation uint64) Pattern {
	p.Generation = generation
	return p
}

// Range returns the bytes of block n.
func (p Pattern) Range(n int64) Range { return Range{p.offset(n), p.offset(n) + BlockBytes} }

func (p Pattern) offset(n int64) int64 { return n * max(p.Stride, BlockBytes) }

func (p Pattern) check() error {
	if p.Count < 0 || p.Count > maxBlocks || p.First < 0 ||
		p.Stride != 0 && (p.Stride < BlockBytes || p.Stride%BlockBytes != 0) {
		return fmt.Errorf("a pattern has 0 to %d blocks, at a distance that is a multiple of %d; "+
			"this one has %d at %d", maxBlocks, BlockBytes, p.Count, p.Stride)
	}
	return nil
}

// fill writes block n of the pattern.
func (p Pattern) fill(block []byte, n int64) {
	if p.Generation == 0 {
		clear(block)
		return
	}
	copy(block, blockMark)
	binary.LittleEndian.PutUint64(block[8:], p.Seed)
	binary.LittleEndian.PutUint64(block[16:], uint64(n))
	binary.LittleEndian.PutUint64(block[24:], p.Generation)
	var key [32]byte
	copy(key[:], block[8:payloadAt])
	_, _ = rand.NewChaCha8(key).Read(block[payloadAt:checksumAt])
	sum := sha256.Sum256(block[:checksumAt])
	copy(block[checksumAt:], sum[:])
}

// Finding is one block that differs from what was written.
type Finding struct {
	Block, Offset int64
	// Lost reports whether the block is zero or not there, and What describes what was found.
	Lost bool
	What string
}

// Report is the result of reading a pattern back.
type Report struct {
	// Read is the number of blocks that were compared, and Wrong the number of those that differ.
	Read, Wrong int64
	// Findings are the first of the blocks that differ.
	Findings []Finding
}

// Err is nil if every block was right. Otherwise it names the first that was not.
func (r Report) Err() error {
	if r.Wrong == 0 {
		return nil
	}
	f := r.Findings[0]
	return fmt.Errorf("%d of %d blocks are not what was written: the first is block %d at byte %d, "+
		"which is %s", r.Wrong, r.Read, f.Block, f.Offset, f.What)
}

func (r *Report) add(f Finding) {
	r.Wrong++
	if len(r.Findings) < maxFindings {
		r.Findings = append(r.Findings, f)
	}
}

// compare compares the content at the place of block n with the pattern. It returns nil if they
// are equal.
func (p Pattern) compare(block []byte, n int64) *Finding {
	want := make([]byte, BlockBytes)
	p.fill(want, n)
	if bytes.Equal(block, want) {
		return nil
	}
	f := &Finding{Block: n, Offset: p.offset(n)}
	found, whole := identify(block)
	switch {
	case allZero(block):
		f.Lost, f.What = true, "zero"
	case !whole:
		f.What = "garbage: " + describeGarbage(block)
	case found.Seed != p.Seed:
		f.What = fmt.Sprintf("block %d of another volume (its seed is %d, this one's %d)",
			found.First, found.Seed, p.Seed)
	case found.First != n:
		f.What = fmt.Sprintf("block %d of the same volume", found.First)
	default:
		f.What = fmt.Sprintf("of generation %d instead of %d", found.Generation, p.Generation)
	}
	return f
}

// identify reads the seed, the number and the generation of a block. It reports whether the
// block's checksum is right.
func identify(block []byte) (p Pattern, whole bool) {
	p = Pattern{
		Seed:       binary.LittleEndian.Uint64(block[8:]),
		First:      int64(binary.LittleEndian.Uint64(block[16:])),
		Generation: binary.LittleEndian.Uint64(block[24:]),
		Count:      1,
	}
	sum := sha256.Sum256(block[:checksumAt])
	return p, string(block[:8]) == blockMark && bytes.Equal(block[checksumAt:], sum[:])
}

// describeGarbage returns a description of the first bytes of a block that has no right checksum.
func describeGarbage(block []byte) string {
	if p, _ := identify(block); string(block[:8]) == blockMark {
		return fmt.Sprintf("a torn block that begins as block %d of generation %d of the volume "+
			"with seed %d", p.First, p.Generation, p.Seed)
	}
	return fmt.Sprintf("it begins with % x", block[:8])
}

var zeros [scanPiece]byte

// allZero reports whether at most scanPiece bytes are zero.
func allZero(b []byte) bool { return bytes.Equal(b, zeros[:len(b)]) }
