package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"syscall"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// Call is one request to the rack, parsed for the operations of this package.
type Call struct {
	// Context ends when the caller has the response or closes the connection. The operation continues
	// even after that (A18).
	Context context.Context
	// Named maps each parameter of the path and the query to the name or ID in it. Body is the parsed
	// body, in the Go type that the operation expects. Window is the requested part of a list.
	Named  map[string]store.Selector
	Body   any
	Window Window
	// Kind selects the table that an operation of [Resources] works on.
	Kind     *Kind
	ReadOnly bool
	// Unwind makes the operation fail halfway and undo its changes. Reread makes an attach or a detach
	// commit its changes and then fail (A67).
	Unwind, Reread bool
	// Resumed marks a call that the simulator makes when it starts. The call has no delays (A19).
	Resumed bool
	// Device is the fault of the devices that the call attaches; nil means no fault.
	Device *adminapi.DeviceFault
	// Cascade permits a request to delete an object together with the objects that depend on it.
	Cascade bool
	// Object is the operation's main object. The operation sets it for the request log.
	Object store.Identity
}

// Window is the requested part of a list that is sorted by SortBy: at most Limit items, which
// follow the name or ID in After.
type Window struct {
	SortBy string
	After  *string
	Limit  int
}

// deviceFault returns the fault of the call's devices. The fault's Delay is at least delay.
func (c *Call) deviceFault(delay adminapi.Duration) dataplane.Fault {
	d := cmp.Or(c.Device, &adminapi.DeviceFault{})
	return dataplane.Fault{Never: d.Never, Delay: time.Duration(max(delay, d.Delay)),
		SizeBytes: int64(d.SizeBytes), Fails: d.Fails}
}

// Error is a refusal of the rack. The caller gets Status, Code and Message unchanged (A01).
type Error struct {
	Status  int
	Code    string
	Message string
	// Header is added to the response's header, such as Allow for a 405.
	Header http.Header
}

func (e *Error) Error() string { return e.Message }

func refusal(status int, code, format string, args ...any) *Error {
	return &Error{Status: status, Code: code, Message: fmt.Sprintf(format, args...)}
}

func invalidRequest(format string, args ...any) error {
	return refusal(http.StatusBadRequest, "InvalidRequest", format, args...)
}

func invalidValue(label, format string, args ...any) error {
	return refusal(http.StatusBadRequest, "InvalidValue", "unsupported value for %q: %s", label,
		fmt.Sprintf(format, args...))
}

func conflict(format string, args ...any) error {
	return refusal(http.StatusConflict, "Conflict", format, args...)
}

// notFound returns the error for an object that the caller selected by name or ID (A01).
func notFound(kind string, s store.Selector) error {
	by := "name"
	if s.ID != "" {
		by = "id"
	}
	return refusal(http.StatusNotFound, "ObjectNotFound", "not found: %s with %s %q", kind, by, s)
}

// alreadyExists returns the error for a taken name. Racks answer with 400, not with 409 (A01).
func alreadyExists(kind, name string) error {
	return refusal(http.StatusBadRequest, "ObjectAlreadyExists", "already exists: %s %q", kind, name)
}

func insufficientCapacity(text string) *Error {
	return refusal(http.StatusInsufficientStorage, "InsufficientCapacity",
		"Insufficient capacity: %s", text)
}

var (
	// ErrForbidden is the error for a request that the caller's role does not permit.
	ErrForbidden   = refusal(http.StatusForbidden, "Forbidden", "Forbidden")
	errUnavailable = refusal(http.StatusServiceUnavailable, "ServiceNotAvailable",
		"Service Unavailable")
	errInternal = refusal(http.StatusInternalServerError, "Internal", "Internal Server Error")
	// errNoSpace means that the rack has no physical space left (A27).
	errNoSpace = insufficientCapacity("Not enough storage")
)

// AsError returns the error that the caller gets. A full filesystem of the host becomes the rack's
// "no space" (A27). An unexpected error becomes a 500, which hides the error's text (A01).
func AsError(err error) *Error {
	var known *Error
	var full *store.FullError
	switch {
	case errors.As(err, &known):
		return known
	case errors.As(err, &full):
		return insufficientCapacity(full.Error())
	case errors.Is(err, dataplane.ErrWrittenMeanwhile):
		return errUnavailable
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT),
		errors.Is(err, syscall.EFBIG):
		return errNoSpace
	}
	return errInternal
}

// selectorTexts has the rack's errors for an ID with a project, and a name without a project (A05).
var selectorTexts = map[string]struct{ both, neither string }{
	"disk": {
		"when providing disk as an ID project should not be specified",
		"disk should either be UUID or project should be specified"},
	"instance": {
		"when providing instance as an ID project should not be specified",
		"instance should either be UUID or project should be specified"},
	"snapshot": {
		"when providing snapshot as an ID, project should not be specified",
		"snapshot should either be an ID or project should be specified"},
	"image": {
		"when providing image as an ID, project should not be specified", ""},
}

