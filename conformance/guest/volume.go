package guest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// Task has the arguments of Write, Verify, Scan and StartWriter.
type Task struct {
	Place   Place
	Pattern Pattern
	// Sync makes Write return only when the blocks are on the disk.
	Sync bool
	// Sample limits Scan to a part of the device; nil means all of it.
	Sample *Sample
	// Interval is a writer's pause between two records. The writer ends after Pattern.Count records.
	Interval time.Duration
}

func openForWriting(place Place) (*os.File, error) {
	if place.Raw() {
		return os.OpenFile(place.Path, os.O_RDWR, 0)
	}
	return os.OpenFile(place.Path, os.O_RDWR|os.O_CREATE, 0o640)
}

// Write writes the blocks of a pattern.
func (a *Agent) Write(ctx context.Context, w Task) (none Nothing, err error) {
	defer harness.Catch(&err)
	file := harness.Got(a.open(w.Place, openForWriting))
	defer func() { err = errors.Join(err, file.Close()) }()
	block := make([]byte, BlockBytes)
	for n := w.Pattern.First; n < w.Pattern.First+w.Pattern.Count; n++ {
		harness.Must(ctx.Err())
		w.Pattern.fill(block, n)
		_, err := file.WriteAt(block, w.Pattern.offset(n))
		harness.Must(harness.Wrap(err, "write block %d", n))
	}
	if w.Sync {
		return none, file.Sync()
	}
	return none, nil
}

// Verify reads every block of a pattern from the disk and reports the wrong ones. Blocks beyond the
// end of a file, and all blocks of a missing file, count as lost.
func (a *Agent) Verify(ctx context.Context, r Task) (report Report, err error) {
	defer harness.Catch(&err)
	p := r.Pattern
	file, missing := a.open(r.Place, openDirect)
	if missing == nil {
		defer func() { err = errors.Join(err, file.Close()) }()
	} else if !errors.Is(missing, fs.ErrNotExist) || r.Place.Raw() {
		return report, missing
	}
	block, free := newBuffer(BlockBytes)
	defer free()
	for n := p.First; n < p.First+p.Count; n++ {
		harness.Must(ctx.Err())
		read, err := 0, io.EOF
		if file != nil {
			read, err = file.ReadAt(block, p.offset(n))
		}
		report.Read++
		switch {
		case errors.Is(err, io.EOF) && read < BlockBytes:
			report.add(Finding{Block: n, Offset: p.offset(n), Lost: true,
				What: "not there: the file is missing, or ends before it"})
		case err != nil && !errors.Is(err, io.EOF):
			return report, fmt.Errorf("read block %d: %w", n, err)
		default:
			if f := p.compare(block, n); f != nil {
				report.add(*f)
			}
		}
	}
	return report, nil
}

// Range is the bytes of a device from one offset up to another.
type Range struct{ From, To int64 }

// Sample limits Scan to the ends of a device, both sides of each multiple of boundary, a random
// piece before each multiple, and as much of the rest as Within allows.
type Sample struct {
	// Seed chooses the random pieces and the order of the rest.
	Seed uint64
	// Within is the time after which Scan begins no further read of the rest.
	Within time.Duration
}

// Scan describes the content of a device.
type Scan struct {
	// Bytes is the size of the device. Ranges lists what was read, in the order of the reads.
	Bytes  int64
	Ranges []Range
	// SHA256 covers the blocks that are not zero, each with its offset.
	SHA256 string
	// NonZero is the number of blocks that are not zero, and First describes the first of them.
	NonZero int64
	First   string
}

const (
	scanPiece = 4 << 20
	// A sample has sampleEnd bytes at each end of a device, and, for every multiple of boundary,
	// sampleEdge bytes on each side of it and sampleEdge bytes at a random place before it.
	sampleEnd  = 1 << 20
	sampleEdge = 64 << 10
	// boundary is the size of the pieces into which a rack divides a disk.
	boundary = 64 << 20
)

