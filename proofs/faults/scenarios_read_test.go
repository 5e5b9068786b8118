package faults_test

import (
	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

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
