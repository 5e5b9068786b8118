package controller

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func createRequest() *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{
		Name:               "pvc-1",
		VolumeCapabilities: []*csi.VolumeCapability{csitest.Filesystem("ext4")},
	}
}

func publishRequest() *csi.ControllerPublishVolumeRequest {
	return &csi.ControllerPublishVolumeRequest{
		VolumeId: racktest.Disk, NodeId: racktest.Instance, VolumeCapability: csitest.Filesystem("ext4"),
		VolumeContext: map[string]string{volume.CtxDiskName: ownName,
			volume.CtxDiskID: racktest.Disk, volume.CtxBlockSize: "4096"},
	}
}

func snapshotRequest() *csi.CreateSnapshotRequest {
	return &csi.CreateSnapshotRequest{Name: "snap-1", SourceVolumeId: racktest.Disk}
}

func edited[R proto.Message](request R, field protoreflect.Name, value any) R {
	if message, ok := value.(proto.Message); ok {
		value = message.ProtoReflect()
	}
	m := request.ProtoReflect()
	m.Set(m.Descriptor().Fields().ByName(field), protoreflect.ValueOf(value))
	return request
}

func fromSnapshot(id string) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id},
	}}
}

func from(source *csi.VolumeContentSource, r *csi.CreateVolumeRequest) *csi.CreateVolumeRequest {
	return edited(r, "volume_content_source", source)
}

func restoring(r *csi.CreateVolumeRequest) *csi.CreateVolumeRequest {
	return from(fromSnapshot(racktest.Snapshot), r)
}

func parameter(key, value string) *csi.CreateVolumeRequest {
	r := createRequest()
	r.Parameters = map[string]string{key: value}
	return r
}