func (s *Sample) ranges(bytes int64) (always, rest []Range) {
	for at := int64(0); at < bytes; at += scanPiece {
		rest = append(rest, Range{at, min(at+scanPiece, bytes)})
	}
	if s == nil {
		return rest, nil
	}
	random := rand.New(rand.NewPCG(s.Seed, uint64(bytes)))
	add := func(from, to int64) {
		always = append(always, Range{max(from, 0), min(to, bytes)})
	}
	add(0, sampleEnd)
	add(bytes-sampleEnd, bytes)
	for at := int64(boundary); at < bytes; at += boundary {
		add(at-sampleEdge, at+sampleEdge)
		between := at - boundary + random.Int64N(boundary/sampleEdge)*sampleEdge
		add(between, between+sampleEdge)
	}
	random.Shuffle(len(rest), func(i, j int) { rest[i], rest[j] = rest[j], rest[i] })
	return always, rest
}

// Scan reads a device, or a sample of it, from the disk.
func (a *Agent) Scan(ctx context.Context, s Task) (scan Scan, err error) {
	defer harness.Catch(&err)
	began := time.Now()
	file := harness.Got(a.open(s.Place, openDirect))
	defer func() { err = errors.Join(err, file.Close()) }()
	buffer, free := newBuffer(scanPiece)
	defer free()
	scan.Bytes = harness.Got(file.Seek(0, io.SeekEnd))
	hash := sha256.New()
	always, rest := s.Sample.ranges(scan.Bytes)
	for i, r := range append(always, rest...) {
		harness.Must(ctx.Err())
		if i >= len(always) && time.Since(began) > s.Sample.Within {
			break
		}
		piece := buffer[:r.To-r.From]
		_, err := file.ReadAt(piece, r.From)
		harness.Must(harness.Wrap(err, "read %s at byte %d", s.Place.Path, r.From))
		scan.note(piece, r.From, hash)
		scan.Ranges = append(scan.Ranges, r)
	}
	scan.SHA256 = hex.EncodeToString(hash.Sum(nil))
	return scan, nil
}

// note counts and hashes the blocks that are not zero. A partial last block is only hashed.
func (s *Scan) note(piece []byte, from int64, hash io.Writer) {
	if allZero(piece) {
		return
	}
	for at := from; len(piece) > 0; at += BlockBytes {
		block := piece[:min(BlockBytes, len(piece))]
		piece = piece[len(block):]
		if allZero(block) {
			continue
		}
		_ = binary.Write(hash, binary.LittleEndian, at) // a hash returns no error
		_, _ = hash.Write(block)
		if len(block) < BlockBytes {
			continue
		}
		s.NonZero++
		if s.First != "" {
			continue
		}
		what := describeGarbage(block)
		if p, whole := identify(block); whole {
			what = fmt.Sprintf("it is block %d of generation %d of the volume with seed %d",
				p.First, p.Generation, p.Seed)
		}
		s.First = fmt.Sprintf("byte %d: %s", at, what)
	}
}

// WriterEnd is the result of a writer.
type WriterEnd struct {
	// Acknowledged is the number of records that fsync acknowledged.
	Acknowledged int64
	// Failed is why the writer ended before it was stopped, or "".
	Failed string
}

type writer struct {
	acknowledged atomic.Int64
	cancel       context.CancelFunc
	// When the writer has ended, err is set, and done is closed.
	done chan struct{}
	err  error
}

// StartWriter starts a writer and returns its number.
func (a *Agent) StartWriter(_ context.Context, r Task) (number int, err error) {
	defer harness.Catch(&err)
	file := harness.Got(a.open(r.Place, openForWriting))
	ctx, cancel := context.WithCancel(context.Background())
	w := &writer{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(w.done)
		w.err = errors.Join(w.write(ctx, r, file), file.Close())
	}()
	a.mu.Lock()
	defer a.mu.Unlock()
	number = len(a.writers) + 1
	a.writers[number] = w
	return number, nil
}

