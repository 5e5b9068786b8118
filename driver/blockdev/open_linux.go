package blockdev

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// OpenDevice is a device that is open, so the kernel gives its number to no other disk.
type OpenDevice struct {
	Device
	host Host
	File *os.File
	lock *os.File // against other processes of the driver; nil unless OpenLocked opened it
	// Shared reports that a workload may have, or have had, a node of the disk (see CheckLoops).
	Shared bool
	// Inherited lists the files that a program inherits to work on the device: File, and the locks.
	// The program keeps the locks if this process dies.
	Inherited []*os.File
}

// Open opens the device and verifies the number, size and diskseq that sysfs has reported.
func (h Host) Open(device Device) (*OpenDevice, error) { return h.open(device.Path, device) }

func (h Host) open(path string, device Device) (*OpenDevice, error) {
	// O_NONBLOCK keeps the open from blocking on a file that is not a disk (a tape, a FIFO). With
	// O_DIRECT reads come from the device and not from the kernel's page cache.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_DIRECT, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s with serial %q: %w", device.Path, device.Serial,
			csierr.WithoutPath(err))
	}
	d := &OpenDevice{Device: device, host: h, File: f, Inherited: []*os.File{f}}
	if err := d.verify(); err != nil {
		_ = f.Close()
		return nil, err
	}
	return d, nil
}

// Reopen opens the device again, even if its path leads to another disk by now. The result stays
// open when d is closed.
func (d *OpenDevice) Reopen() (*OpenDevice, error) {
	return d.host.open(d.descriptorPath(), d.Device)
}

// Close closes this process's descriptors of the device and of its lock.
func (d *OpenDevice) Close() error {
	_ = d.lock.Close()
	return d.File.Close()
}

func (d *OpenDevice) descriptor() int { return int(d.File.Fd()) }

func (d *OpenDevice) verify() error {
	major, minor, err := openNumber(d.descriptor())
	if err != nil {
		return fmt.Errorf("stat %s: %w", d.Path, err)
	}
	if major != d.Major || minor != d.Minor {
		return csierr.New(csierr.DeviceChanged, "opened %s as device %d:%d, but sysfs reports %s for "+
			"serial %q; try again", d.Path, major, minor, d.Number(), d.Serial)
	}
	size, err := deviceSize(d.descriptor())
	if err != nil {
		return fmt.Errorf("size of %s: %w", d.Path, err)
	}
	if size != d.SizeBytes {
		return csierr.New(csierr.DeviceWrongSize, "%s has %d bytes, but sysfs reports %d; try again",
			d.Path, size, d.SizeBytes)
	}
	diskSeq, err := openDiskSeq(d.descriptor())
	if err != nil {
		return fmt.Errorf("diskseq of %s: %w", d.Path, err)
	}
	if d.DiskSeq != 0 && diskSeq != 0 && d.DiskSeq != diskSeq {
		return csierr.New(csierr.DeviceChanged, "%s has the diskseq %d, but sysfs reports %d for "+
			"serial %q; try again", d.Path, diskSeq, d.DiskSeq, d.Serial)
	}
	return nil
}

// Reverify verifies that the path still leads to the open device, and that the device still has the
// serial. If so, a program that was given the path has worked on this disk.
func (d *OpenDevice) Reverify() error {
	now, err := d.host.Lookup(d.Serial)
	if err != nil {
		return err
	}
	if now.Number() != d.Number() || now.DiskSeq != d.DiskSeq || now.Path != d.Path {
		return csierr.New(csierr.DeviceChanged, "serial %q was on %s (%s) and is now on %s (%s)",
			d.Serial, d.Path, d.Number(), now.Path, now.Number())
	}
	return d.verify()
}

// TryExclusive checks whether mkfs or mount could open the device exclusively. It fails while the
// device is mounted in any mount namespace, or while another part of the kernel uses it (device
// mapper, md, swap).
//
// It does not open the device itself, because a child forked meanwhile, or a reader of
// /proc/PID/fd, may keep the device busy with a copy of the descriptor. Instead it sets the block
// size that the device already has, for which the kernel opens the device exclusively for a moment.
func (d *OpenDevice) TryExclusive() error {
	size, err := unix.IoctlGetInt(d.descriptor(), unix.BLKBSZGET)
	if err == nil {
		n := int32(size)
		err = Ioctl(d.descriptor(), unix.BLKBSZSET, unsafe.Pointer(&n))
	}
	if !errors.Is(err, unix.EBUSY) {
		return d.notExclusive(err)
	}
	f, failed := d.openAgain(os.O_RDONLY | unix.O_NONBLOCK) // EBUSY may hide another error
	if failed != nil {
		return failed
	}
	return errors.Join(d.notExclusive(err), f.Close())
}

