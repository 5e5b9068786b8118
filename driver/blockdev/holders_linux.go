package blockdev

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// opener is a process that has a device's node open.
type opener struct {
	PID     int
	Writing bool
	Locking bool // it has, or shares, the lock of flock(2)
}

// openers lists the processes that can be seen, other than this one, that have the device's node
// open.
func openers(d Device) []opener {
	pids, err := Processes()
	if err != nil {
		return nil
	}
	var found []opener
	room := make([]byte, 8<<10)
	for _, pid := range pids {
		if pid == os.Getpid() {
			continue
		}
		o := opener{PID: pid}
		descriptors := o.descriptors(d, room)
		for _, fd := range descriptors {
			writing, locking := readDescriptor(filepath.Join("/proc", strconv.Itoa(pid), "fdinfo", fd))
			o.Writing, o.Locking = o.Writing || writing, o.Locking || locking
		}
		if len(descriptors) > 0 {
			found = append(found, o)
		}
	}
	return found
}

// descriptors lists the process's descriptors that are of the device's node, whatever the node is
// called. On a busy node there are tens of thousands to look at before a filesystem is made or
// mounted, so each costs one system call. One may lead to a file on a dead server, so no question
// goes out to one.
func (o opener) descriptors(d Device, room []byte) (found []string) {
	dir, err := unix.Open("/proc/"+strconv.Itoa(o.PID)+"/fd",
		unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil // it is gone by now, or not ours to look at
	}
	defer func() { _ = unix.Close(dir) }()
	for {
		n, err := unix.ReadDirent(dir, room)
		if err != nil || n <= 0 {
			return found
		}
		_, _, names := unix.ParseDirent(room[:n], -1, nil)
		for _, fd := range names {
			var st unix.Statx_t
			err := unix.Statx(dir, fd, unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &st)
			if err == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK && st.Rdev_major == d.Major &&
				st.Rdev_minor == d.Minor {
				found = append(found, fd)
			}
		}
	}
}

// readDescriptor reads how a descriptor was opened, and whether its file is locked with flock. What
// cannot be read counts as neither.
func readDescriptor(fdinfo string) (writing, locking bool) {
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
			bytes.Contains(line, []byte("FLOCK"))
	}
	return writing, locking
}

// CheckWriters refuses while a process has the device's node open for writing. The kernel lets many
// do that to a raw device, so the exclusive open says nothing of them.
func (h *OpenDevice) CheckWriters() error {
	writing := slices.DeleteFunc(openers(h.Device), func(o opener) bool { return !o.Writing })
	if len(writing) > 0 {
		return csierr.New(csierr.DeviceHeld, "%s is open for writing in %s", h.Path, nameOpeners(writing))
	}
	return nil
}

// AwaitNoWriters refuses while a process has the device's node open for writing and keeps it. One
// that only looks, such as losetup in search of a free device or a program between fork and exec
// with a copy of a descriptor, has it for a moment.
func (h *OpenDevice) AwaitNoWriters() error {
	for end := time.Now().Add(time.Second); ; <-time.After(10 * time.Millisecond) {
		if err := h.CheckWriters(); err == nil || time.Now().After(end) {
			return err
		}
	}
}

// DescribeHolders names who has the device, as far as that can be seen.
func (h *OpenDevice) DescribeHolders() string {
	var words []string
	// Device mapper, md and the like; the directory is the kernel's and need not be there.
	names, _ := ReadNames(filepath.Join(h.host.Sysfs, "block", h.Name, "holders"))
	if len(names) > 0 {
		slices.Sort(names)
		words = append(words, "by "+csierr.Plain(strings.Join(names, ", ")))
	}
	if found := openers(h.Device); len(found) > 0 {
		words = append(words, "open in "+nameOpeners(found))
	}
	if len(words) == 0 {
		return "in a mount namespace that cannot be seen or by a driver of the kernel"
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
