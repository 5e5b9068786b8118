package simulator

import (
	"net/http"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// selectorTexts are what the rack says when an ID comes with a project or a name without (A05).
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

// allow refuses what the caller's role does not permit: one who may read is told so, one who may
// not is told that there is nothing (A15).
func (s *Server) allow(r *request, kind string, sel store.Selector) error {
	switch role := s.switches.get().Role; {
	case role == adminapi.RoleNone:
		return notFound(kind, sel)
	case role == adminapi.RoleViewer && r.Method != http.MethodGet:
		return errForbidden
	}
	return nil
}

// project finds the project that the query or the path names.
func (s *Server) project(r *request, tx *store.Tx, sel store.Selector) (store.Project, error) {
	p, ok, err := tx.Project(sel)
	if err == nil && !ok {
		err = notFound("project", sel)
	}
	if err == nil {
		err = s.allow(r, "project", sel)
	}
	return p, err
}

// queryProject finds the project of a list or a create.
func (s *Server) queryProject(r *request, tx *store.Tx) (store.Project, error) {
	sel, _ := store.ParseSelector(r.query.Get("project"))
	return s.project(r, tx, sel)
}

// lookup finds the object that a path parameter names, together with the query's project.
func lookup[T any](s *Server, r *request, tx *store.Tx, t store.Table[T], param string) (T, error) {
	object, err := lookupSelector(s, r, tx, t, param)
	if err == nil {
		r.about(t.Ident(object))
	}
	return object, err
}

func lookupSelector[T any](s *Server, r *request, tx *store.Tx, t store.Table[T], param string) (T, error) {
	var none T
	sel, _ := store.ParseSelector(param)
	parent, err := owner(r, tx, t.Name, sel)
	if err != nil {
		return none, err
	}
	object, err := find(tx, t, parent, sel)
	if err != nil {
		return none, err
	}
	if t.Parent(object) == "" && r.Method == http.MethodGet {
		return object, nil // what belongs to the silo may be read by everybody in it
	}
	return object, s.allow(r, kindOf(t, parent, sel), sel)
}

// owner is the project in which a name is to be looked up.
func owner(r *request, tx *store.Tx, kind string, sel store.Selector) (string, error) {
	given := r.query.Get("project")
	texts := selectorTexts[kind]
	switch {
	case sel.ID != "" && given != "":
		return "", invalidRequest("%s", texts.both)
	case sel.ID != "":
		return "", nil
	case given == "" && texts.neither == "":
		return "", nil // an image's name without a project is one of the silo's
	case given == "":
		return "", invalidRequest("%s", texts.neither)
	}
	project, _ := store.ParseSelector(given)
	p, ok, err := tx.Project(project)
	if err == nil && !ok {
		err = notFound("project", project)
	}
	return p.ID, err
}

// find gets the object that a selector names; a name is looked up in parent.
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

// kindOf is what the rack calls an object that it does not find: an image by its name is one of the
// project or of the silo (A44).
func kindOf[T any](t store.Table[T], parent string, sel store.Selector) string {
	switch {
	case t.Name != store.Images.Name || sel.ID != "":
		return t.Name
	case parent == "":
		return "silo-image"
	}
	return "project-image"
}
