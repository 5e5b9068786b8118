// Package loopdev gives a file a Linux block device that carries a serial number, finds the device
// by that serial, lists all devices, and releases them.
//
// The serial is kept in lo_file_name, the field in which losetup keeps a path, and the owner behind
// it, where nobody else looks. The kernel holds them for as long as the device is attached, so a
// program that was killed finds its devices again without a record of them. Several processes may
// use the package at once: each change is made on an open descriptor after a check of the kernel's
// sequence number of the attachment, so that a device which was released and given to another
// process meanwhile is never touched.
//
// Attaching and detaching need root and Linux 5.15 or later. On other systems the package builds,
// and [Available] and all others return an error.
package loopdev

import (
	"errors"

	"golang.org/x/sys/unix"
)

// Config says what to attach.
type Config struct {
	// Path is a regular file. It stays in use until the device is detached, unlinked or not.
	Path string
	// Serial is what the device is found by: 1 to 63 bytes without NUL. A longer one is refused.
	Serial string
	// Owner is who made the device, for whoever has to know it from others; it may be empty. Together
	// with Serial it has at most 62 bytes.
	Owner string
	// BlockSize is the logical block size in bytes, a power of two from 512 to the page size. 0 is
	// 512.
	BlockSize int
	// ReadOnly makes the device refuse writes.
	ReadOnly bool
	// SizeLimit makes the device smaller than the file; 0 is the whole file.
	SizeLimit int64
	// First is the lowest number that the device may have; 0 is any that is free. "losetup -f" takes
	// the lowest, which in a container may be the only ones with nodes.
	First int
}

// Device is one attachment of a file to a loop device. It is what [Attach], [List] and [Find]
// return; the methods act on exactly that attachment, whatever its number serves later.
type Device struct {
	// Number is the N of loopN.
	Number int
	// Path is the device's node, "/dev/loopN".
	Path string
	// Major and Minor are the device's number as the kernel knows it.
	Major, Minor uint32
	// Serial is what Attach was given. A device that losetup made has the file's path there.
	Serial string
	// Owner is what Attach was given.
	Owner string
	// BackingFile is the file's path as the kernel reports it, with " (deleted)" after it when it was
	// unlinked.
	BackingFile string
	// BackingDevice is the st_dev of the file. Its path alone does not identify it: what a mount
	// covers, or another mount namespace has, may have the same.
	BackingDevice uint64
	// BackingInode is the st_ino of the file: with BackingDevice it identifies the file, in
	// whichever mount namespace it was opened.
	BackingInode uint64
	// BackingNumber is the st_rdev of the file, if that is the node of a block device.
	BackingNumber uint64
	// BlockSize is the logical block size in bytes.
	BlockSize int
	// ReadOnly reports whether the device refuses writes.
	ReadOnly bool
	// SizeBytes is the size when the device was read; Grow does not change it here.
	SizeBytes int64
	// Releasing reports whether the kernel was told to release it and waits for the last user.
	Releasing bool
	// Orphaned reports whether the file was served by a program that is gone (FUSE), so that every
	// read and write fails. Serial, Owner, BackingDevice, BackingInode, BackingNumber, ReadOnly and
	// Releasing are unknown then.
	Orphaned bool
	// Sequence is the kernel's number of this attachment (diskseq). No two have the same between
	// two boots.
	Sequence uint64
}

// On reports whether the device's file is the node of another loop device, under whatever path: a
// kubelet puts a device on the node of each raw block volume.
func (d Device) On(other Device) bool {
	return d.BackingNumber != 0 && d.BackingNumber == unix.Mkdev(other.Major, other.Minor)
}

// ErrBusy means that the device is still in use: by a mount, an open file or another block device.
// The kernel was told to release it, and will when the last user closes it.
var ErrBusy = errors.New("the loop device is still held")

// ErrGone means that the attachment a [Device] describes has ended; its number may be free or may
// serve another file by now.
var ErrGone = errors.New("the loop device was released meanwhile")

// ErrNotLoop means that a path in /dev with a loop device's name is something else.
var ErrNotLoop = errors.New("not a loop device")

// ErrNoDriver means that the kernel has no loop driver.
var ErrNoDriver = errors.New("the kernel has no loop driver; load it: modprobe loop")
