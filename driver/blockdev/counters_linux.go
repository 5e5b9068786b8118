package blockdev

import (
	"os"
	"time"
)

// Counters are what the kernel has counted for the device, with all that was written to it until
// now; the zero value if it does not count. It counts a request a moment after the request has
// ended, and can be told not to count, so a read has to show first.
func (h *OpenDevice) Counters() (Counters, error) {
	// What a writer left in the kernel's cache is counted when it reaches the device.
	if err := h.Flush(); err != nil {
		return Counters{}, err
	}
	<-time.After(time.Millisecond) // nothing tells when a count is there
	before := h.diskstats()
	if _, err := h.Read(0, AlignBytes); err != nil {
		return Counters{}, err
	}
	for end := time.Now().Add(time.Second); time.Now().Before(end); <-time.After(time.Millisecond) {
		if now := h.diskstats(); now.ReadSectors > before.ReadSectors {
			return now, nil
		}
	}
	return Counters{}, nil
}

func (h *OpenDevice) diskstats() Counters {
	b, err := os.ReadFile("/proc/diskstats")
	if err != nil {
		return Counters{}
	}
	return parseDiskstats(b, h.Major, h.Minor)
}
