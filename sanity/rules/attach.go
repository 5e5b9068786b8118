package rules

import "github.com/oxidecomputer/oxide.go/oxide"

// attachRules are about attaching disks to instances and detaching them.
var attachRules = []Rule{
	{
		ID:     "A33",
		Says:   "Attaching what is attached to the same instance is 202, even while it runs",
		Why:    "The driver repeats an attach whose answer it did not get, and takes 202 for done.",
		Source: "read: datastore/disk.rs",
		Calls:  []string{"instance_disk_attach"},
		Check:  checkRepeatedAttach,
	},
	{
		ID:     "A36",
		Says:   "Detaching a detached disk is 202, whichever instance is named",
		Why:    "The driver repeats a detach whose answer it did not get, and takes 202 for done.",
		Source: "read: datastore/disk.rs",
		Calls:  []string{"instance_disk_detach"},
		Check:  checkRepeatedDetach,
	},
}

func checkRepeatedAttach(c *Check) {
	disk, instance := c.Disk(), c.StoppedInstance()
	for _, step := range []string{"attach a disk", "attach it again"} {
		attached := Must[*oxide.Disk](c, step)(c.Attach(disk.Id, instance.Id))
		Equal(c, step+": the disk's state", attached.State.State(), oxide.DiskStateStateAttached)
	}
	if c.Hotplug && c.Here != nil {
		for _, step := range []string{"attach to a running instance", "attach it again"} {
			Must[*oxide.Disk](c, step)(c.Attach(c.Disk().Id, c.Here.ID))
		}
	}
}

func checkRepeatedDetach(c *Check) {
	disk := Must[*oxide.Disk](c, "detach a detached disk")(
		c.Detach(c.Disk().Id, c.StoppedInstance().Id))
	Equal(c, "its state", disk.State.State(), oxide.DiskStateStateDetached)
}
