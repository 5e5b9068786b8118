package proof

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// InstanceID is the ID of the instance that a [GuestView] represents.
const InstanceID = "5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a01"

// SerialBytes is the length of an NVMe serial, which contains the beginning of the disk's name.
const SerialBytes = 20

// GuestView is a directory with a guest's /sys and /dev. The disks in it are loop devices.
type GuestView struct{ dir string }

// NewGuestView creates a guest view without disks in a directory.
func NewGuestView(dir string) (g GuestView, err error) {
	defer harness.Catch(&err)
	g = GuestView{dir}
	dmi := g.Sys("class/dmi/id")
	for _, d := range []string{dmi, g.Sys("block"), g.Node("")} {
		harness.Must(os.MkdirAll(d, 0o755))
	}
	for name, value := range map[string]string{
		"sys_vendor": "Oxide\n", "product_name": "OxVM\n", "product_serial": InstanceID + "\n",
		"product_uuid": InstanceID + "\n",
	} {
		harness.Must(os.WriteFile(filepath.Join(dmi, name), []byte(value), 0o444))
	}
	return g, nil
}

// Sys returns the path of an entry in the guest's /sys.
func (g GuestView) Sys(path string) string { return filepath.Join(g.dir, "sys", path) }

// Node returns the path of a device node in the guest's /dev.
func (g GuestView) Node(name string) string { return filepath.Join(g.dir, "dev", name) }

// Plug adds a disk to the guest. It makes the device node first, so that a process that finds the
// disk in /sys can open it. The serial has 20 bytes, padded with NULs, and a newline, as in sysfs.
func (g GuestView) Plug(name, diskName string, loop loopdev.Device) error {
	serial := make([]byte, SerialBytes)
	copy(serial, diskName)
	return errors.Join(
		unix.Mknod(g.Node(name), unix.S_IFBLK|0o660, int(unix.Mkdev(loop.Major, loop.Minor))),
		os.MkdirAll(g.Sys("block/"+name+"/device"), 0o755),
		os.MkdirAll(g.Sys("block/"+name+"/queue"), 0o755),
		g.SetAttribute(name, "dev", fmt.Sprintf("%d:%d\n", loop.Major, loop.Minor)),
		g.SetAttribute(name, "size", fmt.Sprintf("%d\n", loop.SizeBytes/512)),
		g.SetAttribute(name, "diskseq", fmt.Sprintf("%d\n", loop.Sequence)),
		g.SetAttribute(name, "queue/logical_block_size", fmt.Sprintf("%d\n", loop.BlockSize)),
		g.SetAttribute(name, "device/serial", string(serial)+"\n"))
}

// SetAttribute sets an attribute of a disk in the guest's /sys, even to a wrong value.
func (g GuestView) SetAttribute(name, attribute, value string) error {
	path := g.Sys("block/" + name + "/" + attribute)
	return errors.Join(os.RemoveAll(path), os.WriteFile(path, []byte(value), 0o444))
}

// Unplug removes all disks from the guest.
func (g GuestView) Unplug() (err error) {
	for _, dir := range []string{g.Sys("block"), g.Node("")} {
		entries, failed := os.ReadDir(dir)
		err = errors.Join(err, failed)
		for _, e := range entries {
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
		}
	}
	return err
}

// UnmountBelow unmounts all mounts below a directory, the newest first.
func UnmountBelow(dir string) error {
	return eachMountBelow(dir, func(path string) error {
		return unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
	})
}

// EndMountsBelow removes all mounts below a directory, even those in use or frozen.
func EndMountsBelow(dir string) error {
	return eachMountBelow(dir, func(path string) error {
		_ = SetFrozen(path, false)              // a frozen filesystem keeps its device
		_ = unix.Unmount(path, unix.MNT_DETACH) // it may be gone already
		return nil
	})
}

func eachMountBelow(dir string, do func(path string) error) error {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	for _, m := range slices.Backward(mounts) {
		err = errors.Join(err, do(m.Mountpoint))
	}
	return err
}

// SetFrozen freezes or thaws the filesystem at a path. Thawing one that is not frozen is no error.
func SetFrozen(path string, freeze bool) error {
	// x/sys/unix lacks FIFREEZE and FITHAW of linux/fs.h.
	const freezeRequest, thawRequest = 0xC0045877, 0xC0045878
	root, err := os.Open(path)
	if err != nil {
		return err
	}
	if freeze {
		err = unix.IoctlSetInt(int(root.Fd()), freezeRequest, 0)
	} else if err = unix.IoctlSetInt(int(root.Fd()), thawRequest, 0); errors.Is(err, unix.EINVAL) {
		err = nil
	}
	return errors.Join(err, root.Close())
}

