//go:build linux

package corpus_test

import (
	"fmt"
	"path/filepath"
	"slices"
)

// kind is a way to make a filesystem of fsBytes.
type kind struct {
	name string
	// fs is the kernel's name of the filesystem.
	fs string
	// sector is the smallest logical block size of a disk that can have the filesystem; 0 means
	// 512.
	sector int
	tool   string
	args   []string
	// copies returns the offsets of further superblocks on a disk of that size.
	copies func(size int64) []int64
	// unmountable is set for a filesystem that the kernel of this machine may not support.
	unmountable bool
}

// fsBytes is the size of the filesystems. A smaller xfs of 8 groups has no space for its log.
const fsBytes = 640 * mib

// kinds contains the filesystems of volumes, and similar ones. The places of the copies of their
// superblocks are documented in Documentation/filesystems/ext4/blockgroup.rst (groups 1 and powers
// of 3, 5, 7), XFS Algorithms & Data Structures (each allocation group) and the on-disk format of
// btrfs (64 MiB, 256 GiB).
var kinds = []kind{
	mke2fs("ext2", "ext2 with 4096-byte blocks", 4096, "-b", "4096"),
	mke2fs("ext2", "ext2 with 1024-byte blocks", 1024, "-b", "1024"),
	mke2fs(ext3, "ext3", 4096, "-b", "4096"),
	mke2fs(ext3, "ext3 with 1024-byte blocks", 1024, "-b", "1024"),
	mke2fs(ext4, "ext4", 4096, "-b", "4096"),
	mke2fs(ext4, "ext4 with 1024-byte blocks", 1024, "-b", "1024"),
	mke2fs(ext4, "ext4 with 2048-byte blocks", 2048, "-b", "2048"),
	mke2fs(ext4, "ext4 with 32-bit block numbers", 4096, "-b", "4096", "-O", "^64bit"),
	mke2fs(ext4, "ext4 without checksums", 4096, "-b", "4096", "-O", "^metadata_csum"),
	mke2fs(ext4, "ext4 without a journal", 4096, "-b", "4096", "-O", "^has_journal"),
	mke2fs(ext4, "ext4 with copies in every group", 4096, "-b", "4096", "-O",
		"^sparse_super,^resize_inode"),
	mke2fs(ext4, "ext4 with two copies", 4096, "-b", "4096", "-O",
		"^sparse_super,sparse_super2,^resize_inode"),
	{name: "ext4 with a copy in the last group", fs: ext4, tool: "mke2fs", args: []string{"-t", ext4,
		"-b", "4096", "-N", "2048", "-O",
		"^sparse_super,sparse_super2,^resize_inode"},
		copies: func(size int64) []int64 { return []int64{(size - 1) / (128 * mib) * 128 * mib} }},
	mke2fs(ext4, "ext4 with meta_bg", 4096, "-b", "4096", "-O", "meta_bg,^resize_inode"),
	{name: "xfs", fs: xfs, tool: "mkfs.xfs", args: []string{"-s", "size=512"}, copies: quarters},
	{name: "xfs with 4096-byte sectors", fs: xfs, sector: 4096, tool: "mkfs.xfs",
		args: []string{"-s", "size=4096"}, copies: quarters},
	{name: "xfs with 8 allocation groups", fs: xfs, tool: "mkfs.xfs",
		args: []string{"-d", "agcount=8"}, copies: quarters},
	{name: "xfs of version 4", fs: xfs, tool: "mkfs.xfs", unmountable: true,
		args: []string{"-m", "crc=0,reflink=0,finobt=0,rmapbt=0"}, copies: quarters},
	{name: "btrfs", fs: btrfs, tool: "mkfs.btrfs", copies: mirrors},
	{name: "btrfs with single metadata", fs: btrfs, tool: "mkfs.btrfs",
		args: []string{"-m", "single"}, copies: mirrors},
	{name: "btrfs with another checksum", fs: btrfs, tool: "mkfs.btrfs",
		args: []string{"--csum", "xxhash"}, copies: mirrors},
}

// mke2fs returns a filesystem of the ext family. A copy of the superblock is in the first block of
// group 1. A group has 8 blocks for each byte of a block. With blocks of 1024 bytes, group 0 begins
// at block 1.
func mke2fs(fs, name string, block int64, args ...string) kind {
	// The number of inodes is small, because mke2fs may write their tables completely.
	args = append([]string{"-t", fs, "-N", "2048"}, args...)
	return kind{name: name, fs: fs, tool: "mke2fs", args: args,
		copies: func(int64) []int64 {
			first := block * 8 * block
			if block == 1024 {
				first += block
			}
			return []int64{first}
		}}
}

