package faults_test

import (
	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
)

// readScenes only look.
var readScenes = []scene{
	{"list", codes.OK, func(s *stage) act {
		return act{call: calling(s.ctl.ListVolumes, &csi.ListVolumesRequest{})}
	}},
	{"list-health", codes.OK, func(s *stage) act {
		return act{call: calling(s.ctl.ControllerListVolumeHealth,
			&csi.ControllerListVolumeHealthRequest{})}
	}},
	{"get", codes.OK, func(s *stage) act {
		return act{call: calling(s.ctl.ControllerGetVolume,
			&csi.ControllerGetVolumeRequest{VolumeId: s.source.GetVolumeId()})}
	}},
	{"get-health", codes.OK, func(s *stage) act {
		return act{call: calling(s.ctl.ControllerGetVolumeHealth,
			&csi.ControllerGetVolumeHealthRequest{VolumeId: s.source.GetVolumeId()})}
	}},
	{"validate", codes.OK, func(s *stage) act {
		return act{call: calling(s.ctl.ValidateVolumeCapabilities,
			&csi.ValidateVolumeCapabilitiesRequest{
				VolumeId:           s.source.GetVolumeId(),
				VolumeContext:      s.source.GetVolumeContext(),
				VolumeCapabilities: []*csi.VolumeCapability{capability()},
				Parameters:         map[string]string{"diskType": "distributed"},
			})}
	}},
	{"capacity", codes.OK, func(s *stage) act {
		return act{call: calling(s.ctl.GetCapacity, &csi.GetCapacityRequest{})}
	}},
	{"list-snapshots", codes.OK, func(s *stage) act {
		return act{call: calling(s.ctl.ListSnapshots, &csi.ListSnapshotsRequest{})}
	}},
	{"list-a-snapshot", codes.OK, func(s *stage) act {
		return act{call: calling(s.ctl.ListSnapshots,
			&csi.ListSnapshotsRequest{SnapshotId: s.snap.GetSnapshotId()})}
	}},
	{"get-snapshot", codes.OK, func(s *stage) act {
		return act{call: calling(s.ctl.GetSnapshot,
			&csi.GetSnapshotRequest{SnapshotId: s.snap.GetSnapshotId()})}
	}},
}
