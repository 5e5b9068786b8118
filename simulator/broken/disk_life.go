package broken

import (
	"strings"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

var diskLife = []Mutation{
	{
		Name: "A22-smaller", Says: "a disk has half the size that was asked for",
		DriverSays: "EffectUnknown",
		After: on(func(disk map[string]any) {
			if size, is := disk["size"].(float64); is {
				disk["size"] = int64(size) / 2
			}
		}, shownDisks...),
	},
	{
		Name: "A22-read-only", Says: "new disks are read-only", DriverSays: "EffectUnknown",
		After: on(set("read_only", true), shownDisks...),
	},
	{
		Name: "A23-writable", Says: "read-only disks are not shown as such",
		After: on(set("read_only", false), shownDisks...),
	},
	{
		Name: "A24-detached", Says: "a deletion fails, and leaves the disk renamed and detached",
		DriverSays: "DiskNotOurs",
		Before: func(x *Interception) {
			if d := x.disk(); x.Is("disk_delete") && d.State.State == store.StateDetached &&
				!strings.HasPrefix(d.Name, "deleted-") {
				d.Name = "deleted-" + d.ID
				x.putDisk(d)
				x.Refuse(500, "Internal", "Internal Server Error")
			}
		},
	},
	{
		Name: "A68-still-there", Says: "a deleted disk is there until it is freed",
		Before: func(x *Interception) {
			if x.Is("disk_delete") {
				x.Later(time.Hour)
				x.Answer = &Answer{Status: 204, Header: map[string][]string{}}
			}
		},
	},
	{
		Name: "A68-name-taken", Says: "the name of a deleted disk stays taken", DriverSays: "DiskBusy",
		Before: func(x *Interception) {
			name, _ := x.Sent()["name"].(string)
			if _, used := usedNames.Load(name); x.Is("disk_create") && used {
				x.Refuse(400, "ObjectAlreadyExists", "already exists: disk %q", name)
			}
			if x.Is("disk_delete") {
				usedNames.Store(x.disk().Name, true)
			}
		},
	},
	{
		Name: "A68-quota-first", Says: "a deleted disk does not count although it is not freed",
		Before: func(x *Interception) {
			if d := x.disk(); x.Is("disk_delete") {
				if x.Answer = x.Carry(); x.Answer.Status == 204 {
					x.addStorage(-d.Size)
				}
			}
		},
	},
	{
		Name: "A71-attached", Says: "an attached disk is taken away and deleted",
		Before: func(x *Interception) { x.takeAway() },
	},
	{
		Name: "A71-detached", Says: "an attached disk is detached in place of its deletion",
		Before: func(x *Interception) {
			if state := x.disk().State.State; x.takeAway() {
				x.Refuse(400, "InvalidRequest", "disk cannot be deleted in state %q", state)
			}
		},
	},
}

// takeAway detaches the disk of a delete request without the rules. It reports whether the disk
// was attached.
func (x *Interception) takeAway() bool {
	d := x.disk()
	if !x.Is("disk_delete") || d.State.Instance == "" {
		return false
	}
	x.detach(d)
	return true
}

// usedNames has the names of the disks that were deleted, for the mutation that keeps names
// taken.
var usedNames sync.Map

// addStorage changes the provisioned amount without the rules.
func (x *Interception) addStorage(bytes int64) {
	_ = x.Rack.Records().Update(func(tx *store.Tx) error { return tx.AddStorage(bytes) })
}
