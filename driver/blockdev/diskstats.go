// Package blockdev finds the disks of this instance and opens them safely.
//
// A Host finds a Device by the serial number that the rack gives to a disk. It returns an error if
// two devices have the serial. While an OpenDevice is open, the kernel gives the device's number to
// no other disk. TryExclusive and WithExclusive fail while the kernel uses the device, for example
// for a mount. AwaitNoWriters fails while another process has the device open for writing.
// OpenLocked fails while another process of the driver works on the device.
//
// The package does not interpret the bytes of a disk. It imports neither CSI nor the rack's client,
// because a node needs no token. Everything except the type Counters needs Linux.
package blockdev

import (
	"bytes"
	"strconv"
)

// Counters contains the numbers of sectors that all users have read, written and discarded since
// the kernel added the device. Flushes are not counted.
type Counters struct {
	ReadSectors, WrittenSectors, DiscardedSectors uint64
}

// SameWrites reports whether c and later have the same numbers of written and discarded sectors.
func (c Counters) SameWrites(later Counters) bool {
	return c.WrittenSectors == later.WrittenSectors && c.DiscardedSectors == later.DiscardedSectors
}

// Known reports whether the kernel counts requests. Take c only after a read of the device.
func (c Counters) Known() bool { return c.ReadSectors > 0 }

// parseDiskstats returns the counters from a device's line in /proc/diskstats. It returns the zero
// value if the line is missing or has no count of discards, which Linux 4.18 added.
func parseDiskstats(b []byte, major, minor uint32) Counters {
	// Fields are counted from the name, as in Documentation/admin-guide/iostats.rst.
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
