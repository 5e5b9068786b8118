package faults_test

import (
	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// effect is the request of a prepared call, with the state that the rack must have after the call.
type effect struct {
	request proto.Message
	// apply changes the state as the call does. Nil means that the call changes nothing.
	apply func(*rackState)
}

// scenario is a CSI call in a situation.
type scenario struct {
	name string
	// want is the code of the call without a fault.
	want    codes.Code
	prepare func(*setup) effect
}

// scenarios contains all scenarios.
var scenarios = append(append(append([]scenario{}, volumeScenarios...), attachScenarios...),
	readScenarios...)

// createEffect returns the effect of a call that makes a disk of 1 GiB, with the block size of
// its source.
func createEffect(s *setup, req *csi.CreateVolumeRequest, from string) effect {
	return effect{request: req, apply: func(state *rackState) {
		state.Disks[req.GetName()] = disk{ID: fresh, State: "detached", From: from,
			Size: gib, BlockSize: madeBlocks[from == s.imageID()]}
		state.Storage += gib
	}}
}

// madeBlocks maps whether a disk is made from an image to the disk's block size.
var madeBlocks = map[bool]int{true: 512, false: 4096}

func (s *setup) imageID() string {
	if s.image == nil {
		return ""
	}
	return s.image.Id
}

// volumeScenarios are scenarios that create and delete volumes and snapshots.
var volumeScenarios = []scenario{
	{"create", codes.OK, func(s *setup) effect {
		return createEffect(s, harness.CreateRequest(s.name("create")), "")
	}},
	{"create-again", codes.OK, func(s *setup) effect {
		req := harness.CreateRequest(s.name("again"))
		s.made(req)
		return effect{request: req}
	}},
	{"create-of-another-size", codes.AlreadyExists, func(s *setup) effect {
		name := s.name("size")
		s.volume(name)
		req := harness.CreateRequest(name)
		req.CapacityRange.RequiredBytes = 2 * gib
		return effect{request: req}
	}},
	{"create-beyond-the-quota", codes.ResourceExhausted, func(s *setup) effect {
		req := harness.CreateRequest(s.name("quota"))
		req.CapacityRange.RequiredBytes = quota + gib
		return effect{request: req}
	}},
	{"restore", codes.OK, func(s *setup) effect {
		snap := s.snap.GetSnapshotId()
		return createEffect(s, restoreRequest(s.name("restore"), snap, ""), snap)
	}},
	{"restore-with-blocks", codes.OK, func(s *setup) effect {
		snap := s.snap.GetSnapshotId()
		return createEffect(s, restoreRequest(s.name("blocks"), snap, "4096"), snap)
	}},
	{"restore-with-other-blocks", codes.InvalidArgument, func(s *setup) effect {
		return effect{request: restoreRequest(s.name("blocks"), s.gone.GetSnapshotId(), "512")}
	}},
	{"restore-again-without-the-snapshot", codes.OK, func(s *setup) effect {
		snap := s.snapshot(s.name("passing"), s.source.GetVolumeId())
		req := restoreRequest(s.name("orphan"), snap.GetSnapshotId(), "")
		s.made(req)
		s.deleteSnapshot(snap.GetSnapshotId())
		return effect{request: req}
	}},
	{"restore-from-another-project", codes.InvalidArgument, func(s *setup) effect {
		return effect{request: restoreRequest(s.name("foreign"), s.foreign.Id, "")}
	}},
	{"create-from-an-image", codes.OK, func(s *setup) effect {
		req := harness.CreateRequest(s.name("image"))
		req.CapacityRange = nil
		req.Parameters = map[string]string{"imageId": s.image.Id}
		return createEffect(s, req, s.image.Id)
	}},
	{"delete", codes.OK, func(s *setup) effect {
		name := s.name("delete")
		return deleteEffect(s, name, s.volume(name).GetVolumeId())
	}},
	{"delete-attached", codes.FailedPrecondition, func(s *setup) effect {
		volume := s.volume(s.name("attached"))
		s.attach(volume.GetVolumeId(), s.down)
		return effect{request: &csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()}}
	}},
	{"delete-what-is-not-ours", codes.FailedPrecondition, func(s *setup) effect {
		handmade := s.handmade(s.name("not-ours"), rackProject)
		return effect{request: &csi.DeleteVolumeRequest{VolumeId: handmade.Id}}
	}},
	{"delete-again", codes.OK, func(s *setup) effect {
		return effect{request: &csi.DeleteVolumeRequest{VolumeId: nobody}}
	}},
	{"snapshot", codes.OK, func(s *setup) effect {
		name, source := s.name("snapshot"), s.source.GetVolumeId()
		return effect{request: harness.SnapshotRequest(name, source),
			apply: func(state *rackState) {
				state.Snapshots[name] = snapshot{ID: fresh, Disk: source, State: "ready", Size: gib}
				state.Storage += gib
			}}
	}},
	{"snapshot-again", codes.OK, func(s *setup) effect {
		name, source := s.name("snapshot"), s.source.GetVolumeId()
		s.snapshot(name, source)
		return effect{request: harness.SnapshotRequest(name, source)}
	}},
	{"snapshot-of-a-local-disk", codes.FailedPrecondition, func(s *setup) effect {
		return effect{request: harness.SnapshotRequest(s.name("snapshot"), s.local.Id)}
	}},
	{"snapshot-in-another-project", codes.InvalidArgument, func(s *setup) effect {
		return effect{request: harness.SnapshotRequest(s.name("snapshot"), s.foreignDisk.Id)}
	}},
	{"snapshot-of-nothing", codes.NotFound, func(s *setup) effect {
		return effect{request: harness.SnapshotRequest(s.name("snapshot"), nobody)}
	}},
	{"delete-snapshot", codes.OK, func(s *setup) effect {
		name := s.name("snapshot")
		snap := s.snapshot(name, s.source.GetVolumeId())
		return effect{request: &csi.DeleteSnapshotRequest{SnapshotId: snap.GetSnapshotId()},
			apply: func(state *rackState) {
				delete(state.Snapshots, name)
				state.Storage -= gib
			}}
	}},
	{"delete-snapshot-again", codes.OK, func(s *setup) effect {
		return effect{request: &csi.DeleteSnapshotRequest{SnapshotId: nobody}}
	}},
}

