package faults_test

import (
	"slices"
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// doubt contains, by operation and answer, the answers after which the driver reads the rack's
// state and derives its own answer from that (A0.3, OX-1, OX-3, OX-6). The code of the call without
// a fault is then allowed, too, and so are the codes here.
var doubt = map[string]map[string][]codes.Code{
	"disk_create": {
		// The rack answers that the object exists, but the object does not exist.
		"ObjectAlreadyExists":  {codes.Aborted},
		"InsufficientCapacity": {},
		"InvalidRequest":       {}, "Conflict": {}, "ObjectNotFound": {},
		// The disk may exist already.
		"Unauthorized": {}, "Forbidden": {}, "Gone": {}, "InvalidValue": {}, "unknown-code": {},
	},
	"snapshot_create": {
		"ObjectAlreadyExists":  {codes.Aborted},
		"InsufficientCapacity": {}, "InvalidRequest": {},
		"ObjectNotFound": {codes.Aborted}, // the disk does exist
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
	// The driver does not find the object, which may have been deleted in the meantime.
	"disk_view": {
		"ObjectNotFound": {codes.Aborted},
		// No rack answers a read in this way. If the source is missing, the driver reports that.
		"ObjectAlreadyExists": {codes.AlreadyExists, codes.NotFound},
	},
	"snapshot_view": {"ObjectNotFound": {codes.Aborted}},
	// In the list after the attach the disk lacks a field, and the orchestrator must repeat the call.
	"instance_disk_list": {
		"other-release": {codes.Unavailable},
		// The driver reads the disk, too, and may answer because of that.
		"ObjectNotFound": {},
	},
	// The image is a parameter of the call (CV-6).
	"image_view": {"ObjectNotFound": {codes.InvalidArgument}},
	// If a token may not see the project, it lacks a role (OX-6).
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
		// After every refusal the driver checks whether an earlier request has taken the snapshot.
		all = append(all, c.scenario.want)
	}
	if strings.HasSuffix(c.operation, "_view") && !strings.HasPrefix(c.scenario.name, "get") {
		// If a read after a change fails, the driver does not know the effect.
		all = append(all, codes.Unavailable)
	}
	if c.hotplug.Has(adminapi.RefusalsAs500) && c.scenario.name == "publish-to-a-full-node" {
		// After a refusal without a reason the driver finds the reason itself.
		all = append(all, codes.ResourceExhausted)
	}
	return all
}

// open contains the answers that do not tell whether a change was made, and making the operations
// after which the driver then reads the state in the same call. If it does not find the effect, it
// answers UNAVAILABLE. With INTERNAL, the orchestrator would not repeat the call and lose the
// object.
var (
	open = []string{"Internal", "ServiceNotAvailable", "proxy-408", "proxy-502", "proxy-504",
		"proxy-520", "redirect", "no-route", "other-version", "too-many", "other-object", "nulls",
		"other-release", "cut", "empty", "page-200", "huge", "truncated"}
	making = []string{"disk_create", "snapshot_create", "instance_disk_attach"}
)

func (c cell) open() bool {
	return slices.Contains(making, c.operation) && slices.Contains(open, c.answer.name)
}

// deniesObject reports whether the rack answers a read with "not found" although the object exists.
// The driver then reads it again (OX-6): a call that removes the object is repeated, and a list has
// no entry.
func (c cell) deniesObject() bool {
	takes := c.scenario.name == "list-a-snapshot" ||
		strings.HasPrefix(c.scenario.name, "delete") || strings.HasPrefix(c.scenario.name, "unpublish")
	return takes && c.answer.name == "ObjectNotFound" && strings.HasSuffix(c.operation, "_view")
}
