// Package loopdev attaches Linux block devices with serial numbers to files, lists all devices, and
// releases them.
//
// The kernel keeps the serial in lo_file_name, the field in which losetup keeps a path. The owner
// follows after the serial's NUL, where other programs do not read. The texts stay while the device
// is attached, so a program that was killed finds its devices again without a record of them.
// Several processes may use the package at once: before each change it opens the device and checks
// the kernel's sequence number of the attachment. So the package never changes a device that
// another process has attached again.
//
// Attaching and detaching need root and Linux 5.15 or later. On other systems the package builds,
// and [Available] and the other functions return an error.
package loopdev

import (
	"errors"

	"golang.org/x/sys/unix"
)

// Config describes the device to attach.
type Config struct {
	// Path is the path of a regular file. The file stays in use until the device is detached, even
	// if it is unlinked.
	Path string
	// Serial identifies the device. It has 1 to 63 bytes without NUL. Attach refuses a longer one.
	Serial string
	// Owner names the program that made the device, so that other programs can recognize its devices.
	// It may be empty. Owner and Serial together have at most 62 bytes.
	Owner string
	// BlockSize is the logical block size in bytes, a power of two from 512 to the page size. 0 means
	// 512.
	BlockSize int
	// ReadOnly makes the device refuse writes.
	ReadOnly bool
	// SizeLimit makes the device smaller than the file. 0 means the size of the file.
	SizeLimit int64
	// NoDiscards makes the device refuse discards, so that they do not change the bytes. (Linux' loop
	// driver cannot accept and ignore them.) It needs a writable /sys.
	NoDiscards bool
	// First is the lowest number that the device may have; 0 allows every number. Lower numbers stay
	// free for "losetup -f", and for containers that have nodes only for low numbers.
	First int
}

// Device is one attachment of a file to a loop device. [Attach] and [List] return it.
// Its methods act only on that attachment, and not on a later one with the same number.
type Device struct {
	// Number is the N in loopN.
	Number int
	// Path is the path of the device's node, "/dev/loopN".
	Path string
	// Major and Minor are the kernel's device number.
	Major, Minor uint32
	// Serial is the serial that Attach was given, or the file's path if losetup made the device.
	Serial string
	// Owner is the owner that Attach was given.
	Owner string
	// BackingFile is the file's path as the kernel reports it, with the suffix " (deleted)" if the
	// file was unlinked.
	BackingFile string
	// BackingDevice is the st_dev of the file. The path alone does not identify the file, because
	// a covered directory or another mount namespace may have a file with the same path.
	BackingDevice uint64
	// BackingInode is the st_ino of the file. Together with BackingDevice it identifies the file in
	// every mount namespace.
	BackingInode uint64
	// BackingNumber is the st_rdev of the file, if the file is the node of a block device.
	BackingNumber uint64
	// BlockSize is the logical block size in bytes.
	BlockSize int
	// ReadOnly reports whether the device refuses writes.
	ReadOnly bool
	// SizeBytes is the size at the time when the device was read.
	SizeBytes int64
	// Releasing reports whether the kernel will release the device when its last user closes it.
	Releasing bool
	// Orphaned reports whether every read and write fails because the file's FUSE server has ended or
	// its filesystem was shut down. Serial, Owner, BackingDevice, BackingInode, BackingNumber,
	// ReadOnly and Releasing are then unknown.
	Orphaned bool
	// Sequence is the kernel's number of this attachment (diskseq). It is unique until the next boot.
	Sequence uint64
}

// On reports whether the file of d is a node of the loop device other, at any path. A kubelet
// attaches a loop device to the node of each raw block volume.
func (d Device) On(other Device) bool {
	return d.BackingNumber != 0 && d.BackingNumber == unix.Mkdev(other.Major, other.Minor)
}

// ErrBusy means that the device is still in use by a mount, an open file or another block
// device. The kernel has marked the device and will release it when the last user closes it.
var ErrBusy = errors.New("the loop device is still held")

// ErrGone means that the attachment of a [Device] has ended. The device may be free or may have
// been attached to another file.
var ErrGone = errors.New("the loop device was released meanwhile")
