//go:build linux

package corpus_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

type piece struct {
	offset int64
	bytes  []byte
}

func mkfs(fs string) string {
	switch fs {
	case xfs, btrfs:
		return "mkfs." + fs
	}
	return "mke2fs"
}

// cutOff stages the volume with the script in place of mkfs. The stage must fail, and leaves an
// unfinished format of this volume.
func (f *fixture) cutOff(script string) { f.failStage(mkfs(f.FS), script) }

// failStage stages the volume with the script in place of the program. The stage must fail.
func (f *fixture) failStage(program, script string) {
	unwrap := f.wrap(program, script)
	if err := f.stage(context.Background()); err == nil {
		harness.Must(setupViolation("the stage succeeded although " + program + " failed"))
	}
	harness.Must(errors.Join(unwrap(), f.loop.Sync()))
}

// learnMark makes the driver begin a format on the blank disk, with a mkfs that fails before it
// writes. It returns the driver's marks: all pages that are not zero.
func (f *fixture) learnMark() (pieces []piece) {
	f.cutOff("exit 1")
	harness.Must(proof.EachPage(f.image.Path, func(at int64, page []byte) error {
		pieces = append(pieces, piece{at, bytes.Clone(page)})
		return nil
	}))
	if len(pieces) == 0 {
		harness.Must(setupViolation("the driver left no mark on the disk before it ran mkfs"))
	}
	f.mark = pieces
	return pieces
}

// poke writes to the disk through its device, as other programs of the node do.
func (f *fixture) poke(offset int64, b ...byte) {
	harness.Must(proof.WriteAt(f.loop.Path, offset, b...))
}

// markOnly leaves the disk with nothing but the driver's marks.
func (f *fixture) markOnly() { f.learnMark() }

// formatted() leaves the disk with a complete filesystem and the driver's marks.
func (f *fixture) formatted() { f.cutOff(failAtEnd) }

func (f *fixture) pokeAll(pieces []piece) {
	for _, p := range pieces {
		f.poke(p.offset, p.bytes...)
	}
}

func formats() []generator {
	return slices.Concat(ownFormats(), oddPrograms(), foreignFormats(), takenFormats(),
		copiedMarks(), growths())
}

// ownFormats returns disks with an unfinished format of this volume, which the driver must repeat.
func ownFormats() []generator {
	var all []generator
	again := func(name, fs string, set func(f *fixture)) {
		all = append(all, blank(name, fs, isFormatted, set).and(func(t *trial) {
			t.Check = (*fixture).marksErased
		}))
	}
	for _, fs := range ours {
		again("an own format for "+fs+" that had not begun", fs, (*fixture).markOnly)
		again("an own format for "+fs+" that had ended without a record of its end", fs,
			(*fixture).formatted)
		for i := range 3 {
			again(fmt.Sprintf("an own format for %s, partly written, %d", fs, i+1), fs,
				(*fixture).formattedInPart)
		}
	}
	again("an own format for btrfs with little more than the superblock", btrfs,
		(*fixture).formattedSuperblocks)
	again("an own format for xfs whose log is not written", xfs, (*fixture).formattedWithoutLog)
	again("an own format of a volume whose id is no UUID", ext4, func(f *fixture) {
		f.VolumeID = "a-static-volume"
		f.learnMark()
	})
	again("an own format for ext4, which is to be xfs now", ext4, func(f *fixture) {
		f.formatted()
		f.FS = xfs
	})
	again("an own format with only one valid mark", ext4, func(f *fixture) {
		for _, p := range f.learnMark()[1:] {
			f.poke(p.offset+8+f.Rand.Int64N(16), 0xFF)
		}
	})
	again("an own format with only one mark", xfs, func(f *fixture) {
		pieces := f.learnMark()
		for _, p := range pieces[:len(pieces)-1] {
			f.wipe(p.offset, int64(len(p.bytes)))
		}
	})
	return all
}

