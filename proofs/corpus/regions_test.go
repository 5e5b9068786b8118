//go:build linux

package corpus_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
)

// spots are the places far from both ends where formats have marks. The driver reads each of them
// because of an entry of its list of regions.
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

// regions returns disks that are blank except for one region far from both ends, where a format has
// a mark or a copy of it.
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
	all = append(all, each(6, "a copy of an ext superblock", func(t *trial) {
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
	all = append(all, each(4, "a copy of an xfs superblock", func(t *trial) {
		groups := int64(2) << t.Rand.IntN(5)
		blocks := (t.Size/4096 + groups - 1) / groups
		fillByte(t, (1+t.Rand.Int64N(groups-1))*blocks*4096+t.Rand.Int64N(512))
	})...)
	return slices.Clip(all)
}

// inAHundredth writes to a hundredth of the disk, at a place where no format has a mark on a disk
// of this size.
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

// singleByte returns a disk with one byte at that offset. The disk's size is chosen so that no
// other format has a mark there.
func singleByte(where string, at int64) generator {
	return generator{"one byte " + where, func(t *trial) {
		t.Size = max(3*gib, at/gib*gib+gib) + 8*mib
		fillByte(t, at)
	}}
}

// provenStart and provenEnd are the sizes of the parts at a disk's start and end that are
// always read completely.
const (
	provenStart = mib
	provenEnd   = mib
)

// noise returns disks that are blank except for some bytes in the first or the last MiB.
func noise() []generator {
	all := []generator{
		oneByte("the first byte", func(*trial) int64 { return 0 }),
		oneByte("the last byte", func(t *trial) int64 { return t.Size - 1 }),
		oneByte("the last byte of the first MiB", func(*trial) int64 { return provenStart - 1 }),
		oneByte("the first byte of the last MiB", func(t *trial) int64 { return t.Size - provenEnd }),
	}
	all = append(all, each(6, "one byte somewhere in the first MiB", func(t *trial) {
		fillByte(t, t.Rand.Int64N(provenStart))
	})...)
	all = append(all, each(6, "one byte somewhere in the last MiB", func(t *trial) {
		fillByte(t, t.Size-1-t.Rand.Int64N(provenEnd))
	})...)
	return append(all, each(4, "random bytes over an edge", func(t *trial) {
		n := int64(1 + t.Rand.IntN(256<<10))
		at := t.Rand.Int64N(provenStart)
		if t.Rand.IntN(2) == 0 {
			at = t.Size - max(n, t.Rand.Int64N(provenEnd))
		}
		t.Fill = func(im *image) { im.write(at, randomBytes(t.Rand, n)...) }
		t.Want = foreign()
	})...)
}

func oneByte(where string, at func(*trial) int64) generator {
	return generator{"one byte: " + where, func(t *trial) { fillByte(t, at(t)) }}
}

// fillByte sets one byte of the disk to a value other than zero. The evidence must name its
// offset.
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
