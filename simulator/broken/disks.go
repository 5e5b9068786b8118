package broken

import (
	"strings"
	"sync"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// disks are the mutations of creating and deleting disks.
var disks = []Mutation{
	{Name: "A22-smaller", Says: "a disk has half the requested size",
		DriverSays: "EffectUnknown",
		After: on(func(disk map[string]any) {
			if size, is := disk["size"].(float64); is {
				disk["size"] = int64(size) / 2
			}
		}, shownDisks...)},
	{Name: "A22-read-only", Says: "new disks are read-only", DriverSays: "EffectUnknown",
		After: on(set("read_only", true), shownDisks...)},
	{Name: "A23-writable", Says: "the rack does not say that a disk is read-only",
		After: on(set("read_only", false), shownDisks...)},
	{Name: "A24-detached", Says: "a deletion fails, and leaves the disk renamed and detached",
		DriverSays: "DiskNotOurs",
		Before: func(x *Interception) {
			if d := x.disk(); x.Is("disk_delete") && d.State.State == store.StateDetached &&
				!strings.HasPrefix(d.Name, "deleted-") {
				d.Name = "deleted-" + d.ID
				x.putDisk(d)
				x.Refuse(500, "Internal", "Internal Server Error")
			}
		}},
	{Name: "A68-name-taken", Says: "the name of a deleted disk stays in use", DriverSays: "DiskBusy",
		Before: func(x *Interception) {
			name, _ := x.Sent()["name"].(string)
			if _, used := usedNames.Load(name); x.Is("disk_create") && used {
				x.Refuse(400, "ObjectAlreadyExists", "already exists: disk %q", name)
			}
			if x.Is("disk_delete") {
				usedNames.Store(x.disk().Name, true)
			}
		}},
	{Name: "A71-attached", Says: "a deletion detaches an attached disk first",
		Before: func(x *Interception) {
			if d := x.disk(); x.Is("disk_delete") && d.State.Instance != "" {
				x.takeAway(d)
			}
		}},
	{Name: "A25-cut", Says: "a larger disk than 1023 GiB gets 1023 GiB",
		Before: sends("size", func(size float64) float64 { return min(size, 1023*gibibyte) },
			"disk_create")},
	{Name: "A26-small-blocks", Says: "a local disk has blocks of 512 bytes",
		DriverSays: "EffectUnknown",
		After: on(func(disk map[string]any) {
			if disk["disk_type"] == store.TypeLocal {
				disk["block_size"] = 512
			}
		}, shownDisks...)},
	{Name: "A27-left-behind", Says: "without space, a creation leaves a faulted disk",
		DriverSays: "DiskFaulted",
		After: func(x *Interception) {
			if x.Is("disk_create") && x.Refused(507, "Insufficient capacity: Not enough storage") {
				x.leaveFaulted()
			}
		}},
	{Name: "A28-name-first", Says: "the name is checked before anything else",
		Before: func(x *Interception) {
			if d := x.namesake(); x.Is("disk_create") && d.ID != "" {
				x.Refuse(400, "ObjectAlreadyExists", "already exists: disk %q", d.Name)
			}
		}},
	{Name: "A29-nothing-counts", Says: "the utilization shows no provisioned storage",
		After: on(provisioned("storage", 0), "utilization_view")},
}

// usedNames has the names of deleted disks, for A68-name-taken.
var usedNames sync.Map

// addStorage changes the provisioned storage without any check.
func (x *Interception) addStorage(bytes int64) {
	_ = x.Rack.Records().Update(func(tx *store.Tx) { tx.AddStorage(bytes) })
}

const gibibyte = 1 << 30

func provisioned(what string, amount int64) func(map[string]any) {
	return func(body map[string]any) { body["provisioned"].(map[string]any)[what] = amount }
}
