//go:build linux

package corpus_test

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// kind describes a filesystem of fsBytes bytes, and the program that makes it.
type kind struct {
	name string
	// fs is the type with which the kernel mounts the filesystem.
	fs string
	// sector is the smallest logical block size of a disk that can have the filesystem; 0 means 512.
	sector int
	tool   string
	args   []string
	// copies returns the offsets of the backup superblocks on a disk of the given size.
	copies func(size int64) []int64
	// unmountable is set if some kernels of test machines cannot mount the filesystem.
	unmountable bool
}

// fsBytes is the size of each filesystem. A smaller xfs with 8 groups has no space for its log.
const fsBytes = 640 * mib

// kinds contains the filesystems that volumes can have, and similar ones. The offsets of their
// backup superblocks are documented in Documentation/filesystems/ext4/blockgroup.rst (groups 1 and
// powers of 3, 5, 7), XFS Algorithms & Data Structures (each allocation group) and the on-disk
// format of btrfs (64 MiB, 256 GiB).
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
		"-b", "4096", "-N", "2048", "-O", "^sparse_super,sparse_super2,^resize_inode"},
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

// mke2fs returns a filesystem of the ext family, whose first backup superblock is at the start of
// group 1. A group has eight times as many blocks as a block has bytes. With 1024-byte blocks,
// group 0 begins at block 1.
func mke2fs(fs, name string, block int64, args ...string) kind {
	// The number of inodes is small, because mke2fs may write the whole inode tables.
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

func (im *image) filesystem(k kind) { im.filesystemAt(k, 0) }

func (im *image) filesystemAt(k kind, offset int64) {
	im.copyIn(im.bases.get(k.name, fsBytes, func(base *image) { base.mkfs(k) }), offset)
}

func (im *image) mkfs(k kind) {
	im.tool(k.tool, slices.Concat([]string{"-q"}, k.args, im.bases.options(k.tool))...)
}

// options returns arguments with which the mkfs program copies the payload into the filesystem.
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

// setUp sets the filesystem of the disk and, if volumes can have it, of the request.
func (k kind) setUp(t *trial) {
	t.Size, t.BlockSize = fsBytes, max(k.sector, 512)
	t.Fill = func(im *image) { im.filesystem(k) }
	if slices.Contains(ours, k.fs) {
		t.FS = k.fs
	}
}

// volume reports whether volumes can have this filesystem and the kernel can mount it.
func (k kind) volume() bool { return slices.Contains(ours, k.fs) && !k.unmountable }

func filesystems() []generator {
	var all []generator
	for _, k := range kinds {
		all = append(all, k.whole()...)
		all = append(all, k.cut()...)
		all = append(all, k.wiped()...)
		all = append(all, k.nested()...)
	}
	return all
}

func (k kind) on(name string, w want, set func(*fixture)) generator {
	return generator{k.name + name, func(t *trial) {
		k.setUp(t)
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

// inUse returns filesystems that were copied while they were mounted. The payload had been synced,
// so at least the journal contains it.
func (k kind) inUse() []generator {
	if k.name == "ext4 without a journal" {
		return nil
	}
	live := func(t *trial) { t.Fill = func(im *image) { im.inUse(k) } }
	return []generator{k.on(" in use", isMounted, nil).and(live),
		k.on(" in use, on a larger disk", isMounted, nil).and(live).larger(),
		k.on(" in use, on a read-only disk", refuse("LogNotReplayed"), (*fixture).reading).and(live)}
}

// reading() makes the controller report a disk as read-only although the guest can write to it.
func (f *fixture) reading() { f.Publish["readOnly"] = "true" }

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

// cut returns filesystems without their end: the disk is too small, or its end cannot be read.
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

func (im *image) keepOnlyPage(offset int64) {
	copied := im.read(offset, pageBytes)
	im.wipe(0, im.Size)
	im.write(offset, copied...)
}

// wiped returns filesystems whose first superblock is wiped, so that blkid does not find them.
func (k kind) wiped() []generator {
	copies := k.copies(fsBytes)
	wipe := func(t *trial, start, end int64) {
		k.setUp(t)
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
			k.setUp(t)
			t.Fill = func(im *image) {
				im.filesystem(k)
				im.keepOnlyPage(offset)
			}
			t.Want = foreign(k.fs, "ext4", "ext3", "ext2")
		}})
	}
	return all
}

func (k kind) nested() []generator {
	inside := func(t *trial, offset int64) {
		k.setUp(t)
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

// tails returns disks with a filesystem and data behind it. The driver must mount the filesystem,
// must not grow it, and must not change the data.
func tails() []generator {
	var all []generator
	for _, fs := range ours {
		all = append(all, tail(fs+" with a byte somewhere behind it", fs, anywhere, nil),
			tail(fs+" with data behind it", fs, func(t *trial, im *image) {
				at := fsBytes + t.Rand.Int64N((im.Size-fsBytes)/2)
				im.write(at, randomBytes(t.Rand, 1+t.Rand.Int64N(4*mib))...)
			}, nil),
			tail(fs+" with a byte behind it that its snapshot had", fs, func(t *trial, im *image) {
				im.write(fsBytes+t.Rand.Int64N(fsBytes/2), 1)
			}, restoredFrom("snapshot", "filesystem", fsBytes+fsBytes/2)),
			tail(fs+" with a byte behind it that its snapshot had not", fs, anywhere,
				restoredFrom("snapshot", "filesystem", fsBytes)),
			nothingBehind(fs+" with nothing behind it", fs, nil),
			nothingBehind(fs+" with nothing behind it on a disk that was restored", fs,
				restoredFrom("snapshot", "filesystem", fsBytes)))
	}
	return append(all,
		tail("ext4 with a byte behind it on a disk from an image", ext4, anywhere,
			restoredFrom("image", "filesystem", fsBytes)),
		tail("xfs with a byte behind it on a disk that was restored for raw use, too", xfs, anywhere,
			restoredFrom("snapshot", "both", fsBytes)),
		tail("ext4 with a growth that another volume began", ext4, func(*trial, *image) {},
			(*fixture).growthOfAnother))
}

func anywhere(t *trial, im *image) {
	im.write(fsBytes+t.Rand.Int64N(im.Size-fsBytes), 1)
}

func restoredFrom(origin, use string, sourceBytes int64) func(f *fixture) {
	return func(f *fixture) {
		f.Publish["origin"], f.Publish["use"] = origin, use
		f.Publish["sourceBytes"] = fmt.Sprint(sourceBytes)
	}
}

func tail(name, fs string, fill func(*trial, *image), set func(*fixture)) generator {
	return generator{name, func(t *trial) {
		var before string
		kindOf(fs).setUp(t)
		t.Size += fsBytes
		t.Fill = func(im *image) {
			im.filesystem(kindOf(fs))
			fill(t, im)
		}
		t.Set = func(f *fixture) {
			if set != nil {
				set(f)
			}
			before = f.image.digest(fsBytes, 0)
		}
		t.Want.Outcome = mounted
		t.Check = func(f *fixture) error {
			harness.Must(f.loop.Sync())
			if now := f.image.digest(fsBytes, 0); now != before {
				return fmt.Errorf("the bytes behind the filesystem were %s and are %s", before, now)
			}
			if size := f.mountedBytes(); size > fsBytes {
				return fmt.Errorf("the filesystem has grown from %d to %d bytes", fsBytes, size)
			}
			return nil
		}
	}}
}

// nothingBehind returns a disk without data behind its filesystem. The filesystem must grow, so a
// driver that never grows one fails these trials.
func nothingBehind(name, fs string, set func(*fixture)) generator {
	return tail(name, fs, func(*trial, *image) {}, set).and(func(t *trial) {
		t.Check = func(f *fixture) error {
			if size := f.mountedBytes(); size <= fsBytes {
				return fmt.Errorf("the filesystem has %d bytes and has not grown", size)
			}
			return nil
		}
	})
}

// mountedBytes returns the size that statfs reports, which leaves out metadata.
func (f *fixture) mountedBytes() int64 {
	var st unix.Statfs_t
	harness.Must(unix.Statfs(f.Staging, &st))
	return int64(st.Blocks) * st.Bsize
}

// growthOfAnother stages the disk as another volume, and makes resize2fs fail. So a growth record
// of the other volume is left. Then a byte is written behind the filesystem.
func (f *fixture) growthOfAnother() {
	volume := f.VolumeID
	f.VolumeID = randomUUID(f.trial)
	f.failStage("resize2fs", "exit 1")
	f.VolumeID = volume
	f.poke(fsBytes+f.Rand.Int64N(fsBytes/2), 1)
	harness.Must(f.loop.Sync())
}

// described returns ext filesystems whose group descriptors the trials damage. They differ in the
// size and offset of descriptors, bitmaps and inodes. Those with bigalloc have small clusters and
// so a second group, which contains copies of the descriptors.
func described() []kind {
	return []kind{
		kindOf(ext3),
		kindOf(ext4),
		kindOf("ext4 with 1024-byte blocks"),
		kindOf("ext4 with 32-bit block numbers"),
		kindOf("ext4 without checksums"),
		kindOf("ext4 without a journal"),
		mke2fs(ext4, "ext4 without flexible groups", 4096, "-b", "4096", "-O", "^flex_bg"),
		mke2fs(ext4, "ext4 with clusters", 4096, "-b", "4096", "-O", "bigalloc", "-C", "8192"),
		mke2fs(ext4, "ext4 with clusters of 1024-byte blocks", 1024, "-b", "1024", "-O", "bigalloc",
			"-C", "16384"),
	}
}

// descriptors returns filesystems that need a check, and whose group descriptors or their copies
// are damaged. The driver must refuse damaged descriptors, because e2fsck -p would overwrite the
// copies with the damaged ones. If only copies are damaged, it must mount the filesystem.
func descriptors() []generator {
	var all []generator
	for _, k := range described() {
		for _, d := range []struct {
			of              string
			primary, copies bool
			damages         []func(*trial, *image, span)
		}{
			{"group descriptors", true, false, damages},
			{"copies of the group descriptors", false, true, damages},
			{"group descriptors and their copies", true, true, damages},
			{"location of its inodes", true, false, []func(*trial, *image, span){misplaceInodes}},
		} {
			all = append(all, generator{k.name + ", damaged in the " + d.of, func(t *trial) {
				k.setUp(t)
				larger := k.growable() && t.Rand.IntN(2) == 0
				damage := d.damages[t.Rand.IntN(len(d.damages))]
				t.Fill = func(im *image) {
					im.filesystem(k)
					places := im.descriptors()
					if !larger {
						im.patch(kib, kib, 0x3A, []byte{3}, sumExt) // the state "clean with errors"
					}
					for i, p := range places {
						if i == 0 && d.primary || i > 0 && d.copies {
							damage(t, im, p)
						}
					}
				}
				if t.Want.Outcome = mounted; d.primary {
					t.Want = refuse("FilesystemDamaged")
					t.Want.Code = "Internal"
				}
				if larger { // a growth begins with a check, and writes behind the filesystem
					t.Size += fsBytes
					t.Until = fsBytes
				}
			}})
		}
	}
	return all
}

func (k kind) growable() bool { return !slices.Contains(k.args, "bigalloc") }

type span struct{ offset, bytes int64 }

var (
	descriptorPlaces = regexp.MustCompile(
		`(?m)^  (Primary|Backup) superblock at \d+, Group descriptors at (\d+)-(\d+)$`)
	descriptorBlocks = regexp.MustCompile(`(?m)^Block size: +(\d+)$`)
)

// descriptors returns the range of the group descriptors, and then the ranges of their copies.
func (im *image) descriptors() (places []span) {
	out, err := exec.Command("dumpe2fs", im.Path).Output()
	size, found := descriptorBlocks.FindSubmatch(out), descriptorPlaces.FindAllSubmatch(out, -1)
	if err != nil || size == nil || len(found) < 2 || string(found[0][1]) != "Primary" {
		harness.Must(fmt.Errorf("dumpe2fs of %s finds no group descriptors and copies: %w\n%s", im.Path,
			err, out))
	}
	number := func(b []byte) int64 { return harness.Got(strconv.ParseInt(string(b), 10, 64)) }
	for _, m := range found {
		first, last := number(m[2]), number(m[3])
		places = append(places, span{first * number(size[1]), (last - first + 1) * number(size[1])})
	}
	return places
}

// damages contains functions that damage group descriptors, so that a bitmap or an inode table
// seems to be in a block where it cannot be.
var damages = []func(*trial, *image, span){
	func(_ *trial, im *image, s span) { im.wipe(s.offset, 512) },
	func(t *trial, im *image, s span) { im.write(s.offset, randomBytes(t.Rand, s.bytes)...) },
	func(t *trial, im *image, s span) {
		im.write(s.offset, slices.Repeat([]byte{byte(0x20 + t.Rand.IntN(0x60))}, int(s.bytes))...)
	},
	// This function puts a bitmap or the first inode table at block 0 or behind the filesystem.
	func(t *trial, im *image, s span) {
		at := []uint32{0, 1 << 30, 1<<32 - 1}[t.Rand.IntN(3)]
		im.write(s.offset+4*t.Rand.Int64N(3), le.AppendUint32(nil, at)...)
	},
}

// misplaceInodes makes the first group descriptor name free blocks as its inode table. So the root
// directory and the journal have no inodes.
func misplaceInodes(t *trial, im *image, s span) {
	im.write(s.offset+8, le.AppendUint32(nil, uint32(140_000+t.Rand.Int64N(20_000)))...)
}
