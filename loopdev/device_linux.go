package loopdev

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// detachTimeout is how long Detach waits for other users to close the device. It suffices for udev,
// which inspects a new device for some milliseconds. It does not suffice for a mount.
const detachTimeout = 2 * time.Second

// Detach releases the device, and returns when the kernel has released the file. It succeeds if the
// device was already released. It returns [ErrBusy] if another user still has the device open after
// two seconds or at the end of ctx. The kernel then releases the device when the last user closes
// it. A repeated Detach waits for this.
func (d Device) Detach(ctx context.Context) error {
	err := d.with(func(f *os.File) error {
		// Clear the read-only flag, which Linux keeps for the next attachment with this number.
		return errors.Join(unix.IoctlSetPointerInt(int(f.Fd()), unix.BLKROSET, 0),
			unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0))
	})
	// ErrGone and ENXIO mean that the kernel has released the device, or is releasing it.
	if err != nil && !errors.Is(err, ErrGone) && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("detach %s: %w", d.Path, explain(err))
	}
	// LOOP_CLR_FD only marks an open device. Wait until the last close, when the kernel releases it.
	ctx, cancel := context.WithTimeout(ctx, detachTimeout)
	defer cancel()
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		held, err := d.attached()
		if err != nil {
			return fmt.Errorf("detach %s: %w", d.Path, err)
		}
		if !held {
			return d.leaveDiscards()
		}
		if wait(ctx, pause) != nil {
			return fmt.Errorf("detach %s (%s): %w", d.Path, d.BackingFile, ErrBusy)
		}
	}
}

// leaveDiscards removes a free device that refuses discards, because Linux keeps this setting for
// the next attachment with this number. If another process already uses the device, removal fails.
func (d Device) leaveDiscards() error {
	if now, err := os.ReadFile(d.discardLimit()); err != nil || string(now) != "0\n" {
		return nil
	}
	control, err := openControl()
	if err != nil {
		return err
	}
	defer control.Close()
	_ = unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_REMOVE, d.Number)
	return nil
}

// Sync flushes the device's cache to the file's storage.
func (d Device) Sync() error {
	err := d.with(func(f *os.File) error { return unix.Fsync(int(f.Fd())) })
	if err != nil {
		return fmt.Errorf("sync %s: %w", d.Path, explain(err))
	}
	return nil
}

// Cut disconnects the device from its file while the device is in use, as if a person pulled out a
// drive. From then on the device has size 0: reads and writes fail and do not reach the file.
// Requests that have begun are finished first, and acknowledged writes stay in the file. The device
// exists until Detach was called and the last user has closed it.
//
// Cut sets an offset beyond the end of any file. It does not give the device another file, because
// the kernel allows this only for read-only devices.
func (d Device) Cut() error {
	err := d.with(func(f *os.File) error {
		info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
		if err != nil {
			return err
		}
		info.Offset, info.Sizelimit = cutOffset, 0
		return unix.IoctlLoopSetStatus64(int(f.Fd()), info)
	})
	if err != nil && !errors.Is(err, ErrGone) && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("cut %s: %w", d.Path, explain(err))
	}
	return nil
}

// cutOffset is larger than any file. Its sum with the size of any device does not overflow.
const cutOffset = 1 << 62

// with() opens the device and calls do(), or returns ErrGone if d's attachment has ended. While
// the descriptor is open, the attachment cannot change, because the kernel releases the file only
// at the last close. with() opens the device for reading, which is enough for root's ioctls. A
// kernel may refuse to open a mounted device for writing.
func (d Device) with(do func(*os.File) error) error {
	// Check before the open, because an open creates a removed device again.
	if held, err := d.attached(); err != nil || !held {
		return cmp.Or(err, ErrGone)
	}
	f, err := openNode(d.Path, d.Major, d.Minor, os.O_RDONLY)
	if isAny(err, absent...) {
		return ErrGone
	} else if err != nil {
		return err
	}
	defer f.Close()
	if held, err := d.attached(); err != nil || !held {
		return cmp.Or(err, ErrGone)
	}
	return do(f)
}

func (d Device) attached() (bool, error) {
	sys := sysDir(d.Number)
	// The directory "loop" exists while a file is attached. Each attachment has its own diskseq.
	_, err := os.Stat(sys + "/loop/backing_file")
	var seq uint64
	if err == nil {
		seq, err = readUint(sys + "/diskseq")
	}
	if isAny(err, absent...) {
		return false, nil
	}
	return seq == d.Sequence, err
}

func wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// serialMax is how many bytes fit into lo_file_name before a NUL.
const serialMax = unix.LO_NAME_SIZE - 1