func TestBadRequestsAndIDsNeverReachTheRack(t *testing.T) { // B-3
	c := rackThat(t)
	mutable := createRequest()
	mutable.MutableParameters = map[string]string{"a": "b"}
	manyWriters := createRequest()
	manyWriters.VolumeCapabilities = append(manyWriters.VolumeCapabilities,
		csitest.InMode(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER))
	clone := &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: racktest.Disk}}}
	for _, test := range []struct {
		name    string
		request proto.Message
		ends    func(*testing.T, error)
	}{
		{"a name with a NEL (CV-2)", edited(createRequest(), "name", "a\u0085"),
			fails(csierr.FieldInvalid)},
		{"a bad capability (CV-5, B-45)", manyWriters, fails(csierr.CapabilityUnsupported)},
		{"an unknown parameter (CV-6)", parameter("colour", "blue"), fails(csierr.ParameterInvalid)},
		{"a filesystem with smaller blocks than the disk's (CV-6)", parameter("mkfsOptions",
			"fsBlockSize=1024"), fails(csierr.MkfsOptions)},
		{"more inodes than the disk has room for (CV-6)", parameter("mkfsOptions",
			"bytesPerInode=2048,inodeSize=2048"), fails(csierr.MkfsOptions)},
		{"an attach without a volume (CP-1)", edited(publishRequest(), "volume_id", ""),
			fails(csierr.VolumeIDMissing)},
		{"an attach without a node (CP-1)", edited(publishRequest(), "node_id", ""),
			fails(csierr.FieldMissing)},
		{"capabilities of no volume (VC-1)", &csi.ValidateVolumeCapabilitiesRequest{
			VolumeCapabilities: []*csi.VolumeCapability{csitest.Filesystem("")}},
			fails(csierr.VolumeIDMissing)},
		{"mutable parameters (CV-7)", mutable, fails(csierr.ParameterInvalid)},
		{"a placement that nodes do not report (CV-8)", parameter("placement", "instance"),
			fails(csierr.TopologyInvalid)},
		{"a range that no disk fits (CV-12)", edited(createRequest(), "capacity_range",
			csitest.Range(1024*volume.GiB, 0)), fails(csierr.CapacityOutOfRange)},
		{"a clone (CV-13)", from(clone, createRequest()), fails(csierr.SourceUnsupported)},
		{"an empty source (CV-13)", from(&csi.VolumeContentSource{}, createRequest()),
			fails(csierr.SourceUnsupported)},
		{"a source without a snapshot id", from(fromSnapshot(""), createRequest()),
			fails(csierr.FieldMissing)},
		{"a volume without an id (GV-1)", &csi.ControllerGetVolumeRequest{},
			fails(csierr.VolumeIDMissing)},
		{"a snapshot without an id (LS-6)", &csi.GetSnapshotRequest{}, fails(csierr.FieldMissing)},
		{"a snapshot id that is no UUID (CV-14)", from(fromSnapshot("non-existing-snapshot-id"),
			createRequest()), fails(csierr.SnapshotNotFound)},
		{"a snapshot and an image (CV-15)", restoring(parameter("imageId", racktest.Image)),
			fails(csierr.SourceIncompatible)},
		{"a snapshot into a local disk (CV-15)", restoring(parameter("diskType", "local")),
			fails(csierr.SourceIncompatible)},
		{"a disk that is attached read-only (CP-3)", edited(publishRequest(), "readonly", true),
			fails(csierr.ReadOnlyUnsupported)},
		{"a mode that volumes do not have (CP-2)", edited(publishRequest(), "volume_capability",
			csitest.InMode(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY)),
			fails(csierr.CapabilityUnsupported)},
		{"a snapshot's name with a banned character (CS-2)", &csi.CreateSnapshotRequest{Name: "\x7f",
			SourceVolumeId: racktest.Disk}, fails(csierr.FieldInvalid)},
		{"a snapshot of no volume (CS-1)", &csi.CreateSnapshotRequest{Name: "snap-1"},
			fails(csierr.FieldMissing)},
		{"a delete of no volume (DV-1)", &csi.DeleteVolumeRequest{}, fails(csierr.VolumeIDMissing)},
		{"a delete of no snapshot (DS-1)", &csi.DeleteSnapshotRequest{}, fails(csierr.FieldMissing)},
		{"a parameter of a snapshot (CS-3)", &csi.CreateSnapshotRequest{Name: "snap-1",
			SourceVolumeId: racktest.Disk, Parameters: map[string]string{"a": "b"}},
			fails(csierr.ParameterInvalid)},
		{"a topology for a snapshot (CS-3)", &csi.CreateSnapshotRequest{Name: "snap-1",
			SourceVolumeId: racktest.Disk, AccessibilityRequirements: &csi.TopologyRequirement{
				Requisite: csitest.Topologies("rack=a")}},
			fails(csierr.TopologyInvalid)},
		{"delete a volume (DV-2)", &csi.DeleteVolumeRequest{VolumeId: "fake-vol-id"}, ok},
		{"unpublish a volume (CU-4)", &csi.ControllerUnpublishVolumeRequest{VolumeId: "fake-vol-id",
			NodeId: racktest.Instance}, ok},
		{"unpublish from a node (CU-5)", &csi.ControllerUnpublishVolumeRequest{VolumeId: racktest.Disk,
			NodeId: "fake-node"}, ok},
		{"delete a snapshot (DS-2)", &csi.DeleteSnapshotRequest{SnapshotId: "reallyfakesnapshotid"}, ok},
		{"list a snapshot (LS-3)", &csi.ListSnapshotsRequest{SnapshotId: "none-exist-id"}, ok},
		{"list a volume's snapshots (LS-3)", &csi.ListSnapshotsRequest{SourceVolumeId: "no-such-id"}, ok},
		{"publish a volume", edited(publishRequest(), "volume_id", "fake-vol-id"),
			fails(csierr.VolumeNotFound)},
		{"publish to a node", edited(publishRequest(), "node_id", "fake-node-id"),
			fails(csierr.InstanceNotFound)},
		{"get a volume", &csi.ControllerGetVolumeRequest{VolumeId: "fake"}, fails(csierr.VolumeNotFound)},
		{"health", &csi.ControllerGetVolumeHealthRequest{VolumeId: "fake"}, fails(csierr.VolumeNotFound)},
		{"get a snapshot", &csi.GetSnapshotRequest{SnapshotId: "fake"}, fails(csierr.SnapshotNotFound)},
		{"validate", &csi.ValidateVolumeCapabilitiesRequest{VolumeId: "fake",
			VolumeCapabilities: []*csi.VolumeCapability{csitest.Filesystem("")}},
			fails(csierr.VolumeNotFound)},
		{"take a snapshot", &csi.CreateSnapshotRequest{Name: "snap-1", SourceVolumeId: "fake"},
			fails(csierr.VolumeNotFound)},
		{"expand a volume (EX-1)", &csi.ControllerExpandVolumeRequest{}, fails(csierr.NotSupported)},
		{"modify a volume (MV-1)", &csi.ControllerModifyVolumeRequest{}, fails(csierr.NotSupported)},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.ends(t, csitest.Call(t.Context(), c, test.request))
		})
	}
}

