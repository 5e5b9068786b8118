// Package data checks what a rack and its driver do with the bytes of volumes: data that was
// written is still there after every way in which a volume can travel, and nothing else is there.
//
// [Checks] is the table. Each [Check] creates volumes through the driver's controller on a
// [Bench], uses them in the Bench's instances through package guest, and removes what it created,
// whether it succeeds or not. Its error names the wrong block of the volume and describes the
// difference. [Check.Blocked] names what a check needs and the Bench lacks.
//
// The package knows driver and rack by their APIs only. It imports neither Ginkgo nor testing.
package data

import "slices"

// The calls that most checks make: RPCs of CSI, and operations of the rack's API.
var (
	ofVolume = []string{"CreateVolume", "DeleteVolume", "disk_create", "disk_delete"}
	ofAttach = append([]string{"ControllerPublishVolume", "ControllerUnpublishVolume",
		"instance_disk_attach", "instance_disk_detach"}, ofVolume...)
	ofUse = append([]string{"NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume",
		"NodeUnstageVolume"}, ofAttach...)
	ofSnapshot = append([]string{"CreateSnapshot", "DeleteSnapshot", "snapshot_create",
		"snapshot_delete"}, ofUse...)
	ofRestart = []string{"instance_stop", "instance_start"}
)

// Checks returns the table of checks.
func Checks() []Check {
	hotplug, two := Needs{Hotplug: true}, Needs{Hotplug: true, Second: true}
	return []Check{
		{
			ID:     "D01",
			Says:   "a volume keeps every block over unpublish, unstage and detach, and back",
			Why:    "a workload that is restarted would find other data than it left",
			Source: "CSI 1.13, NodeUnstageVolume and ControllerUnpublishVolume",
			Needs:  hotplug, Calls: ofUse, Run: eachAccess(checkReturn),
		}, {
			ID: "D02",
			Says: "a volume that moves to another instance and back has what both wrote, and only one " +
				"instance at a time has its device",
			Why:    "a workload that is rescheduled would lose data",
			Source: "CSI 1.13, SINGLE_NODE_WRITER; RFD 595",
			Needs:  two, Calls: ofUse, Run: eachAccess(checkMove),
		}, {
			ID:     "D03",
			Says:   "what fsync acknowledged is there after the instance was stopped and started",
			Why:    "a database would lose transactions that it had confirmed",
			Source: "fsync(2); Oxide API, instance_stop is a hard halt",
			Needs:  two, Calls: slices.Concat(ofUse, ofRestart), Run: eachAccess(checkRestart),
		}, {
			ID: "D04",
			Says: "a snapshot that is taken while a writer runs has a gapless prefix of its records, " +
				"with every one that was acknowledged before",
			Why:    "a backup would be of no moment that ever was, and could not be restored",
			Source: "CSI 1.13, CreateSnapshot; Oxide API, snapshot_create",
			Needs:  hotplug, Calls: ofSnapshot, Run: eachAccess(checkSnapshot),
		}, {
			ID: "D05",
			Says: "a volume that is restored has the blocks of its snapshot and no others, " +
				"and a larger one is as large for its workload",
			Why:    "a restore would bring back another moment's data, or another volume's",
			Source: "CSI 1.13, CreateVolume with a snapshot as its source",
			Needs:  hotplug, Calls: ofSnapshot, Run: eachAccess(checkRestore),
		}, {
			ID: "D06",
			Says: "what fsync acknowledged is there after a detach under a running workload, " +
				"and nothing that was not written",
			Why:    "after the loss of a node, its volumes are detached as they are",
			Source: "CSI 1.13, ControllerUnpublishVolume; fsync(2)",
			Needs:  two, Calls: ofUse, Run: eachAccess(checkCut),
		}, {
			ID:     "D07",
			Says:   "volumes that are used side by side have only their own bytes",
			Why:    "one workload would overwrite the data of another",
			Source: "RFD 595: a device is found by its serial",
			Needs:  hotplug, Calls: ofUse, Run: eachAccess(checkNeighbours),
		}, {
			ID:     "D08",
			Says:   "a new volume is zero, also after another was written and deleted",
			Why:    "a workload would read what somebody else has deleted",
			Source: "Oxide API, DiskSource blank; CSI 1.13, CreateVolume",
			Needs:  hotplug, Calls: ofUse, Run: rawOnly(checkBlank),
		}, {
			ID:     "D09",
			Says:   "a raw volume has the same checksum, over all of it, when it comes back",
			Why:    "what was not written would have changed, too",
			Source: "CSI 1.13, BlockVolume",
			Needs:  hotplug, Calls: ofUse, Run: rawOnly(checkWhole),
		}, {
			ID: "D10",
			Says: "an instance shows one device for a volume that is attached to it, " +
				"with the serial, the size and the block size of the rack's disk, and none after",
			Why:    "the driver could take one disk for another",
			Source: "RFD 595: the serial is the first 20 bytes of the disk's name",
			Needs:  hotplug, Calls: append([]string{"disk_view"}, ofAttach...), Run: once(checkDevices),
		}, {
			ID: "D11",
			Says: "volumes that are attached to a stopped instance are its devices when it runs, " +
				"and keep what was written when it is stopped again",
			Why:    "on a rack without hot-plug there is no other way to use a volume",
			Source: "Oxide API, instance_disk_attach; RFD 595",
			Needs:  Needs{Helper: true},
			Calls: slices.Concat(ofUse, ofRestart,
				[]string{"instance_disk_list"}),
			Run: once(checkHelper),
		}, {
			ID: "D12",
			Says: "a volume, its snapshots and what is restored from them keep their own blocks when " +
				"another one of them is written or deleted; behind a smaller snapshot all is zero",
			Why:    "a backup would go with its origin, or a clone's workload would spoil it",
			Source: "CSI 1.13, DeleteVolume and DeleteSnapshot; Oxide API, DiskSource snapshot",
			Needs:  hotplug, Calls: ofSnapshot, Run: rawOnly(checkLineage),
		}, {
			ID: "D13",
			Says: "a volume with the name of a deleted one is zero, a snapshot of the deleted one keeps " +
				"its blocks, and one with the name of a deleted snapshot has its own",
			Why:    "a claim that is made anew would have its predecessor's data",
			Source: "CSI 1.13, CreateVolume and DeleteVolume",
			Needs:  hotplug, Calls: ofSnapshot, Run: rawOnly(checkRecreated),
		}, {
			ID:     "D14",
			Says:   "a volume of 17 GiB is zero, and keeps blocks from its first to its last byte",
			Why:    "offsets that are cut off at 32 or 34 bits would let blocks overwrite each other",
			Source: "CSI 1.13, BlockVolume; Oxide API, DiskSource blank",
			Needs:  hotplug, Calls: ofUse, GiB: largeTimes, Run: rawOnly(checkLarge),
		}, {
			ID:     "D15",
			Says:   "a volume of 3 GiB that is restored has every block of its snapshot",
			Why:    "a restore could end early, and what lies behind 2 GiB would be lost",
			Source: "CSI 1.13, CreateVolume with a snapshot as its source",
			Needs:  hotplug, Calls: ofSnapshot, GiB: 3 * restoredTimes, Run: rawOnly(checkRestoredLarge),
		},
	}
}
