//go:build linux

package corpus_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

// featureImage describes a filesystem whose features are set by mkfs options, or by a patch.
type featureImage struct {
	fs      string
	options []string
	patch   []fieldValue
}

type fieldValue struct {
	field
	value uint64
	or    bool // keeps the other bits of the field
}

type field struct {
	name      string
	at, bytes int64
}

// layout describes how to make a filesystem, and the offsets of fields in its superblock.
type layout struct {
	tool      []string // the program, with arguments that all images need
	size      int64
	offset, n int64
	order     binary.ByteOrder
	sum       func([]byte)
	features  []field
	// structures contains feature bits for which mkfs makes structures on the disk. No patch sets
	// these bits, because a filesystem without the structures is damaged.
	structures []string
	// specials contains values that refer to another device, or that prevent a mount.
	specials []fieldValue
	// groups contains groups of mkfs options. An image has at most one option of each group.
	groups [][]string
}

func TestAFilesystemWithUnusualFeaturesIsMountedOrRefusedUnchanged(t *testing.T) {
	c := &tally{lab: newLab(t, "features"), outcomes: map[outcome]int{}, features: true}
	p := c.p
	all, rest := featureImages()
	of := len(all) + len(rest)
	p.Rand().Shuffle(len(rest), func(i, j int) { rest[i], rest[j] = rest[j], rest[i] })
	switch {
	case p.Short():
		short.Left(t, len(all)+sampledImages-2*shortImages)
		p.Rand().Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		all, rest = all[:shortImages], rest[:shortImages]
	case !p.Long():
		rest = rest[:sampledImages]
	}
	c.round(t.Context(), chosen(t, append(all, rest...)), p.Seed)
	p.Figure("images", c.disks, "of", of, "not_made", c.notMade, "mounted", c.outcomes[mounted],
		"refused", c.outcomes[refused], "internal", c.internal, "wrote", c.overwritten)
	p.Bystanders.Report()
	if os.Getenv("PROOF_ONLY") != "" || p.Over() {
		return
	}
	if c.disks == 0 || !p.Short() && (c.outcomes[mounted] == 0 || c.outcomes[refused] == 0) {
		t.Error("no image was mounted, or none was refused")
	}
	if p.Long() && c.notMade > of/5 {
		t.Errorf("mkfs refuses the options of %d images of %d", c.notMade, of)
	}
}

const (
	sampledImages = 40
	shortImages   = 8
)

var errNotMade = errors.New("mkfs refuses the options")

func (i featureImage) generator() generator {
	return generator{i.String(), func(t *trial) {
		t.FS, t.Size, t.History, t.Fill = i.fs, layouts[i.fs].size, nil, i.fill
		t.Want = want{Outcome: either, Reasons: []string{feature, notBlank}, Names: i.names()}
	}}
}

func (i featureImage) String() string {
	if i.patch == nil {
		return "mkfs of " + i.fs + " " + strings.Join(i.options, " ")
	}
	var words []string
	for _, v := range i.patch {
		words = append(words, fmt.Sprintf("%s %#x", v.name, v.value))
	}
	return i.fs + " with " + strings.Join(words, " and ")
}

// The evidence of a refusal must contain one of the words that names() returns.
func (i featureImage) names() []string {
	var names []string
	if i.patch == nil {
		for _, field := range layouts[i.fs].features {
			names = append(names, field.name+": ")
		}
		return names
	}
	for _, v := range i.patch {
		names = append(names, v.name+": ")
	}
	if i.fs == ext3 {
		names = append(names, "holds an ext4 filesystem") // features make it an ext4
	}
	return names
}

func (i featureImage) fill(im *image) {
	l := layouts[i.fs]
	if i.patch == nil {
		harness.Must(l.mkfs(im.bases, i.options, im.Path))
		return
	}
	im.copyIn(im.bases.get("to be patched: "+i.fs, l.size, func(base *image) {
		harness.Must(l.mkfs(base.bases, nil, base.Path))
	}), 0)
	b := im.read(l.offset, l.n)
	for _, v := range i.patch {
		v.set(b, l.order)
	}
	l.sum(b)
	im.write(l.offset, b...)
}

func (v fieldValue) set(superblock []byte, order binary.ByteOrder) {
	b := superblock[v.at : v.at+v.bytes]
	for i := range b {
		at := i
		if order == binary.BigEndian {
			at = len(b) - 1 - i
		}
		c := byte(v.value >> (8 * i))
		if v.or {
			c |= b[at]
		}
		b[at] = c
	}
}