var (
	must, ok                   = csitest.Must, csitest.OK
	fails, coded               = csitest.Fails, csitest.Coded
	unseen                     = coded(codes.PermissionDenied, csierr.ProjectNotFound, "OXIDE_PROJECT")
	with                       = racktest.With
	reply                      = racktest.OK
	numbered                   = racktest.Numbered
	missing                    = racktest.NotFound.To // of an object that the rack does not find
	refusing                   = racktest.Refused.To
	ownName                    = volume.DiskName("blue", "pvc-1")
	diskOf, snapshotOf, pageOf = racktest.DiskOf, racktest.SnapshotOf, racktest.PageOf
)

type (
	script   = []racktest.Exchange
	exchange = racktest.Exchange
)

const (
	here      = racktest.AttachedHere
	attaching = "attaching " + racktest.Instance
	detaching = "detaching " + racktest.Instance
)

type edit = func(map[string]any)

func tagged(tag volume.Tag) edit { return with("description", tag.Description()) }

// shown() answers a read of the volume's disk by its id, and named() a read by its name. snap() and
// snapNamed() do the same for the snapshot. listing() answers a list of the instance's disks.
func shown(state string, edits ...edit) exchange {
	return reply(viewDisk, diskOf(state, edits...))
}

func named(state string, edits ...edit) exchange {
	return reply(viewName, diskOf(state, edits...))
}

func snap(state string, edits ...edit) exchange {
	return reply(viewSnap, snapshotOf(state, edits...))
}

func snapNamed(state string, edits ...edit) exchange {
	return reply(viewSnapName, snapshotOf(state, edits...))
}

func instance(state string, edits ...edit) exchange {
	return reply(viewInstance, racktest.InstanceOf(state, edits...))
}

func listing(disks ...string) exchange {
	return reply(beside, pageOf("", disks...))
}

var (
	free, held = shown("detached"), shown(here)
	// This script proves that the disk is deleted, and not only hidden from the token: between two
	// answers without the disk the rack shows the project and the user.
	gone         = script{noDisk, ownProject, ownUser, noDisk}
	noDisk       = missing(viewDisk)
	ownProject   = reply(racktest.ViewProject, racktest.ProjectOf())
	ownUser      = reply(racktest.ViewUser, racktest.UserOf(racktest.Silo))
	noProject    = missing(racktest.ViewProject)
	noName       = missing(viewName)
	noSnap       = missing(viewSnap)
	noSnapName   = missing(viewSnapName)
	noInstance   = missing(beside)
	noInstances  = reply("GET /v1/instances", pageOf(""))
	oneInstance  = reply("GET /v1/instances", pageOf("", racktest.InstanceOf("running")))
	attachingNow = accepted(attach, diskOf(attaching))
	detachingNow = accepted(detach, diskOf(detaching))
	attachedNow  = accepted(attach, diskOf(here))
	detachedNow  = accepted(detach, diskOf("detached"))
	deleted      = exchange{Want: deleteDisk, Status: 204}
	lostAttach   = exchange{Want: attach, Cut: true}
	lostDetach   = exchange{Want: detach, Cut: true}
	lostCreate   = exchange{Want: postDisk, Cut: true}
	lostSnap     = exchange{Want: postSnap, Cut: true}
	lostDelete   = exchange{Want: deleteDisk, Cut: true}
	deletedSnap  = exchange{Want: deleteSnap, Status: 204}
	noAttach     = refusing(attach)
	noDetach     = refusing(detach)
	noDelete     = refusing(deleteDisk)
	noTaking     = refusing(postSnap)
	forbidden    = racktest.Error(403, "Forbidden", "Forbidden")
	later        = racktest.Error(503, "ServiceNotAvailable", "later")
)

type scriptedCalls []struct {
	name  string
	lines script
	ends  func(*testing.T, error)
}

func (all scriptedCalls) after(lines ...exchange) scriptedCalls {
	for i := range all {
		all[i].lines = slices.Concat(lines, all[i].lines)
	}
	return all
}

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

func scripted(t *testing.T, request proto.Message, lines ...exchange) error {
	t.Helper()
	return csitest.Call(t.Context(), rackThat(t, lines...), request)
}

