//go:build linux

package corpus_test

import (
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
)

// described returns the kinds of ext whose group descriptors are damaged. They differ in the
// size and the place of the descriptors and of what these describe. In a bigalloc the groups
// are larger, and its clusters are small, so that there is a second group with a copy.
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

// descriptors returns filesystems that want a check, and whose group descriptors, or the copies
// of them, are damaged. e2fsck -p would write damaged descriptors over the copies, so the
// driver must leave the filesystem to a person. It does not need the copies, so it must mount a
// filesystem of which only these are damaged.
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
			{"place of its inodes", true, false, []func(*trial, *image, span){misplaceInodes}},
		} {
			all = append(all, generator{k.name + ", damaged in the " + d.of, func(t *trial) {
				k.of(t)
				larger := k.growable() && t.Rand.IntN(2) == 0
				damage := d.damages[t.Rand.IntN(len(d.damages))]
				t.Fill = func(im *image) {
					im.filesystem(k)
					places := im.descriptors()
					if !larger {
						im.patch(kib, kib, 0x3A, []byte{3}, sumExt) // its state is "clean" and "errors"
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
				if larger { // it is checked before it grows, with records of the growth behind it
					t.Size += fsBytes
					t.Until = fsBytes
				}
			}})
		}
	}
	return all
}

// growable reports whether the tools can grow the filesystem.
func (k kind) growable() bool { return !slices.Contains(k.args, "bigalloc") }

// span is a part of a disk.
type span struct{ offset, bytes int64 }

var (
	descriptorPlaces = regexp.MustCompile(
		`(?m)^  (Primary|Backup) superblock at \d+, Group descriptors at (\d+)-(\d+)$`)
	descriptorBlocks = regexp.MustCompile(`(?m)^Block size: +(\d+)$`)
)

// descriptors returns the places of the group descriptors of an ext, and then those of the
// copies, as dumpe2fs reads them.
func (im *image) descriptors() []span {
	if im.err != nil {
		return nil
	}
	out, err := exec.Command("dumpe2fs", im.Path).Output()
	size, found := descriptorBlocks.FindSubmatch(out), descriptorPlaces.FindAllSubmatch(out, -1)
	if err != nil || size == nil || len(found) < 2 || string(found[0][1]) != "Primary" {
		im.err = fmt.Errorf("dumpe2fs of %s finds no group descriptors and copies: %w\n%s", im.Path, err,
			out)
		return nil
	}
	number := func(b []byte) int64 {
		n, err := strconv.ParseInt(string(b), 10, 64)
		if err != nil {
			im.err = err
		}
		return n
	}
	var places []span
	for _, m := range found {
		first, last := number(m[2]), number(m[3])
		places = append(places, span{first * number(size[1]), (last - first + 1) * number(size[1])})
	}
	return places
}

// damages are the ways in which group descriptors are damaged, all of which are evident:
// something that a descriptor describes would be outside of the filesystem.
var damages = []func(*trial, *image, span){
	// A sector is lost.
	func(_ *trial, im *image, s span) { im.wipe(s.offset, 512) },
	// Something else was written there.
	func(t *trial, im *image, s span) { im.write(s.offset, randomBytes(t.Rand, s.bytes)...) },
	func(t *trial, im *image, s span) {
		im.write(s.offset, slices.Repeat([]byte{byte(0x20 + t.Rand.IntN(0x60))}, int(s.bytes))...)
	},
	// A bitmap or the inodes of the first group are nowhere, or behind the end.
	func(t *trial, im *image, s span) {
		at := []uint32{0, 1 << 30, 1<<32 - 1}[t.Rand.IntN(3)]
		im.write(s.offset+4*t.Rand.Int64N(3), le.AppendUint32(nil, at)...)
	},
}

// misplaceInodes makes the inodes of the first group, which are those of the root and of the
// journal, lie somewhere in free blocks of the filesystem.
func misplaceInodes(t *trial, im *image, s span) {
	im.write(s.offset+8, le.AppendUint32(nil, uint32(140_000+t.Rand.Int64N(20_000)))...)
}
