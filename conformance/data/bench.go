package data

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

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
	// Oxide serves the requests of an administrator.
	Oxide *oxide.Client
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
	// Says states what holds if the check succeeds, and Source names the document that promises it.
	Says, Source string
	Needs        Needs
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

const (
	// cleanTimeout limits how long a check takes to remove what it created.
	cleanTimeout = 5 * time.Minute
	// retryTimeout limits how long a call is repeated when its error asks for that.
	retryTimeout = 2 * time.Minute
)

// checkRun is one running check. It records what the check creates. A step that fails ends the
// check, so that the text of a check has no error handling. Methods with a context return their
// errors, because the removal of what the check created continues after an error.
type checkRun struct {
	*Bench
	ctx context.Context
	// access is the access of the volumes that the check creates.
	access string
	// step names the present step in errors; "" means a step of every check.
	step string
	// last are functions that run at the end of the check, before the removal of what it created.
	last      []func(context.Context) error
	volumes   []*volume
	snapshots []*snapshot
	uses      []*use
	writers   []*writer
}

// volume is a volume that the check created.
type volume struct {
	*csi.Volume
	name, access string
	capability   *csi.VolumeCapability
	// kind is how the volume's disk came to be. disk is the disk in the log, if the volume is raw.
	kind string
	disk *disk
	// seed is the seed of the volume's blocks.
	seed uint64
	// request created the volume. While Volume is nil it is unknown whether the volume exists.
	request *csi.CreateVolumeRequest
	deleted bool
}

// snapshot is a snapshot that the check created. While id is empty it is unknown whether the
// snapshot exists.
type snapshot struct {
	id, name string
	// times is the size of its volume in usual sizes.
	times   int64
	request *csi.CreateSnapshotRequest
	deleted bool
}

// seeds makes the data of each volume differ from that of every other.
var seeds atomic.Uint64

// runCheck runs a check, and then removes what it created.
func (b *Bench) runCheck(ctx context.Context, access string, check func(*checkRun)) error {
	if b.Log == nil {
		logged := *b
		logged.Log = &Log{}
		b = &logged
	}
	s := &checkRun{Bench: b, ctx: ctx, access: access}
	err := s.run(check)
	finally := func(step func(context.Context) error) error {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTimeout)
		defer cancel()
		return step(clean)
	}
	for _, step := range s.last {
		err = errors.Join(err, finally(step))
	}
	return errors.Join(err, wrap(finally(s.cleanUp), "remove what the check made"))
}

// over is the panic that ends a check.
type over struct{ err error }

func (s *checkRun) run(check func(*checkRun)) (err error) {
	defer func() {
		ended := recover()
		if failed, is := ended.(over); is {
			err = failed.err
		} else if ended != nil {
			panic(ended)
		}
	}()
	check(s)
	return nil
}

func (s *checkRun) must(err error) {
	if err == nil {
		return
	}
	if s.step != "" {
		err = fmt.Errorf("%s: %w", s.step, err)
	}
	panic(over{err})
}

func (s *checkRun) fail(format string, args ...any) { s.must(fmt.Errorf(format, args...)) }

// got returns a value, or ends the check if there is an error.
func got[T any](s *checkRun) func(T, error) T {
	return func(value T, err error) T {
		s.must(err)
		return value
	}
}

// during runs a part of a check. Errors name the step.
func (s *checkRun) during(step string, part func()) {
	s.step = step
	part()
	s.step = ""
}

// cleanUp removes everything, and continues after an error.
func (s *checkRun) cleanUp(ctx context.Context) error {
	var errs []error
	for _, w := range s.writers {
		_, err := w.stop(ctx)
		errs = append(errs, err)
	}
	for _, u := range s.uses {
		if u.stopped {
			errs = append(errs, u.revive(ctx))
		}
	}
	for _, u := range slices.Backward(s.uses) {
		errs = append(errs, u.unmount(ctx))
	}
	for _, u := range slices.Backward(s.uses) {
		errs = append(errs, u.unpublish(ctx))
	}
	// A volume or snapshot that may exist is found by creating it again. A creation needs its
	// source, so the sources are deleted later.
	for _, v := range s.volumes {
		if v.Volume == nil && !v.deleted {
			errs = append(errs, s.make(ctx, v))
		}
	}
	for _, snap := range s.snapshots {
		if snap.id == "" && !snap.deleted {
			errs = append(errs, s.take(ctx, snap))
		}
	}
	for _, snap := range s.snapshots {
		errs = append(errs, s.deleteSnapshot(ctx, snap))
	}
	for _, v := range s.volumes {
		errs = append(errs, s.delete(ctx, v))
	}
	return errors.Join(errs...)
}