func rackThat(t *testing.T, lines ...exchange) *Service {
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

type step struct {
	call proto.Message
	want codes.Code
}

var (
	publishStep   = publishRequest()
	unpublishStep = &csi.ControllerUnpublishVolumeRequest{VolumeId: racktest.Disk,
		NodeId: racktest.Instance}
	unpublishAnywhereStep = &csi.ControllerUnpublishVolumeRequest{VolumeId: racktest.Disk}
	createStep            = createRequest()
	getStep               = &csi.ControllerGetVolumeRequest{VolumeId: racktest.Disk}
	healthStep            = &csi.ControllerGetVolumeHealthRequest{VolumeId: racktest.Disk}
	deleteStep            = &csi.DeleteVolumeRequest{VolumeId: racktest.Disk}
	snapshotStep          = snapshotRequest()
	deleteSnapshotStep    = &csi.DeleteSnapshotRequest{SnapshotId: racktest.Snapshot}
)

// The steps named …Open fail because the rack may still make a change that it has not answered.
var (
	publishOK, publishOpen     = step{publishStep, codes.OK}, step{publishStep, codes.Unavailable}
	unpublishOK, unpublishOpen = step{unpublishStep, codes.OK}, step{unpublishStep, codes.Unavailable}
	createOpen                 = step{createStep, codes.Unavailable}
	snapshotOpen               = step{snapshotStep, codes.Unavailable}
	deleteOpen                 = step{deleteStep, codes.Unavailable}
)

// proofs/concurrency has cases with one lost, late or wrong answer. The cases here have several.
func TestCallsFailWhileAnUnansweredChangeMayStillBeMade(t *testing.T) { // CU-4, CV-18
	leaving := shown(detaching)
	for _, s := range []struct {
		name  string
		lines script
		steps []step
	}{
		{"an attach that the rack refuses is not open", script{alone, free, forbidden.To(attach), free},
			[]step{{publishStep, codes.PermissionDenied}, unpublishOK}},
		// An earlier call is detaching the disk. The rack may still attach the disk later.
		{"attach lost while the disk is detaching", script{listing(diskOf(detaching)), leaving,
			later.To(attach), leaving, free}, []step{{publishStep, codes.Aborted}, unpublishOpen}},
		{"attach lost while the disk is detaching, seen at unpublish", script{listing(diskOf(detaching)),
			leaving, lostAttach, leaving, leaving, noDetach, leaving, free}, []step{{publishStep,
			codes.Aborted}, {unpublishStep, codes.Aborted}, unpublishOpen}},
		// The first request starts an attach, which continues. The answer to the second request is lost.
		{"second attach lost while the first is attaching", script{listing(diskOf(attaching)), shown(
			attaching), lostAttach, held, together(), held, detachedNow}, []step{publishOK, unpublishOpen}},
		{"a second detach leaves the first one open", script{held, lostDetach, held, detachedNow},
			[]step{unpublishOpen, unpublishOK, publishOpen}},
		{"second detach lost while the first is detaching", script{leaving, lostDetach, free},
			[]step{unpublishOpen, unpublishOK, publishOpen}},
		{"a refusal for the quota beside an open create", script{lostCreate, noName, full.To(postDisk),
			noName}, []step{createOpen, createOpen}},
		{"a refusal for the quota beside an open snapshot", script{free, lostSnap, noSnapName, free,
			full.To(postSnap), noSnapName}, []step{snapshotOpen, snapshotOpen}},
		{"a detach that the rack answers with the attached disk is open", script{held,
			accepted(detach, diskOf(here)), free}, []step{unpublishOpen, unpublishOK, publishOpen}},
		{"a create beside the disk's open delete", script{free, lostDelete, taken.To(postDisk),
			named("detached")}, []step{deleteOpen, createOpen}},
		{"a create beside the snapshot's open delete", script{snap("ready"), {Want: deleteSnap,
			Cut: true}, free, taken.To(postSnap), snapNamed("ready")},
			[]step{{deleteSnapshotStep, codes.Unavailable}, snapshotOpen}},
		{"a delete of a disk that is gone beside its open create", script{lostCreate, named("detached"),
			noDisk}, []step{{createStep, codes.OK}, deleteOpen}},
		{"a final error beside the open create of another volume", script{lostCreate, noName},
			[]step{createOpen, {edited(parameter("colour", "blue"), "name", "pvc-2"),
				codes.InvalidArgument}}},
		{"a final error beside the open delete of another disk", script{free, lostDelete, reply(
			"GET /v1/disks/"+racktest.Image, diskOf("detached", with("id", racktest.Image), with(
				"description", "mine")))}, []step{deleteOpen, {&csi.DeleteVolumeRequest{
			VolumeId: racktest.Image}, codes.FailedPrecondition}}},
		{"a disk in use beside its open delete", script{free, lostDelete, held}, []step{deleteOpen,
			deleteOpen}},
	} {
		t.Run(s.name, func(t *testing.T) {
			c := rackThat(t, s.lines...)
			for n, step := range s.steps {
				// This deadline is before DefaultLateLimit, so no call waits until an open change expires.
				ctx, cancel := context.WithTimeout(t.Context(), DefaultLateLimit/2)
				defer cancel()
				err := csitest.Call(ctx, c, step.call)
				if status.Code(err) != step.want {
					t.Fatalf("call %d: got %v, want %s", n+1, err, step.want)
				}
				if step.want == codes.Unavailable && n > 0 {
					fails(csierr.EffectUnknown)(t, err)
				}
			}
		})
	}
}

func TestTheFlightRecorderRecordsAChangeWhenItIsConfirmed(t *testing.T) {
	for _, test := range []struct {
		name  string
		call  proto.Message // made twice
		lines script
		want  string // each event, and whether only the second call saw that it was made
	}{
		{"a detach", unpublishStep, script{held, detachedNow, free}, "[DiskDetached false]"},
		{"a detach whose answer is lost", unpublishStep, script{held, lostDetach, free},
			"[DiskDetached true]"},
		{"a create whose answer is lost", createStep, script{lostCreate, later.To(viewName),
			taken.To(postDisk), named("detached")}, "[DiskCreated true]"},
		{"a delete whose answer is lost", deleteStep, append(script{free, lostDelete}, gone...),
			"[DiskDeleted true]"},
		{"a delete after which the disk cannot be seen", deleteStep, script{free, lostDelete, noDisk,
			noProject}, "[]"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := []string{}
			ctx := flight.With(t.Context(), &flight.Recorder{Log: slog.New(slog.DiscardHandler),
				Observe: func(e flight.Entry) { got = append(got, fmt.Sprint(e.Event, " ", e.Seen)) },
			}, flight.Fields{Volume: racktest.Disk})
			c := rackThat(t, test.lines...)
			for range 2 {
				_ = csitest.Call(ctx, c, test.call)
			}
			if fmt.Sprint(got) != test.want {
				t.Errorf("got %v, want %s", got, test.want)
			}
		})
	}
}