// mkfs makes a filesystem that contains the payload. If an option begins with "then", the rest of
// it is a command that is then run on the new filesystem.
func (l layout) mkfs(bases *bases, options []string, path string) error {
	args, then := slices.Clone(l.tool), [][]string(nil)
	for _, option := range options {
		words := strings.Fields(option)
		at := slices.Index(args, words[0])
		switch {
		case words[0] == "then":
			then = append(then, words[1:])
		case at >= 0: // the option is given once, with all its values
			args[at+1] += "," + words[1]
		default:
			args = append(args, words...)
		}
	}
	args = append(args, bases.options(l.tool[0])...)
	for _, command := range append([][]string{args}, then...) {
		command = append(slices.Clone(command), path)
		if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %q: %w\n%s", errNotMade, command, err, out)
		}
	}
	return nil
}

// featureImages returns the images with one special value or a second disk, and then all others.
func featureImages() (special, all []generator) {
	special = foreignParts()
	for _, fs := range ours {
		l := layouts[fs]
		made := func(options ...string) {
			all = append(all, featureImage{fs: fs, options: options}.generator())
		}
		patched := func(patch ...fieldValue) generator {
			return featureImage{fs: fs, patch: patch}.generator()
		}
		for i, group := range l.groups {
			for _, option := range group {
				made(option)
				for _, other := range slices.Concat(l.groups[i+1:]...) {
					made(option, other)
				}
			}
		}
		for _, word := range l.features {
			for bit := range 8 * word.bytes {
				if !slices.Contains(l.structures, word.name+fmt.Sprintf(" %#x", 1<<bit)) {
					all = append(all, patched(fieldValue{field: word, value: 1 << bit, or: true}))
				}
			}
		}
		for i, v := range l.specials {
			special = append(special, patched(v))
			for _, other := range l.specials[i+1:] {
				if v.at != other.at || v.or {
					all = append(all, patched(v, other))
				}
			}
		}
	}
	return special, all
}

// alone returns a group of its own for each value, so that an image can have several of the values.
func alone(flag string, values ...string) (groups [][]string) {
	for _, v := range values {
		groups = append(groups, []string{flag + " " + v})
	}
	return groups
}

// oneOf returns one group with all values of the flag. An image can have only one of the values.
func oneOf(flag string, values ...string) [][]string {
	return [][]string{slices.Concat(alone(flag, values...)...)}
}

const otherUUID = "7d3c1f60-52c1-4f0e-8a57-2f5d1f0a9be1"

var extWords = []field{{"s_feature_compat", 0x5C, 4}, {"s_feature_incompat", 0x60, 4},
	{"s_feature_ro_compat", 0x64, 4}}

