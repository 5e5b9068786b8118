package loopdev

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Config says what to attach.
type Config struct {
	// Path is a regular file. It stays in use until the device is detached, unlinked or not.
	Path string
	// Serial is how the device is found again: 1 to 63 bytes without NUL. A longer one is refused.
	Serial string
	// BlockSize is the logical block size in bytes, a power of two from 512 to the page size. 0 is
	// 512.
	BlockSize int
	// ReadOnly makes a device that refuses writes.
	ReadOnly bool
	// SizeLimit makes the device smaller than the file; 0 is the whole file.
	SizeLimit int64
	// First is the lowest number that the device may have; 0 is any that is free. Whoever runs
	// "losetup -f" takes the lowest, which in a container may be the only ones with nodes.
	First int
}

// serialMax is what fits into lo_file_name beside its NUL.
const serialMax = unix.LO_NAME_SIZE - 1

// numberMax is the highest number of a loop device: minors have 20 bits.
const numberMax = 1<<20 - 1

// Attach gives the file a block device. Where several processes want the next free device at once,
// or the kernel has none left and must make one, it tries again until ctx ends.
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
		// A random pause, lest all who lost this race run the next one in step.
		if wait(ctx, rand.N(limit)) != nil {
			return Device{}, fmt.Errorf("%w: no free device was won: %w", ctx.Err(), err)
		}
	}
}

// check refuses what the kernel would cut, misread or accept to nobody's use.
func (c Config) check() error {
	switch {
	case c.Serial == "":
		return errors.New("a serial is needed: without one the device cannot be found again")
	case len(c.Serial) > serialMax:
		return fmt.Errorf("the serial has %d bytes, the kernel keeps %d", len(c.Serial), serialMax)
	case strings.ContainsRune(c.Serial, 0):
		return errors.New("the serial contains a NUL, at which the kernel's copy would end")
	case c.BlockSize < 512 || c.BlockSize > os.Getpagesize() || c.BlockSize&(c.BlockSize-1) != 0:
		return fmt.Errorf("block size %d is no power of two between 512 and the page size %d",
			c.BlockSize, os.Getpagesize())
	case c.SizeLimit < 0 || c.SizeLimit%int64(c.BlockSize) != 0:
		return fmt.Errorf("size limit %d is no multiple of the block size %d",
			c.SizeLimit, c.BlockSize)
	case c.First < 0 || c.First > numberMax:
		return fmt.Errorf("the first number %d is not between 0 and %d", c.First, numberMax)
	}
	return nil
}

func (c Config) open() (*os.File, error) {
	// Before the open, which would wait at a FIFO for ever.
	st, err := os.Stat(c.Path)
	switch {
	case err != nil:
		return nil, err
	case !st.Mode().IsRegular():
		return nil, fmt.Errorf("a regular file is needed, this has mode %s", st.Mode())
	case st.Size()%int64(c.BlockSize) != 0:
		return nil, fmt.Errorf("its size %d is no multiple of the block size %d",
			st.Size(), c.BlockSize)
	case c.ReadOnly:
		return os.Open(c.Path)
	}
	return os.OpenFile(c.Path, os.O_RDWR, 0)
}

// tryNext asks for a free device and configures it in one step. Between the two another process may
// take it. From is where the next try begins to look.
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
	if c.ReadOnly {
		config.Info.Flags |= unix.LO_FLAGS_READ_ONLY
	}
	if err := unix.IoctlLoopConfigure(int(node.Fd()), &config); err != nil {
		return d, fmt.Errorf("configure %s: %w", d.Path, err)
	}
	// Who made an earlier device of this number read-only with BLKROSET did not mean this one.
	err = unix.IoctlSetPointerInt(int(node.Fd()), unix.BLKROSET, 0)
	if err == nil {
		d, err = d.fill(node)
	}
	if err != nil {
		// Nobody would know of the device. It goes when node closes.
		clearErr := unix.IoctlSetInt(int(node.Fd()), unix.LOOP_CLR_FD, 0)
		return d, fmt.Errorf("look at %s: %w", d.Path, errors.Join(err, clearErr))
	}
	return d, nil
}

// free is the number of a device that nobody uses, or that nobody used a moment ago. The kernel
// knows the lowest of all; from a first number on it is looked for here, and made.
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
		*from++ // When this one is lost to another process, the next one is tried.
		return number, nil
	}
	return 0, fmt.Errorf("%w from number %d on", unix.ENOSPC, c.First)
}

// raceLost says that the device was taken, held or removed by another process meanwhile.
func raceLost(err error) bool {
	for _, lost := range []error{unix.EBUSY, unix.ENXIO, unix.ENODEV, unix.ENOENT, unix.EAGAIN} {
		if errors.Is(err, lost) {
			return true
		}
	}
	return false
}
