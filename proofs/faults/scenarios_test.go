package faults_test

import (
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// effect is the request of a prepared call, with the state to which the call must lead.
type effect struct {
	request proto.Message
	// apply changes the state as the call must. Nil means that the call changes nothing.
	apply func(rackState)
}

// call returns the effect of a call that changes nothing.
func call(request proto.Message) effect { return effect{request: request} }

// always returns a preparation that does nothing, for a request that changes nothing.
func always(request proto.Message) func(*environment) effect {
	return func(*environment) effect { return call(request) }
}

// createEffect returns the effect of a request that creates a disk of 1 GiB. The ID of the disk's
// source is from, or "" for a blank disk.
func createEffect(s *environment, req *csi.CreateVolumeRequest, from string) effect {
	return effect{request: req, apply: func(state rackState) {
		state["disk "+req.GetName()] = item{ID: fresh, State: "detached", From: from,
			Size: gib, BlockSize: madeBlocks[from == s.image.Id]}
		state.add("storage", gib)
	}}
}

// madeBlocks maps whether a disk is made from an image to the disk's block size.
var madeBlocks = map[bool]int{true: 512, false: 4096}

// removes returns the effect of a request that deletes the volume or the snapshot with the name.
func removes(name string, req proto.Message) effect {
	return effect{request: req, apply: func(state rackState) {
		delete(state, "disk "+name)
		delete(state, "snapshot "+name)
		state.add("storage", -gib)
	}}
}

// moves returns the effect of a request that attaches the disk with the name to an instance, or
// detaches it if the instance is "". A running instance gets a device.
func (s *environment) moves(name, to string, req proto.Message) effect {
	return effect{request: req, apply: func(state rackState) {
		d := state["disk "+name]
		if d.State, d.At = "attached", to; to == "" {
			d.State = "detached"
		}
		state["disk "+name] = d
		if delete(state, "device "+serial(d.Name)); to == s.up {
			state.add("device "+serial(d.Name), 1)
		}
	}}
}

// publishEffect creates a volume, and returns the effect of a request that attaches it.
func publishEffect(s *environment, node string) effect {
	name := s.name("publish")
	return s.moves(name, node, harness.PublishRequest(s.volume(name), node))
}

// unpublishEffect creates a volume, attaches it to an instance with attach, and returns the effect
// of a request that detaches it.
func unpublishEffect(s *environment, attach func(disk, instance string), from, node string) effect {
	name := s.name("unpublish")
	id := s.volume(name).GetVolumeId()
	attach(id, from)
	return s.moves(name, "", unpublish(id, node))
}

func unpublish(id, node string) *csi.ControllerUnpublishVolumeRequest {
	return &csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: node}
}

// serial returns the part of a disk's name that a guest sees as the serial.
func serial(name string) string { return name[:min(len(name), 20)] }

// scenario is a CSI call, with the state of the rack in which it is made.
type scenario struct {
	name string
	// want is the code of the call without a fault.
	want    codes.Code
	prepare func(*environment) effect
}

var scenarios = slices.Concat(volumeScenarios, attachScenarios, readScenarios)