func oddPrograms() []generator {
	used := []byte("mkfs has written at the place of the mark")
	return []generator{
		blank("a mkfs that fails at its end", ext4, want{Outcome: refused, Begun: true,
			Reasons: []string{toolFailed}, Code: "Internal", Says: []string{"mke2fs"}},
			func(f *fixture) { f.wrap("mke2fs", failAtEnd) }),
		{"a mkfs that writes over a mark", func(t *trial) {
			var slot int64
			t.Set = func(f *fixture) {
				slot = f.learnMark()[0].offset
				f.mark = nil
				file := filepath.Join(f.dir, "used")
				harness.Must(os.WriteFile(file, used, 0o600))
				f.wrap("mke2fs", fmt.Sprintf(`"$real" "$@" && for disk; do :; done
exec dd if='%s' of="$disk" bs=4096 seek=%d conv=notrunc,fsync status=none`, file, slot/4096))
			}
			t.Want = isFormatted
			t.Check = func(f *fixture) error {
				if now := f.image.read(slot, int64(len(used))); !bytes.Equal(now, used) {
					return errors.New("the driver has erased what mkfs wrote at the place of its mark")
				}
				return nil
			}
		}},
	}
}

// formatAndLose formats the disk, and wipes the pages for which lose() is true, except marks.
func (f *fixture) formatAndLose(lose func(at int64, page []byte) bool) {
	marks := f.learnMark()
	f.formatted()
	harness.Must(proof.EachPage(f.image.Path, func(at int64, page []byte) error {
		if lose(at, page) && !slices.ContainsFunc(marks, func(p piece) bool { return p.offset == at }) {
			f.wipe(at, int64(len(page)))
		}
		return nil
	}))
}

// formattedInPart formats the disk, and wipes random pages of the filesystem, like a power cut
// before a flush. The marks stay, because the driver had flushed them. A btrfs loses whole blocks,
// because only a block's header names the filesystem. It always loses its first superblock, because
// the driver would mount a btrfs in which "btrfs check" finds no damage.
func (f *fixture) formattedInPart() {
	unit, lost, last, gone := int64(pageBytes), f.Rand.IntN(100), int64(-1), false
	if f.FS == btrfs {
		unit = 16 * kib
	}
	f.formatAndLose(func(at int64, _ []byte) bool {
		if at/unit != last {
			last, gone = at/unit, f.Rand.IntN(100) < lost
		}
		return gone || f.FS == btrfs && at == 64*kib
	})
}

func (f *fixture) formattedSuperblocks() {
	f.formatAndLose(func(at int64, _ []byte) bool { return at != 64*kib && at != 64<<20 })
}

func (f *fixture) formattedWithoutLog() {
	lost := 0
	f.formatAndLose(func(_ int64, page []byte) bool {
		log := bytes.HasPrefix(page, []byte{0xFE, 0xED, 0xBA, 0xBE})
		if log {
			lost++
		}
		return log
	})
	if lost == 0 {
		harness.Must(errors.New("the filesystem has no log"))
	}
}

func (f *fixture) marksErased() error {
	for _, p := range f.mark {
		if bytes.Equal(f.image.read(p.offset, 16), p.bytes[:16]) {
			return fmt.Errorf("the mark at offset %d still exists", p.offset)
		}
	}
	return nil
}

// growths returns ext filesystems whose growth was interrupted. The driver must mount them.
func growths() []generator {
	var all []generator
	for _, fs := range []string{ext3, ext4, "ext4 with 1024-byte blocks"} {
		for _, c := range []struct{ when, program, script string }{
			{"before its check", "e2fsck", "exit 8"},
			{"after its check", "e2fsck", `"$real" "$@"; exit 8`},
			{"before it began", "resize2fs", "exit 1"},
			{"after it had ended", "resize2fs", failAtEnd},
		} {
			all = append(all, with("a growth of "+fs+" that was cut off "+c.when, fs, isMounted, nil,
				func(f *fixture) { f.failStage(c.program, c.script) }).larger())
		}
	}
	return all
}

// copiedMarks returns healthy filesystems with valid marks of this volume, as a workload may write
// them.
func copiedMarks() []generator {
	all := []generator{with("ext4 that was filled without a mount, under its mark", ext4, isMounted,
		nil, func(f *fixture) {
			for _, slot := range proof.FormatSlots(f.image.Size) {
				f.poke(slot, f.forgery().FormatRecord(f.image.Size)...)
			}
		})}
	for _, fs := range ours {
		all = append(all, blank("a filesystem of "+fs+" that was mounted, under this volume's mark", fs,
			isMounted, func(f *fixture) {
				mark := f.learnMark()
				f.used(func() {})
				f.pokeAll(mark)
			}))
	}
	return all
}

func (f *fixture) used(workload func()) {
	harness.Must(f.stage(context.Background()))
	harness.Unforked(func() {
		harness.Must(os.WriteFile(filepath.Join(f.Staging, payloadName), f.bench.bases.payload, 0o600))
		workload()
	})
	harness.Must(errors.Join(f.unstage(context.Background()), f.loop.Sync()))
}

