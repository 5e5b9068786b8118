//go:build linux

package corpus_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

func (im *image) uuid(fs string) string {
	return strings.TrimSpace(string(harness.Got(exec.Command("blkid", "-p", "-n", fs, "-s", "UUID",
		"-o", "value", im.Path).Output())))
}

// expect makes the controller report uuid as the UUID of the volume's filesystem.
func (f *fixture) expect(uuid string) { f.Publish["filesystemUUID"] = uuid }

func (f *fixture) expectFound() { f.expect(f.image.uuid(f.FS)) }

// expectAt is like expectFound, for a UUID that blkid does not find. The UUID is at offset.
func expectAt(offset int64) func(*fixture) {
	return func(f *fixture) {
		b := f.image.read(offset, 16)
		f.expect(fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:]))
	}
}

func (f *fixture) expectOther() { f.expect(randomUUID(f.trial)) }

func (f *fixture) hasExpected() error {
	harness.Must(f.loop.Sync())
	if got := f.image.uuid(f.FS); got != f.Publish["filesystemUUID"] {
		return fmt.Errorf("the filesystem has the UUID %s, not %s", got, f.Publish["filesystemUUID"])
	}
	return nil
}

// identities returns disks for which the controller reports the right UUID or another UUID.
func identities() []generator {
	var all []generator
	other, identified := (*fixture).expectOther, func(t *trial) { t.Check = (*fixture).hasExpected }
	for _, fs := range ours {
		all = append(all, with(fs+" of another volume", fs, refuse(wrongFilesystem), nil, other),
			with(fs+" of another volume, on a larger disk", fs, refuse(wrongFilesystem), nil,
				other).larger(),
			with(fs+" of this volume", fs, isMounted, nil, (*fixture).expectFound),
			blank("blank for "+fs+" of a UUID", fs, isFormatted, other).and(identified),
			blank("an own format for "+fs+" that had ended, before a request with another UUID", fs,
				isFormatted, func(f *fixture) {
					f.formatted()
					f.expectOther()
				}).and(identified))
	}
	return slices.Concat(all, unclean(), disputed())
}

// damageExt makes the checksum of an ext4's superblock wrong.
func damageExt(im *image) { im.write(1024+0x88, []byte("/a wrong checksum")...) }

// unfinishBtrfs writes the magic that a btrfs has until mkfs.btrfs has finished, and corrects the
// checksum of the superblock.
func unfinishBtrfs(im *image) { im.patch(64*kib, 4096, 0x40, []byte("!BHRfS_M"), sumBtrfs) }

func unclean() []generator {
	begun := refuse(wrongFilesystem)
	begun.Begun = true
	return []generator{
		with("ext4 of another volume that needs a check", "ext4 without checksums",
			refuse(wrongFilesystem), func(im *image) { im.write(1024+0x3A, 2, 0) }, // the state "errors"
			(*fixture).expectOther),
		blank("a mkfs that makes another UUID", ext4, begun, func(f *fixture) {
			f.wrap("mke2fs", `exec "$real" "$@" -U random`)
			f.expectOther()
		}),
		with("ext4 of this volume whose superblock is damaged", ext4, foreign("ext4"), damageExt,
			expectAt(1024+0x68)),
		with("btrfs of this volume whose mkfs did not end", btrfs, foreign("btrfs"), unfinishBtrfs,
			expectAt(64*kib+0x20)),
	}
}

func oldTable(im *image) { im.write(0, mbr(0x83, 2048, 1<<20)...) }

// disputed returns filesystems with signatures of other formats before, in or behind them.
func disputed() []generator {
	own := (*fixture).expectFound
	ufs2 := func(im *image) { im.write(64*kib+1372, []byte("\x19\x01\x54\x19")...) }
	bigUFS2 := func(im *image) { im.write(64*kib+1372, []byte("\x19\x54\x01\x19")...) }
	member := func(im *image) {
		at := mdPlaces["1.0"](im.Size)
		im.write(at, mdSuperblock(1, at)...)
	}
	var all []generator
	for _, fs := range ours {
		all = append(all,
			with(fs+" over the whole disk, and a member of an md RAID 1.0 at its end", fs,
				foreign("raid"), member, nil),
			with(fs+" of this volume, and a member of an md RAID 1.0 at its end", fs, isMounted, member,
				own))
	}
	for i, fs := range []string{ext3, ext4, btrfs} {
		// A btrfs gets label 1, because label 0 overwrites its superblock.
		label := func(im *image) { zfsLabel(im, int64(i/2)) }
		all = append(all, with(fs+" with a label of ZFS", fs, foreign("zfs"), label, nil),
			with(fs+" of this volume with a label of ZFS", fs, isMounted, label, own))
	}
	for _, fs := range []string{ext3, ext4} {
		all = append(all, with(fs+" with the magic of UFS2", fs, foreign("ufs"), ufs2, nil),
			with(fs+" of this volume with the magic of UFS2", fs, isMounted, ufs2, own))
	}
	for _, fs := range []string{ext4, xfs} {
		all = append(all, with(fs+" with the magic of an UFS2 of big-endian machines", fs,
			foreign("several"), bigUFS2, nil))
	}
	return append(all,
		with("ext4 of this volume under an old partition table", ext4, foreign("dos", "ext4"), oldTable,
			own),
		with("ext4 with a record of its growth and a member of an md RAID 1.0", ext4, foreign("raid"),
			member, (*fixture).forgeGrowth).larger().and(func(t *trial) {
			t.History = map[string]string{"origin": "blank", "use": "both"}
		}),
		with("ext4 of this volume before the backup of a GPT", ext4, isMounted, func(im *image) {
			im.write(-512, gptHeader(uint64(im.Size/512-1), 1, uint64(im.Size/512), 2, gptArray())...)
		}, own).and(func(t *trial) { t.Size += mib }))
}

