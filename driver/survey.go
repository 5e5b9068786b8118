//go:build linux

package driver

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/async"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// disk is an open device as what holds a filesystem.
type disk struct{ *blockdev.OpenDevice }

// survey is what was read of a disk and what blkid says of it. It is judged without the disk.
type survey struct {
	Path      string
	SizeBytes int64
	Pieces    []piece
	Found     []superblock // of the filesystems the driver makes
	Known     blkidAnswer
	Marks     []foundMark
	Growth    []formatMark // the marks of a growth, whatever they say
	// Strange is the first byte that no mkfs of the driver's has written, or -1. It is looked for only
	// beside whole marks of a format.
	Strange int64
}

// piece is an area with its bytes. Whole marks of the driver's own are cleared in it.
type piece struct {
	area
	Data []byte
}

// foundMark is a mark of a format, or what claims to be one.
type foundMark struct {
	Offset int64
	formatMark
	Problem error // what does not add up
}

// superblockBytes holds the superblocks of the filesystems the driver makes.
const superblockBytes = 128 << 10

// inspect says what the open device holds. It only reads.
//
// blkid is asked, but what it does not find proves nothing: it answers "nothing" for a device that
// is not there, for random bytes and for a filesystem whose device was cut short. So blank is only
// what blkid knows nothing of and whose areas (see markAreas) were read, all of them, and are zero.
//
// A single filesystem whose superblock carries a correct checksum, with nothing of anybody else
// around it, needs no blkid: it is not going to be overwritten, only mounted.
func (h disk) inspect(v fsVolume) (content, error) {
	found, err := findFilesystems(h.OpenDevice)
	if err != nil {
		return content{}, err
	}
	if len(found) > 0 {
		s, err := h.read(edgeAreas(h.SizeBytes), found)
		if err != nil {
			return content{}, err
		}
		if s.alone(v) && !found[0].Fresh && !s.growing(v) && !s.doubtful(v) {
			return content{Filesystem: found[0], Begun: len(s.growth(v)) > 0}, nil
		}
	}
	s, err := h.survey(found)
	if err != nil {
		return content{}, err
	}
	return s.judge(v)
}

// findFilesystems finds the driver's own filesystems and looks whether they were ever in use.
func findFilesystems(h *blockdev.OpenDevice) ([]superblock, error) {
	head, err := h.Read(0, min(h.SizeBytes, superblockBytes))
	if err != nil {
		return nil, unreadable(err)
	}
	found := findSuperblocks(head)
	for i, sb := range found {
		if sb.Type == volume.XFS && sb.Fresh && !sb.Unfinished {
			if found[i].Fresh, err = xfsFresh(h, sb); err != nil {
				return nil, unreadable(err)
			}
		}
	}
	return found, nil
}

func xfsFresh(h *blockdev.OpenDevice, sb superblock) (bool, error) {
	n := min(h.SizeBytes-sb.LogOffset, xfsLogBytes)
	if sb.LogOffset <= 0 || sb.LogOffset%spotBytes != 0 || n <= 0 || n%spotBytes != 0 {
		return false, nil
	}
	log, err := h.Read(sb.LogOffset, n)
	return xfsLogFresh(log), err
}

func unreadable(err error) error {
	return csierr.New(csierr.DeviceUnreadable, "what the disk holds cannot be known: %w", err)
}

// survey reads every area and asks blkid meanwhile, which takes about as long.
func (h disk) survey(found []superblock) (survey, error) {
	ask := async.Start(func() (blkidAnswer, error) { return blkid(h.File) })
	s, err := h.read(markAreas(h.SizeBytes), found)
	known, probeErr := ask()
	if err != nil {
		return survey{}, err
	}
	if probeErr != nil {
		return survey{}, fmt.Errorf("probe %s: %w", h.Path, probeErr)
	}
	s.Known = known
	if len(s.wholeMarks()) > 0 {
		s.Strange, err = h.traces().strange(s.Pieces)
	}
	return s, err
}

// read reads the areas and takes the driver's own marks out of them.
func (h disk) read(areas []area, found []superblock) (survey, error) {
	pieces, err := h.readAreas(areas)
	if err != nil {
		return survey{}, unreadable(err)
	}
	s := survey{Path: h.Path, SizeBytes: h.SizeBytes, Pieces: pieces, Found: found, Strange: -1}
	s.takeMarks()
	return s, nil
}

// readers is how many areas are read at once. A disk takes that many at hardly more time than one,
// and on a busy machine each read waits for its turn.
const readers = 8

