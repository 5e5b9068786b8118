//go:build linux

package corpus_test

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"strings"
)

// header describes a mark: bytes at a fixed offset, by which programs recognize a format.
type header struct {
	name string
	// A negative offset counts from the disk's end.
	offset int64
	mark   string
	// owners contains names of the format, separated by spaces. The driver's error must name one.
	owners string
}

// marks contains bytes by which libblkid, the kernel or other programs recognize formats, with
// their sources. blkid does not recognize all of them, but each shows that a program uses the disk.
var marks = []header{
	// LUKS1 On-Disk Format Specification 1.2.3, section 2.1; LUKS2 1.1.3, section 2.1
	{"LUKS1", 0, "LUKS\xba\xbe\x00\x01", "luks"},
	{"LUKS2", 0, "LUKS\xba\xbe\x00\x02\x00\x00\x00\x00\x00\x00\x40\x00", "luks"},
	// The sources are linux/md_p.h and, for formats of other vendors, mdadm and libblkid.
	{"DDF", -512, "\xde\x11\xde\x11", "ddf"},
	{"IMSM", -1024, "Intel Raid ISM Cfg Sig. 1.0.00", "isw imsm"},
	{"Promise RAID", -63 * 512, "Promise Technology, Inc.", "promise pdc"},
	{"NVIDIA RAID", -1024, "NVIDIA  \x78\x00\x00\x00\x00\x00\x00\x00", "nvidia"},
	{"Silicon Image RAID", -512 + 0x60, "\x00\x00\x00\x2f", ""},
	{"VIA RAID", -512, "\x55\xaa\x00\x00", ""},
	{"LSI RAID", -512, "$XIDE$", ""},
	{"Adaptec RAID", -512, "\x37\xfc\x4d\x1e DPTM", ""},
	{"HighPoint RAID", 9*512 + 32, "\x5a\x7a\x33\x88", ""},
	{"JMicron RAID", -512, "JM\x01\x00", ""},
	// linux/drivers/md/bcache: the superblock is in sector 8.
	{"bcache", 4096 + 24, "\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81", ""},
	{"bcachefs", 4096 + 24, "\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef", ""},
	// The sources are the code of Ceph, VDO, Stratis and DRBD (drbd_md.c), and BitLocker's format.
	{"bluestore", 0, "bluestore block device\n", "bluestore"},
	{"VDO", 0, "dmvdo001", "vdo"},
	{"Stratis", 512 + 4, "!Stra0tis\x86\xff\x02^\x41rh", "stratis"},
	{"DRBD 8", -4096 + 60, "\x83\x74\x02\x6b", "drbd"},
	{"DRBD 9", -4096 + 60, "\x83\x74\x02\x6d", "drbd"},
	{"BitLocker", 3, "-FVE-FS-", "bitlocker"},
	{"Oracle ASM", 32, "ORCLDISK", "oracle"},
	// The source is libblkid/src/superblocks.
	{"FAT16", 0x36, "FAT16   ", "vfat"},
	{"FAT32", 0x52, "FAT32   ", "vfat"},
	{"exFAT", 3, "EXFAT   ", "exfat"},
	{"NTFS", 3, "NTFS    ", "ntfs"},
	{"NTFS with only its last sector", -512 + 3, "NTFS    ", "ntfs"},
	{"HPFS", 16 * 512, "\x49\xe8\x95\xf9", "hpfs"},
	{"HFS+", 1024, "H+\x00\x04", "hfs"},
	{"HFS+ with only its backup superblock", -1024, "H+\x00\x04", "hfs"},
	{"APFS", 32, "NXSB", "apfs"},
	{"F2FS", 1024, "\x10\x20\xf5\xf2", "f2fs"},
	{"F2FS with only its backup superblock", 4096 + 1024, "\x10\x20\xf5\xf2", "f2fs"},
	{"NILFS2", 1024 + 6, "\x34\x34", "nilfs2"},
	{"NILFS2 with only its backup superblock", -4096 + 6, "\x34\x34", "nilfs2"},
	{"ISO 9660", 0x8001, "CD001\x01", "iso9660"},
	{"UDF", 0x8001, "BEA01\x01", "udf"},
	{"UDF with only its anchor", 512 * kib, "\x02\x00\x02\x00", "udf"},
	{"UDF with only its last anchor", -2048, "\x02\x00\x02\x00", "udf"},
	{"ReiserFS", 64*kib + 0x34, "ReIsEr2Fs", "reiserfs"},
	{"old ReiserFS", 8*kib + 0x34, "ReIsErFs", "reiserfs"},
	{"Reiser4", 64 * kib, "ReIsEr4", "reiser4"},
	{"JFS", 32 * kib, "JFS1", "jfs"},
	{"GFS2", 64 * kib, "\x01\x16\x19\x70", "gfs2"},
	{"OCFS2", 8 * kib, "OCFSV2", "ocfs2"},
	{"UFS", 8*kib + 1372, "\x54\x19\x01\x00", "ufs"},
	{"UFS2", 64*kib + 1372, "\x19\x01\x54\x19", "ufs"},
	{"UFS2 far in", 256*kib + 1372, "\x19\x01\x54\x19", "ufs"},
	{"VxFS", 1024, "\xf5\xfc\x01\xa5", "vxfs"},
	{"XENIX", 1024 + 0x3f8, "\x44\x18\x2b\x00", ""},
	{"minix", 1024 + 16, "\x8f\x13", "minix"},
	{"SquashFS", 0, "hsqs", "squashfs"},
	{"EROFS", 1024, "\xe2\xe1\xf5\xe0", "erofs"},
	{"cramfs", 0, "\x45\x3d\xcd\x28", "cramfs"},
	{"romfs", 0, "-rom1fs-", "romfs"},
	{"UBI", 0, "UBI#", "ubi"},
	{"BeFS", 512 + 32, "1SFB", "befs"},
	{"Novell", 0x1000, "SPB5", ""},
	{"an ext journal", 1024 + 0x38, "\x53\xef", "jbd ext"},
	{"zonefs", 0, "SFOZ", "zonefs"},
	// VMware: the volume's header is at 1 MiB, the filesystem's at 2 MiB.
	{"VMFS volume", mib, "\x0d\xd0\x01\xc0", "vmfs"},
	{"VMFS", 2 * mib, "\x5e\xf1\xab\x2f", "vmfs"},
	// The source is libblkid/src/partitions.
	{"a BSD label", 512, "\x57\x45\x56\x82", "bsd"},
	{"a Sun label", 508, "\xda\xbe", "sun"},
	{"an SGI label", 0, "\x0b\xe5\xa9\x41", "sgi"},
}

