package faults_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// later is the phase in which the rack makes the change after its answer to the repeated call. With
// adminapi.Deferred the rack makes it between the wrong answer and the repeated call.
const later adminapi.Phase = "later"

// phases lists when the rack can make an operation's change, relative to its wrong answer.
var phases = []adminapi.Phase{adminapi.Before, adminapi.Instead, adminapi.After, adminapi.Twice,
	adminapi.Deferred, later}

// done reports whether the rack makes the operation's change before it answers.
func done(p adminapi.Phase) bool { return p == adminapi.After || p == adminapi.Twice }

// answer is a wrong answer of the rack, with the code that the driver then returns. The code
// DeadlineExceeded means that the rack answers after the call's deadline.
type answer struct {
	name string
	code codes.Code
	// fault contains the values that all cells share. set, if not nil, adds the values of a cell.
	fault adminapi.Fault
	set   func(f *adminapi.Fault, r *cellRun)
	// phases contains the phases in which the rack can give this answer; nil means all phases.
	phases []adminapi.Phase
	// natural is set if the call can succeed in spite of this answer.
	natural bool
	// success is set if the answer has the status of a successful operation.
	success bool
}

func (r *cellRun) fault() adminapi.Fault {
	a := r.cell.answer
	fault := a.fault
	fault.Operation, fault.Phase = r.operation, r.phase
	if r.phase == adminapi.Deferred || r.phase == later {
		// The proof triggers the change with RunDeferred, long before this delay ends.
		fault.Phase, fault.Delay = adminapi.Deferred, adminapi.Duration(time.Hour)
	}
	if a.set != nil {
		a.set(&fault, r)
	}
	return fault
}

func response(name string, code codes.Code, r adminapi.Response) answer {
	return answer{name: name, code: code, fault: adminapi.Fault{Response: &r}}
}

func refusal(status int, errorCode, message string, code codes.Code) answer {
	return response(errorCode, code,
		adminapi.Response{Status: status, ErrorCode: errorCode, Message: message})
}

// page returns an answer that a proxy in front of the rack could give.
func page(status int) answer {
	return response(fmt.Sprint("proxy-", status), codes.Unavailable, adminapi.Response{
		Status: status, ContentType: "text/html", Body: "<html>not a rack</html>"})
}

func success(name string, body func(r *cellRun) string) answer {
	return answer{name: name, code: codes.Unavailable, success: true,
		set: func(f *adminapi.Fault, r *cellRun) {
			f.Response = &adminapi.Response{Status: statusOf(r.operation), Body: body(r)}
		}}
}

