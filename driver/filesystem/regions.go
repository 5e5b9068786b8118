package filesystem

import (
	"bytes"
	"fmt"
)

// region is a range of a disk that the driver reads before a format or a mount.
type region struct {
	Offset, Bytes int64
	Owner         string // what has its signature there; errors name it
}

func (r region) end() int64 { return r.Offset + r.Bytes }

const (
	// The driver reads a disk's first headBytes and last tailBytes: nearly all signatures are in them.
	// The one farthest from the end is that of Promise's fake RAID: 3087 sectors of 512 bytes.
	headBytes = 1 << 20
	tailBytes = 2 << 20
	// sectorBytes is the size of the smallest region. All regions begin at multiples of it.
	sectorBytes = 4096
	// The driver also reads sampleCount sectors across the disk, to find data at unknown offsets.
	sampleCount = 32
	// The first superblockBytes contain the superblocks of the filesystems that the driver makes.
	superblockBytes = 128 << 10
)

// fixedRegions are the regions after the first MiB that do not depend on the disk's size.
var fixedRegions = []region{
	{1 << 20, 64 << 10, "the second header of LUKS 2, VMFS, bcachefs, or the first data of LVM"},
	{1<<20 + 254*4096, sectorBytes, "the second header of Oracle ASM"},
	{2 << 20, 64 << 10, "the second header of LUKS 2, VMFS, or F2FS"},
	{4 << 20, 64 << 10, "the second header of LUKS 2, or the first data of ZFS"},
	{16 << 20, sectorBytes, "the first data of LUKS 2"},
	{18 << 20, sectorBytes, "VMFS"},
	{64 << 20, sectorBytes, "the second superblock of btrfs"},
	{256 << 30, sectorBytes, "the third superblock of btrfs"},
	{3 << 30, sectorBytes, "the file table of NTFS"},
	{1 << 30, sectorBytes, "a copy of the label of Ceph"},
	{10 << 30, sectorBytes, "a copy of the label of Ceph"},
	{100 << 30, sectorBytes, "a copy of the label of Ceph"},
	{1000 << 30, sectorBytes, "a copy of the label of Ceph"},
}

// markerRegions returns every region where filesystems, partition tables, volume managers, RAIDs,
// encryption and swap keep their signatures on a disk of this size. The regions are independent of
// what the driver finds, so that one signature cannot hide another.
func markerRegions(sizeBytes int64) []region {
	l := &regionList{sizeBytes: sizeBytes, seen: map[int64]bool{}}
	if sizeBytes <= headBytes+tailBytes {
		l.span(0, sizeBytes, "the whole disk, which is small")
		return l.regions
	}
	tail := (sizeBytes - tailBytes) &^ (sectorBytes - 1)
	l.span(0, headBytes, "the first MiB")
	l.span(tail, sizeBytes, "the last 2 MiB")
	for i, slot := range RecordOffsets(sizeBytes) {
		l.sector(slot, fmt.Sprintf("slot %d of the driver's own record", i+1))
	}
	for _, r := range fixedRegions {
		l.span(r.Offset, r.end(), r.Owner)
	}
	for blockBytes := int64(1 << 10); blockBytes <= 64<<10; blockBytes *= 2 {
		l.extBackups(blockBytes)
	}
	// mkfs.xfs makes 4 allocation groups, or up to 32 on striped disks.
	for _, groups := range []int64{2, 4, 8, 16, 32} {
		for _, blockBytes := range []int64{1 << 10, 2 << 10, 4 << 10} {
			l.xfsGroups(groups, blockBytes)
		}
	}
	// Newer versions of mkfs.xfs make one group of at least 4 GiB for each processor.
	for _, groups := range []int64{3, 5, 6, 7, 10, 12, 14, 20, 24, 28} {
		if sizeBytes/groups >= 4<<30 {
			l.xfsGroups(groups, 4<<10)
		}
	}
	for group := int64(1 << 40); group < sizeBytes; group += 1 << 40 {
		l.sector(group, "a superblock of xfs, which has groups of at most 1 TiB")
	}
	for i := range int64(sampleCount) {
		// Odd multiples avoid the boundaries of halves, quarters and eighths.
		l.sector(sizeBytes/(2*sampleCount)*(2*i+1), "a sample")
	}
	return l.regions
}

