//go:build linux

package corpus_test

import (
	"encoding/binary"
	"hash/crc32"
)

var (
	le = binary.LittleEndian
	be = binary.BigEndian
)

// mbr returns a partition table with one partition.
func mbr(kind byte, start, sectors uint32) []byte {
	b := make([]byte, 512)
	copy(b[446:], []byte{0, 0, 2, 0, kind, 0xff, 0xff, 0xff})
	le.PutUint32(b[454:], start)
	le.PutUint32(b[458:], sectors)
	b[510], b[511] = 0x55, 0xAA
	return b
}

// gptHeader returns the header of a GUID partition table (UEFI 2.10, 5.3.2) in block own of a
// disk with that many blocks. The other header is in block other.
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

// gptArray returns an array with one partition, for Linux.
func gptArray() []byte {
	b := make([]byte, 128*128)
	copy(b, "\xaf\x3d\xc6\x0f\x83\x84\x72\x47\x8e\x79\x3d\x69\xd8\x47\x7d\xe4a partition's id")
	le.PutUint64(b[32:], 2048)
	le.PutUint64(b[40:], 1<<20)
	copy(b[56:], "d\x00a\x00t\x00a\x00")
	return b
}

// gpt writes the parts of a table: the protective MBR, the table at the start, and the backup.
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
		im.write(int64(blocks-1)*block, gptHeader(blocks-1, 1, blocks, blocks-1-arrayBlocks,
			array)...)
	}
}

// tables returns disks with complete and incomplete partition tables.
func tables() []generator {
	with := func(name string, block int, fill func(im *image), names ...string) generator {
		return generator{name, func(t *trial) {
			t.BlockSize = block
			t.Fill = fill
			t.Want = foreign(names...)
		}}
	}
	all := []generator{
		with("an MBR", 512, func(im *image) { im.write(0, mbr(0x83, 2048, 1<<20)...) },
			"partition table (dos)"),
		with("an MBR without a partition", 512, func(im *image) {
			im.write(0, mbr(0, 0, 0)...)
		}),
		with("boot code without a table", 512, func(im *image) {
			im.write(0, []byte("\xeb\x63\x90 boot code")...)
		}),
		with("an Apple partition map", 512, func(im *image) {
			im.write(0, []byte("ER\x02\x00")...)
			im.write(512, append([]byte("PM\x00\x00\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00\x3f"),
				"Apple"...)...)
		}, "mac"),
		with("an Apple partition map of which the second block is left", 512, func(im *image) {
			im.write(512, []byte("PM\x00\x00\x00\x00\x00\x01")...)
		}),
		with("a BSD label", 512, func(im *image) { im.write(512, bsdLabel()...) }, "bsd"),
		with("a Sun label", 512, func(im *image) { im.write(0, sunLabel()...) }, "sun"),
		with("an SGI label", 512, func(im *image) { im.write(0, sgiLabel()...) }, "sgi"),
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
	// The disk was enlarged after it was partitioned: the backup is not at the end any more, and
	// the table is at the start.
	return append(all, with("a GPT of a disk that has grown", 512, func(im *image) {
		grown := im.Size
		im.resize(grown / 2)
		im.gpt(512, false, true, true)
		im.resize(grown)
	}))
}

// bsdLabel returns a label of 4.4BSD (sys/disklabel.h): it has two magic numbers, and the sum
// of all words is 0.
func bsdLabel() []byte {
	b := make([]byte, 512)
	le.PutUint32(b, 0x82564557)
	le.PutUint32(b[40:], 512)
	le.PutUint32(b[132:], 0x82564557)
	le.PutUint16(b[138:], 1)
	le.PutUint32(b[148:], 1<<20)
	b[160] = 7
	var sum uint16
	for i := 0; i < 148+16; i += 2 {
		sum ^= le.Uint16(b[i:])
	}
	le.PutUint16(b[136:], sum)
	return b
}

// sunLabel returns a SunOS label: it has a magic number at the end, and the sum of all words
// is 0.
func sunLabel() []byte {
	b := make([]byte, 512)
	copy(b, "a disk of a Sun")
	be.PutUint32(b[444+4:], 1<<20)
	be.PutUint16(b[508:], 0xDABE)
	var sum uint16
	for i := 0; i < 510; i += 2 {
		sum ^= be.Uint16(b[i:])
	}
	be.PutUint16(b[510:], sum)
	return b
}

// sgiLabel returns a volume header of IRIX: the sum of its 32-bit words is 0.
func sgiLabel() []byte {
	b := make([]byte, 512)
	be.PutUint32(b, 0x0BE5A941)
	copy(b[8:], "/unix")
	var sum uint32
	for i := 0; i < 512; i += 4 {
		sum -= be.Uint32(b[i:])
	}
	be.PutUint32(b[504:], sum)
	return b
}