func quarters(size int64) []int64 { return []int64{size / 4, size / 2, size / 4 * 3} }

func mirrors(int64) []int64 { return []int64{64 * mib} }

// filesystem writes the filesystem to the start of the disk.
func (im *image) filesystem(k kind) { im.filesystemAt(k, 0) }

func (im *image) filesystemAt(k kind, offset int64) {
	im.copyIn(im.bases.get(k.name, fsBytes, func(base *image) { base.mkfs(k) }), offset)
}

// mkfs makes the filesystem, which contains the payload.
func (im *image) mkfs(k kind) {
	im.tool(k.tool, slices.Concat([]string{"-q"}, k.args, im.bases.options(k.tool))...)
}

// options returns the options with which a mkfs program makes a filesystem with the payload.
func (b *bases) options(mkfs string) []string {
	switch mkfs {
	case "mke2fs":
		return []string{"-d", b.root()}
	case "mkfs.xfs":
		return []string{"-p", b.proto()}
	}
	return []string{"--rootdir", b.root()}
}

func kindOf(name string) kind {
	i := slices.IndexFunc(kinds, func(k kind) bool { return k.name == name })
	if i < 0 {
		panic("no kind of filesystem is called " + name)
	}
	return kinds[i]
}

// of gives the trial a disk of the filesystem's size with the filesystem. If volumes can have this
// filesystem, the request asks for it.
func (k kind) of(t *trial) {
	t.Size, t.BlockSize = fsBytes, max(k.sector, 512)
	t.Fill = func(im *image) { im.filesystem(k) }
	if slices.Contains(ours, k.fs) {
		t.FS = k.fs
	}
}

// volume reports whether a volume can have this filesystem, so that the driver mounts it.
func (k kind) volume() bool { return slices.Contains(ours, k.fs) && !k.unmountable }

func filesystems() []generator {
	var all []generator
	for _, k := range kinds {
		all = append(all, k.whole()...)
		all = append(all, k.cut()...)
		all = append(all, k.wiped()...)
		all = append(all, k.nested()...)
	}
	return slices.Concat(all, unfinished(), largeBtrfs())
}

func (k kind) on(name string, w want, set func(*fixture)) generator {
	return generator{k.name + name, func(t *trial) {
		k.of(t)
		t.Want, t.Set = w, set
	}}
}

func (k kind) whole() []generator {
	other := foreign(k.fs)
	other.Says = []string{k.fs}
	all := []generator{k.on(" where the request asks for another filesystem", other, nil).and(
		func(t *trial) {
			others := slices.DeleteFunc(slices.Clone(ours), func(fs string) bool { return fs == k.fs })
			t.FS = others[t.Rand.IntN(len(others))]
		})}
	if k.volume() {
		all = append(all, k.on(", healthy", isMounted, nil),
			k.on(", healthy, of a size that was not passed", isMounted, (*fixture).forgetSize),
			k.on(", healthy, on a larger disk", isMounted, nil).larger(),
			k.on(", healthy, on a read-only disk", isMounted, (*fixture).reading))
		all = append(all, k.inUse()...)
	}
	return all
}

// inUse returns copies that were taken of mounted filesystems. The payload was synced, and is in
// the journal.
func (k kind) inUse() []generator {
	if k.name == "ext4 without a journal" {
		return nil
	}
	live := func(t *trial) { t.Fill = func(im *image) { im.inUse(k) } }
	return []generator{k.on(" in use", isMounted, nil).and(live),
		k.on(" in use, on a larger disk", isMounted, nil).and(live).larger(),
		k.on(" in use, on a read-only disk", refuse("LogNotReplayed"), (*fixture).reading).and(live)}
}

// reading makes the controller report that the disk is read-only. The guest's device is writable.
func (f *fixture) reading() { f.Publish["readOnly"] = "true" }

// inUse writes a copy of the filesystem, taken while it was mounted, to the start of the disk.
func (im *image) inUse(k kind) {
	im.copyIn(im.bases.get(k.name+" in use", fsBytes, func(base *image) {
		base.tool(k.tool, append([]string{"-q"}, k.args...)...)
		base.tool("sh", "-ec", `at=$(mktemp -d)
mount -o loop "$1" "$at"
dd if="$0" of="$at/${0##*/}" conv=fsync status=none
cp --sparse=always "$1" "$1.live"
umount "$at"
rmdir "$at"
mv "$1.live" "$1"`, filepath.Join(im.bases.root(), payloadName))
	}), 0)
}

