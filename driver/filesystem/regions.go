package filesystem

import (
	"bytes"
	"fmt"
)

// region is a piece of a disk that has to be read and zero before the disk is formatted.
type region struct {
	Offset, Bytes int64
	Owner         string // who keeps a mark there; for the error
}

func (a region) end() int64 { return a.Offset + a.Bytes }

const (
	// headBytes and tailBytes are read whole: nearly everybody keeps a mark there. The farthest from
	// the end is that of Promise's fake RAID, 3087 sectors before it.
	headBytes = 1 << 20
	tailBytes = 2 << 20
	// sectorBytes is the least that is read elsewhere, and what every read is aligned to.
	sectorBytes = 4096
	// sampleCount spots are spread evenly over the disk, for what has no known place.
	sampleCount = 32
)

// fixedRegions are the places that do not depend on the disk's size, behind its first MiB.
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

// markerRegions lists every place where filesystems, partition tables, volume managers, RAIDs,
// encryption and swap keep their marks on a disk of that size. The areas do not depend on what is
// found, so that none can be hidden by another.
func markerRegions(sizeBytes int64) []region {
	l := listEdges(sizeBytes)
	for _, a := range fixedRegions {
		l.span(a.Offset, a.end(), a.Owner)
	}
	for blockBytes := int64(1 << 10); blockBytes <= 64<<10; blockBytes *= 2 {
		l.extBackups(blockBytes)
	}
	// mkfs.xfs makes 4 groups, or with stripes up to 32.
	for _, groups := range []int64{2, 4, 8, 16, 32} {
		for _, blockBytes := range []int64{1 << 10, 2 << 10, 4 << 10} {
			l.xfsGroups(groups, blockBytes)
		}
	}
	// Newer mkfs.xfs makes a group for each processor, but none below 4 GiB.
	for _, groups := range []int64{3, 5, 6, 7, 10, 12, 14, 20, 24, 28} {
		if sizeBytes/groups >= 4<<30 {
			l.xfsGroups(groups, 4<<10)
		}
	}
	for group := int64(1 << 40); group < sizeBytes; group += 1 << 40 {
		l.sector(group, "a superblock of xfs, which has groups of at most 1 TiB")
	}
	for i := range int64(sampleCount) {
		// Odd multiples fall between what is laid out in halves, quarters, eighths.
		l.sector(sizeBytes/(2*sampleCount)*(2*i+1), "a sample")
	}
	return l.regions
}

// edgeRegions are those of them that are read before a filesystem is mounted: the ends of the disk,
// and the places of the driver's own mark.
func edgeRegions(sizeBytes int64) []region { return listEdges(sizeBytes).regions }

func listEdges(sizeBytes int64) *regionList {
	l := &regionList{sizeBytes: sizeBytes, seen: map[int64]bool{}}
	if sizeBytes <= headBytes+tailBytes {
		l.span(0, sizeBytes, "the whole disk, which is small")
		l.edges = [2]int64{sizeBytes, sizeBytes}
		return l
	}
	tail := (sizeBytes - tailBytes) &^ (sectorBytes - 1)
	l.span(0, headBytes, "the first MiB")
	l.span(tail, sizeBytes, "the last 2 MiB")
	l.edges = [2]int64{headBytes, tail}
	for i, slot := range RecordOffsets(sizeBytes) {
		l.sector(slot, fmt.Sprintf("place %d of the driver's own mark", i+1))
	}
	return l
}

// tailRegions are the samples of what lies behind an offset, with its first MiB and the disk's last.
func tailRegions(sizeBytes, from int64) []region {
	l := &regionList{sizeBytes: sizeBytes, seen: map[int64]bool{}}
	l.span(from, min(from+headBytes, sizeBytes), "the first MiB behind the filesystem")
	for i := range int64(sampleCount) {
		l.sector(from+(sizeBytes-from)/(2*sampleCount)*(2*i+1), "a sample")
	}
	l.span(max(from, (sizeBytes-tailBytes)&^(sectorBytes-1)), sizeBytes, "the last 2 MiB")
	return l.regions
}

type regionList struct {
	sizeBytes int64
	edges     [2]int64 // before the first and behind the second everything is read
	seen      map[int64]bool
	regions   []region
}

// spanBytes is the most that one read takes, so that several can run at once.
const spanBytes = 256 << 10

func (l *regionList) span(from, to int64, owner string) {
	for ; from < to && from < l.sizeBytes; from += spanBytes {
		l.add(from, min(to-from, spanBytes), owner)
	}
}

func (l *regionList) sector(offset int64, owner string) { l.add(offset, 1, owner) }

// add appends the area, grown to whole spots and cut at the disk's end, unless it is there already.
func (l *regionList) add(offset, n int64, owner string) {
	from := offset &^ (sectorBytes - 1)
	to := min((offset+n+sectorBytes-1)&^(sectorBytes-1), l.sizeBytes)
	inEdge := l.edges[1] > 0 && (to <= l.edges[0] || from >= l.edges[1])
	if offset < 0 || from >= to || inEdge || (to-from <= sectorBytes && l.seen[from]) {
		return
	}
	for at := from; at < to; at += sectorBytes {
		l.seen[at] = true
	}
	l.regions = append(l.regions, region{from, to - from, owner})
}

// extBackups are the copies of an ext superblock for a block size: in group 1, in the powers of 3,
// 5 and 7, and with sparse_super2 in the last one.
func (l *regionList) extBackups(blockBytes int64) {
	const mostBlocks = 1<<16 - 8
	group := min(8*blockBytes, mostBlocks) * blockBytes
	first := int64(0)
	if blockBytes == 1<<10 {
		first = blockBytes // block 0 is the boot block's
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

// xfsGroups are the superblocks of an xfs with that many allocation groups.
func (l *regionList) xfsGroups(groups, blockBytes int64) {
	blocks := (l.sizeBytes/blockBytes + groups - 1) / groups
	for i := int64(1); i < groups; i++ {
		l.sector(i*blocks*blockBytes, fmt.Sprintf("a superblock of xfs with %d groups", groups))
	}
}

// RecordOffsets are the places of the driver's own mark. Each is the end of a group of ext (of 128 MiB,
// or of a smaller unit on a smaller disk), before a seventh, a half and four fifths of the disk:
// there no mkfs writes that the driver runs, whatever the options, or it leaves at least one.
// Nothing is computed but from the size, so any later process finds them.
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

// GrowthOffsets are the places of the mark of a growth: near the end of the disk, behind what the
// filesystem has had until then. resize2fs writes at the start of what it adds.
func GrowthOffsets(sizeBytes int64) []int64 {
	end := sizeBytes &^ (sectorBytes - 1)
	if end < headBytes+tailBytes {
		return nil
	}
	return []int64{end - 256<<10, end - 512<<10, end - 768<<10}
}

// nonZero is the index of the first byte that is not zero, or -1. It compares whole pages, which is
// what makes a MiB cost microseconds.
func nonZero(b []byte) int {
	var page [4096]byte
	for at := 0; at < len(b); at += len(page) {
		part := b[at:min(at+len(page), len(b))]
		if bytes.Equal(part, page[:len(part)]) {
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
