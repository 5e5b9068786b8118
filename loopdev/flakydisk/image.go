package flakydisk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"maps"
	"os"
)

const (
	// SectorBytes is the size of a sector, which a disk writes completely or not at all.
	SectorBytes = 512
	// PageBytes is the size of the pages that images share.
	PageBytes = 4096
)

// page has PageBytes of an image's content. It never changes, because images share pages.
type page struct {
	data [PageBytes]byte
	sum  uint64
}

// Image is a disk's content in memory, as a [Store]. Bytes that were never written are zero and
// need no memory. Only one goroutine may use an image at a time, but another may use its fork.
type Image struct {
	size  int64
	pages map[int64]*page // keys: page numbers
}

// NewImage returns a blank image.
func NewImage(sizeBytes int64) *Image {
	return &Image{size: sizeBytes, pages: map[int64]*page{}}
}

// Fork returns an image with the same content.
func (m *Image) Fork() *Image { return &Image{m.size, maps.Clone(m.pages)} }

// Size returns the size in bytes.
func (m *Image) Size() int64 { return m.size }

// Resize changes the size. New bytes are zero.
func (m *Image) Resize(sizeBytes int64) error {
	if sizeBytes < m.size {
		m.zero(sizeBytes, m.size-sizeBytes)
	}
	m.size = sizeBytes
	return nil
}

// ReadAt reads from the image. At the image's end it returns [io.EOF].
func (m *Image) ReadAt(b []byte, offset int64) (int, error) {
	short := offset+int64(len(b)) > m.size
	b = b[:max(0, min(int64(len(b)), m.size-offset))]
	for done := 0; done < len(b); {
		number, at := (offset+int64(done))/PageBytes, (offset+int64(done))%PageBytes
		part := b[done:min(len(b), done+int(PageBytes-at))]
		if p := m.pages[number]; p != nil {
			copy(part, p.data[at:])
		} else {
			clear(part)
		}
		done += len(part)
	}
	if short {
		return len(b), io.EOF
	}
	return len(b), nil
}

// WriteAt writes to the image.
func (m *Image) WriteAt(b []byte, offset int64) (int, error) {
	if offset < 0 || offset+int64(len(b)) > m.size {
		return 0, fmt.Errorf("write %d bytes at offset %d of a disk of %d", len(b), offset, m.size)
	}
	for done := 0; done < len(b); {
		number, at := (offset+int64(done))/PageBytes, (offset+int64(done))%PageBytes
		part := b[done:min(len(b), done+int(PageBytes-at))]
		m.set(number, at, part)
		done += len(part)
	}
	return len(b), nil
}

// Zero sets n bytes at an offset to zero, as a discard does.
func (m *Image) Zero(offset, n int64) error {
	if offset < 0 || offset+n > m.size {
		return fmt.Errorf("discard %d bytes at offset %d of a disk of %d", n, offset, m.size)
	}
	m.zero(offset, n)
	return nil
}

func (m *Image) zero(offset, n int64) {
	var blank [PageBytes]byte
	for end := offset + n; offset < end; {
		number, at := offset/PageBytes, offset%PageBytes
		part := min(end-offset, PageBytes-at)
		if m.pages[number] != nil {
			m.set(number, at, blank[:part])
		}
		offset += part
	}
}

// Flush does nothing, because an image is in memory.
func (m *Image) Flush() error { return nil }

var (
	sumSeed = maphash.MakeSeed()
	noData  [PageBytes]byte
)

func (m *Image) set(number, at int64, b []byte) {
	old := m.pages[number]
	if bytes.Equal(b, noData[:len(b)]) && (old == nil || len(b) == PageBytes) {
		delete(m.pages, number)
		return
	}
	p := &page{}
	if old != nil && len(b) < PageBytes {
		p.data = old.data
	}
	copy(p.data[at:], b)
	if bytes.Equal(p.data[:], noData[:]) {
		delete(m.pages, number)
		return
	}
	var h maphash.Hash
	h.SetSeed(sumSeed)
	var key [8]byte
	binary.LittleEndian.PutUint64(key[:], uint64(number))
	_, _ = h.Write(key[:])
	_, _ = h.Write(p.data[:])
	p.sum = h.Sum64()
	m.pages[number] = p
}

