//go:build linux

package corpus_test

import (
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"slices"
	"strings"
)

// header is the mark of a format that a disk can have.
type header struct {
	name string
	// offset is the offset of the mark. A negative offset counts from the disk's end.
	offset int64
	mark   string
	// names are the names that the evidence may use.
	names []string
}

// marks are the marks for which libblkid, the kernel and the programs themselves look, each
// with the source of the number. If a mark alone does not convince blkid, the disk still
// belongs to somebody.
var marks = []header{
	// LUKS1 On-Disk Format Specification 1.2.3, 2.1; LUKS2 1.1.3, 2.1
	{"LUKS1", 0, "LUKS\xba\xbe\x00\x01", []string{"luks"}},
	{"LUKS2", 0, "LUKS\xba\xbe\x00\x02\x00\x00\x00\x00\x00\x00\x40\x00", []string{"luks"}},
	// The source is linux/md_p.h, with the places of each version. The external formats are those
	// of mdadm.
	{"DDF", -512, "\xde\x11\xde\x11", []string{"ddf"}},
	{"IMSM", -1024, "Intel Raid ISM Cfg Sig. 1.0.00", []string{"isw", "imsm"}},
	{"Promise RAID", -63 * 512, "Promise Technology, Inc.", []string{"promise", "pdc"}},
	{"NVIDIA RAID", -1024, "NVIDIA  \x78\x00\x00\x00\x00\x00\x00\x00", []string{"nvidia"}},
	{"Silicon Image RAID", -512 + 0x60, "\x00\x00\x00\x2f", nil},
	{"VIA RAID", -512, "\x55\xaa\x00\x00", nil},
	{"LSI RAID", -512, "$XIDE$", nil},
	{"Adaptec RAID", -512, "\x37\xfc\x4d\x1e DPTM", nil},
	{"HighPoint RAID", 9*512 + 32, "\x5a\x7a\x33\x88", nil},
	{"JMicron RAID", -512, "JM\x01\x00", nil},
	// linux/drivers/md/bcache: the superblock is in sector 8.
	{"bcache", 4096 + 24, "\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81", nil},
	{"bcachefs", 4096 + 24, "\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef", nil},
	// The labels are those of ceph's bluestore, vdo, stratis, DRBD 8 and 9 (drbd_md.c) and
	// BitLocker.
	{"bluestore", 0, "bluestore block device\n", []string{"bluestore"}},
	{"VDO", 0, "dmvdo001", []string{"vdo"}},
	{"Stratis", 512 + 4, "!Stra0tis\x86\xff\x02^\x41rh", []string{"stratis"}},
	{"DRBD 8", -4096 + 60, "\x83\x74\x02\x6b", []string{"drbd"}},
	{"DRBD 9", -4096 + 60, "\x83\x74\x02\x6d", []string{"drbd"}},
	{"BitLocker", 3, "-FVE-FS-", []string{"bitlocker"}},
	{"Oracle ASM", 32, "ORCLDISK", []string{"oracle"}},
	// The source is libblkid/src/superblocks.
	{"FAT16", 0x36, "FAT16   ", []string{"vfat"}},
	{"FAT32", 0x52, "FAT32   ", []string{"vfat"}},
	{"exFAT", 3, "EXFAT   ", []string{"exfat"}},
	{"NTFS", 3, "NTFS    ", []string{"ntfs"}},
	{"NTFS of which the last sector is left", -512 + 3, "NTFS    ", []string{"ntfs"}},
	{"HPFS", 16 * 512, "\x49\xe8\x95\xf9", []string{"hpfs"}},
	{"HFS+", 1024, "H+\x00\x04", []string{"hfs"}},
	{"HFS+ of which the backup is left", -1024, "H+\x00\x04", []string{"hfs"}},
	{"APFS", 32, "NXSB", []string{"apfs"}},
	{"F2FS", 1024, "\x10\x20\xf5\xf2", []string{"f2fs"}},
	{"F2FS of which the backup is left", 4096 + 1024, "\x10\x20\xf5\xf2", []string{"f2fs"}},
	{"NILFS2", 1024 + 6, "\x34\x34", []string{"nilfs2"}},
	{"NILFS2 of which the backup is left", -4096 + 6, "\x34\x34", []string{"nilfs2"}},
	{"ISO 9660", 0x8001, "CD001\x01", []string{"iso9660"}},
	{"UDF", 0x8001, "BEA01\x01", []string{"udf"}},
	{"UDF of which the anchor is left", 512 * kib, "\x02\x00\x02\x00", []string{"udf"}},
	{"UDF of which the last anchor is left", -2048, "\x02\x00\x02\x00", []string{"udf"}},
	{"ReiserFS", 64*kib + 0x34, "ReIsEr2Fs", []string{"reiserfs"}},
	{"old ReiserFS", 8*kib + 0x34, "ReIsErFs", []string{"reiserfs"}},
	{"Reiser4", 64 * kib, "ReIsEr4", []string{"reiser4"}},
	{"JFS", 32 * kib, "JFS1", []string{"jfs"}},
	{"GFS2", 64 * kib, "\x01\x16\x19\x70", []string{"gfs2"}},
	{"OCFS2", 8 * kib, "OCFSV2", []string{"ocfs2"}},
	{"UFS", 8*kib + 1372, "\x54\x19\x01\x00", []string{"ufs"}},
	{"UFS2", 64*kib + 1372, "\x19\x01\x54\x19", []string{"ufs"}},
	{"UFS2 far in", 256*kib + 1372, "\x19\x01\x54\x19", []string{"ufs"}},
	{"VxFS", 1024, "\xf5\xfc\x01\xa5", []string{"vxfs"}},
	{"XENIX", 1024 + 0x3f8, "\x44\x18\x2b\x00", nil},
	{"minix", 1024 + 16, "\x8f\x13", []string{"minix"}},
	{"SquashFS", 0, "hsqs", []string{"squashfs"}},
	{"EROFS", 1024, "\xe2\xe1\xf5\xe0", []string{"erofs"}},
	{"cramfs", 0, "\x45\x3d\xcd\x28", []string{"cramfs"}},
	{"romfs", 0, "-rom1fs-", []string{"romfs"}},
	{"UBI", 0, "UBI#", []string{"ubi"}},
	{"BeFS", 512 + 32, "1SFB", []string{"befs"}},
	{"Novell", 0x1000, "SPB5", nil},
	{"an ext journal", 1024 + 0x38, "\x53\xef", []string{"jbd", "ext"}},
	{"zonefs", 0, "SFOZ", []string{"zonefs"}},
	// VMware: the volume's header is at 1 MiB, the filesystem's at 2 MiB.
	{"VMFS volume", mib, "\x0d\xd0\x01\xc0", []string{"vmfs"}},
	{"VMFS", 2 * mib, "\x5e\xf1\xab\x2f", []string{"vmfs"}},
}

