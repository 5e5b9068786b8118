package filesystem

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// scan contains what was read of a disk, and blkid's result. judge() uses nothing else.
type scan struct {
	Path      string
	SizeBytes int64
	Regions   []regionData
	Found     []Superblock  // superblocks of the filesystems that the driver makes
	Blkid     string        // what blkid found
	Records   []foundRecord // format records
	Growth    []foundRecord
}

// regionData contains a region's bytes. takeRecords clears valid format records in them.
type regionData struct {
	region
	Data []byte
}

type foundRecord struct {
	Offset int64
	Record
}

// inspect determines what the open device holds. It only reads.
//
// It runs blkid, but blkid also finds nothing in random bytes and in a filesystem whose device was
// truncated. So a disk is blank only if all regions (see markerRegions) are zero as well.
//
// A filesystem with the volume's UUID needs no blkid, because it is only mounted, not overwritten.
func (d disk) inspect(v Volume) (state, error) {
	found, err := Find(d.OpenDevice)
	if err != nil {
		return state{}, err
	}
	if len(found) == 1 && v.FilesystemUUID != "" {
		s, err := d.read(v, ownRegions(d.SizeBytes), found)
		if err != nil {
			return state{}, err
		}
		sb, _, whole := s.filesystem(v)
		if whole && !sb.Fresh && len(s.growth(v)) == 0 && !s.needsCheck(v) {
			return state{Filesystem: sb}, nil
		}
	}
	s, err := d.scan(v, found)
	if err != nil {
		return state{}, err
	}
	return s.judge(v)
}

// Find returns the superblocks of ext, xfs and btrfs filesystems. It omits a btrfs superblock that
// may be part of a file in an xfs. In that case blkid decides whether there is a second filesystem
// (see scan.filesystem).
func Find(d *blockdev.OpenDevice) ([]Superblock, error) {
	head, err := d.Read(0, min(d.SizeBytes, superblockBytes))
	if err != nil {
		return nil, unreadable(err)
	}
	found := findSuperblocks(head)
	for i, sb := range found {
		if sb.Type == volume.XFS && sb.Fresh && !sb.Unfinished {
			if found[i].Fresh, err = xfsFresh(d, sb); err != nil {
				return nil, unreadable(err)
			}
		}
	}
	if len(found) == 2 && found[0].Type == volume.XFS && !found[0].Damaged &&
		found[0].holds(found[1].Offset) && found[1].Type == volume.Btrfs {
		found = found[:1]
	}
	return found, nil
}

// JournalFailed reports whether an ext3 or ext4 still needs a replay, because its journal failed.
// Call it after the unmount of a writable mount. It is needed because sync(2) and syncfs(2) do not
// report a failed commit that another process started (ext4_sync_fs).
func JournalFailed(d *blockdev.OpenDevice) (bool, error) {
	head, err := d.Read(0, sectorBytes)
	if err != nil {
		return false, unreadable(err)
	}
	b := head[extOffset:]
	return binary.LittleEndian.Uint16(b[0x38:]) == 0xEF53 &&
		binary.LittleEndian.Uint32(b[0x60:])&extIncompatRecover != 0, nil
}

func xfsFresh(d *blockdev.OpenDevice, sb Superblock) (bool, error) {
	n := min(d.SizeBytes-sb.LogOffset, xfsLogBytes)
	if sb.LogOffset <= 0 || sb.LogOffset%sectorBytes != 0 || n <= 0 || n%sectorBytes != 0 {
		return false, nil
	}
	log, err := d.Read(sb.LogOffset, n)
	return xfsLogFresh(log), err
}

func unreadable(err error) error {
	return csierr.New(csierr.DeviceUnreadable, "the content of the disk is unknown: %w", err)
}

// scan reads every region and runs blkid at the same time, because they take equally long.
func (d disk) scan(v Volume, found []Superblock) (scan, error) {
	probe := async.Start(func() (string, error) { return blkid(d.File) })
	s, err := d.read(v, markerRegions(d.SizeBytes), found)
	result, probeErr := probe()
	if err != nil {
		return scan{}, err
	}
	if probeErr != nil {
		return scan{}, fmt.Errorf("probe %s: %w", d.Path, probeErr)
	}
	s.Blkid = result
	return s, nil
}

func (d disk) read(v Volume, regions []region, found []Superblock) (scan, error) {
	for _, offsets := range []func(int64) []int64{RecordOffsets, GrowthOffsets} {
		for _, slot := range v.slots(offsets, d.SizeBytes)[len(offsets(d.SizeBytes)):] {
			regions = append(regions, region{slot, sectorBytes, "the record of the snapshot's origin"})
		}
	}
	data, err := d.readRegions(regions)
	if err != nil {
		return scan{}, unreadable(err)
	}
	s := scan{Path: d.Path, SizeBytes: d.SizeBytes, Regions: data, Found: found}
	s.takeRecords(v)
	return s, nil
}