func headers() (all []generator) {
	add := func(name, owners string, fill func(im *image)) {
		all = append(all, marked(name, strings.Fields(owners), fill))
	}
	for _, m := range marks {
		add("the mark of "+m.name, m.owners, func(im *image) { im.write(m.offset, []byte(m.mark)...) })
	}
	// Linux has several page sizes. A swap area has its mark at the end of the first page (mkswap(8)).
	for _, page := range []int64{4, 8, 16, 32, 64} {
		add(fmt.Sprintf("swap with pages of %d KiB", page), "swap", func(im *image) {
			im.tool("mkswap", "--quiet", fmt.Sprintf("--pagesize=%d", page*kib))
		})
		add(fmt.Sprintf("a hibernated system with pages of %d KiB", page), "", func(im *image) {
			im.write(page*kib-10, []byte("S1SUSPEND\x00")...)
		})
	}
	// LUKS2 has a second header. Its offset is the size of the first header's area: one of these.
	for offset := 16 * kib; offset <= 4*mib; offset *= 2 {
		add(fmt.Sprintf("LUKS2 with only its second header, at %d KiB", offset/kib), "luks",
			func(im *image) { im.write(offset, []byte("SKUL\xba\xbe\x00\x02")...) })
	}
	// LVM may write the label of a physical volume to any of the first four sectors
	// (lib/label/label.h).
	for sector := range int64(4) {
		add(fmt.Sprintf("an LVM physical volume, its label in sector %d", sector), "lvm",
			func(im *image) { im.write(sector*512, lvmLabel(sector)...) })
	}
	add("ZFS", "zfs", func(im *image) {
		for number := range int64(4) {
			zfsLabel(im, number)
		}
	})
	for number := range int64(4) {
		add(fmt.Sprintf("ZFS with only label %d", number), "zfs",
			func(im *image) { zfsLabel(im, number) })
	}
	return append(all, mdMembers()...)
}

func marked(name string, names []string, fill func(im *image)) generator {
	return generator{name, func(t *trial) {
		t.Fill = fill
		t.Want = foreign(names...)
	}}
}

// zfsLabel writes one of the four labels of a disk in a ZFS pool (ZFS On-Disk Specification, 1.2).
// Two are at the start of the disk. The other two end at the last multiple of 256 KiB. The second
// half of a label contains uberblocks.
func zfsLabel(im *image, number int64) {
	const label = 256 * 1024
	at := number * label
	if number >= 2 {
		at = im.Size/label*label - (4-number)*label
	}
	im.write(at+16*kib, []byte("\x01\x01\x00\x00version")...)
	uberblock := make([]byte, 1024)
	le.PutUint64(uberblock, 0x00bab10c)
	le.PutUint64(uberblock[8:], 5000)
	for i := range int64(8) {
		im.write(at+128*kib+i*1024, uberblock...)
	}
}