// write writes records, each after fsync has acknowledged the one before. It stops if ctx ends.
func (w *writer) write(ctx context.Context, r Task, file *os.File) error {
	block := make([]byte, BlockBytes)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for n := r.Pattern.First; n < r.Pattern.First+r.Pattern.Count; n++ {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
			timer.Reset(r.Interval)
		}
		r.Pattern.fill(block, n)
		if _, err := file.WriteAt(block, r.Pattern.offset(n)); err != nil {
			return fmt.Errorf("write record %d: %w", n, err)
		}
		if err := file.Sync(); err != nil {
			return fmt.Errorf("sync record %d: %w", n, err)
		}
		w.acknowledged.Add(1)
	}
	return nil
}

func (w *writer) stop() {
	w.cancel()
	<-w.done
}

func (a *Agent) writer(number int) (*writer, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	w := a.writers[number]
	if w == nil {
		return nil, fmt.Errorf("the agent has no writer %d", number)
	}
	return w, nil
}

// Acknowledged returns how many records fsync has acknowledged so far.
func (a *Agent) Acknowledged(_ context.Context, number int) (records int64, err error) {
	defer harness.Catch(&err)
	return harness.Got(a.writer(number)).acknowledged.Load(), nil
}

// StopWriter stops a writer and returns its result.
func (a *Agent) StopWriter(_ context.Context, number int) (end WriterEnd, err error) {
	defer harness.Catch(&err)
	w := harness.Got(a.writer(number))
	w.stop()
	end.Acknowledged = w.acknowledged.Load()
	if w.err != nil {
		end.Failed = w.err.Error()
	}
	return end, nil
}

// BlockBytes is the size of a pattern's blocks, a multiple of every disk's block size.
const BlockBytes = 4096

// A block consists of a mark, the seed, the number, the generation, random bytes, and the SHA-256
// of everything before it.
const (
	blockMark   = "oxideblk"
	payloadAt   = 8 + 8 + 8 + 8
	checksumAt  = BlockBytes - sha256.Size
	maxFindings = 8
)

// Place is the file or the device through which a workload uses a volume.
type Place struct {
	// Path is a file in a filesystem, or a device.
	Path string
	// Serial is the serial of a raw volume's device; "" means that Path is a file. The agent compares
	// the serial before it reads or writes, so that a stale path never leads to another disk.
	Serial string
}

// Raw reports whether the place is the device of a raw volume.
func (p Place) Raw() bool { return p.Serial != "" }

// Pattern describes blocks that are written to a volume and read back.
type Pattern struct {
	// Seed makes the blocks of one volume differ from those of another.
	Seed uint64
	// Generation counts the writes of the blocks. A block of generation 0 is zero.
	Generation   uint64
	First, Count int64
	// Stride is the distance from one block to the next; 0 means BlockBytes.
	Stride int64
}

// At returns the pattern with this generation.
func (p Pattern) At(generation uint64) Pattern {
	p.Generation = generation
	return p
}

// Range returns the bytes of block n.
func (p Pattern) Range(n int64) Range { return Range{p.offset(n), p.offset(n) + BlockBytes} }

func (p Pattern) offset(n int64) int64 { return n * max(p.Stride, BlockBytes) }

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
	// Lost means that the block is zero or missing. The text What describes what was found.
	Lost bool
	What string
}

// Report is the result of reading a pattern back.
type Report struct {
	// Read is the number of blocks that were compared, and Wrong the number of those that differ.
	Read, Wrong int64
	// Findings lists the first maxFindings blocks that differ.
	Findings []Finding
}

// Err returns an error with the first wrong block, or nil.
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

// identify returns the pattern in a block, and whether the block's mark and checksum are right.
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

func describeGarbage(block []byte) string {
	if p, _ := identify(block); string(block[:8]) == blockMark {
		return fmt.Sprintf("a torn block that begins as block %d of generation %d of the volume "+
			"with seed %d", p.First, p.Generation, p.Seed)
	}
	return fmt.Sprintf("it begins with % x", block[:8])
}

var zeros [scanPiece]byte

// allZero accepts at most scanPiece bytes.
func allZero(b []byte) bool { return bytes.Equal(b, zeros[:len(b)]) }