// readers is the number of regions that are read in parallel. A disk reads eight in hardly more
// time than one, and on a busy machine each read waits for the processor.
const readers = 8

func (d disk) readRegions(regions []region) ([]regionData, error) {
	data, errs := make([]regionData, len(regions)), make([]error, len(regions))
	var group async.Group
	for first := range min(readers, len(regions)) {
		group.Go(func() {
			for i := first; i < len(regions); i += readers {
				b, err := d.Read(regions[i].Offset, regions[i].Bytes)
				if err != nil {
					errs[i] = fmt.Errorf("%w (where %s would be)", err, regions[i].Owner)
				}
				data[i] = regionData{regions[i], b}
			}
		})
	}
	group.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, err
		}
	}
	return data, nil
}

func (s scan) at(offset, n int64) []byte {
	for _, r := range s.Regions {
		if offset >= r.Offset && offset+n <= r.end() {
			return r.Data[offset-r.Offset : offset-r.Offset+n]
		}
	}
	return nil
}

// takeRecords collects the driver's records from slots where no file can have data. It overwrites
// format records in s with zeroes, so that judge() sees the disk without them. It keeps growth
// records, which exist only beside a filesystem.
func (s *scan) takeRecords(v Volume) {
	for _, slot := range v.slots(RecordOffsets, s.SizeBytes) {
		b := s.at(slot, recordBytes)
		used := slices.ContainsFunc(s.Found, func(sb Superblock) bool { return sb.holds(slot) })
		if r, err := ParseRecord(b); err == nil && r.GrowFrom == 0 && !used {
			s.Records = append(s.Records, foundRecord{slot, r})
			clear(b)
		}
	}
	for _, slot := range v.slots(GrowthOffsets, s.SizeBytes) {
		inside := slices.ContainsFunc(s.Found, func(sb Superblock) bool { return slot < sb.SizeBytes })
		r, err := ParseRecord(s.at(slot, recordBytes))
		if err == nil && r.GrowFrom > 0 && !inside {
			s.Growth = append(s.Growth, foundRecord{slot, r})
		}
	}
}

func (s scan) firstNonZero() (offset int64, owner string, dirty bool) {
	for _, r := range s.Regions {
		if i := nonZero(r.Data); i >= 0 && (!dirty || r.Offset+int64(i) < offset) {
			offset, owner, dirty = r.Offset+int64(i), r.Owner, true
		}
	}
	return offset, owner, dirty
}

func (s scan) evidence() string {
	var words []string
	if s.Blkid != "" {
		words = append(words, "blkid finds "+s.Blkid)
	}
	for _, sb := range s.Found {
		kind := "an " + sb.Type + " superblock"
		switch {
		case sb.Unfinished:
			kind = "an unfinished " + sb.Type + " filesystem"
		case sb.Damaged:
			kind += " whose checksum is wrong"
		}
		if sb.Refused != "" {
			kind += " with " + sb.Refused
		}
		words = append(words, kind)
	}
	if offset, owner, dirty := s.firstNonZero(); dirty {
		words = append(words, fmt.Sprintf("the first byte that is not zero is at offset %d (%s)",
			offset, owner))
	}
	return strings.Join(words, "; ")
}

var errNotBlank = errors.New("the driver formats only a disk that is proven blank, and mounts " +
	"only a disk that holds one filesystem and nothing else")

// The exit codes of blkid -p (blkid(8)).
const (
	blkidFound     = 0
	blkidNothing   = 2
	blkidAmbiguous = 8
)

// blkid runs blkid on an inherited descriptor, so that it reads no other disk. The result is the
// filesystem's type, and more words if the program finds more than one filesystem.
func blkid(f *os.File) (string, error) {
	result, err := runTool([]*os.File{f}, "blkid", "-p", "-o", "export", inherited)
	if err != nil {
		return "", err
	}
	switch result.Exit {
	case blkidFound:
		return parseBlkid(result.Stdout)
	case blkidNothing:
		return "", nil
	case blkidAmbiguous:
		return "signatures of several filesystems or tables at once", nil
	}
	return "", result.failure("blkid", f.Name())
}

// parseBlkid parses the output of blkid -o export. It returns an error if the output contains
// neither a type nor a partition table, because blkid has reported that it found one.
func parseBlkid(output string) (string, error) {
	var words []string
	for line := range strings.Lines(output) {
		switch key, value, _ := strings.Cut(strings.TrimSpace(line), "="); key {
		case "TYPE":
			words = append(words, value)
		case "PTTYPE":
			words = append(words, "a partition table ("+value+")")
		}
	}
	found := strings.Join(words, " and ")
	if found == "" {
		return "", csierr.New(csierr.NodeToolFailed, "blkid found something but names neither a type "+
			"nor a partition table")
	}
	return found, nil
}