// mdSuperblock returns the superblock of a Linux RAID disk (linux/md_p.h). The version 0 stands for
// RAID version 0.90, the version 1 for all others. A superblock of version 1 contains its offset.
func mdSuperblock(version uint32, at int64) []byte {
	b := make([]byte, 1024)
	le.PutUint32(b, 0xa92b4efc)
	if version == 0 {
		le.PutUint32(b[8:], 90)
		return b
	}
	le.PutUint32(b[4:], 1)
	copy(b[16:], "the RAID's UUID.")
	le.PutUint64(b[144:], uint64(at/512))
	le.PutUint32(b[216:], mdChecksum(b[:256]))
	return b
}

// mdPlaces maps a RAID version to its superblock's offset on a disk of the given size.
var mdPlaces = map[string]func(size int64) int64{
	"0.90": func(size int64) int64 { return size&^(64*kib-1) - 64*kib },
	"1.0":  func(size int64) int64 { return (size/512 - 16) &^ 7 * 512 },
	"1.1":  func(int64) int64 { return 0 },
	"1.2":  func(int64) int64 { return 4096 },
}

func mdMembers() []generator {
	names := []string{"linux_raid_member", "raid"}
	var all []generator
	for _, version := range []string{"0.90", "1.0", "1.1", "1.2"} {
		fill := func(im *image) {
			at := mdPlaces[version](im.Size)
			im.write(at, mdSuperblock(uint32(strings.Index("01", version[:1])), at)...)
		}
		all = append(all, marked("a member of an md RAID "+version, names, fill))
		for _, k := range []string{"ext4", "xfs", "btrfs"} {
			// Only disks of RAID 0.90 and 1.0 have the superblock at their end. So a disk of such a mirror
			// begins with the filesystem.
			if version != "0.90" && version != "1.0" {
				continue
			}
			all = append(all, generator{k + " on a member of an md RAID " + version,
				func(t *trial) {
					kindOf(k).setUp(t)
					t.Size += 128 * kib
					t.Fill = func(im *image) {
						im.filesystem(kindOf(k))
						fill(im)
					}
					t.Want = foreign(names...)
				}})
		}
	}
	return all
}

// mdChecksum returns the checksum of a RAID superblock without devices (md's calc_sb_1_csum).
func mdChecksum(b []byte) uint32 {
	var sum uint64
	for i := 0; i < len(b); i += 4 {
		sum += uint64(le.Uint32(b[i:]))
	}
	return uint32(sum) + uint32(sum>>32)
}

func lvmLabel(sector int64) []byte {
	label := make([]byte, 512)
	copy(label, "LABELONE")
	le.PutUint64(label[8:], uint64(sector))
	le.PutUint32(label[20:], 32)
	copy(label[24:], "LVM2 001")
	copy(label[32:], hex.EncodeToString([]byte("a volume's UUID.")))
	le.PutUint32(label[16:], ^crc32.Update(^uint32(0xf597a6cf), crc32.IEEETable, label[20:]))
	return label
}

var le = binary.LittleEndian

func mbr(kind byte, start, sectors uint32) []byte {
	b := make([]byte, 512)
	copy(b[446:], []byte{0, 0, 2, 0, kind, 0xff, 0xff, 0xff})
	le.PutUint32(b[454:], start)
	le.PutUint32(b[458:], sectors)
	b[510], b[511] = 0x55, 0xAA
	return b
}

// A GUID partition table has two headers (UEFI 2.10, 5.3.2). gptHeader returns one of them. The
// first two parameters are the block numbers of this header and of the other one.
func gptHeader(own, other, blocks, entries uint64, array []byte) []byte {
	b := make([]byte, 512)
	copy(b, "EFI PART")
	le.PutUint32(b[8:], 0x10000)
	le.PutUint32(b[12:], 92)
	le.PutUint64(b[24:], own)
	le.PutUint64(b[32:], other)
	le.PutUint64(b[40:], 34)
	le.PutUint64(b[48:], blocks-34)
	copy(b[56:], "a disk's GUID 16")
	le.PutUint64(b[72:], entries)
	le.PutUint32(b[80:], 128)
	le.PutUint32(b[84:], 128)
	le.PutUint32(b[88:], crc32.ChecksumIEEE(array))
	le.PutUint32(b[16:], crc32.ChecksumIEEE(b[:92]))
	return b
}

