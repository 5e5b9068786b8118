package broken

import (
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// instances are the mutations of instances and of their networks.
var instances = slices.Concat(lives, creations, networks)

// lives are the mutations of the start, stop, update and deletion of instances.
var lives = []Mutation{
	{
		Name: "A20-counts-until-deleted",
		Says: "CPUs and memory count from an instance's creation to its deletion",
		After: func(x *Interception) {
			if !x.Is("utilization_view") {
				return
			}
			cpus, memory := 0, int64(0)
			x.eachInstance(func(i store.Instance) { cpus, memory = cpus+i.NCPUs, memory+i.Memory })
			x.Edit(func(body map[string]any) {
				provisioned := body["provisioned"].(map[string]any)
				provisioned["cpus"], provisioned["memory"] = cpus, memory
			})
		},
	},
	{
		Name: "A45-starts-while-stopping", Says: "the start of a stopping instance is accepted",
		Before: acceptsIn("instance_start", store.RunStopping),
	},
	{
		Name: "A46-stays-failed", Says: "a failed instance stays failed when it is stopped",
		Before: acceptsIn("instance_stop", store.RunFailed),
	},
	{
		Name: "A47-accepts-stopped", Says: "the reboot of a stopped instance is accepted",
		Before: acceptsIn("instance_reboot", store.RunStopped),
	},
	{
		Name: "A47-accepts-starting", Says: "the reboot of an instance that starts is accepted",
		Before: acceptsIn("instance_reboot", store.RunStarting),
	},
	{
		Name: "A47-starts-failed", Says: "the reboot of a failed instance starts it",
		Before: func(x *Interception) {
			if x.Is("instance_reboot") && x.instance().RunState == store.RunFailed {
				x.Operation, x.Request.URL.Path = "instance_start", strings.Replace(x.Request.URL.Path,
					"/reboot", "/start", 1)
			}
		},
	},
	{
		Name: "A47-detaches", Says: "a reboot detaches the instance's disks",
		After: func(x *Interception) {
			if x.Is("instance_reboot") && x.Answer.Status < 300 {
				for _, d := range x.disks() {
					x.detach(d)
				}
			}
		},
	},
	{
		Name: "A48-deletes-a-running-one", Says: "a running instance is deleted",
		Before: func(x *Interception) {
			if i := x.instance(); x.Is("instance_delete") && i.RunState == store.RunRunning {
				i.SetRunState(store.RunFailed)
				x.putInstance(i)
			}
		},
	},
	{
		Name: "A48-keeps-the-disks", DriverSays: "InstanceNotFound",
		Says: "the disks of a deleted instance stay attached to it",
		Before: func(x *Interception) {
			if !x.Is("instance_delete") {
				return
			}
			attached := x.disks()
			if x.Answer = x.Carry(); x.Answer.Status < 300 {
				for _, d := range attached {
					x.putDisk(d)
				}
			}
		},
	},
	{
		Name: "A49-changes-while-it-runs",
		Says: "an update that needs the instance stopped is accepted while it runs, without effect",
		After: func(x *Interception) {
			if x.Is("instance_update") && x.Refused(409, "must be stopped") {
				x.accept(x.instance())
				x.Answer.Status = 200
			}
		},
	},
	{
		Name: "A49-keeps-what-is-null", Says: "what is null in an update stays as it was",
		Before: func(x *Interception) {
			if body := x.Sent(); x.Is("instance_update") && body["auto_restart_policy"] == nil {
				body["auto_restart_policy"] = x.instance().AutoRestartPolicy
				x.Send(body)
			}
		},
	},
	{
		Name: "A49-any-boot-disk", Says: "a boot disk need not be attached",
		After: func(x *Interception) {
			if x.Refused(409, "boot disk must be attached") {
				x.accept(x.instance())
				x.Answer.Status = 200
			}
		},
	},
	{
		Name: "A49-states-first", Says: "an instance's state is looked at before its boot disk",
		After: func(x *Interception) {
			if x.Is("instance_update") && x.Refused(404, "disk with") && x.instance().Active() {
				x.Refuse(409, "Conflict", "instance must be stopped to change CPU or memory")
			}
		},
	},
	{
		Name: "A53-is-conflict", Says: "to stop an instance in creating is 409 Conflict",
		After: reword(400, "still being created", 409, "Conflict", ""),
	},
	{
		Name: "A53-stops-while-creating", Says: "the stop of an instance in creating is accepted",
		Before: acceptsIn("instance_stop", store.StateCreating),
	},
	{
		Name: "A60-is-500", Says: "a reboot from which the guest does not come back is 500",
		After: func(x *Interception) {
			if x.Is("instance_reboot") && x.instance().RunState == store.RunFailed {
				x.Refuse(500, "Internal", "Internal Server Error")
			}
		},
	},
	{
		Name: "A60-detaches", Says: "an instance that fails loses its disks",
		After: func(x *Interception) {
			if x.Is("instance_reboot") && x.instance().RunState == store.RunFailed {
				for _, d := range x.disks() {
					d.State = store.DiskState{State: store.StateDetached}
					x.putDisk(d)
				}
			}
		},
	},
}
