package corpus_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// situations are blank or healthy disks in a world where they must not be used.
func situations() []generator {
	var all []generator
	all = append(all, sizes()...)
	all = append(all, holders()...)
	all = append(all, names()...)
	return append(all, unreadableBlanks()...)
}

// situation is a blank disk that is refused.
func situation(name string, w want, set func(s *scene) error) generator {
	return generator{name, func(t *trial) {
		t.FS = ours[t.Rand.IntN(len(ours))]
		t.Set, t.Want = set, w
	}}
}

// onHealthy is the same with an ext4 that could be mounted.
func onHealthy(name string, w want, set func(s *scene) error) generator {
	return generator{name, func(t *trial) {
		kindOf(ext4).of(t)
		t.Set, t.Want = set, w
	}}
}

// onProbed is the same with an ext3, whose superblock has no checksum: blkid is asked about it.
func onProbed(name string, w want, set func(s *scene) error) generator {
	return generator{name, func(t *trial) {
		kindOf(ext3).of(t)
		t.Set, t.Want = set, w
	}}
}

// sizes are disks that are not as large as somebody says.
func sizes() []generator {
	off := func(s *scene) int64 { return 512 * (1 + s.Rand.Int64N(4096)) }
	publish := func(add func(s *scene) int64) func(s *scene) error {
		return func(s *scene) error {
			s.Publish["sizeBytes"] = fmt.Sprint(s.image.Size + add(s))
			return nil
		}
	}
	smaller := publish(func(s *scene) int64 { return -off(s) })
	larger := publish(off)
	return []generator{
		situation("a blank disk that is larger than its volume", refuse(wrongSize), smaller),
		situation("a blank disk that is smaller than its volume", refuse(wrongSize), larger),
		onHealthy("a healthy disk that is larger than its volume", refuse(wrongSize), smaller),
		onHealthy("a healthy disk that is smaller than its volume", refuse(wrongSize), larger),
		situation("a blank disk whose size nobody tells", refuse(sizeMissing), func(s *scene) error {
			delete(s.Publish, "sizeBytes")
			return nil
		}),
		situation("a blank disk of which sysfs tells another size", refuse(wrongSize, changed),
			func(s *scene) error {
				size := s.image.Size - off(s)*8
				s.Publish["sizeBytes"] = fmt.Sprint(size)
				return s.bench.guest.tell(s.Device, "size", fmt.Sprintf("%d\n", size/512))
			}),
		onHealthy("a healthy disk of which sysfs tells another size", refuse(wrongSize, changed),
			func(s *scene) error {
				size := s.image.Size + off(s)
				delete(s.Publish, "sizeBytes")
				return s.bench.guest.tell(s.Device, "size", fmt.Sprintf("%d\n", size/512))
			}),
	}
}

// holders are disks that somebody has.
func holders() []generator {
	anyReason := []string{held, notBlank, readOnly}
	aside := refuse(held)
	aside.Says = []string{"/aside"} // where it is mounted
	return []generator{
		situation("a blank disk that a program has exclusively", refuse(held), (*scene).hold),
		onHealthy("a healthy disk that a program has exclusively", refuse(held), (*scene).hold),
		onHealthy("a disk that is mounted elsewhere", aside, func(s *scene) error {
			return s.mountAside(s.loop.Path, ext4)
		}),
		onHealthy("a disk that is mounted in another mount namespace", refuse(held),
			(*scene).mountOutOfSight),
		situation("a blank disk that is read-only", refuse(readOnly), func(s *scene) error {
			return s.replaceLoop(true)
		}),
		onHealthy("a healthy disk that is read-only", refuse(readOnly), func(s *scene) error {
			return s.replaceLoop(true)
		}),
		onHealthy("a healthy disk that somebody has switched read-only", refuse(readOnly),
			func(s *scene) error { return runTool("blockdev", "--setro", s.loop.Path) }),
		{"a swap that is in use", func(t *trial) {
			t.Fill = func(im *image) { im.tool("mkswap", "--quiet") }
			// Behind its head lie pages of whoever runs, when memory is short.
			t.KernelWrites = int64(os.Getpagesize())
			t.Set = func(s *scene) error {
				s.atEnd(func() error { return runTool("swapoff", s.loop.Path) })
				return runTool("swapon", s.loop.Path)
			}
			t.Want = refuse(anyReason...)
			t.Want.Names = []string{"swap"}
		}},
	}
}

// hold opens the disk exclusively, as device mapper and md do.
func (s *scene) hold() error {
	f, err := os.OpenFile(s.loop.Path, os.O_RDONLY|os.O_EXCL, 0)
	if err == nil {
		s.atEnd(f.Close)
	}
	return err
}

// mountAside mounts the disk where the driver did not.
func (s *scene) mountAside(device, fs string) error {
	at := filepath.Join(s.dir, "aside")
	if err := os.Mkdir(at, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(device, at, fs, 0, ""); err != nil {
		return fmt.Errorf("mount the disk aside: %w", err)
	}
	return nil
}

// mountOutOfSight mounts the disk in a mount namespace that only one process has.
func (s *scene) mountOutOfSight() error {
	at := filepath.Join(s.dir, "aside")
	if err := os.Mkdir(at, 0o755); err != nil {
		return err
	}
	// The new namespace has copies of all mounts of this one, also of volumes of other trials, which
	// they could then not unstage.
	cmd := exec.Command("sh", "-ec", `mount --make-rprivate /
while read -r _ _ _ _ point _; do
	case $point in "$2"/*) umount -l "$point" ;; esac
done </proc/self/mountinfo
mount -t ext4 "$0" "$1"
echo mounted
read -r _`, s.loop.Path, at, s.bench.run.Dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS,
		Pdeathsig: syscall.SIGKILL}
	in, err1 := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err := errors.Join(err1, err2, cmd.Start()); err != nil {
		return err
	}
	s.atEnd(func() error { return errors.Join(in.Close(), ignoreExit(cmd.Wait())) })
	_, err := out.Read(make([]byte, 1))
	return err
}

// ignoreExit forgets how a program ended that had no more to do.
func ignoreExit(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil
	}
	return err
}

