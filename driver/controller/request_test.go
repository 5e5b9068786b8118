package controller

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// Complete requests, as an orchestrator sends them.
func createRequest() *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{
		Name:               "pvc-1",
		VolumeCapabilities: []*csi.VolumeCapability{csitest.Filesystem("ext4")},
	}
}

func publishRequest() *csi.ControllerPublishVolumeRequest {
	return &csi.ControllerPublishVolumeRequest{
		VolumeId: racktest.Disk, NodeId: racktest.Instance, VolumeCapability: csitest.Filesystem("ext4"),
		VolumeContext: map[string]string{volume.CtxDiskName: volume.DiskName("blue", "pvc-1"),
			volume.CtxDiskID:    racktest.Disk,
			volume.CtxBlockSize: "4096"},
	}
}

func snapshotRequest() *csi.CreateSnapshotRequest {
	return &csi.CreateSnapshotRequest{Name: "snap-1", SourceVolumeId: racktest.Disk}
}

var (
	creating   = csitest.With[*csi.CreateVolumeRequest]
	publishing = csitest.With[*csi.ControllerPublishVolumeRequest]
)

// TestB3EveryRequiredFieldIsRequired blanks the required fields of every controller RPC, one at a
// time. No request may reach the rack.
func TestB3EveryRequiredFieldIsRequired(t *testing.T) {
	c := rackThat(t)
	anyCapability := []*csi.VolumeCapability{csitest.Filesystem("")}
	for _, test := range []struct {
		name    string
		request proto.Message
	}{
		{"CV-1 CreateVolume without name",
			creating(createRequest(), func(r *csi.CreateVolumeRequest) { r.Name = "" })},
		{"CV-3 CreateVolume without capabilities",
			creating(createRequest(), func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities = nil })},
		{"CV-4 CreateVolume without access mode", creating(createRequest(),
			func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0].AccessMode = nil })},
		{"CV-4 CreateVolume without access type", creating(createRequest(),
			func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0].AccessType = nil })},
		{"CV-13 CreateVolume with an empty source", creating(createRequest(),
			func(r *csi.CreateVolumeRequest) { r.VolumeContentSource = &csi.VolumeContentSource{} })},
		{"CreateVolume from a snapshot without id", creating(createRequest(),
			func(r *csi.CreateVolumeRequest) { r.VolumeContentSource = fromSnapshot("") })},
		{"DV-1 DeleteVolume", &csi.DeleteVolumeRequest{}},
		{"CP-1 ControllerPublishVolume without volume", publishing(publishRequest(),
			func(r *csi.ControllerPublishVolumeRequest) { r.VolumeId = "" })},
		{"CP-1 ControllerPublishVolume without node", publishing(publishRequest(),
			func(r *csi.ControllerPublishVolumeRequest) { r.NodeId = "" })},
		{"CP-1 ControllerPublishVolume without capability", publishing(publishRequest(),
			func(r *csi.ControllerPublishVolumeRequest) { r.VolumeCapability = nil })},
		{"CU-1 ControllerUnpublishVolume", &csi.ControllerUnpublishVolumeRequest{}},
		{"VC-1 ValidateVolumeCapabilities without volume",
			&csi.ValidateVolumeCapabilitiesRequest{VolumeCapabilities: anyCapability}},
		{"VC-1 ValidateVolumeCapabilities without capabilities",
			&csi.ValidateVolumeCapabilitiesRequest{VolumeId: racktest.Disk}},
		{"VH-3 ControllerGetVolumeHealth", &csi.ControllerGetVolumeHealthRequest{}},
		{"GV-1 ControllerGetVolume", &csi.ControllerGetVolumeRequest{}},
		{"CS-1 CreateSnapshot without name", &csi.CreateSnapshotRequest{SourceVolumeId: racktest.Disk}},
		{"CS-1 CreateSnapshot without volume", &csi.CreateSnapshotRequest{Name: "snap-1"}},
		{"DS-1 DeleteSnapshot", &csi.DeleteSnapshotRequest{}},
		{"LS-6 GetSnapshot", &csi.GetSnapshotRequest{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := csitest.Call(t.Context(), c, test.request)
			if status.Code(err) != codes.InvalidArgument {
				t.Errorf("got %v", err)
			}
		})
	}
}

func fromSnapshot(id string) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id},
	}}
}

