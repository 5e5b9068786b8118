//go:build linux

package corpus_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

// The sizes of disks with forged records, of disks that are full of them, and the size to which
// disks grow.
const (
	forgedBytes     = 320 * mib
	forgedFull      = 64 * mib
	forgedFullBtrfs = 128 * mib
	forgedNext      = 512 * mib
)

// forging is a method of a forgery that writes files.
type forging func(proof.Forgery, string) (proof.ForgedFiles, error)

func ofGrowths(f proof.Forgery, dir string) (proof.ForgedFiles, error) { return f.Fill(dir, true) }
func ofFormats(f proof.Forgery, dir string) (proof.ForgedFiles, error) { return f.Fill(dir, false) }

// forged returns volumes whose workloads have forged records of the driver in files, at the places
// of the driver's own records. Then some of the disks are damaged or enlarged, and the controller
// may report another history.
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
	// These filesystems do not report the places of files, so the whole disk is filled with records.
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

// superblocks contains the offset and the size of the first superblock of each filesystem.
var superblocks = map[string][2]int64{ext3: {1024, 1024}, ext4: {1024, 1024}, xfs: {0, 4096},
	btrfs: {64 * kib, 4096}}

// forgery returns a trial of a disk in whose files a workload has forged records. Then, if it is
// not nil, that function changes the disk.
func forgery(name, fs string, size int64, write forging, want outcome,
	then func(*fixture)) generator {
	return generator{name, func(t *trial) {
		t.FS, t.Size = fs, size
		var files proof.ForgedFiles
		checks := ""
		t.Set = func(f *fixture) {
			f.used(func() { files = harness.Got(write(f.forgery(), f.Staging)) })
			if then != nil {
				then(f)
			}
			checks = filepath.Join(f.dir, "checks")
			f.wrap("e2fsck", fmt.Sprintf("echo \"$@\" >>'%s'\nexec \"$real\" \"$@\"", checks))
			// The change may have set another size or history.
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
			// It need not look for changed bytes: judge does that if the call is refused.
			m, err := f.staged()
			if m != nil {
				err = errors.New("a disk with a workload's files was formatted")
			}
			return f.bench.Forged.Checked(err)
		}
	}}
}

// forgery returns a forgery by a workload of the volume.
func (f *fixture) forgery() proof.Forgery {
	return proof.Forgery{Volume: f.VolumeID, Disk: f.DiskName, Filesystem: f.FS,
		SizeBytes: f.image.Size, NextBytes: forgedNext, Device: f.loop.Path}
}

// grow enlarges the disk, as the rack does when it restores a larger volume from a snapshot.
func (f *fixture) grow(size int64) {
	f.image.resize(size)
	f.replaceLoop(false)
}

// wipe sets n bytes of the disk to zero through its device.
func (f *fixture) wipe(offset, n int64) { f.poke(offset, make([]byte, n)...) }

// forgedRecords returns a trial that compares a forged record with the driver's own: the bytes and
// the places must be equal.
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

// noticesHarm checks that a trial fails if a tool of the driver writes to a bystander, or if
// another program changes a file of forged records.
func noticesHarm(ctx context.Context, t *testing.T, p *proof.Proof, run *harness.Run,
	bases *bases) {
	t.Helper()
	b, err := newBench(ctx, run, bases, "", nil)
	if err == nil {
		err = b.AddBystanders(ctx, proof.Journal, &proof.Invariant{})
	}
	p.Fatal(err)
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
			t.Errorf("%s was not noticed: %s, %v, %v", g.name, v.Outcome, v.Answer, err)
		}
	}
	p.Error(b.close())
}