// headers returns disks that are blank except for such a mark.
func headers() []generator {
	var all []generator
	for _, m := range marks {
		all = append(all, marked("the mark of "+m.name, m.names, func(im *image) {
			im.write(m.offset, []byte(m.mark)...)
		}))
	}
	return slices.Concat(all, swaps(), luksCopies(), zfsLabels(), mdMembers(), lvm())
}

func marked(name string, names []string, fill func(im *image)) generator {
	return generator{name, func(t *trial) {
		t.Fill = fill
		t.Want = foreign(names...)
	}}
}

// swaps returns swap areas. Their mark is at the end of the first page, for each page size of
// an architecture (mkswap(8)).
func swaps() []generator {
	var all []generator
	for _, page := range []int64{4, 8, 16, 32, 64} {
		all = append(all, marked(fmt.Sprintf("swap with pages of %d KiB", page), []string{"swap"},
			func(im *image) { im.tool("mkswap", "--quiet", fmt.Sprintf("--pagesize=%d", page*kib)) }))
		all = append(all, marked(fmt.Sprintf("a hibernated system with pages of %d KiB", page), nil,
			func(im *image) { im.write(page*kib-10, []byte("S1SUSPEND\x00")...) }))
	}
	return all
}

// luksCopies returns disks with only the second header of LUKS2, which begins at the end of
// the first header's area.
func luksCopies() []generator {
	var all []generator
	for offset := 16 * kib; offset <= 4*mib; offset *= 2 {
		name := fmt.Sprintf("LUKS2 of which the second header is left, at %d KiB", offset/kib)
		all = append(all, marked(name, []string{"luks"}, func(im *image) {
			im.write(offset, []byte("SKUL\xba\xbe\x00\x02")...)
		}))
	}
	return all
}

