package loopdev

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const sysBlock = "/sys/block"

// List returns every attached loop device of this machine in the order of their numbers,
// including the devices of other programs. It may omit a device that is attached or detached
// during the call.
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
		d, attached, err := describe(number)
		if err != nil {
			return nil, fmt.Errorf("list loop devices: look at %s: %w", e.Name(), explain(err))
		}
		if attached {
			devices = append(devices, d)
		}
	}
	slices.SortFunc(devices, func(a, b Device) int { return cmp.Compare(a.Number, b.Number) })
	return devices, nil
}

// describe reads one loop device. It returns false for a device without a file.
func describe(number int) (Device, bool, error) {
	// Most devices are free, so do not open them.
	if _, err := os.Stat(sysDir(number) + "/loop/backing_file"); err != nil {
		return Device{}, false, ignoreAbsent(err)
	}
	d, err := identify(number)
	if err != nil {
		return Device{}, false, ignoreAbsent(err)
	}
	f, err := openNode(d.Path, d.Major, d.Minor, os.O_RDONLY)
	if err != nil {
		return Device{}, false, ignoreAbsent(err)
	}
	defer f.Close()
	// The attachment cannot change while f is open, so all that follows describes the same one.
	d, err = d.fill(f)
	if err != nil {
		return Device{}, false, ignoreAbsent(err)
	}
	return d, true, nil
}

// identify reads the properties that do not depend on an attachment.
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

// fill reads the attachment behind f, which must stay open during the call.
func (d Device) fill(f *os.File) (Device, error) {
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	switch {
	// The ioctl asks the file. FUSE answers with the first two errors if no process serves it, and
	// an XFS that was shut down with the third one.
	case errors.Is(err, unix.ENOTCONN), errors.Is(err, unix.ECONNABORTED), errors.Is(err, unix.EIO):
		d.Orphaned = true
	case err != nil:
		return d, fmt.Errorf("get status: %w", err)
	default:
		d.Serial = unix.ByteSliceToString(info.File_name[:])
		d.Owner = unix.ByteSliceToString(info.File_name[min(len(d.Serial)+1, serialMax):])
		d.BackingDevice, d.BackingInode = info.Device, info.Inode
		if info.Rdevice != info.Device { // equal for a regular file
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
	sectors, err := readUint(sys + "/size")
	if err != nil {
		return d, err
	}
	d.SizeBytes = int64(sectors) * 512
	block, err := readUint(sys + "/queue/logical_block_size")
	if err != nil {
		return d, err
	}
	d.BlockSize = int(block)
	d.Sequence, err = readUint(sys + "/diskseq")
	return d, err
}

// loopNumber parses N from "loopN".
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

// ignoreAbsent returns nil for the errors of a device that has no file, or has lost it.
func ignoreAbsent(err error) error {
	for _, absent := range []error{fs.ErrNotExist, unix.ENXIO, unix.ENODEV} {
		if errors.Is(err, absent) {
			return nil
		}
	}
	return err
}
