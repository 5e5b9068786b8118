// Package loopdev attaches Linux block devices with serial numbers to files, lists them, and
// releases them.
//
// The kernel stores the serial in lo_file_name, where losetup stores a path. The owner follows
// after the serial's NUL, where other programs do not read. Both exist as long as the device is
// attached, so a program that restarts after a kill can find its devices. Several processes may use
// the package at the same time. Before each change, the package opens the device and compares the
// kernel's sequence number of the attachment, so it never changes a device that another process has
// attached again.
//
// Attaching and detaching need root and Linux 5.15 or later. On other systems the package builds,
// but [Available], [Attach] and [List] return an error.
package loopdev

import (
	"errors"

	"golang.org/x/sys/unix"
)

// Config describes the device to attach.
type Config struct {
	// Path is the path of a regular file. The device uses the file until it is detached, even if the
	// file is unlinked.
	Path string
	// Serial identifies the device. It has 1 to 63 bytes without NUL.
	Serial string
	// Owner names the program that attaches the device. Other programs can read it. If it is not
	// empty, Owner and Serial together have at most 62 bytes.
	Owner string
	// BlockSize is the logical block size in bytes, a power of two from 512 to the page size. 0 means
	// 512.
	BlockSize int
	ReadOnly  bool
	// SizeLimit makes the device smaller than the file. 0 means the size of the file.
	SizeLimit int64
	// NoDiscards makes the device refuse discards, for which /sys must be writable. (Linux' loop
	// driver cannot accept discards without changing the file.)
	NoDiscards bool
	// First is the lowest allowed number of the device; 0 allows every number. Lower numbers stay free
	// for "losetup -f", and for containers that have device nodes only for low numbers.
	First int
}

// Device is one attachment of a file to a loop device. [Attach] and [List] return it. Its methods
// act only on this attachment, and not on a later one with the same number.
type Device struct {
	// Number is the N in loopN.
	Number int
	// Path is the path of the device node, "/dev/loopN".
	Path         string
	Major, Minor uint32
	// Serial is Config.Serial, or the beginning of the file's path if losetup attached the device.
	Serial string
	Owner  string
	// BackingFile is the file's path as the kernel reports it. If the file was unlinked, the path ends
	// with " (deleted)".
	BackingFile string
	// BackingDevice and BackingInode are the st_dev and st_ino of the file. They identify the file in
	// every mount namespace. The path does not: another file may have the same path in another mount
	// namespace, or under a mount point.
	BackingDevice uint64
	BackingInode  uint64
	// BackingNumber is the st_rdev of the file, if the file is a block device node.
	BackingNumber uint64
	BlockSize     int
	ReadOnly      bool
	// SizeBytes is the size that the device had when this package read it.
	SizeBytes int64
	// Releasing reports whether the kernel will release the device when its last user closes it.
	Releasing bool
	// Orphaned reports whether all reads and writes fail, because the file's FUSE server has ended or
	// its filesystem was shut down. Serial, Owner, BackingDevice, BackingInode, BackingNumber,
	// ReadOnly and Releasing are then unknown.
	Orphaned bool
	// Sequence is the kernel's number of this attachment (diskseq). It is unique until the next boot.
	Sequence uint64
}

// On reports whether d is attached to a device node of the other loop device, at any path. A
// kubelet attaches a loop device to the device node of each raw block volume.
func (d Device) On(other Device) bool {
	return d.BackingNumber != 0 && d.BackingNumber == unix.Mkdev(other.Major, other.Minor)
}

// ErrBusy means that a mount, an open file or another block device still uses the device. The
// kernel will release the device when the last user closes it.
var ErrBusy = errors.New("the loop device is still held")

// ErrGone means that the attachment of a [Device] has ended. The device may now be free, or
// attached to another file.
var ErrGone = errors.New("the loop device was released meanwhile")
