//go:build linux

package corpus_test

import (
	"errors"
	"os"
	"path/filepath"
)

// races returns disks that are replaced while the driver inspects them. The driver runs blkid
// after it has opened the disk and before it formats or mounts it.
func races() []generator {
	during := func(program string, do func(f *fixture) error) func(f *fixture) error {
		return func(f *fixture) error { return f.hook(program, func() error { return do(f) }) }
	}
	look := func(do func(f *fixture) error) func(f *fixture) error { return during("blkid", do) }
	begun := func(name, fs, program string, w want, do func(f *fixture) error) generator {
		w.Begun = true
		return generator{name, func(t *trial) {
			t.FS = fs
			t.Set, t.Want = during(program, do), w
		}}
	}
	failed := refuse(toolFailed, changed)
	failed.Code = "Internal"
	swapped := "a disk whose node becomes another's as "
	twin := func(f *fixture) error {
		_, err := f.another("nvme3n1", f.DiskName)
		return err
	}
	return []generator{
		begun(swapped+"mke2fs begins", ext4, "mke2fs", refuse(changed), (*fixture).swapNode),
		begun(swapped+"mkfs.xfs begins", xfs, "mkfs.xfs", refuse(changed), (*fixture).swapNode),
		// mkfs.btrfs inspects the path by which the open disk was opened, and fails on its own.
		begun(swapped+"mkfs.btrfs begins", btrfs, "mkfs.btrfs", failed, (*fixture).swapNode),
		begun("a disk that gets a twin while mkfs runs", ext4, "mke2fs", refuse(notUnique), twin),
		begun("a disk that is born again while mkfs runs", ext3, "mke2fs", refuse(changed), bornAgain),
		{swapped + "its filesystem is checked", func(t *trial) {
			kindOf(ext4).of(t)
			t.Size += fsBytes
			// The driver mounts the disk that it has opened.
			t.Set, t.Want = during("e2fsck", (*fixture).swapNode), want{Outcome: mounted}
		}},
		situation("a disk whose node becomes another's meanwhile", refuse(changed),
			look((*fixture).swapNode)),
		situation("a disk that becomes another one meanwhile", refuse(changed), look(swapDisk)),
		situation("a disk that is born again meanwhile", refuse(changed), look(bornAgain)),
		situation("a disk that gets a twin meanwhile", refuse(notUnique), look(twin)),
		situation("a disk that somebody takes meanwhile", refuse(held), look((*fixture).hold)),
		onProbed("a healthy disk that becomes another one meanwhile", refuse(changed), look(swapDisk)),
		onProbed("a healthy disk that gets a twin meanwhile", refuse(notUnique), look(twin)),
		onProbed("a healthy disk that somebody takes meanwhile", refuse(held),
			look((*fixture).hold)),
	}
}

// swapDisk gives the disk's serial, name and node to the decoy, as if one disk was detached
// and another one attached.
func swapDisk(f *fixture) error {
	g := f.bench.Guest
	from, to := g.Sys("block/"+decoyDevice), g.Sys("block/"+f.Device)
	var errs []error
	for _, name := range []string{"dev", "size", "diskseq"} {
		b, err := os.ReadFile(filepath.Join(from, name))
		errs = append(errs, err, os.RemoveAll(filepath.Join(to, name)),
			os.WriteFile(filepath.Join(to, name), b, 0o444))
	}
	return errors.Join(append(errs, f.swapNode())...)
}
