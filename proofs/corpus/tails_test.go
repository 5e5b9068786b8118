//go:build linux

package corpus_test

import (
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// tails returns filesystems with data behind them on the disk. The driver must mount them without
// growing them, and must not change a byte behind them.
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

// anywhere writes a byte at a random place behind the filesystem.
func anywhere(t *trial, im *image) {
	im.write(fsBytes+t.Rand.Int64N(im.Size-fsBytes), 1)
}

// restoredFrom makes the controller report this history of the disk.
func restoredFrom(origin, use string, sourceBytes int64) func(f *fixture) {
	return func(f *fixture) {
		f.Publish["origin"], f.Publish["use"] = origin, use
		f.Publish["sourceBytes"] = fmt.Sprint(sourceBytes)
	}
}

// tail returns a filesystem with data behind it.
func tail(name, fs string, fill func(*trial, *image), set func(*fixture)) generator {
	return generator{name, func(t *trial) {
		var before string
		kindOf(fs).of(t)
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

// nothingBehind returns a filesystem that must grow. Without such trials, a driver that never grows
// a filesystem would pass.
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

// mountedBytes returns the size of the staged filesystem, without its own structures.
func (f *fixture) mountedBytes() int64 {
	var st unix.Statfs_t
	harness.Must(unix.Statfs(f.Staging, &st))
	return int64(st.Blocks) * st.Bsize
}

// growthOfAnother interrupts a growth of the filesystem for another volume, and then writes a byte
// behind the filesystem.
func (f *fixture) growthOfAnother() {
	volume := f.VolumeID
	f.VolumeID = randomUUID(f.trial)
	f.failStage("resize2fs", "exit 1")
	f.VolumeID = volume
	f.poke(fsBytes+f.Rand.Int64N(fsBytes/2), 1)
	harness.Must(f.loop.Sync())
}

// described returns the kinds of ext whose group descriptors are damaged. They differ in the sizes
// and places of the descriptors, the bitmaps and the inodes. The clusters of those with bigalloc
// are small, so that there is a second group, which has a copy of the descriptors.
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

// descriptors returns filesystems that need a check, and whose group descriptors or copies of them
// are damaged. e2fsck -p would write damaged descriptors over the copies, so the driver must refuse
// the filesystem. If only copies are damaged, it must mount the filesystem.
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
				k.of(t)
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
				if larger { // a check comes before the growth, whose records are behind the filesystem
					t.Size += fsBytes
					t.Until = fsBytes
				}
			}})
		}
	}
	return all
}

func (k kind) growable() bool { return !slices.Contains(k.args, "bigalloc") }

// span is a part of a disk.
type span struct{ offset, bytes int64 }

var (
	descriptorPlaces = regexp.MustCompile(
		`(?m)^  (Primary|Backup) superblock at \d+, Group descriptors at (\d+)-(\d+)$`)
	descriptorBlocks = regexp.MustCompile(`(?m)^Block size: +(\d+)$`)
)

// descriptors returns the place of the group descriptors of an ext, and the places of their copies,
// as dumpe2fs reads them.
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

// damages contains functions that damage group descriptors in an evident way: a bitmap or a table
// of inodes would be outside of the filesystem.
var damages = []func(*trial, *image, span){
	// A sector is lost.
	func(_ *trial, im *image, s span) { im.wipe(s.offset, 512) },
	// Other bytes were written there.
	func(t *trial, im *image, s span) { im.write(s.offset, randomBytes(t.Rand, s.bytes)...) },
	func(t *trial, im *image, s span) {
		im.write(s.offset, slices.Repeat([]byte{byte(0x20 + t.Rand.IntN(0x60))}, int(s.bytes))...)
	},
	// A bitmap or the inodes of the first group are at block 0 or behind the end.
	func(t *trial, im *image, s span) {
		at := []uint32{0, 1 << 30, 1<<32 - 1}[t.Rand.IntN(3)]
		im.write(s.offset+4*t.Rand.Int64N(3), le.AppendUint32(nil, at)...)
	},
}

// misplaceInodes changes the place of the inodes of the first group, among them those of the root
// and the journal, to free blocks of the filesystem.
func misplaceInodes(t *trial, im *image, s span) {
	im.write(s.offset+8, le.AppendUint32(nil, uint32(140_000+t.Rand.Int64N(20_000)))...)
}
