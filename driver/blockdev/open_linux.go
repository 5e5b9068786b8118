package blockdev

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// OpenDevice is a device with a descriptor open. As long as it is open the kernel cannot give the
// Device's number to another disk.
type OpenDevice struct {
	Device
	host Host
	File *os.File
}

// Open opens the device and proves that what was opened is what sysfs described: a block device of
// that number, that size and that birth.
func (ds Host) Open(d Device) (*OpenDevice, error) {
	// O_NONBLOCK keeps a node that is no disk after all (a tape, a FIFO) from holding us up, and
	// O_DIRECT makes reads come from the device and not from what the kernel remembers of it.
	f, err := os.OpenFile(d.Path, os.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_DIRECT, 0)
	if err != nil {
		return nil, fmt.Errorf("open the device with serial %q: %w", d.Serial, err)
	}
	h := &OpenDevice{Device: d, host: ds, File: f}
	if err := h.Verify(); err != nil {
		_ = f.Close()
		return nil, err
	}
	return h, nil
}

// Reopen opens the same device once more, with a descriptor that outlives this one.
func (h *OpenDevice) Reopen() (*OpenDevice, error) { return h.host.Open(h.Device) }

// Close lets the device go.
func (h *OpenDevice) Close() error { return h.File.Close() }

func (h *OpenDevice) descriptor() int { return int(h.File.Fd()) }

// Verify compares the open descriptor with what sysfs said of the device.
func (h *OpenDevice) Verify() error {
	major, minor, err := openNumber(h.descriptor())
	if err != nil {
		return fmt.Errorf("stat %s: %w", h.Path, err)
	}
	if major != h.Major || minor != h.Minor {
		return csierr.New(csierr.DeviceChanged, "opened %s as device %d:%d, but sysfs says %s for serial"+
			" %q; try again", h.Path, major, minor, h.Number(), h.Serial)
	}
	size, err := deviceSize(h.descriptor())
	if err != nil {
		return fmt.Errorf("size of %s: %w", h.Path, err)
	}
	if size != h.SizeBytes {
		return csierr.New(csierr.DeviceWrongSize, "%s has %d bytes, but sysfs says %d; try again", h.Path,
			size, h.SizeBytes)
	}
	sequence, err := diskSequence(h.descriptor())
	if err != nil {
		return fmt.Errorf("sequence number of %s: %w", h.Path, err)
	}
	if h.Sequence != 0 && sequence != 0 && h.Sequence != sequence {
		return csierr.New(csierr.DeviceChanged, "%s is the kernel's disk %d, but sysfs says %d for "+
			"serial %q; try again", h.Path, sequence, h.Sequence, h.Serial)
	}
	return nil
}

// Reverify proves that the path still leads to the open device and that the device still carries
// the serial: what a tool did to the path, it did to this disk.
func (h *OpenDevice) Reverify() error {
	now, err := h.host.Lookup(h.Serial)
	if err != nil {
		return err
	}
	if now.Number() != h.Number() || now.Sequence != h.Sequence || now.Path != h.Path {
		return csierr.New(csierr.DeviceChanged, "serial %q was on %s (%s) and is now on %s (%s)",
			h.Serial,
			h.Path, h.Number(), now.Path, now.Number())
	}
	return h.Verify()
}

// TryExclusive opens the device exclusively for a moment, which fails as long as it is mounted in any
// mount namespace or held by another driver (device mapper, md, swap). It is let go again, for
// mkfs and mount open exclusively themselves.
//
// A program that is started meanwhile, for another volume, would have a copy of the descriptor
// until it has begun, and so hold the device longer. None is.
func (h *OpenDevice) TryExclusive() error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	f, err := h.openExclusive(os.O_RDONLY)
	if err != nil {
		return err
	}
	return f.Close()
}

// WithExclusive lets act write to the device while nobody else holds it. What act has written
// reached the device, though not beyond its cache.
func (h *OpenDevice) WithExclusive(act func(w *os.File) error) error {
	w, err := h.openExclusive(os.O_RDWR | unix.O_DIRECT)
	if err != nil {
		return err
	}
	err = errors.Join(act(w), w.Close())
	h.awaitCopies()
	return err
}

// awaitCopies waits until no program that was just started has a copy of a descriptor that is
// closed. To keep programs from starting, as claim does, is nothing for as long as a write takes.
func (h *OpenDevice) awaitCopies() {
	for end := time.Now().Add(time.Second); time.Now().Before(end); {
		if !csierr.Has(h.TryExclusive(), csierr.DeviceHeld) {
			return
		}
		<-time.After(time.Millisecond) // nothing tells when a program has begun
	}
}

// openExclusive opens the device at the path once more, as nobody else has it, and proves that it
// is the same one.
func (h *OpenDevice) openExclusive(flags int) (*os.File, error) {
	f, err := os.OpenFile(h.Path, flags|os.O_EXCL|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.EBUSY) {
		return nil, csierr.New(csierr.DeviceHeld, "%s is in use on this node: %w", h.Path, err)
	}
	if err != nil {
		return nil, fmt.Errorf("open %s exclusively: %w", h.Path, err)
	}
	major, minor, err := openNumber(int(f.Fd()))
	if err == nil && (major != h.Major || minor != h.Minor) {
		err = csierr.New(csierr.DeviceChanged, "%s became device %d:%d, it was %s", h.Path, major, minor,
			h.Number())
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("prove %s: %w", h.Path, err)
	}
	return f, nil
}

