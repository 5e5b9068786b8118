package corpus_test

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
)

// marksThen is a disk that has the marks of this volume's format, and then something else.
func marksThen(name string, w want, set func(s *scene, mark []piece) error) generator {
	return generator{name, func(t *trial) {
		t.FS = ours[t.Rand.IntN(len(ours))]
		t.Size += gib // so that all copies of labels have room
		t.Want = w
		t.Set = func(s *scene) error {
			mark, err := s.learnMark()
			if err != nil {
				return err
			}
			return set(s, mark)
		}
	}}
}

// foreignFormats are marks that are not this volume's, or not to be believed.
func foreignFormats() []generator {
	var all []generator
	no := func(name string, set func(s *scene, mark []piece) error) {
		all = append(all, marksThen("an unfinished format "+name, foreign("unfinished", "mark"), set))
	}
	no("of another volume", func(s *scene, _ []piece) error {
		s.VolumeID = randomUUID(s.trial)
		return nil
	})
	no("of another disk", func(s *scene, _ []piece) error {
		s.DiskName = fmt.Sprintf("csi-%016x", s.Rand.Uint64())
		s.Publish["diskName"] = s.DiskName
		return s.bench.guest.tell(s.Device, "device/serial", s.DiskName+"\n")
	})
	for i := range 4 {
		no(fmt.Sprintf("whose marks are damaged %d", i+1),
			func(s *scene, mark []piece) error {
				used := len(bytes.TrimRight(mark[0].bytes, "\x00"))
				at := s.Rand.IntN(used)
				for n := range mark {
					mark[n].bytes[at] ^= byte(1 << s.Rand.IntN(8))
				}
				return s.pokeAll(mark)
			})
	}
	for _, f := range forgeries {
		no("whose marks "+f.name,
			func(s *scene, mark []piece) error {
				for _, p := range mark {
					f.forge(p.bytes)
				}
				return s.pokeAll(mark)
			})
	}
	return all
}

// forgeries are marks with one thing wrong and a checksum that is right. A mark has its version at
// 16, the checksum of what follows at 20, the length of its text at 24, and then the text.
var forgeries = []struct {
	name  string
	forge func(b []byte)
}{
	{"do not add up", func(b []byte) { b[20] ^= 1 }},
	{"are of another version", func(b []byte) { le.PutUint32(b[16:], 2) }},
	{"tell of a longer text than they have", func(b []byte) {
		le.PutUint32(b[24:], 1<<31)
		sumUp(b)
	}},
	{"tell of another size", func(b []byte) {
		i := bytes.Index(b, []byte(`"sizeBytes":`)) + len(`"sizeBytes":`)
		b[i] = '1' + (b[i]-'0')%9
		sumUp(b)
	}},
}

// sumUp gives a mark the checksum that it should have.
func sumUp(b []byte) {
	le.PutUint32(b[20:], crc32.Checksum(b[24:512], crc32.MakeTable(crc32.Castagnoli)))
}

// takenFormats are own unfinished formats on disks that something has happened to since.
func takenFormats() []generator {
	var all []generator
	no := func(name string, w want, set func(s *scene, mark []piece) error) {
		all = append(all, marksThen("an unfinished format "+name, w, set))
	}
	no("on a disk where Ceph has put a label", foreign("ceph"),
		func(s *scene, _ []piece) error {
			// The copy that only the driver knows: blkid looks at the first alone.
			return s.poke(gib, []byte("bluestore block device\n")...)
		})
	no("on a disk on which blkid finds something", foreign("somebodys_volume"),
		func(s *scene, _ []piece) error {
			_, err := s.wrap("blkid", "echo TYPE=somebodys_volume")
			return errors.Join(err, s.poke(8*kib, []byte("what only blkid understands")...))
		})
	no("on a disk on which blkid finds a table", foreign("sometable"),
		func(s *scene, _ []piece) error {
			_, err := s.wrap("blkid", "echo PTTYPE=sometable")
			return errors.Join(err, s.poke(8*kib, []byte("what only blkid understands")...))
		})
	no("on a disk that is read-only now", refuse(readOnly),
		func(s *scene, _ []piece) error { return s.replaceLoop(true) })
	no("on a disk that somebody has", refuse(held),
		func(s *scene, _ []piece) error { return s.hold() })
	no("whose volume's size nobody tells", refuse(sizeMissing),
		func(s *scene, _ []piece) error {
			delete(s.Publish, "sizeBytes")
			return nil
		})
	no("under a LUKS header", foreign("luks"), func(s *scene, _ []piece) error {
		return s.poke(0, []byte("LUKS\xba\xbe\x00\x02")...)
	})
	no("under a GPT", foreign("gpt"), func(s *scene, _ []piece) error {
		s.image.gpt(512, true, true, true)
		return s.image.err
	})
	no("that cannot be read to its end", refuse(unreadable),
		func(s *scene, _ []piece) error {
			s.image.cut(s.image.Size - mib)
			return s.image.err
		})
	return all
}