// EachData passes the data of a file to the function do, in pieces of up to 1 MiB, without holes.
func EachData(path string, do func(at int64, b []byte) error) (err error) {
	defer harness.Catch(&err)
	f := harness.Got(os.Open(path))
	defer f.Close()
	room := make([]byte, 1<<20)
	for at, end := int64(0), int64(0); ; {
		if at >= end {
			at, err = unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
			if errors.Is(err, unix.ENXIO) {
				return nil
			}
			if err == nil {
				end, err = unix.Seek(int(f.Fd()), at, unix.SEEK_HOLE)
			}
			harness.Must(harness.Wrap(err, "find data and holes in %s", path))
		}
		n, err := f.ReadAt(room[:min(int64(len(room)), end-at)], at)
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if n == 0 {
			return nil // the file became shorter
		}
		harness.Must(do(at, room[:n]))
		at += int64(n)
	}
}

// EachPage calls do() for each page of a file, but omits pages of zeros. It finds these by counting
// zeros, because a comparison is slower with the race detector.
func EachPage(path string, do func(at int64, page []byte) error) error {
	return EachData(path, func(at int64, b []byte) error {
		for i := 0; i < len(b); i += pageBytes {
			page := b[i:min(i+pageBytes, len(b))]
			if bytes.Count(page, []byte{0}) == len(page) {
				continue
			}
			harness.Must(do(at+int64(i), page))
		}
		return nil
	})
}

// digest returns a hash of a file's size and bytes. A hole and zeros give the same hash.
func digest(path string) (sum [sha256.Size]byte, err error) {
	defer harness.Catch(&err)
	hash := sha256.New()
	hash.Write(binary.LittleEndian.AppendUint64(nil, uint64(harness.Got(os.Stat(path)).Size())))
	harness.Must(EachPage(path, func(at int64, page []byte) error {
		hash.Write(binary.LittleEndian.AppendUint64(nil, uint64(at)))
		hash.Write(page)
		return nil
	}))
	return [sha256.Size]byte(hash.Sum(nil)), nil
}

// FileState contains a file's modification time and hash.
type FileState struct {
	modified time.Time
	sum      [sha256.Size]byte
}

// ReadFileState returns the present state of a file.
func ReadFileState(path string) (_ FileState, err error) {
	defer harness.Catch(&err)
	return FileState{harness.Got(os.Stat(path)).ModTime(), harness.Got(digest(path))}, nil
}

// Compare returns an error if the modification time has changed since ReadFileState. If the
// parameter bytes is true, Compare also compares the content.
func (p FileState) Compare(name, path string, bytes bool) (now FileState, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return p, fmt.Errorf("%s: %w", name, err)
	}
	same := info.ModTime().Equal(p.modified)
	if same && !bytes {
		return p, nil
	}
	now, err = ReadFileState(path)
	if err == nil && !same {
		err = fmt.Errorf("%s was written to at %s", name, now.modified)
	}
	if err == nil && now.sum != p.sum {
		err = fmt.Errorf("%s has other bytes than before", name)
	}
	return now, err
}

// Members lists all values of Member.
var Members = []Member{Journal, BtrfsMember}

// Bench is a guest view with a driver. A proof attaches one disk after another to the guest view.
type Bench struct {
	Dir    string
	Guest  GuestView
	Plugin *harness.Plugin
	// Bin is the first directory in the driver's PATH. A proof may put its own programs there.
	Bin        string
	Bystanders *Bystanders
	harm       error
	// Forged counts checks of files in which a workload has forged the driver's records.
	Forged *Invariant
}

// StartBench starts a driver with a new guest view. If program is empty, it starts the driver that
// the run builds. env adds variables to the driver's environment.
func StartBench(ctx context.Context, run *harness.Run, program string, env map[string]string) (
	b *Bench, err error) {
	defer harness.Catch(&err)
	dir := harness.Got(os.MkdirTemp(run.Dir, "bench-"))
	b = &Bench{Dir: dir, Bin: filepath.Join(dir, "bin"), Forged: &Invariant{},
		Guest: harness.Got(NewGuestView(filepath.Join(dir, "guest")))}
	harness.Must(os.Mkdir(b.Bin, 0o755))
	// A proof attaches the device before the call, so the driver need not wait for it.
	all := map[string]string{"OXIDE_DEVICE_TIMEOUT": "20ms", "OXIDE_INSTANCE_ID": InstanceID,
		"OXIDE_SYSFS_ROOT": b.Guest.Sys(""), "OXIDE_DEV_ROOT": b.Guest.Node(""),
		"PATH": b.Bin + ":" + os.Getenv("PATH")}
	maps.Copy(all, env)
	options := harness.PluginOptions{Mode: harness.ModeNode, Env: all}
	if program != "" {
		options.Command = []string{program}
	}
	b.Plugin = harness.Got(run.StartPlugin(ctx, options))
	return b, nil
}

