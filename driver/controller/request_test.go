package controller

import (
	"log/slog"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
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

func fromSnapshot(id string) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id},
	}}
}

// from requests a volume from a source, and parameter a volume with a parameter.
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

func TestBadRequestsNeverReachTheRack(t *testing.T) { // B-3
	c := rackThat(t)
	rackAlone := &csi.TopologyRequirement{Requisite: csitest.Topologies("rack=a")}
	for _, test := range []struct {
		name    string
		request proto.Message
		ends    func(*testing.T, error)
	}{
		{"a name with a NEL (CV-2)", creating(createRequest(), func(r *csi.CreateVolumeRequest) {
			r.Name = "a\u0085"
		}), fails(csierr.FieldInvalid)},
		{"a bad capability (CV-5, B-45)", creating(createRequest(), func(r *csi.CreateVolumeRequest) {
			r.VolumeCapabilities = append(r.VolumeCapabilities,
				csitest.InMode(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER))
		}), fails(csierr.CapabilityUnsupported)},
		{"an unknown parameter (CV-6)", parameter("colour", "blue"), fails(csierr.ParameterInvalid)},
		{"a filesystem with smaller blocks than the disk's (CV-6)", parameter("mkfsOptions",
			"fsBlockSize=1024"), fails(csierr.MkfsOptions)},
		{"more inodes than the disk has room for (CV-6)", parameter("mkfsOptions",
			"bytesPerInode=2048,inodeSize=2048"), fails(csierr.MkfsOptions)},
		{"an attach without a volume (CP-1)", publishing(publishRequest(),
			func(r *csi.ControllerPublishVolumeRequest) { r.VolumeId = "" }), fails(csierr.VolumeIDMissing)},
		{"an attach without a node (CP-1)", publishing(publishRequest(),
			func(r *csi.ControllerPublishVolumeRequest) { r.NodeId = "" }), fails(csierr.FieldMissing)},
		{"capabilities of no volume (VC-1)", &csi.ValidateVolumeCapabilitiesRequest{
			VolumeCapabilities: []*csi.VolumeCapability{csitest.Filesystem("")}},
			fails(csierr.VolumeIDMissing)},
		{"mutable parameters (CV-7)", creating(createRequest(), func(r *csi.CreateVolumeRequest) {
			r.MutableParameters = map[string]string{"a": "b"}
		}), fails(csierr.ParameterInvalid)},
		{"a placement that nodes do not report (CV-8)", parameter("placement", "instance"),
			fails(csierr.TopologyInvalid)},
		{"a range that no disk fits (CV-12)", creating(createRequest(), func(r *csi.CreateVolumeRequest) {
			r.CapacityRange = csitest.Range(1024*volume.GiB, 0)
		}), fails(csierr.CapacityOutOfRange)},
		{"a clone (CV-13)", from(&csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
			Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: racktest.Disk}}}),
			fails(csierr.SourceUnsupported)},
		{"an empty source (CV-13)", from(&csi.VolumeContentSource{}), fails(csierr.SourceUnsupported)},
		{"a source without a snapshot id", from(fromSnapshot("")), fails(csierr.FieldMissing)},
		{"a volume without an id (GV-1)", &csi.ControllerGetVolumeRequest{},
			fails(csierr.VolumeIDMissing)},
		{"a snapshot without an id (LS-6)", &csi.GetSnapshotRequest{}, fails(csierr.FieldMissing)},
		{"a snapshot id that is no UUID (CV-14)", from(fromSnapshot("non-existing-snapshot-id")),
			fails(csierr.SnapshotNotFound)},
		{"a snapshot and an image (CV-15)", creating(parameter("imageId", racktest.Image), restoring),
			fails(csierr.SourceIncompatible)},
		{"a snapshot into a local disk (CV-15)", creating(parameter("diskType", "local"), restoring),
			fails(csierr.SourceIncompatible)},
		{"a disk that is attached read-only (CP-3)", publishing(publishRequest(),
			func(r *csi.ControllerPublishVolumeRequest) { r.Readonly = true }),
			fails(csierr.ReadOnlyUnsupported)},
		{"a mode that volumes do not have (CP-2)", publishing(publishRequest(),
			func(r *csi.ControllerPublishVolumeRequest) {
				r.VolumeCapability = csitest.InMode(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY)
			}), fails(csierr.CapabilityUnsupported)},
		{"a snapshot's name with a banned character (CS-2)", &csi.CreateSnapshotRequest{Name: "\x7f",
			SourceVolumeId: racktest.Disk}, fails(csierr.FieldInvalid)},
		{"a parameter of a snapshot (CS-3)", &csi.CreateSnapshotRequest{Name: "snap-1",
			SourceVolumeId: racktest.Disk, Parameters: map[string]string{"a": "b"}},
			fails(csierr.ParameterInvalid)},
		{"a topology for a snapshot (CS-3)", &csi.CreateSnapshotRequest{Name: "snap-1",
			SourceVolumeId: racktest.Disk, AccessibilityRequirements: rackAlone},
			fails(csierr.TopologyInvalid)},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.ends(t, csitest.Call(t.Context(), c, test.request))
		})
	}
}

