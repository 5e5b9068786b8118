package filesystem

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// fsExt2 is the type of an ext2. The driver refuses an ext2 with an error that contains the type.
const fsExt2 = "ext2"

// Superblock describes a filesystem, as read from the first 128 KiB of its disk.
type Superblock struct {
	Type string
	// UUID is the changeable UUID that tools print. MetadataUUID is the one in the metadata blocks.
	UUID         uuid.UUID
	MetadataUUID uuid.UUID
	SizeBytes    int64 // of the filesystem, which may differ from its device's
	// UnitBytes is the smallest growth of the filesystem. Less space at the device's end stays unused.
	UnitBytes int64
	// Fixed reports that the filesystem's tools cannot grow it.
	Fixed bool
	// BlockBytes is the block size of an ext, NodeBytes the size of a btrfs's tree blocks.
	BlockBytes, NodeBytes int64
	// CopyBlock is the block number of the first copy of an ext's superblock.
	CopyBlock  int64
	ChecksumOK bool
	// Damaged reports that the superblock has a wrong checksum.
	Damaged bool
	// Features lists the filesystem's features that the driver allows. Refused lists what forbids a
	// mount: unknown features, and those that need another device, for example. See features.go.
	Features, Refused string
	// Unclean reports that e2fsck must check the filesystem before it is mounted.
	Unclean bool
	// Unfinished reports that mkfs did not finish.
	Unfinished bool
	// Mounted is the time when an ext was last mounted, in Unix seconds; 0 if never.
	Mounted int64
	// Fresh reports that the filesystem is proven to be unwritten since mkfs. For an xfs, Find also
	// reads the start of the log, at LogOffset.
	Fresh bool
	// MaybeFresh reports that a btrfs superblock shows no sign of a mount, but a mount may leave none.
	MaybeFresh bool
	// Logged reports that a btrfs has a log of fsyncs, which a writable mount replays.
	Logged    bool
	LogOffset int64
	// Offset is the superblock's offset on the disk. Data before it does not belong to the filesystem.
	Offset int64
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func findSuperblocks(head []byte) []Superblock {
	var found []Superblock
	for _, parse := range []func([]byte) (Superblock, bool){extSuperblock, xfsSuperblock,
		btrfsSuperblock} {
		if sb, ok := parse(head); ok {
			found = append(found, sb)
		}
	}
	return found
}

func (sb Superblock) isExt() bool { return sb.Type == volume.Ext3 || sb.Type == volume.Ext4 }

// largest returns the size to which the driver grows the filesystem.
func (sb Superblock) largest(sizeBytes int64) int64 {
	if sb.isExt() {
		return sizeBytes&^(sectorBytes-1) - growthReserveBytes
	}
	return sizeBytes
}

func (sb Superblock) leavesRoom(sizeBytes int64) bool {
	return sb.largest(sizeBytes)-sb.SizeBytes >= sb.UnitBytes
}

// holds reports whether a file may contain the byte at the offset: the filesystem may have been in
// use, and the offset is inside it.
func (sb Superblock) holds(offset int64) bool {
	return !sb.Fresh && !sb.MaybeFresh && !sb.Unfinished && offset < sb.SizeBytes
}

func (sb Superblock) canGrow(sizeBytes int64) bool { return !sb.Fixed && sb.leavesRoom(sizeBytes) }

// The layout of ext2, 3 and 4: Documentation/filesystems/ext4/super.rst.
const (
	extOffset     = 1024
	extBytes      = 1024
	extStateValid = 0x1
	extStateError = 0x2

	extCompatJournal      = 0x4
	extCompatResizeInode  = 0x10
	extCompatOrphanFile   = 0x1000
	extIncompatRecover    = 0x4
	extIncompatMetaBG     = 0x10
	extIncompat64Bit      = 0x80
	extROBigalloc         = 0x200
	extROMetadataChecksum = 0x400
	extROOrphanPresent    = 0x10000
	ext3Incompat          = 0x2 | 0x4 | 0x10 // filetype, needs_recovery, meta_bg
	ext3ROCompat          = 0x1 | 0x2 | 0x4  // sparse_super, large_file, btree_dir
)

func extSuperblock(head []byte) (Superblock, bool) {
	if len(head) < extOffset+extBytes {
		return Superblock{}, false
	}
	b := head[extOffset : extOffset+extBytes]
	le16, le32 := binary.LittleEndian.Uint16, binary.LittleEndian.Uint32
	if le16(b[0x38:]) != 0xEF53 || le32(b[0x18:]) > 6 {
		return Superblock{}, false
	}
	compat, incompat, roCompat := le32(b[0x5C:]), le32(b[0x60:]), le32(b[0x64:])
	blockBytes := uint64(1024) << le32(b[0x18:])
	blocks := uint64(le32(b[0x4:]))
	if incompat&extIncompat64Bit != 0 {
		blocks |= uint64(le32(b[0x150:])) << 32
	}
	sb := Superblock{
		Type:       extType(compat, incompat, roCompat),
		UUID:       uuid.UUID(b[0x68:0x78]),
		BlockBytes: int64(blockBytes),
		Mounted:    extMounted(b),
		SizeBytes:  product(blocks, blockBytes),
		UnitBytes:  product(uint64(le32(b[0x20:])), blockBytes),
		CopyBlock:  int64(le32(b[0x14:])) + int64(le32(b[0x20:])), // start of the second group
		Fixed:      roCompat&extROBigalloc != 0,
		Unclean:    extUnclean(b, incompat, roCompat),
		Fresh:      incompat&extIncompatRecover == 0 && extFresh(b),
		Offset:     extOffset,
	}
	sb.MetadataUUID = sb.UUID // other metadata contains no UUID
	sb.addFeatures(b, binary.LittleEndian, extFeatures)
	journal := le32(b[0xE0:]) // the journal's inode
	sb.refuse(journal != extJournalInode && compat&extCompatJournal != 0 ||
		journal != 0 && compat&extCompatJournal == 0, "s_journal_inum", journal)
	if roCompat&extROMetadataChecksum != 0 && b[0x175] == 1 {
		// Unlike the kernel, Go's crc32 inverts the result.
		sb.ChecksumOK = le32(b[0x3FC:]) == ^crc32.Checksum(b[:0x3FC], castagnoli)
		sb.Damaged = !sb.ChecksumOK
	}
	return sb, true
}

// extTable describes where the group descriptors of an ext are, and which values they may have.
type extTable struct {
	Offset, Bytes int64 // Bytes is 0 if there is no single table or the superblock is invalid
	descBytes     int64
	first, blocks uint64 // the first data block, and the number of blocks
	inodeBlocks   uint64 // blocks of each group's inode table
	blockBytes    int64
	inodeBytes    int64
	journal       bool // the journal is in the inode extJournalInode
}

// mostExtTable exceeds the largest table that mke2fs makes by default on a rack's disk: 8 MiB for 1
// TiB in blocks of 1 KiB. A superblock that asks for more must not fill a node's memory.
const mostExtTable = 64 << 20

func extTableOf(b []byte) extTable {
	le16, le32 := binary.LittleEndian.Uint16, binary.LittleEndian.Uint32
	sizeLog, incompat := le32(b[0x18:]), le32(b[0x60:])
	perGroup, inodeBytes := uint64(le32(b[0x20:])), uint64(128)
	if le32(b[0x4C:]) > 0 { // s_rev_level; revision 0 has no field for the inode size
		inodeBytes = uint64(le16(b[0x58:]))
	}
	t := extTable{descBytes: 32, first: uint64(le32(b[0x14:])), blocks: uint64(le32(b[0x4:]))}
	if incompat&extIncompat64Bit != 0 {
		t.blocks |= uint64(le32(b[0x150:])) << 32
		t.descBytes = int64(le16(b[0xFE:]))
	}
	if sizeLog > 6 || incompat&extIncompatMetaBG != 0 || perGroup == 0 || t.blocks <= t.first ||
		inodeBytes < 128 || t.descBytes < 32 || t.descBytes > 1024 || t.blocks > 1<<48 {
		return extTable{}
	}
	blockBytes := uint64(1024) << sizeLog
	t.blockBytes, t.inodeBytes = int64(blockBytes), int64(inodeBytes)
	t.journal = le32(b[0x5C:])&extCompatJournal != 0 // a journal in another inode is refused
	t.inodeBlocks = (uint64(le32(b[0x28:]))*inodeBytes + blockBytes - 1) / blockBytes
	t.Offset = int64((t.first + 1) * blockBytes)
	if blockBytes == extOffset && t.first == 0 {
		t.Offset += extOffset // bigalloc: block 0 is the boot block, before the superblock
	}
	groups := int64((t.blocks - t.first + perGroup - 1) / perGroup)
	if groups > mostExtTable/t.descBytes {
		return extTable{}
	}
	t.Bytes = groups * t.descBytes
	return t
}

// block returns a block number from a group descriptor: of the block bitmap (i = 0), the inode
// bitmap (1) or the inode table (2).
func (t extTable) block(descriptor []byte, i int) uint64 {
	at := uint64(binary.LittleEndian.Uint32(descriptor[4*i:]))
	if t.descBytes >= 64 {
		at |= uint64(binary.LittleEndian.Uint32(descriptor[0x20+4*i:])) << 32
	}
	return at
}

const (
	extRootInode    = 2
	extJournalInode = 8
)

// inodesAt returns the range of inodes 1 to 8, according to the first descriptor in b.
func (t extTable) inodesAt(b []byte) (offset, bytes int64) {
	return product(t.block(b, 2), uint64(t.blockBytes)), extJournalInode * t.inodeBytes
}

// areInodes reports whether b can be the inodes 1 to 8: the root inode is a directory, and the
// journal inode is a file.
func (t extTable) areInodes(b []byte) bool {
	const format, directory, file = 0xF000, 0x4000, 0x8000
	mode := func(inode int64) uint16 {
		return binary.LittleEndian.Uint16(b[(inode-1)*t.inodeBytes:]) & format
	}
	return mode(extRootInode) == directory && (!t.journal || mode(extJournalInode) == file)
}

// firstBad returns the first group whose descriptor in b places a bitmap or inodes outside of the
// filesystem, or -1 if there is none.
func (t extTable) firstBad(b []byte) int {
	for group := int64(0); (group+1)*t.descBytes <= min(t.Bytes, int64(len(b))); group++ {
		d := b[group*t.descBytes:]
		for i, blocks := range []uint64{1, 1, t.inodeBlocks} {
			if at := t.block(d, i); at <= t.first || at >= t.blocks || blocks > t.blocks-at {
				return int(group)
			}
		}
	}
	return -1
}

// extType distinguishes ext2, ext3 and ext4 as blkid does: by features that the kernel's ext2 and
// ext3 did not support.
func extType(compat, incompat, roCompat uint32) string {
	switch {
	case incompat&^uint32(ext3Incompat) != 0, roCompat&^uint32(ext3ROCompat) != 0:
		return volume.Ext4
	case compat&extCompatJournal != 0:
		return volume.Ext3
	}
	return fsExt2
}

// extUnclean reports whether e2fsck must run: the kernel has recorded errors, or the filesystem has
// orphaned inodes or was not unmounted cleanly. In other cases e2fsck -p does nothing. The kernel,
// not e2fsck, replays the journal: only the kernel's replay can be interrupted without damage.
func extUnclean(b []byte, incompat, roCompat uint32) bool {
	state, le32 := binary.LittleEndian.Uint16(b[0x3A:]), binary.LittleEndian.Uint32
	return state&extStateError != 0 || le32(b[0x194:]) != 0 || state&extStateValid == 0 ||
		incompat&extIncompatRecover == 0 && (le32(b[0xE8:]) != 0 || roCompat&extROOrphanPresent != 0)
}

// extFresh reports whether the kernel has never mounted the filesystem for writing, and no tool
// such as mke2fs -d has written files to it. A mount writes the mount count and time to the
// superblock before it writes anything else.
func extFresh(b []byte) bool {
	const mountCount, lastMounted = 0x34, 0x88 // the number of mounts, and the last mount point
	return extMounted(b) == 0 && binary.LittleEndian.Uint16(b[mountCount:]) == 0 &&
		b[lastMounted] == 0 && !extFilled(b)
}

// extFilled reports whether more inodes are in use than in an empty filesystem: 11 reserved ones,
// including lost+found, and the orphan file.
func extFilled(b []byte) bool {
	le32 := binary.LittleEndian.Uint32
	own := uint32(11)
	if le32(b[0x5C:])&extCompatOrphanFile != 0 {
		own++
	}
	return le32(b[0:]) > le32(b[0x10:]) && le32(b[0:])-le32(b[0x10:]) > own
}

// extMounted returns the time of the last writable mount, whose upper 8 bits are stored separately.
func extMounted(b []byte) int64 {
	const mountTime, mountTimeHigh = 0x2C, 0x275
	return int64(b[mountTimeHigh])<<32 | int64(binary.LittleEndian.Uint32(b[mountTime:]))
}

// The layout of XFS: fs/xfs/libxfs/xfs_format.h. All numbers except the checksum are big-endian.
const (
	xfsMinimumAGBlocks  = 64
	xfsIncompatMetaUUID = 0x4
)

func xfsSuperblock(head []byte) (Superblock, bool) {
	if len(head) < 512 || !bytes.HasPrefix(head, []byte("XFSB")) {
		return Superblock{}, false
	}
	blockBytes := uint64(binary.BigEndian.Uint32(head[4:]))
	sb := Superblock{
		Type:       volume.XFS,
		UUID:       uuid.UUID(head[32:48]),
		SizeBytes:  product(binary.BigEndian.Uint64(head[8:]), blockBytes),
		UnitBytes:  product(xfsMinimumAGBlocks, blockBytes),
		Unfinished: head[126] != 0,
		LogOffset:  xfsLogOffset(head, blockBytes),
		// The log sequence number of the superblock's last change; 0 means that the kernel made none.
		Fresh: binary.BigEndian.Uint64(head[240:]) == 0,
	}
	if sb.MetadataUUID = sb.UUID; binary.BigEndian.Uint32(head[216:])&xfsIncompatMetaUUID != 0 {
		sb.MetadataUUID = uuid.UUID(head[248:264])
	}
	sb.addFeatures(head, binary.BigEndian, xfsFeatures)
	version := binary.BigEndian.Uint16(head[100:]) & 0xF
	sb.refuse(version < 4, "sb_versionnum", version)
	sb.refuse(binary.BigEndian.Uint64(head[48:]) == 0, "sb_logstart", "an external log")
	if version == 5 {
		sb.addFeatures(head, binary.BigEndian, xfsV5Features)
	}
	sector := int(binary.BigEndian.Uint16(head[102:]))
	if version == 5 && sector >= 512 && sector <= len(head) {
		b := bytes.Clone(head[:sector])
		clear(b[224:228])
		sb.ChecksumOK = binary.LittleEndian.Uint32(head[224:]) == crc32.Checksum(b, castagnoli)
		sb.Damaged = !sb.ChecksumOK
	}
	return sb, true
}

// xfsLogOffset returns the log's offset. The upper bits of its block number are the group's number.
func xfsLogOffset(head []byte, blockBytes uint64) int64 {
	start := binary.BigEndian.Uint64(head[48:])
	groupBlocks, groupBits := uint64(binary.BigEndian.Uint32(head[84:])), head[124]
	if groupBits >= 64 {
		return 0
	}
	block := uint64(product(start>>groupBits, groupBlocks)) + start&(1<<groupBits-1)
	return product(block, blockBytes)
}

// xfsLogBytes at the start of the log suffice to tell whether it was ever used.
const xfsLogBytes = 512 << 10

// xfsLogFresh reports whether the start of a log contains only what mkfs.xfs writes: one record of
// cycle 1, and zeroes after it. The first writable mount writes there before anywhere else, and
// never writes zeroes. The record, or its first sector, may be missing, because a power failure can
// lose it and keep other writes of mkfs.xfs.
func xfsLogFresh(log []byte) bool {
	const record, sector = 8 << 10, 512
	if len(log) <= record || nonZero(log[record:]) >= 0 {
		return false
	}
	return nonZero(log[:sector]) < 0 ||
		binary.BigEndian.Uint32(log) == 0xFEEDBABE && binary.BigEndian.Uint32(log[4:]) == 1
}

// The layout of btrfs: include/uapi/linux/btrfs_tree.h.
const (
	btrfsOffset = 64 << 10
	btrfsBytes  = 4096

	btrfsFSID         = 0x20
	btrfsLogRoot      = 0x60
	btrfsIncompat     = 0xBC
	btrfsMetadataUUID = 0x23B

	btrfsIncompatMetadataUUID = 0x400
)

func btrfsSuperblock(head []byte) (Superblock, bool) {
	if len(head) < btrfsOffset+btrfsBytes {
		return Superblock{}, false
	}
	b := head[btrfsOffset : btrfsOffset+btrfsBytes]
	magic := b[0x40:0x48]
	// mkfs.btrfs writes this magic first, and the final one when everything else is on the disk.
	unfinished := bytes.Equal(magic, []byte("!BHRfS_M"))
	if !unfinished && !bytes.Equal(magic, []byte("_BHRfS_M")) {
		return Superblock{}, false
	}
	sb := Superblock{
		Type:       volume.Btrfs,
		UUID:       uuid.UUID(b[btrfsFSID : btrfsFSID+16]),
		SizeBytes:  product(binary.LittleEndian.Uint64(b[0xC9+8:]), 1),
		UnitBytes:  product(1, uint64(binary.LittleEndian.Uint32(b[0x90:]))),
		Unfinished: unfinished,
		// No field of a btrfs proves that it was never mounted: a commit by the kernel may leave no sign.
		Fresh:      false,
		MaybeFresh: btrfsMaybeFresh(b),
		Logged:     binary.LittleEndian.Uint64(b[btrfsLogRoot:]) != 0,
		Offset:     btrfsOffset,
	}
	if sb.MetadataUUID = sb.UUID; binary.LittleEndian.Uint64(b[btrfsIncompat:])&
		btrfsIncompatMetadataUUID != 0 {
		sb.MetadataUUID = uuid.UUID(b[btrfsMetadataUUID : btrfsMetadataUUID+16])
	}
	sb.addFeatures(b, binary.LittleEndian, btrfsFeatures)
	devices := binary.LittleEndian.Uint64(b[0x88:])
	sb.refuse(devices != 1, "num_devices", devices)
	devid := binary.LittleEndian.Uint64(b[0xC9:]) // 0 is the target of "btrfs replace"
	sb.refuse(devid == 0, "dev_item.devid", devid)
	sb.NodeBytes = int64(binary.LittleEndian.Uint32(b[0x94:]))
	if binary.LittleEndian.Uint16(b[0xC4:]) == 0 {
		sb.ChecksumOK = binary.LittleEndian.Uint32(b) == crc32.Checksum(b[0x20:], castagnoli)
		sb.Damaged = !sb.ChecksumOK
	}
	return sb, true
}

// btrfsMaybeFresh reports whether the superblock lacks the signs of use that most mounts leave: a
// generation of the UUID tree, a log of an fsync, or a generation beyond those of mkfs.
func btrfsMaybeFresh(b []byte) bool {
	const generation, uuidGeneration, maxByMkfs = 0x48, 0x233, 16
	le64 := binary.LittleEndian.Uint64
	return le64(b[btrfsLogRoot:]) == 0 && le64(b[uuidGeneration:]) == 0 &&
		le64(b[generation:]) <= maxByMkfs
}

// product multiplies two numbers from an untrusted disk. If that overflows, it returns MaxInt64.
func product(a, b uint64) int64 {
	const largest = 1<<63 - 1
	if b != 0 && a > largest/b {
		return largest
	}
	return int64(a * b)
}
