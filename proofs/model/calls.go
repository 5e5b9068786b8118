//go:build linux

package model

import (
	"cmp"
	"context"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// orchestrator is the knowledge that the orchestrator has from answers. It may be out of date.
type orchestrator struct {
	// volumes and snapshots contain the results of creates, by number. They are nil before the
	// create.
	volumes   map[int]*csi.Volume
	snapshots map[int]string
	// published contains the publish contexts of attaches, by "v1 a". staged and given contain the
	// stages and the publications that were tried and not undone.
	published map[string]map[string]string
	staged    map[string]bool
	given     map[field]bool
}

func newOrchestrator() orchestrator {
	return orchestrator{volumes: map[int]*csi.Volume{}, snapshots: map[int]string{},
		published: map[string]map[string]string{}, staged: map[string]bool{},
		given: map[field]bool{}}
}

// identify adds the IDs that the orchestrator sends with a call. It returns false if the
// orchestrator cannot make the call, because it lacks a value of an earlier answer.
func (b orchestrator) identify(s *Step) bool {
	volume := b.volumes[s.vol]
	switch s.op {
	case createVolume:
		s.id = anyID
		if volume != nil {
			s.id = volume.GetVolumeId()
		}
		if snap := kinds[s.vol].snap; snap != 0 {
			s.source = b.snapshots[snap]
			return s.source != ""
		}
		return true
	case createSnapshot:
		s.id = anyID
		if b.volumes[snapOf[s.snap]] == nil {
			return false
		}
		s.source = b.volumes[snapOf[s.snap]].GetVolumeId()
		return true
	case deleteSnapshot:
		s.id = b.snapshots[s.snap]
		return s.id != ""
	}
	s.id = volume.GetVolumeId()
	switch s.op {
	case stage, stageOther, publish, publishOther:
		return b.published[at(s.vol, s.node)] != nil
	case stageAstray:
		return b.published[at(s.vol, s.node)] != nil && b.published[at(s.other, s.node)] != nil
	}
	return volume != nil
}

// note keeps the values of an answer. It does not remove the ID of a deleted object, because a
// later call may still use it.
func (b orchestrator) note(s *Step, reply reply) {
	switch s.op {
	case createVolume:
		if b.volumes[s.vol].GetVolumeId() != reply.volume.GetVolumeId() {
			for _, n := range nodes {
				delete(b.published, at(s.vol, n))
			}
		}
		b.volumes[s.vol], s.id = reply.volume, reply.volume.GetVolumeId()
	case createSnapshot:
		b.snapshots[s.snap], s.id = reply.snapshot, reply.snapshot
	case attach:
		b.published[at(s.vol, s.node)] = reply.context
	case unstage:
		b.staged[at(s.vol, s.node)] = false
	case unpublish:
		b.given[publishedField(s.vol, s.node, s.pod)] = false
	}
}

// try records a call before its answer is known.
func (b orchestrator) try(s Step) {
	switch s.op {
	case stage:
		b.staged[at(s.vol, s.node)] = true
	case publish:
		b.given[publishedField(s.vol, s.node, s.pod)] = true
	}
}

// reply contains the values of an answer that are kept.
type reply struct {
	volume   *csi.Volume
	snapshot string
	context  map[string]string
}

func capabilityOf(v int) *csi.VolumeCapability { return accessOf(v, kinds[v].fsType) }

// accessOf returns the volume's capability with the given filesystem; "" is a device.
func accessOf(v int, fsType string) *csi.VolumeCapability {
	mode := csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	if kinds[v].shared {
		mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	}
	if fsType == "" {
		return harness.InMode(mode, harness.Raw())
	}
	return harness.InMode(mode, harness.Mounted(fsType))
}

// call makes a call as the orchestrator does.
func (h *History) call(ctx context.Context, s Step) (reply, error) {
	if s.op.onNode() {
		return reply{}, h.callNode(ctx, s)
	}
	ctl := h.env.Controllers[s.ctl-1].Controller()
	switch s.op {
	case createVolume:
		resp, err := ctl.CreateVolume(ctx, createRequest(s))
		return reply{volume: resp.GetVolume()}, err
	case deleteVolume:
		_, err := ctl.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: s.id})
		return reply{}, err
	case attach:
		req := harness.PublishRequest(h.orchestrator.volumes[s.vol], h.env.Rack.Instance(s.node).ID)
		req.VolumeId, req.VolumeCapability = s.id, capabilityOf(s.vol)
		resp, err := ctl.ControllerPublishVolume(ctx, req)
		return reply{context: resp.GetPublishContext()}, err
	case detach, detachAll:
		req := &csi.ControllerUnpublishVolumeRequest{VolumeId: s.id}
		if s.op == detach {
			req.NodeId = h.env.Rack.Instance(s.node).ID
		}
		_, err := ctl.ControllerUnpublishVolume(ctx, req)
		return reply{}, err
	case createSnapshot:
		resp, err := ctl.CreateSnapshot(ctx,
			harness.SnapshotRequest(snapshotNames[s.snap], s.source))
		return reply{snapshot: resp.GetSnapshot().GetSnapshotId()}, err
	}
	_, err := ctl.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: s.id})
	return reply{}, err
}

