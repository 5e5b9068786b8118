package filesystem

import (
	"bytes"
	"encoding/binary"
	"os"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
)

func (h disk) traces() mkfsTraces { return mkfsTraces{h.SizeBytes, h.Read} }

// strange is the first byte in the areas that no mkfs of the driver's has written, or -1.
func (m mkfsTraces) strange(pieces []regionData) (int64, error) {
	first := int64(-1)
	for _, p := range pieces {
		i, err := m.foreign(p.Data, p.Offset)
		if err != nil {
			return 0, unreadable(err)
		}
		if at := p.Offset + int64(i); i >= 0 && (first < 0 || at < first) {
			first = at
		}
	}
	return first, nil
}

// mkfsTraces tells what a mkfs of the driver's can have written from what somebody else has. It
// goes by content, one spot at a time, so that it holds for any part of what mkfs writes: a format
// may be cut off anywhere, and a power cut keeps any of its blocks. A trace of one filesystem may
// lie beside another's, for the repeated call may ask for another one.
type mkfsTraces struct {
	sizeBytes int64
	// read reads from the disk; what follows the first spot of a btrfs block is known by that.
	read func(offset, n int64) ([]byte, error)
}

// foreign is the index of the first byte in b, read at that offset, that no mkfs has written; -1 if
// there is none.
func (m mkfsTraces) foreign(b []byte, at int64) (int, error) {
	for done := 0; ; {
		i := nonZero(b[done:])
		if i < 0 {
			return -1, nil
		}
		start := (done + i) &^ (sectorBytes - 1)
		spot := b[start:min(start+sectorBytes, len(b))]
		ours, err := m.explains(spot, at+int64(start))
		if err != nil || !ours {
			return done + i, err
		}
		if done = start + len(spot); done >= len(b) {
			return -1, nil
		}
	}
}

func (m mkfsTraces) explains(spot []byte, at int64) (bool, error) {
	if slices.Contains(RecordOffsets(m.sizeBytes), at) && markTrace(spot) {
		return true, nil
	}
	if at == 0 && nonZero(spot[:min(len(spot), extOffset)]) >= 0 {
		return xfsTrace(spot), nil // no ext or btrfs writes there
	}
	if m.extTrace(spot) || xfsTrace(spot) {
		return true, nil
	}
	return m.btrfsTrace(spot, at)
}

// markTrace says whether a mark is, or was, in the spot: whose the whole ones are is for
// checkUnfinished to judge.
func markTrace(spot []byte) bool {
	mark := spot[:min(recordBytes, len(spot))]
	return nonZero(spot[len(mark):]) < 0 && bytes.Contains(mark, []byte(`"volume":`)) &&
		bytes.Contains(mark, []byte(`"disk":`))
}

// extTrace looks at the smallest blocks that an ext has. Blocks are larger by default, and of a
// larger one each part looks like one of these.
func (m mkfsTraces) extTrace(spot []byte) bool {
	for unit := range slices.Chunk(spot, extBytes) {
		if nonZero(unit) >= 0 && !extUnit(unit, uint64(m.sizeBytes)/extBytes) {
			return false
		}
	}
	return true
}

func extUnit(b []byte, blocks uint64) bool {
	if len(b) < extBytes {
		return false
	}
	sb := binary.LittleEndian.Uint16(b[0x38:]) == 0xEF53 && extMounted(b) == 0
	journal := binary.BigEndian.Uint32(b) == 0xC03B3998
	return sb || journal || extBitmap(b) || extNumbers(b, blocks) || extDirectory(b) ||
		extDescriptors(b, 32, blocks) || extDescriptors(b, 64, blocks) ||
		slices.ContainsFunc([]int{128, 256, 512, 1024, 2048}, func(n int) bool { return extInodes(b, n) })
}

// extBitmap says whether all but a few bytes are full or empty: mkfs allocates in long runs.
func extBitmap(b []byte) bool {
	const most = 16
	odd := 0
	for _, c := range b {
		if c != 0 && c != 0xFF {
			odd++
		}
	}
	return odd <= most
}

// extNumbers says whether it is a block of numbers of blocks, which go up but for a few.
func extNumbers(b []byte, blocks uint64) bool {
	const most = 8
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
	return down <= most
}

// extDirectory says whether it is the start or the end of a directory's block, which holds at most
// three names, or the end of a block of orphans.
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

// extDescriptors says whether it is a part of the table of groups.
func extDescriptors(b []byte, size int, blocks uint64) bool {
	le16, le32 := binary.LittleEndian.Uint16, binary.LittleEndian.Uint32
	for d := range slices.Chunk(b, size) {
		for i := 0; i < 12; i += 4 {
			if uint64(le32(d[i:])) > blocks {
				return false
			}
		}
		directories, flags, exclude := le16(d[0x10:]), le16(d[0x12:]), le32(d[0x14:])
		if directories > 2 || flags > 7 || exclude != 0 {
			return false
		}
		// The upper halves are zero on any disk of the rack, but for those of checksums.
		if size == 64 && (nonZero(d[0x20:0x38]) >= 0 || le32(d[0x3C:]) != 0) {
			return false
		}
	}
	return true
}

