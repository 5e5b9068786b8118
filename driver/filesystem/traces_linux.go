package filesystem

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"slices"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// behind() returns what an interrupted growth may have written behind the filesystem. xfs and btrfs
// blocks contain the filesystem's UUID. Most ext blocks do not, so they are only expected if a
// growth record is on the disk.
func (found state) behind() expected {
	sb := found.Filesystem
	if sb.isExt() && !found.Growing {
		return expected{}
	}
	return expected{Growth: sb.Type, UUID: sb.MetadataUUID, NodeBytes: sb.NodeBytes}
}

// traces distinguishes sectors that the driver's tools may have written from other data. It checks
// each sector by itself, because a format or a growth may be cut off anywhere, and a power failure
// may keep any of its blocks. Blocks of several filesystem types may be on one disk, because a
// repeated call may ask for another type.
type traces struct {
	expected
	sizeBytes int64
	slots     []int64 // of the driver's own records
	// read() reads the first sector of a btrfs block: its header identifies the other sectors, too.
	read func(offset, n int64) ([]byte, error)
}

func (d disk) traces(v Volume, e expected) traces {
	t := traces{expected: e, sizeBytes: d.SizeBytes, read: d.Read}
	if e.Mkfs {
		t.slots = v.slots(RecordOffsets, d.SizeBytes)
	} else if e.Growth != "" {
		t.slots = v.slots(GrowthOffsets, d.SizeBytes)
	}
	return t
}

func (m traces) unexplained(regions []regionData) (int64, error) {
	first := int64(-1)
	for _, r := range regions {
		i, err := m.check(r.Data, r.Offset)
		if err != nil {
			return 0, unreadable(err)
		}
		if at := r.Offset + int64(i); i >= 0 && (first < 0 || at < first) {
			first = at
		}
	}
	return first, nil
}

// check implements byteCheck. It expects the bytes that a tool of the driver may have written.
func (m traces) check(b []byte, at int64) (int, error) {
	for done := 0; ; {
		i := nonZero(b[done:])
		if i < 0 {
			return -1, nil
		}
		start := (done + i) &^ (sectorBytes - 1)
		sector := b[start:min(start+sectorBytes, len(b))]
		ours, err := m.explains(sector, at+int64(start))
		if err != nil || !ours {
			return done + i, err
		}
		if done = start + len(sector); done >= len(b) {
			return -1, nil
		}
	}
}

func (m traces) explains(sector []byte, at int64) (bool, error) {
	switch {
	case slices.Contains(m.slots, at) && recordTrace(sector):
		return true, nil
	case m.Growth == volume.XFS,
		m.Mkfs && at == 0 && nonZero(sector[:min(len(sector), extOffset)]) >= 0:
		return m.xfsTrace(sector), nil // ext and btrfs write nothing to these bytes
	case m.Growth == volume.Btrfs:
		return m.btrfsTrace(sector, at)
	case m.Growth != "":
		return m.extTrace(sector), nil
	case !m.Mkfs:
		return false, nil
	case m.extTrace(sector), m.xfsTrace(sector):
		return true, nil
	}
	return m.btrfsTrace(sector, at)
}

// recordTrace reports whether the sector is a [Record] or the remains of one. checkUnfinished
// decides which volume the valid records belong to.
func recordTrace(sector []byte) bool {
	record := sector[:min(recordBytes, len(sector))]
	return nonZero(sector[len(record):]) < 0 && bytes.Contains(record, []byte(`"volume":`)) &&
		bytes.Contains(record, []byte(`"disk":`))
}

// extTrace reports whether each KiB of the sector is zero or may have been written by an ext tool.
// 1 KiB is the smallest block size, and each KiB of a larger block looks like a block of 1 KiB.
func (m traces) extTrace(sector []byte) bool {
	for unit := range slices.Chunk(sector, extBytes) {
		if nonZero(unit) >= 0 && !m.extUnit(unit, uint64(m.sizeBytes)/extBytes) {
			return false
		}
	}
	return true
}

func (m traces) extUnit(b []byte, blocks uint64) bool {
	if len(b) < extBytes {
		return false
	}
	sb := binary.LittleEndian.Uint16(b[0x38:]) == 0xEF53
	if m.Growth != "" {
		// A growth copies the descriptors of groups that may contain files. It writes no inodes.
		return sb && uuid.UUID(b[0x68:0x78]) == m.UUID || extBitmap(b) || extNumbers(b, blocks) ||
			extDescriptors(b, 32, blocks, 1<<16) || extDescriptors(b, 64, blocks, 1<<16)
	}
	sb = sb && extMounted(b) == 0
	journal := binary.BigEndian.Uint32(b) == 0xC03B3998
	return sb || journal || extBitmap(b) || extNumbers(b, blocks) || extDirectory(b) ||
		extExtents(b, blocks) || extDescriptors(b, 32, blocks, 2) || extDescriptors(b, 64, blocks, 2) ||
		slices.ContainsFunc([]int{128, 256, 512, 1024, 2048}, func(n int) bool { return extInodes(b, n) })
}