// numberMax is the highest number of a loop device: minor numbers have 20 bits.
const numberMax = 1<<20 - 1

// Attach attaches a loop device to the file c.Path. If another process takes or removes the free
// device first, Attach tries again until ctx ends.
func Attach(ctx context.Context, c Config) (Device, error) {
	d, err := c.attach(ctx)
	if err != nil {
		return Device{}, fmt.Errorf("attach %s with serial %q: %w", c.Path, c.Serial, explain(err))
	}
	return d, nil
}

func (c Config) attach(ctx context.Context) (d Device, err error) {
	c.BlockSize = cmp.Or(c.BlockSize, 512)
	if err := c.check(); err != nil {
		return d, err
	}
	file, err := c.open()
	if err != nil {
		return d, err
	}
	defer file.Close() // The kernel holds its own reference from LOOP_CONFIGURE on.
	control, err := openControl()
	if err != nil {
		return d, err
	}
	defer control.Close()
	number := c.First
	for limit := time.Millisecond; ; limit = min(2*limit, 100*time.Millisecond) {
		if d, err = c.tryNext(control, file, &number); err == nil || !raceLost(err) {
			return d, err
		}
		// The pause is random, so that processes that lost the race try again at different times.
		if wait(ctx, rand.N(limit)) != nil {
			return d, fmt.Errorf("%w: other processes took the free devices: %w", ctx.Err(), err)
		}
	}
}

// check returns an error if the kernel would truncate, misread or ignore the configuration.
func (c Config) check() error {
	switch {
	case c.Serial == "":
		return errors.New("a serial is needed: without one the device cannot be found again")
	case len(c.Serial) > serialMax:
		return fmt.Errorf("the serial has %d bytes, the kernel keeps %d", len(c.Serial), serialMax)
	case strings.ContainsRune(c.Serial+c.Owner, 0):
		return errors.New("the serial or the owner contains a NUL, at which the kernel's copy would end")
	case c.Owner != "" && len(c.Serial)+len(c.Owner) >= serialMax:
		return fmt.Errorf("serial and owner have %d bytes, the kernel keeps %d",
			len(c.Serial)+len(c.Owner), serialMax-1)
	case c.BlockSize < 512 || c.BlockSize > os.Getpagesize() || c.BlockSize&(c.BlockSize-1) != 0:
		return fmt.Errorf("block size %d is not a power of two between 512 and the page size %d",
			c.BlockSize, os.Getpagesize())
	case c.SizeLimit < 0 || c.SizeLimit%int64(c.BlockSize) != 0:
		return fmt.Errorf("size limit %d is not a multiple of the block size %d",
			c.SizeLimit, c.BlockSize)
	case c.First < 0 || c.First > numberMax:
		return fmt.Errorf("the first number %d is not between 0 and %d", c.First, numberMax)
	}
	return nil
}

func (c Config) open() (*os.File, error) {
	// Stat comes first, because opening a FIFO waits for another process.
	st, err := os.Stat(c.Path)
	switch {
	case err != nil:
		return nil, err
	case !st.Mode().IsRegular():
		return nil, fmt.Errorf("it is not a regular file, but has the mode %s", st.Mode())
	case st.Size()%int64(c.BlockSize) != 0:
		return nil, fmt.Errorf("its size %d is not a multiple of the block size %d",
			st.Size(), c.BlockSize)
	case c.ReadOnly:
		return os.Open(c.Path)
	}
	return os.OpenFile(c.Path, os.O_RDWR, 0)
}

// tryNext attaches the file to a free device. It fails if another process takes the device first.
// If Config.First is set, it begins at the number *from, and advances *from.
func (c Config) tryNext(control, file *os.File, from *int) (Device, error) {
	number, err := c.free(control, from)
	if err != nil {
		return Device{}, fmt.Errorf("get a free loop device: %w", err)
	}
	d, err := identify(number)
	if err != nil {
		return d, err
	}
	node, err := openNode(d.Path, d.Major, d.Minor, os.O_RDWR)
	if err != nil {
		return d, err
	}
	defer node.Close()
	config := unix.LoopConfig{Fd: uint32(file.Fd()), Size: uint32(c.BlockSize)}
	config.Info.Sizelimit = uint64(c.SizeLimit)
	copy(config.Info.File_name[:], c.Serial)
	if c.Owner != "" {
		copy(config.Info.File_name[len(c.Serial)+1:], c.Owner)
	}
	if c.ReadOnly {
		config.Info.Flags |= unix.LO_FLAGS_READ_ONLY
	}
	if err := unix.IoctlLoopConfigure(int(node.Fd()), &config); err != nil {
		return d, fmt.Errorf("configure %s: %w", d.Path, err)
	}
	// Clear the read-only flag that an earlier attachment with this number may have left.
	err = errors.Join(unix.IoctlSetPointerInt(int(node.Fd()), unix.BLKROSET, 0),
		d.limitRequests(file))
	if err == nil && c.NoDiscards {
		err = os.WriteFile(d.discardLimit(), []byte("0"), 0)
	}
	if err == nil {
		d, err = d.fill(node)
	}
	if err != nil {
		// The caller gets no Device with which it could release the attachment, so release it here.
		clearErr := unix.IoctlSetInt(int(node.Fd()), unix.LOOP_CLR_FD, 0)
		return d, fmt.Errorf("read the device %s: %w", d.Path, errors.Join(err, clearErr))
	}
	return d, nil
}