var layouts = map[string]layout{
	ext3: extLayout(ext3, nil),
	ext4: extLayout(ext4, slices.Concat(
		alone("-O", "^has_journal", "^resize_inode", "^dir_index", "sparse_super2", "fast_commit",
			"stable_inodes", "orphan_file", "^filetype", "meta_bg", "^extent", "^64bit", "^flex_bg",
			"ea_inode", "metadata_csum_seed", "large_dir", "inline_data", "encrypt", "casefold",
			"^sparse_super", "^large_file", "^huge_file", "^dir_nlink", "^extra_isize", "quota",
			"bigalloc", "project", "verity", "mmp", "^ext_attr"),
		oneOf("-O", "^metadata_csum", "^metadata_csum,uninit_bg", "^metadata_csum,^uninit_bg"),
		oneOf("-b", "1024", "2048", "4096", "65536"), oneOf("-I", "128", "256", "1024"),
		oneOf("-E", "lazy_itable_init=0", "packed_meta_blocks=1", "quotatype=prjquota",
			"encoding=utf8-12.1"),
		oneOf("then", "tune2fs -O metadata_csum_seed -U "+otherUUID, "tune2fs -O read-only"))),
	xfs: {structures: []string{"sb_versionnum 0x100", "sb_versionnum 0x800",
		"sb_features_ro_compat 0x2", "sb_features_incompat 0x4"},
		tool: []string{"mkfs.xfs", "-q", "-f"}, size: 512 * mib, n: 512,
		order: binary.BigEndian, sum: sumXFS,
		features: []field{{"sb_versionnum", 100, 2}, {"sb_features2", 200, 4},
			{"sb_features_compat", 208, 4}, {"sb_features_ro_compat", 212, 4},
			{"sb_features_incompat", 216, 4}, {"sb_features_log_incompat", 220, 4}},
		specials: []fieldValue{
			{field{"sb_logstart", 48, 8}, 0, false}, {field{"sb_rblocks", 16, 8}, 4096, false},
			{field{"sb_rextents", 24, 8}, 4096, false}, {field{"sb_inprogress", 126, 1}, 1, false},
			{field{"sb_features_incompat", 216, 4}, 0x10, true},
			{field{"sb_features_incompat", 216, 4}, 0x200, true},
			{field{"sb_versionnum", 100, 2}, 0x200, true},
		},
		groups: slices.Concat(
			oneOf("-m", "crc=0,finobt=0,rmapbt=0,reflink=0,inobtcount=0,bigtime=0", "rmapbt=1",
				"finobt=0,inobtcount=0", "uuid="+otherUUID),
			alone("-m", "reflink=0", "inobtcount=0", "bigtime=0"),
			oneOf("-i", "size=512", "size=2048"), alone("-i", "sparse=0", "nrext64=1", "maxpct=50"),
			oneOf("-n", "version=ci", "size=8192"), oneOf("-b", "size=1024", "size=2048", "size=65536"),
			oneOf("-s", "size=512", "size=4096"), oneOf("-d", "agcount=8", "su=64k,sw=4", "cowextsize=8"),
			oneOf("-l", "size=64m", "version=2,su=64k", "lazy-count=1"),
			oneOf("then", "xfs_admin -U "+otherUUID, "xfs_admin -O bigtime=1"))},
	btrfs: {structures: []string{"compat_ro_flags 0x8"},
		tool: []string{"mkfs.btrfs", "-q", "-f"}, size: 300 * mib, offset: 64 * kib, n: 4 * kib,
		order: binary.LittleEndian, sum: sumBtrfs,
		features: []field{{"flags", 0x38, 4}, {"flags>>32", 0x3C, 4}, {"compat_flags", 0xAC, 8},
			{"compat_ro_flags", 0xB4, 8}, {"incompat_flags", 0xBC, 8}},
		specials: []fieldValue{
			{field{"num_devices", 0x88, 8}, 2, false}, {field{"num_devices", 0x88, 8}, 0, false},
			{field{"flags>>32", 0x3C, 4}, 1, true}, {field{"flags>>32", 0x3C, 4}, 2, true},
			{field{"flags>>32", 0x3C, 4}, 8, true}, {field{"flags", 0x38, 4}, 4, true},
			{field{"incompat_flags", 0xBC, 8}, 0x1000, true},
			{field{"csum_type", 0xC4, 2}, 9, false},
		},
		groups: slices.Concat(
			oneOf("-O", "mixed-bg", "^extref", "^skinny-metadata", "^no-holes", "zoned", "raid56"),
			alone("-O", "block-group-tree", "extent-tree-v2"), alone("-R", "quota", "^free-space-tree"),
			oneOf("then", "btrfstune -S 1", "btrfstune -f -m", "btrfstune -f -u"),
			oneOf("-d", "single", "dup", "raid0"), oneOf("-m", "single", "dup", "raid1c3"),
			oneOf("-n", "4096", "16384", "65536"), oneOf("-s", "4096", "65536"),
			oneOf("--csum", "crc32c", "xxhash", "sha256", "blake2"))},
}