// remembered lets the kernel read the disk while it is blank and keep that, and then writes to it
// from elsewhere.
func (s *scene) remembered() error {
	f, err := os.Open(s.loop.Path)
	if err != nil {
		return err
	}
	s.atEnd(f.Close)
	_, err = f.ReadAt(make([]byte, 2*mib), 0)
	s.image.write(0, []byte("LUKS\xba\xbe\x00\x02")...)
	return errors.Join(err, s.image.err)
}

// replaceLoop attaches the disk anew, and shows it in place of the other.
func (s *scene) replaceLoop(readOnly bool) error {
	loop, err := s.attach(context.Background(), s.image, readOnly)
	if err != nil {
		return err
	}
	s.loop = loop
	return s.show(s.Device, s.DiskName, loop)
}

// show lets the guest see a loop device under a name that it may have given to another.
func (s *scene) show(device, diskName string, loop loopdev.Device) error {
	return errors.Join(os.RemoveAll(s.bench.guest.sys("block/"+device)),
		os.RemoveAll(s.bench.guest.node(device)), s.bench.guest.plug(device, diskName, loop))
}

// another is one more blank disk of the same size, shown as a device under a serial.
func (s *scene) another(device, diskName string) (*image, error) {
	im := newImage(filepath.Join(s.dir, device), s.image.Size)
	loop, err := s.attach(context.Background(), im, false)
	if err != nil {
		return nil, err
	}
	return im, s.show(device, diskName, loop)
}

// names are disks that are not, or not for certain, the one that is asked for.
func names() []generator {
	twin := func(device string) func(s *scene) error {
		return func(s *scene) error {
			_, err := s.another(device, s.DiskName)
			return err
		}
	}
	both := refuse(notUnique)
	both.Says = []string{diskDevice}
	// As the decoy, but the wanted disk is not there at all.
	without := func(serial func(s *scene) string) func(s *scene) error {
		return func(s *scene) error { return s.bench.guest.tell(s.Device, "device/serial", serial(s)) }
	}
	lost := refuse(notFound)
	lost.Code = "NotFound"
	return []generator{
		situation("two disks with one serial, the other after this", both, twin("nvme3n1")),
		situation("two disks with one serial, the other before this", both, twin("nvme0n1")),
		onHealthy("two disks with one serial, one of them healthy", both, twin("nvme3n1")),
		situation("a disk whose serial differs in the last byte", lost,
			without(func(s *scene) string { return s.DiskName[:19] + "z\n" })),
		situation("a disk whose serial is a part of the name", lost,
			without(func(s *scene) string { return s.DiskName[:19] + "\x00\n" })),
		situation("a disk whose serial differs in case", lost,
			without(func(s *scene) string { return "CSI" + s.DiskName[3:] + "\n" })),
		situation("a disk whose serial has more", lost,
			without(func(s *scene) string { return s.DiskName + "0\n" })),
		situation("a disk without a serial", lost, without(func(*scene) string { return "\n" })),
		{"a disk whose name is longer than a serial", func(t *trial) {
			t.Set = func(s *scene) error {
				s.Publish["diskName"] = s.DiskName + "-by-hand"
				return nil
			}
			t.Want.Outcome = formatted
		}},
		situation("a disk whose node is another's", refuse(changed), func(s *scene) error {
			return s.swapNode()
		}),
		situation("a disk whose number is another's", refuse(changed), func(s *scene) error {
			b, err := os.ReadFile(s.bench.guest.sys("block/" + decoyDevice + "/dev"))
			if err != nil {
				return err
			}
			return s.bench.guest.tell(s.Device, "dev", string(b))
		}),
		situation("a disk of which sysfs tells another birth", refuse(changed), bornAgain),
		onHealthy("a healthy disk of which sysfs tells another birth", refuse(changed), bornAgain),
	}
}

// swapNode puts a node of the decoy in the place of the disk's.
func (s *scene) swapNode() error {
	return errors.Join(os.Remove(s.bench.guest.node(s.Device)),
		os.Link(s.bench.guest.node(decoyDevice), s.bench.guest.node(s.Device)))
}

func bornAgain(s *scene) error {
	return s.bench.guest.tell(s.Device, "diskseq", strconv.FormatUint(s.loop.Sequence+1, 10)+"\n")
}

// unreadableBlanks are blank as far as they can be read.
func unreadableBlanks() []generator {
	cutAt := func(name string, at func(t *trial) int64) generator {
		return generator{"a blank disk that cannot be read " + name, func(t *trial) {
			offset := at(t)
			t.Set = func(s *scene) error {
				s.image.cut(offset)
				return s.image.err
			}
			t.Want = refuse(unreadable)
			t.Want.Says = []string{"offset "}
		}}
	}
	return []generator{
		cutAt("at all", func(*trial) int64 { return 0 }),
		cutAt("from its second block on", func(*trial) int64 { return 4096 }),
		cutAt("in the last MiB", func(t *trial) int64 {
			return t.Size - 4096*(1+t.Rand.Int64N(mib/4096))
		}),
		cutAt("in its last block", func(t *trial) int64 { return t.Size - 4096 }),
		cutAt("from somewhere on", func(t *trial) int64 { return 4096 * t.Rand.Int64N(t.Size/4096) }),
		cutAt("beyond the first MiB", func(*trial) int64 { return mib }),
	}
}