func gptArray() []byte {
	b := make([]byte, 128*128)
	copy(b, "\xaf\x3d\xc6\x0f\x83\x84\x72\x47\x8e\x79\x3d\x69\xd8\x47\x7d\xe4a partition's id")
	le.PutUint64(b[32:], 2048)
	le.PutUint64(b[40:], 1<<20)
	copy(b[56:], "d\x00a\x00t\x00a\x00")
	return b
}

func (im *image) gpt(block int64, protective, primary, backup bool) {
	blocks, array := uint64(im.Size/block), gptArray()
	arrayBlocks := uint64(int64(len(array)) / block)
	if protective {
		im.write(0, mbr(0xEE, 1, uint32(min(blocks-1, 0xFFFFFFFF)))...)
	}
	if primary {
		im.write(block, gptHeader(1, blocks-1, blocks, 2, array)...)
		im.write(2*block, array...)
	}
	if backup {
		im.write(int64(blocks-1-arrayBlocks)*block, array...)
		im.write(int64(blocks-1)*block, gptHeader(blocks-1, 1, blocks, blocks-1-arrayBlocks, array)...)
	}
}

func tables() []generator {
	with := func(name string, block int, fill func(im *image), names ...string) generator {
		return marked(name, names, fill).and(func(t *trial) { t.BlockSize = block })
	}
	all := []generator{
		with("an MBR", 512, func(im *image) { im.write(0, mbr(0x83, 2048, 1<<20)...) },
			"partition table (dos)"),
		with("an MBR without a partition", 512, func(im *image) { im.write(0, mbr(0, 0, 0)...) }),
		with("boot code without a table", 512, func(im *image) {
			im.write(0, []byte("\xeb\x63\x90 boot code")...)
		}),
		with("an Apple partition map", 512, func(im *image) {
			im.write(0, []byte("ER\x02\x00")...)
			im.write(512, append([]byte("PM\x00\x00\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00\x3f"),
				"Apple"...)...)
		}, "mac"),
		with("an Apple partition map with only its second block", 512, func(im *image) {
			im.write(512, []byte("PM\x00\x00\x00\x00\x00\x01")...)
		}),
	}
	for _, block := range []int64{512, 4096} {
		sectors := map[int64]string{512: "", 4096: " on 4096-byte blocks"}[block]
		add := func(name string, protective, primary, backup bool) {
			all = append(all, with(name+sectors, int(block), func(im *image) {
				im.gpt(block, protective, primary, backup)
			}, "partition table (gpt)"))
		}
		add("a GPT", true, true, true)
		add("a GPT without its protective MBR", false, true, true)
		add("a GPT without its backup", true, true, false)
		add("the protective MBR of a GPT", true, false, false)
		add("the backup of a GPT", false, false, true)
		all = append(all, with("the backup header of a GPT"+sectors, int(block), func(im *image) {
			im.gpt(block, false, false, true)
			im.wipe(0, im.Size-block)
		}))
	}
	return all
}

// spots contains offsets far from both ends of a disk, at which formats have marks. region quotes
// the entry of the driver's list of regions that makes the driver read this offset.
var spots = []struct {
	at            int64
	where, region string
}{
	{mib + 8*kib, "where LUKS2, VMFS and bcachefs have headers",
		`{1 << 20, 64 << 10, "the second header of LUKS 2, VMFS, bcachefs, or the first data of LVM"}`},
	{mib + 254*4*kib, "where Oracle ASM has its second header",
		`{1<<20 + 254*4096, sectorBytes, "the second header of Oracle ASM"}`},
	{2*mib + 16*kib, "where VMFS begins",
		`{2 << 20, 64 << 10, "the second header of LUKS 2, VMFS, or F2FS"}`},
	{4*mib + 32*kib, "where ZFS begins",
		`{4 << 20, 64 << 10, "the second header of LUKS 2, or the first data of ZFS"}`},
	{16 * mib, "where the data of LUKS2 begin", `{16 << 20, sectorBytes, "the first data of LUKS 2"}`},
	{18 * mib, "where VMFS has its heartbeats", `{18 << 20, sectorBytes, "VMFS"}`},
	{64 * mib, "where btrfs has its second superblock",
		`{64 << 20, sectorBytes, "the second superblock of btrfs"}`},
	{256 * gib, "where btrfs has its third superblock",
		`{256 << 30, sectorBytes, "the third superblock of btrfs"}`},
	{3 * gib, "where NTFS has its file table", `{3 << 30, sectorBytes, "the file table of NTFS"}`},
	{gib, "where Ceph has its second label", `{1 << 30, sectorBytes, "a copy of the label of Ceph"}`},
	{10 * gib, "where Ceph has its third label",
		`{10 << 30, sectorBytes, "a copy of the label of Ceph"}`},
	{100 * gib, "where Ceph has its fourth label",
		`{100 << 30, sectorBytes, "a copy of the label of Ceph"}`},
	{1000 * gib, "where Ceph has its fifth label",
		`{1000 << 30, sectorBytes, "a copy of the label of Ceph"}`},
}

