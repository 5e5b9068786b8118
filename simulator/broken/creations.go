package broken

import (
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// creations are the mutations of the parts with which an instance is created.
var creations = []Mutation{
	{
		Name: "A50-64-vcpus", Says: "an instance has at most 64 vCPUs",
		Before: func(x *Interception) {
			if cpus, _ := x.Sent()["ncpus"].(float64); x.Is("instance_create") && cpus > 64 {
				x.Refuse(400, "InvalidRequest", "cannot have more than 64 vCPUs per instance")
			}
		},
	},
	{
		Name: "A50-rounds-memory", Says: "memory is rounded up to whole GiB",
		Before: sends("memory", func(bytes float64) float64 {
			if bytes < gibibyte {
				return bytes
			}
			return roundedUp(bytes)
		}, "instance_create"),
	},
	{
		Name: "A50-any-host", Says: "a host name may have any characters",
		Before: sends("hostname", func(name string) string {
			return strings.Trim(strings.ReplaceAll(name, "_", "-"), "-.")
		}, "instance_create"),
	},
	{
		Name: "A50-long-host", Says: "a host name is cut after 253 characters",
		Before: sends("hostname", func(name string) string { return name[:min(len(name), 253)] },
			"instance_create"),
	},
	{
		Name:  "A51-leaves-the-instance",
		Says:  "an instance whose disk is taken is made without its disks, and an error",
		After: func(x *Interception) { x.leave(func(body map[string]any) { delete(body, "disks") }) },
	},
	{
		Name: "A51-leaves-an-attachment",
		Says: "a disk stays attached to an instance that was not made",
		After: func(x *Interception) {
			x.leave(func(body map[string]any) {
				body["disks"] = slices.DeleteFunc(body["disks"].([]any), func(disk any) bool {
					name, _ := disk.(map[string]any)["name"].(string)
					return disk.(map[string]any)["type"] != "attach" ||
						strings.Contains(string(x.Answer.Body), name)
				})
			})
		},
	},
	{
		Name: "A58-is-failed", Says: "an instance that cannot be started is created and failed",
		After: func(x *Interception) {
			if i := x.unstarted(); i.ID != "" {
				i.SetRunState(store.RunFailed)
				x.putInstance(i)
				x.accept(i)
				x.Answer.Status = 201
			}
		},
	},
	{
		Name: "A66-name-first", Says: "the name of an instance is checked first",
		Before: refuseTaken,
	},
	{
		Name: "A66-disks-late",
		Says: "the disks that are made with an instance are checked after its name",
		After: func(x *Interception) {
			if x.Is("instance_create") && x.Refused(400, "total size") {
				refuseTaken(x)
			}
		},
	},
}

// networks are the mutations of the interfaces and addresses of instances.
var networks = []Mutation{
	{
		Name: "A52-v4-alone", Says: "an interface has IPv4 alone, as on racks up to v18",
		After: on(func(nic map[string]any) {
			stack := nic["ip_stack"].(map[string]any)
			if value := stack["value"].(map[string]any); stack["type"] == "dual_stack" {
				stack["type"], stack["value"] = "v4", value["v4"]
			}
		}, "instance_network_interface_list"),
	},
	{
		Name: "A52-gateway", Says: "a guest gets the first address of a subnet",
		After: on(func(nic map[string]any) {
			stack := nic["ip_stack"].(map[string]any)
			if stack["type"] == "v4" {
				stack["value"].(map[string]any)["ip"] = "172.30.0.1"
			}
		}, "instance_network_interface_list"),
	},
	{
		Name: "A64-sixteen", Says: "an instance may have 16 interfaces",
		After: reword(400, "more than 8 network interfaces", 400, "",
			"An instance may not have more than 16 network interfaces"),
	},
	{
		Name: "A64-name-first", Says: "the name of an instance is checked before its interfaces",
		Before: refuseTaken,
	},
	{
		Name: "A64-two-in-a-subnet", Says: "two interfaces may be in one subnet",
		Before: func(x *Interception) {
			body := x.Sent()
			nics, _ := body["network_interfaces"].(map[string]any)
			if params, _ := nics["params"].([]any); x.Is("instance_create") && len(params) == 2 {
				nics["params"] = params[:1]
				x.Send(body)
			}
		},
	},
	{
		Name: "A65-not-listed", Says: "the address for source NAT is not among the external ones",
		After: func(x *Interception) {
			if x.Is("instance_external_ip_list") {
				x.EditBody(func(page map[string]any) { page["items"] = []any{} })
			}
		},
	},
	{
		Name: "A65-all-ports", Says: "an instance has all ports of its address",
		After: on(func(ip map[string]any) { ip["first_port"], ip["last_port"] = 0, 65535 },
			"instance_external_ip_list"),
	},
}
