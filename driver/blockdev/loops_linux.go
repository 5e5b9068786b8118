package blockdev

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// kernelSysfs is where the kernel shows all its devices, also those that are in no Host's sysfs.
const kernelSysfs = "/sys"

// loopWait is how long a loop device may take to say what is below it. The kernel asks the
// filesystem of the backing file, which may be a server that does not answer.
const loopWait = time.Second

// CheckLoops fails if a loop device uses the device or a partition of it, directly or through
// others. A loop device opens what is below it, but not exclusively, and in no process. One that
// does not say what is below it counts only if a workload may have the device's node.
func (d *OpenDevice) CheckLoops() error {
	bound, err := boundLoops()
	if err != nil {
		return err
	}
	if err := askLoops(bound); err != nil {
		return fmt.Errorf("ask the loop devices: %w", err)
	}
	below, users := numbers(d.Device), []string(nil)
	for i := 0; i < len(bound); i++ {
		if _, ok := below[bound[i].below]; bound[i].err == nil && ok {
			users = append(users, bound[i].describe(d.host, below[bound[i].below]))
			maps.Copy(below, numbers(bound[i].Device))
			bound, i = slices.Delete(bound, i, i+1), -1 // one before it may be over it
		}
	}
	if len(users) > 0 {
		return csierr.New(csierr.DeviceHeld, "%s is used by %s; unmount what is on it, and detach it "+
			"with losetup -d", d.Path, strings.Join(users, " and by "))
	}
	for _, l := range bound {
		if d.Shared && l.err != nil {
			return csierr.New(csierr.DeviceHeld, "%s may be used by %s: %s; make the server of its backing "+
				"file answer, or detach it with losetup -d", d.Path, l.describe(d.host, "it"), l.err.Error())
		}
	}
	return nil
}

// numbers returns the names of a device and of its partitions by their device numbers.
func numbers(d Device) map[uint64]string {
	found := map[uint64]string{unix.Mkdev(d.Major, d.Minor): d.Name}
	dir := filepath.Join(kernelSysfs, "dev/block", d.Number())
	names, _ := ReadNames(dir) // a device that is gone has none
	for _, name := range names {
		if _, err := os.Stat(filepath.Join(dir, name, "partition")); err != nil {
			continue
		}
		b, _ := os.ReadFile(filepath.Join(dir, name, "dev"))
		if major, minor, err := ParseNumber(b); err == nil {
			found[unix.Mkdev(major, minor)] = name
		}
	}
	return found
}

// loop is a loop device that has a backing file.
type loop struct {
	Device
	file  string // the backing file, as the kernel shows it to this process
	below uint64 // the number of the device that the backing file is a node of; 0 for another file
	err   error  // below is not known
}

// describe names a user of the device over, and who uses it in turn.
func (l loop) describe(h Host, over string) string {
	words := fmt.Sprintf("%s (over %s by the path %.200q)", l.Name, over, l.file)
	if at := h.mounted(l.Device); at != "" {
		words += ", mounted at " + at
	}
	if found := openers(l.isNode, "FLOCK"); len(found) > 0 {
		words += ", open in " + nameOpeners(found)
	}
	return words
}

// boundLoops lists the loop devices that have a backing file.
func boundLoops() ([]loop, error) {
	dir := filepath.Join(kernelSysfs, "block")
	names, err := ReadNames(dir)
	if err != nil {
		return nil, fmt.Errorf("list the loop devices: %w", err)
	}
	var bound []loop
	for _, name := range names {
		if !strings.HasPrefix(name, "loop") {
			continue
		}
		file, err := os.ReadFile(filepath.Join(dir, name, "loop/backing_file"))
		if err != nil {
			continue // it has none
		}
		number, _ := os.ReadFile(filepath.Join(dir, name, "dev"))
		l := loop{Device: Device{Name: name, Path: "/dev/" + name}, file: strings.TrimSpace(string(file))}
		if l.Major, l.Minor, err = ParseNumber(number); err == nil {
			bound = append(bound, l)
		}
	}
	return bound, nil
}

// askLoops asks the loop devices what is below them. They may have no node here.
func askLoops(loops []loop) error {
	errs := make([]error, len(loops))
	var all async.Group
	for i := range loops {
		all.Go(func() { errs[i] = loops[i].ask() })
	}
	all.Wait()
	return errors.Join(errs...)
}

// ask asks what is below the loop device. It fails if it cannot ask.
func (l *loop) ask() error {
	var below uint64
	var failed, err error
	if !async.Within(l.Path, loopWait, func() {
		root, rootErr := l.Root()
		if failed = rootErr; failed == nil {
			below, err = l.backing(int(root.Fd()))
			failed = root.Close()
		}
	}) {
		l.err = errors.New("the kernel does not say what is below it")
		return nil
	}
	l.below, l.err = below, err
	return failed
}

// backing asks the kernel for the number of the device that is below the loop device. It is not the
// one that the path of the backing file leads to, which may be of another time or namespace.
func (l *loop) backing(root int) (uint64, error) {
	node, err := unix.Openat(root, strings.TrimPrefix(l.Path, "/"),
		unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err == nil {
		defer func() { _ = unix.Close(node) }()
		var info *unix.LoopInfo64
		if info, err = unix.IoctlLoopGetStatus64(node); err == nil {
			return info.Rdevice, nil
		}
	}
	if Vanished(err) {
		err = nil // it has no backing file any more
	}
	return 0, err
}
