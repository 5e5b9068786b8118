//go:build linux

package filesystem

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// The test tries combinations of mkfs options on disks of several sizes. mkfs must also refuse what
// the driver refuses, except options whose inodes would fill over half of the disk.
func TestMkfsAcceptsTheOptionsThatTheDriverAccepts(t *testing.T) {
	type format struct {
		fsType, options string
		size            int64
	}
	type option struct{ name, values string }
	ratio := option{"bytesPerInode", "1024 1025 1400 2048 2100 3000 4096 67108864"}
	inode := option{"inodeSize", "256 512 1024 2048"}
	block := option{"fsBlockSize", "1024 2048 4096"}
	var formats []format
	for _, c := range []struct {
		fsType  string
		gib     []int64
		options []option
	}{
		{volume.Ext4, []int64{1, 2, 3}, []option{ratio, inode, block}},
		// Small blocks make many block groups, whose descriptors need more space than one group has.
		{volume.Ext4, []int64{720, 1023}, []option{{"bytesPerInode", "1024 2100"},
			{"inodeSize", "512 1024"}, block}},
		// mke2fs writes the whole inode tables of an ext3, so these disks are small.
		{volume.Ext3, []int64{1, 2}, []option{ratio, inode, block}},
		{volume.XFS, []int64{1, 1023}, []option{inode, block, {"reflink", "true false"}}},
		{volume.Btrfs, []int64{1, 1023}, []option{{"nodeSize", "4096 8192 16384 32768 65536"},
			{"label", "abcdefghijkl"}}},
	} {
		combinations := []string{""}
		for _, o := range c.options {
			for _, others := range slices.Clone(combinations) {
				for value := range strings.FieldsSeq(o.values) {
					combinations = append(combinations, strings.TrimPrefix(others+","+o.name+"="+value, ","))
				}
			}
		}
		for _, options := range combinations {
			for _, n := range c.gib {
				formats = append(formats, format{c.fsType, options, n * gib})
			}
		}
	}
	accepted, refused := 0, 0
	for _, c := range short.Some(t, 60, formats) {
		o, err := volume.ParseMkfsOptions(c.options)
		csitest.Must(t, err)
		if o.Check(c.fsType, 0) != nil {
			continue
		}
		err = o.Check(c.fsType, c.size)
		file := guesttest.New(t).Sparse(c.size)
		v := Volume{FSType: c.fsType, Mkfs: o}
		made := mkfs(t, v, file)
		head := startOf(t, file)
		csitest.Must(t, os.Remove(file))
		number := func(name string, unset int) int {
			if n, err := strconv.Atoi(o.Value(name)); err == nil {
				return n
			}
			return unset
		}
		switch {
		case err == nil && made.Exit != 0:
			t.Errorf("%s with %q on %d GiB is accepted: %v", c.fsType, c.options, c.size/gib, made)
		case err != nil && made.Exit == 0 && number("bytesPerInode", 16384) >= 2*number("inodeSize", 256):
			t.Errorf("%s with %q on %d GiB is refused, but mkfs makes it: %v", c.fsType, c.options,
				c.size/gib, err)
		case err == nil:
			accepted++
			wantNewFeatures(t, head, v)
		default:
			refused++
		}
	}
	t.Logf("%d accepted, %d refused", accepted, refused)
	if accepted == 0 || refused == 0 {
		t.Errorf("%d are accepted and %d refused", accepted, refused)
	}
}

func mkfs(t *testing.T, v Volume, path string, size ...string) toolResult {
	t.Helper()
	name, args, err := mkfsCommand(v)
	csitest.Must(t, err)
	made := csitest.Got(runTool(nil, name, append(append(args, path), size...)...))(t)
	return made
}

