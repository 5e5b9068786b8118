package rules

import "slices"

// instanceRules are about instances: their creation, start, stop, update and deletion, and their
// networks.
var instanceRules = slices.Concat(lifeRules, creationRules, networkRules)

var lifeRules = []Rule{
	{
		ID:   "A20",
		Says: "CPUs and memory count as provisioned from start to stop, not before and not after",
		Why: "Who plans the silo's capacity with the simulator reads it so; of the driver only the " +
			"share of storage matters.",
		Source: "read: datastore/virtual_provisioning_collection.rs",
		Calls:  []string{"utilization_view", "instance_start", "instance_stop"},
		Check:  checkProvisioned,
	},
	{
		ID: "A45",
		Says: "Start: from stopped or failed, 202 and `starting` at first; 202 without effect while " +
			"active; 409 while stopping",
		Why: "A node that was stopped to attach a disk is started again by people and by tests; the " +
			"driver never does.",
		Source: "read: nexus/src/app/instance.rs",
		Calls:  []string{"instance_start", "instance_stop"},
		Check:  checkStart,
	},
	{
		ID: "A46",
		Says: "Stop is a hard halt, which needs no operating system: 202 and `stopping` at first, and " +
			"nobody reads `running` from then on; a stopped instance is left alone, a failed one becomes " +
			"stopped",
		Why: "The driver must be safe against a node that is halted without a shutdown, and the " +
			"simulator's users halt one so.",
		Source: "read: nexus/src/app/instance.rs",
		Calls:  []string{"instance_start", "instance_stop"},
		Check:  checkStop,
	},
	{
		ID: "A47",
		Says: "Reboot needs a VMM: 202 and `rebooting` at first, and the instance runs again with its " +
			"disks attached; 400 without one, while stopping, and, in the sled's words, while starting",
		Why: "The driver keeps publications over the reboot of a node: no disk is detached by it. The " +
			"simulator's guest sees its devices anew.",
		Source: "read: nexus/src/app/instance.rs; tested: test_instances_create_reboot_halt, of which " +
			"the words while stopping are inferred; the sled's answer (500 before its zone is there) " +
			"was read and not tested",
		Calls: []string{"instance_reboot"},
		Check: checkReboot,
	},
	{
		ID: "A48",
		Says: "Deleting an instance needs it stopped or failed and detaches its disks; it is gone when " +
			"that is answered",
		Why: "A node that is deleted leaves its volumes detached, so that the driver attaches them to " +
			"another one.",
		Source: "tested: test_instances_create_stopped_start and neighbours",
		Calls:  []string{"instance_delete"},
		Check:  checkDeleteInstance,
	},
	{
		ID: "A49",
		Says: "Update replaces all that can be changed; CPU, memory, platform and boot disk change " +
			"only while stopped, 409 otherwise; a boot disk must be attached, 409, and is looked up " +
			"before the states; `time_modified` stays; jumbo frames need an opt-in of the fleet's, 400 " +
			"without",
		Why: "The driver's advice for a boot disk is to set another one; the rest is for those who " +
			"change nodes of the simulator.",
		Source: "read: instance_reconfigure in nexus/src/app/instance.rs and in datastore/instance.rs",
		Calls:  []string{"instance_update"},
		Check:  checkUpdate,
	},
	{
		ID: "A53",
		Says: "An instance in `creating` refuses changes of its state: 409 to start, 400 to stop or to " +
			"reboot",
		Why: "The simulator's users start nodes while others are made; the driver explains a refusal " +
			"by the state that it reads.",
		Source: "read: nexus/src/app/instance.rs",
		Calls: []string{"instance_create", "instance_start", "instance_stop",
			"instance_reboot"},
		Check: checkChangeWhileCreating,
	},
	{
		ID: "A60",
		Says: "A reboot is 202 also when the guest does not come back; the instance is then `failed`, " +
			"with its disks attached, and can be started again",
		Why: "The driver says of a failed instance that it has to be restarted or deleted, and takes " +
			"its disks for attached until then.",
		Source: "inferred: the virtual machine reboots itself, and Nexus is notified of its end",
		Calls:  []string{"instance_reboot", "instance_start"},
		Check:  checkFailedReboot,
	},
}
