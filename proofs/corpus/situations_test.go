//go:build linux

package corpus_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

func situations() []generator {
	return slices.Concat(sizes(), holders(), names(), unreadableBlanks())
}

func situation(name string, w want, set func(f *fixture)) generator {
	return blank(name, "", w, set).and(func(t *trial) { t.FS = ours[t.Rand.IntN(len(ours))] })
}

func onHealthy(name string, w want, set func(f *fixture)) generator {
	return with(name, ext4, w, nil, set)
}

// onProbed returns a disk with an ext3, whose superblock has no checksum: so the driver runs blkid.
func onProbed(name string, w want, set func(f *fixture)) generator {
	return with(name, ext3, w, nil, set)
}

func sizes() []generator {
	off := func(f *fixture) int64 { return 512 * (1 + f.Rand.Int64N(4096)) }
	publish := func(add func(f *fixture) int64) func(f *fixture) {
		return func(f *fixture) { f.Publish["sizeBytes"] = fmt.Sprint(f.image.Size + add(f)) }
	}
	smaller := publish(func(f *fixture) int64 { return -off(f) })
	larger := publish(off)
	elsewhere := func(f *fixture, size int64) { f.attribute("size", fmt.Sprintf("%d\n", size/512)) }
	return []generator{
		situation("a blank disk that is larger than its volume", refuse(wrongSize), smaller),
		situation("a blank disk that is smaller than its volume", refuse(wrongSize), larger),
		onHealthy("a healthy disk that is larger than its volume", refuse(wrongSize), smaller),
		onHealthy("a healthy disk that is smaller than its volume", refuse(wrongSize), larger),
		situation("a blank disk of unknown size", refuse(sizeMissing), (*fixture).forgetSize),
		situation("a blank disk with another size in sysfs", refuse(wrongSize, changed),
			func(f *fixture) {
				size := f.image.Size - off(f)*8
				f.Publish["sizeBytes"] = fmt.Sprint(size)
				elsewhere(f, size)
			}),
		onHealthy("a healthy disk with another size in sysfs", refuse(wrongSize, changed),
			func(f *fixture) {
				f.forgetSize()
				elsewhere(f, f.image.Size+off(f))
			}),
	}
}

func (f *fixture) forgetSize() { delete(f.Publish, "sizeBytes") }

func (f *fixture) attribute(name, value string) {
	harness.Must(f.bench.Guest.SetAttribute(f.Device, name, value))
}

func holders() []generator {
	aside := refuse(held)
	aside.Says = []string{"/aside"} // the path of its mount
	inUse := refuse(held, notBlank, readOnly)
	inUse.Names = []string{"swap"}
	frozen := func(f *fixture) { f.replaceLoop(true) }
	return []generator{
		situation("a blank disk that a program has opened exclusively", refuse(held), (*fixture).hold),
		onHealthy("a healthy disk that a program has exclusively", refuse(held), (*fixture).hold),
		situation("a blank disk under a loop device", refuse(held), (*fixture).loopOver),
		onHealthy("a healthy disk under a loop device", refuse(held), (*fixture).loopOver),
		onHealthy("a disk that is mounted elsewhere", aside, (*fixture).mountAside),
		onHealthy("a disk that is mounted in another mount namespace", refuse(held),
			(*fixture).mountOutOfSight),
		situation("a blank disk that is read-only", refuse(readOnly), frozen),
		onHealthy("a healthy disk that is read-only", refuse(readOnly), frozen),
		onHealthy("a healthy disk that was made read-only", refuse(readOnly),
			func(f *fixture) { harness.Must(proof.RunTool("blockdev", "--setro", f.loop.Path)) }),
		blank("a swap that is in use", ext4, inUse, func(f *fixture) {
			f.atEnd(func() error { return proof.RunTool("swapoff", f.loop.Path) })
			harness.Must(proof.RunTool("swapon", f.loop.Path))
		}).and(func(t *trial) {
			t.Fill = func(im *image) { im.tool("mkswap", "--quiet") }
			// The kernel may write to a swap area in use, but not to its first page.
			t.Until = int64(os.Getpagesize())
		}),
	}
}

// hold opens the disk exclusively, as device mapper and md do.
func (f *fixture) hold() { f.open(os.O_RDONLY | os.O_EXCL) }

func (f *fixture) open(flags int) *os.File {
	device := harness.Got(os.OpenFile(f.loop.Path, flags, 0))
	f.atEnd(device.Close)
	return device
}