// The driver can repeat an unfinished format only if some record of a disk survives every mkfs,
// with any options, and if the driver recognizes every byte that mkfs wrote. With PROOF_DURATION
// set, the test tries all combinations.
func TestMkfsKeepsAFormatRecordAndWritesOnlyRecognizedBytes(t *testing.T) {
	long := os.Getenv("PROOF_DURATION") != ""
	sizes := []int64{64 * mib, 300 * mib, gib, 1023 * gib}
	if long {
		sizes = append(sizes, 128*mib, 1500*mib, 3*gib, 10*gib, 100*gib)
	}
	type disk struct {
		size            int64
		block           int
		fsType, options string
	}
	var cases []disk
	for s, size := range sizes {
		for f, fsType := range volume.Filesystems {
			for i, options := range slotOptions(fsType, size) {
				// A large ext3 takes long, because mkfs writes all of its inode tables.
				if !long && (size >= gib && i > 1 || size > gib && fsType == volume.Ext3) {
					break
				}
				for b, block := range volume.BlockSizes {
					if long || (s+f+i)%len(volume.BlockSizes) == b {
						cases = append(cases, disk{size, block, fsType, options})
					}
				}
			}
		}
	}
	cases = short.Some(t, 8, cases)
	tried := 0
	for _, c := range cases {
		t.Run(fmt.Sprintf("%s of %d MiB in blocks of %d with %q", c.fsType, c.size/mib,
			c.block, c.options), func(t *testing.T) {
			if mkfsAmongRecords(t, c.size, c.block, c.fsType, c.options) {
				tried++
			}
		})
	}
	if tried < min(20, len(cases)/4) {
		t.Fatalf("only %d filesystems could be made", tried)
	}
}

// slotOptions returns mkfs options with the extreme values that a StorageClass may contain. For
// huge disks it omits options with which mkfs writes to a large part of the disk.
func slotOptions(fsType string, size int64) []string {
	switch fsType {
	case volume.Ext3, volume.Ext4:
		few := []string{"", "bytesPerInode=67108864", "fsBlockSize=1024", "fsBlockSize=2048"}
		if (fsType == volume.Ext3 && size > 3*gib) || size > 100*gib {
			return few[:2]
		}
		return append(few, "bytesPerInode=1024", "bytesPerInode=4096,inodeSize=2048,fsBlockSize=4096",
			"inodeSize=1024", "bytesPerInode=2048,fsBlockSize=4096,inodeSize=512", "reservedPercent=50",
			"label=data", "bytesPerInode=1024,inodeSize=256,fsBlockSize=1024")
	case volume.XFS:
		return []string{"", "fsBlockSize=1024", "fsBlockSize=2048", "inodeSize=2048", "reflink=false",
			"inodeSize=1024,fsBlockSize=2048", "label=data"}
	}
	return []string{"", "nodeSize=4096", "nodeSize=32768", "nodeSize=65536", "label=data"}
}

func mkfsAmongRecords(t *testing.T, size int64, block int, fsType, options string) bool {
	t.Helper()
	g := guesttest.New(t)
	d := g.Attach(guesttest.Serial, size, guesttest.BlockSize(block))
	parsed := csitest.Got(volume.ParseMkfsOptions(options))(t)
	v := Volume{ID: zeroVolume, DiskName: "d", SizeBytes: size, FSType: fsType, Mkfs: parsed}
	record := csitest.Got(RecordOf(v).Encode())(t)
	for _, slot := range RecordOffsets(size) {
		d.WriteAt(t, slot, record)
	}
	if mkfs(t, v, d.Loop).Exit != 0 {
		return false // mkfs refuses some of these options and sizes
	}
	wantNewFeatures(t, d.ReadAt(t, 0, btrfsOffset+btrfsBytes), v)
	left := 0
	for _, slot := range RecordOffsets(size) {
		if bytes.Equal(d.ReadAt(t, slot, int64(len(record))), record) {
			left++
			d.WriteAt(t, slot, make([]byte, len(record)))
		}
	}
	if left == 0 {
		t.Error("no record is left")
	}
	if at := firstUnexplained(t, d, 0, expected{Mkfs: true}); at >= 0 {
		t.Errorf("the sector of the byte at %d: %x", at, d.ReadAt(t, at&^(sectorBytes-1), sectorBytes))
	}
	return true
}