// readAreas reads all areas. One that cannot be read is an error that names it.
func (h disk) readAreas(areas []area) ([]piece, error) {
	pieces, errs := make([]piece, len(areas)), make([]error, len(areas))
	var group async.Group
	for first := range min(readers, len(areas)) {
		group.Go(func() {
			room := rooms.Get().(*[]byte)
			defer rooms.Put(room)
			for i := first; i < len(areas); i += readers {
				b, err := h.readZeroes(areas[i], *room)
				if err != nil {
					errs[i] = fmt.Errorf("%w (that is where %s would be)", err, areas[i].Owner)
				}
				pieces[i] = piece{areas[i], b}
			}
		})
	}
	group.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, err
		}
	}
	return pieces, nil
}

// rooms are what the areas are read into, one for each reader, and zeroes is what nearly all of
// them hold: a survey keeps of its own only what is not zero. Nobody writes to zeroes.
var (
	rooms = sync.Pool{New: func() any {
		room := blockdev.Aligned(spanBytes)
		return &room
	}}
	zeroes [spanBytes]byte
)

// readZeroes reads an area by way of room.
func (h disk) readZeroes(a area, room []byte) ([]byte, error) {
	b := room[:a.Bytes]
	if err := h.ReadInto(b, a.Offset); err != nil {
		return nil, err
	}
	if nonZero(b) < 0 {
		return zeroes[:a.Bytes], nil
	}
	return bytes.Clone(b), nil
}

// at is what was read at an offset, or nil when it was not read.
func (s survey) at(offset, n int64) []byte {
	for _, p := range s.Pieces {
		if offset >= p.Offset && offset+n <= p.end() {
			return p.Data[offset-p.Offset : offset-p.Offset+n]
		}
	}
	return nil
}

// takeMarks gathers the marks of a format and clears the whole ones in what was read, so that the
// rest can be judged without them.
func (s *survey) takeMarks() {
	for _, slot := range markSlots(s.SizeBytes) {
		b := s.at(slot, markBytes)
		if !isMark(b) {
			continue
		}
		m, err := parseMark(b)
		if err == nil && m.GrowFrom != 0 {
			err = errors.New("it is that of a growth")
		}
		s.Marks = append(s.Marks, foundMark{Offset: slot, formatMark: m, Problem: err})
		if err == nil {
			clear(b)
		}
	}
	// These stay where they are: on a disk without a filesystem nothing has grown.
	for _, slot := range growSlots(s.SizeBytes) {
		m, err := parseMark(s.at(slot, markBytes))
		if err == nil && m.GrowFrom > 0 && m.GrowFrom <= slot {
			s.Growth = append(s.Growth, m)
		}
	}
}

// wholeMarks are those that add up.
func (s survey) wholeMarks() []foundMark {
	return slices.DeleteFunc(slices.Clone(s.Marks), func(m foundMark) bool { return m.Problem != nil })
}

// firstNonZero is the first byte that is not zero in what was read, and the area it is in.
func (s survey) firstNonZero() (offset int64, owner string, dirty bool) {
	for _, p := range s.Pieces {
		if i := nonZero(p.Data); i >= 0 && (!dirty || p.Offset+int64(i) < offset) {
			offset, owner, dirty = p.Offset+int64(i), p.Owner, true
		}
	}
	return offset, owner, dirty
}

// foreign are the marks of others that are worth more than a name: shorter ones are found by
// chance. Those where the filesystem sb keeps the data of files are data and do not count.
func (s survey) foreign(sb superblock) []finding {
	return slices.DeleteFunc(findSignatures(s.SizeBytes, s.at), func(f finding) bool {
		return !f.Sure || (f.Offset >= sb.DataFrom && f.Offset < sb.SizeBytes)
	})
}

// evidence is what a person needs to find out what the disk is.
func (s survey) evidence() string {
	var words []string
	if s.Known.any() {
		words = append(words, "blkid finds "+s.Known.String())
	}
	for _, sb := range s.Found {
		kind := "an " + sb.Type + " superblock"
		switch {
		case sb.Unfinished:
			kind = "an unfinished " + sb.Type + " filesystem"
		case sb.Damaged:
			kind += " whose checksum is wrong"
		}
		words = append(words, kind)
	}
	for _, m := range s.Marks {
		if m.Problem != nil {
			words = append(words, fmt.Sprintf("a mark of an unfinished format at offset %d that does "+
				"not add up: %v", m.Offset, m.Problem))
		}
	}
	names := map[string]bool{}
	for _, f := range findSignatures(s.SizeBytes, s.at) {
		if !names[f.Name] && len(names) < 4 {
			names[f.Name] = true
			words = append(words, f.String())
		}
	}
	if offset, owner, dirty := s.firstNonZero(); dirty {
		words = append(words, fmt.Sprintf("the first byte that is not zero is at offset %d (%s)",
			offset, owner))
	}
	return strings.Join(words, "; ")
}

var errNotBlank = errors.New("the driver formats only what it has proven to be blank, and " +
	"mounts only what is one filesystem and nothing else")