// Read reads n bytes, whole. Both numbers are multiples of the device's block size, as O_DIRECT
// wants it.
func (h *OpenDevice) Read(offset, n int64) ([]byte, error) {
	b := Aligned(n)
	if err := h.ReadInto(b, offset); err != nil {
		return nil, err
	}
	return b, nil
}

// ReadInto reads as much as there is room in b, which lies where O_DIRECT can put it.
func (h *OpenDevice) ReadInto(b []byte, offset int64) error {
	got, err := h.File.ReadAt(b, offset)
	if got < len(b) {
		return fmt.Errorf("read %s at offset %d: %w", h.Path, offset+int64(got), err)
	}
	return nil
}

// AlignBytes is what reads and writes with O_DIRECT are aligned to, on any disk.
const AlignBytes = 4096

// Aligned makes room where O_DIRECT can put n bytes.
func Aligned(n int64) []byte {
	room := make([]byte, n+AlignBytes)
	start := int64(-uintptr(unsafe.Pointer(&room[0])) % AlignBytes)
	return room[start : start+n : start+n]
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

// Flush writes what the kernel holds of the device and empties the device's own cache.
func (h *OpenDevice) Flush() error { return h.File.Sync() }

// ReadOnly.ReadOnly says whether the kernel refuses writes to the device.
func (h *OpenDevice) ReadOnly() (bool, error) {
	n, err := unix.IoctlGetInt(h.descriptor(), unix.BLKROGET)
	return n != 0, err
}

// SetReadOnly makes the whole device read-only for every writer, or takes that back. A disk that
// the rack made read-only stays so.
func (h *OpenDevice) SetReadOnly(on bool) error {
	var n int32
	if on {
		n = 1
	}
	return Ioctl(h.descriptor(), unix.BLKROSET, unsafe.Pointer(&n))
}

// NumberAt is the number of the block device at path; another kind of file is an error.
func NumberAt(path string) (major, minor uint32, err error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, 0, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return 0, 0, fmt.Errorf("%s is no block device", path)
	}
	return unix.Major(st.Rdev), unix.Minor(st.Rdev), nil
}

// openNumber is the number of the block device behind a descriptor.
func openNumber(fd int) (major, minor uint32, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, 0, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return 0, 0, errors.New("no block device")
	}
	return unix.Major(st.Rdev), unix.Minor(st.Rdev), nil
}

func deviceSize(fd int) (int64, error) {
	var size uint64
	err := Ioctl(fd, unix.BLKGETSIZE64, unsafe.Pointer(&size))
	return int64(size), err
}

// diskSequence is 0 on kernels before 5.15, which do not count.
func diskSequence(fd int) (uint64, error) {
	var n uint64
	err := Ioctl(fd, unix.BLKGETDISKSEQ, unsafe.Pointer(&n))
	if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EINVAL) {
		return 0, nil
	}
	return n, err
}

// Vanished says that a device went away while its files were read.
func Vanished(err error) bool {
	return errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENXIO)
}

func Ioctl(fd int, request uintptr, arg unsafe.Pointer) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg))
	if errno != 0 {
		return errno
	}
	return nil
}

// CheckBlockSize compares the size of the device's logical blocks with the disk's, unless that is 0.
func (h *OpenDevice) CheckBlockSize(blockBytes int64) error {
	n, err := unix.IoctlGetInt(h.descriptor(), unix.BLKSSZGET)
	if err != nil {
		return fmt.Errorf("size of the blocks of %s: %w", h.Path, err)
	}
	if blockBytes != 0 && blockBytes != int64(n) {
		return csierr.New(csierr.DeviceDiffers, "%s with serial %q has blocks of %d bytes, but the disk "+
			"has blocks of %d; is it another disk whose name begins alike?", h.Path, h.Serial, n, blockBytes)
	}
	return nil
}

// MakeWritable takes back a read-only switch that a read-only block publication left on the device
// when the driver died, if it may be ours. The caller knows that nobody uses the device. A disk
// that the rack made read-only stays so, and is refused.
func (h *OpenDevice) MakeWritable(ours bool) error {
	for range 2 {
		readOnly, err := h.ReadOnly()
		if err != nil {
			return fmt.Errorf("ask whether %s is read-only: %w", h.Path, err)
		}
		if !readOnly {
			return nil
		}
		if !ours {
			break
		}
		if err := h.SetReadOnly(false); err != nil {
			return fmt.Errorf("make %s writable: %w", h.Path, err)
		}
	}
	return csierr.New(csierr.DeviceReadOnly, "%s with serial %q is read-only, so it can only be "+
		"staged from a disk that the rack calls read-only; if somebody has switched it on this node, "+
		"blockdev --setrw takes that back", h.Path, h.Serial)
}

// Lost says that an error comes from a device that does not answer any more. Its mounts are
// taken down all the same.
func Lost(err error) bool {
	return errors.Is(err, unix.EIO) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) ||
		errors.Is(err, unix.ENOMEDIUM) || errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ESTALE)
}
