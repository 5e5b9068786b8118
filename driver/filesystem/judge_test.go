//go:build linux

package filesystem

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"math"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func TestBlkidDistinguishesNothingFoundFromAnError(t *testing.T) {
	blank := filepath.Join(t.TempDir(), "blank")
	csitest.Must(t, os.WriteFile(blank, make([]byte, guesttest.MiB), 0o600))
	f, err := os.Open(blank)
	csitest.Must(t, err)
	defer func() { _ = f.Close() }()
	if got, err := blkid(f); err != nil || got != "" {
		t.Errorf("a blank file: %+v, %v", got, err)
	}
	tools := t.TempDir()
	for _, script := range []string{"", "exit 4", "exit 1", "kill -9 $$", "exit 0"} {
		if script != "" {
			csitest.Must(t, os.WriteFile(filepath.Join(tools, "blkid"), []byte("#!/bin/sh\n"+script+"\n"),
				0o755))
		}
		t.Setenv("PATH", tools)
		if got, err := blkid(f); err == nil {
			t.Errorf("blkid that does %q returns %+v, want an error", script, got)
		}
	}
}

// FuzzJudge checks that a disk is never called blank if a byte is not zero or blkid finds
// something.
func FuzzJudge(f *testing.F) {
	f.Add([]byte{}, []byte{}, "")
	f.Add([]byte{0, 1}, []byte{0}, "ext4")
	f.Add(make([]byte, 512), []byte("EFI PART"), "a partition table (gpt)")
	f.Fuzz(func(t *testing.T, head, sector []byte, found string) {
		s := scan{Path: "/dev/x", SizeBytes: 16 * guesttest.MiB,
			Found: findSuperblocks(head),
			Blkid: found, Regions: []regionData{
				{region{0, int64(len(head)), "the head"}, head},
				{region{RecordOffsets(16 * guesttest.MiB)[0], int64(len(sector)), "a sector"}, sector},
			}}
		clean := len(bytes.Trim(head, "\x00")) == 0 && len(bytes.Trim(sector, "\x00")) == 0
		s.takeRecords(Volume{})
		got, err := s.judge(Volume{ID: "v", DiskName: "d", SizeBytes: s.SizeBytes})
		if err == nil && got.Blank && (!clean || found != "") {
			t.Fatalf("called blank: head %q, sector %q, %q", head, sector, found)
		}
	})
}

// After a failed write the kernel's cache contains the new bytes, as long as any program has the
// device open. A check would then find no error in a damaged filesystem.
func TestTheKernelsCacheIsDroppedBeforeACheck(t *testing.T) {
	g := guesttest.New(t)
	d := g.Attach(guesttest.Serial, 64*guesttest.MiB)
	program, err := os.Open(d.Loop)
	csitest.Must(t, err)
	defer func() { csitest.Must(t, program.Close()) }()
	const at = 63 * guesttest.MiB
	sees := func() []byte {
		b := make([]byte, 4096)
		_, err := program.ReadAt(b, at)
		csitest.Must(t, err)
		return b
	}
	kept, has := sees(), bytes.Repeat([]byte{7}, 4096)
	file, err := os.OpenFile(d.File, os.O_WRONLY, 0)
	csitest.Must(t, err)
	_, err = file.WriteAt(has, at)
	csitest.Must(t, err)
	csitest.Must(t, file.Close())
	if !bytes.Equal(sees(), kept) {
		t.Fatal("the kernel has not kept what it read")
	}
	device := openLocked(t.Context(), t, g)
	defer func() { csitest.Must(t, device.Close()) }()
	csitest.Must(t, (&Preparation{Device: device}).finish(state{}))
	if !bytes.Equal(sees(), has) {
		t.Error("the kernel shows its cache, and not the bytes on the disk")
	}
}

// The seeds of every target are in testdata/fuzz, one file each, named after their content. What
// the fuzzer found is kept there too.

// FuzzRecord checks that a record is parsed as it was written, and that one wrong bit makes it
// invalid, because a format is repeated on the strength of a record.
func FuzzRecord(f *testing.F) {
	f.Fuzz(func(t *testing.T, raw []byte, vol, disk string, size int64, bit uint16) {
		if m, err := ParseRecord(raw); err == nil {
			again, err := m.Encode()
			if err != nil || len(again) != sectorBytes {
				t.Fatalf("%q is the record %+v, which cannot be encoded: %v", raw, m, err)
			}
		}
		m := Record{Volume: strings.ToValidUTF8(vol, "?"),
			Disk: strings.ToValidUTF8(disk, "?"), SizeBytes: size, Filesystem: volume.Ext4}
		b, err := m.Encode()
		if err != nil {
			return // too long
		}
		if got, err := ParseRecord(b); err != nil || got != m {
			t.Fatalf("%+v becomes %+v, %v", m, got, err)
		}
		bit %= recordBytes * 8
		b[bit/8] ^= 1 << (bit % 8)
		if got, err := ParseRecord(b); err == nil {
			t.Fatalf("bit %d is wrong, but the record is valid: %+v", bit, got)
		}
	})
}

