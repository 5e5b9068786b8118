package broken

import (
	"context"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// snapshots are the mutations of snapshots and images.
var snapshots = []Mutation{
	{
		Name: "A38-faulted", Says: "a snapshot is answered as faulted", DriverSays: "DiskBusy",
		After: on(set("state", "faulted"), "snapshot_create"),
	},
	{
		Name: "A38-another-disk", Says: "a snapshot is of another disk", DriverSays: "EffectUnknown",
		After: on(set("disk_id", uuid.Nil.String()), shownSnapshots...),
	},
	{
		Name: "A39-another-code", Says: "a second snapshot of a disk is an internal error",
		After: reword(409, "volume repair lock", 500, "Internal", "Internal Server Error"),
	},
	{
		Name: "A39-replaces-on", Says: "a snapshot is taken while a region of its disk is replaced",
		Before: func(x *Interception) {
			if x.Is("snapshot_create") && x.Rack.Switches().Replacing {
				replacing := func(on bool) {
					_, _ = x.Rack.ChangeSwitches(func(now *adminapi.Switches) error {
						now.Replacing = on
						return nil
					})
				}
				replacing(false)
				defer replacing(true)
				x.Answer = x.Carry()
			}
		},
	},
	{
		Name: "A39-name-first", Says: "a snapshot's name is looked at before the lock of its disk",
		After: func(x *Interception) {
			if x.Is("snapshot_create") && x.Answer.Status == 409 {
				x.refuseTakenSnapshot()
			}
		},
	},
	{
		Name: "A40-default", Says: "a disk from a snapshot has blocks of 512 bytes",
		After: on(func(disk map[string]any) {
			if disk["snapshot_id"] != nil {
				disk["block_size"] = 512
			}
		}, shownDisks...),
	},
	{
		Name: "A41-quota-first", Says: "a snapshot's quota is charged before its name is taken",
		After: func(x *Interception) {
			use, _ := x.Rack.Silo.Utilization()
			if x.Is("snapshot_create") && x.Refused(400, "ObjectAlreadyExists") &&
				use.Provisioned.Storage >= use.Capacity.Storage {
				x.Refuse(507, "InsufficientCapacity", "Insufficient capacity: Storage Limit Exceeded")
			}
		},
	},
	{
		Name: "A41-name-first", Says: "a snapshot's name is looked at before its physical space",
		After: func(x *Interception) {
			if x.Is("snapshot_create") && x.Refused(507, "Not enough storage") {
				x.refuseTakenSnapshot()
			}
		},
	},
	{
		Name: "A41-state-first", Says: "a disk's state is looked at before a snapshot's name",
		Before: ofDisk("snapshot_create", store.StateFaulted, 503, "ServiceNotAvailable",
			"Service Unavailable"),
	},
	{
		Name: "A42-invalid", Says: "a faulted disk cannot be snapshotted: 400",
		After: func(x *Interception) {
			if x.Is("snapshot_create") && x.Answer.Status == 503 {
				x.Refuse(400, "InvalidRequest", "disk cannot be snapshotted in state %q", "faulted")
			}
		},
	},
	{
		Name: "A43-cascade", Says: "deleting a disk deletes its snapshots",
		Before: func(x *Interception) {
			if d := x.disk(); x.Is("disk_delete") {
				of := x.snapshotsOf(d.ID)
				if x.Answer = x.Carry(); x.Answer.Status == 204 {
					for _, id := range of {
						_ = x.Rack.Snapshots.Delete(&engine.Call{Context: context.Background()},
							engine.Ref{Object: store.Selector{ID: id}})
					}
				}
			}
		},
	},
	{
		Name: "A43-kept", Says: "a disk that has snapshots is not deleted", DriverSays: "DiskBusy",
		Before: func(x *Interception) {
			if x.Is("disk_delete") && len(x.snapshotsOf(x.disk().ID)) > 0 {
				x.Refuse(400, "InvalidRequest", "disk cannot be deleted: it has snapshots")
			}
		},
	},
	{
		Name: "A43-deleted-halfway", Says: "a snapshot in creating is busy: 409",
		After: reword(400, "snapshot cannot be deleted in state Creating", 409, "Conflict",
			"the snapshot is being taken"),
	},
	{
		Name: "A44-all", Says: "listing images without a project lists those of projects too",
		After: func(x *Interception) {
			if x.Is("image_list") && !x.Request.URL.Query().Has("project") {
				x.Reply(200, map[string]any{"next_page": nil, "items": x.images()})
			}
		},
	},
	{
		Name: "A44-kind", Says: "an image that is not there is an image, whosever it is",
		After: func(x *Interception) {
			if name := x.Path.Get("image"); x.Refused(404, "-image with name") {
				x.Refuse(404, "ObjectNotFound", "not found: image with name %q", name)
			}
		},
	},
	{
		Name: "A59-blank", Says: "a disk from a snapshot that is being taken is blank",
		DriverSays: "SnapshotNotReady",
		Before: func(x *Interception) {
			body := x.Sent()
			backend, _ := body["disk_backend"].(map[string]any)
			source, _ := backend["disk_source"].(map[string]any)
			if id, is := source["snapshot_id"].(string); is && x.Is("disk_create") && x.unfinished(id) {
				backend["disk_source"] = map[string]any{"type": "blank", "block_size": 512}
				x.Send(body)
			}
		},
	},
}

// snapshotsOf returns the IDs of the snapshots of a disk.
func (x *Interception) snapshotsOf(diskID string) (ids []string) {
	_ = x.Rack.Records().View(func(tx *store.Tx) error {
		return store.Snapshots.Each(tx, func(s store.SnapshotRecord) error {
			if s.DiskID == diskID {
				ids = append(ids, s.ID)
			}
			return nil
		})
	})
	return ids
}

// refuseTakenSnapshot refuses to take a snapshot if its name is taken.
func (x *Interception) refuseTakenSnapshot() {
	name, _ := x.Sent()["name"].(string)
	_ = x.Rack.Records().View(func(tx *store.Tx) error {
		if store.Snapshots.Taken(tx, x.projectID(), name) {
			x.Refuse(400, "ObjectAlreadyExists", "already exists: snapshot %q", name)
		}
		return nil
	})
}

// unfinished reports whether the snapshot is still being taken.
func (x *Interception) unfinished(id string) bool {
	var s store.SnapshotRecord
	_ = x.Rack.Records().View(func(tx *store.Tx) (err error) {
		s, _, err = store.Snapshots.Get(tx, id)
		return err
	})
	return s.State == store.SnapshotCreating
}

// images returns all images.
func (x *Interception) images() []store.Image {
	all := []store.Image{}
	_ = x.Rack.Records().View(func(tx *store.Tx) error {
		return store.Images.Each(tx, func(i store.Image) error {
			all = append(all, i)
			return nil
		})
	})
	return all
}