// extBitmap reports whether b may be part of a bitmap from mkfs. mkfs allocates in long runs, so
// all bytes are 0 or 255 except for a few at the ends of runs.
func extBitmap(b []byte) bool {
	const maxMixed = 16
	mixed := 0
	for _, c := range b {
		if c == 0 || c == 0xFF {
			continue
		}
		if changes := bits.OnesCount8(c ^ bits.RotateLeft8(c, 1)); changes > 2 {
			return false
		}
		mixed++
	}
	return mixed <= maxMixed
}

// extNumbers reports whether b may be part of a list of block numbers, which are mostly ascending.
func extNumbers(b []byte, blocks uint64) bool {
	const maxDown = 8
	last, down := uint64(0), 0
	for word := range slices.Chunk(b, 4) {
		n := uint64(binary.LittleEndian.Uint32(word))
		if n > blocks {
			return false
		}
		if n != 0 && n <= last {
			down++
		}
		if n != 0 {
			last = n
		}
	}
	return down <= maxDown
}

// extExtents reports whether b may be the start of a block of extents. mkfs needs such a block only
// for the journal, which has no holes and whose blocks ascend.
func extExtents(b []byte, blocks uint64) bool {
	const size, maxBlocks = 12, 1 << 15
	le16, le32 := binary.LittleEndian.Uint16, binary.LittleEndian.Uint32
	end, next, after := size+int(le16(b[2:]))*size, uint32(0), uint64(1)
	if le16(b) != 0xF30A || end > len(b) || nonZero(b[6:size]) >= 0 {
		return false
	}
	for extent := range slices.Chunk(b[size:end], size) {
		n, upper, start := uint32(le16(extent[4:])), le16(extent[6:]), uint64(le32(extent[8:]))
		if le32(extent) != next || n-1 >= maxBlocks || upper != 0 || start < after ||
			start+uint64(n) > blocks {
			return false
		}
		next, after = next+n, start+uint64(n)
	}
	return nonZero(b[end:max(end, len(b)-4)]) < 0 // a checksum ends a block
}

// extDirectory reports whether b may be the start or the end of a block of a directory with at most
// three names, or the end of a block of the orphan file.
func extDirectory(b []byte) bool {
	const head, tail = 64, 12
	le16, le32 := binary.LittleEndian.Uint16, binary.LittleEndian.Uint32
	if nonZero(b[head:len(b)-tail]) >= 0 {
		return false
	}
	end := b[len(b)-tail:]
	checksum := le32(end) == 0 && le16(end[4:]) == tail && end[6] == 0 && end[7] == 0xDE
	orphans := le32(end) == 0 && le32(end[4:]) == 0x0B10CA04
	if nonZero(end) >= 0 && !checksum && !orphans {
		return false
	}
	empty := le32(b) == 0 && nonZero(b[6:head]) < 0
	names := (le32(b) == 2 || le32(b) == 11) && le16(b[4:]) == tail && b[8] == '.'
	return empty || names
}

// extDescriptors reports whether b may be part of a table of group descriptors of size bytes each.
// The parameter most is the largest number of directories in a group.
func extDescriptors(b []byte, size int, blocks uint64, most int) bool {
	le16, le32 := binary.LittleEndian.Uint16, binary.LittleEndian.Uint32
	for d := range slices.Chunk(b, size) {
		for i := 0; i < 12; i += 4 {
			if uint64(le32(d[i:])) > blocks {
				return false
			}
		}
		directories, flags, exclude := le16(d[0x10:]), le16(d[0x12:]), le32(d[0x14:])
		if int(directories) > most || flags > 7 || exclude != 0 {
			return false
		}
		// On a rack's disks all numbers fit into the fields' lower halves. Only checksums use the upper.
		if size == 64 && (nonZero(d[0x20:0x38]) >= 0 || le32(d[0x3C:]) != 0) {
			return false
		}
	}
	return true
}

// extInodes reports whether b may be part of an inode table that contains only inodes from mkfs:
// directories and files that root owns and nobody deleted.
func extInodes(b []byte, size int) bool {
	const core, extra = 128, 36
	le16, le32 := binary.LittleEndian.Uint16, binary.LittleEndian.Uint32
	for inode := range slices.Chunk(b, min(size, len(b))) {
		kind, owner, deleted, group := le16(inode)&0xF000, le16(inode[2:]), le32(inode[0x14:]),
			le16(inode[0x18:])
		if (kind != 0 && kind != 0x4000 && kind != 0x8000) || owner != 0 || deleted != 0 || group != 0 {
			return false
		}
		links, version, generation, acl := le16(inode[0x1A:]), le32(inode[0x24:]), le32(inode[0x64:]),
			le32(inode[0x68:])
		if links > 3 || version > 1 || generation != 0 || acl != 0 {
			return false
		}
		if len(inode) > core+extra && nonZero(inode[core+extra:]) >= 0 {
			return false
		}
	}
	return true
}