func TestDropRecordSkipsMountedAndReadOnlyDisks(t *testing.T) {
	own := Volume{ID: "v", DiskName: "d", SizeBytes: 64 * mib, FSType: volume.Ext4}
	readOnly, another, moved := own, own, own
	readOnly.ReadOnly, another.ID, moved.DiskName = true, "w", "e"
	for name, c := range map[string]struct {
		volume  Volume
		mounted bool
		left    int
	}{
		"of a disk that is free":      {own, false, 0},
		"of a disk that is mounted":   {own, true, 3},
		"of a disk that is read-only": {readOnly, false, 3},
		"of another volume's format":  {another, false, 0},
		"of another disk's format":    {moved, false, 0},
	} {
		device := openDisk(t, own.SizeBytes)
		csitest.Must(t, disk{device}.writeRecords(RecordOf(own), RecordOffsets(own.SizeBytes)))
		csitest.Must(t, (&Preparation{Device: device, Volume: c.volume}).DropRecord(c.mounted))
		left := 0
		for _, at := range RecordOffsets(own.SizeBytes) {
			b := csitest.Got(device.Read(at, sectorBytes))(t)
			if _, err := ParseRecord(b); err == nil {
				left++
			}
		}
		if left != c.left {
			t.Errorf("%s: %d records are left, want %d", name, left, c.left)
		}
	}
}

// firstUnexplained returns the offset of the first byte at or after from that e forbids, or -1.
func firstUnexplained(t *testing.T, d *guesttest.Disk, from int64, e expected) int64 {
	t.Helper()
	guesttest.Run(t, "blockdev", "--flushbufs", d.Loop)
	f := csitest.Got(os.Open(d.File))(t)
	defer func() { _ = f.Close() }()
	m := traces{expected: e, sizeBytes: d.SizeBytes, read: func(offset, n int64) ([]byte, error) {
		b := make([]byte, n)
		_, err := f.ReadAt(b, offset)
		return b, err
	}}
	for at := from; ; {
		from, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return -1
		}
		csitest.Must(t, err)
		b := make([]byte, min(chunkBytes, d.SizeBytes-from))
		csitest.Must(t, csitest.Err(f.ReadAt(b, from)))
		i := csitest.Got(m.check(b, from))(t)
		if i >= 0 {
			return from + int64(i)
		}
		at = from + int64(len(b))
	}
}

func TestWorkloadDataIsNotRecognizedAsWrittenByATool(t *testing.T) {
	at := func(offset int, b []byte) []byte {
		sector := make([]byte, sectorBytes)
		copy(sector[offset:], b)
		return sector
	}
	padded := func(text string) []byte { return at(0, []byte(text)) }
	random := at(0, nil)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(random)
	text := []byte(strings.Repeat("All that a workload has written stays. ", 128))[:sectorBytes]
	const slot = 24 << 20
	record := csitest.Got(Record{Volume: "v", Disk: "d"}.Encode())(t)[:recordBytes]
	mkfs, own := expected{Mkfs: true}, uuid.MustParse(someUUID)
	growth := func(fsType string) expected {
		return expected{Growth: fsType, UUID: own, NodeBytes: 16 << 10}
	}
	for _, c := range []struct {
		name   string
		sector []byte
		at     int64
		by     expected
	}{
		{"random bytes", random, 8 << 20, mkfs},
		{"one value", bytes.Repeat([]byte{0xAA}, sectorBytes), 8 << 20, mkfs},
		{"a text", text, 8 << 20, mkfs},
		{"a hundred bytes of text", at(700, text[:100]), 8 << 20, mkfs},
		{"a single byte at the start of the disk", at(5, []byte{1}), 0, mkfs},
		{"a torn text where btrfs has its superblock", at(512, text[512:]), btrfsOffset, mkfs},
		{"a superblock with something before it", slices.Concat(text[:extOffset],
			make([]byte, sectorBytes-extOffset)), 0, mkfs},
		{"a text right behind a record", slices.Concat(record, text[recordBytes:]), slot, mkfs},
		{"a text behind an xfs's list of free blocks", slices.Concat(padded("XAFL")[:512], text[512:]),
			8 << 20, mkfs},
		{"a text behind an ext4 that grows", text, 8 << 20, growth(volume.Ext4)},
		{"a text behind an xfs", padded("what somebody else has written"), 8 << 20, growth(volume.XFS)},
		{"another xfs behind an xfs", padded("XFSB"), 8 << 20, growth(volume.XFS)},
		{"another btrfs behind a btrfs", padded(strings.Repeat("\x00", 48) + "\x00\x00\x50\x00\x00" +
			"\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01"), 8 << 20, growth(volume.Btrfs)},
		{"a text behind a copy of a block of the btrfs", text, 8<<20 + 20<<10, growth(volume.Btrfs)},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := traces{expected: c.by, sizeBytes: gib, slots: []int64{slot},
				read: func(at, n int64) ([]byte, error) {
					b := make([]byte, n)
					if at%(64<<10) == 0 { // the head of a block
						copy(b[btrfsFSID:], own[:])
					}
					return b, nil
				}}
			i, err := m.check(slices.Concat(make([]byte, sectorBytes), c.sector), c.at-sectorBytes)
			if c.at == 0 {
				i, err = m.check(c.sector, 0)
				i += sectorBytes
			}
			if csitest.Must(t, err); i < sectorBytes {
				t.Fatalf("it is recognized as written by a tool of the driver: %d", i)
			}
		})
	}
}

