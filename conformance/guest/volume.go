package guest

import (
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
)

// Writing is the arguments of a write.
type Writing struct {
	Place   Place
	Pattern Pattern
	// Sync makes the call return only when the blocks are on the disk.
	Sync bool
}

// Reading is the arguments of a read.
type Reading struct {
	Place   Place
	Pattern Pattern
}

func openForWriting(place Place) func(string) (*os.File, error) {
	return func(path string) (*os.File, error) {
		if place.Raw() {
			return os.OpenFile(path, os.O_RDWR, 0)
		}
		return os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o640)
	}
}

// Write writes the blocks of a pattern.
func (a *Agent) Write(ctx context.Context, w Writing) (none Nothing, err error) {
	if err := w.Pattern.check(); err != nil {
		return none, err
	}
	file, err := a.open(w.Place, openForWriting(w.Place))
	if err != nil {
		return none, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	block := make([]byte, BlockBytes)
	for n := w.Pattern.First; n < w.Pattern.First+w.Pattern.Count; n++ {
		if err := ctx.Err(); err != nil {
			return none, err
		}
		w.Pattern.fill(block, n)
		if _, err := file.WriteAt(block, w.Pattern.offset(n)); err != nil {
			return none, fmt.Errorf("write block %d: %w", n, err)
		}
	}
	if w.Sync {
		return none, file.Sync()
	}
	return none, nil
}

// Verify reads every block of a pattern from the disk and reports the wrong ones.
func (a *Agent) Verify(ctx context.Context, r Reading) (report Report, err error) {
	if err := r.Pattern.check(); err != nil {
		return report, err
	}
	last := r.Pattern.First + r.Pattern.Count
	return report, a.eachBlock(ctx, r, last, func(n int64, block []byte) bool {
		report.Read++
		if block == nil {
			report.add(Finding{Block: n, Offset: r.Pattern.offset(n), Kind: Missing,
				What: "not there: the file is missing, or ends before it"})
		} else if f := r.Pattern.compare(block, n); f != nil {
			report.add(*f)
		}
		return true
	})
}

// eachBlock reads the blocks from the first of the pattern up to last, exclusively, and calls next
// with each. A block behind the end of the file is nil. It ends when next returns false.
func (a *Agent) eachBlock(
	ctx context.Context, r Reading, last int64, next func(n int64, block []byte) bool,
) (err error) {
	file, err := a.open(r.Place, openDirect)
	if errors.Is(err, fs.ErrNotExist) && !r.Place.Raw() {
		for n := r.Pattern.First; n < last && next(n, nil); n++ {
			continue // the file does not exist, so no block exists
		}
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	buffer, free, err := newBuffer(BlockBytes)
	if err != nil {
		return err
	}
	defer free()
	for n := r.Pattern.First; n < last; n++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		block := buffer
		count, err := file.ReadAt(block, r.Pattern.offset(n))
		switch {
		case errors.Is(err, io.EOF) && count < BlockBytes:
			block = nil
		case err != nil && !errors.Is(err, io.EOF):
			return fmt.Errorf("read block %d: %w", n, err)
		}
		if !next(n, block) {
			return nil
		}
	}
	return nil
}

// Records describes the records that a writer has written on a disk.
type Records struct {
	// Whole is the number of records that are whole. Prefix is the number of those before the first
	// that is not. They are equal if the records have no gap.
	Whole, Prefix int64
	// Gap describes the first record that is not whole, if whole records follow it.
	Gap string
}

// Records reads the records of a writer: the blocks of the pattern that were written.
func (a *Agent) Records(ctx context.Context, r Reading) (records Records, err error) {
	if err := r.Pattern.check(); err != nil {
		return records, err
	}
	var first string
	last := r.Pattern.First + r.Pattern.Count
	err = a.eachBlock(ctx, r, last, func(n int64, block []byte) bool {
		if block == nil {
			return false
		}
		f := r.Pattern.compare(block, n)
		switch {
		case f == nil:
			records.Whole++
			if first == "" {
				records.Prefix++
			}
		case first == "":
			first = fmt.Sprintf("record %d is %s", n, f.What)
		}
		return true
	})
	if records.Whole != records.Prefix {
		records.Gap = first
	}
	return records, err
}

// Scan describes the content of a whole device or file.
type Scan struct {
	Bytes int64
	// SHA256 is the checksum of the blocks that are not zero, each with its offset.
	SHA256 string
	// NonZero is the number of blocks that are not zero, and First describes the first of them.
	NonZero int64
	First   string
}

// scanPiece is the number of bytes that are read at a time.
const scanPiece = 4 << 20

// Scan reads a whole device or file from the disk.
func (a *Agent) Scan(ctx context.Context, place Place) (scan Scan, err error) {
	file, err := a.open(place, openDirect)
	if err != nil {
		return scan, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	buffer, free, err := newBuffer(scanPiece)
	if err != nil {
		return scan, err
	}
	defer free()
	hash := sha256.New()
	for {
		if err := ctx.Err(); err != nil {
			return scan, err
		}
		n, err := file.ReadAt(buffer, scan.Bytes)
		scan.note(buffer[:n], hash)
		scan.Bytes += int64(n)
		if errors.Is(err, io.EOF) {
			scan.SHA256 = hex.EncodeToString(hash.Sum(nil))
			return scan, nil
		}
		if err != nil {
			return scan, fmt.Errorf("read %s at byte %d: %w", place.Path, scan.Bytes, err)
		}
	}
}

// Range is the bytes of a device from one offset up to another.
type Range struct{ From, To int64 }

// Sampling is the arguments of a sample.
type Sampling struct {
	Place Place
	// Bytes is the size of the device. Boundary is the distance between the places at which a rack
	// divides a disk, around each of which the sample looks.
	Bytes, Boundary int64
	// Seed chooses the places in between.
	Seed uint64
	// Within limits the time for the rest of the device.
	Within time.Duration
}

// Sample describes a part of a device.
type Sample struct {
	Scan
	// Ranges are what was read, in order.
	Ranges []Range
}

const (
	// sampleEnd is the size of a sample at an end of a device, and sampleEdge that on each side of a
	// boundary, and of one in between.
	sampleEnd  = 1 << 20
	sampleEdge = 64 << 10
)

// ranges returns the ranges that are always read, and the pieces of the whole device, in the order
// in which they are read.
func (s Sampling) ranges() (always, rest []Range) {
	random := rand.New(rand.NewPCG(s.Seed, uint64(s.Bytes)))
	add := func(from, to int64) {
		always = append(always, Range{max(from, 0), min(to, s.Bytes)})
	}
	add(0, sampleEnd)
	add(s.Bytes-sampleEnd, s.Bytes)
	for at := s.Boundary; at < s.Bytes; at += s.Boundary {
		add(at-sampleEdge, at+sampleEdge)
		between := at - s.Boundary + random.Int64N(s.Boundary/sampleEdge)*sampleEdge
		add(between, between+sampleEdge)
	}
	for at := int64(0); at < s.Bytes; at += scanPiece {
		rest = append(rest, Range{at, min(at+scanPiece, s.Bytes)})
	}
	random.Shuffle(len(rest), func(i, j int) { rest[i], rest[j] = rest[j], rest[i] })
	return always, rest
}

// Sample reads both ends of a device, what is around its boundaries and random places in between,
// and as much of the rest as the time allows.
func (a *Agent) Sample(ctx context.Context, s Sampling) (sample Sample, err error) {
	file, err := a.open(s.Place, openDirect)
	if err != nil {
		return sample, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	buffer, free, err := newBuffer(scanPiece)
	if err != nil {
		return sample, err
	}
	defer free()
	end := time.Now().Add(s.Within)
	always, rest := s.ranges()
	for i, r := range append(always, rest...) {
		if err := ctx.Err(); err != nil {
			return sample, err
		}
		if i >= len(always) && time.Now().After(end) {
			break
		}
		piece := buffer[:r.To-r.From]
		if _, err := file.ReadAt(piece, r.From); err != nil {
			return sample, fmt.Errorf("read %s at byte %d: %w", s.Place.Path, r.From, err)
		}
		sample.Bytes = r.From
		sample.note(piece, io.Discard)
		sample.Ranges = append(sample.Ranges, r)
	}
	sample.Bytes, err = file.Seek(0, io.SeekEnd)
	return sample, err
}

// note counts and hashes the blocks of a piece that are not zero.
func (s *Scan) note(piece []byte, hash io.Writer) {
	if allZero(piece) {
		return
	}
	for at := 0; at < len(piece); at += BlockBytes {
		block := piece[at:min(at+BlockBytes, len(piece))]
		if allZero(block) {
			continue
		}
		// A hash returns no error.
		_ = binary.Write(hash, binary.LittleEndian, s.Bytes+int64(at))
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
		s.First = fmt.Sprintf("byte %d: %s", s.Bytes+int64(at), what)
	}
}

// FilesystemBytes returns the size of the filesystem at a path, as a workload asks for it.
func (a *Agent) FilesystemBytes(_ context.Context, path string) (int64, error) {
	return filesystemBytes(path)
}

// Recording is the arguments of a running writer.
type Recording struct {
	Place Place
	// Pattern has the records. The writer ends after the last one.
	Pattern Pattern
	// Interval is the pause between two records.
	Interval time.Duration
}

// WriterEnd is the result of a writer.
type WriterEnd struct {
	// Acknowledged is the number of records that fsync acknowledged.
	Acknowledged int64
	// Failed is the reason why the writer ended before it was stopped, or "".
	Failed string
}

// writer appends records, one by one.
type writer struct {
	acknowledged atomic.Int64
	cancel       context.CancelFunc
	// done is closed when the writer has ended; err is its error then.
	done chan struct{}
	err  error
}

// StartWriter starts a writer and returns its number.
func (a *Agent) StartWriter(_ context.Context, r Recording) (int, error) {
	if err := r.Pattern.check(); err != nil {
		return 0, err
	}
	file, err := a.open(r.Place, openForWriting(r.Place))
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	w := &writer{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(w.done)
		w.err = errors.Join(w.write(ctx, r, file), file.Close())
	}()
	a.mu.Lock()
	defer a.mu.Unlock()
	number := len(a.writers) + 1
	a.writers[number] = w
	return number, nil
}

// write appends records until it is stopped. It writes a record only when the one before is on
// the disk.
func (w *writer) write(ctx context.Context, r Recording, file *os.File) error {
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

// Acknowledged returns the number of a writer's records that fsync has acknowledged so far.
func (a *Agent) Acknowledged(_ context.Context, number int) (int64, error) {
	w, err := a.writer(number)
	if err != nil {
		return 0, err
	}
	return w.acknowledged.Load(), nil
}

// StopWriter stops a writer and returns its result.
func (a *Agent) StopWriter(_ context.Context, number int) (WriterEnd, error) {
	w, err := a.writer(number)
	if err != nil {
		return WriterEnd{}, err
	}
	w.stop()
	end := WriterEnd{Acknowledged: w.acknowledged.Load()}
	if w.err != nil {
		end.Failed = w.err.Error()
	}
	return end, nil
}
