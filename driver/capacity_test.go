package driver

import (
	"math"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"pgregory.net/rapid"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

func asked(required, limit int64) *csi.CapacityRange {
	return &csi.CapacityRange{RequiredBytes: required, LimitBytes: limit}
}

// sizeFor is what a request's range becomes.
func sizeFor(r *csi.CapacityRange, floor, ceiling int64) (int64, error) {
	parsed, err := parseCapacityRange(r)
	if err != nil {
		return 0, err
	}
	return parsed.diskSize(floor, ceiling)
}

func TestCV11AndCV12SizesAreChosen(t *testing.T) {
	const bytes, half = 1, int64(gibBytes / 2)
	for _, test := range []struct {
		name  string
		r     *csi.CapacityRange
		floor int64
		want  int64 // in GiB; 0 means refused with the code
		code  codes.Code
	}{
		{"nothing asked", nil, 0, 10, 0},
		{"one byte is one GiB", asked(bytes, 0), 0, 1, 0},
		{"whole GiB stay", asked(5*gibBytes, 0), 0, 5, 0},
		{"D-22 one and a half become two", asked(gibBytes+half, 0), 0, 2, 0},
		{"D-22 two do not fit under 1.6", asked(gibBytes+half, gibBytes+half+half/5), 0, 0,
			codes.OutOfRange},
		{"an exact size", asked(3*gibBytes, 3*gibBytes), 0, 3, 0},
		{"only a limit above the default", asked(0, 100*gibBytes), 0, 10, 0},
		{"only a limit below it", asked(0, 3*gibBytes+half), 0, 3, 0},
		{"a limit below one GiB", asked(0, half), 0, 0, codes.OutOfRange},
		{"the largest", asked(1023*gibBytes, 0), 0, 1023, 0},
		{"too large", asked(1023*gibBytes+1, 0), 0, 0, codes.OutOfRange},
		{"as large as there are numbers", asked(math.MaxInt64, 0), 0, 0, codes.OutOfRange},
		{"E-25 limit below required", asked(3*gibBytes, 2*gibBytes), 0, 0, codes.OutOfRange},
		{"a range that is empty", asked(0, 0), 0, 0, codes.InvalidArgument},
		{"negative required", asked(-1, 0), 0, 0, codes.InvalidArgument},
		{"negative limit", asked(0, -1), 0, 0, codes.InvalidArgument},
		{"CV-17 a source without a range", nil, 4 * gibBytes, 4, 0},
		{"CV-17 a source in a larger volume", asked(6*gibBytes, 0), 4 * gibBytes, 6, 0},
		{"E-25 a source above required and below the limit", asked(gibBytes, 9*gibBytes),
			4 * gibBytes,
			4, 0},
		{"CV-17 a source above the limit", asked(0, 3*gibBytes), 4 * gibBytes, 0, codes.OutOfRange},
		{"a source with only a limit", asked(0, 90*gibBytes), 4 * gibBytes, 4, 0},
		{"an image that is no whole GiB", nil, gibBytes + 512, 2, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := sizeFor(test.r, test.floor, maxDistributedBytes)
			if test.want == 0 {
				reason := csierr.CapacityOutOfRange
				if test.code == codes.InvalidArgument {
					reason = csierr.CapacityInvalid
				}
				wantFailure(t, err, test.code, reason)
				return
			}
			if err != nil || got != test.want*gibBytes {
				t.Errorf("got %d, %v; want %d GiB", got, err, test.want)
			}
		})
	}
}

func TestOF7AnySizeIsOneTheRackMakes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := asked(rapid.Int64Min(0).Draw(t, "required"), rapid.Int64Min(0).Draw(t, "limit"))
		floor := rapid.Int64Range(0, maxDistributedBytes).Draw(t, "floor")
		ceiling := rapid.SampledFrom([]int64{maxDistributedBytes, parameters{
			DiskType: "local"}.largest()}).Draw(t, "ceiling")
		size, err := sizeFor(r, floor, ceiling)
		if err != nil {
			return
		}
		if size%gibBytes != 0 || size < gibBytes || size > ceiling || size < floor ||
			size < r.RequiredBytes || (r.LimitBytes != 0 && size > r.LimitBytes) {
			t.Fatalf("%v from %d bytes becomes %d", r, floor, size)
		}
		// The same request finds the disk again (CV-18).
		if parsed, _ := parseCapacityRange(r); !parsed.contains(size) {
			t.Fatalf("%v does not contain its own %d", r, size)
		}
	})
}

func TestOF7WhatIsRefusedIsImpossible(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := asked(rapid.Int64Range(0, 1<<41).Draw(t, "required"),
			rapid.Int64Range(1, 1<<41).Draw(t, "limit"))
		if _, err := sizeFor(r, 0, maxDistributedBytes); err == nil {
			return
		}
		for size := int64(gibBytes); size <= maxDistributedBytes; size += gibBytes {
			if r.RequiredBytes <= size && size <= r.LimitBytes {
				t.Fatalf("%v was refused, though %d is in it", r, size)
			}
		}
	})
}