var answers = []answer{
	refusal(400, "ObjectAlreadyExists", "already exists", codes.AlreadyExists),
	refusal(400, "InvalidValue", "unsupported value", codes.OutOfRange),
	refusal(400, "InvalidRequest", "cannot do that", codes.Internal),
	refusal(401, "Unauthorized", "credentials missing or invalid", codes.Unauthenticated),
	refusal(403, "Forbidden", "Forbidden", codes.PermissionDenied),
	refusal(404, "ObjectNotFound", "not found", codes.NotFound),
	response("no-route", codes.Unavailable, adminapi.Response{Status: 404, Message: "Not Found"}),
	refusal(409, "Conflict", "in use", codes.FailedPrecondition),
	refusal(410, "Gone", "Gone", codes.Internal),
	refusal(500, "Internal", "Internal Server Error", codes.Unavailable),
	refusal(503, "ServiceNotAvailable", "Service Unavailable", codes.Unavailable),
	response("too-many", codes.Unavailable, adminapi.Response{Status: 429, Message: "slow down"}),
	refusal(507, "InsufficientCapacity", "Insufficient capacity", codes.ResourceExhausted),
	response("unknown-code", codes.Internal,
		adminapi.Response{Status: 418, ErrorCode: "Teapot", Message: "short and stout"}),
	response("other-version", codes.Unavailable, adminapi.Response{Status: 400,
		Message: "server does not support this API version: 2026060800.0.0"}),
	page(408), page(502), page(504), page(520),
	response("redirect", codes.Unavailable, adminapi.Response{Status: http.StatusFound,
		ContentType: "text/html", Body: "<html>moved</html>",
		Header: map[string]string{"Location": "/v1/ping"}}),
	{name: "cut", code: codes.Unavailable, fault: adminapi.Fault{Cut: true}},
	{name: "timeout", code: codes.DeadlineExceeded,
		fault: adminapi.Fault{Hang: adminapi.Duration(time.Hour)}},
	{name: "truncated", code: codes.Unavailable, fault: adminapi.Fault{TruncateBody: 20},
		set: setBody},
	{name: "slow", code: codes.DeadlineExceeded, set: setBody,
		fault: adminapi.Fault{SlowByte: adminapi.Duration(100 * time.Millisecond)}},
	success("empty", func(*cellRun) string { return "" }),
	success("page-200", func(*cellRun) string { return "<html>hello</html>" }),
	success("other-object", (*cellRun).other),
	success("nulls", func(r *cellRun) string {
		if strings.HasSuffix(r.operation, "_list") {
			return `{"items":null,"next_page":null}`
		}
		return altered(r.other(), func(fields object) {
			for name := range fields {
				fields[name] = nil
			}
		})
	}),
	{name: "other-release", code: codes.Unavailable, natural: true, success: true,
		set: setOtherRelease},
	{name: "own", natural: true, phases: []adminapi.Phase{adminapi.Twice}},
}

func (r *cellRun) other() string { return r.others[kindOf(r.operation)] }

// setBody chooses the body that the fault damages. For a delete, that is the body of an error. For
// other changes, it is the rack's own body if the change is made first, otherwise a wrong object.
func setBody(f *adminapi.Fault, r *cellRun) {
	switch {
	case strings.HasSuffix(r.operation, "_delete"):
		f.Response = &adminapi.Response{Status: 500, ErrorCode: "Internal",
			Message: "Internal Server Error"}
	case !done(r.phase):
		f.Response = &adminapi.Response{Status: statusOf(r.operation), Body: r.other()}
	}
}

// setOtherRelease omits fields from the answer, as a rack of another release does. For a delete, or
// if the rack has not made the change, the answer contains a wrong object.
func setOtherRelease(f *adminapi.Fault, r *cellRun) {
	fields := releaseFields[kindOf(r.operation)]
	if done(r.phase) && !strings.HasSuffix(r.operation, "_delete") {
		f.DropFields = fields
		return
	}
	f.Response = &adminapi.Response{Status: statusOf(r.operation),
		Body: altered(r.other(), func(all object) {
			maps.DeleteFunc(all, func(name string, _ any) bool { return slices.Contains(fields, name) })
		})}
}

// releaseFields contains, for each kind of object, fields that only some releases have.
var releaseFields = map[string][]string{
	"disk": {"disk_type", "read_only"}, "snapshot": {"size"}, "image": {"size", "block_size"},
	"instance": {"run_state"}, "project": {"id"}, "utilization": {"capacity"},
	"current": {"silo_id"},
}

func kindOf(operation string) string {
	kind, _, _ := strings.Cut(operation, "_")
	if strings.HasPrefix(operation, "instance_disk_") {
		kind = "disk"
	}
	return kind
}

// statusOf returns the status of a success. For a delete it is 200, because 204 permits no body.
func statusOf(operation string) int {
	switch {
	case strings.HasSuffix(operation, "_create"):
		return http.StatusCreated
	case strings.HasSuffix(operation, "_attach"), strings.HasSuffix(operation, "_detach"):
		return http.StatusAccepted
	}
	return http.StatusOK
}

type object = map[string]any

func altered(of string, change func(fields object)) string {
	decoder := json.NewDecoder(strings.NewReader(of))
	decoder.UseNumber()
	var fields object
	if err := decoder.Decode(&fields); err != nil {
		panic("no object: " + of)
	}
	change(fields)
	return text(fields)
}

