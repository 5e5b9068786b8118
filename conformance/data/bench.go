package data

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// Bench is what the checks work with.
type Bench struct {
	// Controller is the driver's controller service.
	Controller csi.ControllerClient
	// A is this instance; B is another running one, which may be stopped and started, or nil.
	A, B *guest.Guest
	// Helper is an instance that is stopped and may be started, or nil.
	Helper *Helper
	// Oxide and Project are for what an administrator does.
	Oxide   *oxide.Client
	Project string
	// Hotplug says whether the rack attaches disks to running instances.
	Hotplug bool
	// Name names a thing that a check makes, so that the name is the run's and unique.
	Name func(what string) string
	// Seed makes the data of one run differ from that of another.
	Seed uint64
	// Accesses are the filesystems and "block"; nil is ext4, xfs, btrfs and block.
	Accesses []string
	// VolumeBytes is the size of a volume, 1 GiB when 0, and Blocks how many blocks are written at a
	// time, 512 when 0.
	VolumeBytes, Blocks int64
	// DeviceTimeout is how long a device may take to appear in its instance or to disappear, 30 s
	// when 0, and StartTimeout how long an instance may take to stop, or to start until it answers, 5
	// minutes when 0.
	DeviceTimeout, StartTimeout time.Duration
}

// Helper is an instance that is stopped when a check begins and when it ends.
type Helper struct {
	InstanceID string
	// Connect reaches it while it runs.
	Connect func(context.Context) (*guest.Guest, error)
}

// Check is one check of data.
type Check struct {
	// ID is D01, D02, …; it is never given to another check.
	ID string
	// Says is what is so if the check succeeds, Why what goes wrong otherwise, and Source where it is
	// promised.
	Says, Why, Source string
	Needs             Needs
	// Calls are what the check must have made when it succeeds: RPCs of CSI, and operations of the
	// rack's API.
	Calls []string
	Run   func(ctx context.Context, b *Bench) error
}

// Needs is what a check needs besides a controller and this instance.
type Needs struct{ Hotplug, Second, Helper bool }

// Blocked says why the check cannot be made on a Bench, or "".
func (c Check) Blocked(b *Bench) string {
	switch {
	case c.Needs.Hotplug && !b.Hotplug:
		return "not tested: this rack attaches disks only to stopped instances"
	case c.Needs.Second && b.B == nil:
		return "not tested: it takes a second instance, and none was given"
	case c.Needs.Helper && b.Helper == nil:
		return "not tested: it takes a stopped instance that may be started, and none was given"
	}
	return ""
}

func (b *Bench) accesses() []string {
	if b.Accesses == nil {
		return []string{"ext4", "xfs", "btrfs", "block"}
	}
	return b.Accesses
}

func (b *Bench) volumeBytes() int64 { return cmp.Or(b.VolumeBytes, harness.GiB) }

func (b *Bench) deviceTimeout() time.Duration { return cmp.Or(b.DeviceTimeout, 30*time.Second) }

func (b *Bench) startTimeout() time.Duration { return cmp.Or(b.StartTimeout, 5*time.Minute) }

// once makes a check with the first of the accesses.
func once(check func(*session)) func(context.Context, *Bench) error {
	return func(ctx context.Context, b *Bench) error {
		return b.session(ctx, b.accesses()[0], check)
	}
}

// eachAccess makes a check for every filesystem, and for raw block.
func eachAccess(check func(*session)) func(context.Context, *Bench) error {
	return func(ctx context.Context, b *Bench) error {
		for _, access := range b.accesses() {
			if err := b.session(ctx, access, check); err != nil {
				return fmt.Errorf("%s: %w", access, err)
			}
		}
		return nil
	}
}

// rawOnly makes a check for raw block, if the Bench has it.
func rawOnly(check func(*session)) func(context.Context, *Bench) error {
	return func(ctx context.Context, b *Bench) error {
		if !slices.Contains(b.accesses(), "block") {
			return nil
		}
		return b.session(ctx, "block", check)
	}
}
