package faults_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// later is the phase in which the effect comes after the answer to the repeated call. In the phase
// adminapi.Deferred it comes after the answer, before the call is repeated.
const later adminapi.Phase = "later"

// phases contains the moments of the wrong answer, relative to the operation's effect.
var phases = []adminapi.Phase{adminapi.Before, adminapi.Instead, adminapi.After, adminapi.Twice,
	adminapi.Deferred, later}

// done reports whether the operation has its effect before the rack answers.
func done(p adminapi.Phase) bool { return p == adminapi.After || p == adminapi.Twice }

// answer is a wrong answer of the rack, with the code that the driver then returns. If the code is
// DeadlineExceeded, the rack's answer arrives after the call's deadline.
type answer struct {
	name string
	code codes.Code
	// fault contains the values that are the same in every cell. set, if not nil, adds other values.
	fault adminapi.Fault
	set   func(f *adminapi.Fault, r *cellRun)
	// phases contains the phases in which the rack can give this answer. Nil means all.
	phases []adminapi.Phase
	// natural is set if the call may succeed in spite of the answer.
	natural bool
	// success is set if the answer has the status of a successful operation.
	success bool
}

// fault returns the fault of a cell.
func (r *cellRun) fault() adminapi.Fault {
	a := r.cell.answer
	fault := a.fault
	fault.Operation, fault.Phase = r.operation, r.phase
	if r.phase == adminapi.Deferred || r.phase == later {
		// The proof itself runs the deferred operation, long before the delay ends.
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

// page returns an answer of a proxy in front of the rack.
func page(status int) answer {
	return response(fmt.Sprint("proxy-", status), codes.Unavailable, adminapi.Response{
		Status: status, ContentType: "text/html", Body: "<html>not a rack</html>"})
}

// success returns an answer with the status of a successful operation.
func success(name string, body func(r *cellRun) string) answer {
	return answer{name: name, code: codes.Unavailable, success: true,
		set: func(f *adminapi.Fault, r *cellRun) {
			f.Response = &adminapi.Response{Status: statusOf(r.operation), Body: body(r)}
		}}
}

// answers contains all wrong answers of the matrix.
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

// other returns the JSON of a wrong object, of the kind that the operation returns.
func (r *cellRun) other() string { return r.others[kindOf(r.operation)] }

// setBody gives the answer a body, which the fault then damages. It is the rack's own body if the
// operation was done, and another object if not. A delete has no body, so it gets an error instead.
func setBody(f *adminapi.Fault, r *cellRun) {
	switch {
	case strings.HasSuffix(r.operation, "_delete"):
		f.Response = &adminapi.Response{Status: 500, ErrorCode: "Internal",
			Message: "Internal Server Error"}
	case !done(r.phase):
		f.Response = &adminapi.Response{Status: statusOf(r.operation), Body: r.other()}
	}
}

// setOtherRelease sets the answer of a rack of another release, in which fields are missing. If the
// operation was not done, the answer contains another object than the right one.
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

// releaseFields contains fields that only some releases have.
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

// statusOf returns the status of a successful operation. If that status allows no body,
// statusOf returns 200.
func statusOf(operation string) int {
	switch {
	case strings.HasSuffix(operation, "_create"):
		return http.StatusCreated
	case strings.HasSuffix(operation, "_attach"), strings.HasSuffix(operation, "_detach"):
		return http.StatusAccepted
	}
	return http.StatusOK
}

// object is an object of the rack.
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

// doubt lists operations and answers after which the driver reads the rack's state, and derives its
// own answer from the state (A0.3, OX-1, OX-3, OX-6). The codes here are then allowed, and also the
// code of the call without a fault.
var doubt = map[string]map[string][]codes.Code{
	"disk_create": {
		// The rack answers that the object exists, but it does not.
		"ObjectAlreadyExists": {codes.Aborted}, "InsufficientCapacity": {},
		"InvalidRequest": {}, "Conflict": {}, "ObjectNotFound": {},
		// In spite of these answers, an earlier request may have created the disk.
		"Unauthorized": {}, "Forbidden": {}, "Gone": {}, "InvalidValue": {}, "unknown-code": {},
	},
	"snapshot_create": {
		"ObjectAlreadyExists": {codes.Aborted}, "InsufficientCapacity": {}, "InvalidRequest": {},
		"ObjectNotFound": {codes.Aborted}, // the disk does exist
		// Conflict means that another snapshot of the disk is in progress.
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
	// The driver does not find the object, which may have been deleted in the meantime.
	"disk_view": {
		"ObjectNotFound": {codes.Aborted},
		// A rack never gives this answer to a read. If the source is missing, NOT_FOUND is right, too.
		"ObjectAlreadyExists": {codes.AlreadyExists, codes.NotFound},
	},
	"snapshot_view": {"ObjectNotFound": {codes.Aborted}},
	// In the list after the attach, the disk lacks a field. The orchestrator must repeat the call.
	"instance_disk_list": {
		"other-release": {codes.Unavailable},
		// The driver also reads the disk, and may derive its answer from the disk.
		"ObjectNotFound": {},
	},
	// The image is a parameter of the call (CV-6).
	"image_view": {"ObjectNotFound": {codes.InvalidArgument}},
	// A token that may not see the project lacks a role (OX-6).
	"current_user_view": {"other-object": {codes.FailedPrecondition}},
	"project_view":      {"ObjectNotFound": {codes.PermissionDenied}},
}

func (c cell) allowed() []codes.Code {
	if c.answer.success && strings.HasSuffix(c.operation, "_delete") {
		// A successful delete has no body, so an answer with a body does not come from the rack.
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
		// After every refusal the driver checks whether an earlier request has created the snapshot.
		all = append(all, c.scenario.want)
	}
	if strings.HasSuffix(c.operation, "_view") && !strings.HasPrefix(c.scenario.name, "get") {
		// If a read after a change fails, the driver does not know the effect.
		all = append(all, codes.Unavailable)
	}
	if c.hotplug.Has(adminapi.RefusalsAs500) && c.scenario.name == "publish-to-a-full-node" {
		// If the rack refuses without a reason, the driver finds the reason itself.
		all = append(all, codes.ResourceExhausted)
	}
	return all
}

// If the answer to one of these operations does not tell whether the change was made, the driver
// reads the state in the same call. If the effect is missing, it answers UNAVAILABLE: after
// INTERNAL the orchestrator would not repeat the call, and would lose the object.
var making = []string{"disk_create", "snapshot_create", "instance_disk_attach"}

// open reports whether it is unknown after the answer if the change was made.
func (c cell) open() bool {
	return slices.Contains(making, c.operation) && c.answer.code == codes.Unavailable
}

// deniesObject reports whether the rack answers a read with "not found" although the object exists.
// The driver reads again (OX-6). It may abort a removal, which the orchestrator then repeats, and
// may omit the object from a list.
func (c cell) deniesObject() bool {
	takes := c.scenario.name == "list-a-snapshot" ||
		strings.HasPrefix(c.scenario.name, "delete") || strings.HasPrefix(c.scenario.name, "unpublish")
	return takes && c.answer.name == "ObjectNotFound" && strings.HasSuffix(c.operation, "_view")
}
