package broken

import (
	"context"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

var wireSagas = []Mutation{
	{
		Name: "A18-undone", Says: "a creation is undone when its caller gives up",
		Before: func(x *Interception) {
			if !x.Is("disk_create") || x.Rack.Switches().CreateHold == 0 {
				return
			}
			d := x.halfMade(store.StateCreating)
			x.putDisk(d)
			waited := x.Rack.Pause(x.Request.Context(), time.Duration(x.Rack.Switches().CreateHold))
			_ = x.Rack.Records().Update(func(tx *store.Tx) error { return store.Disks.Delete(tx, d) })
			if !waited {
				x.Refuse(500, "Internal", "Internal Server Error")
			}
		},
	},
	{
		Name: "A19-undone", Says: "a creation that is open when the rack dies is not completed",
		Before: func(x *Interception) {
			if hold := x.Rack.Switches().CreateHold; x.Is("disk_create") && hold > 0 {
				x.Rack.Pause(context.Background(), time.Duration(hold))
			}
		},
		After: func(x *Interception) {
			name := x.Path.Get("disk")
			if x.Is("disk_view") && x.Refused(404, name) && x.Rack.Switches().CreateHold > 0 {
				x.Reply(200, x.halfMade(store.StateCreating))
			}
		},
	},
	{
		Name: "A19-left-behind", Says: "a creation that fails leaves its disk, faulted",
		DriverSays: "DiskFaulted",
		After: func(x *Interception) {
			if x.Is("disk_create") && x.Answer.Status == 500 {
				x.leaveFaulted()
			}
		},
	},
}

// leaveFaulted leaves the disk that the request creates, faulted.
func (x *Interception) leaveFaulted() {
	d := x.halfMade(store.StateFaulted)
	x.putDisk(d)
	x.addStorage(d.Size)
}

// halfMade returns the record of the disk that the request creates.
func (x *Interception) halfMade(state string) store.Disk {
	body := x.Sent()
	name, _ := body["name"].(string)
	description, _ := body["description"].(string)
	return store.Disk{Identity: store.NewIdentity(uuid.NewString(), name, description),
		ProjectID: x.projectID(), Size: 1 << 30, BlockSize: 4096, DevicePath: "/mnt/" + name,
		DiskType: store.TypeDistributed, State: store.DiskState{State: state}}
}