// WithExclusive opens the device exclusively for writing and calls act(). When it returns, the
// kernel has written act()'s data, which may still be in the device's own cache.
func (d *OpenDevice) WithExclusive(act func(w *os.File) error) error {
	w, err := d.openAgain(os.O_RDWR | os.O_EXCL | unix.O_DIRECT)
	if err != nil {
		return err
	}
	err = errors.Join(act(w), w.Close())
	d.awaitCopies()
	return err
}

// awaitCopies waits up to a second until no other process has a copy of the descriptor that
// WithExclusive closed. A child between fork and exec, or a reader of /proc/PID/fd, may have one.
func (d *OpenDevice) awaitCopies() {
	for end := time.Now().Add(time.Second); time.Now().Before(end); {
		if !csierr.Has(d.TryExclusive(), csierr.DeviceHeld) {
			return
		}
		<-time.After(time.Millisecond) // nothing reports that a copy is closed
	}
}

func (d *OpenDevice) openAgain(flags int) (*os.File, error) {
	f, err := os.OpenFile(d.descriptorPath(), flags|unix.O_CLOEXEC, 0)
	return f, d.notExclusive(csierr.WithoutPath(err))
}

func (d *OpenDevice) notExclusive(err error) error {
	if errors.Is(err, unix.EBUSY) {
		return csierr.New(csierr.DeviceHeld, "%s is in use on this node: %w", d.Path, err)
	}
	if err != nil {
		return fmt.Errorf("open %s exclusively: %w", d.Path, err)
	}
	return nil
}

// Read reads exactly n bytes. O_DIRECT requires multiples of the device's block size.
func (d *OpenDevice) Read(offset, n int64) ([]byte, error) {
	b := Aligned(n)
	if err := d.ReadInto(b, offset); err != nil {
		return nil, err
	}
	return b, nil
}

// ReadInto fills b, which must be aligned for O_DIRECT, with the bytes at the offset.
func (d *OpenDevice) ReadInto(b []byte, offset int64) error {
	got, err := d.File.ReadAt(b, offset)
	if got < len(b) {
		return fmt.Errorf("read %s at offset %d: %w", d.Path, offset+int64(got), err)
	}
	return nil
}

// AlignBytes is an alignment that O_DIRECT accepts on every disk.
const AlignBytes = 4096

// Aligned returns a buffer of n bytes that is aligned for O_DIRECT.
func Aligned(n int64) []byte {
	b := make([]byte, n+AlignBytes)
	start := int64(-uintptr(unsafe.Pointer(&b[0])) % AlignBytes)
	return b[start : start+n : start+n]
}

// WriteAt writes b to a device that was opened with O_DIRECT.
func WriteAt(w *os.File, b []byte, offset int64) error {
	from := Aligned(int64(len(b)))
	copy(from, b)
	if _, err := w.WriteAt(from, offset); err != nil {
		return fmt.Errorf("at offset %d: %w", offset, err)
	}
	return nil
}

// Flush writes the kernel's cached data to the device and flushes the device's own cache.
func (d *OpenDevice) Flush() error { return d.File.Sync() }

// BlockBytes returns the device's logical block size.
func (d *OpenDevice) BlockBytes() (int64, error) {
	n, err := unix.IoctlGetInt(d.descriptor(), unix.BLKSSZGET)
	if err != nil {
		return 0, fmt.Errorf("block size of %s: %w", d.Path, err)
	}
	return int64(n), nil
}

// CheckBlockSize fails if the device's logical block size is not blockBytes; 0 matches any.
func (d *OpenDevice) CheckBlockSize(blockBytes int64) error {
	n, err := d.BlockBytes()
	if err != nil {
		return err
	}
	if blockBytes != 0 && blockBytes != n {
		return csierr.New(csierr.DeviceDiffers, "%s with serial %q has blocks of %d bytes, but the disk "+
			"has blocks of %d; is it another disk whose name begins with the same bytes?", d.Path,
			d.Serial, n, blockBytes)
	}
	return nil
}

