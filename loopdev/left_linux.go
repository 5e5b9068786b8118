package loopdev

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// processMark is the beginning of each owner that [Process] returns.
const processMark = "p"

// process identifies a process until the next boot: by PID namespace, PID and start time.
type process struct{ namespace, pid, started uint64 }

// Process returns a [Config.Owner] that names this process. When this process has ended,
// [DetachLeft] releases the devices of this owner. The caller may append a "." and a text without
// ".". If /proc does not show this process, Process returns "".
func Process() string {
	p, err := self()
	if err != nil {
		return ""
	}
	return strings.Join([]string{processMark, strconv.FormatUint(p.namespace, 36),
		strconv.FormatUint(p.pid, 36), strconv.FormatUint(p.started, 36)}, ".")
}

func self() (process, error) {
	shown, err := os.Readlink("/proc/self")
	if err == nil && shown != strconv.Itoa(os.Getpid()) {
		err = errors.New("/proc is of another PID namespace")
	}
	if err != nil {
		return process{}, err
	}
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/pid", &st); err != nil {
		return process{}, err
	}
	p := process{namespace: st.Ino, pid: uint64(os.Getpid())}
	p.started, err = startOf(p.pid)
	return p, err
}

// startOf returns when a process of this PID namespace started, in ticks since the boot. If the
// process has ended, the error is fs.ErrNotExist.
func startOf(pid uint64) (uint64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if errors.Is(err, unix.ESRCH) {
		err = fs.ErrNotExist
	}
	if err != nil {
		return 0, err
	}
	// The program's name is in parentheses, and may contain any character. The first field after the
	// parentheses is the state, and the 20th is the start time.
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(fields) < 20 {
		return 0, fmt.Errorf("parse the state of the process %d: %q", pid, text)
	}
	if fields[0] == "Z" || fields[0] == "X" {
		return 0, fs.ErrNotExist
	}
	return strconv.ParseUint(fields[19], 10, 64)
}

func processOf(owner string) (p process, ok bool) {
	parts := strings.Split(owner, ".")
	if len(parts) < 4 || parts[0] != processMark {
		return p, false
	}
	for i, number := range []*uint64{&p.namespace, &p.pid, &p.started} {
		var err error
		if *number, err = strconv.ParseUint(parts[1+i], 36, 64); err != nil {
			return p, false
		}
	}
	return p, true
}

// Ended reports whether an owner names a process of this PID namespace that has ended (see
// [Process]). For a process of another namespace it returns false, because the state is unknown.
func Ended(owner string) (bool, error) {
	us, shown := processOf(Process())
	p, ok := processOf(owner)
	if !shown || !ok || p.namespace != us.namespace {
		return false, nil
	}
	started, err := startOf(p.pid)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	return err == nil && started != p.started, err
}

// DetachLeft releases every device whose [Config.Owner] names a process that has ended (see
// [Process]), and returns these devices. First it unmounts them in this mount namespace. It leaves
// devices of living processes and of other PID namespaces alone. As in [Device.Detach], the error
// is [ErrBusy] if a device is still in use, for example by a mount in another mount namespace.
//
// An orphaned device does not show its owner, so DetachLeft reads the owner from the name of the
// device's file. A process that serves files should give each the name [Process] + "." + any text.
func DetachLeft(ctx context.Context) ([]Device, error) {
	all, err := List()
	if err != nil {
		return nil, fmt.Errorf("find the loop devices of processes that have ended: %w", err)
	}
	var left []Device
	var errs []error
	for _, d := range all {
		owner := d.Owner
		if d.Orphaned {
			owner = filepath.Base(d.BackingFile) // Owner is unknown
		}
		ended, err := Ended(owner)
		if ended {
			left = append(left, d)
		}
		errs = append(errs, err)
	}
	for _, d := range left {
		errs = append(errs, errors.Join(d.unmount(), d.Detach(ctx)))
	}
	return left, errors.Join(errs...)
}

func (d Device) unmount() error {
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		return err
	}
	var errs []error
	for _, m := range slices.Backward(mounts) {
		if m.Major == int(d.Major) && m.Minor == int(d.Minor) || d.sourceOf(m) {
			errs = append(errs, unix.Unmount(m.Mountpoint, unix.UMOUNT_NOFOLLOW))
		}
	}
	return errors.Join(errs...)
}

// sourceOf reports whether m mounts d. For a btrfs, only m.Source identifies the device.
func (d Device) sourceOf(m *mountinfo.Info) bool {
	var st unix.Stat_t
	return strings.HasPrefix(m.Source, "/") && unix.Stat(m.Source, &st) == nil &&
		st.Mode&unix.S_IFMT == unix.S_IFBLK && st.Rdev == unix.Mkdev(d.Major, d.Minor)
}

// DetachBelow releases every device whose file is below dir, and returns these devices. It
// identifies files by device and inode number, because the path that the kernel reports may be
// valid only in a container. Call it before you remove the files, because it finds no devices of
// removed files. As in [Device.Detach], the error is [ErrBusy] if a device is still in use.
func DetachBelow(ctx context.Context, dir string) ([]Device, error) {
	found, err := below(dir)
	if err != nil {
		return nil, fmt.Errorf("find the loop devices of the files below %s: %w", dir, err)
	}
	// Detach all devices at the same time: a device node of one may be the file of another, and the
	// kernel releases a device only after all devices that use it.
	errs := make([]error, len(found))
	var all sync.WaitGroup
	for i, d := range found {
		all.Go(func() { errs[i] = d.Detach(ctx) })
	}
	all.Wait()
	return found, errors.Join(errs...)
}

type fileID struct{ device, inode uint64 }

func below(dir string) ([]Device, error) {
	files := map[fileID]bool{}
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil {
			err = unix.Lstat(path, &st)
		}
		switch {
		case errors.Is(err, fs.ErrNotExist): // The file was removed meanwhile.
			return nil
		case err != nil:
			return err
		}
		files[fileID{st.Dev, st.Ino}] = true
		return nil
	})
	if err != nil {
		return nil, err
	}
	devices, err := List()
	if err != nil {
		return nil, err
	}
	var found []Device
	for _, d := range devices {
		if files[fileID{d.BackingDevice, d.BackingInode}] {
			found = append(found, d)
		}
	}
	return found, nil
}
