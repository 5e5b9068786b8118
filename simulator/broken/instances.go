package broken

import (
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// instances are the mutations of instances and of their networks.
var instances = []Mutation{
	{Name: "A20-never-counts", Says: "the CPUs of an instance never count",
		After: on(provisioned("cpus", 0), "utilization_view")},
	{Name: "A45-starts-while-stopping", Says: "the start of a stopping instance is accepted",
		Before: acceptsIn("instance_start", store.RunStopping)},
	{Name: "A46-stays-failed", Says: "a failed instance stays failed when it is stopped",
		Before: acceptsIn("instance_stop", store.RunFailed)},
	{Name: "A47-accepts-stopped", Says: "the reboot of a stopped instance is accepted",
		Before: acceptsIn("instance_reboot", store.RunStopped)},
	{Name: "A48-keeps-the-disks", DriverSays: "InstanceNotFound",
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
		}},
	{Name: "A49-keeps-what-is-null", Says: "a null in an update keeps the old value",
		Before: func(x *Interception) {
			if body := x.Sent(); x.Is("instance_update") && body["auto_restart_policy"] == nil {
				body["auto_restart_policy"] = x.instance().AutoRestartPolicy
				x.Send(body)
			}
		}},
	{Name: "A53-stops-while-creating", Says: "the stop of an instance in creating is accepted",
		Before: acceptsIn("instance_stop", store.StateCreating)},
	{Name: "A60-detaches", Says: "an instance that fails loses its disks",
		After: func(x *Interception) {
			if x.Is("instance_reboot") && x.instance().RunState == store.RunFailed {
				for _, d := range x.disks() {
					d.State = store.DiskState{State: store.StateDetached}
					x.putDisk(d)
				}
			}
		}},
	{Name: "A50-long-host", Says: "a host name is cut after 253 characters",
		Before: sends("hostname", func(name string) string { return name[:min(len(name), 253)] },
			"instance_create")},
	{Name: "A51-counts", Says: "the disk of an instance that could not be created counts",
		After: func(x *Interception) {
			if x.Is("instance_create") && x.Refused(400, "attached to another instance") {
				x.addStorage(gibibyte)
			}
		}},
	{Name: "A58-is-failed", Says: "a new instance that cannot be started is failed",
		After: on(set("run_state", store.RunFailed), "instance_create")},
	{Name: "A66-name-first", Says: "the name of an instance is checked first",
		Before: func(x *Interception) {
			name, _ := x.Sent()["name"].(string)
			if x.Is("instance_create") && slices.ContainsFunc(all(x, store.Instances),
				func(i store.Instance) bool { return i.Name == name }) {
				x.Refuse(400, "ObjectAlreadyExists", "already exists: instance %q", name)
			}
		}},
	{Name: "A52-v4-alone", Says: "an interface has IPv4 alone, as on racks up to v18",
		After: on(func(nic map[string]any) {
			stack := nic["ip_stack"].(map[string]any)
			if value := stack["value"].(map[string]any); stack["type"] == "dual_stack" {
				stack["type"], stack["value"] = "v4", value["v4"]
			}
		}, "instance_network_interface_list")},
	{Name: "A64-two-in-a-subnet", Says: "two interfaces may be in one subnet",
		Before: func(x *Interception) {
			body := x.Sent()
			nics, _ := body["network_interfaces"].(map[string]any)
			if params, _ := nics["params"].([]any); x.Is("instance_create") && len(params) == 2 {
				nics["params"] = params[:1]
				x.Send(body)
			}
		}},
	{Name: "A65-all-ports", Says: "a source NAT address has all ports",
		After: on(func(ip map[string]any) { ip["first_port"], ip["last_port"] = 0, 65535 },
			"instance_external_ip_list")},
}
