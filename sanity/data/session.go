package data

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

const (
	// cleanTimeout is how long a check may take to remove what it made.
	cleanTimeout = 5 * time.Minute
	// retryTimeout is how long a call is repeated whose error asks for it.
	retryTimeout = 2 * time.Minute
)

// session is one check at work. It notes what the check makes.
type session struct {
	*Bench
	volumes   []*volume
	snapshots []*snapshot
	uses      []*use
}

// volume is a volume that the check made.
type volume struct {
	*csi.Volume
	name, access string
	capability   *csi.VolumeCapability
	// seed is that of its blocks.
	seed    uint64
	deleted bool
}

type snapshot struct {
	id, name string
}

// seeds makes the data of each volume differ from that of every other.
var seeds atomic.Uint64

// session does the work of a check, and then removes what it made.
func (b *Bench) session(ctx context.Context, work func(*session) error) error {
	s := &session{Bench: b}
	err := work(s)
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTimeout)
	defer cancel()
	if failed := s.cleanUp(clean); failed != nil {
		err = errors.Join(err, fmt.Errorf("remove what the check made: %w", failed))
	}
	return err
}

// cleanUp removes everything, and goes on after an error.
func (s *session) cleanUp(ctx context.Context) error {
	var errs []error
	for _, u := range slices.Backward(s.uses) {
		errs = append(errs, u.unmount(ctx))
	}
	for _, u := range slices.Backward(s.uses) {
		errs = append(errs, u.unpublish(ctx))
	}
	for _, v := range s.volumes {
		errs = append(errs, s.delete(ctx, v))
	}
	for _, snap := range s.snapshots {
		errs = append(errs, repeat(ctx, func() error {
			_, err := s.Controller.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: snap.id})
			return wrap(err, "delete snapshot %s", snap.name)
		}))
	}
	return errors.Join(errs...)
}

// wrap says what failed.
func wrap(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf(format+": %w", append(args, err)...)
}

// repeat makes a call again whose error asks for that, as an orchestrator does.
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

// create makes a volume of some times the usual size, blank or of a snapshot.
func (s *session) create(
	ctx context.Context, access string, times int64, from *snapshot,
) (*volume, error) {
	v := &volume{name: s.Name("volume"), access: access, capability: harness.Access(access),
		seed: s.Seed<<20 + seeds.Add(1)}
	req := harness.CreateRequest(v.name, v.capability)
	req.CapacityRange.RequiredBytes = times * s.volumeBytes()
	if from != nil {
		harness.FromSnapshot(req, from.id)
	}
	return v, repeat(ctx, func() error {
		resp, err := s.Controller.CreateVolume(ctx, req)
		if err != nil {
			return wrap(err, "create volume %s", v.name)
		}
		v.Volume = resp.GetVolume()
		s.volumes = append(s.volumes, v)
		return nil
	})
}

func (s *session) delete(ctx context.Context, v *volume) error {
	if v.deleted {
		return nil
	}
	return repeat(ctx, func() error {
		_, err := s.Controller.DeleteVolume(ctx,
			&csi.DeleteVolumeRequest{VolumeId: v.GetVolumeId()})
		v.deleted = err == nil
		return wrap(err, "delete volume %s", v.name)
	})
}

// snap takes a snapshot.
func (s *session) snap(ctx context.Context, v *volume) (*snapshot, error) {
	snap := &snapshot{name: s.Name("snapshot")}
	req := harness.SnapshotRequest(snap.name, v.GetVolumeId())
	return snap, repeat(ctx, func() error {
		resp, err := s.Controller.CreateSnapshot(ctx, req)
		if err != nil {
			return wrap(err, "take snapshot %s of volume %s", snap.name, v.name)
		}
		if !resp.GetSnapshot().GetReadyToUse() {
			return wrap(status.Error(codes.Unavailable, "it is not ready"), "snapshot %s", snap.name)
		}
		snap.id = resp.GetSnapshot().GetSnapshotId()
		s.snapshots = append(s.snapshots, snap)
		return nil
	})
}

// inUse attaches a volume to a guest, stages and publishes it.
func (s *session) inUse(ctx context.Context, v *volume, g *guest.Guest) (*use, error) {
	u, err := s.attach(ctx, v, g)
	if err != nil {
		return nil, err
	}
	return u, u.mount(ctx)
}

// attach attaches a volume to a guest's instance.
func (s *session) attach(ctx context.Context, v *volume, g *guest.Guest) (*use, error) {
	facts, err := g.Facts(ctx)
	if err != nil {
		return nil, err
	}
	u, err := s.publish(ctx, v, facts.InstanceID)
	if err != nil {
		return nil, err
	}
	u.guest = g
	return u, nil
}

// publish attaches a volume to an instance.
func (s *session) publish(ctx context.Context, v *volume, instance string) (*use, error) {
	u := &use{session: s, volume: v, instance: instance, attached: true}
	u.Placement = harness.Placement{Volume: v.Volume, Capability: v.capability}
	s.uses = append(s.uses, u)
	req := harness.PublishRequest(v.Volume, instance)
	req.VolumeCapability = v.capability
	return u, repeat(ctx, func() error {
		resp, err := s.Controller.ControllerPublishVolume(ctx, req)
		u.PublishContext = resp.GetPublishContext()
		return wrap(err, "attach volume %s to instance %s", v.name, instance)
	})
}