// No mkfs program of the driver writes a block with one of these changes.
func TestOnlyBlocksThatMkfsCanWriteAreRecognized(t *testing.T) {
	const blocks, last = 1 << 20, extBytes - 12
	block := func(parts map[int][]byte) []byte {
		b := make([]byte, extBytes)
		for at, part := range parts {
			copy(b[at:], part)
		}
		return b
	}
	journal := block(map[int][]byte{0: {0x0A, 0xF3, 9, 0, 84}, last + 8: []byte("csum")})
	for i := range uint32(9) {
		entry := binary.LittleEndian.AppendUint32(nil, i<<15)
		entry = binary.LittleEndian.AppendUint32(entry, 1<<15)
		copy(journal[12+12*i:], binary.LittleEndian.AppendUint32(entry, 9000+i*33000))
	}
	type change struct{ at, by int }
	for _, c := range []struct {
		name    string
		is      func([]byte) bool
		whole   []byte
		changes map[string]change
	}{
		{"the extents of a journal", func(b []byte) bool { return extExtents(b, blocks) }, journal,
			map[string]change{
				"another structure": {0, 1}, "fewer entries than there are": {2, -1},
				"more entries than there are": {2, 1}, "more entries than fit": {2, 76},
				"a list of other such blocks": {6, 1}, "a generation": {8, 1}, "a hole": {24, 1},
				"an empty extent": {113, -0x80}, "an extent that is unwritten": {112, 1},
				"a block behind 2^32": {114, 1}, "a block behind the disk's end": {119, 1},
				"a block before the last one": {118, -1}, "a text behind the entries": {120, 'a'},
			}},
		{"a directory", extDirectory, block(map[int][]byte{0: {2, 0, 0, 0, 12, 0, 1, 2, '.'},
			last: {0, 0, 0, 0, 12, 0, 0, 0xDE, 1}}), map[string]change{
			"another inode": {0, 1}, "another name": {8, 1}, "a text behind the names": {64, 'a'},
			"another tail": {last, 1},
		}},
		{"an empty directory block", extDirectory, block(map[int][]byte{4: {0xF4, 3}}),
			map[string]change{"an inode": {0, 5}, "a name": {6, 1}}},
		{"the end of an orphan file", extDirectory, block(map[int][]byte{last + 4: {4, 0xCA, 0x10, 11}}),
			map[string]change{"an orphan": {last, 1}, "another structure": {last + 4, 1}}},
		{"descriptors", func(b []byte) bool { return extDescriptors(b, 64, blocks, 2) },
			block(map[int][]byte{64: {9, 0, 0, 0, 10, 0, 0, 0, 11}, 64 + 0x10: {2, 0, 7}}),
			map[string]change{
				"a block behind the disk's end": {64 + 6, 0x11}, "three directories": {64 + 0x10, 1},
				"another flag": {64 + 0x12, 1}, "a snapshot": {64 + 0x14, 1},
				"a block behind 2^32": {64 + 0x20, 1}, "a reserved number": {64 + 0x3C, 1},
			}},
		{"the header of a tree block", btrfsFirstHeader,
			block(map[int][]byte{50: {0x50}, 63: {1}, 80: {1}}), map[string]change{
				"a longer checksum": {4, 1}, "an address within a sector": {48, 1}, "another flag": {56, 2},
				"another revision": {63, 1}, "a later generation": {80, 16}, "4096 items": {97, 0x10},
				"a higher level": {100, 2},
			}},
	} {
		if !c.is(c.whole) {
			t.Errorf("%s: it is not recognized", c.name)
		}
		for name, change := range c.changes {
			b := slices.Clone(c.whole)
			if b[change.at] += byte(change.by); c.is(b) {
				t.Errorf("%s with %s: it is recognized", c.name, name)
			}
		}
	}
}