// volumeScenarios are scenarios that create and delete volumes and snapshots.
var volumeScenarios = []scenario{
	{"create", codes.OK, func(s *environment) effect {
		return createEffect(s, harness.CreateRequest(s.name("create")), "")
	}},
	{"create-again", codes.OK, func(s *environment) effect {
		req := harness.CreateRequest(s.name("again"))
		s.made(req)
		return call(req)
	}},
	{"create-of-another-size", codes.AlreadyExists, func(s *environment) effect {
		name := s.name("size")
		s.volume(name)
		req := harness.CreateRequest(name)
		req.CapacityRange.RequiredBytes = 2 * gib
		return call(req)
	}},
	{"create-beyond-the-quota", codes.ResourceExhausted, func(s *environment) effect {
		req := harness.CreateRequest(s.name("quota"))
		req.CapacityRange.RequiredBytes = quota + gib
		return call(req)
	}},
	{"restore", codes.OK, func(s *environment) effect {
		snap := s.snap.GetSnapshotId()
		return createEffect(s, restoreRequest(s.name("restore"), snap, ""), snap)
	}},
	{"restore-with-blocks", codes.OK, func(s *environment) effect {
		snap := s.snap.GetSnapshotId()
		return createEffect(s, restoreRequest(s.name("blocks"), snap, "4096"), snap)
	}},
	{"restore-with-other-blocks", codes.InvalidArgument, func(s *environment) effect {
		return call(restoreRequest(s.name("blocks"), s.gone.GetSnapshotId(), "512"))
	}},
	{"restore-again-without-the-snapshot", codes.OK, func(s *environment) effect {
		snap := s.snapshot(s.name("passing"), s.source.GetVolumeId())
		req := restoreRequest(s.name("orphan"), snap.GetSnapshotId(), "")
		s.made(req)
		s.deleteSnapshot(snap.GetSnapshotId())
		return call(req)
	}},
	{"restore-from-another-project", codes.InvalidArgument, func(s *environment) effect {
		return call(restoreRequest(s.name("foreign"), s.foreign.Id, ""))
	}},
	{"create-from-an-image", codes.OK, func(s *environment) effect {
		req := harness.CreateRequest(s.name("image"))
		req.CapacityRange = nil
		req.Parameters = map[string]string{"imageId": s.image.Id}
		return createEffect(s, req, s.image.Id)
	}},
	{"delete", codes.OK, func(s *environment) effect {
		name := s.name("delete")
		return removes(name, &csi.DeleteVolumeRequest{VolumeId: s.volume(name).GetVolumeId()})
	}},
	{"delete-attached", codes.FailedPrecondition, func(s *environment) effect {
		return call(&csi.DeleteVolumeRequest{VolumeId: s.attached(s.down).GetVolumeId()})
	}},
	{"delete-what-is-not-ours", codes.FailedPrecondition, func(s *environment) effect {
		handmade := s.handmade(s.name("not-ours"), rackProject)
		return call(&csi.DeleteVolumeRequest{VolumeId: handmade.Id})
	}},
	{"delete-from-another-project", codes.InvalidArgument, func(s *environment) effect {
		return call(&csi.DeleteVolumeRequest{VolumeId: s.foreignDisk.Id})
	}},
	{"delete-again", codes.OK, always(&csi.DeleteVolumeRequest{VolumeId: nobody})},
	{"snapshot", codes.OK, func(s *environment) effect {
		name, source := s.name("snapshot"), s.source.GetVolumeId()
		return effect{request: harness.SnapshotRequest(name, source),
			apply: func(state rackState) {
				state["snapshot "+name] = item{ID: fresh, From: source, State: "ready", Size: gib}
				state.add("storage", gib)
			}}
	}},
	{"snapshot-again", codes.OK, func(s *environment) effect {
		name, source := s.name("snapshot"), s.source.GetVolumeId()
		s.snapshot(name, source)
		return call(harness.SnapshotRequest(name, source))
	}},
	{"snapshot-of-a-local-disk", codes.FailedPrecondition, func(s *environment) effect {
		return call(harness.SnapshotRequest(s.name("snapshot"), s.local.Id))
	}},
	{"snapshot-in-another-project", codes.InvalidArgument, func(s *environment) effect {
		return call(harness.SnapshotRequest(s.name("snapshot"), s.foreignDisk.Id))
	}},
	{"snapshot-of-nothing", codes.NotFound, func(s *environment) effect {
		return call(harness.SnapshotRequest(s.name("snapshot"), nobody))
	}},
	{"delete-snapshot", codes.OK, func(s *environment) effect {
		name := s.name("snapshot")
		snap := s.snapshot(name, s.source.GetVolumeId())
		return removes(name, &csi.DeleteSnapshotRequest{SnapshotId: snap.GetSnapshotId()})
	}},
	{"delete-snapshot-from-another-project", codes.InvalidArgument, func(s *environment) effect {
		return call(&csi.DeleteSnapshotRequest{SnapshotId: s.foreign.Id})
	}},
	{"delete-snapshot-again", codes.OK, always(&csi.DeleteSnapshotRequest{SnapshotId: nobody})},
}

// readScenarios are scenarios that change nothing.
var readScenarios = []scenario{
	{"list", codes.OK, always(&csi.ListVolumesRequest{})},
	{"list-health", codes.OK, always(&csi.ControllerListVolumeHealthRequest{})},
	{"get", codes.OK, func(s *environment) effect {
		return call(&csi.ControllerGetVolumeRequest{VolumeId: s.source.GetVolumeId()})
	}},
	{"get-health", codes.OK, func(s *environment) effect {
		return call(&csi.ControllerGetVolumeHealthRequest{VolumeId: s.source.GetVolumeId()})
	}},
	{"validate", codes.OK, func(s *environment) effect {
		return call(&csi.ValidateVolumeCapabilitiesRequest{
			VolumeId: s.source.GetVolumeId(), VolumeContext: s.source.GetVolumeContext(),
			VolumeCapabilities: []*csi.VolumeCapability{harness.Mounted("")},
			Parameters:         map[string]string{"diskType": "distributed"},
		})
	}},
	{"capacity", codes.OK, always(&csi.GetCapacityRequest{})},
	{"list-snapshots", codes.OK, always(&csi.ListSnapshotsRequest{})},
	{"list-a-snapshot", codes.OK, func(s *environment) effect {
		return call(&csi.ListSnapshotsRequest{SnapshotId: s.snap.GetSnapshotId()})
	}},
	{"get-snapshot", codes.OK, func(s *environment) effect {
		return call(&csi.GetSnapshotRequest{SnapshotId: s.snap.GetSnapshotId()})
	}},
}

