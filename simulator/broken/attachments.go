package broken

import "github.com/oxidecomputer/oxide-csi-plugin/simulator/store"

var attachments = []Mutation{
	{Name: "A16-eight", Says: "an instance takes at most 8 disks, as on racks up to v17",
		Before: func(x *Interception) {
			if x.Is("instance_disk_attach") && len(x.disks()) >= 8 {
				x.Refuse(400, "InvalidRequest", "cannot attach more than 8 disks to instance")
			}
		}},
	{Name: "A17-needs-it-stopped", DriverSays: "InstanceMustBeStopped",
		Says: "no disk can be attached to a running instance, although the rack can hot-plug",
		Before: func(x *Interception) {
			if x.Is("instance_disk_attach") && x.instance().Active() && x.disk().State.Instance == "" {
				x.Refuse(400, "InvalidRequest", "cannot attach disk: instance is not fully stopped")
			}
		}},
	{Name: "A30-across-projects", Says: "an instance can have a disk of another project",
		After: func(x *Interception) {
			if x.Is("instance_disk_attach") && x.Refused(400, "same project") {
				disk := x.disk()
				disk.State = store.DiskState{State: store.StateAttached, Instance: x.instance().ID}
				x.putDisk(disk)
				x.accept(disk)
			}
		}},
	{Name: "A31-attach-without-effect", DriverSays: "DiskBusy",
		Says: "an attach answers that the disk is attached, but does not attach it",
		Before: func(x *Interception) {
			if disk := x.disk(); x.Is("instance_disk_attach") && disk.State.Instance == "" {
				disk.State = store.DiskState{State: store.StateAttached, Instance: x.instance().ID}
				x.accept(disk)
			}
		}},
	{Name: "A31-detach-without-effect", DriverSays: "RackResponseInvalid",
		Says: "the answer to a detach shows the disk as still attached",
		Before: func(x *Interception) {
			if x.Is("instance_disk_detach") {
				x.accept(x.disk())
			}
		}},
	{Name: "A32-refuses-creating", Says: "an attach of a disk in creating is refused",
		Before: ofDisk("instance_disk_attach", "creating", 400, "InvalidRequest",
			"cannot attach disk: invalid state creating")},
	{Name: "A33-refuses-again",
		Says: "an attach of a disk that the instance already has is refused",
		Before: ofDisk("instance_disk_attach", "attached", 400, "InvalidRequest",
			"cannot attach disk: disk is already attached")},
	{Name: "A34-takes-it-away", DriverSays: "DiskAttachedElsewhere",
		Says: "an attach takes the disk from another instance that has it",
		Before: func(x *Interception) {
			disk := x.disk()
			if x.Is("instance_disk_attach") && disk.State.Instance != "" &&
				!disk.AttachedTo(x.instance().ID) && x.instance().ID != "" {
				x.takeAway(disk)
			}
		}},
	{Name: "A35-detaches-local", Says: "a local disk can be detached from a running instance",
		Before: func(x *Interception) {
			if disk := x.disk(); x.Is("instance_disk_detach") && disk.DiskType == store.TypeLocal {
				x.accept(x.takeAway(disk))
			}
		}},
	{Name: "A36-refuses-again", Says: "a detach of a detached disk is refused",
		Before: ofDisk("instance_disk_detach", "detached", 400, "InvalidRequest",
			"cannot detach disk: disk is not attached")},
	{Name: "A37-detaches-elsewhere",
		Says: "a detach ignores which instance the request names",
		Before: func(x *Interception) {
			if disk := x.disk(); x.Is("instance_disk_detach") && disk.State.Instance != "" {
				x.accept(x.takeAway(disk))
			}
		}},
	{Name: "A67-undone", Says: "an attach that answers 503 does nothing",
		After: func(x *Interception) {
			if x.Is("instance_disk_attach") && x.Answer.Status == 503 {
				x.takeAway(x.disk())
			}
		}},
}
