// Package blockdev finds the disks of this instance and opens them safely.
//
// A Host names the sysfs and the device directory to look at. It finds a Device by the serial
// number that the rack gives to a disk; two devices with one serial are an error, never a choice.
// An OpenDevice holds a descriptor, so the kernel cannot give the device's number to another disk.
// Verify and Reverify compare the descriptor with what sysfs reports. TryExclusive and
// WithExclusive refuse while anybody else in the kernel holds the device, AwaitNoWriters while a
// process has it open for writing, and OpenLocked while another process of the driver works on it.
//
// The package reads and writes bytes where its caller says. It never decides what a disk holds, and
// it imports neither CSI nor the rack's client: a node needs no token. All but Device and the
// kernel's counters needs Linux.
package blockdev
