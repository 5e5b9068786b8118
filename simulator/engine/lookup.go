package engine

import (
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// selectorTexts are the rack's errors for an ID with a project, and for a name without one (A05).
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

// allow refuses a call that the caller's role does not permit. A viewer gets Forbidden, and a
// caller without a role gets Not Found (A15).
func (r *Simulation) allow(call *Call, tx *store.Tx, kind string, sel store.Selector) {
	switch role := r.switches.get().Role; {
	case role == adminapi.RoleNone:
		tx.Check(notFound(kind, sel))
	case role == adminapi.RoleViewer && !call.ReadOnly:
		tx.Check(ErrForbidden)
	}
}

// allowInSilo refuses a change of the silo's objects to callers without the role. Every user of the
// silo may read them.
func (r *Simulation) allowInSilo(call *Call, tx *store.Tx) {
	if !call.ReadOnly && !r.collaborates() {
		tx.Check(ErrForbidden)
	}
}

func (r *Simulation) collaborates() bool {
	role := r.switches.get().Role
	return role == adminapi.RoleCollaborator || role == adminapi.RoleFleetAdmin
}

// project finds the project that a call changes or reads.
func (r *Simulation) project(call *Call, tx *store.Tx, sel store.Selector) store.Project {
	p := find(tx, store.Projects, "", sel)
	r.allow(call, tx, "project", sel)
	return p
}

// lookup finds the object that a Ref names. A name is looked up in the Ref's project.
func lookup[T any](r *Simulation, call *Call, tx *store.Tx, t store.Table[T], ref Ref) T {
	parent := owner(tx, t.Name, ref)
	object := find(tx, t, parent, ref.Object)
	if t.Parent(object) == "" {
		r.allowInSilo(call, tx)
	} else {
		r.allow(call, tx, kindOf(t, parent, ref.Object), ref.Object)
	}
	call.Object = t.Ident(object)
	return object
}

// owner returns the ID of the project in which a name is looked up.
func owner(tx *store.Tx, kind string, ref Ref) string {
	given, texts := ref.Project.Given(), selectorTexts[kind]
	switch {
	case ref.Object.ID != "" && given:
		tx.Check(invalidRequest("%s", texts.both))
	case ref.Object.ID != "", !given && texts.neither == "":
		return "" // an image without a project belongs to the silo
	case !given:
		tx.Check(invalidRequest("%s", texts.neither))
	}
	return find(tx, store.Projects, "", ref.Project).ID
}

// find returns the object that a selector names. A name is looked up in parent.
func find[T any](tx *store.Tx, t store.Table[T], parent string, sel store.Selector) T {
	object, ok := t.Find(tx, parent, sel)
	if !ok {
		tx.Check(notFound(kindOf(t, parent, sel), sel))
	}
	return object
}

func byID[T any](tx *store.Tx, t store.Table[T], id string) T {
	return find(tx, t, "", store.Selector{ID: id})
}

// kindOf returns the rack's word for an object that was not found. For an image that was named, the
// word tells whether the project or the silo was searched (A44).
func kindOf[T any](t store.Table[T], parent string, sel store.Selector) string {
	switch {
	case t.Name != store.Images.Name || sel.ID != "":
		return t.Name
	case parent == "":
		return "silo-image"
	}
	return "project-image"
}

// reading returns what read returns in a transaction.
func reading[T any](r *Simulation, read func(*store.Tx) T) (value T, err error) {
	err = r.store.View(func(tx *store.Tx) { value = read(tx) })
	return value, err
}

// changing returns what change returns in a transaction. If a fault asks the call to fail halfway,
// the transaction is undone.
func changing[T any](r *Simulation, call *Call, change func(*store.Tx) T) (value T, err error) {
	err = r.store.Update(func(tx *store.Tx) {
		value = change(tx)
		failHalfway(call, tx)
	})
	return value, err
}

// failHalfway undoes the transaction if a fault asks the call to fail halfway.
func failHalfway(call *Call, tx *store.Tx) {
	if call.Unwind {
		tx.Check(errInternal)
	}
}

func view[T any](r *Simulation, call *Call, t store.Table[T], ref Ref) (T, error) {
	return reading(r, func(tx *store.Tx) T { return lookup(r, call, tx, t, ref) })
}

// remove deletes an object that a Ref names, under its lock: drop changes the records, and rest
// then removes its files and devices.
func remove[T any](r *Simulation, call *Call, t store.Table[T], ref Ref, drop func(*store.Tx, T),
	rest func(T) error) error {
	object, err := view(r, call, t, ref)
	if err != nil {
		return err
	}
	id := t.Ident(object).ID
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

// ofInstance reads objects that belong to the instance that a Ref names.
func ofInstance[T any](r *Simulation, call *Call, ref Ref,
	read func(*store.Tx, store.Instance) []T) ([]T, error) {
	return reading(r, func(tx *store.Tx) []T {
		return read(tx, lookup(r, call, tx, store.Instances, ref))
	})
}

func list[T any](r *Simulation, call *Call, t store.Table[T], project store.Selector, w Window) (
	[]T, error) {
	return reading(r, func(tx *store.Tx) []T {
		return t.Scan(tx, r.project(call, tx, project).ID, w.SortBy, w.After, w.Limit)
	})
}

func listOfSilo[T any](r *Simulation, t store.Table[T], w Window) ([]T, error) {
	return reading(r, func(tx *store.Tx) []T {
		return t.Scan(tx, "", w.SortBy, w.After, w.Limit)
	})
}
