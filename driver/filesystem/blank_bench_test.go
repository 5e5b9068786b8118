//go:build linux

package filesystem

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// aimBlankProofMS is how long proving a disk blank may take on a loop device.
const aimBlankProofMS = 50

// BenchmarkBlankProof measures how long it takes to read every region of a blank disk, for the
// sizes that a rack makes. Missing the aim does not fail the benchmark: the figure is for people to
// read.
func BenchmarkBlankProof(b *testing.B) {
	for _, gibs := range []int64{1, 10, 1023} {
		b.Run(fmt.Sprintf("%d GiB", gibs), func(b *testing.B) {
			d := openDisk(b, gibs*guesttest.GiB)
			regions := markerRegions(d.SizeBytes)
			var bytes int64
			for _, r := range regions {
				bytes += r.Bytes
			}
			var times []time.Duration
			for b.Loop() {
				start := time.Now()
				s, err := disk{d}.read(Volume{}, markerRegions(d.SizeBytes), nil)
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
				bytes, len(regions), median, aimBlankProofMS, verdict)
		})
	}
}

// aimOfDD is the least speed of reading a whole disk, as a fraction of dd's.
const aimOfDD = 0.9

// BenchmarkBlankProofWhole reads whole disks, as the driver does before it formats one that was not
// created blank, and compares the speed with dd of the same device. A sparse file costs almost
// nothing to read, so it shows the cost of the driver itself; an allocated one is closer to a disk.
func BenchmarkBlankProofWhole(b *testing.B) {
	const sizeBytes = 4 * guesttest.GiB
	for _, kind := range []string{"sparse", "allocated"} {
		b.Run(kind, func(b *testing.B) {
			d := openDisk(b, sizeBytes)
			guesttest.Run(b, "losetup", "--direct-io=on", d.Path)
			if kind == "allocated" {
				_, err := runTool(nil, "dd", "if=/dev/zero", "of="+d.Path, "bs=4M", "oflag=direct")
				if err != nil {
					b.Fatal(err)
				}
			}
			var ours, dds []time.Duration
			for b.Loop() {
				start := time.Now()
				found, err := findUnexpected(b.Context(), d, 0, d.SizeBytes, traces{}.check, func(int64) {})
				if err != nil || found >= 0 {
					b.Fatalf("the disk is not zero at %d, %v", found, err)
				}
				ours = append(ours, time.Since(start))
				start = time.Now()
				result, err := runTool(nil, "dd", "if="+d.Path, "of=/dev/null", "bs=1M", "iflag=direct")
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
				ratio, aimOfDD, verdict)
		})
	}
}

// openDisk returns an open blank disk of that size.
func openDisk(tb testing.TB, sizeBytes int64, options ...guesttest.Option) *blockdev.OpenDevice {
	tb.Helper()
	g := guesttest.New(tb)
	attached := g.Attach(guesttest.Serial, sizeBytes, options...)
	host := blockdev.Host{Sysfs: g.Sys(""), Dev: g.Dev("")}
	found, err := host.Lookup(attached.Serial)
	csitest.Must(tb, err)
	d, err := host.Open(found)
	csitest.Must(tb, err)
	tb.Cleanup(func() { csitest.Must(tb, d.Close()) })
	return d
}
