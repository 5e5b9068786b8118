//go:build linux

package corpus_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// races returns disks that are replaced while the driver inspects them. The driver runs blkid
// after it has opened the disk and before it formats or mounts it.
func races() []generator {
	during := func(program string, do func(f *fixture)) func(f *fixture) {
		return func(f *fixture) { f.hook(program, func() { do(f) }) }
	}
	probe := func(do func(f *fixture)) func(f *fixture) { return during("blkid", do) }
	begun := func(name, fs, program string, w want, do func(f *fixture)) generator {
		w.Begun = true
		return blank(name, fs, w, during(program, do))
	}
	failed := refuse(toolFailed, changed)
	failed.Code = "Internal"
	swapped := "a disk whose node is replaced "
	twin := twin("nvme3n1")
	return []generator{
		begun(swapped+"when mke2fs begins", ext4, "mke2fs", refuse(changed), (*fixture).swapNode),
		begun(swapped+"when mkfs.xfs begins", xfs, "mkfs.xfs", refuse(changed), (*fixture).swapNode),
		// mkfs.btrfs inspects the path by which the open disk was opened, and fails on its own.
		begun(swapped+"when mkfs.btrfs begins", btrfs, "mkfs.btrfs", failed, (*fixture).swapNode),
		begun("a disk whose serial is duplicated while mkfs runs", ext4, "mke2fs", refuse(notUnique),
			twin),
		begun("a disk that gets a new sequence number while mkfs runs", ext3, "mke2fs", refuse(changed),
			bornAgain),
		// The driver mounts the disk that it has opened.
		with(swapped+"while its filesystem is checked", ext4, isMounted, nil,
			during("e2fsck", (*fixture).swapNode)).larger(),
		situation("a disk whose node is replaced during the call", refuse(changed),
			probe((*fixture).swapNode)),
		situation("a disk that is replaced during the call", refuse(changed), probe(swapDisk)),
		situation("a disk that gets a new sequence number during the call", refuse(changed),
			probe(bornAgain)),
		situation("a disk whose serial is duplicated during the call", refuse(notUnique), probe(twin)),
		situation("a disk that another program opens during the call", refuse(held),
			probe((*fixture).hold)),
		onProbed("a healthy disk that is replaced during the call", refuse(changed), probe(swapDisk)),
		onProbed("a healthy disk whose serial is duplicated during the call", refuse(notUnique),
			probe(twin)),
		onProbed("a healthy disk that another program opens during the call", refuse(held),
			probe((*fixture).hold)),
	}
}

// swapDisk gives the disk's serial, name and node to the decoy, as if the disk was detached and the
// decoy attached in its place.
func swapDisk(f *fixture) {
	g := f.bench.Guest
	from, to := g.Sys("block/"+decoyDevice), g.Sys("block/"+f.Device)
	for _, name := range []string{"dev", "size", "diskseq"} {
		b := harness.Got(os.ReadFile(filepath.Join(from, name)))
		harness.Must(errors.Join(os.RemoveAll(filepath.Join(to, name)),
			os.WriteFile(filepath.Join(to, name), b, 0o444)))
	}
	f.swapNode()
}

// wrap replaces a program that the driver runs by a shell script, in which "$real" is the program,
// until unwrap is called or the fixture ends.
func (f *fixture) wrap(program, script string) (unwrap func() error) {
	path := filepath.Join(f.bench.Bin, program)
	text := fmt.Sprintf("#!/bin/sh\nreal='%s'\n%s\n", harness.Got(exec.LookPath(program)), script)
	unwrap = func() error { return os.RemoveAll(path) }
	f.atEnd(unwrap)
	harness.Must(os.WriteFile(path, []byte(text), 0o755))
	return unwrap
}

// failAtEnd is a script that runs the real program, and then fails.
const failAtEnd = `"$real" "$@"; exit 1`

// hook calls do when the driver starts the program on a disk for the first time, before the program
// runs. So do always happens at this moment of a race. The trial fails if do is not called.
func (f *fixture) hook(program string, do func()) {
	ask, answer := filepath.Join(f.dir, program+".ask"), filepath.Join(f.dir, program+".answer")
	harness.Must(errors.Join(unix.Mkfifo(ask, 0o600), unix.Mkfifo(answer, 0o600)))
	// A FIFO that is opened for reading and writing does not wait for another process to open it, and
	// reports no end when that closes it.
	questions := harness.Got(os.OpenFile(ask, os.O_RDWR|unix.O_NONBLOCK, 0))
	answers := harness.Got(os.OpenFile(answer, os.O_RDWR|unix.O_NONBLOCK, 0))
	happened := make(chan error, 1)
	go func() {
		b := make([]byte, 1)
		for first := true; ; first = false {
			if _, err := questions.Read(b); err != nil {
				return
			}
			if first {
				happened <- func() (err error) {
					defer harness.Catch(&err)
					do()
					return nil
				}()
			}
			if _, err := answers.Write(b); err != nil {
				return
			}
		}
	}()
	f.atEnd(func() error { return errors.Join(questions.Close(), answers.Close()) })
	f.happened = func() error {
		select {
		case err := <-happened:
			return err
		default:
			return fmt.Errorf("the driver did not run %s, so the hook was not called", program)
		}
	}
	f.wrap(program, fmt.Sprintf("case $* in */fd/*|*/dev/*) printf . >'%s'; "+
		"head -c 1 <'%s' >/dev/null;; esac\nexec \"$real\" \"$@\"", ask, answer))
}
