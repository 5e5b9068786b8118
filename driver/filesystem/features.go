package filesystem

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// newFeatures lists the features of each new filesystem, with the names that the tables below use.
// Linux 5.12 mounts filesystems with all of them. The driver passes the list to mkfs and compares
// the new superblock with it, so that neither mkfs's version nor its configuration file matters.
var newFeatures = map[string]string{
	volume.Ext3: "dir_index ext_attr filetype has_journal large_file resize_inode sparse_super",
	volume.Ext4: "64bit dir_index dir_nlink ext_attr extents extra_isize filetype flex_bg " +
		"has_journal huge_file large_file metadata_csum resize_inode sparse_super",
	volume.XFS: "align attr2 bigtime crc dirv2 extflg finobt ftype inobtcount lazysbcount logv2 " +
		"morebits nlink projid32bit reflink sparse",
	volume.Btrfs: "extref free_space_tree free_space_tree_valid mixed_backref no_holes " +
		"skinny_metadata",
}

// incidentalFeatures are not compared with newFeatures, because no mkfs option chooses them: they
// follow from the block size or the node size, report a state, or are set by the driver.
var incidentalFeatures = []string{"dalign", "sector", "big_metadata", "written", "metadata_uuid"}

func (v Volume) newFeatures() []string {
	return slices.DeleteFunc(strings.Fields(newFeatures[v.FSType]), func(name string) bool {
		return name == "reflink" && v.Mkfs.Value(name) == "false"
	})
}

func (sb Superblock) chosenFeatures() []string {
	// With small blocks a group may have no room for the descriptors that resize_inode reserves. Then
	// mke2fs sets meta_bg instead of resize_inode.
	names := strings.Fields(strings.NewReplacer(",", "", "meta_bg", "resize_inode").
		Replace(sb.Features))
	slices.Sort(names)
	return slices.DeleteFunc(names, func(name string) bool {
		return strings.HasSuffix(name, ":") || slices.Contains(incidentalFeatures, name)
	})
}

// The driver mounts a filesystem only if no part of it is on another device and the tables below
// contain all of its features. An unknown feature may make a kernel or a tool write to other disks.

type featureWord struct {
	Field     string
	At, Bytes int
	// Bits names the bits, from the lowest on. The driver refuses a bit whose name is "-" or begins
	// with "!", and every bit without a name. Bits named "." form a number, which is allowed.
	Bits string
}

// extFeatures refuses an external journal and features that no kernel supports. It also refuses
// "read-only" and "shared_blocks", with which the kernel mounts the filesystem only for reading.
var extFeatures = []featureWord{
	{"s_rev_level", 0x4C, 4, "."},
	{"s_feature_compat", 0x5C, 4, "dir_prealloc imagic_inodes has_journal ext_attr resize_inode " +
		"dir_index !lazy_bg !exclude_inode !exclude_bitmap sparse_super2 fast_commit stable_inodes " +
		"orphan_file"},
	{"s_feature_incompat", 0x60, 4, "!compression filetype needs_recovery !journal_dev meta_bg - " +
		"extents 64bit mmp flex_bg ea_inode - !dirdata metadata_csum_seed large_dir inline_data " +
		"encrypt casefold"},
	{"s_feature_ro_compat", 0x64, 4, "sparse_super large_file btree_dir huge_file uninit_bg " +
		"dir_nlink extra_isize !snapshot quota bigalloc metadata_csum !replica !read-only project " +
		"!shared_blocks verity orphan_present"},
	{"s_journal_uuid", 0xD0, 8, ""}, {"s_journal_uuid", 0xD8, 8, ""}, {"s_journal_dev", 0xE4, 4, ""},
}

// xfsFeatures and xfsV5Features refuse a realtime section. It is on another device or, if "zoned",
// at the end of the same device, so that the kernel cannot grow the filesystem (xfs_growfs_data).
// They also refuse "needsrepair", which only xfs_repair may clear.
var (
	xfsFeatures = []featureWord{
		{"sb_rblocks", 16, 8, ""}, {"sb_rextents", 24, 8, ""}, {"sb_inprogress", 126, 1, ""},
		{"sb_versionnum", 100, 2, ". - . - attr nlink quota align dalign !shared logv2 sector " +
			"extflg dirv2 asciici morebits"},
		{"sb_features2", 200, 4, "- lazysbcount - attr2 !parent - - projid32bit crc ftype"},
	}
	xfsV5Features = []featureWord{
		{"sb_features_compat", 208, 4, ""},
		{"sb_features_ro_compat", 212, 4, "finobt rmapbt reflink inobtcount"},
		{"sb_features_incompat", 216, 4, "ftype sparse meta_uuid bigtime !needsrepair nrext64 " +
			"exchange parent metadir !zoned !zone_gaps"},
		{"sb_features_log_incompat", 220, 4, "xattrs"},
	}
)

// btrfsFeatures refuses a seed device (other filesystems use it too), unfinished changes of a tool
// or the kernel, and experimental features. It also refuses zones, because with zones the
// superblocks may be at offsets that the driver does not read.
var btrfsFeatures = []featureWord{
	{"flags", 0x38, 4, "written reloc !error"},
	{"flags>>32", 0x3C, 4, "!seeding !metadump !metadump_v2 !changing_fsid !changing_fsid_v2 - " +
		"!changing_bg_tree !changing_data_csum !changing_meta_csum"},
	{"compat_flags", 0xAC, 8, ""},
	{"compat_ro_flags", 0xB4, 8, "free_space_tree free_space_tree_valid verity block_group_tree"},
	{"incompat_flags", btrfsIncompat, 8, "mixed_backref default_subvol mixed_groups compress_lzo " +
		"compress_zstd big_metadata extref raid56 skinny_metadata no_holes metadata_uuid " +
		"raid1c34 !zoned !extent_tree_v2 !raid_stripe_tree - simple_quota"},
	{"csum_type", 0xC4, 2, ". ."},
}

func (sb *Superblock) addFeatures(b []byte, order binary.ByteOrder, words []featureWord) {
	for _, w := range words {
		bits, known := w.value(b, order), []string(nil)
		for i, name := range strings.Fields(w.Bits) {
			bit := uint64(1) << i
			switch {
			case bits&bit == 0 || name == "-":
				continue
			case name[0] == '!':
				sb.refuse(true, w.Field, name[1:])
			case name != ".":
				known = append(known, name)
			}
			bits &^= bit
		}
		sb.refuse(bits != 0, w.Field, fmt.Sprintf("%#x", bits))
		if len(known) > 0 {
			sb.Features = listed(sb.Features, w.Field, strings.Join(known, " "))
		}
	}
}

func (sb *Superblock) refuse(refused bool, field string, feature any) {
	if refused {
		sb.Refused = listed(sb.Refused, field, feature)
	}
}

func listed(list, field string, feature any) string {
	return strings.TrimPrefix(fmt.Sprintf("%s, %s: %v", list, field, feature), ", ")
}

func (w featureWord) value(b []byte, order binary.ByteOrder) (n uint64) {
	for i, c := range b[w.At : w.At+w.Bytes] {
		if order == binary.BigEndian {
			n = n<<8 | uint64(c)
		} else {
			n |= uint64(c) << (8 * i)
		}
	}
	return n
}