func marksThen(name string, w want, set func(f *fixture)) generator {
	return situation("an unfinished format "+name, w, func(f *fixture) {
		f.learnMark()
		set(f)
	})
}

func foreignFormats() (all []generator) {
	no := func(name string, set func(f *fixture)) {
		all = append(all, marksThen(name, foreign("unfinished", "mark"), set))
	}
	no("of another volume", func(f *fixture) { f.VolumeID = randomUUID(f.trial) })
	no("of another disk", func(f *fixture) {
		f.DiskName = fmt.Sprintf("csi-%016x", f.Rand.Uint64())
		f.Publish["diskName"] = f.DiskName
		f.attribute("device/serial", f.DiskName+"\n")
	})
	no("with one mark of another volume", func(f *fixture) {
		other := f.forgery()
		other.Volume = randomUUID(f.trial)
		f.poke(f.mark[len(f.mark)-1].offset, other.FormatRecord(f.image.Size)...)
	})
	for i := range 4 {
		no(fmt.Sprintf("whose marks are damaged %d", i+1), func(f *fixture) {
			at := f.Rand.IntN(len(bytes.TrimRight(f.mark[0].bytes, "\x00")))
			for _, p := range f.mark {
				p.bytes[at] ^= byte(1 << f.Rand.IntN(8))
			}
			f.pokeAll(f.mark)
		})
	}
	for _, forgery := range forgeries {
		no("whose marks "+forgery.name, func(f *fixture) {
			for _, p := range f.mark {
				forgery.forge(p.bytes)
			}
			f.pokeAll(f.mark)
		})
	}
	return all
}

// forgeries make a mark invalid. A mark has its version at offset 16, and the length of its text at
// offset 24. The field at offset 20 is the checksum of the bytes from offset 24 on.
var forgeries = []struct {
	name  string
	forge func(b []byte)
}{
	{"have a wrong checksum", func(b []byte) { b[20] ^= 1 }},
	{"are of another version", func(b []byte) { le.PutUint32(b[16:], 2) }},
	{"name a longer text than they have", func(b []byte) {
		le.PutUint32(b[24:], 1<<31)
		sumUp(b)
	}},
	{"name another size", func(b []byte) {
		i := bytes.Index(b, []byte(`"sizeBytes":`)) + len(`"sizeBytes":`)
		b[i] = '1' + (b[i]-'0')%9
		sumUp(b)
	}},
}

func sumUp(b []byte) {
	le.PutUint32(b[20:], crc32.Checksum(b[24:512], crc32.MakeTable(crc32.Castagnoli)))
}

// takenFormats returns disks with an unfinished format, which the driver must not repeat or mount.
func takenFormats() []generator {
	blkid := func(what, found string) func(*fixture) {
		return func(f *fixture) {
			f.wrap("blkid", "echo "+what+"="+found)
			f.poke(8*kib, []byte("what only blkid understands")...)
		}
	}
	return []generator{
		marksThen("on a disk where Ceph has put a label", foreign("ceph"), func(f *fixture) {
			// blkid misses this copy of Ceph's label, because it checks only the start of the disk.
			f.poke(gib, []byte("bluestore block device\n")...)
		}).and(func(t *trial) { t.Size = gib + smallest }),
		marksThen("on a disk on which blkid finds something", foreign("somebodys_volume"),
			blkid("TYPE", "somebodys_volume")),
		marksThen("on a disk on which blkid finds a table", foreign("sometable"),
			blkid("PTTYPE", "sometable")),
		marksThen("on a disk that is read-only now", refuse(readOnly),
			func(f *fixture) { f.replaceLoop(true) }),
		marksThen("on a disk that a program has opened", refuse(held), (*fixture).hold),
		marksThen("of a volume of unknown size", refuse(sizeMissing), (*fixture).forgetSize),
		marksThen("under a LUKS header", foreign("luks"), func(f *fixture) {
			f.poke(0, []byte("LUKS\xba\xbe\x00\x02")...)
		}),
		marksThen("under a GPT", foreign("gpt"), func(f *fixture) { f.image.gpt(512, true, true, true) }),
		marksThen("that cannot be read to its end", refuse(unreadable),
			func(f *fixture) { f.image.cut(f.image.Size - mib) }),
	}
}