// FuzzSuperblockChecksum checks that ChecksumOK is set for a superblock of any content with the
// right checksum, and not set if one byte is wrong.
func FuzzSuperblockChecksum(f *testing.F) {
	f.Fuzz(func(t *testing.T, kind uint8, body []byte, at uint16, wrong uint8) {
		head, from, to := withChecksum(int(kind)%3, body)
		found := findSuperblocks(head)
		if len(found) != 1 || !found[0].ChecksumOK {
			t.Fatalf("a superblock with the right checksum is %+v", found)
		}
		if wrong == 0 {
			wrong = 1
		}
		changed := from + int(at)%(to-from)
		if found[0].Type == volume.Btrfs && changed >= from+4 && changed < from+0x20 {
			return // reserved for longer checksums, which are not used here
		}
		head[changed] ^= wrong
		for _, sb := range findSuperblocks(head) {
			if sb.ChecksumOK {
				t.Fatalf("the byte at %d is wrong, but the checksum passes: %+v", changed, sb)
			}
		}
	})
}

// withChecksum returns the head of a disk with a superblock of that content and the right checksum,
// and the superblock's range.
func withChecksum(kind int, body []byte) (head []byte, from, to int) {
	head = make([]byte, superblockBytes)
	switch kind {
	case 0:
		from, to = extOffset, extOffset+extBytes
		b := head[from:to]
		copy(b, body)
		clear(b[0x18:0x1C]) // blocks of 1 KiB
		binary.LittleEndian.PutUint16(b[0x38:], 0xEF53)
		b[0x65] |= extROMetadataChecksum >> 8
		b[0x175] = 1
		binary.LittleEndian.PutUint32(b[0x3FC:], ^crc32.Checksum(b[:0x3FC], castagnoli))
	case 1:
		from, to = 0, 512
		b := head[from:to]
		copy(b, body)
		copy(b, "XFSB")
		binary.BigEndian.PutUint16(b[100:], 5)
		binary.BigEndian.PutUint16(b[102:], 512)
		clear(b[224:228])
		binary.LittleEndian.PutUint32(b[224:], crc32.Checksum(b, castagnoli))
	default:
		from, to = btrfsOffset, btrfsOffset+btrfsBytes
		b := head[from:to]
		copy(b, body)
		copy(b[0x40:], "_BHRfS_M")
		clear(b[0xC4:0xC6])
		binary.LittleEndian.PutUint32(b, crc32.Checksum(b[0x20:], castagnoli))
	}
	return head, from, to
}

// FuzzBlkid checks that the result of parsing is in the output of blkid, and that output with
// neither a type nor a table is an error.
func FuzzBlkid(f *testing.F) {
	f.Fuzz(func(t *testing.T, output string) {
		a, err := parseBlkid(output)
		if (err == nil) != (a != "") || strings.Contains(a, "\n") {
			t.Fatalf("parseBlkid(%q) = %q, %v", output, a, err)
		}
		if volume.IsFilesystem(a) && !slices.ContainsFunc(strings.Split(output, "\n"),
			func(line string) bool { return strings.TrimSpace(line) == "TYPE="+a }) {
			t.Fatalf("parseBlkid(%q) = %q", output, a)
		}
	})
}

func TestParseBlkid(t *testing.T) {
	for output, want := range map[string]string{ // "" is an error
		"DEVNAME=x\nPTTYPE=gpt\n":                 "a partition table (gpt)",
		"LABEL=TYPE=xfs\nTYPE=swap\nPTTYPE=dos\n": "swap and a partition table (dos)",
		"LABEL=TYPE=xfs\n":                        "",
		"TYPE=\n":                                 "",
	} {
		if got, err := parseBlkid(output); got != want || (err != nil) != (want == "") {
			t.Errorf("parseBlkid(%q) = %q, %v, want %q", output, got, err, want)
		}
	}
}

// FuzzSizes checks that no size read from a disk overflows.
func FuzzSizes(f *testing.F) {
	largest := big.NewInt(math.MaxInt64)
	f.Fuzz(func(t *testing.T, a, b uint64) {
		want := new(big.Int).Mul(new(big.Int).SetUint64(a), new(big.Int).SetUint64(b))
		if want.Cmp(largest) > 0 {
			want = largest
		}
		if got := product(a, b); got != want.Int64() {
			t.Fatalf("product(%d, %d) = %d, want %s", a, b, got, want)
		}
	})
}