// fuseRequestKiB is the kernel's default maximum of a request to a FUSE server.
const fuseRequestKiB = "128"

// limitRequests keeps the kernel from splitting a write to a FUSE server. If the server refuses the
// second part of a split write, the kernel's loop driver reports the short write as done. For files
// that are not on FUSE, limitRequests tries to restore the default limit.
func (d Device) limitRequests(file *os.File) error {
	var backing unix.Statfs_t
	if err := unix.Fstatfs(int(file.Fd()), &backing); err != nil {
		return err
	}
	queue := filepath.Join(sysBlock, filepath.Base(d.Path), "queue")
	limit := filepath.Join(queue, "max_sectors_kb")
	if backing.Type != unix.FUSE_SUPER_MAGIC {
		if most, err := os.ReadFile(filepath.Join(queue, "max_hw_sectors_kb")); err == nil {
			_ = os.WriteFile(limit, most, 0)
		}
		return nil
	}
	return os.WriteFile(limit, []byte(fuseRequestKiB), 0)
}

func (d Device) discardLimit() string { return sysDir(d.Number) + "/queue/discard_max_bytes" }

// free() returns the number of a device that was free a moment ago. The kernel chooses it, unless
// Config.First is set: then it is the lowest free number from *from on, and free() adds the device.
func (c Config) free(control *os.File, from *int) (int, error) {
	if c.First == 0 {
		return unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
	}
	for ; *from <= numberMax; *from++ {
		if _, err := os.Stat(sysDir(*from) + "/loop/backing_file"); err == nil {
			continue
		}
		err := unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_ADD, *from)
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return 0, fmt.Errorf("add device %d: %w", *from, err)
		}
		number := *from
		*from++ // The next attempt uses the next number.
		return number, nil
	}
	return 0, fmt.Errorf("%w from number %d on", unix.ENOSPC, c.First)
}

// raceLost reports whether err means that another process took, opened or removed the device.
func raceLost(err error) bool {
	return isAny(err, unix.EBUSY, unix.ENXIO, unix.ENODEV, unix.ENOENT, unix.EAGAIN)
}

const sysBlock = "/sys/block"

// List returns every attached loop device of this machine, also those of other programs, in the
// order of their numbers. It may omit a device that is attached or detached during the call.
func List() ([]Device, error) {
	entries, err := os.ReadDir(sysBlock)
	if err != nil {
		return nil, fmt.Errorf("list loop devices: %w", err)
	}
	var devices []Device
	for _, e := range entries {
		number, ok := loopNumber(e.Name())
		if !ok {
			continue
		}
		d, err := describe(number)
		if err == nil {
			devices = append(devices, d)
		} else if !isAny(err, absent...) {
			return nil, fmt.Errorf("list loop devices: read %s: %w", e.Name(), explain(err))
		}
	}
	slices.SortFunc(devices, func(a, b Device) int { return cmp.Compare(a.Number, b.Number) })
	return devices, nil
}

// describe reads one loop device. If no file is attached, isAny(err, absent...) is true.
func describe(number int) (d Device, err error) {
	// Most devices are free, and need not be opened.
	if _, err := os.Stat(sysDir(number) + "/loop/backing_file"); err != nil {
		return d, err
	}
	if d, err = identify(number); err != nil {
		return d, err
	}
	f, err := openNode(d.Path, d.Major, d.Minor, os.O_RDONLY)
	if err != nil {
		return d, err
	}
	defer f.Close()
	// While f is open, the attachment cannot change, so all fields belong to one attachment.
	return d.fill(f)
}

func identify(number int) (Device, error) {
	d := Device{Number: number, Path: fmt.Sprintf("/dev/loop%d", number)}
	b, err := os.ReadFile(sysDir(number) + "/dev")
	if err != nil {
		return d, err
	}
	if _, err := fmt.Sscanf(string(b), "%d:%d", &d.Major, &d.Minor); err != nil {
		return d, fmt.Errorf("parse device number %q of %s: %w", b, d.Path, err)
	}
	return d, nil
}