func text(value any) string {
	data, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	return string(data)
}

// doubt contains, by operation, the wrong answers after which the driver reads the rack's state and
// derives its answer from it (A0.3, OX-1, OX-3, OX-6). The driver may then return one of these
// codes, or the code of the call without a fault.
var doubt = map[string]map[string][]codes.Code{
	"disk_create": {
		// ObjectAlreadyExists is a wrong answer: the disk does not exist.
		"ObjectAlreadyExists": {codes.Aborted}, "InsufficientCapacity": {},
		"InvalidRequest": {}, "Conflict": {}, "ObjectNotFound": {},
		// Despite these answers, the driver looks for the disk: an earlier request may have created it.
		"Unauthorized": {}, "Forbidden": {}, "Gone": {}, "InvalidValue": {}, "unknown-code": {},
	},
	"snapshot_create": {
		"ObjectAlreadyExists": {codes.Aborted}, "InsufficientCapacity": {}, "InvalidRequest": {},
		"ObjectNotFound": {codes.Aborted}, // the disk does exist
		// Conflict means that the rack still makes another snapshot of the disk.
		"Conflict": {codes.Aborted},
	},
	"instance_disk_attach": {
		"InvalidRequest": {codes.FailedPrecondition, codes.Aborted}, "Conflict": {codes.Aborted},
		"ObjectNotFound": {codes.FailedPrecondition},
	},
	"instance_disk_detach": {
		"InvalidRequest": {codes.FailedPrecondition}, "Conflict": {},
		"ObjectNotFound": {codes.FailedPrecondition},
	},
	"disk_delete": {
		"InvalidRequest": {codes.Aborted}, "Conflict": {},
		"ObjectNotFound": {codes.Internal, codes.Unavailable, codes.Aborted},
	},
	"snapshot_delete": {
		"InvalidRequest": {codes.Internal}, "Conflict": {},
		"ObjectNotFound": {codes.Internal, codes.Unavailable, codes.Aborted},
	},
	"disk_view": {
		// The driver assumes that the disk was deleted during the call.
		"ObjectNotFound": {codes.Aborted},
		// No rack gives this answer to a read. NOT_FOUND is right, too, if the call's source is missing.
		"ObjectAlreadyExists": {codes.AlreadyExists, codes.NotFound},
	},
	"snapshot_view": {"ObjectNotFound": {codes.Aborted}},
	"instance_disk_list": {
		// The disks in this answer lack fields that the driver needs, so the call must be repeated.
		"other-release": {codes.Unavailable},
		// The driver also reads the disk, and may derive its answer from it.
		"ObjectNotFound": {},
	},
	// The image is a parameter of the call (CV-6).
	"image_view": {"ObjectNotFound": {codes.InvalidArgument}},
	// If project_view finds no project, the token lacks a role (OX-6).
	"current_user_view": {"other-object": {codes.FailedPrecondition}},
	"project_view":      {"ObjectNotFound": {codes.PermissionDenied}},
}

func (c cell) allowed() []codes.Code {
	if c.answer.success && strings.HasSuffix(c.operation, "_delete") {
		// A successful delete has no body, so an answer with a body is not from the rack.
		return []codes.Code{codes.Unavailable}
	}
	if c.open() {
		return []codes.Code{codes.Unavailable, c.scenario.want}
	}
	var all []codes.Code
	if !c.answer.natural || c.answer.code != codes.OK {
		all = append(all, c.answer.code)
	}
	more, doubtful := doubt[c.operation][c.answer.name]
	if doubtful || c.answer.natural {
		all = append(append(all, more...), c.scenario.want)
	}
	if c.deniesObject() {
		all = append(all, codes.OK, codes.Aborted)
	}
	if c.operation == "snapshot_create" {
		// After each refusal the driver checks whether an earlier request has created the snapshot.
		all = append(all, c.scenario.want)
	}
	if strings.HasSuffix(c.operation, "_view") && !strings.HasPrefix(c.scenario.name, "get") {
		// If a read fails after a change, the driver does not know whether the change was made.
		all = append(all, codes.Unavailable)
	}
	if c.hotplug.Has(adminapi.RefusalsAs500) && c.scenario.name == "publish-to-a-full-node" {
		// This refusal gives no reason, but the driver sees in the rack's state that the node is full.
		all = append(all, codes.ResourceExhausted)
	}
	return all
}