func TestCreateAndDeleteOfOneObjectExcludeEachOther(t *testing.T) { // CV-18
	var c *Service
	var got error
	during := func(call proto.Message) func(*testing.T, []byte) {
		return func(t *testing.T, _ []byte) {
			// This call must fail before it sends a request: the rack's script has none for it.
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			got = csitest.Call(ctx, c, call)
		}
	}
	c = rackThat(t, free, exchange{Want: deleteDisk, Status: 204, Check: during(createStep)},
		snap("ready"), exchange{Want: deleteSnap, Status: 204, Check: during(snapshotStep)}, free)
	must(t, csitest.Call(t.Context(), c, deleteStep))
	fails(csierr.OperationPending)(t, got)
	must(t, csitest.Call(t.Context(), c, deleteSnapshotStep))
	fails(csierr.OperationPending)(t, got)
	csitest.Got(c.changes.hold(flight.DiskCreated, ownName))(t) // as a create does
	fails(csierr.OperationPending)(t, csitest.Call(t.Context(), c, deleteStep))
}

func TestNoChangeIsRequestedIfTheRackWasReadTooLongAgo(t *testing.T) {
	slow := func(look exchange) exchange {
		look.Hold = 50 * time.Millisecond
		return look
	}
	for call, lines := range map[proto.Message]script{
		publishStep: {alone, slow(free)}, unpublishStep: {slow(held)}, deleteStep: {slow(free)},
		snapshotStep: {slow(free), noSnapName}, deleteSnapshotStep: {slow(snap("ready"))},
		restoring(createRequest()): {slow(snap("ready")), noName},
	} {
		t.Run(fmt.Sprintf("%T", call), func(t *testing.T) {
			c := rackThat(t, lines...)
			c.Rack.LookLimit = 20 * time.Millisecond
			fails(csierr.LookTooOld)(t, csitest.Call(t.Context(), c, call))
		})
	}
}
