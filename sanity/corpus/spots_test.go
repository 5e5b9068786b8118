package corpus_test

import (
	"errors"
	"os"
	"slices"
)

// spots are disks that are blank but for one place far from both ends, where something keeps a mark
// or a copy of one.
func spots() []generator {
	all := []generator{
		lonely("where LUKS2, VMFS and bcachefs have headers", mib+8*kib),
		lonely("where Oracle ASM has its second header", mib+254*4*kib),
		lonely("where VMFS begins", 2*mib+16*kib),
		lonely("where ZFS begins", 4*mib+32*kib),
		lonely("where the data of LUKS2 begin", 16*mib),
		lonely("where VMFS has its heartbeats", 18*mib),
		lonely("where btrfs has its second superblock", 64*mib),
		lonely("where btrfs has its third superblock", 256*gib),
		lonely("where NTFS has its file table", 3*gib),
		lonely("where Ceph has its second label", gib),
		lonely("where Ceph has its third label", 10*gib),
		lonely("where Ceph has its fourth label", 100*gib),
		lonely("where Ceph has its fifth label", 1000*gib),
		lonely("where a large xfs has its second group", 1024*gib),
		lonely("where ext4 has its first copy", 128*mib),
		{"one byte where an xfs of 8 groups has its third", func(t *trial) {
			t.Size = 3*gib + 8*mib
			fillByte(t, 2*(t.Size/8))
		}},
		{"one byte where an xfs of 5 groups has its second", func(t *trial) {
			t.Size = 23*gib + 8*mib
			blocks := (t.Size/4096 + 4) / 5
			fillByte(t, blocks*4096)
		}},
		{"data in a hundredth of the disk, where no mark would be", func(t *trial) {
			// Between the places that the formats know, on a disk of this size.
			t.Size = 3*gib + 8*mib
			start := t.Size / 1000 * 515 &^ (pageBytes - 1)
			t.Fill = func(im *image) {
				for at := start; at < start+t.Size/100; at += pageBytes {
					im.write(at+t.Rand.Int64N(pageBytes), 1)
				}
			}
			t.Want = foreign()
		}},
	}
	all = append(all, each(6, "a copy of an ext superblock", func(t *trial) {
		block := kib << t.Rand.IntN(7)
		group := min(8*block, 1<<16-8) * block
		first := int64(0)
		if block == kib {
			first = block
		}
		var groups []int64
		for _, base := range []int64{3, 5, 7} {
			for n := int64(1); n*group < 40*gib; n *= base {
				groups = append(groups, n)
			}
		}
		n := groups[t.Rand.IntN(len(groups))]
		t.Size = (n*group+first)/gib*gib + gib*(1+t.Rand.Int64N(9))
		fillByte(t, n*group+first+t.Rand.Int64N(kib))
	})...)
	all = append(all, each(4, "a copy of an xfs superblock", func(t *trial) {
		groups := int64(2) << t.Rand.IntN(5)
		blocks := (t.Size/4096 + groups - 1) / groups
		fillByte(t, (1+t.Rand.Int64N(groups-1))*blocks*4096+t.Rand.Int64N(512))
	})...)
	return slices.Clip(all)
}

// lonely is a disk with one byte there, of a size at which nothing else that is known keeps a mark
// in the same place.
func lonely(where string, at int64) generator {
	return generator{"one byte " + where, func(t *trial) {
		t.Size = max(3*gib, at/gib*gib+gib) + 8*mib
		fillByte(t, at)
	}}
}

// more are disks for which a single guard of the driver has an eye.
func more() []generator {
	twice := func(name, fs string, fill func(im *image), names ...string) generator {
		return generator{name, func(t *trial) {
			kindOf(fs).of(t)
			t.Size += mib // the other's mark lies behind the filesystem
			t.Fill = func(im *image) {
				im.filesystem(kindOf(fs))
				fill(im)
			}
			t.Want = foreign(names...)
		}}
	}
	backup := func(im *image) {
		header := gptHeader(uint64(im.Size/512-1), 1, uint64(im.Size/512), 2, gptArray())
		im.write(-512, header...)
	}
	return []generator{
		twice("ext3 before the backup of a GPT", ext3, backup, "gpt"),
		twice("ext4 before the backup of a GPT", ext4, backup, "gpt"),
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
			t.Want = refuse(notBlank, damaged, toolFailed)
			t.Want.Names, t.Want.Code = []string{"ext4"}, "Internal" // as the kernel refuses it
		}},
		twice("ext4 and btrfs at once", ext4, func(im *image) {
			path, err := im.bases.get("btrfs", fsBytes, func(base *image) { base.mkfs(kindOf(btrfs)) })
			im.err = err
			from := &image{Path: path, Size: fsBytes}
			im.write(64*kib, from.read(64*kib, 4*kib)...)
		}, "ext4", "btrfs"),
		{"a blank disk on which blkid finds something", func(t *trial) {
			t.Set = func(s *scene) error {
				_, err := s.wrap("blkid", "echo TYPE=somebodys_volume")
				return err
			}
			t.Want = foreign("somebodys_volume")
		}},
		{"a blank disk about which blkid is of two minds", func(t *trial) {
			t.Set = func(s *scene) error {
				_, err := s.wrap("blkid", "exit 8")
				return err
			}
			t.Want = foreign("several")
		}},
		{"a disk that the kernel remembers as blank", func(t *trial) {
			t.Set = (*scene).remembered
			t.Want = foreign("luks")
		}},
		{"a healthy disk with a hidden leg of multipath", func(t *trial) {
			kindOf(ext4).of(t)
			t.Set = func(s *scene) error {
				return errors.Join(s.bench.guest.plug("nvme2c0n1", s.DiskName, s.loop),
					os.Remove(s.bench.guest.node("nvme2c0n1")))
			}
			t.Want.Outcome = mounted
		}},
		{"a blank disk that the rack calls read-only", func(t *trial) {
			t.Set = func(s *scene) error {
				s.Publish["readOnly"] = "true"
				return nil
			}
			t.Want = refuse(readOnly)
		}},
	}
}
