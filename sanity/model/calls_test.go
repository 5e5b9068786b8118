package model

import (
	"context"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// book is what the CO knows: what answers have told it, whatever is true by now.
type book struct {
	// volumes and snapshots are what creates have returned, by number; nil before.
	volumes   map[int]*csi.Volume
	snapshots map[int]string
	// published are the publish contexts by "v1 a", as the attach returned them for the volume of
	// today; staged and given what was staged, and published to a pod, or tried to be, and not
	// undone.
	published map[string]map[string]string
	staged    map[string]bool
	given     map[field]bool
}

func newBook() book {
	return book{volumes: map[int]*csi.Volume{}, snapshots: map[int]string{},
		published: map[string]map[string]string{}, staged: map[string]bool{},
		given: map[field]bool{}}
}

// identify adds what the CO sends with a call. It says false for a call that it cannot make, for
// want of an ID or of what an earlier call has to return.
func (b book) identify(s *step) bool {
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

// note takes an answer into the book. What is deleted keeps its ID, for calls that come too late.
func (b book) note(s *step, reply reply) {
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

// try notes a call before its answer is known.
func (b book) try(s step) {
	switch s.op {
	case stage:
		b.staged[at(s.vol, s.node)] = true
	case publish:
		b.given[publishedField(s.vol, s.node, s.pod)] = true
	}
}

// reply is what an answer has that is kept.
type reply struct {
	volume   *csi.Volume
	snapshot string
	context  map[string]string
}

func capabilityOf(v int) *csi.VolumeCapability { return accessOf(v, kinds[v].fsType) }

// accessOf is the volume's capability with another filesystem; "" is a device.
func accessOf(v int, fsType string) *csi.VolumeCapability {
	mode := csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	if kinds[v].shared {
		mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	}
	c := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode}}
	if fsType == "" {
		c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		c.AccessType = &csi.VolumeCapability_Mount{
			Mount: &csi.VolumeCapability_MountVolume{FsType: fsType}}
	}
	return c
}

// call makes a call as the CO does.
func (h *history) call(ctx context.Context, s step) (reply, error) {
	if s.op.onNode() {
		return reply{}, h.callNode(ctx, s)
	}
	ctl := h.site.controllers[s.ctl-1].Controller()
	switch s.op {
	case createVolume:
		resp, err := ctl.CreateVolume(ctx, createRequest(s))
		return reply{volume: resp.GetVolume()}, err
	case deleteVolume:
		_, err := ctl.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: s.id})
		return reply{}, err
	case attach:
		resp, err := ctl.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
			VolumeId: s.id, NodeId: h.site.rack.Instance(s.node).ID,
			VolumeCapability: capabilityOf(s.vol),
			VolumeContext:    h.book.volumes[s.vol].GetVolumeContext()})
		return reply{context: resp.GetPublishContext()}, err
	case detach, detachAll:
		req := &csi.ControllerUnpublishVolumeRequest{VolumeId: s.id}
		if s.op == detach {
			req.NodeId = h.site.rack.Instance(s.node).ID
		}
		_, err := ctl.ControllerUnpublishVolume(ctx, req)
		return reply{}, err
	case createSnapshot:
		resp, err := ctl.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{
			Name: snapshotNames[s.snap], SourceVolumeId: s.source})
		return reply{snapshot: resp.GetSnapshot().GetSnapshotId()}, err
	}
	_, err := ctl.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: s.id})
	return reply{}, err
}

func createRequest(s step) *csi.CreateVolumeRequest {
	req := &csi.CreateVolumeRequest{
		Name:               volumeNames[s.vol],
		CapacityRange:      &csi.CapacityRange{RequiredBytes: gib},
		VolumeCapabilities: []*csi.VolumeCapability{capabilityOf(s.vol)},
	}
	if s.source != "" {
		req.VolumeContentSource = &csi.VolumeContentSource{
			Type: &csi.VolumeContentSource_Snapshot{
				Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: s.source}}}
	}
	return req
}

func (h *history) callNode(ctx context.Context, s step) error {
	node := h.site.nodes[s.node].Node()
	staging, target := h.site.staging(s.vol, s.node), h.site.target(s.vol, s.node, s.pod)
	volumeContext := h.book.volumes[s.vol].GetVolumeContext()
	var err error
	switch s.op {
	case stage:
		if err := os.MkdirAll(staging, 0o750); err != nil {
			return err
		}
		_, err = node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
			VolumeId: s.id, StagingTargetPath: staging, VolumeCapability: capabilityOf(s.vol),
			PublishContext: h.book.published[at(s.vol, s.node)], VolumeContext: volumeContext})
	case stageOther:
		fsType := "xfs"
		if kinds[s.vol].fsType == fsType {
			fsType = "ext4"
		}
		other := accessOf(s.vol, fsType)
		_, err = node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
			VolumeId: s.id, StagingTargetPath: staging, VolumeCapability: other,
			PublishContext: h.book.published[at(s.vol, s.node)], VolumeContext: volumeContext})
	case stageAstray:
		_, err = node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
			VolumeId: s.id, StagingTargetPath: staging, VolumeCapability: capabilityOf(s.vol),
			PublishContext: h.book.published[at(s.other, s.node)]})
	case unstage:
		_, err = node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{
			VolumeId: s.id, StagingTargetPath: staging})
	case unstageAstray:
		_, err = node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{
			VolumeId: s.id, StagingTargetPath: h.site.staging(s.other, s.node)})
	case publish:
		if err := os.MkdirAll(filepath.Dir(target), 0o750); err != nil {
			return err
		}
		_, err = node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
			VolumeId: s.id, StagingTargetPath: staging, TargetPath: target,
			VolumeCapability: capabilityOf(s.vol), VolumeContext: volumeContext,
			PublishContext: h.book.published[at(s.vol, s.node)]})
	case publishOther:
		if err := os.MkdirAll(filepath.Dir(target), 0o750); err != nil {
			return err
		}
		fsType := "ext4"
		if !kinds[s.vol].block() {
			fsType = ""
		}
		_, err = node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
			VolumeId: s.id, StagingTargetPath: staging, TargetPath: target,
			VolumeCapability: accessOf(s.vol, fsType), VolumeContext: volumeContext,
			PublishContext: h.book.published[at(s.vol, s.node)]})
	case unpublishAstray:
		_, err = node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{
			VolumeId: s.id, TargetPath: h.site.target(s.other, s.node, s.pod)})
	case unpublish:
		_, err = node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{
			VolumeId: s.id, TargetPath: target})
	case stats:
		_, err = node.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{
			VolumeId: s.id, VolumePath: target})
	}
	return err
}