func restoring(r *csi.CreateVolumeRequest) {
	r.VolumeContentSource = fromSnapshot(racktest.Snapshot)
}

func TestIDsThatAreNotUUIDsNeverReachTheRack(t *testing.T) {
	c := rackThat(t)
	for _, test := range []struct {
		name    string
		request proto.Message
		ends    func(*testing.T, error)
	}{
		{"DV-2", &csi.DeleteVolumeRequest{VolumeId: "fake-vol-id"}, ok},
		{"CU-4", &csi.ControllerUnpublishVolumeRequest{VolumeId: "fake-vol-id",
			NodeId: racktest.Instance}, ok},
		{"CU-5", &csi.ControllerUnpublishVolumeRequest{VolumeId: racktest.Disk, NodeId: "fake-node"}, ok},
		{"DS-2", &csi.DeleteSnapshotRequest{SnapshotId: "reallyfakesnapshotid"}, ok},
		{"a snapshot (LS-3)", &csi.ListSnapshotsRequest{SnapshotId: "none-exist-id"}, ok},
		{"a volume (LS-3)", &csi.ListSnapshotsRequest{SourceVolumeId: "none-exist-id"}, ok},
		{"publish a volume", publishing(publishRequest(),
			func(r *csi.ControllerPublishVolumeRequest) { r.VolumeId = "fake-vol-id" }),
			fails(csierr.VolumeNotFound)},
		{"publish to a node", publishing(publishRequest(),
			func(r *csi.ControllerPublishVolumeRequest) { r.NodeId = "fake-node-id" }),
			fails(csierr.InstanceNotFound)},
		{"get a volume", &csi.ControllerGetVolumeRequest{VolumeId: "fake"}, fails(csierr.VolumeNotFound)},
		{"health", &csi.ControllerGetVolumeHealthRequest{VolumeId: "fake"}, fails(csierr.VolumeNotFound)},
		{"get a snapshot", &csi.GetSnapshotRequest{SnapshotId: "fake"}, fails(csierr.SnapshotNotFound)},
		{"validate", &csi.ValidateVolumeCapabilitiesRequest{VolumeId: "fake",
			VolumeCapabilities: []*csi.VolumeCapability{csitest.Filesystem("")}},
			fails(csierr.VolumeNotFound)},
		{"take a snapshot", &csi.CreateSnapshotRequest{Name: "snap-1", SourceVolumeId: "fake"},
			fails(csierr.VolumeNotFound)},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.ends(t, csitest.Call(t.Context(), c, test.request))
		})
	}
}

func TestExpandAndModifyAreNotSupported(t *testing.T) { // EX-1, MV-1
	for _, request := range []proto.Message{&csi.ControllerExpandVolumeRequest{},
		&csi.ControllerModifyVolumeRequest{}} {
		fails(csierr.NotSupported)(t, csitest.Call(t.Context(), &Service{}, request))
	}
}

var (
	must, ok     = csitest.Must, csitest.OK
	fails, coded = csitest.Fails, csitest.Coded
	unseen       = coded(codes.PermissionDenied, csierr.ProjectNotFound, "OXIDE_PROJECT")
	with         = racktest.With
	// diskOf, snapshotOf and pageOf return what a rack responds.
	diskOf, snapshotOf, pageOf = racktest.DiskOf, racktest.SnapshotOf, racktest.PageOf
)

type script = []racktest.Exchange

// The states of a disk at the instance.
const (
	here      = racktest.AttachedHere
	attaching = "attaching " + racktest.Instance
	detaching = "detaching " + racktest.Instance
)

type edit = func(map[string]any)

func tagged(tag volume.Tag) edit { return with("description", tag.Description()) }

// shown is a read of the volume's disk in a state, and named is a read by the disk's name. snap and
// snapNamed are the same reads of a snapshot, and instance is a read of the instance.
func shown(state string, edits ...edit) racktest.Exchange {
	return racktest.OK(racktest.ViewDisk, diskOf(state, edits...))
}

func named(state string, edits ...edit) racktest.Exchange {
	return racktest.OK(viewName, diskOf(state, edits...))
}

func snap(state string, edits ...edit) racktest.Exchange {
	return racktest.OK(viewSnap, snapshotOf(state, edits...))
}

