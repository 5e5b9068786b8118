package broken

import "github.com/oxidecomputer/oxide-csi-plugin/simulator/store"

// The operations that show disks and snapshots.
var (
	shownDisks     = []string{"disk_create", "disk_view", "disk_list"}
	shownSnapshots = []string{"snapshot_create", "snapshot_view", "snapshot_list"}
)

// instance reads the instance in the path; the zero value is none.
func (x *Exchange) instance() (instance store.Instance) {
	sel, _ := store.ParseSelector(x.Path.Get("instance"))
	_ = x.Rack.Records().View(func(tx *store.Tx) error {
		var err error
		instance, _, err = store.Instances.Get(tx, sel.ID)
		return err
	})
	return instance
}

// force changes the record of the disk that the request names, past the rules, and answers with it.
func (x *Exchange) force(state store.DiskState) {
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
func (x *Exchange) accept(object any) { x.Reply(202, object) }

// on is a change of the answer to these operations.
func on(change func(map[string]any), operations ...string) func(*Exchange) {
	return func(x *Exchange) {
		if x.Is(operations...) {
			x.Edit(change)
		}
	}
}

// set is a change of one field.
func set(field string, value any) func(map[string]any) {
	return func(object map[string]any) { object[field] = value }
}

// sends is a change of one field of the body that is sent to these operations.
func sends[T any](field string, change func(T) T, operations ...string) func(*Exchange) {
	return func(x *Exchange) {
		body := x.Sent()
		if value, is := body[field].(T); is && x.Is(operations...) {
			body[field] = change(value)
			x.Send(body)
		}
	}
}

// inState refuses an operation on an instance that is in a state.
func inState(operation, state, message string) func(*Exchange) {
	return func(x *Exchange) {
		if x.Is(operation) && x.instance().RunState == state {
			x.Refuse(400, "InvalidRequest", "%s", message)
		}
	}
}

// acceptsIn accepts an operation on an instance that is in a state, without effect.
func acceptsIn(operation, state string) func(*Exchange) {
	return func(x *Exchange) {
		if i := x.instance(); x.Is(operation) && i.RunState == state {
			x.accept(i)
		}
	}
}

// ofDisk refuses an operation on a disk that is in a state.
func ofDisk(operation, state string, status int, code, message string) func(*Exchange) {
	return func(x *Exchange) {
		if x.Is(operation) && x.disk().State.State == state {
			x.Refuse(status, code, "%s", message)
		}
	}
}

// detach takes a disk from its instance, whatever the rules say.
func (x *Exchange) detach(disk store.Disk) {
	_ = x.Rack.Plane().Unplug(disk.State.Instance, disk.ID)
	disk.State = store.DiskState{State: store.StateDetached}
	x.putDisk(disk)
}

// reword changes the answers that are errors with this status and text: to another status, code and
// message, of which "" is the same as before.
func reword(status int, text string, want int, code, message string) func(*Exchange) {
	return func(x *Exchange) {
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

// disks reads the disks of the instance in the path.
func (x *Exchange) disks() (disks []store.Disk) {
	id := x.instance().ID
	_ = x.Rack.Records().View(func(tx *store.Tx) (err error) {
		disks, err = tx.DisksOf(id)
		return err
	})
	return disks
}

func (x *Exchange) putInstance(instance store.Instance) {
	_ = x.Rack.Records().Update(func(tx *store.Tx) error {
		return store.Instances.Put(tx, instance)
	})
}

func (x *Exchange) eachInstance(do func(store.Instance)) {
	_ = x.Rack.Records().View(func(tx *store.Tx) error {
		return store.Instances.Each(tx, func(i store.Instance) error {
			do(i)
			return nil
		})
	})
}

// refuseTaken refuses to create an instance whose name is taken.
func refuseTaken(x *Exchange) {
	name, _ := x.Sent()["name"].(string)
	x.eachInstance(func(i store.Instance) {
		if x.Is("instance_create") && i.Name == name {
			x.Refuse(400, "ObjectAlreadyExists", "already exists: instance %q", name)
		}
	})
}

// leave creates an instance that was refused for a disk, stopped and with another body, and keeps
// the refusal.
func (x *Exchange) leave(change func(map[string]any)) {
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

// unstarted is the instance that was created to be started, and is stopped; the zero value is none.
func (x *Exchange) unstarted() (instance store.Instance) {
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
