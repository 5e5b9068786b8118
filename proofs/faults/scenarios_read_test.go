package faults_test

import (
	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// readScenarios are scenarios that change nothing.
var readScenarios = []scenario{
	{"list", codes.OK, func(s *setup) effect {
		return effect{call: callOf(s.ctl.ListVolumes, &csi.ListVolumesRequest{})}
	}},
	{"list-health", codes.OK, func(s *setup) effect {
		return effect{call: callOf(s.ctl.ControllerListVolumeHealth,
			&csi.ControllerListVolumeHealthRequest{})}
	}},
	{"get", codes.OK, func(s *setup) effect {
		return effect{call: callOf(s.ctl.ControllerGetVolume,
			&csi.ControllerGetVolumeRequest{VolumeId: s.source.GetVolumeId()})}
	}},
	{"get-health", codes.OK, func(s *setup) effect {
		return effect{call: callOf(s.ctl.ControllerGetVolumeHealth,
			&csi.ControllerGetVolumeHealthRequest{VolumeId: s.source.GetVolumeId()})}
	}},
	{"validate", codes.OK, func(s *setup) effect {
		return effect{call: callOf(s.ctl.ValidateVolumeCapabilities,
			&csi.ValidateVolumeCapabilitiesRequest{
				VolumeId:           s.source.GetVolumeId(),
				VolumeContext:      s.source.GetVolumeContext(),
				VolumeCapabilities: []*csi.VolumeCapability{harness.Mounted("")},
				Parameters:         map[string]string{"diskType": "distributed"},
			})}
	}},
	{"capacity", codes.OK, func(s *setup) effect {
		return effect{call: callOf(s.ctl.GetCapacity, &csi.GetCapacityRequest{})}
	}},
	{"list-snapshots", codes.OK, func(s *setup) effect {
		return effect{call: callOf(s.ctl.ListSnapshots, &csi.ListSnapshotsRequest{})}
	}},
	{"list-a-snapshot", codes.OK, func(s *setup) effect {
		return effect{call: callOf(s.ctl.ListSnapshots,
			&csi.ListSnapshotsRequest{SnapshotId: s.snap.GetSnapshotId()})}
	}},
	{"get-snapshot", codes.OK, func(s *setup) effect {
		return effect{call: callOf(s.ctl.GetSnapshot,
			&csi.GetSnapshotRequest{SnapshotId: s.snap.GetSnapshotId()})}
	}},
}