// loopOver attaches a loop device to the disk and, in some trials, another one to the first one.
func (f *fixture) loopOver() {
	for over, depth := f.loop.Path, 1+f.Rand.IntN(2); depth > 0; depth-- {
		out := harness.Got(exec.Command("losetup", "--find", "--show", "--offset",
			fmt.Sprint(f.Rand.IntN(3)<<20), over).Output())
		over = strings.TrimSpace(string(out))
		f.atEnd(func() error { return proof.RunTool("losetup", "--detach", over) })
	}
}

func (f *fixture) aside() string {
	at := filepath.Join(f.dir, "aside")
	harness.Must(os.Mkdir(at, 0o755))
	return at
}

func (f *fixture) mountAside() {
	harness.Must(unix.Mount(f.loop.Path, f.aside(), ext4, 0, ""))
}

func (f *fixture) mountOutOfSight() {
	// The new mount namespace begins with copies of all mounts of this process. The umount removes the
	// copies that keep the volumes of other trials in use.
	cmd := exec.Command("sh", "-ec", `mount --make-rprivate /
while read -r _ _ _ _ point _; do
	case $point in "$2"/*) umount -l "$point" ;; esac
done </proc/self/mountinfo
mount -t ext4 "$0" "$1"
echo mounted
read -r _`, f.loop.Path, f.aside(), f.bench.run.Dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	in, err1 := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	harness.Must(errors.Join(err1, err2, cmd.Start()))
	f.atEnd(func() error { return errors.Join(in.Close(), ignoreExit(cmd.Wait())) })
	harness.Got(out.Read(make([]byte, 1)))
}

func ignoreExit(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil
	}
	return err
}

// remembered reads the blank disk into the page cache, and then changes the disk's file directly.
func (f *fixture) remembered() {
	harness.Got(f.open(os.O_RDONLY).ReadAt(make([]byte, 2*mib), 0))
	f.image.write(0, []byte("LUKS\xba\xbe\x00\x02")...)
}

func (f *fixture) replaceLoop(readOnly bool) {
	f.loop = f.attach(context.Background(), f.image, readOnly)
	f.show(f.Device, f.DiskName, f.loop)
}

func (f *fixture) show(device, diskName string, loop loopdev.Device) {
	harness.Must(errors.Join(os.RemoveAll(f.bench.Guest.Sys("block/"+device)),
		os.RemoveAll(f.bench.Guest.Node(device)), f.bench.Guest.Plug(device, diskName, loop)))
}

// twin returns a function that adds a blank disk with the same size and serial to the guest.
func twin(device string) func(*fixture) {
	return func(f *fixture) {
		im := newImage(filepath.Join(f.dir, device), f.image.Size)
		f.show(device, f.DiskName, f.attach(context.Background(), im, false))
	}
}

func names() []generator {
	both := func(twin string) want {
		w := refuse(notUnique)
		w.Says = []string{diskDevice, twin}
		return w
	}
	// withSerial changes the disk's serial, so that no disk of the guest has the requested serial.
	withSerial := func(serial func(f *fixture) string) func(f *fixture) {
		return func(f *fixture) { f.attribute("device/serial", serial(f)) }
	}
	lost := refuse(notFound)
	lost.Code = "NotFound"
	return []generator{
		situation("two disks with one serial, the other after this", both("nvme3n1"), twin("nvme3n1")),
		situation("two disks with one serial, the other before this", both("nvme0n1"), twin("nvme0n1")),
		onHealthy("two disks with one serial, one of them healthy", both("nvme3n1"), twin("nvme3n1")),
		situation("a disk whose serial differs in the last byte", lost,
			withSerial(func(f *fixture) string { return f.DiskName[:19] + "z\n" })),
		situation("a disk whose serial is a part of the name", lost,
			withSerial(func(f *fixture) string { return f.DiskName[:19] + "\x00\n" })),
		situation("a disk whose serial differs in case", lost,
			withSerial(func(f *fixture) string { return "CSI" + f.DiskName[3:] + "\n" })),
		situation("a disk whose serial is longer", lost,
			withSerial(func(f *fixture) string { return f.DiskName + "0\n" })),
		situation("a disk without a serial", lost, withSerial(func(*fixture) string { return "\n" })),
		blank("a disk whose name is longer than a serial", ext4, isFormatted, func(f *fixture) {
			f.Publish["diskName"] = f.DiskName + "-by-hand"
		}),
		situation("a disk with the node of another disk", refuse(changed), (*fixture).swapNode),
		situation("a disk with the number of another disk", refuse(changed), func(f *fixture) {
			b := harness.Got(os.ReadFile(f.bench.Guest.Sys("block/" + decoyDevice + "/dev")))
			f.attribute("dev", string(b))
		}),
		situation("a disk with another sequence number in sysfs", refuse(changed), bornAgain),
		onHealthy("a healthy disk with another sequence number in sysfs", refuse(changed), bornAgain),
	}
}

