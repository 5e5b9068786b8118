package broken

import (
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// imports are the mutations of imported disks, and of images.
var imports = []Mutation{
	{
		Name: "A90-deleted", Says: "a disk is deleted while it imports",
		Before: usable("disk_delete"),
	},
	{
		Name: "A90-attached", Says: "a disk is attached before its import",
		Before: usable("instance_disk_attach"),
	},
	{
		Name: "A90-not-started", Says: "a disk is not set to importing",
		Before: func(x *Interception) {
			if x.Is("disk_bulk_write_import_start") {
				x.Answer = &Answer{Status: 204, Header: map[string][]string{}}
			}
		},
	},
	{
		Name: "A90-part-of-a-block", Says: "a part of a block is imported",
		After: func(x *Interception) {
			if x.Is("disk_bulk_write_import") && x.Refused(400, "not block") {
				x.Answer = &Answer{Status: 204, Header: map[string][]string{}}
			}
		},
	},
	{
		Name: "A90-import-ready", Says: "a finalized disk stays import_ready",
		Before: func(x *Interception) {
			if d := x.disk(); x.Is("disk_finalize_import") && d.State.State == store.StateImportReady {
				x.Answer = &Answer{Status: 204, Header: map[string][]string{}}
			}
		},
	},
	{
		Name: "A91-quota", Says: "an image counts in the quota",
		After: func(x *Interception) {
			if x.Is("image_create") && x.Answer.Status == 201 {
				x.addStorage(1 << 30)
			}
		},
	},
	{
		Name: "A91-conflict", Says: "an image's name that is taken is 409",
		After: reword(400, "already exists: project-image", 409, "Conflict", "the name is taken"),
	},
	{
		Name: "A91-not-promoted", Says: "a promoted image stays the project's",
		Before: func(x *Interception) {
			if id := x.Path.Get("image"); x.Is("image_promote") {
				image, err := x.Rack.Images.View(&engine.Call{ReadOnly: true},
					engine.Ref{Object: store.Selector{ID: id}})
				if err == nil {
					x.Reply(202, image)
				}
			}
		},
	},
}

// usable lets an operation find a disk detached that has not been imported.
func usable(operation string) func(*Interception) {
	return func(x *Interception) {
		d := x.disk()
		if !x.Is(operation) ||
			d.State.State != store.StateImportReady && d.State.State != store.StateImporting {
			return
		}
		d.State.State = store.StateDetached
		x.putDisk(d)
	}
}
