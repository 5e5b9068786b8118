package broken

import (
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

const gibibyte = 1 << 30

var diskLimits = []Mutation{
	{
		Name: "A25-rounds", Rule: "A25", Says: "sizes are rounded up to whole GiB",
		Before: func(x *Exchange) {
			x.resize(func(size int64) int64 { return (size + gibibyte - 1) / gibibyte * gibibyte })
		},
	},
	{
		Name: "A25-cut", Rule: "A25", Says: "a disk beyond 1023 GiB is made with 1023 GiB",
		Before: func(x *Exchange) {
			x.resize(func(size int64) int64 { return min(size, 1023*gibibyte) })
		},
	},
	{
		Name: "A26-small-blocks", Rule: "A26", Says: "a local disk has blocks of 512 bytes",
		DriverSays: "VolumeExists",
		After: func(x *Exchange) {
			if x.Is("disk_create", "disk_view", "disk_list") {
				x.Edit(func(disk map[string]any) {
					if disk["disk_type"] == store.TypeLocal {
						disk["block_size"] = 512
					}
				})
			}
		},
	},
	{
		Name: "A26-snapshots", Rule: "A26", Says: "local disks can be snapshotted",
		Before: func(x *Exchange) {
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
		Name: "A27-internal", Rule: "A27", Says: "a lack of space is an internal error",
		After: func(x *Exchange) {
			if x.Refused(507, "Insufficient capacity: Not enough storage") {
				x.Refuse(500, "Internal", "Internal Server Error")
			}
		},
	},
	{
		Name: "A27-left-behind", Rule: "A27", Says: "a disk for which there is no space is left, faulted",
		DriverSays: "DiskFaulted",
		After: func(x *Exchange) {
			if x.Is("disk_create") && x.Refused(507, "Insufficient capacity: Not enough storage") {
				x.putDisk(x.halfMade(store.StateFaulted))
			}
		},
	},
	{
		Name: "A28-name-first", Rule: "A28", Says: "the name is looked at before anything else",
		Before: func(x *Exchange) {
			if d := x.namesake(); x.Is("disk_create") && d.ID != "" {
				x.Refuse(400, "ObjectAlreadyExists", "already exists: disk %q", d.Name)
			}
		},
	},
	{
		Name: "A28-size-first", Rule: "A28", Says: "the size is looked at before the source",
		Before: func(x *Exchange) {
			if size, is := x.Sent()["size"].(float64); is && x.Is("disk_create") && size < gibibyte {
				x.Refuse(400, "InvalidValue", "unsupported value for %q: total size must be at least 1 GiB",
					"size")
			}
		},
	},
	{
		Name: "A29-free-snapshots", Rule: "A29", Says: "snapshots do not count",
		After: func(x *Exchange) {
			switch size, _ := object(x.Answer.Body)["size"].(float64); {
			case x.Succeeded("snapshot_create"):
				x.addStorage(-int64(size))
			case x.Succeeded("snapshot_delete"):
				x.addStorage(2 * gibibyte) // what the check's has
			}
		},
	},
	{
		Name: "A29-another-code", Rule: "A29", Says: "exceeding the quota is 400 InvalidRequest",
		After: func(x *Exchange) {
			if x.Refused(507, "Storage Limit Exceeded") {
				x.Refuse(400, "InvalidRequest", "Storage Limit Exceeded")
			}
		},
	},
	{
		Name: "A29-per-role", Rule: "A29",
		Says: "collaborators are shown what they have left, not the quota",
		After: func(x *Exchange) {
			if x.Is("utilization_view") && x.Rack.Switches().Role == adminapi.RoleCollaborator {
				x.Edit(func(use map[string]any) {
					use["capacity"], use["provisioned"] = use["provisioned"], use["capacity"]
				})
			}
		},
	},
}

// resize changes the size of the disk that the request is to create.
func (x *Exchange) resize(change func(int64) int64) {
	body := x.Sent()
	if size, is := body["size"].(float64); is && x.Is("disk_create") {
		body["size"] = change(int64(size))
		x.Send(body)
	}
}