// ReadOnly reports whether the kernel refuses writes to the device.
func (d *OpenDevice) ReadOnly() (bool, error) {
	n, err := unix.IoctlGetInt(d.descriptor(), unix.BLKROGET)
	return n != 0, err
}

// SetReadOnly sets or clears the device's read-only switch, which applies to every writer. A disk
// that the rack has made read-only stays read-only when the switch is cleared.
func (d *OpenDevice) SetReadOnly(on bool) error {
	var n int32
	if on {
		n = 1
	}
	return Ioctl(d.descriptor(), unix.BLKROSET, unsafe.Pointer(&n))
}

// DropCache makes the kernel drop its cache of the device. Otherwise, while any process has the
// device open, the cache keeps the bytes of a failed write, which are not on the disk.
func (d *OpenDevice) DropCache() error {
	if err := Ioctl(d.descriptor(), unix.BLKFLSBUF, nil); err != nil {
		return fmt.Errorf("drop what the kernel has kept of %s: %w", d.Path, err)
	}
	return nil
}

// MakeWritable fails if the device is read-only. If the parameter ours is true, it clears the
// read-only switch first: an earlier process of the driver may have set it for a read-only block
// publication. The caller has checked that nobody uses the device.
func (d *OpenDevice) MakeWritable(ours bool) error {
	for range 2 {
		readOnly, err := d.ReadOnly()
		if err != nil {
			return fmt.Errorf("ask whether %s is read-only: %w", d.Path, err)
		}
		if !readOnly {
			return nil
		}
		if !ours {
			break
		}
		if err := d.SetReadOnly(false); err != nil {
			return fmt.Errorf("make %s writable: %w", d.Path, err)
		}
	}
	return csierr.New(csierr.DeviceReadOnly, "%s with serial %q is read-only, so it can only be "+
		"staged from a disk that the rack reports as read-only; if it was made read-only on this node, "+
		"blockdev --setrw undoes that", d.Path, d.Serial)
}

// NumberAt returns the number of the block device at path. Another kind of file is an error.
func NumberAt(path string) (major, minor uint32, err error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, 0, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return 0, 0, fmt.Errorf("%s is not a block device", path)
	}
	return unix.Major(st.Rdev), unix.Minor(st.Rdev), nil
}

func openNumber(fd int) (major, minor uint32, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, 0, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return 0, 0, errors.New("not a block device")
	}
	return unix.Major(st.Rdev), unix.Minor(st.Rdev), nil
}

func deviceSize(fd int) (int64, error) {
	var size uint64
	err := Ioctl(fd, unix.BLKGETSIZE64, unsafe.Pointer(&size))
	return int64(size), err
}

func openDiskSeq(fd int) (uint64, error) {
	var n uint64
	err := Ioctl(fd, unix.BLKGETDISKSEQ, unsafe.Pointer(&n))
	if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EINVAL) {
		return 0, nil // kernels before 5.15 have no diskseq
	}
	return n, err
}

// Ioctl calls ioctl(2) with a pointer as its argument.
func Ioctl(fd int, request uintptr, arg unsafe.Pointer) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg))
	if errno != 0 {
		return errno
	}
	return nil
}

// Vanished reports whether err means that the device was removed during a read.
func Vanished(err error) bool {
	return errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENXIO)
}

// Lost reports whether err shows that a device or mount is lost. A lost mount can be unmounted.
func Lost(err error) bool {
	return errors.Is(err, unix.EIO) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) ||
		errors.Is(err, unix.ENOMEDIUM) || errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ESTALE)
}

// lockWait limits the wait for a lock. Within that time a call that is about to end releases its
// lock, and so does a program between fork and exec that has inherited the lock's descriptor.
const lockWait = 2 * time.Second