// forgeGrowth forges a growth record of this volume, at an offset where the driver writes its own.
func (f *fixture) forgeGrowth() {
	f.poke(proof.GrowthSlots(f.image.Size)[0], f.forgery().GrowthRecord(f.image.Size, 0, true)...)
}

// owners returns disks with several formats, or one that only some of the driver's checks find.
func owners() []generator {
	return []generator{
		with("ext3 under an old partition table", ext3, foreign("partition table (dos)", "ext3"),
			oldTable, nil),
		with("ext4 under an old partition table", ext4, foreign("partition table (dos)", "ext4"),
			oldTable, nil),
		with("ext4 whose superblock is damaged", ext4, foreign("ext4"), damageExt, nil),
		with("ext4 and btrfs at once", ext4, foreign("ext4", "btrfs"), btrfsSuperblock, nil),
		with("ext4 of this volume and btrfs at once", ext4, foreign("ext4", "btrfs"), btrfsSuperblock,
			(*fixture).expectFound),
		blank("a disk that is blank in the page cache", ext4, foreign("luks"), (*fixture).remembered),
	}
}

func btrfsSuperblock(im *image) {
	from := &image{Size: fsBytes, Path: im.bases.get("btrfs", fsBytes,
		func(base *image) { base.mkfs(kindOf(btrfs)) })}
	im.write(64*kib, from.read(64*kib, 4*kib)...)
}

func oddities() []generator {
	blkid := func(script string) func(*fixture) {
		return func(f *fixture) { f.wrap("blkid", script) }
	}
	return []generator{
		blank("a blank disk on which blkid finds something", ext4, foreign("somebodys_volume"),
			blkid("echo TYPE=somebodys_volume")),
		blank("a blank disk for which blkid gives an ambivalent result", ext4, foreign("several"),
			blkid("exit 8")),
		with("a healthy disk with a hidden path of a multipath", ext4, isMounted, nil,
			func(f *fixture) {
				harness.Must(errors.Join(f.bench.Guest.Plug("nvme2c0n1", f.DiskName, f.loop),
					os.Remove(f.bench.Guest.Node("nvme2c0n1"))))
			}),
		blank("a blank disk that the rack reports as read-only", ext4, refuse(readOnly),
			(*fixture).reading),
	}
}

// These are sizes of disks with forged records. The records fill the disks of forgedFull and of
// forgedFullBtrfs bytes. A disk that grows gets forgedNext bytes.
const (
	forgedBytes     = 320 * mib
	forgedFull      = 64 * mib
	forgedFullBtrfs = 128 * mib
	forgedNext      = 512 * mib
)

// forging is a method of [proof.Forgery] that writes files with forged records to a directory.
type forging func(proof.Forgery, string) (proof.ForgedFiles, error)

func ofGrowths(f proof.Forgery, dir string) (proof.ForgedFiles, error) { return f.Fill(dir, true) }
func ofFormats(f proof.Forgery, dir string) (proof.ForgedFiles, error) { return f.Fill(dir, false) }

// forged returns volumes in whose files a workload has forged the driver's records, at the offsets
// where the driver writes its own. Some disks are then damaged or enlarged.
func forged() []generator {
	var all []generator
	pick := func(t *trial) {
		t.History = []map[string]string{made, nil, {"origin": "blank", "use": "both"}}[t.Rand.IntN(3)]
	}
	damaged := func(name, fs string, size int64, write forging) []generator {
		return []generator{
			forgery(fs+name+", its first MiB wiped", fs, size, write, refused, func(f *fixture) {
				f.wipe(0, mib)
			}),
			forgery(fs+name+", its superblock wiped", fs, size, write, refused, func(f *fixture) {
				pick(f.trial)
				f.wipe(superblocks[fs][0], superblocks[fs][1])
			}),
		}
	}
	larger := func(f *fixture) {
		pick(f.trial)
		f.grow(forgedNext)
	}
	const full, few = " full of forged records", " with forged records where the driver has its own"
	// ext3 and btrfs do not report where a file is, so the forged records fill the whole disk.
	all = append(all, damaged(full+" of a format", ext3, forgedFull, ofFormats)...)
	all = append(all, damaged(full+" of a format", btrfs, forgedFullBtrfs, ofFormats)...)
	all = append(all, forgery(ext3+full+" of a growth", ext3, forgedFull, ofGrowths, mounted, nil))
	for _, fs := range []string{ext4, xfs} {
		all = append(all, forgery(fs+few, fs, forgedBytes, proof.Forgery.Write, mounted, nil),
			forgery(fs+few+", on a larger disk", fs, forgedBytes, proof.Forgery.Write, mounted, larger))
		all = append(all, damaged(few, fs, forgedBytes, proof.Forgery.WriteFormats)...)
	}
	return all
}

