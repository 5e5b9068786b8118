// Package loopdev gives a file a Linux block device that carries a serial number, finds the device
// by that serial, lists what there is, and lets it go.
//
// The serial stands in lo_file_name, the field in which losetup keeps a path: the kernel holds it
// for as long as the device is attached, so a program that was killed finds its devices again
// without having kept a note of them. Several processes may use the package at once; each change
// is made on an open descriptor after a look at the kernel's sequence number of the attachment, so
// that a device which was released and given to somebody else meanwhile is never touched.
//
// Attaching and detaching need root and a kernel of 5.15 or later.
package loopdev
