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
func (r *Simulation) allow(call *Call, kind string, sel store.Selector) error {
	switch role := r.switches.get().Role; {
	case role == adminapi.RoleNone:
		return notFound(kind, sel)
	case role == adminapi.RoleViewer && !call.ReadOnly:
		return ErrForbidden
	}
	return nil
}

// allowInSilo refuses a change of the silo's objects to callers without the role. Every user of the
// silo may read them.
func (r *Simulation) allowInSilo(call *Call) error {
	if !call.ReadOnly && !r.collaborates() {
		return ErrForbidden
	}
	return nil
}

func (r *Simulation) collaborates() bool {
	role := r.switches.get().Role
	return role == adminapi.RoleCollaborator || role == adminapi.RoleFleetAdmin
}

func (r *Simulation) project(call *Call, tx *store.Tx, sel store.Selector) (store.Project, error) {
	p, ok, err := tx.Project(sel)
	if err == nil && !ok {
		err = notFound("project", sel)
	}
	if err == nil {
		err = r.allow(call, "project", sel)
	}
	return p, err
}

// lookup finds the object that a Ref names. A name is looked up in the Ref's project.
func lookup[T any](r *Simulation, call *Call, tx *store.Tx, t store.Table[T], ref Ref) (T, error) {
	object, err := lookupRef(r, call, tx, t, ref)
	if err == nil {
		call.Object = t.Ident(object)
	}
	return object, err
}

func lookupRef[T any](r *Simulation, call *Call, tx *store.Tx, t store.Table[T], ref Ref) (
	T, error) {
	var none T
	sel := ref.Object
	parent, err := owner(tx, t.Name, ref)
	if err != nil {
		return none, err
	}
	object, err := find(tx, t, parent, sel)
	if err != nil {
		return none, err
	}
	if t.Parent(object) == "" {
		return object, r.allowInSilo(call)
	}
	return object, r.allow(call, kindOf(t, parent, sel), sel)
}

// owner returns the ID of the project in which a name is looked up.
func owner(tx *store.Tx, kind string, ref Ref) (string, error) {
	sel, given := ref.Object, ref.Project.Given()
	texts := selectorTexts[kind]
	switch {
	case sel.ID != "" && given:
		return "", invalidRequest("%s", texts.both)
	case sel.ID != "":
		return "", nil
	case !given && texts.neither == "":
		return "", nil // an image without a project belongs to the silo
	case !given:
		return "", invalidRequest("%s", texts.neither)
	}
	p, ok, err := tx.Project(ref.Project)
	if err == nil && !ok {
		err = notFound("project", ref.Project)
	}
	return p.ID, err
}

// find returns the object that a selector names. A name is looked up in parent.
func find[T any](tx *store.Tx, t store.Table[T], parent string, sel store.Selector) (T, error) {
	var object T
	var ok bool
	var err error
	if sel.ID != "" {
		object, ok, err = t.Get(tx, sel.ID)
	} else {
		object, ok, err = t.ByName(tx, parent, sel.Name)
	}
	if err == nil && !ok {
		err = notFound(kindOf(t, parent, sel), sel)
	}
	return object, err
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
func reading[T any](r *Simulation, read func(*store.Tx) (T, error)) (value T, err error) {
	err = r.store.View(func(tx *store.Tx) error {
		value, err = read(tx)
		return err
	})
	return value, err
}

// changing returns what change returns in a transaction. If a fault asks the call to fail halfway,
// the transaction is undone.
func changing[T any](r *Simulation, call *Call, change func(*store.Tx) (T, error)) (value T,
	err error) {
	err = r.store.Update(func(tx *store.Tx) error {
		if value, err = change(tx); err == nil && call.Unwind {
			err = errInternal
		}
		return err
	})
	return value, err
}

func view[T any](r *Simulation, call *Call, t store.Table[T], ref Ref) (T, error) {
	return reading(r, func(tx *store.Tx) (T, error) { return lookup(r, call, tx, t, ref) })
}

// remove deletes an object that a Ref names, under its lock: drop changes the records, and rest
// then removes its files and devices.
func remove[T any](r *Simulation, call *Call, t store.Table[T], ref Ref,
	drop func(*store.Tx, T) error, rest func(T) error) error {
	object, err := view(r, call, t, ref)
	if err != nil {
		return err
	}
	id := store.Selector{ID: t.Ident(object).ID}
	defer r.locks.Lock(id.ID)()
	err = r.store.Update(func(tx *store.Tx) error {
		if object, err = find(tx, t, "", id); err != nil {
			return err
		}
		return drop(tx, object)
	})
	if err != nil {
		return err
	}
	return rest(object)
}

// ofInstance reads objects that belong to the instance that a Ref names.
func ofInstance[T any](r *Simulation, call *Call, ref Ref,
	read func(*store.Tx, store.Instance) ([]T, error)) ([]T, error) {
	return reading(r, func(tx *store.Tx) ([]T, error) {
		i, err := lookup(r, call, tx, store.Instances, ref)
		if err != nil {
			return nil, err
		}
		return read(tx, i)
	})
}

func list[T any](r *Simulation, call *Call, t store.Table[T], project store.Selector, w Window) (
	[]T, error) {
	return reading(r, func(tx *store.Tx) ([]T, error) {
		p, err := r.project(call, tx, project)
		if err != nil {
			return nil, err
		}
		return t.Scan(tx, p.ID, w.SortBy, w.After, w.Limit)
	})
}

func listOfSilo[T any](r *Simulation, t store.Table[T], w Window) ([]T, error) {
	return reading(r, func(tx *store.Tx) ([]T, error) {
		return t.Scan(tx, "", w.SortBy, w.After, w.Limit)
	})
}
