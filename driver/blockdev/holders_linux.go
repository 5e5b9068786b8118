package blockdev

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

type opener struct {
	PID     int
	Writing bool
	Locking bool // it took a lock on the file, or inherited one
}

func (d Device) isNode(st *unix.Statx_t) bool {
	return st.Mode&unix.S_IFMT == unix.S_IFBLK && st.Rdev_major == d.Major && st.Rdev_minor == d.Minor
}

// openers lists the visible processes, except this one, that have a file open for which isFile
// returns true. It sets Locking if a "lock:" line in the fdinfo of such a file contains mark.
func openers(isFile func(*unix.Statx_t) bool, mark string) []opener {
	pids, err := Processes()
	if err != nil {
		return nil
	}
	var found []opener
	buf := make([]byte, 8<<10)
	for _, pid := range pids {
		if pid == os.Getpid() {
			continue
		}
		o := opener{PID: pid}
		descriptors := o.descriptors(isFile, buf)
		for _, fd := range descriptors {
			writing, locking := readDescriptor(filepath.Join("/proc", strconv.Itoa(pid), "fdinfo", fd), mark)
			o.Writing, o.Locking = o.Writing || writing, o.Locking || locking
		}
		if len(descriptors) > 0 {
			found = append(found, o)
		}
	}
	return found
}

// descriptors makes only one system call for each open file: a busy node has tens of thousands of
// open files, and the driver examines all before it formats, mounts or releases a device. The
// call never waits for the server of a network filesystem.
func (o opener) descriptors(isFile func(*unix.Statx_t) bool, buf []byte) (found []string) {
	dir, err := unix.Open("/proc/"+strconv.Itoa(o.PID)+"/fd",
		unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil // the process has ended, or its descriptors may not be read
	}
	defer func() { _ = unix.Close(dir) }()
	for {
		n, err := unix.ReadDirent(dir, buf)
		if err != nil || n <= 0 {
			return found
		}
		_, _, names := unix.ParseDirent(buf[:n], -1, nil)
		for _, fd := range names {
			var st unix.Statx_t
			err := unix.Statx(dir, fd, unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE|unix.STATX_INO, &st)
			if err == nil && isFile(&st) {
				found = append(found, fd)
			}
		}
	}
}

func readDescriptor(fdinfo, mark string) (writing, locking bool) {
	b, err := os.ReadFile(fdinfo)
	if err != nil {
		return false, false
	}
	for line := range bytes.Lines(b) {
		if octal, ok := bytes.CutPrefix(line, []byte("flags:")); ok {
			flags, err := strconv.ParseUint(string(bytes.TrimSpace(octal)), 8, 64)
			writing = err == nil && flags&unix.O_ACCMODE != unix.O_RDONLY
		}
		locking = locking || bytes.HasPrefix(line, []byte("lock:")) &&
			bytes.Contains(line, []byte(mark))
	}
	return writing, locking
}

// CheckWriters fails if another process has a device node of the disk or of a partition open for
// writing, which the kernel permits even while the device is open exclusively.
func (d *OpenDevice) CheckWriters() error {
	own := numbers(d.Device)
	writing := slices.DeleteFunc(openers(func(st *unix.Statx_t) bool {
		return st.Mode&unix.S_IFMT == unix.S_IFBLK && own[unix.Mkdev(st.Rdev_major, st.Rdev_minor)] != ""
	}, "FLOCK"), func(o opener) bool { return !o.Writing })
	if len(writing) > 0 {
		return csierr.New(csierr.DeviceHeld, "%s is open for writing in %s", d.Path, nameOpeners(writing))
	}
	return nil
}

// AwaitNoWriters waits up to a second until CheckLoops and CheckWriters succeed, because losetup,
// or a child between fork and exec, may have the device open for a moment.
func (d *OpenDevice) AwaitNoWriters() error {
	for end := time.Now().Add(time.Second); ; <-time.After(10 * time.Millisecond) {
		err := d.CheckLoops()
		if err == nil {
			err = d.CheckWriters()
		}
		if err == nil || time.Now().After(end) {
			return err
		}
	}
}