// superblocks contains the offset and the size of each filesystem's first superblock.
var superblocks = map[string][2]int64{ext3: {1024, 1024}, ext4: {1024, 1024}, xfs: {0, 4096},
	btrfs: {64 * kib, 4096}}

// forgery returns a trial in which a workload has written forged records to files of the volume.
// The function change, if not nil, changes the disk before the driver stages it again.
func forgery(name, fs string, size int64, write forging, want outcome,
	change func(*fixture)) generator {
	return generator{name, func(t *trial) {
		t.FS, t.Size = fs, size
		var files proof.ForgedFiles
		checks := ""
		t.Set = func(f *fixture) {
			f.used(func() { files = harness.Got(write(f.forgery(), f.Staging)) })
			if change != nil {
				change(f)
			}
			checks = filepath.Join(f.dir, "checks")
			f.wrap("e2fsck", fmt.Sprintf("echo \"$@\" >>'%s'\nexec \"$real\" \"$@\"", checks))
			// change() may have changed the size or the history.
			f.Publish = f.publishContext()
		}
		t.Want.Outcome = want
		if want == refused {
			t.Want = foreign(fs, "ext4", "ext3", "ext2", "filesystem")
			t.Want.Reasons = append(t.Want.Reasons, "FilesystemDamaged")
		}
		t.Check = func(f *fixture) error {
			log, err := os.ReadFile(checks)
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
			if slices.Contains(strings.Fields(string(log)), "-y") {
				return f.bench.Forged.Checked(fmt.Errorf("a check repaired whatever it found: e2fsck %s",
					bytes.TrimSpace(log)))
			}
			if want == mounted {
				return f.bench.Forged.Checked(files.Check(f.Staging))
			}
			// The method judge has already compared the bytes of a refused disk.
			mounts, err := harness.MountsAt(f.Staging)
			if len(mounts) > 0 {
				err = errors.New("a disk with a workload's files was formatted")
			}
			return f.bench.Forged.Checked(err)
		}
	}}
}

func (f *fixture) forgery() proof.Forgery {
	return proof.Forgery{Volume: f.VolumeID, Disk: f.DiskName, Filesystem: f.FS,
		SizeBytes: f.image.Size, NextBytes: forgedNext, Device: f.loop.Path}
}

// grow enlarges the disk, as the rack does when it restores a snapshot to a larger volume.
func (f *fixture) grow(size int64) {
	f.image.resize(size)
	f.replaceLoop(false)
}

func (f *fixture) wipe(offset, n int64) { f.poke(offset, make([]byte, n)...) }

// forgedRecords returns a trial that compares forged records with the driver's own.
func forgedRecords() []generator {
	return []generator{{"an own format whose record is equal to a forged one", func(t *trial) {
		t.FS, t.Size = xfs, forgedBytes
		t.Set = func(f *fixture) {
			mark := f.learnMark()
			slots, want := proof.FormatSlots(f.image.Size), f.forgery().FormatRecord(f.image.Size)
			for i, p := range mark {
				if i >= len(slots) || p.offset != slots[i] || !bytes.Equal(p.bytes, want) {
					harness.Must(setupViolation(fmt.Sprintf("a forged record would be %q at %d, the driver's "+
						"is %q at %d; correct the forgery", want[:400], slots, p.bytes[:400], p.offset)))
				}
			}
		}
		t.Want.Outcome = formatted
	}}}
}

// noticesHarm tests the proof itself: a trial must fail if mke2fs writes to a disk other than the
// volume's, or if another program changes a file with forged records.
func (l *lab) noticesHarm(ctx context.Context) {
	l.t.Helper()
	b, err := l.newBench(ctx, "", "")
	if err == nil {
		err = b.AddBystanders(ctx, proof.Journal, &proof.Invariant{})
	}
	l.p.Fatal(err)
	for _, g := range []generator{
		{"a bystander that is written to", func(t *trial) {
			t.Set = func(f *fixture) {
				f.wrap("mke2fs", fmt.Sprintf("echo x | dd of='%s' conv=notrunc,fsync status=none\n"+
					`exec "$real" "$@"`, b.Bystanders.Loop(proof.BlankDisk).Path))
			}
			t.Want.Outcome = formatted
		}},
		forgery("a forged file that is written to", xfs, forgedBytes, proof.Forgery.Write, mounted,
			func(f *fixture) { f.poke(proof.FormatSlots(forgedBytes)[0]+1000, 1) }),
	} {
		v, err := b.try(ctx, g.trial(1))
		if err != nil || v.Wrong == nil {
			l.t.Errorf("%s was not noticed: %s, %v, %v", g.name, v.Outcome, v.Answer, err)
		}
	}
	l.p.Error(b.close())
}
