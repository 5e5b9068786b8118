//go:build linux

package powercut_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
)

// image is a disk after a power cut. It has all durable data, and pieces of later writes.
type image struct {
	of      *recording
	durable *flakydisk.Image
	pieces  []flakydisk.Piece
	// The power cut comes right before log[at]. events is the number of events before the cut.
	at, events int
	// torn is set if a piece is only a part of a log entry.
	torn bool
	name string
}

// content computes the image's bytes. They are not stored, because there are many images.
func (m image) content() *flakydisk.Image {
	content := m.durable.Fork()
	_ = flakydisk.Apply(content, m.pieces...) // has succeeded in sampler.add
	return content
}

// whole returns the image with whole log entries in place of torn ones.
func (m image) whole() image {
	m.pieces, m.torn = slices.Clone(m.pieces), false
	for i, p := range m.pieces {
		m.pieces[i] = flakydisk.Whole(p.Entry)
	}
	return m
}

// sampler makes images from a recording, and returns each image only once.
type sampler struct {
	of     *recording
	rand   *rand.Rand
	epochs []flakydisk.Epoch
	seen   map[[2]uint64]bool
	// equal counts images that were omitted because the sampler had made them before.
	equal int
	err   error
}

func newSampler(of *recording, r *rand.Rand) (*sampler, error) {
	epochs, err := flakydisk.Replay(of.base, of.log)
	return &sampler{of: of, rand: r, epochs: epochs, seen: map[[2]uint64]bool{}}, err
}

// flushes returns an image for every flush, with all writes before the flush and none after it.
func (s *sampler) flushes() []image {
	var all []image
	for i := range s.epochs {
		all = s.add(all, i, s.epochs[i].End, "nothing")
	}
	return all
}

// early returns images of power cuts before the end of the stage. Each image either lacks one of
// the writes between two flushes, or has only one of them.
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

// sample returns up to n images. Each has a random selection of the writes between two flushes.
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
		case 0: // the power is cut between two log entries; the disk has all earlier ones
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

func (s *sampler) allBut(all []image, epoch, lost int) []image {
	e := s.epochs[epoch]
	pieces := append(s.whole(e.First, lost), s.whole(lost+1, e.End)...)
	return s.add(all, epoch, e.End, fmt.Sprintf("all but record %d", lost), pieces...)
}

func (s *sampler) changes(e flakydisk.Epoch) (indexes []int) {
	for i := e.First; i < e.End; i++ {
		if s.of.log[i].Changes() {
			indexes = append(indexes, i)
		}
	}
	return indexes
}

func (s *sampler) whole(from, to int) (pieces []flakydisk.Piece) {
	for _, r := range s.of.log[from:to] {
		if r.Changes() {
			pieces = append(pieces, flakydisk.Whole(r))
		}
	}
	return pieces
}

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

// tear returns the beginning of a piece, its end, or sectors in its middle.
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

// add appends an image unless an earlier image has the same content and the same events.
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

type verdict struct {
	converged, refused bool
	lost, formatted    bool
	// damaged is set if the driver calls an xfs damaged and the image has a torn block.
	damaged bool
	// wrong describes what the driver did wrong, or is nil.
	wrong error
}

// check stages an image, and checks what must hold after a power cut. Its error means that the
// check could not be made.
//
// The kernel's recovery of an xfs skips a torn metadata block if the block's first sector is new.
// So the driver may refuse such an image, but must accept the same image with whole log entries.
func (b *bench) check(ctx context.Context, m image) (verdict, error) {
	v, err := b.checkOnce(ctx, m)
	if err != nil || !v.damaged {
		return v, err
	}
	whole, err := b.checkOnce(ctx, m.whole())
	if !whole.converged || whole.wrong != nil {
		v.wrong = errors.Join(v.wrong, fmt.Errorf("the image is refused with whole records, too: %w",
			whole.wrong))
	}
	return v, err
}

func (b *bench) checkOnce(ctx context.Context, m image) (v verdict, err error) {
	b.cut(m)
	found := m.content()
	content := found.Fork()
	disk := flakydisk.NewDisk(content)
	defer harness.Catch(&err)
	before := harness.Got(b.formats.Count())
	place, err := b.show(ctx, m.of.volume, disk)
	defer func() { err = errors.Join(err, place.hide()) }()
	harness.Must(err)
	answer := place.stage(ctx)
	after := harness.Got(b.formats.Count())
	promises, staged := m.of.ledger.at(m.events)
	if after != before && (m.at > m.of.used || staged) {
		v.formatted = true
		v.wrong = errors.New("a filesystem that had been in use was formatted")
	}
	if left := marks(found); staged && m.of.volume.raw() && len(left) > 0 {
		v.wrong = fmt.Errorf("a workload got a raw disk with records of a format at %d", left)
	}
	if size := m.btrfsBytes(found); staged && m.of.grows && size != 0 && size <= m.of.volume.size {
		v.wrong = fmt.Errorf("a workload got a btrfs that had grown, and it has %d bytes again", size)
	}
	if answer != nil {
		v.damaged = m.torn && m.of.volume.access == xfs &&
			strings.Contains(answer.Error(), "FilesystemDamaged")
		if v.refused = v.damaged || m.refusedRightly(found, answer); !v.refused {
			v.wrong = errors.Join(v.wrong, fmt.Errorf("the call does not converge: %w", answer))
		}
		if v.refused && place.mountable() {
			v.wrong = errors.Join(v.wrong, fmt.Errorf("the kernel mounts what was refused: %w", answer))
		}
		return v, nil
	}
	v.converged = true
	if err := place.staged(); err != nil {
		v.wrong = errors.Join(v.wrong, err)
		return v, nil
	}
	if err := place.checkData(ctx, promises); err != nil {
		v.lost = true
		v.wrong = errors.Join(v.wrong, fmt.Errorf("acknowledged data are lost: %w", err))
	}
	v.wrong = errors.Join(v.wrong, place.usable(m.of), place.unstage(ctx))
	disk.WithStore(func(flakydisk.Store) {
		if left := marks(content); len(left) > 0 {
			v.wrong = errors.Join(v.wrong, fmt.Errorf("records of the driver are left at %d", left))
		}
	})
	return v, nil
}

