//go:build linux

package sanity

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

const (
	attachInstances = 20
	// attachedDisks is the number of disks that each instance gets in a round.
	attachedDisks = 5
	// aimMoreCallers is the most by which many callers together may be slower than one.
	aimMoreCallers = 1.0
)

// attachCallers are the numbers of callers that attach at the same time. The others are compared
// with the first.
var attachCallers = []int{1, 8, 64}

// BenchmarkSimulatorAttach measures the number of disks that the simulated rack attaches in a
// second. Each disk goes to the next instance.
func BenchmarkSimulatorAttach(b *testing.B) {
	var names []string
	for i := range attachInstances {
		names = append(names, fmt.Sprint("i", i))
	}
	bn := openBench(b, harness.RackOptions{Instances: names})
	// This client keeps a connection for each caller.
	transport := &http.Transport{MaxIdleConnsPerHost: slices.Max(attachCallers)}
	b.Cleanup(transport.CloseIdleConnections)
	var err error
	bn.byHand.Client, err = oxide.NewClient(oxide.WithHost(bn.rack.URL),
		oxide.WithToken(bn.rack.Token),
		oxide.WithHTTPClient(&http.Client{Transport: transport}))
	csitest.Must(b, err)
	var disks []string
	for i := range attachInstances * attachedDisks {
		disk, err := bn.byHand.CreateDisk(b.Context(), bn.rack.Project, fmt.Sprint("disk-", i),
			harness.GiB)
		csitest.Must(b, err)
		disks = append(disks, disk.Id)
	}
	took := map[int][]time.Duration{}
	for round := 0; b.Loop(); round++ {
		for i := range attachCallers {
			callers := attachCallers[(i+round)%len(attachCallers)]
			d, err := timed(func() error {
				return bn.each(b.Context(), callers, disks, bn.byHand.AttachDisk)
			})
			csitest.Must(b, err)
			took[callers] = append(took[callers], d)
			csitest.Must(b, bn.each(b.Context(), callers, disks, bn.byHand.DetachDisk))
		}
	}
	one := median(took[1])
	for _, callers := range attachCallers {
		d := median(took[callers])
		fmt.Printf("FIGURE simulator-attach callers=%d instances=%d per_s=%.0f rounds=%d",
			callers, attachInstances, float64(len(disks))/d.Seconds(), len(took[callers]))
		if callers > 1 {
			slower := float64(d) / float64(one)
			fmt.Printf(" of_one_callers_time=%.2f aim=%.1f %s", slower, aimMoreCallers,
				reached(slower, aimMoreCallers))
		}
		fmt.Println()
	}
}

// each calls a function for every disk and its instance, with the given number of callers at the
// same time.
func (bn *bench) each(ctx context.Context, callers int, disks []string,
	do func(ctx context.Context, disk, instance string) error,
) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(callers)
	for i, disk := range disks {
		group.Go(func() error { return do(ctx, disk, bn.rack.Instances[i%attachInstances].ID) })
	}
	return group.Wait()
}