// swapNode replaces the disk's device node with that of the decoy.
func (f *fixture) swapNode() {
	harness.Must(errors.Join(os.Remove(f.bench.Guest.Node(f.Device)),
		os.Link(f.bench.Guest.Node(decoyDevice), f.bench.Guest.Node(f.Device))))
}

func bornAgain(f *fixture) { f.attribute("diskseq", fmt.Sprintln(f.loop.Sequence+1)) }

func cutOffAt(at func(*trial) int64) func(*fixture) {
	return func(f *fixture) { f.image.cut(at(f.trial)) }
}

func unreadableBlanks() []generator {
	w := refuse(unreadable)
	w.Says = []string{"offset "}
	cut := func(name string, at func(t *trial) int64) generator {
		return blank("a blank disk that cannot be read "+name, ext4, w, cutOffAt(at))
	}
	return []generator{
		cut("at all", func(*trial) int64 { return 0 }),
		cut("from its second block on", func(*trial) int64 { return 4096 }),
		cut("in the last MiB", func(t *trial) int64 {
			return t.Size - 4096*(1+t.Rand.Int64N(mib/4096))
		}),
		cut("in its last block", func(t *trial) int64 { return t.Size - 4096 }),
		cut("from somewhere on", func(t *trial) int64 { return 4096 * t.Rand.Int64N(t.Size/4096) }),
		cut("beyond the first MiB", func(*trial) int64 { return mib }),
	}
}

func blanks() []generator {
	var all []generator
	for _, fs := range ours {
		all = append(all, blank("blank for "+fs, fs, isFormatted, nil),
			blank("blank with 4096-byte blocks for "+fs, fs, isFormatted, nil).and(func(t *trial) {
				t.BlockSize = 4096
			}))
	}
	all = append(all, repeated(4, "blank of an odd size", func(t *trial) {
		t.Size += 512 * t.Rand.Int64N(4*mib/512)
		t.FS = ours[t.Rand.IntN(len(ours))]
		t.Want = isFormatted
	})...)
	return append(all,
		blank("blank and large", ext4, isFormatted, nil).and(func(t *trial) {
			t.Size = gib * (5 + t.Rand.Int64N(296))
			t.FS = []string{ext4, xfs, btrfs}[t.Rand.IntN(3)]
		}),
		blank("blank, its zeros written", ext4, isFormatted, nil).and(func(t *trial) {
			t.Fill = func(im *image) {
				zeros := make([]byte, 3*mib)
				im.write(0, zeros...)
				im.write(-3*mib, zeros...)
			}
		}))
}

// made is the history of a disk that the driver has created blank for a filesystem. If the
// controller reports another history, the driver reads the whole disk.
var made = map[string]string{"origin": "blank", "use": "filesystem"}

// histories contains the histories for which the driver must read the whole disk to prove that it
// is blank. The keys are parts of the trials' names.
var histories = map[string]map[string]string{
	"that the driver did not make": nil,
	"restored from a snapshot":     {"origin": "snapshot", "use": "filesystem"},
	"from an image":                {"origin": "image", "use": "filesystem"},
	"that is also for raw use":     {"origin": "blank", "use": "both"},
}

// grown returns disks whose history allows data at any offset.
func grown() []generator {
	var all []generator
	for _, name := range slices.Sorted(maps.Keys(histories)) {
		add := func(n int, what string, make func(*trial)) {
			all = append(all, repeated(n, what+" "+name, func(t *trial) {
				t.History = histories[name]
				make(t)
			})...)
		}
		anyOf := func(t *trial) { t.FS, t.Want = ours[t.Rand.IntN(len(ours))], isFormatted }
		add(3, "data of a sector anywhere on a disk", func(t *trial) { t.anywhere(512) })
		// The length is a random power of two, so the trials have short and long data equally often.
		add(3, "data of any length anywhere on a disk", func(t *trial) {
			t.anywhere(512 << t.Rand.IntN(22))
		})
		add(1, "one byte in the middle of a disk", func(t *trial) {
			fillByte(t, t.Size/4+t.Rand.Int64N(t.Size/2))
		})
		add(1, "a blank disk", anyOf)
		add(1, "an own format on a disk", func(t *trial) {
			anyOf(t)
			t.Set, t.Check = (*fixture).formattedInPart, (*fixture).marksErased
		})
		add(1, "data anywhere, under an own mark, on a disk", func(t *trial) {
			b, at := randomBytes(t.Rand, 512), t.Rand.Int64N(t.Size/512)*512
			t.Set = func(f *fixture) {
				f.formatted()
				f.poke(at, b...)
			}
			t.Want = foreign()
		})
	}
	return append(all, uses()...)
}