func snapNamed(state string, edits ...edit) racktest.Exchange {
	return racktest.OK(viewSnapName, snapshotOf(state, edits...))
}

func instance(state string, edits ...edit) racktest.Exchange {
	return racktest.OK(viewInstance, racktest.InstanceOf(state, edits...))
}

func listing(disks ...string) racktest.Exchange {
	return racktest.OK(beside, pageOf("", disks...))
}

var (
	// free is a read of the detached disk, and held of the disk that is attached to the instance.
	free, held = shown("detached"), shown(here)
	// noDisk is a read that does not find the disk. gone proves that it is deleted: the rack then
	// finds the project, and again not the disk.
	gone       = script{noDisk, ownProject, ownUser, noDisk}
	noDisk     = racktest.NotFound.To(racktest.ViewDisk)
	ownProject = racktest.OK(racktest.ViewProject, racktest.ProjectOf())
	ownUser    = racktest.OK(racktest.ViewUser, racktest.UserOf(racktest.Silo))
	noProject  = racktest.NotFound.To(racktest.ViewProject)
	// noName and the others are reads that find nothing.
	noName     = racktest.NotFound.To(viewName)
	noSnap     = racktest.NotFound.To(viewSnap)
	noSnapName = racktest.NotFound.To(viewSnapName)
	noInstance = racktest.NotFound.To(beside)
	// noInstances and oneInstance list the project's instances.
	noInstances = racktest.OK("GET /v1/instances", pageOf(""))
	oneInstance = racktest.OK("GET /v1/instances", pageOf("", racktest.InstanceOf("running")))
	// These are responses to a change.
	attachingNow = accepted(attach, diskOf(attaching))
	detachingNow = accepted(detach, diskOf(detaching))
	attachedNow  = accepted(attach, diskOf(here))
	detachedNow  = accepted(detach, diskOf("detached"))
	deleted      = racktest.Exchange{Want: racktest.DeleteDisk, Status: 204}
	lostAttach   = racktest.Exchange{Want: attach, Cut: true}
	lostDetach   = racktest.Exchange{Want: detach, Cut: true}
	lostCreate   = racktest.Exchange{Want: postDisk, Cut: true}
	lostSnap     = racktest.Exchange{Want: postSnap, Cut: true}
	lostDelete   = racktest.Exchange{Want: racktest.DeleteDisk, Cut: true}
	deletedSnap  = racktest.Exchange{Want: deleteSnap, Status: 204}
	noAttach     = racktest.Refused.To(attach)
	noDetach     = racktest.Refused.To(detach)
	noDelete     = racktest.Refused.To(racktest.DeleteDisk)
	noTaking     = racktest.Refused.To(postSnap)
	forbidden    = racktest.Error(403, "Forbidden", "Forbidden")
	later        = racktest.Error(503, "ServiceNotAvailable", "later")
)

// scriptedCalls are calls to scripted racks, with the checks of their errors.
type scriptedCalls []struct {
	name  string
	lines script
	ends  func(*testing.T, error)
}

func (all scriptedCalls) after(lines ...racktest.Exchange) scriptedCalls {
	for i := range all {
		all[i].lines = slices.Concat(lines, all[i].lines)
	}
	return all
}

// try makes the calls with a request. Those that succeed have to return want, unless want is nil.
func (all scriptedCalls) try(t *testing.T, request, want proto.Message) {
	t.Helper()
	for _, s := range all {
		t.Run(s.name, func(t *testing.T) {
			answer, err := csitest.Answer(t.Context(), rackThat(t, s.lines...), request)
			if s.ends(t, err); err == nil && want != nil {
				csitest.SameMessage(t, answer, want)
			}
		})
	}
}

// scripted makes a call to a scripted rack.
func scripted(t *testing.T, request proto.Message, lines ...racktest.Exchange) error {
	t.Helper()
	return csitest.Call(t.Context(), rackThat(t, lines...), request)
}

func rackThat(t *testing.T, lines ...racktest.Exchange) *Service {
	t.Helper()
	return controllerFor(t, racktest.Serve(t, lines...))
}

func controllerFor(t *testing.T, url string) *Service {
	t.Helper()
	client, closeIdle, err := rack.New(rack.Options{Host: url, Project: racktest.Project,
		UserAgent: "test"}, &rack.Transport{Tokens: &rack.TokenSource{Fixed: racktest.Token}})
	must(t, err)
	t.Cleanup(closeIdle)
	return &Service{Rack: client, ClusterID: "blue", Log: slog.New(slog.DiscardHandler)}
}

func instanceAt(location string) []*csi.Topology {
	return csitest.Topologies(location + "instance=" + racktest.Instance)
}

var rackA = []volume.Segments{{volume.TopologyPrefix + "rack": "a"}}
