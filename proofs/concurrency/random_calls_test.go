//go:build linux

package concurrency

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// The answers, besides OK, that calls may get while other callers use the same volume.
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

// callOnce calls a method once, and returns the answer. It reports whether the answer is OK.
func callOnce[Req, Resp any](ctx context.Context, lc *lifecycle, r *rand.Rand, allowed answers,
	method method[Req, Resp], req Req) (answer Resp, ok bool) {
	ok = lc.call(ctx, r, nameOf(req), allowed, func(ctx context.Context) (err error) {
		answer, err = method(ctx, req)
		return err
	})
	return answer, ok
}

// call makes one call. Sometimes, at random, the caller does not wait for the answer.
func (lc *lifecycle) call(ctx context.Context, r *rand.Rand, what string, allowed answers,
	call func(context.Context) error) bool {
	if r.IntN(8) == 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(r.IntN(20))*time.Millisecond)
		defer cancel()
		allowed = allowed.and(abandoned)
	}
	return lc.env.judge(what, call(ctx), allowed)
}

// publishRequest asks for the volume with the use for which it was created.
func (lc *lifecycle) publishRequest(volume *csi.Volume,
	node string) *csi.ControllerPublishVolumeRequest {
	req := harness.PublishRequest(volume, node)
	req.VolumeCapability = lc.capability
	return req
}

// callController makes one random call of the controller for the volume.
func (lc *lifecycle) callController(ctx context.Context, r *rand.Rand) {
	ctl := lc.env.controller(r.IntN(2))
	volume, snapshot := lc.current()
	id := volume.GetVolumeId()
	choice := r.IntN(10)
	if volume == nil {
		choice = 0
	}
	switch choice {
	case 0, 1:
		answer, ok := callOnce(ctx, lc, r, busy, ctl.CreateVolume, lc.createRequest())
		if ok {
			lc.setVolume(answer.GetVolume())
		}
	case 2:
		callOnce(ctx, lc, r, deleting, ctl.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: id})
	case 3, 4:
		node := lc.env.nodes[r.IntN(len(lc.env.nodes))].Instance.ID
		callOnce(ctx, lc, r, attaching, ctl.ControllerPublishVolume, lc.publishRequest(volume, node))
	case 5:
		// No caller abandons a detach. If the rack carried it out late, it would take the disk from
		// the node that has it then.
		_, err := ctl.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{
			VolumeId: id, NodeId: lc.env.nodes[r.IntN(len(lc.env.nodes))].Instance.ID})
		lc.env.judge("ControllerUnpublishVolume", err, busy)
	case 6, 7:
		lc.callSnapshot(ctx, r, ctl, id, snapshot)
	default:
		lc.look(ctx, r, ctl, volume)
	}
}

// callSnapshot takes or deletes the snapshot of the lifecycle. The snapshot has the same name
// for every source.
func (lc *lifecycle) callSnapshot(ctx context.Context, r *rand.Rand, ctl csi.ControllerClient,
	id, snapshot string) {
	if snapshot == "" || r.IntN(2) == 0 {
		answer, ok := callOnce(ctx, lc, r, snapshotting, ctl.CreateSnapshot,
			harness.SnapshotRequest(lc.name, id))
		if ok {
			lc.mu.Lock()
			defer lc.mu.Unlock()
			lc.snapshot = answer.GetSnapshot().GetSnapshotId()
		}
		return
	}
	callOnce(ctx, lc, r, forgetting, ctl.DeleteSnapshot,
		&csi.DeleteSnapshotRequest{SnapshotId: snapshot})
}

// look makes a call that changes nothing.
func (lc *lifecycle) look(ctx context.Context, r *rand.Rand, ctl csi.ControllerClient,
	volume *csi.Volume) {
	switch r.IntN(4) {
	case 0:
		lc.listed(ctx, r, ctl)
	case 1:
		callOnce(ctx, lc, r, nil, ctl.ListSnapshots,
			&csi.ListSnapshotsRequest{SourceVolumeId: volume.GetVolumeId()})
	case 2:
		callOnce(ctx, lc, r, looking, ctl.ControllerGetVolume,
			&csi.ControllerGetVolumeRequest{VolumeId: volume.GetVolumeId()})
	default:
		callOnce(ctx, lc, r, looking, ctl.ValidateVolumeCapabilities,
			&csi.ValidateVolumeCapabilitiesRequest{
				VolumeId: volume.GetVolumeId(), VolumeContext: volume.GetVolumeContext(),
				VolumeCapabilities: []*csi.VolumeCapability{lc.capability}})
	}
}

// listed reads all pages of the list. No volume may be on two pages, even if volumes are
// created and deleted meanwhile.
func (lc *lifecycle) listed(ctx context.Context, r *rand.Rand, ctl csi.ControllerClient) {
	seen := map[string]bool{}
	for token := ""; ; {
		answer, ok := callOnce(ctx, lc, r, nil, ctl.ListVolumes,
			&csi.ListVolumesRequest{MaxEntries: 4, StartingToken: token})
		for _, entry := range answer.GetEntries() {
			id := entry.GetVolume().GetVolumeId()
			if seen[id] {
				lc.env.fail("ListVolumes shows %s on two pages", id)
			}
			seen[id] = true
		}
		if token = answer.GetNextToken(); !ok || token == "" {
			return
		}
	}
}

// callNode makes one random call of the node for the volume.
func (lc *lifecycle) callNode(ctx context.Context, r *rand.Rand, p *placement) {
	target := r.IntN(targets)
	switch r.IntN(9) {
	case 0, 1:
		lc.call(ctx, r, "NodeStageVolume", busy, p.stage)
	case 2:
		lc.call(ctx, r, "NodeUnstageVolume", unstaging, p.unstage)
	case 3, 4, 5:
		lc.call(ctx, r, "NodePublishVolume", publishing, p.publish(target))
	case 6, 7:
		lc.call(ctx, r, "NodeUnpublishVolume", busy, p.unpublish(target))
	default:
		lc.call(ctx, r, "NodeGetVolumeStats", measuring, func(ctx context.Context) error {
			_, err := p.at(target).Stats(ctx, p.node.Node())
			return err
		})
	}
}
