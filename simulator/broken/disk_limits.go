package broken

import (
	"math"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

const gibibyte = 1 << 30

var diskLimits = []Mutation{
	{
		Name: "A25-rounds", Says: "sizes are rounded up to whole GiB",
		Before: sends("size", roundedUp, "disk_create"),
	},
	{
		Name: "A25-cut", Says: "a disk beyond 1023 GiB is made with 1023 GiB",
		Before: sends("size", func(size float64) float64 { return min(size, 1023*gibibyte) },
			"disk_create"),
	},
	{
		Name: "A26-small-blocks", Says: "a local disk has blocks of 512 bytes",
		DriverSays: "EffectUnknown",
		After: on(func(disk map[string]any) {
			if disk["disk_type"] == store.TypeLocal {
				disk["block_size"] = 512
			}
		}, shownDisks...),
	},
	{
		Name: "A26-snapshots", Says: "local disks can be snapshotted",
		Before: func(x *Interception) {
			if d := x.disk(); x.Is("snapshot_create") && d.DiskType == store.TypeLocal {
				d.DiskType = store.TypeDistributed
				x.putDisk(d)
				x.Answer = x.Carry()
				d.DiskType = store.TypeLocal
				x.putDisk(d)
			}
		},
	},
	{
		Name: "A26-any-size", Says: "the size of a local disk is rounded up to whole GiB",
		Before: func(x *Interception) {
			if size, _ := x.Sent()["size"].(float64); x.createsLocal() && size < 1<<40 {
				sends("size", roundedUp, "disk_create")(x)
			}
		},
	},
	{
		Name: "A26-no-largest", Says: "a local disk that no drive can hold is made smaller",
		Before: func(x *Interception) {
			if x.createsLocal() {
				sends("size", func(size float64) float64 { return min(size, gibibyte) }, "disk_create")(x)
			}
		},
	},
	{
		Name: "A27-local", Says: "a local disk takes its space when it is created",
		Before: func(x *Interception) {
			if x.createsLocal() && x.Rack.Switches().Full {
				x.Refuse(507, "InsufficientCapacity", "Insufficient capacity: Not enough storage")
			}
		},
	},
	{
		Name: "A27-internal", Says: "a lack of space is an internal error",
		After: reword(507, "Insufficient capacity: Not enough storage", 500, "Internal",
			"Internal Server Error"),
	},
	{
		Name: "A27-left-behind", Says: "a disk for which there is no space is left, faulted",
		DriverSays: "DiskFaulted",
		After: func(x *Interception) {
			if x.Is("disk_create") && x.Refused(507, "Insufficient capacity: Not enough storage") {
				x.leaveFaulted()
			}
		},
	},
	{
		Name: "A28-name-first", Says: "the name is looked at before anything else",
		Before: func(x *Interception) {
			if d := x.namesake(); x.Is("disk_create") && d.ID != "" {
				x.Refuse(400, "ObjectAlreadyExists", "already exists: disk %q", d.Name)
			}
		},
	},
	{
		Name: "A28-size-first", Says: "the size is looked at before the source",
		Before: func(x *Interception) {
			if size, is := x.Sent()["size"].(float64); is && x.Is("disk_create") && size < gibibyte {
				x.Refuse(400, "InvalidValue", "unsupported value for %q: total size must be at least 1 GiB",
					"size")
			}
		},
	},
	{
		Name: "A29-free-snapshots", Says: "snapshots do not count",
		After: func(x *Interception) {
			switch size, _ := object(x.Answer.Body)["size"].(float64); {
			case x.Succeeded("snapshot_create"):
				x.addStorage(-int64(size))
			case x.Succeeded("snapshot_delete"):
				x.addStorage(2 * gibibyte) // the size of the check's disk
			}
		},
	},
	{
		Name: "A29-another-code", Says: "exceeding the quota is 400 InvalidRequest",
		After: reword(507, "Storage Limit Exceeded", 400, "InvalidRequest", "Storage Limit Exceeded"),
	},
	{
		Name: "A29-per-role", Says: "collaborators are shown what they have left, not the quota",
		After: func(x *Interception) {
			if x.Is("utilization_view") && x.Rack.Switches().Role == adminapi.RoleCollaborator {
				x.Edit(func(use map[string]any) {
					use["capacity"], use["provisioned"] = use["provisioned"], use["capacity"]
				})
			}
		},
	},
}

// createsLocal reports whether the request creates a local disk.
func (x *Interception) createsLocal() bool {
	backend, _ := x.Sent()["disk_backend"].(map[string]any)
	return x.Is("disk_create") && backend["type"] == store.TypeLocal
}

// roundedUp rounds bytes up to whole GiB.
func roundedUp(bytes float64) float64 { return math.Ceil(bytes/gibibyte) * gibibyte }