// Lock keeps other processes of the driver on this node from locking the key, which names a volume
// or a disk. The lock ends when the returned file is closed, here and in every program that has
// inherited it. If Locks is empty or cannot be opened, Lock returns nil and locks nothing.
//
// The lock is on one byte of the file Locks, at an offset that is a hash of the key. Workloads
// cannot reach this file, and no lock has to be cleaned up. If two keys have the same hash, their
// calls wait for each other.
func (h Host) Lock(ctx context.Context, key string) (*os.File, error) {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(key))
	at := int64(hash.Sum64() >> 2)
	const maxOpens = 5
	for range maxOpens {
		f := h.openLocks()
		if f == nil {
			return nil, nil
		}
		var st unix.Stat_t
		err := unix.Fstat(int(f.Fd()), &st)
		if err == nil {
			err = awaitLock(ctx, key, func() error {
				return unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK,
					Start: at, Len: 1})
			}, func() string {
				return locker(func(other *unix.Statx_t) bool {
					return other.Ino == st.Ino && unix.Mkdev(other.Dev_major, other.Dev_minor) == st.Dev
				}, fmt.Sprintf(" %d %d\n", at, at))
			})
		}
		if err == nil {
			err = unix.Fstat(int(f.Fd()), &st)
		}
		if err == nil && st.Nlink > 0 {
			return f, nil
		}
		_ = f.Close()
		if err != nil {
			return nil, err
		} // otherwise the file was removed meanwhile
	}
	return nil, csierr.New(csierr.DeviceLocked, "the file of the locks, %s, was removed %d times "+
		"while %s was locked; find the process that removes it", h.Locks, maxOpens, csierr.Plain(key))
}

func (h Host) openLocks() *os.File {
	if h.Locks == "" {
		return nil
	}
	for range 2 {
		f, err := os.OpenFile(h.Locks, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
		if err == nil {
			return f
		}
		_ = os.MkdirAll(filepath.Dir(h.Locks), 0o700)
	}
	return nil
}

// OpenLocked opens and verifies the device and locks it against other processes of the driver.
// Programs that inherit the files in Inherited keep the lock. So if the driver dies during a mkfs
// or an e2fsck, the next driver waits until the program has ended.
//
// If unshared is true (no workload gets the raw device), or if Lock locks nothing, OpenLocked also
// waits for the flock(2) of the device node, which excludes a driver with another lock file.
//
// The locks do not exclude other programs. TryExclusive and AwaitNoWriters find those.
func (h Host) OpenLocked(ctx context.Context, device Device, unshared bool) (*OpenDevice, error) {
	d, err := h.Open(device)
	if err != nil {
		return nil, err
	}
	if d.lock, err = h.Lock(ctx, "the disk with serial "+device.Serial); err == nil {
		err = d.flock(ctx, unshared || d.lock == nil)
	}
	if err == nil {
		err = d.verify() // the disk may have changed during the wait for the lock
	}
	d.Shared = !unshared
	if err != nil {
		_ = d.Close()
		return nil, err
	}
	d.Keep(d.lock)
	return d, nil
}

// Keep adds a lock to d.Inherited, so that programs keep the lock. It ignores nil.
func (d *OpenDevice) Keep(lock *os.File) {
	if lock != nil {
		d.Inherited = append(d.Inherited, lock)
	}
}

// flock takes the flock(2) of the device node, which also keeps udev from probing the device. A
// workload that has the raw device may hold that lock forever. So if wait is false, flock tries
// only once and ignores a failure.
func (d *OpenDevice) flock(ctx context.Context, wait bool) error {
	take := func() error { return unix.Flock(d.descriptor(), unix.LOCK_EX|unix.LOCK_NB) }
	if !wait {
		_ = take()
		return nil
	}
	return awaitLock(ctx, d.Path, take, func() string { return locker(d.isNode, "FLOCK") })
}

func awaitLock(ctx context.Context, what string, take func() error, locker func() string) error {
	backoff := async.Backoff{Pause: 10 * time.Millisecond, Max: 10 * time.Millisecond,
		End: time.Now().Add(lockWait)}
	for {
		err := take()
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case !errors.Is(err, unix.EAGAIN):
			return fmt.Errorf("lock %s: %w", what, err)
		}
		switch again, ended := backoff.Wait(ctx); {
		case ended != nil:
			return fmt.Errorf("wait for the lock of %s: %w", what, ended)
		case !again:
			return csierr.New(csierr.DeviceLocked, "%s is locked by %s; repeat the call when that has "+
				"ended", csierr.Plain(what), locker())
		}
	}
}

func locker(isFile func(*unix.Statx_t) bool, mark string) string {
	locking := slices.DeleteFunc(openers(isFile, mark), func(o opener) bool { return !o.Locking })
	if len(locking) == 0 {
		return "another call of this process, or a process that is not visible from here"
	}
	return nameOpeners(locking)
}
