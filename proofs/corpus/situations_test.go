//go:build linux

package corpus_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// situations returns blank or healthy disks that the driver must not use.
func situations() []generator {
	return slices.Concat(sizes(), holders(), names(), unreadableBlanks())
}

// situation returns a blank disk that the driver must refuse.
func situation(name string, w want, set func(f *fixture) error) generator {
	return blank(name, "", w, set).and(func(t *trial) { t.FS = ours[t.Rand.IntN(len(ours))] })
}

// onHealthy is situation with an ext4 that could be mounted.
func onHealthy(name string, w want, set func(f *fixture) error) generator {
	return with(name, ext4, w, nil, set)
}

// onProbed is situation with an ext3. Its superblock has no checksum, so the driver asks blkid
// about it.
func onProbed(name string, w want, set func(f *fixture) error) generator {
	return with(name, ext3, w, nil, set)
}

// sizes returns disks whose size is not the reported one.
func sizes() []generator {
	off := func(f *fixture) int64 { return 512 * (1 + f.Rand.Int64N(4096)) }
	publish := func(add func(f *fixture) int64) func(f *fixture) error {
		return func(f *fixture) error {
			f.Publish["sizeBytes"] = fmt.Sprint(f.image.Size + add(f))
			return nil
		}
	}
	smaller := publish(func(f *fixture) int64 { return -off(f) })
	larger := publish(off)
	// elsewhere makes sysfs show another size than the device has.
	elsewhere := func(f *fixture, size int64) error {
		return f.bench.Guest.SetAttribute(f.Device, "size", fmt.Sprintf("%d\n", size/512))
	}
	return []generator{
		situation("a blank disk that is larger than its volume", refuse(wrongSize), smaller),
		situation("a blank disk that is smaller than its volume", refuse(wrongSize), larger),
		onHealthy("a healthy disk that is larger than its volume", refuse(wrongSize), smaller),
		onHealthy("a healthy disk that is smaller than its volume", refuse(wrongSize), larger),
		situation("a blank disk of unknown size", refuse(sizeMissing), (*fixture).forgetSize),
		situation("a blank disk with another size in sysfs", refuse(wrongSize, changed),
			func(f *fixture) error {
				size := f.image.Size - off(f)*8
				f.Publish["sizeBytes"] = fmt.Sprint(size)
				return elsewhere(f, size)
			}),
		onHealthy("a healthy disk with another size in sysfs", refuse(wrongSize, changed),
			func(f *fixture) error {
				return errors.Join(f.forgetSize(), elsewhere(f, f.image.Size+off(f)))
			}),
	}
}

// forgetSize makes the controller report no size.
func (f *fixture) forgetSize() error {
	delete(f.Publish, "sizeBytes")
	return nil
}

// holders returns disks that another program uses.
func holders() []generator {
	aside := refuse(held)
	aside.Says = []string{"/aside"} // the path of its mount
	inUse := refuse(held, notBlank, readOnly)
	inUse.Names = []string{"swap"}
	frozen := func(f *fixture) error { return f.replaceLoop(true) }
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
			func(f *fixture) error { return runTool("blockdev", "--setro", f.loop.Path) }),
		blank("a swap that is in use", ext4, inUse, func(f *fixture) error {
			f.atEnd(func() error { return runTool("swapoff", f.loop.Path) })
			return runTool("swapon", f.loop.Path)
		}).and(func(t *trial) {
			t.Fill = func(im *image) { im.tool("mkswap", "--quiet") }
			// Behind the first page, the kernel may write pages of memory.
			t.Until = int64(os.Getpagesize())
		}),
	}
}

// hold opens the disk exclusively, as device mapper and md do.
func (f *fixture) hold() error {
	device, err := os.OpenFile(f.loop.Path, os.O_RDONLY|os.O_EXCL, 0)
	if err == nil {
		f.atEnd(device.Close)
	}
	return err
}

// loopOver puts a loop device over the disk or, in some trials, another one over that.
func (f *fixture) loopOver() error {
	for over, depth := f.loop.Path, 1+f.Rand.IntN(2); depth > 0; depth-- {
		out, err := exec.Command("losetup", "--find", "--show", "--offset",
			fmt.Sprint(f.Rand.IntN(3)<<20), over).Output()
		if err != nil {
			return err
		}
		over = strings.TrimSpace(string(out))
		f.atEnd(func() error { return runTool("losetup", "--detach", over) })
	}
	return nil
}

// mountAside mounts the disk at a path that the driver does not use.
func (f *fixture) mountAside() error {
	at := filepath.Join(f.dir, "aside")
	return errors.Join(os.Mkdir(at, 0o755), unix.Mount(f.loop.Path, at, ext4, 0, ""))
}

// mountOutOfSight mounts the disk in a mount namespace that only one process has.
func (f *fixture) mountOutOfSight() error {
	at := filepath.Join(f.dir, "aside")
	if err := os.Mkdir(at, 0o755); err != nil {
		return err
	}
	// The new namespace begins with copies of all mounts of this one. Without the umount, volumes of
	// other trials could not be unstaged.
	cmd := exec.Command("sh", "-ec", `mount --make-rprivate /
while read -r _ _ _ _ point _; do
	case $point in "$2"/*) umount -l "$point" ;; esac
done </proc/self/mountinfo
mount -t ext4 "$0" "$1"
echo mounted
read -r _`, f.loop.Path, at, f.bench.run.Dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS,
		Pdeathsig: syscall.SIGKILL}
	in, err1 := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err := errors.Join(err1, err2, cmd.Start()); err != nil {
		return err
	}
	f.atEnd(func() error { return errors.Join(in.Close(), ignoreExit(cmd.Wait())) })
	_, err := out.Read(make([]byte, 1))
	return err
}