// AddBystanders creates disks that nothing may write to. Bystanders.Show adds them to the guest.
func (b *Bench) AddBystanders(ctx context.Context, member Member, count *Invariant) (err error) {
	b.Bystanders, err = NewGuestBystanders(ctx, filepath.Join(b.Dir, "bystanders"), member, count)
	return err
}

// Do makes a call to the driver, records it as a step, and then checks the bystanders.
func (b *Bench) Do(ctx context.Context, name string,
	call func(context.Context, csi.NodeClient) error) error {
	done := b.Plugin.History.Step(name)
	err := call(ctx, b.Plugin.Node())
	done(err)
	b.harm = errors.Join(b.harm, b.Bystanders.Check())
	return err
}

// Harm returns the errors of Bystanders.Check in all calls of Do since the last call of Harm.
func (b *Bench) Harm() error {
	harm := b.harm
	b.harm = nil
	return harm
}

// Close stops the driver and checks that the bystanders are unchanged.
func (b *Bench) Close() error { return errors.Join(b.Plugin.Stop(), b.Bystanders.Close()) }

// Formats is the path of a file that gets a line for each run of mkfs on a disk.
type Formats string

// CountFormats writes wrappers of the mkfs programs into bin, which has to be first in a driver's
// PATH. A wrapper adds a line to the file if an argument is a disk, and then runs the real mkfs.
func CountFormats(bin string) (Formats, error) {
	file := filepath.Join(filepath.Dir(bin), "formats")
	err := errors.Join(os.MkdirAll(bin, 0o755), os.WriteFile(file, nil, 0o600))
	for _, mkfs := range []string{"mke2fs", "mkfs.xfs", "mkfs.btrfs"} {
		real, missing := exec.LookPath(mkfs)
		script := fmt.Sprintf("#!/bin/sh\ncase $* in */fd/*|*/dev/*) echo %s \"$@\" >>'%s';; esac\n"+
			"exec '%s' \"$@\"\n", mkfs, file, real)
		err = errors.Join(err, missing, os.WriteFile(filepath.Join(bin, mkfs), []byte(script), 0o755))
	}
	return Formats(file), err
}

// Count returns how often mkfs was run on a disk.
func (f Formats) Count() (int, error) {
	text, err := os.ReadFile(string(f))
	return bytes.Count(text, []byte("\n")), err
}

// DiskFile returns the path of a disk's backing file in the simulator's directory.
func DiskFile(rack *harness.Rack, id string) string {
	return filepath.Join(rack.Dir, "sim", "disks", id+".img")
}

// Environment is a rack with drivers. One of the instances has the disks in Bystanders. If a trial
// does not fail, the next trial uses the same environment.
type Environment struct {
	*harness.Environment
	Proof      *Proof
	Bystanders *Bystanders
}

// StartEnvironment starts a rack. The instance, unless it is "", gets the disks of Bystanders.
func (p *Proof) StartEnvironment(ctx context.Context, run *harness.Run,
	options harness.RackOptions, instance string, member Member) (*Environment, error) {
	started, err := run.StartEnvironment(ctx, options)
	env := &Environment{Environment: started, Proof: p}
	if err == nil && instance != "" {
		env.Bystanders, err = NewRackBystanders(ctx, env.Rack, instance, member, p.Bystanders)
	}
	return env, err
}

// Close checks that the bystanders are unchanged, and stops the drivers and the rack.
func (e *Environment) Close() error {
	return errors.Join(e.Bystanders.Close(), e.Environment.Close())
}

// Abandon kills all processes after a failed trial, and ends mounts and loop devices. Files remain.
func (e *Environment) Abandon(ctx context.Context) error {
	err := e.Bystanders.Suspend()
	for _, plugin := range e.Plugins {
		plugin.Kill()
	}
	e.Rack.Kill()
	err = errors.Join(err, EndMountsBelow(e.Rack.Dir))
	_, failed := loopdev.DetachBelow(ctx, e.Rack.Dir)
	return errors.Join(err, failed)
}