// superblocks contains the offset and the size of superblocks that have several sectors. If a power
// cut tears such a superblock, its checksum is wrong, and the kernel does not mount the filesystem.
var superblocks = map[string][2]int64{ext4: {1024, 1024}, btrfs: {64 << 10, 4096}}

// refusedRightly reports whether the driver may refuse the image. It may if a superblock is torn,
// or if a tree block is torn after an interrupted format for btrfs.
func (m image) refusedRightly(found *flakydisk.Image, answer error) bool {
	if m.torn && m.of.blank && m.at <= m.of.used && m.of.volume.access == btrfs &&
		m.headless(found, answer) {
		return true
	}
	at, ok := superblocks[m.of.volume.access]
	if !ok || !strings.Contains(answer.Error(), "DiskNotBlank") ||
		!strings.Contains(answer.Error(), "superblock whose checksum is wrong") &&
			!strings.Contains(answer.Error(), "has been used since") { // the answer about a forged record
		return false
	}
	superblock := func(of *flakydisk.Image) string {
		b := make([]byte, at[1])
		if _, err := of.ReadAt(b, at[0]); err != nil {
			return ""
		}
		return string(b)
	}
	got, now := superblock(found), m.of.base.Fork()
	if got == superblock(now) {
		return false
	}
	for _, r := range m.of.log {
		if err := flakydisk.Apply(now, flakydisk.Whole(r)); err != nil || got == superblock(now) {
			return false // the kernel wrote this superblock whole, so it is not torn
		}
	}
	return true
}

// headless reports whether the driver has refused an unfinished btrfs format because the first
// sector of a tree block is missing. Only this sector tells to which filesystem the block belongs.
func (m image) headless(found *flakydisk.Image, answer error) bool {
	const treeBlock = 16 << 10
	_, offset, ok := strings.Cut(answer.Error(), "that is not expected is at offset ")
	var at int64
	if _, err := fmt.Sscanf(offset, "%d", &at); !ok || err != nil {
		return false
	}
	head := make([]byte, flakydisk.SectorBytes)
	if _, err := found.ReadAt(head, at&^(treeBlock-1)); err != nil || !isZero(head) {
		return false
	}
	return slices.ContainsFunc(m.of.log[:m.at], func(r flakydisk.LogEntry) bool {
		return r.Kind == flakydisk.Write && r.Offset <= at && at < r.Offset+r.Bytes &&
			!isZero(r.Data[at-r.Offset:])
	})
}

func isZero(b []byte) bool {
	return !slices.ContainsFunc(b, func(c byte) bool { return c != 0 })
}

func (p *placement) mountable() bool {
	err := unix.Mount(p.loop.Path, p.Staging, p.volume.access, 0, "")
	return err == nil && unix.Unmount(p.Staging, 0) == nil
}

// btrfsBytes returns the size in a btrfs's superblock, or 0 for another filesystem. After a power
// cut, a grown btrfs must not have its old size again, because data beyond that size would be lost.
func (m image) btrfsBytes(found *flakydisk.Image) int64 {
	b := make([]byte, 8)
	if _, err := found.ReadAt(b, 64<<10+0x70); err != nil || m.of.volume.access != btrfs {
		return 0
	}
	return int64(binary.LittleEndian.Uint64(b))
}

func (p *placement) checkData(ctx context.Context, promises map[string]promise) (err error) {
	defer harness.Catch(&err)
	if !p.volume.raw() {
		harness.Unforked(func() { err = checkFiles(p.Staging, promises, p.bench.Forged) })
		return err
	}
	harness.Must(p.publish(ctx))
	device := harness.Got(os.Open(p.Target))
	return errors.Join(checkRanges(device, promises), device.Close(), p.unpublish(ctx))
}

func (p *placement) usable(of *recording) error {
	if p.volume.raw() {
		return nil
	}
	path := filepath.Join(p.Staging, "after")
	var err error
	harness.Unforked(func() {
		var f *os.File
		if f, err = os.Create(path); err == nil {
			_, err = f.WriteString("after the power cut")
			err = errors.Join(err, f.Sync(), f.Close(), os.Remove(path))
		}
	})
	if err != nil {
		return fmt.Errorf("the filesystem cannot be used: %w", err)
	}
	size, err := p.filesystemBytes()
	if err == nil && of.grows && size < p.volume.grownAtLeast() {
		err = fmt.Errorf("the filesystem has %d bytes and was not grown to its disk of %d", size,
			of.base.Size())
	}
	return err
}

func (p *placement) filesystemBytes() (int64, error) {
	var st unix.Statfs_t
	err := unix.Statfs(p.Staging, &st)
	return int64(st.Blocks) * st.Bsize, err
}
