package broken

import (
	"encoding/json"
	"net/http"
	"slices"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// These are the operations whose answers contain disks or snapshots.
var (
	shownDisks     = []string{"disk_create", "disk_view", "disk_list"}
	shownSnapshots = []string{"snapshot_create", "snapshot_view", "snapshot_list"}
)

// view reads from the records. It returns the zero value if it cannot.
func view[T any](x *Interception, read func(*store.Tx) T) (found T) {
	_ = x.Rack.Records().View(func(tx *store.Tx) { found = read(tx) })
	return found
}

func all[T store.Record](x *Interception, t store.Table[T]) []T {
	return view(x, func(tx *store.Tx) []T { return slices.Collect(t.All(tx)) })
}

// instance returns the instance in the path, or the zero value if there is none.
func (x *Interception) instance() store.Instance {
	sel, _ := store.ParseSelector(x.Path.Get("instance"))
	return view(x, func(tx *store.Tx) store.Instance {
		i, _ := store.Instances.Get(tx, sel.ID)
		return i
	})
}

// takeAway detaches a disk from its instance without any check, and returns the disk.
func (x *Interception) takeAway(disk store.Disk) store.Disk {
	_ = x.Rack.Plane().Unplug(disk.State.Instance, disk.ID)
	disk.State = store.DiskState{State: store.StateDetached}
	x.putDisk(disk)
	return disk
}

func (x *Interception) accept(object any) { x.Reply(202, object) }

// on returns a hook that applies change to the answers to these operations.
func on(change func(map[string]any), operations ...string) func(*Interception) {
	return func(x *Interception) {
		if x.Is(operations...) {
			x.Edit(change)
		}
	}
}

func set(field string, value any) func(map[string]any) {
	return func(object map[string]any) { object[field] = value }
}

// sends returns a hook that changes one field of the body of requests for these operations.
func sends[T any](field string, change func(T) T, operations ...string) func(*Interception) {
	return func(x *Interception) {
		body := x.Sent()
		if value, is := body[field].(T); is && x.Is(operations...) {
			body[field] = change(value)
			x.Send(body)
		}
	}
}

// acceptsIn returns a hook that accepts an operation on an instance in the given state
// without carrying it out.
func acceptsIn(operation, state string) func(*Interception) {
	return func(x *Interception) {
		if i := x.instance(); x.Is(operation) && i.RunState == state {
			x.accept(i)
		}
	}
}

// ofDisk returns a hook that refuses an operation on a disk in the given state.
func ofDisk(operation, state string, status int, code, message string) func(*Interception) {
	return func(x *Interception) {
		if x.Is(operation) && x.disk().State.State == state {
			x.Refuse(status, code, "%s", message)
		}
	}
}

// reword returns a hook that changes error answers with this status and text to another
// status, code and message; "" keeps the old value.
func reword(status int, text string, want int, code, message string) func(*Interception) {
	return func(x *Interception) {
		if !x.Refused(status, text) {
			return
		}
		x.Answer.Status = want
		x.EditBody(func(body map[string]any) {
			if code != "" {
				body["error_code"] = code
			}
			if message != "" {
				body["message"] = message
			}
		})
	}
}

func (x *Interception) disks() []store.Disk {
	id := x.instance().ID
	return view(x, func(tx *store.Tx) []store.Disk { return tx.DisksOf(id) })
}

// Reply answers with a success.
func (x *Interception) Reply(status int, body any) {
	text, _ := json.Marshal(body) // this package's types always encode
	x.Answer = &Answer{Status: status, Header: http.Header{}, Body: text}
}

// Succeeded reports whether the answer is a success of one of these operations.
func (x *Interception) Succeeded(operations ...string) bool {
	return x.Is(operations...) && x.Answer.Status < 300
}

func (x *Interception) query(change func(map[string][]string)) {
	values := x.Request.URL.Query()
	change(values)
	x.Request.URL.RawQuery = values.Encode()
}

func (x *Interception) isList() bool {
	return x.Is("disk_list", "snapshot_list", "instance_list", "image_list", "project_list",
		"instance_disk_list")
}

func (x *Interception) projectID() string {
	return view(x, func(tx *store.Tx) string {
		sel, _ := store.ParseSelector(x.Request.URL.Query().Get("project"))
		p, _ := store.Projects.Find(tx, "", sel)
		return p.ID
	})
}

// namesake returns the disk that already has the name in the request's body, or the zero value.
func (x *Interception) namesake() (found store.Disk) {
	name, project := x.Sent()["name"], x.projectID()
	for _, d := range all(x, store.Disks) {
		if d.Name == name && d.ProjectID == project {
			found = d
		}
	}
	return found
}

// putDisk writes the record of a disk without any check.
func (x *Interception) putDisk(d store.Disk) {
	_ = x.Rack.Records().Update(func(tx *store.Tx) { tx.PutDisk(d) })
}

func isID(text string) bool { return uuid.Validate(text) == nil }

// disk returns the disk that the body or the path of the request names, or the zero value.
func (x *Interception) disk() store.Disk {
	name, _ := x.Sent()["disk"].(string)
	if name == "" {
		name = x.Path.Get("disk")
	}
	project := x.instance().ProjectID
	return view(x, func(tx *store.Tx) store.Disk {
		sel, _ := store.ParseSelector(name)
		disk, _ := store.Disks.Find(tx, project, sel)
		return disk
	})
}
