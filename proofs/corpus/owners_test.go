//go:build linux

package corpus_test

import (
	"errors"
	"os"
)

// owners returns disks with more than one owner, or with an owner that only a part of the
// driver sees.
func owners() []generator {
	twice := func(name, fs string, fill func(im *image), names ...string) generator {
		return generator{name, func(t *trial) {
			kindOf(fs).of(t)
			t.Fill = func(im *image) {
				im.filesystem(kindOf(fs))
				fill(im)
			}
			t.Want = foreign(names...)
		}}
	}
	return []generator{
		twice("ext3 under the partition table of old", ext3, func(im *image) {
			im.write(0, mbr(0x83, 2048, 1<<20)...)
		}, "partition table (dos)", "ext3"),
		twice("ext4 under the partition table of old", ext4, func(im *image) {
			im.write(0, mbr(0x83, 2048, 1<<20)...)
		}, "partition table (dos)", "ext4"),
		{"ext4 whose superblock is damaged", func(t *trial) {
			kindOf(ext4).of(t)
			t.Fill = func(im *image) {
				im.filesystem(kindOf(ext4))
				im.write(1024+0x88, []byte("/not what was summed up")...)
			}
			t.Want = foreign("ext4")
		}},
		twice("ext4 and btrfs at once", ext4, btrfsSuperblock, "ext4", "btrfs"),
		{"ext4 of this volume and btrfs at once", func(t *trial) {
			kindOf(ext4).of(t)
			t.Fill = func(im *image) {
				im.filesystem(kindOf(ext4))
				btrfsSuperblock(im)
			}
			t.Set, t.Want = (*fixture).expectFound, foreign("ext4", "btrfs")
		}},
		{"a disk that the kernel remembers as blank", func(t *trial) {
			t.Set = (*fixture).remembered
			t.Want = foreign("luks")
		}},
	}
}

// btrfsSuperblock adds the superblock of a btrfs to an image.
func btrfsSuperblock(im *image) {
	path, err := im.bases.get("btrfs", fsBytes, func(base *image) { base.mkfs(kindOf(btrfs)) })
	im.err = err
	from := &image{Path: path, Size: fsBytes}
	im.write(64*kib, from.read(64*kib, 4*kib)...)
}

// oddities returns disks with unusual tools or surroundings.
func oddities() []generator {
	return []generator{
		{"a blank disk on which blkid finds something", func(t *trial) {
			t.Set = func(f *fixture) error {
				_, err := f.wrap("blkid", "echo TYPE=somebodys_volume")
				return err
			}
			t.Want = foreign("somebodys_volume")
		}},
		{"a blank disk about which blkid is of two minds", func(t *trial) {
			t.Set = func(f *fixture) error {
				_, err := f.wrap("blkid", "exit 8")
				return err
			}
			t.Want = foreign("several")
		}},
		{"a healthy disk with a hidden leg of multipath", func(t *trial) {
			kindOf(ext4).of(t)
			t.Set = func(f *fixture) error {
				return errors.Join(f.bench.Guest.Plug("nvme2c0n1", f.DiskName, f.loop),
					os.Remove(f.bench.Guest.Node("nvme2c0n1")))
			}
			t.Want.Outcome = mounted
		}},
		{"a blank disk that the rack calls read-only", func(t *trial) {
			t.Set = func(f *fixture) error {
				f.Publish["readOnly"] = "true"
				return nil
			}
			t.Want = refuse(readOnly)
		}},
	}
}