func TestAWipeClearsTheHeadsOfBtrfsBlocksLast(t *testing.T) {
	d := disk{openDisk(t, 16*mib)}
	raw := guesttest.Disk{Loop: d.Path}
	block := bytes.Repeat([]byte{7}, sectorBytes)
	raw.WriteAt(t, 0, block)
	clear(block[4:101])
	block[63] = 1 // the header of a tree block
	raw.WriteAt(t, 4*sectorBytes, block)
	copy(block[63:], "\x00_BHRfS_M")
	raw.WriteAt(t, btrfsOffset, block)
	if err := d.wipe(Volume{}, nil); !csierr.Has(err, csierr.DiskNotBlank) {
		t.Errorf("a disk with other data than the named is wiped: %v", err)
	}
	csitest.Must(t, d.WithExclusive(func(w *os.File) error {
		return d.clearSectors(w, []int64{0}, false)
	}))
	for at, kept := range map[int64]int{0: 0, 4 * sectorBytes: 512, btrfsOffset: 512} {
		b := csitest.Got(d.Read(at, sectorBytes))(t)
		if got := len(bytes.TrimRight(b, "\x00")); got != kept {
			t.Errorf("of the block at %d are left %d bytes, want %d", at, got, kept)
		}
	}
	csitest.Must(t, d.wipe(Volume{}, []int64{0}))
}

// The driver can repeat a growth that was cut off only if it recognizes everything that resize2fs
// writes behind the old end of the filesystem, and no bytes of another filesystem.
func TestAllBytesThatResize2fsWritesAreRecognized(t *testing.T) {
	type growth struct {
		fsType, options string
		from, to        int64
	}
	var cases []growth
	for _, fsType := range []string{volume.Ext3, volume.Ext4} {
		for i, options := range slotOptions(fsType, 64*mib) {
			cases = append(cases, growth{fsType, options, 64 * mib, 300 * mib})
			if i <= 1 || os.Getenv("PROOF_DURATION") != "" { // PROOF_DURATION tries all options
				cases = append(cases, growth{fsType, options, gib, 10 * gib})
			}
		}
	}
	for _, c := range short.Some(t, 4, cases) {
		t.Run(fmt.Sprintf("%s with %q from %d to %d MiB", c.fsType, c.options, c.from/mib,
			c.to/mib), func(t *testing.T) {
			d := guesttest.New(t).Attach(guesttest.Serial, c.to)
			options := csitest.Got(volume.ParseMkfsOptions(c.options))(t)
			made := mkfs(t, Volume{ID: zeroVolume, FSType: c.fsType, Mkfs: options}, d.Loop,
				fmt.Sprint(c.from>>10, "k"))
			if made.Exit != 0 {
				t.Fatal(made)
			}
			guesttest.Run(t, "e2fsck", "-f", "-p", d.Loop)
			end := Superblock{Type: c.fsType}.largest(d.SizeBytes)
			guesttest.Run(t, "resize2fs", d.Loop, fmt.Sprint(end>>10, "K"))
			own := expected{Growth: c.fsType, UUID: uuid.MustParse(zeroVolume)}
			if at := firstUnexplained(t, d, c.from, own); at >= 0 {
				t.Errorf("the byte at %d is not recognized: %x", at, d.ReadAt(t, at&^(extBytes-1), extBytes))
			}
			if at := firstUnexplained(t, d, end, expected{}); at >= 0 {
				t.Errorf("resize2fs wrote at %d, where the records are", at)
			}
			if at := firstUnexplained(t, d, c.from, expected{}); at < 0 {
				t.Error("resize2fs wrote nothing behind the old end")
			}
			other := own
			other.UUID[0]++
			if at := firstUnexplained(t, d, c.from, other); at < 0 {
				t.Error("the copies of another filesystem's superblock are recognized, too")
			}
		})
	}
}

