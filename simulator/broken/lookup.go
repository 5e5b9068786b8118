package broken

import (
	"encoding/json"
	"net/http"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// Reply answers with a success.
func (x *Interception) Reply(status int, body any) {
	text, _ := json.Marshal(body) // this package's types always encode
	x.Answer = &Answer{Status: status, Header: http.Header{}, Body: text}
}

// Succeeded reports whether the answer is a success of one of these operations.
func (x *Interception) Succeeded(operations ...string) bool {
	return x.Is(operations...) && x.Answer.Status < 300
}

// query changes the request's query.
func (x *Interception) query(change func(map[string][]string)) {
	values := x.Request.URL.Query()
	change(values)
	x.Request.URL.RawQuery = values.Encode()
}

// isList reports whether the request is for a list.
func (x *Interception) isList() bool {
	return x.Is("disk_list", "snapshot_list", "instance_list", "image_list", "project_list",
		"instance_disk_list")
}

// projectID returns the ID of the project in the query.
func (x *Interception) projectID() (id string) {
	_ = x.Rack.Records().View(func(tx *store.Tx) error {
		sel, _ := store.ParseSelector(x.Request.URL.Query().Get("project"))
		p, _, err := tx.Project(sel)
		id = p.ID
		return err
	})
	return id
}

// eachDisk calls visit for every disk.
func (x *Interception) eachDisk(visit func(store.Disk)) {
	_ = x.Rack.Records().View(func(tx *store.Tx) error {
		return store.Disks.Each(tx, func(d store.Disk) error {
			visit(d)
			return nil
		})
	})
}

// namesake returns the disk that already has the name in the request's body, or the zero value.
func (x *Interception) namesake() (found store.Disk) {
	name, project := x.Sent()["name"], x.projectID()
	x.eachDisk(func(d store.Disk) {
		if d.Name == name && d.ProjectID == project {
			found = d
		}
	})
	return found
}

// putDisk changes a record without the rules.
func (x *Interception) putDisk(d store.Disk) {
	_ = x.Rack.Records().Update(func(tx *store.Tx) error { return tx.PutDisk(d) })
}

// isID reports whether text is an ID instead of a name.
func isID(text string) bool { return uuid.Validate(text) == nil }
