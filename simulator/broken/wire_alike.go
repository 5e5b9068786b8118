package broken

import (
	"strconv"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// wireAlike are the mutations that make two answers about the same object differ.
var wireAlike = []Mutation{
	{
		Name: "A72-other-time", Says: "each answer gives another time of creation",
		After: func(x *Interception) {
			if x.Answer.Status < 300 && x.Is("disk_view", "snapshot_view", "instance_view") {
				x.Edit(newlyCreated)
			}
		},
	},
	{
		Name:  "A72-other-time-afterwards",
		Says:  "the answer to a creation gives another time of it than every read",
		After: on(newlyCreated, "disk_create"),
	},
	{
		Name: "A72-list-of-disks", Says: "the list of disks shows attached ones as detached",
		After: on(func(disk map[string]any) {
			disk["state"] = map[string]any{"state": store.StateDetached}
		}, "disk_list"),
	},
	{
		Name: "A72-list-of-snapshots", Says: "the list of snapshots shows ready ones as being taken",
		After: on(set("state", "creating"), "snapshot_list"),
	},
	{
		Name: "A72-list-of-instances", Says: "the list of instances shows stopped ones as running",
		After: on(func(instance map[string]any) {
			instance["run_state"] = store.RunRunning
		}, "instance_list"),
	},
	{
		Name:  "A72-disks-of-an-instance",
		Says:  "the list of an instance's disks shows them with other blocks",
		After: on(set("block_size", 4096), "instance_disk_list"),
	},
	{
		Name: "A72-view-by-name", Says: "a disk that is read by name has no path of its device",
		After: func(x *Interception) {
			if x.Is("disk_view") && !isID(x.Path.Get("disk")) {
				x.Edit(func(disk map[string]any) { disk["device_path"] = "" })
			}
		},
	},
}

func newlyCreated(object map[string]any) {
	object["time_created"] = time.Now().UTC().Format("2006-01-02T15:04:05.000000Z")
}

// dropsTheLast returns a hook that leaves the last object out of each full page of these
// lists.
func dropsTheLast(lists ...string) func(*Interception) {
	return func(x *Interception) {
		limit, err := strconv.Atoi(x.Request.URL.Query().Get("limit"))
		if err != nil {
			limit = 100
		}
		if !x.Succeeded(lists...) {
			return
		}
		x.EditBody(func(page map[string]any) {
			if items, is := page["items"].([]any); is && len(items) == limit {
				page["items"] = items[:limit-1]
			}
		})
	}
}
