package blockdev

import (
	"os"
	"time"
)

// Counters returns the kernel's counters of the device, including all writes that were cached when
// it was called. It returns the zero value if the kernel does not count. The kernel updates a
// counter shortly after a request has ended, and accounting can be switched off, so Counters reads
// from the device and waits until that read is counted.
func (d *OpenDevice) Counters() (Counters, error) {
	// Cached writes are counted when they reach the device.
	if err := d.Flush(); err != nil {
		return Counters{}, err
	}
	<-time.After(time.Millisecond) // the kernel does not report when a counter is up to date
	before := d.diskstats()
	if _, err := d.Read(0, AlignBytes); err != nil {
		return Counters{}, err
	}
	for end := time.Now().Add(time.Second); time.Now().Before(end); <-time.After(time.Millisecond) {
		if now := d.diskstats(); now.ReadSectors > before.ReadSectors {
			return now, nil
		}
	}
	return Counters{}, nil
}

func (d *OpenDevice) diskstats() Counters {
	b, err := os.ReadFile("/proc/diskstats")
	if err != nil {
		return Counters{}
	}
	return parseDiskstats(b, d.Major, d.Minor)
}