// Sum returns a hash of content and size. Only sums of the same process can be compared.
func (m *Image) Sum() uint64 {
	sum := uint64(m.size)
	for _, p := range m.pages {
		sum ^= p.sum
	}
	return sum
}

// EachPage calls do() with every page that is not zero, in any order, until do() returns false.
func (m *Image) EachPage(do func(offset int64, data []byte) bool) {
	for number, p := range m.pages {
		if !do(number*PageBytes, p.data[:]) {
			return
		}
	}
}

// Save writes the image to a sparse file.
func (m *Image) Save(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	err = f.Truncate(m.size)
	for number, p := range m.pages {
		if err == nil {
			_, err = f.WriteAt(p.data[:min(PageBytes, m.size-number*PageBytes)], number*PageBytes)
		}
	}
	if closing := f.Close(); err == nil {
		err = closing
	}
	return err
}

// Load reads an image from a file.
func Load(path string) (*Image, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	m := NewImage(st.Size())
	b := make([]byte, 1<<20)
	for offset := int64(0); offset < m.size; offset += int64(len(b)) {
		n, err := f.ReadAt(b, offset)
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		for at := 0; at < n; at += PageBytes {
			m.set((offset+int64(at))/PageBytes, 0, b[at:min(n, at+PageBytes)])
		}
	}
	return m, nil
}

// Kind is the type of a log entry.
type Kind int

// The types of log entries.
const (
	Write   Kind = iota // data were written at Offset
	Discard             // bytes from Offset on became zero
	Flush               // all earlier writes are durable
	Read                // bytes were read from Offset on; logged only if StartLog asked for reads
	Note                // Text was added with Disk.Note
)

// LogEntry is an entry of a disk's log.
type LogEntry struct {
	Kind   Kind
	Offset int64
	Bytes  int64
	Data   []byte
	Text   string
}

// Changes reports whether the entry changes the disk's content.
func (e LogEntry) Changes() bool { return e.Kind == Write || e.Kind == Discard }

// Sectors returns how many sectors the entry covers.
func (e LogEntry) Sectors() int64 { return (e.Bytes + SectorBytes - 1) / SectorBytes }

// Piece is the part of a log entry that a power cut leaves: the entry's sectors From to To-1.
type Piece struct {
	Entry    LogEntry
	From, To int64
}

// Whole returns a piece that covers the whole entry.
func Whole(e LogEntry) Piece { return Piece{e, 0, e.Sectors()} }

// Apply writes the pieces to the image in the given order.
func Apply(m *Image, pieces ...Piece) error {
	for _, p := range pieces {
		from, to := p.From*SectorBytes, min(p.To*SectorBytes, p.Entry.Bytes)
		var err error
		switch {
		case from >= to:
		case p.Entry.Kind == Write:
			_, err = m.WriteAt(p.Entry.Data[from:to], p.Entry.Offset+from)
		case p.Entry.Kind == Discard:
			err = m.Zero(p.Entry.Offset+from, to-from)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Epoch is the part of a log between two flushes. If the power is cut before the second flush, the
// disk may lack any of the epoch's writes.
type Epoch struct {
	// Durable is the disk's content before the epoch. Fork it before you change it.
	Durable *Image
	// First is the index of the epoch's first entry in the log. End is the index of the flush at the
	// end of the epoch, or the length of the log.
	First, End int
}

// Replay splits a log into its epochs. base is the disk's content before the first epoch.
func Replay(base *Image, log []LogEntry) ([]Epoch, error) {
	var epochs []Epoch
	now := base.Fork()
	first := Epoch{Durable: base.Fork()}
	for i, r := range log {
		if r.Kind == Flush {
			first.End = i
			epochs = append(epochs, first)
			first = Epoch{Durable: now.Fork(), First: i + 1}
			continue
		}
		if err := Apply(now, Whole(r)); err != nil {
			return nil, err
		}
	}
	first.End = len(log)
	return append(epochs, first), nil
}
