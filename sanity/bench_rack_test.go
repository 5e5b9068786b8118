//go:build linux

package sanity

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

const (
	attachInstances = 20
	// attachedDisks is how many disks each of them gets in a round.
	attachedDisks = 5
	// aimMoreCallers is how much slower many callers together may be than one.
	aimMoreCallers = 1.0
)

// attachCallers are how many callers attach at once. The first is what the others are held to.
var attachCallers = []int{1, 8, 64}

// BenchmarkSimulatorAttach measures how many disks a second the simulated rack attaches to its
// instances, each to the next one.
func BenchmarkSimulatorAttach(b *testing.B) {
	bn, disks := openAttachBench(b)
	took := map[int][]time.Duration{}
	for round := 0; b.Loop(); round++ {
		for i := range attachCallers {
			callers := attachCallers[(i+round)%len(attachCallers)]
			d, err := timed(func() error { return bn.each(b.Context(), callers, disks, bn.attach) })
			must(b, err)
			took[callers] = append(took[callers], d)
			must(b, bn.each(b.Context(), callers, disks, bn.detach))
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

// attachBench is a rack with many instances, and a client that keeps a connection for each caller.
type attachBench struct {
	rack *harness.Rack
	sdk  *oxide.Client
}

func openAttachBench(b *testing.B) (attachBench, []string) {
	b.Helper()
	run, err := harness.NewRun(os.Stdout)
	must(b, err)
	b.Cleanup(func() { must(b, run.Close()) })
	buildShipped(b, run)
	var names []string
	for i := range attachInstances {
		names = append(names, fmt.Sprint("i", i))
	}
	rack, err := run.StartRack(b.Context(), harness.RackOptions{Instances: names})
	must(b, err)
	b.Cleanup(func() { must(b, rack.Stop()) })
	transport := &http.Transport{MaxIdleConnsPerHost: slices.Max(attachCallers)}
	b.Cleanup(transport.CloseIdleConnections)
	sdk, err := oxide.NewClient(oxide.WithHost(rack.URL), oxide.WithToken(rack.Token),
		oxide.WithHTTPClient(&http.Client{Transport: transport}))
	must(b, err)
	var disks []string
	for i := range attachInstances * attachedDisks {
		disk, err := sdk.DiskCreate(b.Context(), oxide.DiskCreateParams{
			Project: oxide.NameOrId(rack.Project),
			Body: &oxide.DiskCreate{Name: oxide.Name(fmt.Sprint("disk-", i)),
				Size: oxide.ByteCount(harness.GiB), DiskBackend: harness.BlankBackend()},
		})
		must(b, err)
		disks = append(disks, disk.Id)
	}
	return attachBench{rack, sdk}, disks
}

// each does something with every disk and its instance, with so many callers at once.
func (bn attachBench) each(ctx context.Context, callers int, disks []string,
	do func(ctx context.Context, instance, disk string) error,
) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(callers)
	for i, disk := range disks {
		group.Go(func() error { return do(ctx, bn.rack.Instances[i%attachInstances].ID, disk) })
	}
	return group.Wait()
}

func (bn attachBench) attach(ctx context.Context, instance, disk string) error {
	_, err := bn.sdk.InstanceDiskAttach(ctx, oxide.InstanceDiskAttachParams{
		Instance: oxide.NameOrId(instance), Body: &oxide.DiskPath{Disk: oxide.NameOrId(disk)},
	})
	return err
}

func (bn attachBench) detach(ctx context.Context, instance, disk string) error {
	_, err := bn.sdk.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
		Instance: oxide.NameOrId(instance), Body: &oxide.DiskPath{Disk: oxide.NameOrId(disk)},
	})
	return err
}