func (t *trial) anywhere(n int64) {
	n = min(n, t.Size/2)
	at := t.Rand.Int64N((t.Size-n)/512) * 512
	b := randomBytes(t.Rand, min(n, mib))
	t.Fill = func(im *image) {
		for done := int64(0); done < n; done += int64(len(b)) {
			im.write(at+done, b[:min(int64(len(b)), n-done)]...)
		}
	}
	t.Want = foreign()
}

func uses() []generator {
	locked := refuse("DeviceLocked")
	locked.Code = "Aborted"
	writing := func(f *fixture) { f.open(os.O_RDWR) }
	blocks := func(f *fixture) { f.Publish["blockSize"] = fmt.Sprint(f.BlockSize * 8) }
	return []generator{
		situation("a blank disk that a program has open for writing", refuse(held), writing),
		onHealthy("a healthy disk that a program has open for writing", refuse(held), writing),
		situation("a blank disk that another driver has locked", locked, (*fixture).lock),
		onHealthy("a healthy disk that another driver works on", locked, (*fixture).lock),
		situation("a blank disk with blocks of another size", refuse("DeviceDiffers"), blocks),
		onHealthy("a healthy disk with blocks of another size", refuse("DeviceDiffers"), blocks),
		situation("a blank disk for raw use", refuse("UseDiffers"), func(f *fixture) {
			f.Publish["use"] = "block"
		}),
		blank("boot code over an own format", ext4, foreign(), func(f *fixture) {
			f.formatted()
			f.poke(0, slices.Repeat([]byte{0xEB}, 440)...)
		}),
	}
}

// lock takes all volume locks of the node, as another driver process does.
func (f *fixture) lock() { f.atEnd(harness.Got(f.bench.Plugin.LockVolumes()).Close) }

// races returns disks that change during the call, mostly while the driver runs blkid. At this time
// the driver has opened the disk, and has not yet formatted or mounted it.
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
		// mkfs.btrfs notices by itself that the device node is now the decoy's, and fails.
		begun(swapped+"when mkfs.btrfs begins", btrfs, "mkfs.btrfs", failed, (*fixture).swapNode),
		begun("a disk whose serial is duplicated while mkfs runs", ext4, "mke2fs", refuse(notUnique),
			twin),
		begun("a disk that gets a new sequence number while mkfs runs", ext3, "mke2fs", refuse(changed),
			bornAgain),
		// The driver must mount the disk that it has opened, not the decoy at the disk's device node.
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

// After swapDisk, the guest shows the decoy as the disk's device, as if the rack had detached the
// disk and attached the decoy.
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

// wrap replaces a program that the driver runs with a shell script, in which "$real" is the
// program's path. The function unwrap restores the program, as does the end of the trial.
func (f *fixture) wrap(program, script string) (unwrap func() error) {
	path := filepath.Join(f.bench.Bin, program)
	text := fmt.Sprintf("#!/bin/sh\nreal='%s'\n%s\n", harness.Got(exec.LookPath(program)), script)
	unwrap = func() error { return os.RemoveAll(path) }
	f.atEnd(unwrap)
	harness.Must(os.WriteFile(path, []byte(text), 0o755))
	return unwrap
}

const failAtEnd = `"$real" "$@"; exit 1`

// hook makes the driver wait for the end of do() before the program's first run on a disk. The
// trial fails if the driver does not run the program.
func (f *fixture) hook(program string, do func()) {
	ask, answer := filepath.Join(f.dir, program+".ask"), filepath.Join(f.dir, program+".answer")
	harness.Must(errors.Join(unix.Mkfifo(ask, 0o600), unix.Mkfifo(answer, 0o600)))
	// If a FIFO is opened for reading and writing, the open does not wait for another process, and a
	// Read gets no end of file when the other process closes the FIFO.
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
