package filesystem

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
)

// aimBlankProofMS is what proving a disk blank may take at most, on a loop device.
const aimBlankProofMS = 50

// BenchmarkBlankProof measures what it takes to read every area of a blank disk, for the sizes
// that a rack makes. Missing the aim does not fail: a figure is to be read.
func BenchmarkBlankProof(b *testing.B) {
	for _, gibs := range []int64{1, 10, 1023} {
		b.Run(fmt.Sprintf("%d GiB", gibs), func(b *testing.B) {
			h := opened(b, gibs*guesttest.GiB)
			areas := markerRegions(h.SizeBytes)
			var bytes int64
			for _, a := range areas {
				bytes += a.Bytes
			}
			var times []time.Duration
			for b.Loop() {
				start := time.Now()
				s, err := disk{h}.read(markerRegions(h.SizeBytes), nil)
				if err != nil || s.checkBlank() != nil {
					b.Fatalf("the disk is not blank: %v, %v", err, s.checkBlank())
				}
				times = append(times, time.Since(start))
			}
			slices.Sort(times)
			median := float64(times[len(times)/2].Microseconds()) / 1000
			verdict := "met"
			if median > aimBlankProofMS {
				verdict = "missed"
			}
			fmt.Printf("FIGURE blank-proof disk_gib=%d bytes=%d areas=%d ms=%.2f aim_ms=%d %s\n", gibs,
				bytes, len(areas), median, aimBlankProofMS, verdict)
		})
	}
}

// aimOfDD is how fast a disk is read whole at least, compared with dd.
const aimOfDD = 0.9

// BenchmarkBlankProofWhole reads disks whole, as is done before one is formatted that was not made
// blank, and compares with dd of the same device. A sparse file costs next to nothing to read, so
// it shows what the driver itself costs; an allocated one is what a disk is like.
func BenchmarkBlankProofWhole(b *testing.B) {
	const sizeBytes = 4 * guesttest.GiB
	for _, kind := range []string{"sparse", "allocated"} {
		b.Run(kind, func(b *testing.B) {
			h := opened(b, sizeBytes, "--direct-io=on")
			if kind == "allocated" {
				_, err := runTool(nil, "dd", "if=/dev/zero", "of="+h.Path, "bs=4M", "oflag=direct")
				if err != nil {
					b.Fatal(err)
				}
			}
			var ours, dds []time.Duration
			for b.Loop() {
				start := time.Now()
				found, err := findForeign(b.Context(), h, 0, h.SizeBytes, allZero, func(int64) {})
				if err != nil || found >= 0 {
					b.Fatalf("the disk is not zero at %d, %v", found, err)
				}
				ours = append(ours, time.Since(start))
				start = time.Now()
				result, err := runTool(nil, "dd", "if="+h.Path, "of=/dev/null", "bs=1M", "iflag=direct")
				if err != nil || result.Exit != 0 {
					b.Fatalf("dd ended with %d: %s, %v", result.Exit, result.Stderr, err)
				}
				dds = append(dds, time.Since(start))
			}
			slices.Sort(ours)
			slices.Sort(dds)
			took, dd := ours[len(ours)/2], dds[len(dds)/2]
			ratio := dd.Seconds() / took.Seconds()
			verdict := "met"
			if ratio < aimOfDD {
				verdict = "missed"
			}
			fmt.Printf("FIGURE blank-proof-whole file=%s disk_gib=%d mib_per_s=%.0f of_dd=%.2f "+
				"aim_of_dd=%.1f %s\n", kind, sizeBytes/guesttest.GiB, sizeBytes/guesttest.MiB/took.Seconds(),
				ratio, aimOfDD,
				verdict)
		})
	}
}

// opened is a blank disk of that size. The flags are losetup's.
func opened(tb testing.TB, sizeBytes int64, flags ...string) *blockdev.OpenDevice {
	tb.Helper()
	g := guesttest.New(tb)
	d := g.Attach(guesttest.Serial, sizeBytes, flags...)
	host := blockdev.Host{Sysfs: g.Sys(""), Dev: g.Dev("")}
	found, err := host.Lookup(d.Serial)
	csitest.Must(tb, err)
	h, err := host.Open(found)
	csitest.Must(tb, err)
	tb.Cleanup(func() { csitest.Must(tb, h.Close()) })
	return h
}
