// Package blockdev finds the disks of this instance and opens them safely.
//
// A Host names the sysfs and the device directory to look at. It finds a Device by the serial
// number that the rack gives to a disk; two devices with one serial are an error, never a choice.
// An OpenDevice holds a descriptor, so the kernel cannot give the device's number to another disk.
// Open and Reverify compare the descriptor with what sysfs reports, including the diskseq that the
// kernel gives to each disk it adds. TryExclusive and WithExclusive fail while the kernel has the
// device in use, AwaitNoWriters while a process has it open for writing, and OpenLocked while
// another process of the driver works on it.
//
// The package reads and writes bytes where its caller says. It never decides what a disk holds, and
// it imports neither CSI nor the rack's client: a node needs no token. Everything except Counters
// needs Linux.
package blockdev
