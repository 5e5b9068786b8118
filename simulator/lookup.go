package simulator

import (
	"net/http"

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
func (s *Server) allow(r *request, kind string, sel selector) error {
	switch role := s.switches.get().Role; {
	case role == adminapi.RoleNone:
		return notFound(kind, sel)
	case role == adminapi.RoleViewer && r.Method != http.MethodGet:
		return errForbidden
	}
	return nil
}

// project finds the project that the query or the path names.
func (s *Server) project(r *request, tx *tx, sel selector) (project, error) {
	p, ok, err := tx.project(sel)
	if err == nil && !ok {
		err = notFound("project", sel)
	}
	if err == nil {
		err = s.allow(r, "project", sel)
	}
	return p, err
}

func (tx *tx) project(sel selector) (project, bool, error) {
	if sel.id != "" {
		return projects.get(tx, sel.id)
	}
	return projects.byName(tx, "", sel.name)
}

// queryProject finds the project of a list or a create.
func (s *Server) queryProject(r *request, tx *tx) (project, error) {
	sel, _ := parseSelector(r.query.Get("project"))
	return s.project(r, tx, sel)
}

// lookup finds the object that a path parameter names, together with the query's project.
func lookup[T any](s *Server, r *request, tx *tx, t table[T], param string) (T, error) {
	object, err := lookupSelector(s, r, tx, t, param)
	if err == nil {
		r.about(t.ident(object))
	}
	return object, err
}

func lookupSelector[T any](s *Server, r *request, tx *tx, t table[T], param string) (T, error) {
	var none T
	sel, _ := parseSelector(param)
	parent, err := owner(r, tx, t.name, sel)
	if err != nil {
		return none, err
	}
	object, err := find(tx, t, parent, sel)
	if err != nil {
		return none, err
	}
	if t.parent(object) == "" && r.Method == http.MethodGet {
		return object, nil // what belongs to the silo may be read by everybody in it
	}
	return object, s.allow(r, t.kind(parent, sel), sel)
}

// owner is the project in which a name is to be looked up.
func owner(r *request, tx *tx, kind string, sel selector) (string, error) {
	given := r.query.Get("project")
	texts := selectorTexts[kind]
	switch {
	case sel.id != "" && given != "":
		return "", invalidRequest("%s", texts.both)
	case sel.id != "":
		return "", nil
	case given == "" && texts.neither == "":
		return "", nil // an image's name without a project is one of the silo's
	case given == "":
		return "", invalidRequest("%s", texts.neither)
	}
	project, _ := parseSelector(given)
	p, ok, err := tx.project(project)
	if err == nil && !ok {
		err = notFound("project", project)
	}
	return p.ID, err
}

// find gets the object that a selector names; a name is looked up in parent.
func find[T any](tx *tx, t table[T], parent string, sel selector) (T, error) {
	var object T
	var ok bool
	var err error
	if sel.id != "" {
		object, ok, err = t.get(tx, sel.id)
	} else {
		object, ok, err = t.byName(tx, parent, sel.name)
	}
	if err == nil && !ok {
		err = notFound(t.kind(parent, sel), sel)
	}
	return object, err
}

// kind is what the rack calls an object that it does not find: an image by its name is one of the
// project or of the silo (A44).
func (t table[T]) kind(parent string, sel selector) string {
	switch {
	case t.name != images.name || sel.id != "":
		return t.name
	case parent == "":
		return "silo-image"
	}
	return "project-image"
}