// attachScenarios are scenarios that attach or detach volumes.
var attachScenarios = []scenario{
	{"publish", codes.OK, func(s *environment) effect { return publishEffect(s, s.down) }},
	{"publish-to-a-running-node", codes.OK,
		func(s *environment) effect { return publishEffect(s, s.up) }},
	{"publish-again", codes.OK,
		func(s *environment) effect { return call(harness.PublishRequest(s.attached(s.up), s.up)) }},
	{"publish-again-without-a-device", codes.OK, func(s *environment) effect {
		volume := s.volume(s.name("publish"))
		s.recordWithoutDevice(volume.GetVolumeId(), s.up)
		return call(harness.PublishRequest(volume, s.up)) // must not attach the disk again
	}},
	{"publish-static", codes.OK, func(s *environment) effect {
		name := s.name("static")
		disk := s.handmade(name, rackProject)
		return s.moves(name, s.down, harness.PublishRequest(static(disk), s.down))
	}},
	{"publish-static-again", codes.OK, func(s *environment) effect {
		disk := s.handmade(s.name("static"), rackProject)
		s.attach(disk.Id, s.down)
		return call(harness.PublishRequest(static(disk), s.down))
	}},
	{"publish-static-beside-its-serial", codes.FailedPrecondition, func(s *environment) effect {
		prefix := s.name("the-same-twenty-bytes")
		one := s.handmade(prefix+"-one", rackProject)
		other := s.handmade(prefix+"-other", rackProject)
		s.attach(one.Id, s.down)
		return call(harness.PublishRequest(static(other), s.down))
	}},
	{"publish-beside-its-serial", codes.FailedPrecondition, func(s *environment) effect {
		volume := s.volume(s.name("publish"))
		backup := s.handmade(volume.GetVolumeContext()["diskName"]+"-backup", rackProject)
		s.attach(backup.Id, s.down)
		return call(harness.PublishRequest(volume, s.down))
	}},
	{"publish-elsewhere", codes.FailedPrecondition,
		func(s *environment) effect { return call(harness.PublishRequest(s.attached(s.down), s.up)) }},
	{"publish-to-a-full-node", codes.ResourceExhausted, func(s *environment) effect {
		return call(harness.PublishRequest(s.volume(s.name("publish")), s.full))
	}},
	{"publish-from-another-project", codes.InvalidArgument, func(s *environment) effect {
		return call(harness.PublishRequest(static(s.foreignDisk), s.down))
	}},
	{"publish-to-nobody", codes.NotFound, func(s *environment) effect {
		return call(harness.PublishRequest(s.volume(s.name("publish")), nobody))
	}},
	{"unpublish", codes.OK,
		func(s *environment) effect { return unpublishEffect(s, s.attach, s.down, s.down) }},
	{"unpublish-from-a-running-node", codes.OK,
		func(s *environment) effect { return unpublishEffect(s, s.attach, s.up, s.up) }},
	{"unpublish-without-a-device", codes.OK,
		func(s *environment) effect { return unpublishEffect(s, s.recordWithoutDevice, s.up, s.up) }},
	{"unpublish-everywhere", codes.OK,
		func(s *environment) effect { return unpublishEffect(s, s.attach, s.down, "") }},
	{"unpublish-again", codes.OK, func(s *environment) effect {
		return call(unpublish(s.volume(s.name("unpublish")).GetVolumeId(), s.down))
	}},
	{"unpublish-what-is-elsewhere", codes.OK,
		func(s *environment) effect { return call(unpublish(s.attached(s.down).GetVolumeId(), s.up)) }},
	{"unpublish-from-another-project", codes.InvalidArgument,
		func(s *environment) effect { return call(unpublish(s.foreignDisk.Id, s.down)) }},
	{"unpublish-a-boot-disk", codes.FailedPrecondition,
		func(s *environment) effect { return call(unpublish(s.boot.Id, s.down)) }},
	{"unpublish-nothing", codes.OK,
		func(s *environment) effect { return call(unpublish(nobody, s.down)) }},
	{"unpublish-nothing-everywhere", codes.OK, always(unpublish(nobody, ""))},
}
