package rules

import (
	"encoding/json"
	"maps"
	"slices"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// fields has the fields of an object that the client knows, by their JSON names.
type fields map[string]json.RawMessage

// fieldsOf splits an object into [fields], or a list into []fields.
func fieldsOf[T any](c *Check, object any) (parts T) {
	text, err := json.Marshal(object)
	if err == nil {
		err = json.Unmarshal(text, &parts)
	}
	c.must("take an answer of the rack apart", err)
	return parts
}

// Same demands that two answers show the same object: every field is equal, except those in but.
func (c *Check) Same(what string, got, want any, but ...string) {
	g, w := fieldsOf[fields](c, got), fieldsOf[fields](c, want)
	all := maps.Clone(w)
	maps.Copy(all, g)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if !slices.Contains(but, name) {
			Equal(c, what+": its "+name, string(g[name]), string(w[name]))
		}
	}
}

// Listed demands that a list contains an object once, and shows it as another answer does.
func (c *Check) Listed(what string, list, want any) {
	id := string(fieldsOf[fields](c, want)["id"])
	items := fieldsOf[[]fields](c, list)
	items = slices.DeleteFunc(items, func(f fields) bool { return string(f["id"]) != id })
	Equal(c, what+": how often it has "+id, len(items), 1)
	for _, item := range items {
		c.Same(what, item, want)
	}
}

func checkAlike(c *Check) {
	taken := Must[*oxide.Snapshot](c, "take a snapshot")(c.Snapshot(c.Disk().Id))
	view := func(params oxide.SnapshotViewParams) *oxide.Snapshot {
		return Must[*oxide.Snapshot](c, "read a snapshot")(c.Client.SnapshotView(c.ctx, params))
	}
	snapshot := view(oxide.SnapshotViewParams{Snapshot: oxide.NameOrId(taken.Id)})
	c.Same("the answer to the creation of a snapshot", taken, snapshot, "time_modified")
	c.Same("the snapshot that is read by name", view(oxide.SnapshotViewParams{
		Snapshot: oxide.NameOrId(taken.Name), Project: c.project()}), snapshot)
	c.Listed("the list of snapshots", Must[[]oxide.Snapshot](c, "list the snapshots")(
		c.Client.SnapshotListAllPages(c.ctx, oxide.SnapshotListParams{Project: c.project()})), snapshot)

	made := Must[*oxide.Instance](c, "create an instance")(c.CreateInstance(c.NewInstance()))
	c.Await(made.Id, oxide.InstanceStateStopped)
	instance := c.See(made.Id)
	c.Same("the answer to the creation of an instance", made, instance, "run_state", "time_modified",
		"time_run_state_updated")
	c.Same("the instance that is read by name", Must[*oxide.Instance](c, "read it by name")(
		c.Client.InstanceView(c.ctx, oxide.InstanceViewParams{Project: c.project(),
			Instance: oxide.NameOrId(made.Name)})), instance)
	c.Listed("the list of instances", Must[[]oxide.Instance](c, "list the instances")(
		c.Client.InstanceListAllPages(c.ctx, oxide.InstanceListParams{Project: c.project()})), instance)

	restored := Must[*oxide.Disk](c, "create a disk")(c.CreateDisk(c.fromSnapshot(taken.Id, false)))
	c.Same("the answer to the creation of a disk", restored, c.Look(restored.Id), "state",
		"time_modified")
	Must[*oxide.Disk](c, "attach it")(c.Attach(restored.Id, instance.Id))
	disk := c.Look(restored.Id)
	c.Same("the disk when it is attached", disk, restored, "state", "time_modified")
	c.Same("the disk that is read by name", Must[*oxide.Disk](c, "read the disk by name")(
		c.diskByName(c.ctx, disk.Name)), disk)
	c.Listed("the list of disks", Must[[]oxide.Disk](c, "list the disks")(
		c.Client.DiskListAllPages(c.ctx, oxide.DiskListParams{Project: c.project()})), disk)
	c.Listed("the list of the instance's disks", c.DisksOf(instance.Id), disk)
}
