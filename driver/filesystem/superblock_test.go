//go:build linux

package filesystem

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"io"
	"log/slog"
	"math"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

var someUUID = uuid.NewString()

func startOf(t *testing.T, file string) []byte {
	t.Helper()
	f := csitest.Got(os.Open(file))(t)
	defer func() { _ = f.Close() }()
	head := make([]byte, headBytes)
	csitest.Must(t, csitest.Err(f.ReadAt(head, 0)))
	return head
}

func TestExtSuperblockReportsEarlierMountsAndTheNeedForE2fsck(t *testing.T) {
	file := guesttest.New(t).Sparse(64 * mib)
	guesttest.Run(t, "mke2fs", "-q", "-F", "-t", "ext4", file)
	head := startOf(t, file)
	for _, c := range []struct {
		at             int
		value          byte
		unclean, fresh bool
	}{
		{0x60, head[extOffset+0x60] | extIncompatRecover, false, false}, // the kernel replays the journal
		{0x3A, 0, true, true},
		{0x3A, extStateValid | extStateError, true, true},
		{0x194, 1, true, true},
		{0xE8, 12, true, true},
		{0x34, 1, false, false}, // it was mounted
	} {
		b := append([]byte(nil), head...)
		b[extOffset+c.at] = c.value
		if sb, ok := extSuperblock(b); !ok || sb.Unclean != c.unclean || sb.Fresh != c.fresh {
			t.Errorf("byte %#x = %d: %t, %t, want %+v", c.at, c.value, sb.Unclean, sb.Fresh, c)
		}
	}
}

func TestE2fsckFindsTheSuperblockCopyWhereTheDriverExpectsIt(t *testing.T) {
	for _, options := range []string{"ext4 -b 1024", "ext4 -b 1024 -O bigalloc -C 16384",
		"ext4 -b 2048", "ext4 -b 4096", "ext4 -b 4096 -O bigalloc -C 8192", "ext3 -b 1024"} {
		file := guesttest.New(t).Sparse(gib)
		guesttest.Run(t, "mke2fs", strings.Fields("-q -F -t "+options+" "+file)...)
		sb, _ := extSuperblock(startOf(t, file))
		sb.Damaged = true // e2fsck then reads the copy, and fails if it is not in that block
		cmd := exec.Command("e2fsck", append(growCheck(state{Filesystem: sb, Growing: true}, Volume{}),
			file)...)
		if out, err := cmd.CombinedOutput(); cmd.ProcessState.ExitCode()&^fsckCorrected != 0 {
			t.Errorf("%s: %v: %v\n%s", options, cmd.Args, err, out)
		}
	}
}

func FuzzFindSuperblocks(f *testing.F) {
	ext := make([]byte, extOffset+extBytes)
	binary.LittleEndian.PutUint16(ext[extOffset+0x38:], 0xEF53)
	f.Add(ext)
	xfs := make([]byte, 512)
	copy(xfs, "XFSB")
	binary.BigEndian.PutUint64(xfs[8:], 1<<63)
	binary.BigEndian.PutUint16(xfs[102:], 512)
	f.Add(xfs)
	f.Add([]byte("XFSB"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, head []byte) {
		// Put the input at the offset of btrfs' superblock, followed by zeroes in case it is short.
		far := append(make([]byte, btrfsOffset), head...)
		far = append(far, make([]byte, btrfsBytes)...)
		for _, b := range [][]byte{head, far} {
			for _, sb := range findSuperblocks(b) {
				if sb.SizeBytes < 0 || sb.UnitBytes < 0 || sb.Type == "" {
					t.Fatalf("found %+v", sb)
				}
				if sb.isExt() {
					table := extTableOf(b[extOffset:])
					if group := table.firstBad(b); table.Bytes < 0 ||
						int64(group)*table.descBytes >= max(table.Bytes, 1) {
						t.Fatalf("of %+v the group %d is bad", table, group)
					}
				}
			}
		}
	})
}

func TestAnXFSLogIsFreshOnlyIfNothingButMkfsWroteIt(t *testing.T) {
	header := []byte{0xFE, 0xED, 0xBA, 0xBE, 0, 0, 0, 1}
	later := []byte{0xFE, 0xED, 0xBA, 0xBE, 0, 0, 0, 2}
	for _, c := range []struct {
		name   string
		writes map[int][]byte
		fresh  bool
	}{
		{"as mkfs leaves it", map[int][]byte{0: header, 512: {1}}, true},
		{"whose record was lost in a power failure", nil, true},
		{"whose record has lost its first sector", map[int][]byte{512: {1}}, true},
		{"with another record after the first", map[int][]byte{0: header, 16 << 10: header}, false},
		{"with a record right behind the first", map[int][]byte{0: header, 8 << 10: header}, false},
		{"with a record after one that is lost", map[int][]byte{16 << 10: header}, false},
		{"of the second cycle", map[int][]byte{0: later}, false},
		{"that begins with something else", map[int][]byte{0: {1}}, false},
	} {
		log := make([]byte, 64<<10)
		for at, b := range c.writes {
			copy(log[at:], b)
		}
		if got := xfsLogFresh(log); got != c.fresh {
			t.Errorf("a log %s: fresh is %t", c.name, got)
		}
	}
}

