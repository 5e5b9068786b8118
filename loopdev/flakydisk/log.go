package flakydisk

// Kind is what a record of a disk's log is about.
type Kind int

// The kinds of records.
const (
	Write   Kind = iota // Data were written at Offset
	Discard             // Bytes from Offset on became zero
	Flush               // all that was written before is durable
	Read                // Bytes were read from Offset on; logged only if the disk is told to
	Note                // the disk's user has noted Text
)

// Record is an entry of a disk's log.
type Record struct {
	Kind   Kind
	Offset int64
	Bytes  int64
	Data   []byte
	Text   string
}

// Changes reports whether the record changes the disk's content.
func (r Record) Changes() bool { return r.Kind == Write || r.Kind == Discard }

// Sectors returns how many sectors the record touches.
func (r Record) Sectors() int64 { return (r.Bytes + SectorBytes - 1) / SectorBytes }

// Piece is a part of a record that survives a power cut: its sectors from From to before To,
// counted from the record's first.
type Piece struct {
	Record   Record
	From, To int64
}

// Whole returns the whole record as a piece.
func Whole(r Record) Piece { return Piece{r, 0, r.Sectors()} }

// Apply does to the image what the pieces did to the disk, in their order.
func Apply(m *Image, pieces ...Piece) error {
	for _, p := range pieces {
		from, to := p.From*SectorBytes, min(p.To*SectorBytes, p.Record.Bytes)
		var err error
		switch {
		case from >= to:
		case p.Record.Kind == Write:
			_, err = m.WriteAt(p.Record.Data[from:to], p.Record.Offset+from)
		case p.Record.Kind == Discard:
			err = m.Zero(p.Record.Offset+from, to-from)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Epoch is a part of a log: what was written between two flushes, none of which need be on the disk
// if the power is cut before the next flush.
type Epoch struct {
	// Durable is the disk's content if nothing of the epoch is on it. It is shared: fork it.
	Durable *Image
	// First is the index of the epoch's first record in the log, and End that of the flush that ends
	// it, or the log's length.
	First, End int
}

// Replay splits a log into its epochs, of which the first begins with the base.
func Replay(base *Image, log []Record) ([]Epoch, error) {
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
