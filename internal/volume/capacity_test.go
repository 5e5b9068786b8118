package volume

import (
	"math"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// sizeFor returns the size for a requested range.
func sizeFor(r *csi.CapacityRange, floor, ceiling int64) (int64, error) {
	parsed, err := ParseCapacityRange(r)
	if err != nil {
		return 0, err
	}
	return parsed.DiskSize(floor, ceiling)
}

func TestCV11AndCV12DiskSize(t *testing.T) {
	const bytes, half = 1, int64(GiB / 2)
	for _, test := range []struct {
		name  string
		r     *csi.CapacityRange
		floor int64
		want  int64 // in GiB; 0 means refused with the code
		code  codes.Code
	}{
		{"nothing asked", nil, 0, 10, 0},
		{"one byte is one GiB", csitest.Range(bytes, 0), 0, 1, 0},
		{"whole GiB stay", csitest.Range(5*GiB, 0), 0, 5, 0},
		{"D-22 one and a half become two", csitest.Range(GiB+half, 0), 0, 2, 0},
		{"D-22 two do not fit under 1.6", csitest.Range(GiB+half, GiB+half+half/5), 0, 0,
			codes.OutOfRange},
		{"an exact size", csitest.Range(3*GiB, 3*GiB), 0, 3, 0},
		{"only a limit above the default", csitest.Range(0, 100*GiB), 0, 10, 0},
		{"only a limit below it", csitest.Range(0, 3*GiB+half), 0, 3, 0},
		{"a limit below one GiB", csitest.Range(0, half), 0, 0, codes.OutOfRange},
		{"the largest", csitest.Range(1023*GiB, 0), 0, 1023, 0},
		{"too large", csitest.Range(1023*GiB+1, 0), 0, 0, codes.OutOfRange},
		{"as large as there are numbers", csitest.Range(math.MaxInt64, 0), 0, 0, codes.OutOfRange},
		{"E-25 limit below required", csitest.Range(3*GiB, 2*GiB), 0, 0, codes.OutOfRange},
		{"a range that is empty", csitest.Range(0, 0), 0, 0, codes.InvalidArgument},
		{"negative required", csitest.Range(-1, 0), 0, 0, codes.InvalidArgument},
		{"negative limit", csitest.Range(0, -1), 0, 0, codes.InvalidArgument},
		{"CV-17 a source without a range", nil, 4 * GiB, 4, 0},
		{"CV-17 a source in a larger volume", csitest.Range(6*GiB, 0), 4 * GiB, 6, 0},
		{"E-25 a source above required and below the limit", csitest.Range(GiB, 9*GiB),
			4 * GiB,
			4, 0},
		{"CV-17 a source above the limit", csitest.Range(0, 3*GiB), 4 * GiB, 0, codes.OutOfRange},
		{"a source with only a limit", csitest.Range(0, 90*GiB), 4 * GiB, 4, 0},
		{"an image that is no whole GiB", nil, GiB + 512, 2, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := sizeFor(test.r, test.floor, MaxDistributedBytes)
			if test.want == 0 {
				reason := csierr.CapacityOutOfRange
				if test.code == codes.InvalidArgument {
					reason = csierr.CapacityInvalid
				}
				csitest.Want(t, err, test.code, reason)
				return
			}
			if err != nil || got != test.want*GiB {
				t.Errorf("got %d, %v; want %d GiB", got, err, test.want)
			}
		})
	}
}

func TestARangeContainsItsLimits(t *testing.T) {
	r, err := ParseCapacityRange(csitest.Range(2*GiB, 3*GiB))
	must(t, err)
	for size, want := range map[int64]bool{2*GiB - 1: false, 2 * GiB: true, 3 * GiB: true,
		3*GiB + 1: false} {
		if got := r.Contains(size); got != want {
			t.Errorf("%d bytes are in it: %v, want %v", size, got, want)
		}
	}
}

func TestTheRefusalOfASourceSaysWhichLimitItExceeds(t *testing.T) {
	for want, c := range map[string]struct {
		r     *csi.CapacityRange
		floor int64
	}{
		"less than the source, which": {csitest.Range(0, 3*GiB), 4 * GiB},
		"is above limit_bytes":        {csitest.Range(0, 3*GiB+1), 3*GiB + 1},
		"disks have whole GiB, at l":  {csitest.Range(GiB+1, GiB+2), 0},
	} {
		if _, err := sizeFor(c.r, c.floor, MaxDistributedBytes); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}