// regions returns disks that are blank except for bytes far from both ends.
func regions() []generator {
	all := []generator{
		singleByte("where a large xfs has its second group", 1024*gib),
		singleByte("where ext4 has its first copy", 128*mib),
		{"one byte where an xfs of 8 groups has its third", func(t *trial) {
			t.Size = 3*gib + 8*mib
			fillByte(t, 2*(t.Size/8))
		}},
		{"one byte where an xfs of 5 groups has its second", func(t *trial) {
			t.Size = 23*gib + 8*mib
			blocks := (t.Size/4096 + 4) / 5
			fillByte(t, blocks*4096)
		}},
		{"data in a hundredth of the disk, where no mark can be", inAHundredth},
	}
	for _, s := range spots {
		all = append(all, singleByte(s.where, s.at))
	}
	all = append(all, repeated(6, "a copy of an ext superblock", func(t *trial) {
		block := kib << t.Rand.IntN(7)
		group := min(8*block, 1<<16-8) * block
		first := int64(0)
		if block == kib {
			first = block
		}
		var groups []int64
		for _, base := range []int64{3, 5, 7} {
			for n := int64(1); n*group < 40*gib; n *= base {
				groups = append(groups, n)
			}
		}
		n := groups[t.Rand.IntN(len(groups))]
		t.Size = (n*group+first)/gib*gib + gib*(1+t.Rand.Int64N(9))
		fillByte(t, n*group+first+t.Rand.Int64N(kib))
	})...)
	return append(all, repeated(4, "a copy of an xfs superblock", func(t *trial) {
		groups := int64(2) << t.Rand.IntN(5)
		blocks := (t.Size/4096 + groups - 1) / groups
		fillByte(t, (1+t.Rand.Int64N(groups-1))*blocks*4096+t.Rand.Int64N(512))
	})...)
}

// inAHundredth writes a byte to each page in a hundredth of a disk. No format has a mark there.
func inAHundredth(t *trial) {
	t.Size = 3*gib + 8*mib
	start := t.Size / 1000 * 515 &^ (pageBytes - 1)
	t.Fill = func(im *image) {
		for at := start; at < start+t.Size/100; at += pageBytes {
			im.write(at+t.Rand.Int64N(pageBytes), 1)
		}
	}
	t.Want = foreign()
}

// singleByte writes one byte at an offset where only one format has data on a disk of this size.
func singleByte(where string, at int64) generator {
	return generator{"one byte " + where, func(t *trial) {
		t.Size = max(3*gib, at/gib*gib+gib) + 8*mib
		fillByte(t, at)
	}}
}

// The driver always reads the first provenStart bytes and the last provenEnd bytes of a disk.
const (
	provenStart = mib
	provenEnd   = mib
)

func noise() []generator {
	all := []generator{
		oneByte("the first byte", func(*trial) int64 { return 0 }),
		oneByte("the last byte", func(t *trial) int64 { return t.Size - 1 }),
		oneByte("the last byte of the first MiB", func(*trial) int64 { return provenStart - 1 }),
		oneByte("the first byte of the last MiB", func(t *trial) int64 { return t.Size - provenEnd }),
	}
	all = append(all, repeated(6, "one byte somewhere in the first MiB", func(t *trial) {
		fillByte(t, t.Rand.Int64N(provenStart))
	})...)
	return append(all, repeated(6, "one byte somewhere in the last MiB", func(t *trial) {
		fillByte(t, t.Size-1-t.Rand.Int64N(provenEnd))
	})...)
}

func oneByte(where string, at func(*trial) int64) generator {
	return generator{"one byte: " + where, func(t *trial) { fillByte(t, at(t)) }}
}

func fillByte(t *trial, at int64) {
	t.Fill = func(im *image) { im.write(at, byte(1+t.Rand.IntN(255))) }
	t.Want = foreign()
	t.Want.Says = []string{fmt.Sprintf("offset %d", at)}
}

func randomBytes(r *rand.Rand, n int64) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	b[0] |= 1 // at least the first byte is not zero
	return b
}
