//go:build linux

package corpus_test

import (
	"bytes"
	"fmt"
	"hash/crc32"
)

// marksThen returns a disk with the marks of this volume's unfinished format, which set then
// changes.
func marksThen(name string, w want, set func(f *fixture, mark []piece)) generator {
	return situation(name, w, func(f *fixture) { set(f, f.learnMark()) })
}

// foreignFormats returns disks with marks of another volume or disk, or with invalid marks.
func foreignFormats() []generator {
	var all []generator
	no := func(name string, set func(f *fixture, mark []piece)) {
		all = append(all, marksThen("an unfinished format "+name, foreign("unfinished", "mark"), set))
	}
	no("of another volume", func(f *fixture, _ []piece) {
		f.VolumeID = randomUUID(f.trial)
	})
	no("of another disk", func(f *fixture, _ []piece) {
		f.DiskName = fmt.Sprintf("csi-%016x", f.Rand.Uint64())
		f.Publish["diskName"] = f.DiskName
		f.attribute("device/serial", f.DiskName+"\n")
	})
	no("with one mark of another volume", func(f *fixture, mark []piece) {
		other := f.forgery()
		other.Volume = randomUUID(f.trial)
		f.poke(mark[len(mark)-1].offset, other.FormatRecord(f.image.Size)...)
	})
	for i := range 4 {
		no(fmt.Sprintf("whose marks are damaged %d", i+1),
			func(f *fixture, mark []piece) {
				used := len(bytes.TrimRight(mark[0].bytes, "\x00"))
				at := f.Rand.IntN(used)
				for n := range mark {
					mark[n].bytes[at] ^= byte(1 << f.Rand.IntN(8))
				}
				f.pokeAll(mark)
			})
	}
	for _, forgery := range forgeries {
		no("whose marks "+forgery.name,
			func(f *fixture, mark []piece) {
				for _, p := range mark {
					forgery.forge(p.bytes)
				}
				f.pokeAll(mark)
			})
	}
	return all
}

// forgeries contains changes of one value of a mark. A mark has its version at offset 16, the
// checksum of the rest at 20, the length of its text at 24, and then the text.
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

// takenFormats returns disks with the driver's own unfinished format that must not be repeated,
// mostly because another program has written to the disk since.
func takenFormats() []generator {
	var all []generator
	no := func(name string, w want, set func(f *fixture, mark []piece)) {
		all = append(all, marksThen("an unfinished format "+name, w, set))
	}
	all = append(all, marksThen("an unfinished format on a disk where Ceph has put a label",
		foreign("ceph"), func(f *fixture, _ []piece) {
			// blkid reads only the first label of Ceph, and not this copy.
			f.poke(gib, []byte("bluestore block device\n")...)
		}).and(func(t *trial) { t.Size = gib + smallest }))
	blkid := func(what, found string) func(*fixture, []piece) {
		return func(f *fixture, _ []piece) {
			f.wrap("blkid", "echo "+what+"="+found)
			f.poke(8*kib, []byte("what only blkid understands")...)
		}
	}
	no("on a disk on which blkid finds something", foreign("somebodys_volume"),
		blkid("TYPE", "somebodys_volume"))
	no("on a disk on which blkid finds a table", foreign("sometable"), blkid("PTTYPE", "sometable"))
	no("on a disk that is read-only now", refuse(readOnly),
		func(f *fixture, _ []piece) { f.replaceLoop(true) })
	no("on a disk that a program has opened", refuse(held),
		func(f *fixture, _ []piece) { f.hold() })
	no("of a volume of unknown size", refuse(sizeMissing),
		func(f *fixture, _ []piece) { f.forgetSize() })
	no("under a LUKS header", foreign("luks"), func(f *fixture, _ []piece) {
		f.poke(0, []byte("LUKS\xba\xbe\x00\x02")...)
	})
	no("under a GPT", foreign("gpt"), func(f *fixture, _ []piece) {
		f.image.gpt(512, true, true, true)
	})
	no("that cannot be read to its end", refuse(unreadable),
		func(f *fixture, _ []piece) {
			f.image.cut(f.image.Size - mib)
		})
	return all
}