// acceptedFlags lists the accepted mount flags, numeric flags with their lowest and highest value.
func acceptedFlags(t *testing.T, fsType string) []string {
	t.Helper()
	candidates := strings.Fields("journal ordered writeback abort ignore remount-ro v2 sync async " +
		"zlib zlib:1 zlib:9 lzo zstd zstd:1 zstd:15 no none 16k 64K 256k 1m 1g")
	var numbers []int
	for n := range 1025 {
		numbers = append(numbers, n)
	}
	for n := range 32 {
		numbers = append(numbers, 1<<n-1, 1<<n)
	}
	numbers = append(numbers, 1000000)
	slices.Sort(numbers)
	set := volume.FilesystemFlags[fsType]
	flags := slices.Concat(set.Words, strings.Fields("ro noatime sync dirsync lazytime nosymfollow"))
	for name, values := range set.Values {
		before := len(flags)
		for _, value := range candidates {
			if values.Contains(value) {
				flags = append(flags, name+"="+value)
			}
		}
		takesNumber := func(n int) bool { return values.Contains(strconv.Itoa(n)) }
		if least := slices.IndexFunc(numbers, takesNumber); least >= 0 {
			flags = append(flags, fmt.Sprint(name, "=", numbers[least]))
			slices.Reverse(numbers)
			most := numbers[slices.IndexFunc(numbers, takesNumber)]
			flags = append(flags, fmt.Sprint(name, "=", most))
			slices.Reverse(numbers)
		}
		if len(flags) == before {
			t.Fatalf("no value of %s is tried", name)
		}
	}
	slices.Sort(flags)
	return slices.Compact(flags)
}

func TestFilesystemsMountWithAllAcceptedFlags(t *testing.T) {
	for _, fsType := range volume.Filesystems {
		t.Run(fsType, func(t *testing.T) {
			d := openDisk(t, 512*mib)
			if made := mkfs(t, Volume{FSType: fsType}, d.Path); made.Exit != 0 {
				t.Fatal(made)
			}
			flags := acceptedFlags(t, fsType)
			var pairs [][]string
			for _, first := range flags {
				for _, second := range flags {
					if first != second {
						pairs = append(pairs, []string{first, second})
					}
				}
			}
			tried := slices.Collect(slices.Chunk(flags, 1))
			for _, flags := range append(tried, short.Some(t, 100, pairs)...) {
				o, err := volume.ParseMountFlags(fsType, flags)
				if err != nil && len(flags) == 2 {
					continue // the two flags contradict each other
				}
				csitest.Must(t, err)
				m, err := Mount(d, fsType, o)
				if err != nil {
					t.Errorf("with %q: %v", flags, err)
					continue
				}
				csitest.Must(t, m.Close())
				o.SetReadOnly()
				csitest.Must(t, d.SetReadOnly(true))
				m, err = Mount(d, fsType, o)
				csitest.Must(t, d.SetReadOnly(false))
				if err != nil {
					t.Errorf("read-only, with %q: %v", flags, err)
					continue
				}
				csitest.Must(t, m.Close())
			}
		})
	}
}

// The driver mounts a busy device to thaw a filesystem on it. If the device is not busy any more,
// the mount must not replay the journal, because the device may be a workload's raw device.
func TestThawingAnUnmountedFilesystemReplaysNoJournal(t *testing.T) {
	sizes := map[string]int64{volume.Ext3: 64 * mib, volume.Ext4: 64 * mib,
		volume.XFS: 300 * mib, volume.Btrfs: 128 * mib}
	for _, fsType := range volume.Filesystems {
		t.Run(fsType, func(t *testing.T) {
			g := guesttest.New(t)
			d := g.Attach(guesttest.Serial, sizes[fsType])
			guesttest.Run(t, "mkfs."+fsType, "-q", d.Loop)
			dir := t.TempDir()
			guesttest.Run(t, "mount", "-o", "noatime", d.Loop, dir)
			guesttest.Run(t, "dd", "if=/dev/urandom", "of="+dir+"/file", "bs=64k", "count=4",
				"conv=fsync", "status=none")
			guesttest.Run(t, "cp", "--sparse=always", d.File, d.File+".cut")
			csitest.Must(t, unix.Unmount(dir, 0))
			guesttest.Run(t, "dd", "if="+d.File+".cut", "of="+d.Loop, "bs=1M", "conv=fsync", "status=none")
			same := d.Same(t)
			device := openLocked(t.Context(), t, g)
			csitest.Must(t, thawUnmounted(slog.Default(), device))
			csitest.Must(t, device.Close())
			same()
		})
	}
}
