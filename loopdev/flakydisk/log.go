package flakydisk

// Kind is the kind of a record in a disk's log.
type Kind int

// The kinds of entries.
const (
	Write   Kind = iota // data were written at Offset
	Discard             // bytes from Offset on became zero
	Flush               // all earlier writes are durable
	Read                // bytes were read from Offset on; logged only if StartLog asked for reads
	Note                // the disk's user added Text
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

// Sectors returns how many sectors the entry touches.
func (e LogEntry) Sectors() int64 { return (e.Bytes + SectorBytes - 1) / SectorBytes }

// Piece is a part of a record that survives a power cut: the sectors from From up to, but not
// including, To, counted from the record's first sector.
type Piece struct {
	Entry    LogEntry
	From, To int64
}

// Whole returns a piece that covers the whole record.
func Whole(e LogEntry) Piece { return Piece{e, 0, e.Sectors()} }

// Apply writes the pieces to the image in their order, as they were written to the disk.
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

// Epoch is the part of a log between two flushes. If the power is cut before the second flush,
// any of its writes may be missing on the disk.
type Epoch struct {
	// Durable is the disk's content without any write of the epoch. It is shared, so callers have
	// to fork it.
	Durable *Image
	// First is the index of the epoch's first record in the log. End is the index of the flush
	// that ends the epoch, or the length of the log.
	First, End int
}

// Replay splits a log into its epochs. The first epoch begins with the content of base.
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
