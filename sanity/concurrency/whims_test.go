package concurrency

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
)

// What the calls may be answered besides OK while others are at the same volume.
var (
	looking   = answers{codes.NotFound: {"VolumeNotFound"}}
	deleting  = busy.and(answers{codes.FailedPrecondition: {"DiskAttached:"}})
	attaching = busy.and(looking).and(answers{
		codes.FailedPrecondition: {"DiskAttachedElsewhere"},
		codes.ResourceExhausted:  {"InstanceFull"},
	})
	snapshotting = busy.and(looking).and(answers{codes.AlreadyExists: {"SnapshotExists"}})
	forgetting   = busy.and(answers{codes.Aborted: {"SnapshotNotReady"}})

	publishing = busy.and(notStaged).and(answers{codes.FailedPrecondition: {"PublishedElsewhere"}})
	unstaging  = busy.and(stillUsed)
	measuring  = answers{codes.NotFound: {"VolumeNotAtPath"}}
)

// call makes one call, which the caller now and then does not wait for.
func (l *life) call(ctx context.Context, r *rand.Rand, what string, allowed answers,
	call func(context.Context) error) bool {
	if r.IntN(8) == 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(r.IntN(20))*time.Millisecond)
		defer cancel()
		allowed = allowed.and(givenUp)
	}
	return l.s.judge(what, call(ctx), allowed)
}

// publishRequest asks for the volume as what it was created for.
func (l *life) publishRequest(volume *csi.Volume, node string) *csi.ControllerPublishVolumeRequest {
	req := publishRequest(volume, node)
	req.VolumeCapability = l.capability
	return req
}

// rackWhim is one call of a caller who is at the volume on the rack.
func (l *life) rackWhim(ctx context.Context, r *rand.Rand) {
	ctl := l.s.client(r.IntN(2))
	volume, snapshot := l.told()
	id := volume.GetVolumeId()
	whim := r.IntN(10)
	if volume == nil {
		whim = 0
	}
	switch whim {
	case 0, 1:
		l.call(ctx, r, "CreateVolume", busy, func(ctx context.Context) error {
			answer, err := ctl.CreateVolume(ctx, l.order())
			if err == nil {
				l.said(answer.GetVolume())
			}
			return err
		})
	case 2:
		l.call(ctx, r, "DeleteVolume", deleting, func(ctx context.Context) error {
			_, err := ctl.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
			return err
		})
	case 3, 4:
		node := l.s.nodes[r.IntN(len(l.s.nodes))].instance.ID
		l.call(ctx, r, "ControllerPublishVolume", attaching, func(ctx context.Context) error {
			_, err := ctl.ControllerPublishVolume(ctx, l.publishRequest(volume, node))
			return err
		})
	case 5:
		// Nobody gives up a detach: one that the rack comes to late would take the disk from the
		// node that has it then.
		_, err := ctl.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{
			VolumeId: id, NodeId: l.s.nodes[r.IntN(len(l.s.nodes))].instance.ID})
		l.s.judge("ControllerUnpublishVolume", err, busy)
	case 6, 7:
		l.snapshotWhim(ctx, r, ctl, id, snapshot)
	default:
		l.look(ctx, r, ctl, volume)
	}
}

// snapshotWhim takes or deletes the life's snapshot, which has one name whatever it is of.
func (l *life) snapshotWhim(ctx context.Context, r *rand.Rand, ctl csi.ControllerClient,
	id, snapshot string) {
	if snapshot == "" || r.IntN(2) == 0 {
		l.call(ctx, r, "CreateSnapshot", snapshotting, func(ctx context.Context) error {
			answer, err := ctl.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{
				Name: l.name, SourceVolumeId: id})
			if err == nil {
				l.mu.Lock()
				defer l.mu.Unlock()
				l.snapshot = answer.GetSnapshot().GetSnapshotId()
			}
			return err
		})
		return
	}
	l.call(ctx, r, "DeleteSnapshot", forgetting, func(ctx context.Context) error {
		_, err := ctl.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: snapshot})
		return err
	})
}

// look asks a question that changes nothing.
func (l *life) look(ctx context.Context, r *rand.Rand, ctl csi.ControllerClient,
	volume *csi.Volume) {
	switch r.IntN(4) {
	case 0:
		l.listed(ctx, r, ctl)
	case 1:
		l.call(ctx, r, "ListSnapshots", nil, func(ctx context.Context) error {
			_, err := ctl.ListSnapshots(ctx, &csi.ListSnapshotsRequest{
				SourceVolumeId: volume.GetVolumeId()})
			return err
		})
	case 2:
		l.call(ctx, r, "ControllerGetVolume", looking, func(ctx context.Context) error {
			_, err := ctl.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{
				VolumeId: volume.GetVolumeId()})
			return err
		})
	default:
		l.call(ctx, r, "ValidateVolumeCapabilities", looking, func(ctx context.Context) error {
			_, err := ctl.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{
				VolumeId: volume.GetVolumeId(), VolumeContext: volume.GetVolumeContext(),
				VolumeCapabilities: []*csi.VolumeCapability{l.capability}})
			return err
		})
	}
}

// listed walks through all pages; no volume may be on two of them, whatever comes and goes.
func (l *life) listed(ctx context.Context, r *rand.Rand, ctl csi.ControllerClient) {
	seen := map[string]bool{}
	for token := ""; ; {
		var answer *csi.ListVolumesResponse
		ok := l.call(ctx, r, "ListVolumes", nil, func(ctx context.Context) (err error) {
			answer, err = ctl.ListVolumes(ctx, &csi.ListVolumesRequest{
				MaxEntries: 4, StartingToken: token})
			return err
		})
		for _, entry := range answer.GetEntries() {
			id := entry.GetVolume().GetVolumeId()
			if seen[id] {
				l.s.wrong("ListVolumes shows %s on two pages", id)
			}
			seen[id] = true
		}
		if token = answer.GetNextToken(); !ok || token == "" {
			return
		}
	}
}

// nodeWhim is one call of a caller who is at the volume on its node.
func (l *life) nodeWhim(ctx context.Context, r *rand.Rand, p *place) {
	target := p.target(r.IntN(pods))
	switch r.IntN(9) {
	case 0, 1:
		l.call(ctx, r, "NodeStageVolume", busy, p.stage)
	case 2:
		l.call(ctx, r, "NodeUnstageVolume", unstaging, p.unstage)
	case 3, 4, 5:
		l.call(ctx, r, "NodePublishVolume", publishing, func(ctx context.Context) error {
			return p.publish(ctx, target)
		})
	case 6, 7:
		l.call(ctx, r, "NodeUnpublishVolume", busy, func(ctx context.Context) error {
			return p.unpublish(ctx, target)
		})
	default:
		l.call(ctx, r, "NodeGetVolumeStats", measuring, func(ctx context.Context) error {
			_, err := p.node.Node().NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{
				VolumeId: p.volume.GetVolumeId(), VolumePath: target,
				StagingTargetPath: p.staging})
			return err
		})
	}
}
