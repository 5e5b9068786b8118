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
		{ID: "D01", Needs: hotplug, Calls: ofUse, Run: eachAccess(checkReturn),
			Says:   "a volume keeps every block over unpublish, unstage and detach, and back",
			Source: "CSI 1.13, NodeUnstageVolume and ControllerUnpublishVolume"},
		{ID: "D02", Needs: two, Calls: ofUse, Run: eachAccess(checkMove),
			Says: "a volume that moves to another instance and back has what both wrote, and only one " +
				"instance at a time has its device",
			Source: "CSI 1.13, SINGLE_NODE_WRITER; RFD 595"},
		{ID: "D03", Needs: two, Calls: slices.Concat(ofUse, ofRestart), Run: eachAccess(checkRestart),
			Says:   "what fsync acknowledged is there after the instance was stopped and started",
			Source: "fsync(2); Oxide API, instance_stop is a hard halt"},
		{ID: "D04", Needs: hotplug, Calls: ofSnapshot, Run: eachAccess(checkSnapshot),
			Says: "a snapshot that is taken while a writer runs has a gapless prefix of its records, " +
				"with every one that was acknowledged before",
			Source: "CSI 1.13, CreateSnapshot; Oxide API, snapshot_create"},
		{ID: "D05", Needs: hotplug, Calls: ofSnapshot, Run: eachAccess(checkRestore),
			Says: "a volume that is restored has the blocks of its snapshot and no others, " +
				"and a larger one is as large for its workload",
			Source: "CSI 1.13, CreateVolume with a snapshot as its source"},
		{ID: "D06", Needs: two, Calls: ofUse, Run: eachAccess(checkCut),
			Says: "what fsync acknowledged is there after a detach under a running workload, " +
				"and nothing that was not written",
			Source: "CSI 1.13, ControllerUnpublishVolume; fsync(2)"},
		{ID: "D07", Needs: hotplug, Calls: ofUse, Run: eachAccess(checkNeighbours),
			Says:   "volumes that are used side by side have only their own bytes",
			Source: "RFD 595: a device is found by its serial"},
		{ID: "D08", Needs: hotplug, Calls: ofUse, Run: rawOnly(checkBlank),
			Says:   "a new volume is zero, also after another was written and deleted",
			Source: "Oxide API, DiskSource blank; CSI 1.13, CreateVolume"},
		{ID: "D09", Needs: hotplug, Calls: ofUse, Run: rawOnly(checkWhole),
			Says:   "a raw volume has the same checksum, over all of it, when it comes back",
			Source: "CSI 1.13, BlockVolume"},
		{ID: "D10", Needs: hotplug, Calls: append([]string{"disk_view"}, ofAttach...),
			Run: once(checkDevices),
			Says: "an instance shows one device for a volume that is attached to it, " +
				"with the serial, the size and the block size of the rack's disk, and none after",
			Source: "RFD 595: the serial is the first 20 bytes of the disk's name"},
		{ID: "D11", Needs: Needs{Helper: true},
			Calls: slices.Concat(ofUse, ofRestart, []string{"instance_disk_list"}),
			Run:   once(checkHelper),
			Says: "volumes that are attached to a stopped instance are its devices when it runs, " +
				"and keep what was written when it is stopped again",
			Source: "Oxide API, instance_disk_attach; RFD 595"},
		{ID: "D12", Needs: hotplug, Calls: ofSnapshot, Run: rawOnly(checkLineage),
			Says: "a volume, its snapshots and what is restored from them keep their own blocks when " +
				"another one of them is written or deleted; behind a smaller snapshot all is zero",
			Source: "CSI 1.13, DeleteVolume and DeleteSnapshot; Oxide API, DiskSource snapshot"},
		{ID: "D13", Needs: hotplug, Calls: ofSnapshot, Run: rawOnly(checkRecreated),
			Says: "a volume with the name of a deleted one is zero, a snapshot of the deleted one keeps " +
				"its blocks, and one with the name of a deleted snapshot has its own",
			Source: "CSI 1.13, CreateVolume and DeleteVolume"},
		{ID: "D14", Needs: hotplug, Calls: ofUse, GiB: largeTimes, Run: rawOnly(checkLarge),
			Says:   "a volume of 17 GiB is zero, and keeps blocks from its first to its last byte",
			Source: "CSI 1.13, BlockVolume; Oxide API, DiskSource blank"},
		{ID: "D15", Needs: hotplug, Calls: ofSnapshot, GiB: 3 * restoredTimes,
			Run:    rawOnly(checkRestoredLarge),
			Says:   "a volume of 3 GiB that is restored has every block of its snapshot",
			Source: "CSI 1.13, CreateVolume with a snapshot as its source"},
	}
}