func deleteEffect(s *setup, name, id string) effect {
	return effect{request: &csi.DeleteVolumeRequest{VolumeId: id},
		apply: func(state *rackState) {
			delete(state.Disks, name)
			state.Storage -= gib
		}}
}

// readScenarios are scenarios that change nothing.
var readScenarios = []scenario{
	{"list", codes.OK, func(s *setup) effect {
		return effect{request: &csi.ListVolumesRequest{}}
	}},
	{"list-health", codes.OK, func(s *setup) effect {
		return effect{request: &csi.ControllerListVolumeHealthRequest{}}
	}},
	{"get", codes.OK, func(s *setup) effect {
		return effect{request: &csi.ControllerGetVolumeRequest{VolumeId: s.source.GetVolumeId()}}
	}},
	{"get-health", codes.OK, func(s *setup) effect {
		return effect{request: &csi.ControllerGetVolumeHealthRequest{VolumeId: s.source.GetVolumeId()}}
	}},
	{"validate", codes.OK, func(s *setup) effect {
		return effect{request: &csi.ValidateVolumeCapabilitiesRequest{
			VolumeId:           s.source.GetVolumeId(),
			VolumeContext:      s.source.GetVolumeContext(),
			VolumeCapabilities: []*csi.VolumeCapability{harness.Mounted("")},
			Parameters:         map[string]string{"diskType": "distributed"},
		}}
	}},
	{"capacity", codes.OK, func(s *setup) effect {
		return effect{request: &csi.GetCapacityRequest{}}
	}},
	{"list-snapshots", codes.OK, func(s *setup) effect {
		return effect{request: &csi.ListSnapshotsRequest{}}
	}},
	{"list-a-snapshot", codes.OK, func(s *setup) effect {
		return effect{request: &csi.ListSnapshotsRequest{SnapshotId: s.snap.GetSnapshotId()}}
	}},
	{"get-snapshot", codes.OK, func(s *setup) effect {
		return effect{request: &csi.GetSnapshotRequest{SnapshotId: s.snap.GetSnapshotId()}}
	}},
}