// TestBadRequestsNeverReachTheRack checks requests that are complete but invalid.
func TestBadRequestsNeverReachTheRack(t *testing.T) {
	c := rackThat(t)
	for _, test := range []struct {
		name   string
		edit   func(*csi.CreateVolumeRequest)
		code   codes.Code
		reason csierr.Reason
	}{
		{"CV-2 a banned character", func(r *csi.CreateVolumeRequest) { r.Name = "a\x01" },
			codes.InvalidArgument, csierr.FieldInvalid},
		{"CV-2 a NEL", func(r *csi.CreateVolumeRequest) { r.Name = "a\u0085" },
			codes.InvalidArgument, csierr.FieldInvalid},
		{"CV-5 one bad capability of two", func(r *csi.CreateVolumeRequest) {
			r.VolumeCapabilities = append(r.VolumeCapabilities,
				csitest.InMode(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER))
		}, codes.InvalidArgument, csierr.CapabilityUnsupported},
		{"CV-6 an unknown parameter", func(r *csi.CreateVolumeRequest) {
			r.Parameters = map[string]string{"colour": "blue"}
		}, codes.InvalidArgument, csierr.ParameterInvalid},
		{"CV-6 mkfsOptions for another filesystem", func(r *csi.CreateVolumeRequest) {
			r.Parameters = map[string]string{"mkfsOptions": "reflink=true"}
		}, codes.InvalidArgument, csierr.MkfsOptions},
		{"CV-6 a filesystem with smaller blocks than the disk's", func(r *csi.CreateVolumeRequest) {
			r.Parameters = map[string]string{"mkfsOptions": "fsBlockSize=1024"}
		}, codes.InvalidArgument, csierr.MkfsOptions},
		{"CV-6 more inodes than the disk has room for", func(r *csi.CreateVolumeRequest) {
			r.Parameters = map[string]string{"mkfsOptions": "bytesPerInode=2048,inodeSize=2048"}
		}, codes.InvalidArgument, csierr.MkfsOptions},
		{"CV-6 a key that no sidecar of Kubernetes has", func(r *csi.CreateVolumeRequest) {
			r.Parameters = map[string]string{"csi.storage.k8s.io/fstpye": "xfs"}
		}, codes.InvalidArgument, csierr.ParameterInvalid},
		{"CV-5 a mount flag that the filesystem refuses", func(r *csi.CreateVolumeRequest) {
			r.VolumeCapabilities[0].GetMount().MountFlags = []string{"ro,noload"}
		}, codes.InvalidArgument, csierr.MountFlags},
		{"CV-7 mutable parameters", func(r *csi.CreateVolumeRequest) {
			r.MutableParameters = map[string]string{"a": "b"}
		}, codes.InvalidArgument, csierr.ParameterInvalid},
		{"CV-8 topology that is not declared", func(r *csi.CreateVolumeRequest) {
			r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: csitest.Topologies("rack=a")}
		}, codes.InvalidArgument, csierr.TopologyInvalid},
		{"CV-8 a placement that nodes do not report", func(r *csi.CreateVolumeRequest) {
			r.Parameters = map[string]string{"placement": "instance"}
		}, codes.InvalidArgument, csierr.TopologyInvalid},
		{"CV-11 an empty range", func(r *csi.CreateVolumeRequest) {
			r.CapacityRange = csitest.Range(0, 0)
		}, codes.InvalidArgument, csierr.CapacityInvalid},
		{"CV-12 a range that no disk fits", func(r *csi.CreateVolumeRequest) {
			r.CapacityRange = csitest.Range(1024*volume.GiB, 0)
		}, codes.OutOfRange, csierr.CapacityOutOfRange},
		{"CV-13 a clone", func(r *csi.CreateVolumeRequest) {
			r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
				Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: racktest.Disk}}}
		}, codes.InvalidArgument, csierr.SourceUnsupported},
		{"CV-14 a snapshot id that is no UUID", func(r *csi.CreateVolumeRequest) {
			r.VolumeContentSource = fromSnapshot("non-existing-snapshot-id")
		}, codes.NotFound, csierr.SnapshotNotFound},
		{"CV-15 a snapshot and an image", func(r *csi.CreateVolumeRequest) {
			r.VolumeContentSource = fromSnapshot(racktest.Snapshot)
			r.Parameters = map[string]string{"imageId": racktest.Image}
		}, codes.InvalidArgument, csierr.SourceIncompatible},
		{"CV-15 a snapshot into a local disk", func(r *csi.CreateVolumeRequest) {
			r.VolumeContentSource = fromSnapshot(racktest.Snapshot)
			r.Parameters = map[string]string{"diskType": "local"}
		}, codes.InvalidArgument, csierr.SourceIncompatible},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := c.CreateVolume(t.Context(), creating(createRequest(), test.edit))
			csitest.Want(t, err, test.code, test.reason)
		})
	}
}