// state describes a disk that is blank, or holds a mountable filesystem or an unfinished format of
// this volume. For all other content judge() returns an error.
type state struct {
	Blank      bool
	Unfinished bool
	Filesystem Superblock
	// Growing reports that a growth of the ext filesystem was cut off, and Checked that e2fsck had
	// succeeded before that growth. Grow reports that the filesystem may grow now.
	Growing, Checked, Grow bool
	// NeedsCheck makes Run call btrfs check, because a power failure may have lost blocks of a new
	// btrfs, but not its superblock.
	NeedsCheck bool
}

// judge determines from the scan what the disk holds. No other function declares a disk blank.
func (s scan) judge(v Volume) (state, error) {
	sb, alone, whole := s.filesystem(v)
	switch growth := s.growth(v); {
	case alone && len(growth) > 0:
		return state{Filesystem: s.Found[0], Growing: true,
			Checked: slices.ContainsFunc(growth, func(r foundRecord) bool { return r.Checked })}, nil
	case whole && !sb.Fresh:
		return state{Filesystem: sb, NeedsCheck: s.needsCheck(v)}, nil
	case len(s.Records) > 0:
		if err := s.checkUnfinished(v); err != nil {
			return state{}, err
		}
		return state{Unfinished: true}, nil
	case whole:
		return state{Filesystem: sb}, nil
	}
	if err := s.checkBlank(); err != nil {
		return state{}, err
	}
	return state{Blank: true}, nil
}

// needsCheck reports whether a power failure during mkfs may have left the disk's btrfs incomplete:
// the btrfs shows no sign of a mount, and all format records on the disk are this volume's.
func (s scan) needsCheck(v Volume) bool {
	return len(s.Found) == 1 && s.Found[0].MaybeFresh && len(s.Records) > 0 &&
		!slices.ContainsFunc(s.Records, func(r foundRecord) bool { return !r.of(v, s.SizeBytes) })
}

// filesystem returns the disk's only filesystem. alone reports that the disk holds nothing else,
// and whole that the filesystem is also undamaged.
//
// blkid finds a RAID's signature at the disk's end if the RAID was created around the filesystem,
// but also if a file there is an image of a RAID member. A workload must not lose its volume by
// writing such a file. So a filesystem with the UUID that the driver gave it counts as alone,
// whatever blkid finds. With another UUID, or with data before the superblock, blkid decides.
func (s scan) filesystem(v Volume) (sb Superblock, alone, whole bool) {
	if len(s.Found) != 1 {
		return Superblock{}, false, false
	}
	sb = s.Found[0]
	own := v.FilesystemUUID != "" && sb.isOf(v) && nonZero(s.at(0, sb.Offset)) < 0
	alone = own || s.Blkid == sb.Type || sb.Damaged && s.Blkid == ""
	return sb, alone, alone && !sb.Unfinished && !sb.Damaged
}

// growth returns this volume's growth records if a growth of the disk's ext3 or ext4 was cut off.
// The signatures behind the filesystem may then be from the growth. It omits records from before
// the last writable mount, which makes them invalid.
func (s scan) growth(v Volume) []foundRecord {
	if len(s.Found) != 1 || !s.Found[0].isExt() {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(s.Growth), func(r foundRecord) bool {
		return !r.of(v, s.SizeBytes) || r.Mounted != s.Found[0].Mounted
	})
}

func (s scan) checkBlank() error {
	_, _, dirty := s.firstNonZero()
	if dirty || s.Blkid != "" {
		return csierr.New(csierr.DiskNotBlank, "%s is not blank: %s; %w", s.Path, s.evidence(),
			errNotBlank)
	}
	return nil
}

// checkUnfinished returns an error if the records or superblocks on the disk are not those of an
// unfinished format of this volume. If it returns nil, Preparation.proveBlank must still prove that
// the whole disk holds nothing else before the format is repeated.
func (s scan) checkUnfinished(v Volume) error {
	for _, r := range s.Records {
		if !r.of(v, s.SizeBytes) {
			return s.notOurs(r, "not of this one")
		}
	}
	for _, sb := range s.Found {
		// mkfs.btrfs writes the superblock last. A power failure may have torn it.
		torn := sb.Damaged && sb.MaybeFresh
		if !sb.Unfinished && !sb.Fresh && !torn {
			return s.notOurs(s.Records[0], "but the "+sb.Type+" filesystem there has been used since")
		}
	}
	return nil
}

func (s scan) notOurs(r foundRecord, why string) error {
	return csierr.New(csierr.DiskNotBlank, "%s has at offset %d the record of an unfinished format "+
		"of volume %q on disk %q of %d bytes, %s; %w", s.Path, r.Offset, r.Volume, r.Disk, r.SizeBytes,
		why, errNotBlank)
}