// cut returns filesystems whose end is missing: the disk is too small, or its end cannot be
// read.
func (k kind) cut() []generator {
	large, unread := refuse(tooLarge, notBlank), refuse(unreadable, notBlank)
	large.Names, unread.Names = []string{k.fs}, []string{k.fs}
	return []generator{
		k.on(" on a smaller disk", large, nil).and(func(t *trial) {
			t.Fill = func(im *image) {
				im.filesystem(k)
				im.resize(fsBytes - mib*(1+t.Rand.Int64N(300)))
			}
		}),
		k.on(" whose end cannot be read", unread, cutOffAt(func(t *trial) int64 {
			return fsBytes - mib*(1+t.Rand.Int64N(500))
		})),
	}
}

// only keeps a page of the disk, and wipes everything else.
func (im *image) only(offset int64) {
	copied := im.read(offset, pageBytes)
	im.wipe(0, im.Size)
	im.write(offset, copied...)
}

// wiped returns filesystems whose start is zero, so that blkid does not find them.
func (k kind) wiped() []generator {
	copies := k.copies(fsBytes)
	wipe := func(t *trial, start, end int64) {
		k.of(t)
		t.Fill = func(im *image) {
			im.filesystem(k)
			im.wipe(0, start)
			im.wipe(-end, end)
		}
		t.Want = foreign(k.fs, "ext4", "ext3", "ext2")
	}
	all := []generator{
		{k.name + ", its superblock wiped", func(t *trial) { wipe(t, 68*kib, 512) }},
		{k.name + ", its first MiB wiped", func(t *trial) { wipe(t, mib, 512) }},
		{k.name + ", its first MiBs wiped", func(t *trial) {
			wipe(t, mib+pageBytes*t.Rand.Int64N(7*mib/pageBytes), 512)
		}},
		{k.name + ", its first and last MiB wiped", func(t *trial) { wipe(t, mib, mib) }},
	}
	for i, offset := range copies {
		name := fmt.Sprintf("%s with only copy %d", k.name, i+1)
		all = append(all, generator{name, func(t *trial) {
			k.of(t)
			t.Fill = func(im *image) {
				im.filesystem(k)
				im.only(offset)
			}
			t.Want = foreign(k.fs, "ext4", "ext3", "ext2")
		}})
	}
	return all
}

// nested returns filesystems that begin behind the start of the disk.
func (k kind) nested() []generator {
	inside := func(t *trial, offset int64) {
		k.of(t)
		t.Size = 2 * fsBytes
		t.Fill = func(im *image) { im.filesystemAt(k, offset) }
		t.Want = foreign(k.fs, "ext4", "ext3", "ext2")
	}
	return []generator{
		{k.name + " in the first partition", func(t *trial) {
			inside(t, mib)
			t.Fill = func(im *image) {
				im.filesystemAt(k, mib)
				im.write(0, mbr(0x83, 2048, uint32(fsBytes/512))...)
			}
			t.Want = foreign("partition table (dos)")
		}},
		{k.name + " where the first partition was", func(t *trial) { inside(t, mib) }},
		{k.name + " where an old first partition began", func(t *trial) { inside(t, 63*512) }},
		{k.name + " somewhere in the first MiB", func(t *trial) {
			inside(t, 512*(1+t.Rand.Int64N(mib/512-1)))
		}},
	}
}

// unfinished returns filesystems whose mkfs, which another program than the driver ran, was
// interrupted.
func unfinished() []generator {
	return []generator{
		with("xfs whose mkfs did not end", xfs, foreign(xfs), func(im *image) { im.write(126, 1) }, nil),
		with("btrfs whose mkfs did not end", btrfs, foreign(btrfs), unfinishBtrfs, nil),
		// mke2fs writes the first superblock last.
		with("ext4 whose mkfs did not end", ext4, foreign(ext4),
			func(im *image) { im.wipe(1024, 1024) }, nil),
	}
}

// largeBtrfs returns a btrfs that is large enough for the third superblock.
func largeBtrfs() []generator {
	large := func(name string, w want, change func(*image)) generator {
		return blank("a large btrfs"+name, btrfs, w, nil).and(func(t *trial) {
			t.Size = 300 * gib
			t.Fill = func(im *image) {
				im.copyIn(im.bases.get("large btrfs", 300*gib,
					func(base *image) { base.mkfs(kindOf(btrfs)) }), 0)
				change(im)
			}
		})
	}
	all := []generator{large(", healthy", isMounted, func(*image) {})}
	for _, offset := range []int64{64 * mib, 256 * gib} {
		all = append(all, large(fmt.Sprintf(" with only the superblock at %d GiB", offset/gib),
			foreign("btrfs"), func(im *image) { im.only(offset) }))
	}
	return all
}