// ownRegions returns the regions of superblocks and of the driver's own records.
func ownRegions(sizeBytes int64) []region {
	l := &regionList{sizeBytes: sizeBytes, seen: map[int64]bool{}}
	l.span(0, superblockBytes, "the superblocks")
	for _, slot := range append(RecordOffsets(sizeBytes), GrowthOffsets(sizeBytes)...) {
		l.sector(slot, "the driver's own record")
	}
	return l.regions
}

type regionList struct {
	sizeBytes int64
	seen      map[int64]bool
	regions   []region
}

// spanBytes is the size of the largest region. Larger ranges are split, to be read in parallel.
const spanBytes = 256 << 10

func (l *regionList) span(from, to int64, owner string) {
	for ; from < to; from += spanBytes {
		l.add(from, min(to-from, spanBytes), owner)
	}
}

func (l *regionList) sector(offset int64, owner string) { l.add(offset, 1, owner) }

func (l *regionList) add(offset, n int64, owner string) {
	from := offset &^ (sectorBytes - 1)
	to := min((offset+n+sectorBytes-1)&^(sectorBytes-1), l.sizeBytes)
	if offset < 0 || from >= to || (to-from <= sectorBytes && l.seen[from]) {
		return
	}
	for at := from; at < to; at += sectorBytes {
		l.seen[at] = true
	}
	l.regions = append(l.regions, region{from, to - from, owner})
}

// extBackups adds the copies of an ext superblock for this block size. They are in group 1, in
// groups whose number is a power of 3, 5 or 7 and, with sparse_super2, in the last group.
func (l *regionList) extBackups(blockBytes int64) {
	const maxBlocks = 1<<16 - 8
	group := min(8*blockBytes, maxBlocks) * blockBytes
	first := int64(0)
	if blockBytes == 1<<10 {
		first = blockBytes // block 0 is the boot block
	}
	owner := fmt.Sprintf("a copy of the superblock of ext with blocks of %d bytes", blockBytes)
	for _, base := range []int64{3, 5, 7} {
		for n := int64(1); n*group+first < l.sizeBytes; n *= base {
			l.sector(n*group+first, owner)
		}
	}
	if last := (l.sizeBytes - first - 1) / group; last > 0 {
		l.sector(last*group+first, owner)
	}
}

func (l *regionList) xfsGroups(groups, blockBytes int64) {
	blocks := (l.sizeBytes/blockBytes + groups - 1) / groups
	for i := int64(1); i < groups; i++ {
		l.sector(i*blocks*blockBytes, fmt.Sprintf("a superblock of xfs with %d groups", groups))
	}
}

// RecordOffsets returns the three offsets of the format record, near a fifth, a half and four
// fifths of the disk's size. Each is shortly before the end of an ext group of 128 MiB or, on a
// smaller disk, of a smaller unit. Whatever its options, no mkfs of the driver writes to all three.
// The offsets depend only on the disk's size, so any later process finds the records.
func RecordOffsets(sizeBytes int64) []int64 {
	const slotBeforeEnd = 64 << 10
	unit := int64(1 << 20)
	switch {
	case sizeBytes < 1<<20:
		return nil
	case sizeBytes >= 2<<30:
		unit = 128 << 20
	case sizeBytes >= 128<<20:
		unit = 8 << 20
	}
	slots := make([]int64, 0, 3)
	for _, part := range []int64{7, 15, 26} {
		at := sizeBytes / 32 * part
		slot := at/unit*unit - slotBeforeEnd
		if slot <= 1<<20 {
			slot = at&^(sectorBytes-1) - slotBeforeEnd
		}
		slots = append(slots, slot)
	}
	return slots
}

// growthReserveBytes is the space at the disk's end that a grown ext leaves for growth records.
const growthReserveBytes = 1 << 20

// GrowthOffsets returns the offsets of the growth record. They are behind the end of the ext
// filesystem after its growth, so neither the growth nor file data overwrite the record.
func GrowthOffsets(sizeBytes int64) []int64 {
	end := sizeBytes &^ (sectorBytes - 1)
	if end < headBytes+tailBytes {
		return nil
	}
	return []int64{end - 256<<10, end - 512<<10, end - 768<<10}
}

// nonZero returns the index of the first byte that is not zero, or -1. It counts the zeroes of a
// page first, because a loop over all bytes is too slow under the race detector.
func nonZero(b []byte) int {
	const page = 4096
	for at := 0; at < len(b); at += page {
		part := b[at:min(at+page, len(b))]
		if bytes.Count(part, []byte{0}) == len(part) {
			continue
		}
		for i, c := range part {
			if c != 0 {
				return at + i
			}
		}
	}
	return -1
}