// knownFeatures are features that Linux 6.18 supports on a single device and the driver allows:
// EXT4_FEATURE_*_SUPP, XFS_SB_VERSION_OKBITS, XFS_SB_FEAT_*_ALL, BTRFS_FEATURE_*_SUPP.
var knownFeatures = map[string]uint64{
	"s_rev_level": 1, "s_feature_compat": 0x1E3F, "s_feature_incompat": 0x3E7D6,
	"s_feature_ro_compat": 0x1A77F,
	"sb_versionnum":       0xFDF5, "sb_features2": 0x38A, "sb_features_ro_compat": 0xF,
	"sb_features_incompat": 0x1EF, "sb_features_log_incompat": 1,
	"flags": 3, "compat_ro_flags": 0xF, "incompat_flags": 0x10FFF, "csum_type": 3,
}

func TestOnlyKnownFilesystemFeaturesAreAllowed(t *testing.T) {
	for _, w := range slices.Concat(extFeatures, xfsFeatures, xfsV5Features, btrfsFeatures) {
		for bit := range 8 * w.Bytes {
			var sb Superblock
			b := make([]byte, w.At+w.Bytes)
			b[w.At+bit/8] = 1 << (bit % 8)
			sb.addFeatures(b, binary.LittleEndian, []featureWord{w})
			if allowed := knownFeatures[w.Field]>>bit&1 == 1; allowed != (sb.Refused == "") {
				t.Errorf("bit %d of %s: allowed is %t; refused for %q", bit, w.Field, allowed, sb.Refused)
			}
		}
	}
}

// The test formats disks with mkfs programs whose defaults and configuration differ, and with
// programs that ignore arguments.
func TestNewFilesystemsHaveExactlyTheDocumentedFeatures(t *testing.T) {
	config := filepath.Join(t.TempDir(), "mke2fs.conf")
	t.Setenv("MKE2FS_CONFIG", config)
	csitest.Must(t, os.WriteFile(config, []byte("[defaults]\nbase_features = has_journal,uninit_bg\n"+
		"inode_size = 128\n[fs_types]\next3 = {\nfeatures = extent\n}\n"+
		"ext4 = {\nfeatures = orphan_file,metadata_csum_seed\n}\n"), 0o600))
	page := csitest.Got(os.ReadFile("../../docs/configuration.md"))(t)
	defaults := `case "${0##*/} $*" in
mke2fs*) set -- ` + config + ` $real "$@"
	exec unshare -m sh -c 'mount --bind "$0" /etc/mke2fs.conf; exec "$@"' "$@";;
"mkfs.xfs "|*list-all|*sparse=*|*no-holes*) ;;
mkfs.xfs*) set -- -m rmapbt=1 -i sparse=0 "$@";;
mkfs.btrfs*) set -- -O ^no-holes "$@";;
esac
exec $real "$@"`
	disobedience := `exec $real $(echo "$@" | sed 's/bigtime=1/bigtime=0/
s/no-holes/^no-holes/
s/dir_index,//')`
	for fsType, features := range newFeatures {
		row := "| `" + fsType + "` | " + strings.ReplaceAll(features, " ", ", ") + " |\n"
		if !strings.Contains(string(page), row) {
			t.Errorf("docs/configuration.md does not have the row %s", row)
		}
		for name, script := range map[string]string{"defaults": defaults, "disobedience": disobedience} {
			t.Run(fsType+" by programs with other "+name, func(t *testing.T) {
				dir := t.TempDir()
				for _, name := range []string{"mke2fs", "mkfs.xfs", "mkfs.btrfs"} {
					real := csitest.Got(exec.LookPath(name))(t)
					csitest.Must(t, os.WriteFile(filepath.Join(dir, name),
						[]byte("#!/bin/sh\nreal="+real+"\n"+script), 0o700))
				}
				t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
				p := &Preparation{Device: openDisk(t, 512*mib), Scans: &ZeroScans{},
					Volume: Volume{ID: zeroVolume, SizeBytes: 512 * mib, FSType: fsType},
					Log:    slog.Default(), Begin: func(int64) error { return nil }}
				for range 2 { // the second call finds the result of the first
					_, err := p.Run(t.Context())
					if script == disobedience && (!csierr.Has(err, csierr.NodeToolFailed) ||
						!strings.Contains(err.Error(), features)) {
						t.Fatalf("want an error that names %q, got %v", features, err)
					} else if script == defaults {
						csitest.Must(t, err)
						head := csitest.Got(p.Device.Read(0, btrfsOffset+btrfsBytes))(t)
						wantNewFeatures(t, head, p.Volume)
					}
				}
			})
		}
	}
}

