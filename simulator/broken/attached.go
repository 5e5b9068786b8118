package broken

import "github.com/oxidecomputer/oxide-csi-plugin/simulator/store"

// These are the operations that show disks and snapshots.
var (
	shownDisks     = []string{"disk_create", "disk_view", "disk_list"}
	shownSnapshots = []string{"snapshot_create", "snapshot_view", "snapshot_list"}
)

// instance returns the instance in the path, or the zero value if there is none.
func (x *Interception) instance() (instance store.Instance) {
	sel, _ := store.ParseSelector(x.Path.Get("instance"))
	_ = x.Rack.Records().View(func(tx *store.Tx) error {
		var err error
		instance, _, err = store.Instances.Get(tx, sel.ID)
		return err
	})
	return instance
}

// force changes the record of the disk that the request names, without the rules, and answers
// with the disk.
func (x *Interception) force(state store.DiskState) {
	disk := x.disk()
	disk.State = state
	err := x.Rack.Records().Update(func(tx *store.Tx) error { return tx.PutDisk(disk) })
	if err != nil {
		x.Refuse(500, "Internal", "Internal Server Error")
		return
	}
	x.accept(disk)
}

// accept answers 202 with an object.
func (x *Interception) accept(object any) { x.Reply(202, object) }

// on returns a hook that changes the answers to these operations.
func on(change func(map[string]any), operations ...string) func(*Interception) {
	return func(x *Interception) {
		if x.Is(operations...) {
			x.Edit(change)
		}
	}
}

// set returns a change of one field.
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

// inState returns a hook that refuses an operation on an instance in the given state.
func inState(operation, state, message string) func(*Interception) {
	return func(x *Interception) {
		if x.Is(operation) && x.instance().RunState == state {
			x.Refuse(400, "InvalidRequest", "%s", message)
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

// detach detaches a disk from its instance without the rules.
func (x *Interception) detach(disk store.Disk) {
	_ = x.Rack.Plane().Unplug(disk.State.Instance, disk.ID)
	disk.State = store.DiskState{State: store.StateDetached}
	x.putDisk(disk)
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

// disks returns the disks of the instance in the path.
func (x *Interception) disks() (disks []store.Disk) {
	id := x.instance().ID
	_ = x.Rack.Records().View(func(tx *store.Tx) (err error) {
		disks, err = tx.DisksOf(id)
		return err
	})
	return disks
}

func (x *Interception) putInstance(instance store.Instance) {
	_ = x.Rack.Records().Update(func(tx *store.Tx) error {
		return store.Instances.Put(tx, instance)
	})
}

func (x *Interception) eachInstance(do func(store.Instance)) {
	_ = x.Rack.Records().View(func(tx *store.Tx) error {
		return store.Instances.Each(tx, func(i store.Instance) error {
			do(i)
			return nil
		})
	})
}

// refuseTaken refuses to create an instance whose name is taken.
func refuseTaken(x *Interception) {
	name, _ := x.Sent()["name"].(string)
	x.eachInstance(func(i store.Instance) {
		if x.Is("instance_create") && i.Name == name {
			x.Refuse(400, "ObjectAlreadyExists", "already exists: instance %q", name)
		}
	})
}

// leave creates the instance that was refused because of a disk, stopped and with a changed body,
// and keeps the refusal.
func (x *Interception) leave(change func(map[string]any)) {
	if !x.Is("instance_create") || !x.Refused(400, "attached to another instance") {
		return
	}
	answer, body := x.Answer, x.Sent()
	body["start"] = false
	change(body)
	x.Send(body)
	x.Carry()
	x.Answer = answer
}

// unstarted returns the instance that should have been started at its creation and is stopped, or
// the zero value.
func (x *Interception) unstarted() (instance store.Instance) {
	answer := object(x.Answer.Body)
	if !x.Is("instance_create") || x.Sent()["start"] == false || answer["run_state"] != "stopped" {
		return instance
	}
	x.eachInstance(func(i store.Instance) {
		if i.ID == answer["id"] {
			instance = i
		}
	})
	return instance
}
