package faults_test

import (
	"slices"
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// doubt contains further codes that an answer to an operation may have. For these answers the
// driver reads the rack's state before it decides what the answer means, and that state
// decides (A0.3, OX-1, OX-3, OX-6). The code of the call without a fault is always allowed,
// too.
var doubt = map[string]map[string][]codes.Code{
	"disk_create": {
		// The rack answers that the object exists, but the object does not exist.
		"ObjectAlreadyExists":  {codes.Aborted},
		"InsufficientCapacity": {},
		"InvalidRequest":       {}, "Conflict": {}, "ObjectNotFound": {},
		// The disk may be there already.
		"Unauthorized": {}, "Forbidden": {}, "Gone": {}, "InvalidValue": {}, "unknown-code": {},
	},
	"snapshot_create": {
		"ObjectAlreadyExists":  {codes.Aborted},
		"InsufficientCapacity": {}, "InvalidRequest": {},
		"ObjectNotFound": {codes.Aborted}, // the disk is there after all
		// Another snapshot of the disk is in progress.
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
	// The driver reads the object because of a doubtful answer and does not find it: it was
	// deleted in the meantime.
	"disk_view": {
		"ObjectNotFound": {codes.Aborted},
		// No rack answers this to a read. If the source is missing too, the driver reports the
		// source.
		"ObjectAlreadyExists": {codes.AlreadyExists, codes.NotFound},
	},
	"snapshot_view": {"ObjectNotFound": {codes.Aborted}},
	// The list before the attach is empty, so it lacks no fields. In the list after the attach the
	// disk has no type. The disk is attached by then, so the orchestrator must repeat the call.
	"instance_disk_list": {
		"other-release": {codes.Unavailable},
		// The disk is asked for, too, and may decide first.
		"ObjectNotFound": {},
	},
	// The parameter is wrong in this case (CV-6).
	"image_view": {"ObjectNotFound": {codes.InvalidArgument}},
	// If a token may not see the project, it lacks a role (OX-6).
	"current_user_view": {"other-object": {codes.FailedPrecondition}},
	"project_view":      {"ObjectNotFound": {codes.PermissionDenied}},
}

// allowed returns the codes that the table allows for a cell.
func (c cell) allowed() []codes.Code {
	if c.answer.success && strings.HasSuffix(c.operation, "_delete") {
		// A successful delete of the rack has no body. An answer with a body does not come from the
		// rack.
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
		// After every refusal the driver looks whether an earlier request has taken the snapshot.
		all = append(all, c.scenario.want)
	}
	if strings.HasSuffix(c.operation, "_view") && !strings.HasPrefix(c.scenario.name, "get") {
		// A read after a change, or in doubt of one, ends no call for good.
		all = append(all, codes.Unavailable)
	}
	if c.hotplug.Has(adminapi.RefusalsAs500) && c.scenario.name == "publish-to-a-full-node" {
		// Another refusal than the rack's own lets the driver look for the reason.
		all = append(all, codes.ResourceExhausted)
	}
	return all
}

// open contains the answers that leave open whether a change was made. After a create, a
// snapshot or an attach with such an answer, the driver reads the state in the same call, and
// the state decides. If the driver finds nothing, the orchestrator must repeat the call. Such
// a call never ends with INTERNAL, because the orchestrator would then forget the object.
var (
	open = []string{"Internal", "ServiceNotAvailable", "proxy-408", "proxy-502", "proxy-504",
		"proxy-520", "redirect", "no-route", "other-version", "too-many", "other-object", "nulls",
		"other-release", "cut", "empty", "page-200", "huge", "truncated"}
	making = []string{"disk_create", "snapshot_create", "instance_disk_attach"}
)

func (c cell) open() bool {
	return slices.Contains(making, c.operation) && slices.Contains(open, c.answer.name)
}

// deniesObject reports whether the rack answers to a read of an object that the object does not
// exist. The driver then reads it again (OX-6): a call that removes something finds it there, and
// is repeated; a list has no entry.
func (c cell) deniesObject() bool {
	takes := c.scenario.name == "list-a-snapshot" ||
		strings.HasPrefix(c.scenario.name, "delete") || strings.HasPrefix(c.scenario.name, "unpublish")
	return takes && c.answer.name == "ObjectNotFound" && strings.HasSuffix(c.operation, "_view")
}
