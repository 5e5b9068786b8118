package corpus_test

import (
	"errors"
	"os"
	"path/filepath"
)

// races are disks that become another's while the driver looks at them: it runs blkid after it has
// opened the disk and before it formats or mounts it.
func races() []generator {
	during := func(program string, do func(s *scene) error) func(s *scene) error {
		return func(s *scene) error { return s.hook(program, func() error { return do(s) }) }
	}
	look := func(do func(s *scene) error) func(s *scene) error { return during("blkid", do) }
	return []generator{
		situation("a disk whose node becomes another's meanwhile", refuse(changed),
			look((*scene).swapNode)),
		situation("a disk that becomes another one meanwhile", refuse(changed), look(swapDisk)),
		situation("a disk that is born again meanwhile", refuse(changed), look(bornAgain)),
		situation("a disk that gets a twin meanwhile", refuse(notUnique), look(func(s *scene) error {
			_, err := s.another("nvme3n1", s.DiskName)
			return err
		})),
		situation("a disk that somebody takes meanwhile", refuse(held), look((*scene).hold)),
		onHealthy("a healthy disk that becomes another one meanwhile", refuse(changed), look(swapDisk)),
		onHealthy("a healthy disk that gets a twin meanwhile", refuse(notUnique), look(
			func(s *scene) error {
				_, err := s.another("nvme3n1", s.DiskName)
				return err
			})),
		onHealthy("a healthy disk that somebody takes meanwhile", refuse(held),
			look((*scene).hold)),
		{"a disk that gets a twin while mkfs runs", func(t *trial) {
			t.Set = during("mke2fs", func(s *scene) error {
				_, err := s.another("nvme3n1", s.DiskName)
				return err
			})
			t.Want = refuse(notUnique)
			t.Want.Begun = true
		}},
		{"a disk that is born again while mkfs runs", func(t *trial) {
			t.Set = during("mke2fs", bornAgain)
			t.Want = refuse(changed)
			t.Want.Begun = true
		}},
	}
}

// swapDisk gives the disk's serial, name and node to the decoy, as when one disk is detached and
// another attached.
func swapDisk(s *scene) error {
	g := s.bench.guest
	from, to := g.sys("block/"+decoyDevice), g.sys("block/"+s.Device)
	var errs []error
	for _, name := range []string{"dev", "size", "diskseq"} {
		b, err := os.ReadFile(filepath.Join(from, name))
		errs = append(errs, err, os.RemoveAll(filepath.Join(to, name)),
			os.WriteFile(filepath.Join(to, name), b, 0o444))
	}
	return errors.Join(append(errs, s.swapNode())...)
}
