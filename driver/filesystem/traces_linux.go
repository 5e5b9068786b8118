package filesystem

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"slices"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// behind returns what an interrupted growth may have written behind a filesystem. The blocks of xfs
// and btrfs contain the filesystem's UUID. Most blocks of ext do not, so they are expected only if
// a record announces them.
func (found state) behind() expected {
	sb := found.Filesystem
	if sb.isExt() && !found.Growing {
		return expected{}
	}
	return expected{Growth: sb.Type, UUID: sb.MetadataUUID, NodeBytes: sb.NodeBytes}
}

// traces distinguishes what the driver's tools may have written from other data. It judges the
// content of one sector at a time, because a format or a growth may be cut off anywhere, and a
// power failure may keep any of its blocks. Traces of several filesystems may be on one disk,
// because the repeated call may ask for another one.
type traces struct {
	expected
	sizeBytes int64
	slots     []int64 // of the driver's own records
	// read reads from the disk. Later sectors of a btrfs block are recognized by the first one.
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

// check returns the index of the first unexpected byte in b, read at that offset, or -1. It is a
// byteCheck.
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
		return m.xfsTrace(sector), nil // no ext or btrfs writes to the first sector
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

// recordTrace reports whether the sector is, or was, a record. checkUnfinished decides whose
// records the valid ones are.
func recordTrace(sector []byte) bool {
	record := sector[:min(recordBytes, len(sector))]
	return nonZero(sector[len(record):]) < 0 && bytes.Contains(record, []byte(`"volume":`)) &&
		bytes.Contains(record, []byte(`"disk":`))
}

// extTrace reports whether all of a sector is zero or may have been written by an ext tool. It
// looks at units of the smallest block size of ext filesystems. Blocks are larger by default, but
// every unit of a larger block looks like a block of the smallest size.
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
		// A growth copies the descriptors of groups in use, and makes no inodes.
		return sb && uuid.UUID(b[0x68:0x78]) == m.UUID || extBitmap(b) || extNumbers(b, blocks) ||
			extDescriptors(b, 32, blocks, 1<<16) || extDescriptors(b, 64, blocks, 1<<16)
	}
	sb = sb && extMounted(b) == 0
	journal := binary.BigEndian.Uint32(b) == 0xC03B3998
	return sb || journal || extBitmap(b) || extNumbers(b, blocks) || extDirectory(b) ||
		extDescriptors(b, 32, blocks, 2) || extDescriptors(b, 64, blocks, 2) ||
		slices.ContainsFunc([]int{128, 256, 512, 1024, 2048}, func(n int) bool { return extInodes(b, n) })
}

// extBitmap reports whether b may be a part of a bitmap. All bytes are 0 or 255, except for a few
// at the ends of runs, because mkfs allocates in long runs.
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

// extNumbers reports whether b may be part of a list of block numbers, nearly all of them
// ascending.
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

// extDirectory reports whether b may be the start or the end of a directory's block, which holds at
// most three names, or the end of a block of the orphan file.
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

// extDescriptors reports whether b may be a part of a group descriptor table, in which each group
// has at most the given number of directories.
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
		// On a disk of the rack's sizes the upper halves are zero, except those of checksums.
		if size == 64 && (nonZero(d[0x20:0x38]) >= 0 || le32(d[0x3C:]) != 0) {
			return false
		}
	}
	return true
}

// extInodes reports whether b may be part of an inode table that holds only what mkfs makes:
// directories and files of root that are not deleted.
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

// xfsMagics are the first bytes of the blocks and sectors that mkfs.xfs writes: the magic of the
// structure or, in the log's first record, the number of its cycle.
var xfsMagics = [][]byte{
	[]byte("XFSB"), []byte("XAGF"), []byte("XAGI"), []byte("XAFL"), []byte("AB3B"), []byte("AB3C"),
	[]byte("IAB3"), []byte("FIB3"), []byte("R3FC"), []byte("RMB3"), []byte("IN"),
	{0xFE, 0xED, 0xBA, 0xBE}, {0, 0, 0, 1},
}

// xfsTrace reports whether mkfs.xfs, or the growth of an xfs, may have written b, a sector of the
// disk.
func (m traces) xfsTrace(b []byte) bool {
	list := false
	for sector := range slices.Chunk(b, 512) {
		known := slices.ContainsFunc(xfsMagics, func(magic []byte) bool {
			return bytes.HasPrefix(sector, magic)
		}) && (m.Mkfs && xfsUnlogged(sector) || !m.Mkfs && bytes.Contains(sector, m.UUID[:]))
		// A list of free blocks is padded to the end of the device's block.
		list = list || bytes.HasPrefix(sector, []byte("XAFL"))
		filled := list && !slices.ContainsFunc(sector, func(c byte) bool { return c != 0xFF })
		if nonZero(sector) >= 0 && !known && !filled {
			return false
		}
	}
	return true
}

// xfsLSN is where a structure of XFS has the log sequence number of its last change by the kernel.
var xfsLSN = map[string]int{"XFSB": 240, "XAGF": 208, "XAGI": 320, "XAFL": 24, "AB3B": 24,
	"AB3C": 24, "IAB3": 24, "FIB3": 24, "R3FC": 24, "RMB3": 24}

// xfsUnlogged reports whether no kernel has changed the structure that a sector begins with.
func xfsUnlogged(sector []byte) bool {
	at, ok := xfsLSN[string(sector[:4])]
	if bytes.HasPrefix(sector, []byte("IN")) {
		at, ok = 112, true
	}
	return !ok || nonZero(sector[at:at+8]) < 0
}

// btrfsTrace reports whether the sector is a superblock or part of a tree block.
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

// btrfsSuper reports whether the sector is a superblock, or may be one without its first 512 bytes,
// which a power failure may lose when mkfs writes the first superblock. The rest is recognized by
// the array of system chunks, which begins with the key of a chunk.
func btrfsSuper(b []byte, at int64) bool {
	const magic, chunks = 0x40, 0x32B
	return slices.Contains([]int64{btrfsOffset, 64 << 20, 256 << 30}, at) && len(b) >= btrfsBytes &&
		(bytes.HasPrefix(b[magic+1:], []byte("BHRfS_M")) || nonZero(b[:512]) < 0 &&
			bytes.HasPrefix(b[chunks:], []byte{0, 1, 0, 0, 0, 0, 0, 0, 0xE4}))
}

// btrfsHeader reports whether b begins with the header of a tree block that is of one of the first
// generations, or of the filesystem that grows.
func (m traces) btrfsHeader(b []byte) bool {
	if m.Growth != "" {
		return len(b) >= btrfsFSID+16 && uuid.UUID(b[btrfsFSID:btrfsFSID+16]) == m.UUID
	}
	return btrfsFirstHeader(b)
}

// btrfsFirstHeader reports whether b begins with the header of a tree block of one of the first
// generations.
func btrfsFirstHeader(b []byte) bool {
	const checksum, csumBytes, address, flags, revision, generation, items, level = 4, 32, 48, 56, 63,
		80, 96, 100
	le32, le64 := binary.LittleEndian.Uint32, binary.LittleEndian.Uint64
	return len(b) > level && nonZero(b[checksum:csumBytes]) < 0 &&
		le64(b[address:])%sectorBytes == 0 && b[flags] <= 1 && b[revision] == 1 &&
		le64(b[generation:]) <= 16 && le32(b[items:]) < 1<<12 && b[level] <= 1
}