func wantNewFeatures(t *testing.T, head []byte, v Volume) {
	t.Helper()
	made := findSuperblocks(head)
	if len(made) != 1 || !slices.Equal(made[0].chosenFeatures(), v.newFeatures()) {
		t.Errorf("the disk holds %+v, want the features %q", made, v.newFeatures())
	} else if made[0].isExt() && binary.LittleEndian.Uint16(head[extOffset+0x58:]) < 256 {
		t.Error("the inodes are smaller than 256 bytes")
	} else if sb := made[0]; (sb.MetadataUUID == sb.UUID) == strings.Contains(sb.Features,
		"metadata_uuid") {
		t.Errorf("the UUIDs of the %s are %s and, in its metadata, %s", sb.Type, sb.UUID, sb.MetadataUUID)
	}
}

func TestAFailureOfBlkidIsNotTakenForABlankDisk(t *testing.T) {
	blank := filepath.Join(t.TempDir(), "blank")
	csitest.Must(t, os.WriteFile(blank, make([]byte, mib), 0o600))
	f := csitest.Got(os.Open(blank))(t)
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

func TestPreparationAcceptsOnlyAFilesystemWithTheVolumesUUID(t *testing.T) {
	d := openDisk(t, 64*mib)
	guesttest.Run(t, "mke2fs", "-q", "-t", "ext3", "-U", someUUID, d.Path)
	raw := guesttest.Disk{Loop: d.Path}
	raw.WriteAt(t, extOffset+0x34, []byte{1}) // it was mounted
	run := func(uuid string) error {
		v := Volume{FilesystemUUID: uuid, FSType: volume.Ext3, SizeBytes: d.SizeBytes}
		return csitest.Err((&Preparation{Device: d, Volume: v, Log: slog.Default(),
			Begin: func(int64) error { return nil }}).Run(t.Context()))
	}
	if err := run(zeroVolume); !csierr.Has(err, csierr.WrongFilesystem) {
		t.Errorf("with another UUID: %v", err)
	}
	t.Setenv("PATH", t.TempDir())
	csitest.Must(t, run(someUUID)) // without blkid
	raw.WriteAt(t, extOffset+0x3A, []byte{0})
	if err := run(someUUID); !csierr.Has(err, csierr.NodeToolFailed) {
		t.Errorf("not unmounted cleanly, without e2fsck: %v", err)
	}
	raw.WriteAt(t, extOffset+0x3A, []byte{extStateValid})
	raw.WriteAt(t, 0, []byte{1})
	if err := run(someUUID); !csierr.Has(err, csierr.NodeToolFailed) {
		t.Errorf("with something before it, without blkid: %v", err)
	}
}

func TestAnExtThatStillNeedsAReplayHasAFailedJournal(t *testing.T) {
	d := openDisk(t, mib)
	raw := guesttest.Disk{Loop: d.Path}
	raw.WriteAt(t, extOffset+0x38, []byte{0x53, 0xEF})
	for flags, want := range map[byte]bool{2: false, 2 | extIncompatRecover: true} {
		raw.WriteAt(t, extOffset+0x60, []byte{flags})
		if failed, err := JournalFailed(d); err != nil || failed != want {
			t.Errorf("with the flags %#x: %t, %v", flags, failed, err)
		}
	}
}

// The second half of this disk cannot be read, because the device is smaller than d.SizeBytes.
func TestInspectAndWipeFailIfTheDiskCannotBeRead(t *testing.T) {
	d := disk{openDisk(t, 64*mib)}
	d.SizeBytes *= 2
	if _, err := d.inspect(Volume{}); !csierr.Has(err, csierr.DeviceUnreadable) {
		t.Errorf("the disk is inspected: %v", err)
	}
	for to, check := range map[int64]byteCheck{d.SizeBytes: traces{}.check,
		mib: func([]byte, int64) (int, error) { return -1, io.EOF }} {
		at, err := findUnexpected(t.Context(), d.OpenDevice, 0, to, check, func(int64) {})
		if err == nil {
			t.Errorf("the disk is read to %d, and found is %d", to, at)
		}
	}
	if err := d.clearSectors(nil, []int64{64 * mib}, true); !csierr.Has(err, csierr.DeviceUnreadable) {
		t.Errorf("the disk is wiped: %v", err)
	}
}

func TestADiskInUseIsNotFormattedWipedOrGrown(t *testing.T) {
	p := &Preparation{Device: openDisk(t, 128*mib),
		Volume: Volume{ID: zeroVolume, SizeBytes: 128 * mib, FSType: volume.Btrfs}}
	d, v := disk{p.Device}, p.Volume
	made := csitest.Got(p.format(false, nil))(t)
	csitest.Must(t, d.writeRecords(RecordOf(v), RecordOffsets(d.SizeBytes)))
	another := v
	another.FilesystemUUID = someUUID
	holder := csitest.Got(os.OpenFile(d.Path, os.O_RDONLY|unix.O_EXCL, 0))(t)
	for name, step := range map[string]func() error{
		"a format":            func() error { return csitest.Err(p.format(true, []int64{0})) },
		"a wipe":              func() error { return d.wipe(v, []int64{0}) },
		"the end of a format": func() error { return d.finishFormat(another, made) },
		"a growth":            func() error { return p.growExt(state{Filesystem: made}) },
		"a raw publish":       func() error { return p.DropRecord(false) },
	} {
		if err := step(); !csierr.Has(err, csierr.DeviceHeld) {
			t.Errorf("%s on a disk that is in use: %v", name, err)
		}
	}
	csitest.Must(t, holder.Close())
	if d.clearSectors(holder, nil, true) == nil || d.eraseRecords(holder, nil, nil) == nil ||
		growXFS(holder, gib) == nil {
		t.Error("the error of a sync or an ioctl is lost")
	}
}

func TestAFormatRecordAtTheOffsetOfAGrowthRecordIsIgnored(t *testing.T) {
	v := Volume{ID: "v", DiskName: "d", SizeBytes: 16 * mib}
	slot := region{GrowthOffsets(v.SizeBytes)[0], sectorBytes, "a record"}
	s := scan{SizeBytes: v.SizeBytes, Found: []Superblock{{Type: volume.Ext4, SizeBytes: 8 * mib}},
		Regions: []regionData{{slot, csitest.Got(RecordOf(v).Encode())(t)}}}
	if s.takeRecords(v); len(s.Growth) != 0 {
		t.Errorf("it is taken for a record of a growth: %+v", s.Growth)
	}
}

func FuzzJudge(f *testing.F) {
	f.Add([]byte{}, []byte{}, "")
	f.Add([]byte{0, 1}, []byte{0}, "ext4")
	f.Add(make([]byte, 512), []byte("EFI PART"), "a partition table (gpt)")
	f.Fuzz(func(t *testing.T, head, sector []byte, found string) {
		s := scan{Path: "/dev/x", SizeBytes: 16 * mib,
			Found: findSuperblocks(head),
			Blkid: found, Regions: []regionData{
				{region{0, int64(len(head)), "the head"}, head},
				{region{RecordOffsets(16 * mib)[0], int64(len(sector)), "a sector"}, sector},
			}}
		clean := len(bytes.Trim(head, "\x00")) == 0 && len(bytes.Trim(sector, "\x00")) == 0
		s.takeRecords(Volume{})
		got, err := s.judge(Volume{ID: "v", DiskName: "d", SizeBytes: s.SizeBytes})
		if err == nil && got.Blank && (!clean || found != "") {
			t.Fatalf("called blank: head %q, sector %q, %q", head, sector, found)
		}
	})
}

// While a program has the device open, the kernel's cache keeps the bytes of a failed write. e2fsck
// would read these bytes, and find no error in a filesystem that is damaged on the disk.
func TestPreparationDropsTheKernelCache(t *testing.T) {
	g := guesttest.New(t)
	d := g.Attach(guesttest.Serial, 64*mib)
	program := csitest.Got(os.Open(d.Loop))(t)
	defer func() { csitest.Must(t, program.Close()) }()
	const at = 63 * mib
	sees := func() []byte {
		b := make([]byte, 4096)
		csitest.Must(t, csitest.Err(program.ReadAt(b, at)))
		return b
	}
	kept, has := sees(), bytes.Repeat([]byte{7}, 4096)
	file := csitest.Got(os.OpenFile(d.File, os.O_WRONLY, 0))(t)
	csitest.Must(t, csitest.Err(file.WriteAt(has, at)))
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

// A valid record allows the driver to repeat a format, so ParseRecord must refuse a record with one
// wrong bit.
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
			return // unused: the field has 32 bytes, and crc32c uses 4
		}
		head[changed] ^= wrong
		for _, sb := range findSuperblocks(head) {
			if sb.ChecksumOK {
				t.Fatalf("the byte at %d is wrong, but the checksum passes: %+v", changed, sb)
			}
		}
	})
}

// withChecksum returns the head of a disk with a valid superblock, and the superblock's range.
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

func TestTheTypeAndThePartitionTableAreReadFromBlkidsOutput(t *testing.T) {
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