// mayExist reports whether a failed creation may have taken effect.
func mayExist(err error) bool {
	switch status.Code(errors.Unwrap(err)) {
	case codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.Aborted, codes.Unknown,
		codes.Internal:
		return true
	}
	return false
}

func wrap(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf(format+": %w", append(args, err)...)
}

// repeat calls again when the error asks for it, as an orchestrator does.
func repeat(ctx context.Context, call func() error) error {
	ctx, cancel := context.WithTimeout(ctx, retryTimeout)
	defer cancel()
	for backoff := (harness.Backoff{Max: 2 * time.Second}); ; {
		err := call()
		switch status.Code(errors.Unwrap(err)) {
		case codes.Aborted, codes.Unavailable:
			if backoff.Wait(ctx) == nil {
				continue
			}
		}
		return err
	}
}

// create creates a volume that is blank or restored from a snapshot. Its size is a multiple of
// the usual size.
func (s *checkRun) create(times int64, from *snapshot) *volume {
	v := &volume{name: s.Name("volume"), kind: Blank, access: s.access,
		capability: harness.Access(s.access), seed: s.Seed<<20 + seeds.Add(1)}
	v.request = harness.CreateRequest(v.name, v.capability)
	v.request.CapacityRange.RequiredBytes = times * volumeBytes
	if from != nil {
		harness.FromSnapshot(v.request, from.id)
		if v.kind = Restored; times > from.times {
			v.kind = Larger
		}
	}
	s.volumes = append(s.volumes, v)
	s.must(s.make(s.ctx, v))
	return v
}

// make creates the volume, or finds the one that was created before.
func (s *checkRun) make(ctx context.Context, v *volume) error {
	err := repeat(ctx, func() error {
		resp, err := s.Controller.CreateVolume(ctx, v.request)
		v.Volume = resp.GetVolume()
		return wrap(err, "create volume %s", v.name)
	})
	v.deleted = err != nil && !mayExist(err)
	if err == nil && v.access == "block" && v.disk == nil {
		v.disk = s.Log.disk(v.kind, v.GetCapacityBytes())
	}
	return err
}

func (s *checkRun) delete(ctx context.Context, v *volume) error {
	if v.deleted || v.Volume == nil {
		return nil
	}
	return repeat(ctx, func() error {
		_, err := s.Controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.GetVolumeId()})
		v.deleted = err == nil
		return wrap(err, "delete volume %s", v.name)
	})
}

func (s *checkRun) snap(v *volume) *snapshot {
	snap := &snapshot{name: s.Name("snapshot"), times: v.GetCapacityBytes() / volumeBytes}
	snap.request = harness.SnapshotRequest(snap.name, v.GetVolumeId())
	s.snapshots = append(s.snapshots, snap)
	s.must(s.take(s.ctx, snap))
	return snap
}

// take takes the snapshot, or finds the one that was taken before.
func (s *checkRun) take(ctx context.Context, snap *snapshot) error {
	err := repeat(ctx, func() error {
		resp, err := s.Controller.CreateSnapshot(ctx, snap.request)
		snap.id = resp.GetSnapshot().GetSnapshotId()
		if err == nil && !resp.GetSnapshot().GetReadyToUse() {
			err = status.Error(codes.Unavailable, "it is not ready")
		}
		return wrap(err, "take snapshot %s", snap.name)
	})
	snap.deleted = err != nil && !mayExist(err)
	return err
}

func (s *checkRun) deleteSnapshot(ctx context.Context, snap *snapshot) error {
	if snap.deleted || snap.id == "" {
		return nil
	}
	return repeat(ctx, func() error {
		_, err := s.Controller.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: snap.id})
		return wrap(err, "delete snapshot %s", snap.name)
	})
}

// newInUse creates a volume of the usual size, and attaches, stages and publishes it in a guest.
func (s *checkRun) newInUse(g *guest.AgentClient) *use { return s.inUse(s.create(1, nil), g) }

// inUse attaches a volume to a guest, stages and publishes it.
func (s *checkRun) inUse(v *volume, g *guest.AgentClient) *use {
	u := s.attach(v, g)
	u.mount()
	return u
}

func (s *checkRun) attach(v *volume, g *guest.AgentClient) *use {
	u := s.publish(v, s.facts(g).InstanceID)
	u.guest = g
	return u
}

func (s *checkRun) facts(g *guest.AgentClient) guest.Facts {
	return got[guest.Facts](s)(guest.ReadFacts(s.ctx, g, guest.Nothing{}))
}

func (s *checkRun) publish(v *volume, instance string) *use {
	u := &use{checkRun: s, volume: v, instance: instance, attached: true}
	u.Placement = harness.Placement{Volume: v.Volume, Capability: v.capability}
	s.uses = append(s.uses, u)
	s.must(u.publish(s.ctx))
	return u
}
