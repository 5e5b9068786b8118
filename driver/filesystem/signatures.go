package filesystem

import (
	"bytes"
	"fmt"
	"sync"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// signature is what a filesystem, a partition table or the like writes to identify itself: bytes at
// an offset.
type signature struct {
	Name  string
	Magic string
	// At is the offset from the start of the disk or, if negative, from its end.
	At int64
	// Align rounds the disk's end down before At is counted from it; 0 does not round.
	Align int64
}

// offset returns the signature's offset on a disk of that size.
func (s signature) offset(sizeBytes int64) int64 {
	if s.At >= 0 {
		return s.At
	}
	if s.Align > 0 {
		sizeBytes -= sizeBytes % s.Align
	}
	return sizeBytes + s.At
}

// ours are the filesystems the driver makes; their superblocks are read by findSuperblocks.
var ours = []string{fsExt2, volume.Ext3, volume.Ext4, volume.XFS, volume.Btrfs}

const mdMagic, mdMagicBig = "\xfc\x4e\x2b\xa9", "\xa9\x2b\x4e\xfc"

// signatures are those the driver knows besides its own filesystems'. The list names what was
// found, and keeps a disk with more than one owner from being mounted. It does not decide what is
// blank: a disk with an unknown signature is not blank either.
// The list is made when a disk is judged first, because most of it repeats.
var signatures = sync.OnceValue(func() []signature {
	return append(repeatedSignatures(), singleSignatures...)
})

var singleSignatures = []signature{
	{Name: "a DOS partition table or boot sector", At: 510, Magic: "\x55\xaa"},
	{Name: "a GPT", At: 512, Magic: "EFI PART"},
	{Name: "a GPT of 4 KiB sectors", At: 4096, Magic: "EFI PART"},
	{Name: "the backup of a GPT", At: -512, Magic: "EFI PART"},
	{Name: "the backup of a GPT of 4 KiB sectors", At: -4096, Align: 4096, Magic: "EFI PART"},
	{Name: "an Apple partition map", At: 512, Magic: "PM\x00"},
	{Name: "a Windows dynamic disk", At: 3072, Magic: "PRIVHEAD"},
	{Name: "a Sun disk label", At: 508, Magic: "\xda\xbe"},
	{Name: "a BSD disk label", At: 512, Magic: "\x57\x45\x56\x82"},
	{Name: "an SGI disk label", At: 0, Magic: "\x0b\xe5\xa9\x41"},
	{Name: "LUKS", At: 0, Magic: "LUKS\xba\xbe"},
	{Name: "BitLocker", At: 3, Magic: "-FVE-FS-"},
	{Name: "dm-integrity", At: 0, Magic: "integrt\x00"},
	{Name: "dm-verity", At: 0, Magic: "verity\x00\x00"},
	{Name: "VDO", At: 0, Magic: "dmvdo001"},
	{Name: "Stratis", At: 516, Magic: "!Stra0tis\x86\xff\x02^\x41rh"},
	{Name: "Linux RAID (md 1.1)", At: 0, Magic: mdMagic},
	{Name: "Linux RAID (md 1.2)", At: 4096, Magic: mdMagic},
	{Name: "Linux RAID (md 1.0)", At: -8192, Align: 4096, Magic: mdMagic},
	{Name: "Linux RAID (md 0.90)", At: -64 << 10, Align: 64 << 10, Magic: mdMagic},
	{Name: "Linux RAID (md 0.90)", At: -64 << 10, Align: 64 << 10, Magic: mdMagicBig},
	{Name: "DDF RAID", At: -512, Magic: "\xde\x11\xde\x11"},
	{Name: "DDF RAID of 4 KiB sectors", At: -4096, Align: 4096, Magic: "\xde\x11\xde\x11"},
	{Name: "DDF RAID of Adaptec", At: -257 * 512, Magic: "\xde\x11\xde\x11"},
	{Name: "Intel Matrix RAID", At: -1024, Magic: "Intel Raid ISM Cfg Sig. "},
	{Name: "Nvidia RAID", At: -1024, Magic: "NVIDIA"},
	{Name: "LSI RAID", At: -512, Magic: "$XIDE$"},
	{Name: "JMicron RAID", At: -512, Magic: "JM"},
	{Name: "Adaptec RAID", At: -512, Magic: "DPTM"},
	{Name: "HighPoint RAID 37x", At: 4608 + 32, Magic: "\xf0\x16\x7a\x5a"},
	{Name: "HighPoint RAID 45x", At: -11*512 + 32, Magic: "\xf3\x16\x7a\x5a"},
	{Name: "bcache", At: 4096 + 24,
		Magic: "\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"},
	{Name: "bcachefs", At: 4096 + 24,
		Magic: "\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"},
	{Name: "DRBD", At: -4096 + 60, Align: 4096, Magic: "\x83\x74\x02\x6b"},
	{Name: "DRBD", At: -4096 + 60, Align: 4096, Magic: "\x83\x74\x02\x6d"},
	{Name: "Ceph BlueStore", At: 0, Magic: "bluestore block device"},
	{Name: "Oracle ASM", At: 32, Magic: "ORCLDISK"},
	{Name: "ISO 9660", At: 32769, Magic: "CD001"},
	{Name: "UDF", At: 34817, Magic: "NSR0"},
	{Name: "UDF", At: 36865, Magic: "NSR0"},
	{Name: "NTFS", At: 3, Magic: "NTFS    "},
	{Name: "the backup of an NTFS", At: -512 + 3, Magic: "NTFS    "},
	{Name: "exFAT", At: 3, Magic: "EXFAT   "},
	{Name: "ReFS", At: 3, Magic: "ReFS\x00\x00\x00\x00"},
	{Name: "FAT", At: 54, Magic: "FAT"},
	{Name: "FAT32", At: 82, Magic: "FAT32"},
	{Name: "F2FS", At: 1024, Magic: "\x10\x20\xf5\xf2"},
	{Name: "NILFS2", At: 1030, Magic: "\x34\x34"},
	{Name: "the backup of an NILFS2", At: -4096 + 6, Align: 4096, Magic: "\x34\x34"},
	{Name: "HFS+", At: 1024, Magic: "H+\x00\x04"},
	{Name: "HFSX", At: 1024, Magic: "HX\x00\x05"},
	{Name: "the backup of an HFS+", At: -1024, Magic: "H+\x00\x04"},
	{Name: "APFS", At: 32, Magic: "NXSB"},
	{Name: "EROFS", At: 1024, Magic: "\xe2\xe1\xf5\xe0"},
	{Name: "squashfs", At: 0, Magic: "hsqs"},
	{Name: "cramfs", At: 0, Magic: "\x45\x3d\xcd\x28"},
	{Name: "ZoneFS", At: 0, Magic: "SFOZ"},
	{Name: "JFS", At: 32768, Magic: "JFS1"},
	{Name: "ReiserFS", At: 65536 + 52, Magic: "ReIsEr"},
	{Name: "ReiserFS", At: 8192 + 52, Magic: "ReIsEr"},
	{Name: "Reiser4", At: 65536, Magic: "ReIsEr4"},
	{Name: "GFS2", At: 65536, Magic: "\x01\x16\x19\x70"},
	{Name: "OCFS2", At: 4096, Magic: "OCFSV2"},
	{Name: "OCFS2", At: 1024, Magic: "OCFSV2"},
	{Name: "UFS", At: 8192 + 1372, Magic: "\x54\x19\x01\x00"},
	{Name: "UFS2", At: 65536 + 1372, Magic: "\x19\x01\x54\x19"},
	{Name: "VMFS's volume", At: 1 << 20, Magic: "\x0d\xd0\x01\xc0"},
	{Name: "VMFS", At: 2 << 20, Magic: "\x5e\xf1\xab\x2f"},
}

// repeatedSignatures returns the signatures that one owner may have at several offsets.
func repeatedSignatures() []signature {
	var all []signature
	for sector := range int64(4) {
		all = append(all, signature{Name: "LVM2", At: sector * 512, Magic: "LABELONE"})
	}
	for page := int64(4 << 10); page <= 64<<10; page *= 2 {
		for _, magic := range []string{"SWAPSPACE2", "SWAP-SPACE", "S1SUSPEND", "S2SUSPEND"} {
			all = append(all, signature{Name: "swap", At: page - 10, Magic: magic})
		}
	}
	for at := int64(16 << 10); at <= 4<<20; at *= 2 {
		all = append(all, signature{Name: "the second header of LUKS 2", At: at,
			Magic: "SKUL\xba\xbe"})
	}
	for _, sectors := range []int64{16, 63, 255, 256, 399, 591, 675, 735, 911, 951, 974, 991, 3087} {
		all = append(all, signature{Name: "Promise RAID", At: -sectors * 512,
			Magic: "Promise Technology, Inc."})
	}
	for _, at := range []int64{1 << 30, 10 << 30, 100 << 30, 1000 << 30} {
		all = append(all, signature{Name: "a copy of the label of Ceph", At: at,
			Magic: "bluestore block device"})
	}
	// A ZFS label holds a ring of uberblocks in the byte order of the machine that wrote it.
	for _, label := range []signature{{At: 0}, {At: 256 << 10}, {At: -512 << 10, Align: 256 << 10},
		{At: -256 << 10, Align: 256 << 10}} {
		for at := int64(128 << 10); at < 256<<10; at += 1 << 10 {
			for _, magic := range []string{"\x0c\xb1\xba\x00\x00\x00\x00\x00",
				"\x00\x00\x00\x00\x00\xba\xb1\x0c"} {
				all = append(all, signature{Name: "ZFS", At: label.At + at, Align: label.Align,
					Magic: magic})
			}
		}
	}
	return all
}

// finding is a signature that was found.
type finding struct {
	Name   string
	Offset int64
	// Sure reports that the signature is too long to occur by chance.
	Sure bool
}

func (f finding) String() string { return fmt.Sprintf("%s at offset %d", f.Name, f.Offset) }

// sureBytes is the length from which a signature does not occur by chance.
const sureBytes = 4

// findSignatures returns the known signatures in what was read of a disk of that size. at returns
// nil for what was not read.
func findSignatures(sizeBytes int64, at func(offset, n int64) []byte) []finding {
	var found []finding
	for _, s := range signatures() {
		offset := s.offset(sizeBytes)
		if offset < 0 || offset+int64(len(s.Magic)) > sizeBytes {
			continue
		}
		if bytes.Equal(at(offset, int64(len(s.Magic))), []byte(s.Magic)) {
			found = append(found, finding{s.Name, offset, len(s.Magic) >= sureBytes})
		}
	}
	return found
}
