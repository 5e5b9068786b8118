//go:build linux

package corpus_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

// uuid returns the UUID of the filesystem at the start of an image, as blkid reads it.
func (im *image) uuid(fs string) (string, error) {
	out, err := exec.Command("blkid", "-p", "-n", fs, "-s", "UUID", "-o", "value", im.Path).Output()
	if err != nil {
		return "", fmt.Errorf("read the UUID of %s: %w", im.Path, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// expect makes the controller report this UUID of the volume's filesystem.
func (f *fixture) expect(uuid string) error {
	f.Publish["filesystemUUID"] = uuid
	return nil
}

// expectFound makes the controller report the UUID of the filesystem on the disk.
func (f *fixture) expectFound() error {
	uuid, err := f.image.uuid(f.FS)
	return errors.Join(err, f.expect(uuid))
}

// expectAt makes the controller report the UUID at an offset of the disk, whose filesystem blkid
// does not find.
func expectAt(offset int64) func(*fixture) error {
	return func(f *fixture) error {
		b := f.image.read(offset, 16)
		return errors.Join(f.image.err, f.expect(fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6],
			b[6:8], b[8:10], b[10:])))
	}
}

// expectOther makes the controller report another UUID.
func (f *fixture) expectOther() error { return f.expect(randomUUID(f.trial)) }

// hasExpected returns an error unless the filesystem has the expected UUID.
func (f *fixture) hasExpected() error {
	if err := f.loop.Sync(); err != nil {
		return err
	}
	got, err := f.image.uuid(f.FS)
	if err == nil && got != f.Publish["filesystemUUID"] {
		err = fmt.Errorf("the filesystem has the UUID %s, not %s", got, f.Publish["filesystemUUID"])
	}
	return err
}

// identities returns disks for which the controller reports the UUID of a filesystem: that of the
// disk, or another one.
func identities() []generator {
	var all []generator
	for _, fs := range ours {
		all = append(all, generator{fs + " of another volume", func(t *trial) {
			kindOf(fs).of(t)
			t.Set, t.Want = (*fixture).expectOther, refuse(wrongFilesystem)
		}}, generator{fs + " of another volume, on a larger disk", func(t *trial) {
			kindOf(fs).of(t)
			t.Size += fsBytes
			t.Set, t.Want = (*fixture).expectOther, refuse(wrongFilesystem)
		}}, generator{fs + " of this volume", func(t *trial) {
			kindOf(fs).of(t)
			t.Set, t.Want.Outcome = (*fixture).expectFound, mounted
		}}, generator{"blank for " + fs + " of a UUID", func(t *trial) {
			t.FS = fs
			t.Set, t.Want.Outcome, t.Check = (*fixture).expectOther, formatted, (*fixture).hasExpected
		}}, generator{"an own format for " + fs + " that had ended, before a request with another UUID",
			func(t *trial) {
				t.FS = fs
				t.Set = func(f *fixture) error {
					return errors.Join(f.cutOff(`"$real" "$@"; exit 1`), f.expectOther())
				}
				t.Want.Outcome, t.Check = formatted, (*fixture).hasExpected
			}})
	}
	return slices.Concat(all, unclean(), disputed())
}

// unclean returns filesystems that must be refused although they have this volume's UUID, or before
// a repair writes to them.
func unclean() []generator {
	return []generator{
		{"ext4 of another volume that needs a check", func(t *trial) {
			kindOf("ext4 without checksums").of(t)
			t.Fill = func(im *image) {
				im.filesystem(kindOf("ext4 without checksums"))
				im.write(1024+0x3A, 2, 0) // its state is "errors"
			}
			t.Set, t.Want = (*fixture).expectOther, refuse(wrongFilesystem)
		}},
		{"a mkfs that makes another UUID", func(t *trial) {
			t.Set = func(f *fixture) error {
				_, err := f.wrap("mke2fs", `exec "$real" "$@" -U random`)
				return errors.Join(err, f.expectOther())
			}
			t.Want = refuse(wrongFilesystem)
			t.Want.Begun = true
		}},
		{"ext4 of this volume whose superblock is damaged", func(t *trial) {
			kindOf(ext4).of(t)
			t.Fill = func(im *image) {
				im.filesystem(kindOf(ext4))
				im.write(1024+0x88, []byte("/a wrong checksum")...)
			}
			t.Set, t.Want = expectAt(1024+0x68), foreign("ext4")
		}},
		{"btrfs of this volume whose mkfs did not end", func(t *trial) {
			kindOf(btrfs).of(t)
			t.Fill = func(im *image) {
				im.filesystem(kindOf(btrfs))
				im.patch(64*kib, 4096, 0x40, []byte("!BHRfS_M"), sumBtrfs)
			}
			t.Set, t.Want = expectAt(64*kib+0x20), foreign("btrfs")
		}},
	}
}

// disputed returns filesystems with marks of other formats around them or in their data.
func disputed() []generator {
	with := func(name, fs string, fill func(im *image), own bool, w want) generator {
		return generator{name, func(t *trial) {
			kindOf(fs).of(t)
			t.Fill = func(im *image) {
				im.filesystem(kindOf(fs))
				fill(im)
			}
			if own {
				t.Set = (*fixture).expectFound
			}
			t.Want = w
		}}
	}
	ufs2 := func(im *image) { im.write(64*kib+1372, []byte("\x19\x01\x54\x19")...) }
	member := func(im *image) {
		at := mdPlaces["1.0"](im.Size)
		im.write(at, mdSuperblock(1, at)...)
	}
	var all []generator
	for _, fs := range ours {
		all = append(all,
			with(fs+" over the whole disk, and a member of an md RAID 1.0 at its end", fs, member, false,
				foreign("raid")),
			with(fs+" of this volume, and a member of an md RAID 1.0 at its end", fs, member, true,
				want{Outcome: mounted}))
	}
	for i, fs := range []string{ext3, ext4, btrfs} {
		// Label 0 would overwrite the superblock of a btrfs.
		label := func(im *image) { zfsLabel(im, int64(i/2)) }
		all = append(all,
			with(fs+" with a label of ZFS", fs, label, false, foreign("zfs")),
			with(fs+" of this volume with a label of ZFS", fs, label, true, want{Outcome: mounted}))
	}
	for _, fs := range []string{ext3, ext4} {
		all = append(all,
			with(fs+" with the magic of UFS2", fs, ufs2, false, foreign("ufs")),
			with(fs+" of this volume with the magic of UFS2", fs, ufs2, true, want{Outcome: mounted}))
	}
	for _, fs := range []string{ext4, xfs} {
		all = append(all, with(fs+" with the magic of an UFS2 of big-endian machines", fs,
			func(im *image) { im.write(64*kib+1372, []byte("\x19\x54\x01\x19")...) }, false,
			foreign("several")))
	}
	all = append(all, with("ext4 of this volume under an old partition table", ext4,
		func(im *image) { im.write(0, mbr(0x83, 2048, 1<<20)...) }, true, foreign("dos", "ext4")))
	all = append(all, generator{"ext4 with a record of its growth and a member of an md RAID 1.0",
		func(t *trial) {
			kindOf(ext4).of(t)
			t.Size += fsBytes
			t.History = map[string]string{"origin": "blank", "use": "both"}
			t.Fill = func(im *image) {
				im.filesystem(kindOf(ext4))
				member(im)
			}
			t.Set = func(f *fixture) error {
				return f.poke(proof.GrowthSlots(f.image.Size)[0],
					f.forgery().GrowthRecord(f.image.Size, 0, true)...)
			}
			t.Want = foreign("raid")
		}})
	return append(all, generator{"ext4 of this volume before the backup of a GPT", func(t *trial) {
		kindOf(ext4).of(t)
		t.Size += mib
		t.Fill = func(im *image) {
			im.filesystem(kindOf(ext4))
			im.write(-512, gptHeader(uint64(im.Size/512-1), 1, uint64(im.Size/512), 2, gptArray())...)
		}
		t.Set, t.Want = (*fixture).expectFound, want{Outcome: mounted}
	}})
}

// owners returns disks with more than one format, or whose format only a part of the driver's
// checks finds.
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
		twice("ext3 under an old partition table", ext3, func(im *image) {
			im.write(0, mbr(0x83, 2048, 1<<20)...)
		}, "partition table (dos)", "ext3"),
		twice("ext4 under an old partition table", ext4, func(im *image) {
			im.write(0, mbr(0x83, 2048, 1<<20)...)
		}, "partition table (dos)", "ext4"),
		{"ext4 whose superblock is damaged", func(t *trial) {
			kindOf(ext4).of(t)
			t.Fill = func(im *image) {
				im.filesystem(kindOf(ext4))
				im.write(1024+0x88, []byte("/a wrong checksum")...)
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
		{"a disk that is blank in the page cache", func(t *trial) {
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
		{"a blank disk for which blkid gives an ambivalent result", func(t *trial) {
			t.Set = func(f *fixture) error {
				_, err := f.wrap("blkid", "exit 8")
				return err
			}
			t.Want = foreign("several")
		}},
		{"a healthy disk with a hidden path of a multipath", func(t *trial) {
			kindOf(ext4).of(t)
			t.Set = func(f *fixture) error {
				return errors.Join(f.bench.Guest.Plug("nvme2c0n1", f.DiskName, f.loop),
					os.Remove(f.bench.Guest.Node("nvme2c0n1")))
			}
			t.Want.Outcome = mounted
		}},
		{"a blank disk that the rack reports as read-only", func(t *trial) {
			t.Set = func(f *fixture) error {
				f.Publish["readOnly"] = "true"
				return nil
			}
			t.Want = refuse(readOnly)
		}},
	}
}
