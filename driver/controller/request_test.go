package controller

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

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
			volume.CtxDiskID: racktest.Disk, volume.CtxBlockSize: "4096"},
	}
}

func snapshotRequest() *csi.CreateSnapshotRequest {
	return &csi.CreateSnapshotRequest{Name: "snap-1", SourceVolumeId: racktest.Disk}
}

var (
	creating   = csitest.With[*csi.CreateVolumeRequest]
	publishing = csitest.With[*csi.ControllerPublishVolumeRequest]
)

// without clears a field of a request.
func without(field protoreflect.Name, request proto.Message) proto.Message {
	m := request.ProtoReflect()
	m.Clear(m.Descriptor().Fields().ByName(field))
	return request
}

// capable asks for a volume with the capability of an edit.
func capable(edit func(*csi.VolumeCapability)) *csi.CreateVolumeRequest {
	r := createRequest()
	edit(r.GetVolumeCapabilities()[0])
	return r
}

// TestB3EveryRequiredFieldIsRequired blanks the required fields of every controller RPC, one at a
// time. No request may reach the rack.
func TestB3EveryRequiredFieldIsRequired(t *testing.T) {
	c := rackThat(t)
	validation := &csi.ValidateVolumeCapabilitiesRequest{VolumeId: racktest.Disk,
		VolumeCapabilities: []*csi.VolumeCapability{csitest.Filesystem("")}}
	for _, test := range []struct {
		name    string
		request proto.Message
	}{
		{"CV-1 CreateVolume without name", without("name", createRequest())},
		{"CV-3 CreateVolume without capabilities", without("volume_capabilities", createRequest())},
		{"CV-4 CreateVolume without access mode",
			capable(func(c *csi.VolumeCapability) { c.AccessMode = nil })},
		{"CV-4 CreateVolume without access type",
			capable(func(c *csi.VolumeCapability) { c.AccessType = nil })},
		{"CV-13 CreateVolume with an empty source", from(&csi.VolumeContentSource{})},
		{"CreateVolume from a snapshot without id", from(fromSnapshot(""))},
		{"DV-1 DeleteVolume", &csi.DeleteVolumeRequest{}},
		{"CP-1 ControllerPublishVolume without volume", without("volume_id", publishRequest())},
		{"CP-1 ControllerPublishVolume without node", without("node_id", publishRequest())},
		{"CP-1 ControllerPublishVolume without capability",
			without("volume_capability", publishRequest())},
		{"CU-1 ControllerUnpublishVolume", &csi.ControllerUnpublishVolumeRequest{}},
		{"VC-1 ValidateVolumeCapabilities without volume",
			without("volume_id", proto.CloneOf(validation))},
		{"VC-1 ValidateVolumeCapabilities without capabilities",
			without("volume_capabilities", validation)},
		{"VH-3 ControllerGetVolumeHealth", &csi.ControllerGetVolumeHealthRequest{}},
		{"GV-1 ControllerGetVolume", &csi.ControllerGetVolumeRequest{}},
		{"CS-1 CreateSnapshot without name", without("name", snapshotRequest())},
		{"CS-1 CreateSnapshot without volume", without("source_volume_id", snapshotRequest())},
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

// from asks for a volume from a source, and parameter for one with a parameter.
func from(source *csi.VolumeContentSource) *csi.CreateVolumeRequest {
	r := createRequest()
	r.VolumeContentSource = source
	return r
}

func parameter(key, value string) *csi.CreateVolumeRequest {
	r := createRequest()
	r.Parameters = map[string]string{key: value}
	return r
}

// TestBadRequestsNeverReachTheRack checks requests that are complete but invalid.
func TestBadRequestsNeverReachTheRack(t *testing.T) {
	c := rackThat(t)
	rackAlone := &csi.TopologyRequirement{Requisite: csitest.Topologies("rack=a")}
	for _, test := range []struct {
		name    string
		request proto.Message
		code    codes.Code
		reason  csierr.Reason
	}{
		{"CV-2 a banned character", creating(createRequest(), func(r *csi.CreateVolumeRequest) {
			r.Name = "a\x01"
		}), codes.InvalidArgument, csierr.FieldInvalid},
		{"CV-2 a NEL", creating(createRequest(), func(r *csi.CreateVolumeRequest) {
			r.Name = "a\u0085"
		}), codes.InvalidArgument, csierr.FieldInvalid},
		{"CV-5 B-45 one bad of two", creating(createRequest(), func(r *csi.CreateVolumeRequest) {
			r.VolumeCapabilities = append(r.VolumeCapabilities,
				csitest.InMode(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER))
		}), codes.InvalidArgument, csierr.CapabilityUnsupported},
		{"CV-6 an unknown parameter", parameter("colour", "blue"), codes.InvalidArgument,
			csierr.ParameterInvalid},
		{"CV-6 mkfsOptions for another filesystem", parameter("mkfsOptions", "reflink=true"),
			codes.InvalidArgument, csierr.MkfsOptions},
		{"CV-6 a filesystem with smaller blocks than the disk's", parameter("mkfsOptions",
			"fsBlockSize=1024"), codes.InvalidArgument, csierr.MkfsOptions},
		{"CV-6 more inodes than the disk has room for", parameter("mkfsOptions",
			"bytesPerInode=2048,inodeSize=2048"), codes.InvalidArgument, csierr.MkfsOptions},
		{"CV-6 a key that no sidecar of Kubernetes has", parameter("csi.storage.k8s.io/fstpye",
			"xfs"), codes.InvalidArgument, csierr.ParameterInvalid},
		{"CV-5 a mount flag that the filesystem refuses", capable(func(c *csi.VolumeCapability) {
			c.GetMount().MountFlags = []string{"ro,noload"}
		}), codes.InvalidArgument, csierr.MountFlags},
		{"CV-7 mutable parameters", creating(createRequest(), func(r *csi.CreateVolumeRequest) {
			r.MutableParameters = map[string]string{"a": "b"}
		}), codes.InvalidArgument, csierr.ParameterInvalid},
		{"CV-8 topology that is not declared", creating(createRequest(),
			func(r *csi.CreateVolumeRequest) { r.AccessibilityRequirements = rackAlone }),
			codes.InvalidArgument, csierr.TopologyInvalid},
		{"CV-8 a placement that nodes do not report", parameter("placement", "instance"),
			codes.InvalidArgument, csierr.TopologyInvalid},
		{"CV-11 an empty range", creating(createRequest(), func(r *csi.CreateVolumeRequest) {
			r.CapacityRange = csitest.Range(0, 0)
		}), codes.InvalidArgument, csierr.CapacityInvalid},
		{"CV-12 a range that no disk fits", creating(createRequest(), func(r *csi.CreateVolumeRequest) {
			r.CapacityRange = csitest.Range(1024*volume.GiB, 0)
		}), codes.OutOfRange, csierr.CapacityOutOfRange},
		{"CV-13 a clone", from(&csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
			Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: racktest.Disk}}}),
			codes.InvalidArgument, csierr.SourceUnsupported},
		{"CV-14 a snapshot id that is no UUID", from(fromSnapshot("non-existing-snapshot-id")),
			codes.NotFound, csierr.SnapshotNotFound},
		{"CV-15 a snapshot and an image", creating(parameter("imageId", racktest.Image), restoring),
			codes.InvalidArgument, csierr.SourceIncompatible},
		{"CV-15 a snapshot into a local disk", creating(parameter("diskType", "local"), restoring),
			codes.InvalidArgument, csierr.SourceIncompatible},
		{"CP-3 a disk that is attached read-only", publishing(publishRequest(),
			func(r *csi.ControllerPublishVolumeRequest) { r.Readonly = true }), codes.InvalidArgument,
			csierr.ReadOnlyUnsupported},
		{"CP-2 a mode that volumes do not have", publishing(publishRequest(),
			func(r *csi.ControllerPublishVolumeRequest) {
				r.VolumeCapability = csitest.InMode(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY)
			}), codes.InvalidArgument, csierr.CapabilityUnsupported},
		{"CS-2 a banned character", &csi.CreateSnapshotRequest{Name: "\x7f",
			SourceVolumeId: racktest.Disk}, codes.InvalidArgument, csierr.FieldInvalid},
		{"CS-3 a parameter of a snapshot", &csi.CreateSnapshotRequest{Name: "snap-1",
			SourceVolumeId: racktest.Disk, Parameters: map[string]string{"a": "b"}},
			codes.InvalidArgument, csierr.ParameterInvalid},
		{"CS-3 the topology of a snapshot", &csi.CreateSnapshotRequest{Name: "snap-1",
			SourceVolumeId: racktest.Disk, AccessibilityRequirements: rackAlone}, codes.InvalidArgument,
			csierr.TopologyInvalid},
	} {
		t.Run(test.name, func(t *testing.T) {
			csitest.Want(t, csitest.Call(t.Context(), c, test.request), test.code, test.reason)
		})
	}
}

// restoring lets a request ask for a volume from the snapshot.
func restoring(r *csi.CreateVolumeRequest) {
	r.VolumeContentSource = fromSnapshot(racktest.Snapshot)
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

func TestEX1AndMV1ExpandAndModifyAreNotSupported(t *testing.T) {
	c := &Service{}
	_, err := c.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{})
	csitest.Want(t, err, codes.Unimplemented, csierr.NotSupported)
	_, err = c.ControllerModifyVolume(t.Context(), &csi.ControllerModifyVolumeRequest{})
	csitest.Want(t, err, codes.Unimplemented, csierr.NotSupported)
}