// extInodes says whether it is a part of a table of inodes with those that mkfs makes: directories
// and files of root, which nobody has deleted.
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

// xfsMagics are how every block and sector begins that mkfs.xfs writes: with the number of what it
// is, or, in the log's first record, with the number of its cycle.
var xfsMagics = [][]byte{
	[]byte("XFSB"), []byte("XAGF"), []byte("XAGI"), []byte("XAFL"), []byte("AB3B"), []byte("AB3C"),
	[]byte("IAB3"), []byte("FIB3"), []byte("R3FC"), []byte("RMB3"), []byte("IN"),
	{0xFE, 0xED, 0xBA, 0xBE}, {0, 0, 0, 1},
}

func xfsTrace(spot []byte) bool {
	list := false
	for sector := range slices.Chunk(spot, 512) {
		known := slices.ContainsFunc(xfsMagics, func(magic []byte) bool {
			return bytes.HasPrefix(sector, magic)
		})
		// A list of free blocks is filled to the end of the device's block.
		list = list || bytes.HasPrefix(sector, []byte("XAFL"))
		filled := list && !slices.ContainsFunc(sector, func(c byte) bool { return c != 0xFF })
		if nonZero(sector) >= 0 && !known && !filled {
			return false
		}
	}
	return true
}

// btrfsTrace says whether the spot is a superblock or in a block of a tree.
func (m mkfsTraces) btrfsTrace(spot []byte, at int64) (bool, error) {
	if slices.Contains([]int64{btrfsOffset, 64 << 20, 256 << 30}, at) && len(spot) >= btrfsBytes &&
		bytes.HasSuffix(spot[0x40:0x48], []byte("BHRfS_M")) {
		return true, nil
	}
	if btrfsHeader(spot) {
		return true, nil
	}
	for size := int64(8 << 10); size <= 64<<10; size *= 2 {
		if start := at &^ (size - 1); start != at {
			b, err := m.read(start, sectorBytes)
			if err != nil || btrfsHeader(b) {
				return err == nil, err
			}
		}
	}
	return false, nil
}

// btrfsHeader says whether it is how a block of a tree begins, in one of the first generations.
func btrfsHeader(b []byte) bool {
	const checksum, csumBytes, address, flags, revision, generation, items, level = 4, 32, 48, 56, 63,
		80, 96, 100
	le32, le64 := binary.LittleEndian.Uint32, binary.LittleEndian.Uint64
	return len(b) > level && nonZero(b[checksum:csumBytes]) < 0 && le64(b[address:])%sectorBytes == 0 &&
		b[flags] <= 1 && b[revision] == 1 && le64(b[generation:]) <= 16 && le32(b[items:]) < 1<<12 &&
		b[level] <= 1
}

// DropRecord erases, durably, the marks of a format of this volume that was cut off, before the
// device is shown as one. From then on what is on it is a workload's, and a mark would say that it
// is not. A device that is mounted anywhere is in use already, and a filesystem that has been in
// use keeps its bytes: beside it a mark is worth nothing.
func DropRecord(device *blockdev.OpenDevice, v Volume, mounted bool) error {
	h := disk{device}
	if v.ReadOnly || mounted {
		return nil
	}
	var places []region
	for _, slot := range RecordOffsets(h.SizeBytes) {
		places = append(places, region{slot, sectorBytes, "the driver's own mark"})
	}
	s, err := h.read(places, nil)
	if err != nil {
		return err
	}
	ours := slices.ContainsFunc(s.validRecords(), func(m foundRecord) bool {
		return m.of(v,
			h.SizeBytes)
	})
	if !ours {
		return nil
	}
	found, err := Find(h.OpenDevice)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(found, func(sb Superblock) bool {
		return !sb.Fresh && !sb.Young && !sb.Unfinished
	}) {
		return nil
	}
	if err := h.MakeWritable(true); err != nil {
		return err
	}
	return h.WithExclusive(func(w *os.File) error { return h.eraseRecordsOf(w, v, s) })
}

func (h disk) eraseRecordsOf(w *os.File, v Volume, s scan) error {
	for _, m := range s.validRecords() {
		if !m.of(v, h.SizeBytes) {
			continue
		}
		// What was read is without the mark.
		if err := blockdev.WriteAt(w, s.at(m.Offset, sectorBytes), m.Offset); err != nil {
			return h.unwritable(err)
		}
	}
	return h.unwritable(w.Sync())
}
