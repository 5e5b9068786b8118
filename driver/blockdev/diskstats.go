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

import (
	"bytes"
	"strconv"
)

// Counters are the sectors of a device that the kernel has counted since it added the device, for
// all users of the device. Sectors are compared, not requests, because a flush counts as a write
// request of no sectors.
type Counters struct {
	ReadSectors, WrittenSectors, DiscardedSectors uint64
}

// SameWrites reports whether nothing was written or discarded between c and later.
func (c Counters) SameWrites(later Counters) bool {
	return c.WrittenSectors == later.WrittenSectors && c.DiscardedSectors == later.DiscardedSectors
}

// Known reports whether the kernel counts. The device must have been read before c was taken.
func (c Counters) Known() bool { return c.ReadSectors > 0 }

// parseDiskstats returns the counters from a device's line in /proc/diskstats. It returns the zero
// value if there is no such line, or if the line has no count of discards (added in Linux 4.18).
func parseDiskstats(b []byte, major, minor uint32) Counters {
	// The fields after the name, as numbered in Documentation/admin-guide/iostats.rst.
	const name, read, written, discarded = 2, 3, 7, 14
	for line := range bytes.Lines(b) {
		fields := bytes.Fields(line)
		if len(fields) <= name+discarded || !isNumber(fields[0], uint64(major)) ||
			!isNumber(fields[1], uint64(minor)) {
			continue
		}
		var c Counters
		for field, to := range map[int]*uint64{
			read: &c.ReadSectors, written: &c.WrittenSectors, discarded: &c.DiscardedSectors,
		} {
			n, err := strconv.ParseUint(string(fields[name+field]), 10, 64)
			if err != nil {
				return Counters{}
			}
			*to = n
		}
		return c
	}
	return Counters{}
}

func isNumber(field []byte, n uint64) bool {
	got, err := strconv.ParseUint(string(field), 10, 64)
	return err == nil && got == n
}