// ignoreExit returns nil for an error that is only the exit status of a program.
func ignoreExit(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil
	}
	return err
}

// remembered makes the kernel cache the blank disk, and then writes to the disk's file.
func (f *fixture) remembered() error {
	device, err := os.Open(f.loop.Path)
	if err != nil {
		return err
	}
	f.atEnd(device.Close)
	_, err = device.ReadAt(make([]byte, 2*mib), 0)
	f.image.write(0, []byte("LUKS\xba\xbe\x00\x02")...)
	return errors.Join(err, f.image.err)
}

// replaceLoop attaches a new loop device to the disk's file, and shows it in place of the old one.
func (f *fixture) replaceLoop(readOnly bool) error {
	loop, err := f.attach(context.Background(), f.image, readOnly)
	if err != nil {
		return err
	}
	f.loop = loop
	return f.show(f.Device, f.DiskName, loop)
}

// show adds a loop device to the guest under a name, or replaces the device of that name.
func (f *fixture) show(device, diskName string, loop loopdev.Device) error {
	return errors.Join(os.RemoveAll(f.bench.Guest.Sys("block/"+device)),
		os.RemoveAll(f.bench.Guest.Node(device)), f.bench.Guest.Plug(device, diskName, loop))
}

// another attaches one more blank disk of the same size, as a device with that serial.
func (f *fixture) another(device, diskName string) (*image, error) {
	im := newImage(filepath.Join(f.dir, device), f.image.Size)
	loop, err := f.attach(context.Background(), im, false)
	if err != nil {
		return nil, err
	}
	return im, f.show(device, diskName, loop)
}

// names returns disks of which it is certain, or possible, that they are not the requested one.
func names() []generator {
	twin := func(device string) func(f *fixture) error {
		return func(f *fixture) error {
			_, err := f.another(device, f.DiskName)
			return err
		}
	}
	both := func(twin string) want {
		w := refuse(notUnique)
		w.Says = []string{diskDevice, twin}
		return w
	}
	// without gives the disk another serial, so that no disk of the guest has the requested one.
	without := func(serial func(f *fixture) string) func(f *fixture) error {
		return func(f *fixture) error {
			return f.bench.Guest.SetAttribute(f.Device, "device/serial", serial(f))
		}
	}
	lost := refuse(notFound)
	lost.Code = "NotFound"
	return []generator{
		situation("two disks with one serial, the other after this", both("nvme3n1"), twin("nvme3n1")),
		situation("two disks with one serial, the other before this", both("nvme0n1"), twin("nvme0n1")),
		onHealthy("two disks with one serial, one of them healthy", both("nvme3n1"), twin("nvme3n1")),
		situation("a disk whose serial differs in the last byte", lost,
			without(func(f *fixture) string { return f.DiskName[:19] + "z\n" })),
		situation("a disk whose serial is a part of the name", lost,
			without(func(f *fixture) string { return f.DiskName[:19] + "\x00\n" })),
		situation("a disk whose serial differs in case", lost,
			without(func(f *fixture) string { return "CSI" + f.DiskName[3:] + "\n" })),
		situation("a disk whose serial is longer", lost,
			without(func(f *fixture) string { return f.DiskName + "0\n" })),
		situation("a disk without a serial", lost, without(func(*fixture) string { return "\n" })),
		blank("a disk whose name is longer than a serial", ext4, isFormatted, func(f *fixture) error {
			f.Publish["diskName"] = f.DiskName + "-by-hand"
			return nil
		}),
		situation("a disk with the node of another disk", refuse(changed), (*fixture).swapNode),
		situation("a disk with the number of another disk", refuse(changed), func(f *fixture) error {
			b, err := os.ReadFile(f.bench.Guest.Sys("block/" + decoyDevice + "/dev"))
			if err != nil {
				return err
			}
			return f.bench.Guest.SetAttribute(f.Device, "dev", string(b))
		}),
		situation("a disk with another sequence number in sysfs", refuse(changed), bornAgain),
		onHealthy("a healthy disk with another sequence number in sysfs", refuse(changed), bornAgain),
	}
}

// swapNode replaces the disk's node by a node of the decoy.
func (f *fixture) swapNode() error {
	return errors.Join(os.Remove(f.bench.Guest.Node(f.Device)),
		os.Link(f.bench.Guest.Node(decoyDevice), f.bench.Guest.Node(f.Device)))
}

func bornAgain(f *fixture) error {
	return f.bench.Guest.SetAttribute(f.Device, "diskseq", strconv.FormatUint(f.loop.Sequence+1,
		10)+"\n")
}

// cutOffAt makes the disk unreadable from an offset on.
func cutOffAt(at func(*trial) int64) func(*fixture) error {
	return func(f *fixture) error {
		f.image.cut(at(f.trial))
		return f.image.err
	}
}

// unreadableBlanks returns disks that are blank, as far as they can be read.
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

// blanks returns blank disks, which must be formatted. Without such trials, a driver that refuses
// everything would pass.
func blanks() []generator {
	var all []generator
	for _, fs := range ours {
		all = append(all, blank("blank for "+fs, fs, isFormatted, nil),
			blank("blank with 4096-byte blocks for "+fs, fs, isFormatted, nil).and(func(t *trial) {
				t.BlockSize = 4096
			}))
	}
	all = append(all, each(4, "blank of an odd size", func(t *trial) {
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
