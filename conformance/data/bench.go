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

// Bench has everything that the checks use.
type Bench struct {
	// Controller is the driver's controller service.
	Controller csi.ControllerClient
	// A is this instance. B is another running instance that may be stopped and started, or nil.
	A, B *guest.AgentClient
	// Helper is a stopped instance that may be started, or nil.
	Helper *Helper
	// MayStop returns an error if somebody else uses an instance. It is called right before the stop;
	// nil means that nobody else does.
	MayStop func(ctx context.Context, instance string) error
	// Oxide and Project serve the requests of an administrator.
	Oxide   *oxide.Client
	Project string
	// Hotplug reports whether the rack attaches disks to running instances.
	Hotplug bool
	// Name returns a unique name of the run for an object that a check creates.
	Name func(what string) string
	// Seed makes the data of one run differ from that of another.
	Seed uint64
	// Accesses are the filesystems and "block"; nil is ext4, xfs, btrfs and block.
	Accesses []string
	// Blocks is the number of blocks that are written at a time; 0 means 512.
	Blocks int64
	// Log, if it is not nil, records where the checks look.
	Log *Log
	// SampleTime limits how long a blank disk of more than 1 GiB is read, apart from the places that
	// are always read; 0 means 10 s.
	SampleTime time.Duration
	// DeviceTimeout limits how long a device takes to appear in its instance or to disappear; 0
	// means 30 s.
	DeviceTimeout time.Duration
}

// Helper is an instance that is stopped when a check begins and when it ends.
type Helper struct {
	InstanceID string
	// Started is true while the instance runs because a check started it.
	Started bool
	// Connect connects to the instance while it runs.
	Connect func(context.Context) (*guest.AgentClient, error)
}

// Check is one check of data.
type Check struct {
	// ID is D01, D02, …. An ID is never used for another check.
	ID string
	// Says states what holds if the check succeeds. Why states what goes wrong otherwise. Source
	// names the document that promises it.
	Says, Why, Source string
	Needs             Needs
	// GiB is what the check has at one time, if that is more than most have.
	GiB int64
	// Calls are the calls that a successful check must have made: RPCs of CSI, and operations of the
	// rack's API.
	Calls []string
	Run   func(ctx context.Context, b *Bench) error
}

// Needs lists what a check needs in addition to a controller and this instance.
type Needs struct{ Hotplug, Second, Helper bool }

// Blocked returns the reason why the check cannot run on a Bench, or "".
func (c Check) Blocked(b *Bench) string {
	switch {
	case c.Needs.Hotplug && !b.Hotplug:
		return "not tested: this rack attaches or detaches disks of stopped instances only"
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

func (b *Bench) deviceTimeout() time.Duration { return cmp.Or(b.DeviceTimeout, 30*time.Second) }

// startTimeout limits how long an instance takes to stop, or to start and answer.
const startTimeout = 5 * time.Minute

// volumeBytes is the usual size of a volume.
const volumeBytes = harness.GiB

// once runs a check with the first access only.
func once(check func(*checkRun)) func(context.Context, *Bench) error {
	return func(ctx context.Context, b *Bench) error {
		return b.runCheck(ctx, b.accesses()[0], check)
	}
}

// eachAccess runs a check for every filesystem and for raw block.
func eachAccess(check func(*checkRun)) func(context.Context, *Bench) error {
	return func(ctx context.Context, b *Bench) error {
		for _, access := range b.accesses() {
			if err := b.runCheck(ctx, access, check); err != nil {
				return fmt.Errorf("%s: %w", access, err)
			}
		}
		return nil
	}
}

// rawOnly runs a check for raw block, if the Bench has it.
func rawOnly(check func(*checkRun)) func(context.Context, *Bench) error {
	return func(ctx context.Context, b *Bench) error {
		if !slices.Contains(b.accesses(), "block") {
			return nil
		}
		return b.runCheck(ctx, "block", check)
	}
}
