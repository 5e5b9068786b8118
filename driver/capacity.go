package driver

import (
	"math"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

const (
	gibBytes = 1 << 30
	// defaultSizeBytes is the size of a volume for which nobody asked for one.
	defaultSizeBytes = 10 * gibBytes
	// maxDistributedBytes is the largest distributed disk a rack makes. For a local one only the
	// rack knows.
	maxDistributedBytes = 1023 * gibBytes
)

// capacityRange is a request's range in bytes; max is MaxInt64 where it sets no limit.
type capacityRange struct {
	given    bool
	min, max int64
}

func parseCapacityRange(r *csi.CapacityRange) (capacityRange, error) {
	if r == nil {
		return capacityRange{max: math.MaxInt64}, nil
	}
	out := capacityRange{given: true, min: r.GetRequiredBytes(), max: r.GetLimitBytes()}
	switch {
	case out.min < 0 || out.max < 0:
		return out, csierr.New(csierr.CapacityInvalid, "capacity_range is negative")
	case out.min == 0 && out.max == 0:
		return out, csierr.New(csierr.CapacityInvalid, "capacity_range sets "+
			"neither required_bytes nor limit_bytes; leave it out for a volume of %d bytes",
			int64(defaultSizeBytes))
	case out.max == 0:
		out.max = math.MaxInt64
	case out.max < out.min:
		return out, csierr.New(csierr.CapacityOutOfRange, "limit_bytes %d is less than "+
			"required_bytes %d", out.max, out.min)
	}
	return out, nil
}

func (r capacityRange) contains(sizeBytes int64) bool {
	return r.min <= sizeBytes && sizeBytes <= r.max
}

// diskSize is the size of the disk to make: whole GiB, as the rack wants it, within the range.
// floor is what the source holds, 0 for a blank disk; ceiling is the largest disk the rack makes.
func (r capacityRange) diskSize(floor, ceiling int64) (int64, error) {
	// Nobody asked for more than what there is: the source's size, or the default.
	size := r.min
	if size == 0 && floor == 0 {
		size = min(defaultSizeBytes, max(r.max-r.max%gibBytes, gibBytes))
	}
	size = max(size, floor, gibBytes)
	if size > ceiling {
		return 0, csierr.New(csierr.CapacityOutOfRange, "%d bytes are more than the "+
			"largest disk, %d", size, ceiling)
	}
	size = roundUp(size)
	if size > r.max {
		if floor > r.max {
			return 0, csierr.New(csierr.CapacityOutOfRange, "limit_bytes %d is less "+
				"than the source's %d bytes", r.max, floor)
		}
		return 0, csierr.New(csierr.CapacityOutOfRange, "disks have whole GiB, at "+
			"least one, and the next size, %d bytes, is above limit_bytes %d", size, r.max)
	}
	return size, nil
}

// roundUp rounds to whole GiB; near the end of int64 it rounds to the last whole one.
func roundUp(sizeBytes int64) int64 {
	if sizeBytes > math.MaxInt64-gibBytes {
		return math.MaxInt64 / gibBytes * gibBytes
	}
	return (sizeBytes + gibBytes - 1) / gibBytes * gibBytes
}
