package loopdev

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// serialMax is the length of the longest text that fits into lo_file_name with a NUL at its end.
const serialMax = unix.LO_NAME_SIZE - 1

// numberMax is the highest number of a loop device, because minor numbers have 20 bits.
const numberMax = 1<<20 - 1

// Attach attaches a loop device to the file. If another process takes the free device first,
// or if the kernel has to add a device, Attach tries again until ctx ends.
func Attach(ctx context.Context, c Config) (Device, error) {
	d, err := attach(ctx, c)
	if err != nil {
		return Device{}, fmt.Errorf("attach %s with serial %q: %w", c.Path, c.Serial, explain(err))
	}
	return d, nil
}

func attach(ctx context.Context, c Config) (Device, error) {
	if c.BlockSize == 0 {
		c.BlockSize = 512
	}
	if err := c.check(); err != nil {
		return Device{}, err
	}
	file, err := c.open()
	if err != nil {
		return Device{}, err
	}
	defer file.Close() // The kernel holds its own reference from LOOP_CONFIGURE on.
	control, err := openControl()
	if err != nil {
		return Device{}, err
	}
	defer control.Close()
	number := c.First
	for limit := time.Millisecond; ; limit = min(2*limit, 100*time.Millisecond) {
		d, err := c.tryNext(control, file, &number)
		if err == nil || !raceLost(err) {
			return d, err
		}
		// The pause is random, so that processes that have lost this race do not try again at the
		// same time.
		if wait(ctx, rand.N(limit)) != nil {
			return Device{}, fmt.Errorf("%w: other processes took the free devices: %w", ctx.Err(), err)
		}
	}
}

// check refuses a configuration that the kernel would truncate, misread or ignore.
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
	// Stat comes before the open, because opening a FIFO would wait for ever.
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

// tryNext gets the number of a free device and configures the device. It fails if another process
// takes the device in between. The next attempt begins its search at from.
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
	// The device that had this number before may have been made read-only with BLKROSET.
	err = errors.Join(unix.IoctlSetPointerInt(int(node.Fd()), unix.BLKROSET, 0),
		d.limitRequests(file))
	if err == nil && c.NoDiscards {
		err = os.WriteFile(d.discardLimit(), []byte("0"), 0)
	}
	if err == nil {
		d, err = d.fill(node)
	}
	if err != nil {
		// Release the device, because no caller knows it. The kernel does so when node is closed.
		clearErr := unix.IoctlSetInt(int(node.Fd()), unix.LOOP_CLR_FD, 0)
		return d, fmt.Errorf("read the device %s: %w", d.Path, errors.Join(err, clearErr))
	}
	return d, nil
}

// fuseRequestKiB is the kernel's default for the largest request to a FUSE server.
const fuseRequestKiB = "128"

// limitRequests keeps the kernel from splitting a request for a FUSE server. If the server refused
// the second part of a write, the write would be short, and the kernel's loop driver reports a
// short write as done. For other files it restores the default limit, if it can.
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

// free returns the number of a device that was free a moment ago. Without Config.First, the kernel
// chooses the lowest free number. Otherwise free searches upwards from the number from and adds the
// device.
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

// raceLost reports whether another process took, opened or removed the device meanwhile.
func raceLost(err error) bool {
	for _, lost := range []error{unix.EBUSY, unix.ENXIO, unix.ENODEV, unix.ENOENT, unix.EAGAIN} {
		if errors.Is(err, lost) {
			return true
		}
	}
	return false
}
