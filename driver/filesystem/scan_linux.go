package filesystem

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

// scan is what was read of a disk and what blkid says of it. It is judged without the disk.
type scan struct {
	Path      string
	SizeBytes int64
	Regions   []regionData
	Found     []Superblock // of the filesystems the driver makes
	Known     blkidAnswer
	Records   []foundRecord
	Growth    []Record // the marks of a growth, whatever they say
	// Strange is the first byte that no mkfs of the driver's has written, or -1. It is looked for only
	// beside whole marks of a format.
	Strange int64
}

// regionData is an area with its bytes. Whole marks of the driver's own are cleared in it.
type regionData struct {
	region
	Data []byte
}

// foundRecord is a mark of a format, or what claims to be one.
type foundRecord struct {
	Offset int64
	Record
	Problem error // what does not add up
}

// superblockBytes holds the superblocks of the filesystems the driver makes.
const superblockBytes = 128 << 10

// inspect says what the open device holds. It only reads.
//
// blkid is asked, but what it does not find proves nothing: it answers "nothing" for a device that
// is not there, for random bytes and for a filesystem whose device was cut short. So blank is only
// what blkid knows nothing of and whose areas (see markerRegions) were read, all of them, and are zero.
//
// A single filesystem whose superblock carries a correct checksum, with nothing of anybody else
// around it, needs no blkid: it is not going to be overwritten, only mounted.
func (h disk) inspect(v Volume) (state, error) {
	found, err := Find(h.OpenDevice)
	if err != nil {
		return state{}, err
	}
	if len(found) > 0 {
		s, err := h.read(edgeRegions(h.SizeBytes), found)
		if err != nil {
			return state{}, err
		}
		if s.soleFilesystem(v) && !found[0].Fresh && !s.growing(v) && !s.needsCheck(v) {
			return state{Filesystem: found[0], Begun: len(s.growth(v)) > 0}, nil
		}
	}
	s, err := h.scan(found)
	if err != nil {
		return state{}, err
	}
	return s.judge(v)
}

// Find finds the driver's own filesystems and looks whether they were ever in use.
func Find(h *blockdev.OpenDevice) ([]Superblock, error) {
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

func xfsFresh(h *blockdev.OpenDevice, sb Superblock) (bool, error) {
	n := min(h.SizeBytes-sb.LogOffset, xfsLogBytes)
	if sb.LogOffset <= 0 || sb.LogOffset%sectorBytes != 0 || n <= 0 || n%sectorBytes != 0 {
		return false, nil
	}
	log, err := h.Read(sb.LogOffset, n)
	return xfsLogFresh(log), err
}

func unreadable(err error) error {
	return csierr.New(csierr.DeviceUnreadable, "what the disk holds cannot be known: %w", err)
}

// scan reads every area and asks blkid meanwhile, which takes about as long.
func (h disk) scan(found []Superblock) (scan, error) {
	ask := async.Start(func() (blkidAnswer, error) { return blkid(h.File) })
	s, err := h.read(markerRegions(h.SizeBytes), found)
	known, probeErr := ask()
	if err != nil {
		return scan{}, err
	}
	if probeErr != nil {
		return scan{}, fmt.Errorf("probe %s: %w", h.Path, probeErr)
	}
	s.Known = known
	if len(s.validRecords()) > 0 {
		s.Strange, err = h.traces().strange(s.Regions)
	}
	return s, err
}

// read reads the areas and takes the driver's own marks out of them.
func (h disk) read(areas []region, found []Superblock) (scan, error) {
	pieces, err := h.readRegions(areas)
	if err != nil {
		return scan{}, unreadable(err)
	}
	s := scan{Path: h.Path, SizeBytes: h.SizeBytes, Regions: pieces, Found: found, Strange: -1}
	s.takeRecords()
	return s, nil
}

// readers is how many areas are read at once. A disk takes that many at hardly more time than one,
// and on a busy machine each read waits for its turn.
const readers = 8

// readAreas reads all areas. One that cannot be read is an error that names it.
func (h disk) readRegions(areas []region) ([]regionData, error) {
	pieces, errs := make([]regionData, len(areas)), make([]error, len(areas))
	var group async.Group
	for first := range min(readers, len(areas)) {
		group.Go(func() {
			room := buffers.Get().(*[]byte)
			defer buffers.Put(room)
			for i := first; i < len(areas); i += readers {
				b, err := h.readZeroes(areas[i], *room)
				if err != nil {
					errs[i] = fmt.Errorf("%w (that is where %s would be)", err, areas[i].Owner)
				}
				pieces[i] = regionData{areas[i], b}
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

// buffers are what the areas are read into, one for each reader, and zeroes is what nearly all of
// them hold: a survey keeps of its own only what is not zero. Nobody writes to zeroes.
var (
	buffers = sync.Pool{New: func() any {
		room := blockdev.Aligned(spanBytes)
		return &room
	}}
	zeroes [spanBytes]byte
)

// readZeroes reads an area by way of room.
func (h disk) readZeroes(a region, room []byte) ([]byte, error) {
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
func (s scan) at(offset, n int64) []byte {
	for _, p := range s.Regions {
		if offset >= p.Offset && offset+n <= p.end() {
			return p.Data[offset-p.Offset : offset-p.Offset+n]
		}
	}
	return nil
}

// takeMarks gathers the marks of a format and clears the whole ones in what was read, so that the
// rest can be judged without them.
func (s *scan) takeRecords() {
	for _, slot := range RecordOffsets(s.SizeBytes) {
		b := s.at(slot, recordBytes)
		if !isRecord(b) {
			continue
		}
		m, err := ParseRecord(b)
		if err == nil && m.GrowFrom != 0 {
			err = errors.New("it is that of a growth")
		}
		s.Records = append(s.Records, foundRecord{Offset: slot, Record: m, Problem: err})
		if err == nil {
			clear(b)
		}
	}
	// These stay where they are: on a disk without a filesystem nothing has grown.
	for _, slot := range GrowthOffsets(s.SizeBytes) {
		m, err := ParseRecord(s.at(slot, recordBytes))
		if err == nil && m.GrowFrom > 0 && m.GrowFrom <= slot {
			s.Growth = append(s.Growth, m)
		}
	}
}

// wholeMarks are those that add up.
func (s scan) validRecords() []foundRecord {
	return slices.DeleteFunc(slices.Clone(s.Records),
		func(m foundRecord) bool { return m.Problem != nil })
}

// firstNonZero is the first byte that is not zero in what was read, and the area it is in.
func (s scan) firstNonZero() (offset int64, owner string, dirty bool) {
	for _, p := range s.Regions {
		if i := nonZero(p.Data); i >= 0 && (!dirty || p.Offset+int64(i) < offset) {
			offset, owner, dirty = p.Offset+int64(i), p.Owner, true
		}
	}
	return offset, owner, dirty
}

// foreign are the marks of others that are worth more than a name: shorter ones are found by
// chance. Those where the filesystem sb keeps the data of files are data and do not count.
func (s scan) foreign(sb Superblock) []finding {
	return slices.DeleteFunc(findSignatures(s.SizeBytes, s.at), func(f finding) bool {
		return !f.Sure || (f.Offset >= sb.DataFrom && f.Offset < sb.SizeBytes)
	})
}

// evidence is what a person needs to find out what the disk is.
func (s scan) evidence() string {
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
	for _, m := range s.Records {
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