// allow refuses a viewer's change with Forbidden, and a caller without a role with Not Found (A15).
func (r *Simulation) allow(call *Call, tx *store.Tx, kind string, sel store.Selector) {
	role := r.Switches().Role
	tx.Refuse(role == adminapi.RoleNone, notFound(kind, sel))
	tx.Refuse(role == adminapi.RoleViewer && !call.ReadOnly, ErrForbidden)
}

// allowInSilo lets all users read, but only collaborators and fleet administrators write.
func (r *Simulation) allowInSilo(call *Call, tx *store.Tx) {
	tx.Refuse(!call.ReadOnly && !r.collaborates(), ErrForbidden)
}

func (r *Simulation) collaborates() bool {
	role := r.Switches().Role
	return role == adminapi.RoleCollaborator || role == adminapi.RoleFleetAdmin
}

func (r *Simulation) project(call *Call, tx *store.Tx) store.Project {
	sel := call.Named["project"]
	p := find(tx, store.Projects, "", sel)
	r.allow(call, tx, "project", sel)
	return p
}

func lookup[T store.Record](r *Simulation, call *Call, tx *store.Tx, t store.Table[T]) T {
	return lookupIn(r, call, tx, t, call.Named["project"])
}

func lookupIn[T store.Record](r *Simulation, call *Call, tx *store.Tx, t store.Table[T],
	project store.Selector) T {
	sel := call.Named[t.Name]
	parent := owner(tx, t.Name, project, sel)
	object := find(tx, t, parent, sel)
	if t.Parent(object) == "" {
		r.allowInSilo(call, tx)
	} else {
		r.allow(call, tx, kindOf(t, parent, sel), sel)
	}
	call.Object = object.Ident()
	return object
}

// owner returns the ID of the project to search for sel, or "" if sel is an ID or a silo image.
func owner(tx *store.Tx, kind string, project, sel store.Selector) string {
	given, texts := project.Given(), selectorTexts[kind]
	tx.Refuse(sel.ID != "" && given, invalidRequest("%s", texts.both))
	if sel.ID != "" || !given && texts.neither == "" {
		return "" // an image without a project belongs to the silo
	}
	tx.Refuse(!given, invalidRequest("%s", texts.neither))
	return find(tx, store.Projects, "", project).ID
}

func find[T store.Record](tx *store.Tx, t store.Table[T], parent string, sel store.Selector) T {
	object, ok := t.Find(tx, parent, sel)
	tx.Refuse(!ok, notFound(kindOf(t, parent, sel), sel))
	return object
}

func byID[T store.Record](tx *store.Tx, t store.Table[T], id string) T {
	return find(tx, t, "", store.Selector{ID: id})
}

// kindOf returns the rack's word for the kind of an object that was not found. For an image's name
// the word tells whether the rack searched a project or the silo (A44).
func kindOf[T store.Record](t store.Table[T], parent string, sel store.Selector) string {
	switch {
	case t.Name != store.Images.Name || sel.ID != "":
		return t.Name
	case parent == "":
		return "silo-image"
	}
	return "project-image"
}

// Reading calls read() in a read-only transaction and returns its result.
func Reading[T any](r *Simulation, read func(*store.Tx) T) (value T, err error) {
	err = r.store.View(func(tx *store.Tx) { value = read(tx) })
	return value, err
}

// Changing calls change() in a transaction and returns its result. If call.Unwind is set, it rolls
// the transaction back and returns an error.
func Changing[T any](r *Simulation, call *Call, change func(*store.Tx) T) (value T, err error) {
	err = r.store.Update(func(tx *store.Tx) {
		value = change(tx)
		tx.Refuse(call.Unwind, errInternal)
	})
	return value, err
}

// View returns the operation that reads an object of a table.
func View[T store.Record](t store.Table[T]) func(Silo, *Call, *store.Tx) T {
	return func(s Silo, call *Call, tx *store.Tx) T { return lookup(s.Simulation, call, tx, t) }
}

func view[T store.Record](r *Simulation, call *Call, t store.Table[T]) (T, error) {
	return Reading(r, func(tx *store.Tx) T { return lookup(r, call, tx, t) })
}

// remove locks an object. Under the lock, drop() deletes the object's record, and then rest()
// removes its files and devices.
func remove[T store.Record](r *Simulation, call *Call, t store.Table[T],
	drop func(*store.Tx, T), rest func(T) error) error {
	object, err := view(r, call, t)
	if err != nil {
		return err
	}
	id := object.Ident().ID
	defer r.locks.Lock(id)()
	err = r.store.Update(func(tx *store.Tx) {
		object = byID(tx, t, id)
		drop(tx, object)
	})
	if err != nil {
		return err
	}
	return rest(object)
}

// List returns the operation that lists the objects of a table in the project that the call names.
func List[T store.Record](t store.Table[T]) func(Silo, *Call, *store.Tx) []T {
	return func(s Silo, call *Call, tx *store.Tx) []T {
		return scan(tx, call, t, s.project(call, tx).ID)
	}
}

func scan[T store.Record](tx *store.Tx, call *Call, t store.Table[T], parent string) []T {
	return t.Scan(tx, parent, call.Window.SortBy, call.Window.After, call.Window.Limit)
}