func (d Device) fill(f *os.File) (Device, error) {
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	switch {
	// The ioctl asks the filesystem of the device's file. If a FUSE server has ended, the error is
	// ENOTCONN or ECONNABORTED. If an XFS was shut down, the error is EIO.
	case isAny(err, unix.ENOTCONN, unix.ECONNABORTED, unix.EIO):
		d.Orphaned = true
	case err != nil:
		return d, fmt.Errorf("get status: %w", err)
	default:
		d.Serial = unix.ByteSliceToString(info.File_name[:])
		d.Owner = unix.ByteSliceToString(info.File_name[min(len(d.Serial)+1, serialMax):])
		d.BackingDevice, d.BackingInode = info.Device, info.Inode
		if info.Rdevice != info.Device { // they are equal if the file is regular
			d.BackingNumber = info.Rdevice
		}
		d.ReadOnly = info.Flags&unix.LO_FLAGS_READ_ONLY != 0
		d.Releasing = info.Flags&unix.LO_FLAGS_AUTOCLEAR != 0
	}

	sys := sysDir(d.Number)
	file, err := os.ReadFile(sys + "/loop/backing_file")
	if err != nil {
		return d, err
	}
	d.BackingFile = string(bytes.TrimSuffix(file, []byte("\n")))
	read := func(name string) (n uint64) {
		if err == nil {
			n, err = readUint(sys + name)
		}
		return n
	}
	d.SizeBytes, d.BlockSize = int64(read("/size"))*512, int(read("/queue/logical_block_size"))
	d.Sequence = read("/diskseq")
	return d, err
}

func loopNumber(name string) (int, bool) {
	digits, ok := strings.CutPrefix(name, "loop")
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 10, 20)
	return int(n), err == nil
}

func sysDir(number int) string { return fmt.Sprintf("%s/loop%d", sysBlock, number) }

func readUint(path string) (uint64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(string(bytes.TrimSpace(b)), 10, 64)
}

// absent contains the errors of a device that has no file, or that the kernel is releasing.
var absent = []error{fs.ErrNotExist, unix.ENXIO, unix.ENODEV}

func isAny(err error, any ...error) bool {
	return slices.ContainsFunc(any, func(one error) bool { return errors.Is(err, one) })
}

// The control device. The kernel fixes its numbers (misc major, LOOP_CTRL_MINOR).
const (
	controlPath  = "/dev/loop-control"
	controlMajor = 10
	controlMinor = 237
)

// Available returns an error that tells what to do if loop devices cannot be used.
func Available() error {
	f, err := openControl()
	if err != nil {
		return fmt.Errorf("open the loop driver's control device: %w", explain(err))
	}
	return f.Close()
}

func openControl() (*os.File, error) {
	f, err := openOrMake(controlPath, unix.S_IFCHR, controlMajor, controlMinor, os.O_RDWR)
	// openOrMake creates a missing device node, so these errors mean that the loop driver is missing.
	if isAny(err, absent...) {
		return nil, fmt.Errorf("the kernel has no loop driver; load it: modprobe loop (%w)", err)
	}
	return f, err
}

func openNode(path string, major, minor uint32, flag int) (*os.File, error) {
	f, err := openOrMake(path, unix.S_IFBLK, major, minor, flag)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err = unix.Fstat(int(f.Fd()), &st); err != nil {
		err = fmt.Errorf("stat %s: %w", path, err)
	} else if st.Mode&unix.S_IFMT != unix.S_IFBLK || st.Rdev != unix.Mkdev(major, minor) {
		err = fmt.Errorf("%s is not the loop device %d:%d", path, major, minor)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// openOrMake opens a device node, and first creates it if it is missing. A container's /dev often
// lacks devices that the kernel has added since the container was started.
func openOrMake(path string, kind, major, minor uint32, flag int) (*os.File, error) {
	f, err := os.OpenFile(path, flag, 0)
	if !errors.Is(err, fs.ErrNotExist) {
		return f, err
	}
	err = unix.Mknod(path, kind|0o600, int(unix.Mkdev(major, minor)))
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, fmt.Errorf("make node %s (%d:%d): %w", path, major, minor, err)
	}
	return os.OpenFile(path, flag, 0)
}

func explain(err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return fmt.Errorf("%w (loop devices need root with CAP_SYS_ADMIN, "+
			"and a container must be allowed to use block devices of major number 7)", err)
	}
	return err
}
