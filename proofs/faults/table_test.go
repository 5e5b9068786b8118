package faults_test

import (
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
)

// doubt says which further codes an answer to an operation may have: the driver looks at the rack
// again before it says what the answer means, and what it then finds decides (A0.3, OX-1, OX-3,
// OX-6). The code of the call without a fault is always among them.
var doubt = map[string]map[string][]codes.Code{
	"disk_create": {
		// It was there, the rack says, and it is not.
		"ObjectAlreadyExists":  {codes.Aborted},
		"InsufficientCapacity": {},
		"InvalidRequest":       {}, "Conflict": {}, "ObjectNotFound": {},
	},
	"snapshot_create": {
		"ObjectAlreadyExists":  {codes.Aborted},
		"InsufficientCapacity": {}, "InvalidRequest": {}, "ObjectNotFound": {},
		// Another snapshot of the disk is under way.
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
	// A look that is taken to resolve a doubt, and finds nothing: the object went meanwhile.
	"disk_view": {
		"ObjectNotFound": {codes.Aborted},
		// No rack says so of a look. Where the source is gone, too, that is what is told.
		"ObjectAlreadyExists": {codes.AlreadyExists, codes.NotFound},
	},
	"snapshot_view": {"ObjectNotFound": {codes.Aborted}},
	// The list before the attach is empty and lacks nothing. In the one behind it the disk lacks its
	// type, and as it is attached by then the orchestrator has to come again.
	"instance_disk_list": {"other-release": {codes.Unavailable}},
	// The parameter is wrong then (CV-6).
	"image_view": {"ObjectNotFound": {codes.InvalidArgument}},
	// A project that a token may not see is a role that is missing (OX-6).
	"project_view": {"ObjectNotFound": {codes.PermissionDenied}},
}

// allowed are the codes that the table has for a cell.
func (c cell) allowed() []codes.Code {
	if c.answer.success && strings.HasSuffix(c.operation, "_delete") && !c.undoing() {
		// The rack's success has no body to tell it by. What has one is somebody else's.
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
		all = append(all, codes.OK)
	}
	if c.undoing() {
		all = append(all, codes.Unavailable, codes.Aborted)
	}
	return all
}

// open are the answers that leave open whether a change was made. To a create, a snapshot or an
// attach the driver looks in the same call, and what it finds decides; while nothing is found the
// orchestrator has to come again. No such call ends with INTERNAL, after which the orchestrator
// would forget the object.
var (
	open = []string{"Internal", "ServiceNotAvailable", "proxy-408", "proxy-502", "proxy-504",
		"proxy-520", "redirect", "other-object", "nulls", "other-release"}
	making = []string{"disk_create", "snapshot_create", "instance_disk_attach"}
)

func (c cell) open() bool {
	return slices.Contains(making, c.operation) && slices.Contains(open, c.answer.name)
}

// undoing reports whether the operation may be one to take back what the call itself has made.
// Whatever hinders that, the orchestrator has to come again: with a final answer it would leave the
// disk behind.
func (c cell) undoing() bool {
	return c.scenario.name == undoScenario &&
		(c.operation == "disk_delete" || c.operation == "disk_view")
}

// deniesObject are the cells in which the rack itself says of an object that it has none such, when
// it was only asked to show it: nobody can tell that from the truth, and OX-6 makes it a success of
// a call that takes something away, or an empty list.
func (c cell) deniesObject() bool {
	takes := c.scenario.name == undoScenario || c.scenario.name == "list-a-snapshot" ||
		strings.HasPrefix(c.scenario.name, "delete") || strings.HasPrefix(c.scenario.name, "unpublish")
	return takes && c.answer.name == "ObjectNotFound" && strings.HasSuffix(c.operation, "_view")
}