func TestIDsThatAreNotUUIDsNeverReachTheRack(t *testing.T) {
	c := rackThat(t)
	for _, test := range []struct {
		name    string
		request proto.Message
		reason  csierr.Reason // of NOT_FOUND; none means success
	}{
		{"DV-2", &csi.DeleteVolumeRequest{VolumeId: "fake-vol-id"}, ""},
		{"CU-4", &csi.ControllerUnpublishVolumeRequest{VolumeId: "fake-vol-id",
			NodeId: racktest.Instance}, ""},
		{"CU-5", &csi.ControllerUnpublishVolumeRequest{VolumeId: racktest.Disk, NodeId: "fake-node"}, ""},
		{"DS-2", &csi.DeleteSnapshotRequest{SnapshotId: "reallyfakesnapshotid"}, ""},
		{"LS-3 a snapshot", &csi.ListSnapshotsRequest{SnapshotId: "none-exist-id"}, ""},
		{"LS-3 a volume", &csi.ListSnapshotsRequest{SourceVolumeId: "none-exist-id"}, ""},
		{"publish a volume", publishing(publishRequest(),
			func(r *csi.ControllerPublishVolumeRequest) { r.VolumeId = "fake-vol-id" }),
			csierr.VolumeNotFound},
		{"publish to a node", publishing(publishRequest(),
			func(r *csi.ControllerPublishVolumeRequest) { r.NodeId = "fake-node-id" }),
			csierr.InstanceNotFound},
		{"get a volume", &csi.ControllerGetVolumeRequest{VolumeId: "fake"}, csierr.VolumeNotFound},
		{"health", &csi.ControllerGetVolumeHealthRequest{VolumeId: "fake"}, csierr.VolumeNotFound},
		{"get a snapshot", &csi.GetSnapshotRequest{SnapshotId: "fake"}, csierr.SnapshotNotFound},
		{"validate", &csi.ValidateVolumeCapabilitiesRequest{VolumeId: "fake",
			VolumeCapabilities: []*csi.VolumeCapability{csitest.Filesystem("")}}, csierr.VolumeNotFound},
		{"take a snapshot", &csi.CreateSnapshotRequest{Name: "snap-1", SourceVolumeId: "fake"},
			csierr.VolumeNotFound},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := csitest.Call(t.Context(), c, test.request)
			if test.reason == "" {
				must(t, err)
			} else {
				csitest.Want(t, err, codes.NotFound, test.reason)
			}
		})
	}
}

func TestCP2AndCP3ImpossiblePublications(t *testing.T) { // CP-2, CP-3
	for reason, edit := range map[csierr.Reason]func(*csi.ControllerPublishVolumeRequest){
		csierr.ReadOnlyUnsupported: func(r *csi.ControllerPublishVolumeRequest) { r.Readonly = true },
		csierr.CapabilityUnsupported: func(r *csi.ControllerPublishVolumeRequest) {
			r.VolumeCapability = csitest.InMode(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY)
		},
	} {
		_, err := rackThat(t).ControllerPublishVolume(t.Context(), publishing(publishRequest(), edit))
		csitest.Want(t, err, codes.InvalidArgument, reason)
	}
}

func TestCS2AndCS3ImpossibleSnapshots(t *testing.T) { // CS-2, CS-3
	c := rackThat(t)
	for reason, edit := range map[csierr.Reason]func(*csi.CreateSnapshotRequest){
		csierr.FieldInvalid: func(r *csi.CreateSnapshotRequest) { r.Name = "\x7f" },
		csierr.ParameterInvalid: func(r *csi.CreateSnapshotRequest) {
			r.Parameters = map[string]string{"a": "b"}
		},
		csierr.TopologyInvalid: func(r *csi.CreateSnapshotRequest) {
			r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: csitest.Topologies("rack=a")}
		},
	} {
		r := snapshotRequest()
		edit(r)
		_, err := c.CreateSnapshot(t.Context(), r)
		csitest.Want(t, err, codes.InvalidArgument, reason)
	}
}

func TestEX1AndMV1ExpandAndModifyAreNotSupported(t *testing.T) {
	c := &Service{}
	_, err := c.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{})
	csitest.Want(t, err, codes.Unimplemented, csierr.NotSupported)
	_, err = c.ControllerModifyVolume(t.Context(), &csi.ControllerModifyVolumeRequest{})
	csitest.Want(t, err, codes.Unimplemented, csierr.NotSupported)
}
