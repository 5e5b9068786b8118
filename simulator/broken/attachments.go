package broken

import "github.com/oxidecomputer/oxide-csi-plugin/simulator/store"

var attachments = []Mutation{
	{Name: "A16-eight", Says: "an instance with 8 disks gains no more, as on racks up to v17",
		Before: func(x *Interception) {
			if x.Is("instance_disk_attach") && len(x.disks()) >= 8 {
				x.Refuse(400, "InvalidRequest", "cannot attach more than 8 disks to instance")
			}
		}},
	{Name: "A17-needs-it-stopped", DriverSays: "InstanceMustBeStopped",
		Says: "a running instance gains no disk, although the rack can hot-plug",
		Before: func(x *Interception) {
			if x.Is("instance_disk_attach") && x.instance().Active() && x.disk().State.Instance == "" {
				x.Refuse(400, "InvalidRequest", "cannot attach disk: instance is not fully stopped")
			}
		}},
	{Name: "A30-across-projects", Says: "a disk of another project is attached",
		After: func(x *Interception) {
			if x.Is("instance_disk_attach") && x.Refused(400, "same project") {
				disk := x.disk()
				disk.State = store.DiskState{State: store.StateAttached, Instance: x.instance().ID}
				x.putDisk(disk)
				x.accept(disk)
			}
		}},
	{Name: "A31-attach-without-effect", DriverSays: "DiskBusy",
		Says: "an attach is answered with an attached disk, and nothing is attached",
		Before: func(x *Interception) {
			if disk := x.disk(); x.Is("instance_disk_attach") && disk.State.Instance == "" {
				disk.State = store.DiskState{State: store.StateAttached, Instance: x.instance().ID}
				x.accept(disk)
			}
		}},
	{Name: "A31-detach-without-effect", DriverSays: "RackResponseInvalid",
		Says: "a detach is answered with the disk as it is, attached",
		Before: func(x *Interception) {
			if x.Is("instance_disk_detach") {
				x.accept(x.disk())
			}
		}},
	{Name: "A32-refuses-creating", Says: "a disk in creating is not attached",
		Before: ofDisk("instance_disk_attach", "creating", 400, "InvalidRequest",
			"cannot attach disk: invalid state creating")},
	{Name: "A33-refuses-again",
		Says: "a disk that is attached to an instance is not attached to it again",
		Before: ofDisk("instance_disk_attach", "attached", 400, "InvalidRequest",
			"cannot attach disk: disk is already attached")},
	{Name: "A34-takes-it-away", DriverSays: "DiskAttachedElsewhere",
		Says: "a disk that another instance has is taken from it and attached",
		Before: func(x *Interception) {
			disk := x.disk()
			if x.Is("instance_disk_attach") && disk.State.Instance != "" &&
				!disk.AttachedTo(x.instance().ID) && x.instance().ID != "" {
				x.takeAway(disk)
			}
		}},
	{Name: "A35-detaches-local", Says: "a running instance loses a local disk",
		Before: func(x *Interception) {
			if disk := x.disk(); x.Is("instance_disk_detach") && disk.DiskType == store.TypeLocal {
				x.accept(x.takeAway(disk))
			}
		}},
	{Name: "A36-refuses-again", Says: "a detached disk is not detached again",
		Before: ofDisk("instance_disk_detach", "detached", 400, "InvalidRequest",
			"cannot detach disk: disk is not attached")},
	{Name: "A37-detaches-elsewhere",
		Says: "a disk is detached from the instance that has it, whichever is named",
		Before: func(x *Interception) {
			if disk := x.disk(); x.Is("instance_disk_detach") && disk.State.Instance != "" {
				x.accept(x.takeAway(disk))
			}
		}},
	{Name: "A67-undone", Says: "an attach that is answered with 503 is not done",
		After: func(x *Interception) {
			if x.Is("instance_disk_attach") && x.Answer.Status == 503 {
				x.takeAway(x.disk())
			}
		}},
}