// xfsMagics are the first bytes of the blocks and sectors that mkfs.xfs writes: the magic number of
// the structure or, in the log's first record, the cycle number.
var xfsMagics = [][]byte{
	[]byte("XFSB"), []byte("XAGF"), []byte("XAGI"), []byte("XAFL"), []byte("AB3B"), []byte("AB3C"),
	[]byte("IAB3"), []byte("FIB3"), []byte("R3FC"), []byte("RMB3"), []byte("IN"),
	{0xFE, 0xED, 0xBA, 0xBE}, {0, 0, 0, 1},
}

func (m traces) xfsTrace(b []byte) bool {
	list := false
	for sector := range slices.Chunk(b, 512) {
		known := slices.ContainsFunc(xfsMagics, func(magic []byte) bool {
			return bytes.HasPrefix(sector, magic)
		}) && (m.Mkfs && xfsUnlogged(sector) || !m.Mkfs && bytes.Contains(sector, m.UUID[:]))
		// mkfs pads a list of free blocks with 0xFF to the end of a disk sector.
		list = list || bytes.HasPrefix(sector, []byte("XAFL"))
		filled := list && !slices.ContainsFunc(sector, func(c byte) bool { return c != 0xFF })
		if nonZero(sector) >= 0 && !known && !filled {
			return false
		}
	}
	return true
}

// xfsLSN is the offset of each structure's log sequence number, which only the kernel sets.
var xfsLSN = map[string]int{"XFSB": 240, "XAGF": 208, "XAGI": 320, "XAFL": 24, "AB3B": 24,
	"AB3C": 24, "IAB3": 24, "FIB3": 24, "R3FC": 24, "RMB3": 24}

// xfsUnlogged reports whether the kernel has never changed the structure in the sector.
func xfsUnlogged(sector []byte) bool {
	at, ok := xfsLSN[string(sector[:4])]
	if bytes.HasPrefix(sector, []byte("IN")) {
		at, ok = 112, true
	}
	return !ok || nonZero(sector[at:at+8]) < 0
}

func (m traces) btrfsTrace(sector []byte, at int64) (bool, error) {
	if m.btrfsHeader(sector) ||
		btrfsSuper(sector, at) && (m.Mkfs && btrfsMaybeFresh(sector) ||
			!m.Mkfs && bytes.Contains(sector, m.UUID[:])) {
		return true, nil
	}
	largest := int64(64 << 10)
	if !m.Mkfs {
		largest = m.NodeBytes
	}
	for size := int64(8 << 10); size <= largest; size *= 2 {
		if start := at &^ (size - 1); start != at {
			b, err := m.read(start, sectorBytes)
			if err != nil || m.btrfsHeader(b) {
				return err == nil, err
			}
		}
	}
	return false, nil
}

// btrfsSuper reports whether the sector is a btrfs superblock, even without its first 512 bytes. A
// power failure may lose those when mkfs writes the first superblock. The remaining bytes are
// recognized by the array of system chunks, which begins with a chunk's key.
func btrfsSuper(b []byte, at int64) bool {
	const magic, chunks = 0x40, 0x32B
	return slices.Contains([]int64{btrfsOffset, 64 << 20, 256 << 30}, at) && len(b) >= btrfsBytes &&
		(bytes.HasPrefix(b[magic+1:], []byte("BHRfS_M")) || nonZero(b[:512]) < 0 &&
			bytes.HasPrefix(b[chunks:], []byte{0, 1, 0, 0, 0, 0, 0, 0, 0xE4}))
}

// btrfsHeader reports whether b begins with the header of a tree block. If the driver expects a
// growth, the block must have the filesystem's UUID. Otherwise it must be as mkfs writes it.
func (m traces) btrfsHeader(b []byte) bool {
	if m.Growth != "" {
		return len(b) >= btrfsFSID+16 && uuid.UUID(b[btrfsFSID:btrfsFSID+16]) == m.UUID
	}
	return btrfsFirstHeader(b)
}

// btrfsFirstHeader reports whether b begins with the header of a tree block as mkfs writes it.
func btrfsFirstHeader(b []byte) bool {
	const checksum, csumBytes, address, flags, revision, generation, items, level = 4, 32, 48, 56, 63,
		80, 96, 100
	le32, le64 := binary.LittleEndian.Uint32, binary.LittleEndian.Uint64
	return len(b) > level && nonZero(b[checksum:csumBytes]) < 0 &&
		le64(b[address:])%sectorBytes == 0 && b[flags] <= 1 && b[revision] == 1 &&
		le64(b[generation:]) <= 16 && le32(b[items:]) < 1<<12 && b[level] <= 1
}
