package blockdev

import (
	"bytes"
	"strconv"
)

// Counters are the kernel's counts of what was done to a device since its birth, by whomever.
// Sectors are counted, for a flush counts as a write of none.
type Counters struct {
	ReadSectors, WrittenSectors, DiscardedSectors uint64
}

// SameWrites reports whether nothing was written or discarded between two counts.
func (c Counters) SameWrites(later Counters) bool {
	return c.WrittenSectors == later.WrittenSectors && c.DiscardedSectors == later.DiscardedSectors
}

// Known reports whether the kernel counts. The device was read from before it was asked.
func (c Counters) Known() bool { return c.ReadSectors > 0 }

// parseDiskstats finds a device's line in /proc/diskstats. Without one, or without a count of
// discards (Linux 4.18), it is the zero value.
func parseDiskstats(b []byte, major, minor uint32) Counters {
	// The fields of a line, as Documentation/admin-guide/iostats.rst numbers them behind the name.
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