func createRequest(s Step) *csi.CreateVolumeRequest {
	req := harness.CreateRequest(volumeNames[s.vol], capabilityOf(s.vol))
	req.CapacityRange.RequiredBytes = kinds[s.vol].bytes()
	if s.source != "" {
		harness.FromSnapshot(req, s.source)
	}
	return req
}

// placement returns a volume on a node as a call names it, which may be a mistake.
func (h *History) placement(s Step) *harness.Placement {
	h.preparing.Lock()
	defer h.preparing.Unlock()
	volume := h.orchestrator.volumes[s.vol]
	p := &harness.Placement{
		Volume:         &csi.Volume{VolumeId: s.id, VolumeContext: volume.GetVolumeContext()},
		Capability:     capabilityOf(s.vol),
		PublishContext: h.orchestrator.published[at(s.vol, s.node)],
		Staging:        h.env.staging(s.vol, s.node), Target: h.env.target(s.vol, s.node, s.pod),
		ReadOnly: s.node == h.ReadOnlyAt,
	}
	switch s.op {
	case stageOther:
		fsType := "xfs"
		if kinds[s.vol].fsType == fsType {
			fsType = "ext4"
		}
		p.Capability = accessOf(s.vol, fsType)
	case stageAstray:
		p.PublishContext = h.orchestrator.published[at(s.other, s.node)]
		p.Volume.VolumeContext = nil
	case publishOther:
		fsType := "ext4"
		if !kinds[s.vol].block() {
			fsType = ""
		}
		p.Capability = accessOf(s.vol, fsType)
	case unstageAstray:
		p.Staging = h.env.staging(s.other, s.node)
	case unpublishAstray:
		p.Target = h.env.target(s.other, s.node, s.pod)
	}
	return p
}

func (h *History) callNode(ctx context.Context, s Step) error {
	p, node := h.placement(s), cmp.Or(s.Driver, h.env.Nodes[s.node]).Node()
	switch s.op {
	case stage:
		if err := os.MkdirAll(p.Staging, 0o750); err != nil {
			return err
		}
		return p.Stage(ctx, node)
	case stageOther, stageAstray:
		return p.Stage(ctx, node)
	case unstage, unstageAstray:
		return p.Unstage(ctx, node)
	case publish, publishOther:
		if err := os.MkdirAll(filepath.Dir(p.Target), 0o750); err != nil {
			return err
		}
		return p.Publish(ctx, node)
	case unpublish, unpublishAstray:
		return p.Unpublish(ctx, node)
	case stats:
		p.Staging = ""
		_, err := p.Stats(ctx, node)
		return err
	}
	return nil
}
