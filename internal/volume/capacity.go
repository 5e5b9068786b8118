package volume

import (
	"math"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

const (
	// GiB is the unit of a disk's size.
	GiB = 1 << 30
	// defaultSizeBytes is the size of a volume without a requested size.
	defaultSizeBytes = 10 * GiB
	// MaxDistributedBytes is the size of a rack's largest distributed disk. Only the rack knows the
	// largest local disk.
	MaxDistributedBytes = 1023 * GiB
)

// CapacityRange is a requested range in bytes; max is MaxInt64 if there is no limit.
type CapacityRange struct {
	given    bool
	min, max int64
}

// ParseCapacityRange parses a capacity range in bytes; nil sets no limit.
func ParseCapacityRange(r *csi.CapacityRange) (CapacityRange, error) {
	if r == nil {
		return CapacityRange{max: math.MaxInt64}, nil
	}
	out := CapacityRange{given: true, min: r.GetRequiredBytes(), max: r.GetLimitBytes()}
	switch {
	case out.min < 0 || out.max < 0:
		return out, csierr.New(csierr.CapacityInvalid, "capacity_range is negative")
	case out.min == 0 && out.max == 0:
		return out, csierr.New(csierr.CapacityInvalid, "capacity_range sets neither required_bytes nor "+
			"limit_bytes; leave it out for a volume of %s",
			SizeText(defaultSizeBytes))
	case out.max == 0:
		out.max = math.MaxInt64
	case out.max < out.min:
		return out, csierr.New(csierr.CapacityOutOfRange, "limit_bytes is %s, less than "+
			"required_bytes, which is %s", SizeText(out.max), SizeText(out.min))
	}
	return out, nil
}

// Contains reports whether a size in bytes is in the range.
func (r CapacityRange) Contains(sizeBytes int64) bool {
	return r.min <= sizeBytes && sizeBytes <= r.max
}

// DiskSize returns the size of the disk to create: whole GiB, as the rack requires, within the
// range. floor is the size of the source, 0 for a blank disk; ceiling is the size of the rack's
// largest disk.
func (r CapacityRange) DiskSize(floor, ceiling int64) (int64, error) {
	// Without a requested size use the source's size, or the default.
	size := r.min
	if size == 0 && floor == 0 {
		size = min(defaultSizeBytes, max(r.max-r.max%GiB, GiB))
	}
	size = max(size, floor, GiB)
	if size > ceiling {
		return 0, csierr.New(csierr.CapacityOutOfRange, "%s are more than the largest disk, %s",
			SizeText(size), SizeText(ceiling))
	}
	size = roundUp(size)
	if size > r.max {
		if floor > r.max {
			return 0, csierr.New(csierr.CapacityOutOfRange, "limit_bytes is %s, less than the source, "+
				"which has %s", SizeText(r.max), SizeText(floor))
		}
		return 0, csierr.New(csierr.CapacityOutOfRange, "disks have whole GiB, at least one, and the "+
			"next size, %s, is above limit_bytes, which is %s", SizeText(size), SizeText(r.max))
	}
	return size, nil
}

// roundUp rounds to whole GiB; near the end of int64 it rounds to the last whole one.
func roundUp(sizeBytes int64) int64 {
	if sizeBytes > math.MaxInt64-GiB {
		return math.MaxInt64 / GiB * GiB
	}
	return (sizeBytes + GiB - 1) / GiB * GiB
}