func extLayout(fs string, groups [][]string) layout {
	journal := func(name string, at, bytes int64, value uint64) fieldValue {
		return fieldValue{field{name, at, bytes}, value, false}
	}
	bit := func(word int, value uint64) fieldValue { return fieldValue{extWords[word], value, true} }
	return layout{tool: []string{"mke2fs", "-q", "-F", "-t", fs, "-N", "512"}, size: 64 * mib,
		offset: kib, n: kib, order: binary.LittleEndian, sum: sumExt, features: extWords, groups: groups,
		structures: []string{"s_feature_compat 0x1000", "s_feature_incompat 0x2000"},
		specials: []fieldValue{journal("s_journal_inum", 0xE0, 4, 0),
			journal("s_journal_inum", 0xE0, 4, 12), journal("s_journal_dev", 0xE4, 4, 0x701),
			journal("s_journal_uuid", 0xD0, 8, 0x1122334455667788), bit(1, 0x1), bit(1, 0x8),
			bit(1, 0x1000), bit(2, 0x80), bit(2, 0x1000), bit(2, 0x4000), bit(0, 0x40)}}
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sumExt, sumXFS and sumBtrfs correct a superblock's checksum.
func sumExt(b []byte) {
	if b[0x65]&4 != 0 { // metadata_csum
		le.PutUint32(b[0x3FC:], ^crc32.Checksum(b[:0x3FC], castagnoli))
	}
}

func sumXFS(b []byte) {
	if binary.BigEndian.Uint16(b[100:])&0xF == 5 {
		clear(b[224:228])
		le.PutUint32(b[224:], crc32.Checksum(b, castagnoli))
	}
}

func sumBtrfs(b []byte) { le.PutUint32(b, crc32.Checksum(b[0x20:], castagnoli)) }

// patch changes the superblock of n bytes at an offset of the image. It copies the parameter bytes
// to the position "at" in the superblock. Then sum corrects the checksum.
func (im *image) patch(offset, n, at int64, bytes []byte, sum func([]byte)) {
	b := im.read(offset, n)
	copy(b[at:], bytes)
	sum(b)
	im.write(offset, b...)
}

// foreignParts returns filesystems that use a second disk, and an ext4 with an unknown feature.
func foreignParts() []generator {
	unknown := refuse(feature)
	unknown.Says = []string{"s_feature_compat: 0x40000000"}
	return []generator{
		across("ext4 with its journal on another disk", ext4, "s_journal_uuid: 0x",
			"mke2fs -q -F -O journal_dev -b 4096 $2", "mke2fs -q -F -t ext4 -b 4096 -J device=$2 $1"),
		across("ext4 with its journal on another disk, as only a copy of its superblock shows", ext4,
			"s_journal_uuid: 0x", "mke2fs -q -F -O journal_dev -b 4096 $2",
			"mke2fs -q -F -t ext4 -b 4096 -J device=$2 $1 100000").then(hideJournal),
		across("the journal of an ext4", ext4, "s_feature_incompat: journal_dev",
			"mke2fs -q -F -O journal_dev -b 4096 $1"),
		across("xfs with its log on another disk", xfs, "sb_logstart: an external log",
			"mkfs.xfs -q -f -l logdev=$2,size=64m $1"),
		across("xfs with a realtime part on another disk", xfs, "sb_rblocks: 0x",
			"mkfs.xfs -q -f -m reflink=0,rmapbt=0 -r rtdev=$2 $1"),
		across("btrfs of two disks", btrfs, "num_devices: 2", "mkfs.btrfs -q -f -d raid1 -m raid1 $1 $2"),
		across("btrfs of two disks whose superblock counts one", btrfs, "incompat_flags: ",
			"mkfs.btrfs -q -f -d raid1 -m raid1 $1 $2", "btrfs device scan $2").then(countOne),
		across("btrfs that is a seed", btrfs, "flags>>32: seeding", "mkfs.btrfs -q -f $1",
			"btrfstune -S 1 $1"),
		with("ext4 with an unknown feature", ext4, unknown,
			func(im *image) { im.patch(kib, kib, 0x5F, []byte{0x40}, sumExt) }, nil),
	}
}

// hideJournal does what a user of a raw device could do: it removes the external journal from the
// first superblock of an ext4, makes the checksum wrong, and forges a growth record. So the driver
// checks the filesystem with a backup superblock.
func hideJournal(f *fixture) {
	f.image.patch(kib, kib, 0xD0, make([]byte, 0x18), sumExt)
	f.image.patch(kib, kib, 0xE0, []byte{8}, func(b []byte) {})
	f.forgeGrowth()
}

func (g generator) then(do func(*fixture)) generator {
	return g.and(func(t *trial) {
		set := t.Set
		t.Set = func(f *fixture) {
			set(f)
			harness.Must(f.loop.Sync())
			do(f)
		}
	})
}

// countOne makes both superblocks of a btrfs claim that it has only one disk.
func countOne(f *fixture) {
	for _, at := range []int64{64 * kib, 64 * mib} {
		f.image.patch(at, 4*kib, 0x88, []byte{1}, sumBtrfs)
	}
}

// featureTrials returns the trials that fail if the driver does not check features. It omits two
// disks that are refused even then: blkid finds an ext4 journal, and the kernel refuses a btrfs.
func featureTrials() []string {
	var names []string
	for _, g := range foreignParts() {
		if !slices.Contains([]string{"the journal of an ext4",
			"btrfs of two disks whose superblock counts one"}, g.name) {
			names = append(names, g.name)
		}
	}
	return names
}

// across returns a filesystem that shell commands make on the trial's disk $1 and a second disk $2.
// The driver must not change the second disk.
func across(name, fs, says string, commands ...string) generator {
	return generator{name, func(t *trial) {
		var bystander *image
		var before string
		t.Size, t.FS = 512*mib, fs
		t.Set = func(f *fixture) {
			bystander = newImage(filepath.Join(f.dir, "bystander"), 512*mib)
			other := f.attach(context.Background(), bystander, false)
			for _, command := range commands {
				harness.Must(proof.RunTool("sh", "-c", fmt.Sprintf("set -- %s %s; %s", f.loop.Path, other.Path,
					command)))
			}
			if fs == btrfs {
				f.atEnd(func() error { // makes the kernel forget the btrfs
					return exec.Command("btrfs", "device", "scan", "--forget", f.loop.Path).Run()
				})
			}
			harness.Must(other.Sync())
			before = bystander.digest(0, 0)
		}
		t.Check = func(*fixture) error {
			if bystander.digest(0, 0) != before {
				return errors.New("another disk was written")
			}
			return nil
		}
		t.Want = refuse(feature, notBlank)
		t.Want.Says, t.Want.Names = []string{says}, []string{says}
	}}
}
