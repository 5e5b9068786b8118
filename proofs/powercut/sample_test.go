//go:build linux

package powercut_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
)

// image is a disk after a power cut: all durable data, and some pieces of later writes.
type image struct {
	of      *recording
	durable *flakydisk.Image
	pieces  []flakydisk.Piece
	// at is the index of the power cut in the log. events is the number of events before it.
	at, events int
	// torn is set if a piece is only a part of a record.
	torn bool
	name string
}

// content makes the image's content. It is not kept, because there are many images.
func (m image) content() *flakydisk.Image {
	content := m.durable.Fork()
	_ = flakydisk.Apply(content, m.pieces...) // has succeeded in sampler.add
	return content
}

// whole returns the image with whole records in place of parts.
func (m image) whole() image {
	m.pieces, m.torn = slices.Clone(m.pieces), false
	for i, p := range m.pieces {
		m.pieces[i] = flakydisk.Whole(p.Entry)
	}
	return m
}

// sampler makes the images of a recording, each once.
type sampler struct {
	of     *recording
	rand   *rand.Rand
	epochs []flakydisk.Epoch
	seen   map[[2]uint64]bool
	// equal counts the images that are equal to an earlier one.
	equal int
	err   error
}

func newSampler(of *recording, r *rand.Rand) (*sampler, error) {
	epochs, err := flakydisk.Replay(of.base, of.log)
	return &sampler{of: of, rand: r, epochs: epochs, seen: map[[2]uint64]bool{}}, err
}

// flushes returns an image for every flush, with all records before it and none after it.
func (s *sampler) flushes() []image {
	var all []image
	for i := range s.epochs {
		all = s.add(all, i, s.epochs[i].End, "nothing")
	}
	return all
}

// early returns images from the time before the volume was staged: of the records between two
// flushes all except one, or one alone.
func (s *sampler) early() []image {
	var all []image
	staged := slices.IndexFunc(s.of.log, func(r flakydisk.LogEntry) bool {
		return r.Kind == flakydisk.Note
	})
	for i, e := range s.epochs {
		if e.First > staged {
			break
		}
		for _, one := range s.changes(e) {
			all = s.allBut(all, i, one)
			all = s.add(all, i, e.End, fmt.Sprintf("record %d alone", one), s.whole(one, one+1)...)
		}
	}
	return all
}

// sample returns up to n images with random parts of the records between two flushes.
func (s *sampler) sample(n int) []image {
	var all []image
	for tries := 0; len(all) < n && tries < 20*n; tries++ {
		i := s.rand.IntN(len(s.epochs))
		e := s.epochs[i]
		changes := s.changes(e)
		if len(changes) == 0 {
			continue
		}
		switch s.rand.IntN(6) {
		case 0: // the power is cut between two records, and all earlier ones are on the disk
			cut := changes[s.rand.IntN(len(changes))]
			all = s.add(all, i, cut+1, "all", s.whole(e.First, cut+1)...)
		case 1: // all except one
			all = s.allBut(all, i, changes[s.rand.IntN(len(changes))])
		case 2: // one alone
			one := changes[s.rand.IntN(len(changes))]
			all = s.add(all, i, e.End, fmt.Sprintf("record %d alone", one), s.whole(one, one+1)...)
		case 3: // any part
			all = s.add(all, i, e.End, "some", s.some(changes)...)
		case 4: // all up to a torn one
			cut := changes[s.rand.IntN(len(changes))]
			pieces := s.whole(e.First, cut+1)
			last := len(pieces) - 1
			pieces = append(pieces[:last], s.tear(pieces[last]))
			all = s.add(all, i, cut+1, "all, the last torn,", pieces...)
		case 5: // any part in any order, torn
			pieces := s.torn(s.some(changes))
			s.rand.Shuffle(len(pieces), func(i, j int) {
				pieces[i], pieces[j] = pieces[j], pieces[i]
			})
			all = s.add(all, i, e.End, "some, torn", pieces...)
		}
	}
	return all
}

// allBut adds the image that lacks one record of an epoch.
func (s *sampler) allBut(all []image, epoch, lost int) []image {
	e := s.epochs[epoch]
	pieces := append(s.whole(e.First, lost), s.whole(lost+1, e.End)...)
	return s.add(all, epoch, e.End, fmt.Sprintf("all but record %d", lost), pieces...)
}

// changes returns the indexes of the records of an epoch that change the disk.
func (s *sampler) changes(e flakydisk.Epoch) (indexes []int) {
	for i := e.First; i < e.End; i++ {
		if s.of.log[i].Changes() {
			indexes = append(indexes, i)
		}
	}
	return indexes
}

// whole returns the changes in a part of the log as whole pieces.
func (s *sampler) whole(from, to int) (pieces []flakydisk.Piece) {
	for _, r := range s.of.log[from:to] {
		if r.Changes() {
			pieces = append(pieces, flakydisk.Whole(r))
		}
	}
	return pieces
}

// some returns a random selection of the records: few, half, or most of them.
func (s *sampler) some(indexes []int) (pieces []flakydisk.Piece) {
	part := []float64{0.1, 0.5, 0.9}[s.rand.IntN(3)]
	for _, i := range indexes {
		if s.rand.Float64() < part {
			pieces = append(pieces, flakydisk.Whole(s.of.log[i]))
		}
	}
	return pieces
}

func (s *sampler) torn(pieces []flakydisk.Piece) []flakydisk.Piece {
	for i, p := range pieces {
		if s.rand.IntN(2) == 0 {
			pieces[i] = s.tear(p)
		}
	}
	return pieces
}

// tear returns a part of a piece: its beginning, its end, or some sectors of it.
func (s *sampler) tear(p flakydisk.Piece) flakydisk.Piece {
	a, b := s.rand.Int64N(p.To), 1+s.rand.Int64N(p.To)
	switch s.rand.IntN(3) {
	case 0:
		p.To = b
	case 1:
		p.From = a
	default:
		p.From, p.To = min(a, b), max(a, b)
	}
	return p
}

// add adds an image, unless it is equal to an earlier one with the same promises.
func (s *sampler) add(all []image, epoch, cut int, name string, pieces ...flakydisk.Piece) []image {
	collect()
	durable := s.epochs[epoch].Durable
	content := durable.Fork()
	if err := flakydisk.Apply(content, pieces...); err != nil {
		s.err = err
		return all
	}
	events := s.events(cut)
	key := [2]uint64{content.Sum(), uint64(events)}
	if s.seen[key] {
		s.equal++
		return all
	}
	s.seen[key] = true
	torn := slices.ContainsFunc(pieces, func(p flakydisk.Piece) bool {
		return p.From > 0 || p.To < p.Entry.Sectors()
	})
	name = fmt.Sprintf("%s, cut at %d of %d, %s of epoch %d of %d", s.of.name, cut, len(s.of.log),
		name, epoch+1, len(s.epochs))
	return append(all, image{of: s.of, durable: durable, pieces: pieces, at: cut, events: events,
		torn: torn, name: name})
}

func (s *sampler) events(before int) int {
	for i := before - 1; i >= 0; i-- {
		if r := s.of.log[i]; r.Kind == flakydisk.Note {
			n, err := strconv.Atoi(r.Text)
			if err != nil {
				s.err = err
			}
			return n
		}
	}
	return 0
}