// DescribeHolders names the visible users of the device, as text for an error.
func (d *OpenDevice) DescribeHolders() string {
	var words []string
	// The directory lists users in the kernel, such as device mapper and md. It may be missing.
	names, _ := ReadNames(filepath.Join(d.host.Sysfs, "block", d.Name, "holders"))
	own := numbers(d.Device)
	swaps, _ := os.ReadFile("/proc/swaps")
	for line := range strings.Lines(string(swaps)) {
		path, _, _ := strings.Cut(line, " ")
		if major, minor, err := NumberAt(path); err == nil && own[unix.Mkdev(major, minor)] != "" {
			words = append(words, fmt.Sprintf("as swap, %.200q", path))
		}
	}
	for number, name := range own {
		part := Device{Name: name, Path: "/dev/" + name, Major: unix.Major(number),
			Minor: unix.Minor(number)}
		if name == d.Name {
			continue
		}
		more, _ := ReadNames(filepath.Join(kernelSysfs, "dev/block", part.Number(), "holders"))
		names = append(names, more...)
		if at := d.host.mounted(part); at != "" {
			words = append(words, fmt.Sprintf("as its partition %s at %s", name, at))
		}
	}
	if len(names) > 0 {
		slices.Sort(names)
		words = append(words, "by "+csierr.Plain(strings.Join(names, ", ")))
	}
	if found := openers(d.isNode, "FLOCK"); len(found) > 0 {
		words = append(words, "open in "+nameOpeners(found))
	}
	if err := d.CheckLoops(); err != nil {
		words = append(words, "by a loop device: "+err.Error())
	}
	if len(words) == 0 {
		return "in a mount namespace that is not visible or by a driver of the kernel"
	}
	return strings.Join(words, "; ")
}

func nameOpeners(openers []opener) string {
	var words []string
	for _, o := range openers {
		words = append(words, fmt.Sprintf("process %d (%s)", o.PID, ProcessName(o.PID)))
	}
	return strings.Join(words, ", ")
}

// Processes lists the process ids in /proc in ascending order.
func Processes() ([]int, error) {
	names, err := ReadNames("/proc")
	if err != nil {
		return nil, fmt.Errorf("list the processes: %w", err)
	}
	var pids []int
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return pids, nil
}

// ProcessName returns the name of a process, or "gone" if it has ended.
func ProcessName(pid int) string {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "comm"))
	if err != nil {
		return "gone"
	}
	return csierr.Plain(strings.TrimSpace(string(b)))
}

// ReadNames returns the names in a directory, unsorted. It does not call stat on the files.
func ReadNames(dir string) ([]string, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return f.Readdirnames(-1)
}

// kernelSysfs is the machine's own sysfs. On a simulated rack, Host.Sysfs shows only some devices.
const kernelSysfs = "/sys"

// loopWait limits how long the kernel may take to report a loop device's backing file. The file may
// be on a network filesystem whose server does not answer.
const loopWait = time.Second

// CheckLoops fails if a loop device uses the device or a partition of it, directly or through other
// loop devices. A search of processes does not find such a use, because the kernel itself has the
// backing file open. An exclusive open does not fail, because the kernel's open is not exclusive. A
// loop device that does not report its file counts as a user only if d.Shared is true.
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
			bound, i = slices.Delete(bound, i, i+1), -1 // a loop device before i may use this one
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

type loop struct {
	Device
	file  string // the backing file, as the kernel shows it to this process
	below uint64 // the device number if the backing file is a device node, else 0
	err   error  // why below is not known
}

// describe returns text for an error. The parameter over names the device that l uses.
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
			continue // it has no backing file
		}
		number, _ := os.ReadFile(filepath.Join(dir, name, "dev"))
		l := loop{Device: Device{Name: name, Path: "/dev/" + name}, file: strings.TrimSpace(string(file))}
		if l.Major, l.Minor, err = ParseNumber(number); err == nil {
			bound = append(bound, l)
		}
	}
	return bound, nil
}

func askLoops(loops []loop) error {
	errs := make([]error, len(loops))
	var all async.Group
	for i := range loops {
		all.Go(func() { errs[i] = loops[i].ask() })
	}
	all.Wait()
	return errors.Join(errs...)
}

// ask sets l.below to the kernel's answer, or l.err if it gets none. It fails if l.Root() fails.
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

// backing returns the number of the device that the loop device uses, or 0 if it uses none. It asks
// the kernel: the path in sysfs may be out of date or lead to another file in this namespace.
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