// zfsLabel writes one of the four labels of a pool's member (ZFS On-Disk Specification, 1.2):
// two labels are at the start, and two at the end of the disk, whose size is rounded down to
// 256 KiB. The second half of a label is a ring of uberblocks.
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

// zfsLabels returns disks with some of the labels.
func zfsLabels() []generator {
	all := []generator{marked("ZFS", []string{"zfs"}, func(im *image) {
		for number := range int64(4) {
			zfsLabel(im, number)
		}
	})}
	for number := range int64(4) {
		all = append(all, marked(fmt.Sprintf("ZFS of which label %d is left", number),
			[]string{"zfs"}, func(im *image) { zfsLabel(im, number) }))
	}
	return append(all, generator{"ZFS on an odd size of which the last label is left",
		func(t *trial) {
			t.Size += 512 * (1 + t.Rand.Int64N(256*kib/512-1))
			t.Fill = func(im *image) { zfsLabel(im, 3) }
			t.Want = foreign("zfs")
		}})
}

// mdSuperblock returns the superblock of a member of a Linux RAID (linux/md_p.h), of version
// 0.90 or 1, for the place where it will be.
func mdSuperblock(version uint32, at int64) []byte {
	b := make([]byte, 1024)
	le.PutUint32(b, 0xa92b4efc)
	if version == 0 {
		le.PutUint32(b[8:], 90)
		return b
	}
	le.PutUint32(b[4:], 1)
	copy(b[16:], "the RAID's UUID.")
	le.PutUint64(b[144:], uint64(at/512)) // the place of this superblock
	le.PutUint32(b[216:], mdChecksum(b[:256]))
	return b
}

// mdPlaces returns the place of the superblock for each version.
var mdPlaces = map[string]func(size int64) int64{
	"0.90": func(size int64) int64 { return size&^(64*kib-1) - 64*kib },
	"1.0":  func(size int64) int64 { return (size/512 - 16) &^ 7 * 512 },
	"1.1":  func(int64) int64 { return 0 },
	"1.2":  func(int64) int64 { return 4096 },
}

// mdMembers returns members of Linux RAIDs.
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
			// This is half of a mirror. Its filesystem can be seen on the member, too, and ends
			// before the superblock of the RAID.
			if version != "0.90" && version != "1.0" {
				continue
			}
			all = append(all, generator{k + " on a member of an md RAID " + version,
				func(t *trial) {
					kindOf(k).of(t)
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

// mdChecksum adds up the words of a superblock that has no space for devices (md's
// calc_sb_1_csum).
func mdChecksum(b []byte) uint32 {
	var sum uint64
	for i := 0; i < len(b); i += 4 {
		sum += uint64(le.Uint32(b[i:]))
	}
	return uint32(sum) + uint32(sum>>32)
}

// lvm returns physical volumes. The label may be in any of the first four sectors
// (lib/label/label.h).
func lvm() []generator {
	var all []generator
	for sector := range int64(4) {
		label := make([]byte, 512)
		copy(label, "LABELONE")
		le.PutUint64(label[8:], uint64(sector))
		le.PutUint32(label[20:], 32)
		copy(label[24:], "LVM2 001")
		copy(label[32:], hex.EncodeToString([]byte("a volume's UUID.")))
		le.PutUint32(label[16:], ^crc32.Update(^uint32(0xf597a6cf), crc32.IEEETable, label[20:]))
		all = append(all, marked(fmt.Sprintf("an LVM physical volume, its label in sector %d", sector),
			[]string{"lvm"}, func(im *image) { im.write(sector*512, label...) }))
	}
	return all
}
