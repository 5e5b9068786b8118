package rules

// attachRules are about attaching disks to instances and detaching them.
var attachRules = []Rule{
	{
		ID: "A16",
		Says: "An instance has at most 12 disks, its boot disk included: one more is 400 at its " +
			"creation, and at an attach unless there is another reason",
		Why: "The driver tells the scheduler how many volumes fit on a node (OXIDE_MAX_DISKS), and " +
			"counts the disks to explain a refused attach.",
		Source: "read: nexus/db-queries/src/db/queries/disk.rs",
		Calls:  []string{"instance_create", "instance_disk_attach", "instance_disk_detach"},
		Check:  checkNumberOfDisks,
	},
	{
		ID: "A17",
		Says: "Attach and detach need the instance stopped on racks up to v22, and are 400 " +
			"otherwise; with hot-plug the same endpoints do it while it runs, perhaps attach alone",
		Why: "The driver attaches to the node that runs it, and says what to do where the rack " +
			"refuses that.",
		Source: "read: datastore/disk.rs; inferred from the open prototype",
		Calls:  []string{"instance_disk_attach", "instance_disk_detach"},
		Check:  checkHotplug,
	},
	{
		ID: "A30",
		Says: "Attach and detach look for the instance first; a disk's name is one in the instance's " +
			"project, its ID one in any, which attach refuses and detach does not",
		Why: "The driver takes a 404 for the instance or the disk by asking for each, and counts on a " +
			"refusal to attach a disk of another project.",
		Source: "read: nexus/src/app/instance.rs",
		Calls:  []string{"instance_disk_attach", "instance_disk_detach"},
		Check:  checkWhatIsAttached,
	},
	{
		ID: "A31",
		Says: "Attach and detach take effect at once: the answer and every later read say " +
			"`attached` or `detached`, and are equal in all else; `attaching` and `detaching` are never " +
			"seen",
		Why: "The driver takes the answer of a detach for its effect, and reads the instance's disks " +
			"right after an attach.",
		Source: "read: datastore/disk.rs",
		Calls: []string{"instance_disk_attach", "instance_disk_detach", "instance_disk_list",
			"disk_view"},
		Check: checkAttachAtOnce,
	},
	{
		ID:   "A32",
		Says: "A disk in `creating` may be attached; the simulator waits for its bytes",
		Why: "A repeated request may attach a disk whose creation is still open; the driver waits for " +
			"`detached` before it hands out a volume.",
		Source: "read: datastore/disk.rs; the wait is inferred",
		Calls:  []string{"instance_disk_attach"},
		Check:  checkAttachWhileCreating,
	},
	{
		ID:     "A33",
		Says:   "Attaching what is attached to the same instance is 202, even while it runs",
		Why:    "The driver repeats an attach whose answer it did not get, and takes 202 for done.",
		Source: "read: datastore/disk.rs",
		Calls:  []string{"instance_disk_attach"},
		Check:  checkRepeatedAttach,
	},
	{
		ID: "A34",
		Says: "Why an attach is refused, with 400: first the state of the disk, then the VMM, then the " +
			"state of the instance, and the number of its disks last",
		Why: "A disk has one instance at a time because the rack refuses a second. Which reason comes " +
			"first decides what the driver tells people to do.",
		Look:   "disk_view",
		Source: "read: datastore/disk.rs",
		Calls:  []string{"instance_disk_attach"},
		Check:  checkAttachRefusals,
	},
	{
		ID: "A35",
		Says: "Local disks are neither attached to nor detached from a running instance, hot-plug or " +
			"not; with hot-plug the attach is 409",
		Why: "The driver says of a volume on a local disk that its instance has to be stopped, on " +
			"every rack.",
		Source: "read: comment in nexus/src/app/instance.rs; the answer with hot-plug is inferred, for " +
			"the prototype (omicron luiz-tmp) panics there",
		Calls: []string{"instance_disk_attach", "instance_disk_detach"},
		Check: checkLocalDisks,
	},
	{
		ID:     "A36",
		Says:   "Detaching a detached disk is 202, whichever instance is named",
		Why:    "The driver repeats a detach whose answer it did not get, and takes 202 for done.",
		Source: "read: datastore/disk.rs",
		Calls:  []string{"instance_disk_detach"},
		Check:  checkRepeatedDetach,
	},
	{
		ID: "A37",
		Says: "Why a detach is refused: the state of the disk, the VMM, the boot disk of a stopped " +
			"instance (409), the state of the instance; a failed one loses its disks, but not its " +
			"boot disk",
		Why: "The driver names the node's instance: the rack must not take the disk from another one, " +
			"and never a boot disk.",
		Look:   "disk_view",
		Source: "read: datastore/disk.rs",
		Calls:  []string{"instance_disk_detach"},
		Check:  checkDetachRefusals,
	},
	{
		ID: "A67",
		Says: "Attach and detach read the disk again after their commit. When all connections to the " +
			"database are in use just then, the caller gets 503 ServiceNotAvailable although it is " +
			"done; so may one whose disk was attached or detached already",
		Why: "The driver does not take a 503 for an attach that was not done: it reads the disk.",
		Source: "read: instance_attach_disk and instance_detach_disk in datastore/disk.rs, db/pool.rs, " +
			"omicron #10695",
		Calls: []string{"instance_disk_attach", "instance_disk_detach"},
		Check: checkUnreadAttachments,
	},
}
