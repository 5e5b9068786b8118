package controller

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
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

// TestB3EveryRequiredFieldIsRequired blanks the required fields of every controller RPC, one at a
// time. No request may reach the rack.
func TestB3EveryRequiredFieldIsRequired(t *testing.T) {
	c := rackThat(t)
	ctx := t.Context()
	for _, test := range []struct {
		name string
		call func() error
	}{
		{"CV-1 CreateVolume without name", func() error {
			r := createRequest()
			r.Name = ""
			_, err := c.CreateVolume(ctx, r)
			return err
		}},
		{"CV-3 CreateVolume without capabilities", func() error {
			r := createRequest()
			r.VolumeCapabilities = nil
			_, err := c.CreateVolume(ctx, r)
			return err
		}},
		{"CV-4 CreateVolume without access mode", func() error {
			r := createRequest()
			r.VolumeCapabilities[0].AccessMode = nil
			_, err := c.CreateVolume(ctx, r)
			return err
		}},
		{"CV-4 CreateVolume without access type", func() error {
			r := createRequest()
			r.VolumeCapabilities[0].AccessType = nil
			_, err := c.CreateVolume(ctx, r)
			return err
		}},
		{"CV-13 CreateVolume with an empty source", func() error {
			r := createRequest()
			r.VolumeContentSource = &csi.VolumeContentSource{}
			_, err := c.CreateVolume(ctx, r)
			return err
		}},
		{"CreateVolume from a snapshot without id", func() error {
			r := createRequest()
			r.VolumeContentSource = fromSnapshot("")
			_, err := c.CreateVolume(ctx, r)
			return err
		}},
		{"DV-1 DeleteVolume", func() error {
			_, err := c.DeleteVolume(ctx, &csi.DeleteVolumeRequest{})
			return err
		}},
		{"CP-1 ControllerPublishVolume without volume", func() error {
			r := publishRequest()
			r.VolumeId = ""
			_, err := c.ControllerPublishVolume(ctx, r)
			return err
		}},
		{"CP-1 ControllerPublishVolume without node", func() error {
			r := publishRequest()
			r.NodeId = ""
			_, err := c.ControllerPublishVolume(ctx, r)
			return err
		}},
		{"CP-1 ControllerPublishVolume without capability", func() error {
			r := publishRequest()
			r.VolumeCapability = nil
			_, err := c.ControllerPublishVolume(ctx, r)
			return err
		}},
		{"CU-1 ControllerUnpublishVolume", func() error {
			_, err := c.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{})
			return err
		}},
		{"VC-1 ValidateVolumeCapabilities without volume", func() error {
			_, err := c.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{
				VolumeCapabilities: []*csi.VolumeCapability{csitest.Filesystem("")}})
			return err
		}},
		{"VC-1 ValidateVolumeCapabilities without capabilities", func() error {
			_, err := c.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{
				VolumeId: racktest.Disk})
			return err
		}},
		{"VH-3 ControllerGetVolumeHealth", func() error {
			_, err := c.ControllerGetVolumeHealth(ctx, &csi.ControllerGetVolumeHealthRequest{})
			return err
		}},
		{"GV-1 ControllerGetVolume", func() error {
			_, err := c.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{})
			return err
		}},
		{"CS-1 CreateSnapshot without name", func() error {
			r := snapshotRequest()
			r.Name = ""
			_, err := c.CreateSnapshot(ctx, r)
			return err
		}},
		{"CS-1 CreateSnapshot without volume", func() error {
			r := snapshotRequest()
			r.SourceVolumeId = ""
			_, err := c.CreateSnapshot(ctx, r)
			return err
		}},
		{"DS-1 DeleteSnapshot", func() error {
			_, err := c.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{})
			return err
		}},
		{"LS-6 GetSnapshot", func() error {
			_, err := c.GetSnapshot(ctx, &csi.GetSnapshotRequest{})
			return err
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if err := test.call(); status.Code(err) != codes.InvalidArgument {
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
	create := func(edit func(*csi.CreateVolumeRequest)) error {
		r := createRequest()
		edit(r)
		_, err := c.CreateVolume(t.Context(), r)
		return err
	}
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
			r.CapacityRange = csitest.Range(0,
				0)
		},
			codes.InvalidArgument, csierr.CapacityInvalid},
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
			csitest.Want(t, create(test.edit), test.code, test.reason)
		})
	}
}

func TestIDsThatAreNotUUIDsNeverReachTheRack(t *testing.T) {
	c := rackThat(t)
	ctx := t.Context()
	must := func(name string, err error) {
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, err := c.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: "fake-vol-id"})
	must("DV-2", err)
	_, err = c.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{
		VolumeId: "fake-vol-id", NodeId: racktest.Instance})
	must("CU-4", err)
	_, err = c.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{
		VolumeId: racktest.Disk, NodeId: "fake-node"})
	must("CU-5", err)
	_, err = c.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: "reallyfakesnapshotid"})
	must("DS-2", err)
	for _, filter := range []*csi.ListSnapshotsRequest{
		{SnapshotId: "none-exist-id"}, {SourceVolumeId: "none-exist-id"},
	} {
		answer, err := c.ListSnapshots(ctx, filter)
		must("LS-3", err)
		if len(answer.GetEntries()) > 0 {
			t.Errorf("LS-3: got %v", answer)
		}
	}

	r := publishRequest()
	r.VolumeId = "fake-vol-id"
	_, err = c.ControllerPublishVolume(ctx, r)
	csitest.Want(t, err, codes.NotFound, csierr.VolumeNotFound)
	r = publishRequest()
	r.NodeId = "fake-node-id"
	_, err = c.ControllerPublishVolume(ctx, r)
	csitest.Want(t, err, codes.NotFound, csierr.InstanceNotFound)
	_, err = c.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: "fake"})
	csitest.Want(t, err, codes.NotFound, csierr.VolumeNotFound)
	_, err = c.ControllerGetVolumeHealth(ctx,
		&csi.ControllerGetVolumeHealthRequest{VolumeId: "fake"})
	csitest.Want(t, err, codes.NotFound, csierr.VolumeNotFound)
	_, err = c.GetSnapshot(ctx, &csi.GetSnapshotRequest{SnapshotId: "fake"})
	csitest.Want(t, err, codes.NotFound, csierr.SnapshotNotFound)
	_, err = c.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{
		VolumeId: "fake", VolumeCapabilities: []*csi.VolumeCapability{csitest.Filesystem("")}})
	csitest.Want(t, err, codes.NotFound, csierr.VolumeNotFound)
	s := snapshotRequest()
	s.SourceVolumeId = "fake"
	_, err = c.CreateSnapshot(ctx, s)
	csitest.Want(t, err, codes.NotFound, csierr.VolumeNotFound)
}

func TestCP2AndCP3ImpossiblePublications(t *testing.T) { // CP-2, CP-3
	c := rackThat(t)
	r := publishRequest()
	r.Readonly = true
	_, err := c.ControllerPublishVolume(t.Context(), r)
	csitest.Want(t, err, codes.InvalidArgument, csierr.ReadOnlyUnsupported)
	r = publishRequest()
	r.VolumeCapability = csitest.InMode(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY)
	_, err = c.ControllerPublishVolume(t.Context(), r)
	csitest.Want(t, err, codes.InvalidArgument, csierr.CapabilityUnsupported)
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