// making contains operations after which the driver reads the rack's state if it does not know
// whether they were done. If they were not, the driver answers UNAVAILABLE, because after INTERNAL
// the orchestrator would not repeat the call, and would lose the object.
var making = []string{"disk_create", "snapshot_create", "instance_disk_attach"}

// open reports whether the driver must read the rack's state to know if the change was made.
func (c cell) open() bool {
	return slices.Contains(making, c.operation) && c.answer.code == codes.Unavailable
}

// deniesObject reports whether the rack answers a read with "not found" although the object exists.
// The driver then reads again (OX-6). It may answer a delete or unpublish with ABORTED, so that the
// orchestrator repeats the call, and may omit the object from a list.
func (c cell) deniesObject() bool {
	takes := c.scenario.name == "list-a-snapshot" ||
		strings.HasPrefix(c.scenario.name, "delete") || strings.HasPrefix(c.scenario.name, "unpublish")
	return takes && c.answer.name == "ObjectNotFound" && strings.HasSuffix(c.operation, "_view")
}

// effect is a prepared request, with the change that it must make.
type effect struct {
	request proto.Message
	// apply makes the request's change to a state. It is nil if the request changes nothing.
	apply func(rackState)
}

func call(request proto.Message) effect { return effect{request: request} }

func always(request proto.Message) func(*environment) effect {
	return func(*environment) effect { return call(request) }
}

// createEffect returns the effect of a request that creates a disk of 1 GiB. from is the ID of the
// image or snapshot, or "" for a blank disk.
func createEffect(s *environment, req *csi.CreateVolumeRequest, from string) effect {
	return effect{request: req, apply: func(state rackState) {
		state["disk "+req.GetName()] = item{ID: fresh, State: "detached", From: from,
			Size: gib, BlockSize: madeBlocks[from == s.image.Id]}
		state.add("storage", gib)
	}}
}

// madeBlocks contains the block size of a disk from an image (true) and of other disks (false).
var madeBlocks = map[bool]int{true: 512, false: 4096}

func removes(name string, req proto.Message) effect {
	return effect{request: req, apply: func(state rackState) {
		delete(state, "disk "+name)
		delete(state, "snapshot "+name)
		state.add("storage", -gib)
	}}
}

// moves returns an effect that attaches the disk with the name to an instance (to) or, if to is
// "", detaches it. A running instance gets a device.
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

func publishEffect(s *environment, node string) effect {
	name := s.name("publish")
	return s.moves(name, node, harness.PublishRequest(s.volume(name), node))
}

// unpublishEffect creates a volume, and calls attach() to attach it to the instance "from". The
// effect detaches the volume from the node or, if node is "", from every node.
func unpublishEffect(s *environment, attach func(disk, instance string), from, node string) effect {
	name := s.name("unpublish")
	id := s.volume(name).GetVolumeId()
	attach(id, from)
	return s.moves(name, "", unpublish(id, node))
}

func unpublish(id, node string) *csi.ControllerUnpublishVolumeRequest {
	return &csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: node}
}

// serial returns the beginning of a disk's name, which the guest sees as the serial.
func serial(name string) string { return name[:min(len(name), 20)] }

// scenario is a CSI call and what exists on the rack before the call.
type scenario struct {
	name string
	// want is the code that the call returns without a fault.
	want    codes.Code
	prepare func(*environment) effect
}

var scenarios = slices.Concat(volumeScenarios, attachScenarios, readScenarios)

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
		return call(restoreRequest(s.name("blocks"), s.orphan.GetSnapshotId(), "512"))
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
