package broken

import (
	"slices"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// snapshots are the mutations of snapshots, imported disks and images.
var snapshots = []Mutation{
	{Name: "A38-faulted", Says: "a new snapshot is shown as faulted", DriverSays: "DiskBusy",
		After: on(set("state", "faulted"), "snapshot_create")},
	{Name: "A38-another-disk", Says: "a snapshot is of another disk", DriverSays: "EffectUnknown",
		After: on(set("disk_id", uuid.Nil.String()), shownSnapshots...)},
	{Name: "A39-another-code", Says: "a second snapshot of a disk is an internal error",
		After: reword(409, "volume repair lock", 500, "Internal", "Internal Server Error")},
	{Name: "A40-default", Says: "a disk from a snapshot has blocks of 512 bytes",
		After: on(func(disk map[string]any) {
			if disk["snapshot_id"] != nil {
				disk["block_size"] = 512
			}
		}, shownDisks...)},
	{Name: "A41-state-first", Says: "a disk's state is checked before a snapshot's name",
		Before: ofDisk("snapshot_create", store.StateFaulted, 503, "ServiceNotAvailable",
			"Service Unavailable")},
	{Name: "A42-invalid", Says: "a faulted disk cannot be snapshotted: 400",
		After: reword(503, "Service Unavailable", 400, "InvalidRequest",
			"disk cannot be snapshotted in state \"faulted\"")},
	{Name: "A43-kept", Says: "a disk with snapshots cannot be deleted", DriverSays: "DiskBusy",
		Before: func(x *Interception) {
			if x.Is("disk_delete") && x.snapshotted(x.disk().ID) {
				x.Refuse(400, "InvalidRequest", "disk cannot be deleted: it has snapshots")
			}
		}},
	{Name: "A44-kind", Says: "the error for a missing image does not name its owner",
		After: func(x *Interception) {
			if name := x.Path.Get("image"); x.Refused(404, "-image with name") {
				x.Refuse(404, "ObjectNotFound", "not found: image with name %q", name)
			}
		}},
	{Name: "A59-blank", Says: "a disk from an unfinished snapshot is blank",
		DriverSays: "SnapshotNotReady",
		Before: func(x *Interception) {
			body := x.Sent()
			backend, _ := body["disk_backend"].(map[string]any)
			source, _ := backend["disk_source"].(map[string]any)
			if id, is := source["snapshot_id"].(string); is && x.Is("disk_create") && x.unfinished(id) {
				backend["disk_source"] = map[string]any{"type": "blank", "block_size": 512}
				x.Send(body)
			}
		}},
	{Name: "A90-attached", Says: "a disk can be attached before its import",
		Before: func(x *Interception) {
			if d := x.disk(); x.Is("instance_disk_attach") && d.State.State == store.StateImportReady {
				d.State.State = store.StateDetached
				x.putDisk(d)
			}
		}},
	{Name: "A91-quota", Says: "an image counts in the quota",
		After: func(x *Interception) {
			if x.Succeeded("image_create") {
				x.addStorage(1 << 30)
			}
		}},
}

func (x *Interception) snapshotted(diskID string) bool {
	return slices.ContainsFunc(all(x, store.Snapshots),
		func(s store.SnapshotRecord) bool { return s.DiskID == diskID })
}

func (x *Interception) unfinished(id string) bool {
	return slices.ContainsFunc(all(x, store.Snapshots), func(s store.SnapshotRecord) bool {
		return s.ID == id && s.State == store.SnapshotCreating
	})
}
