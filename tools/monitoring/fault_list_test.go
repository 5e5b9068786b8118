package monitoring

import (
	"fmt"
	"strings"
	"time"
)

// quiet lists the faults for which no alert may fire.
var quiet = []fault{
	{name: "a healthy cluster"},
	{name: "single failures of each kind", differ: series{
		leader.failed("CreateVolume", "RackError"):             once,
		leader.failed("CreateVolume", "ParameterInvalid"):      once,
		leader.failed("ControllerPublishVolume", "Conflict"):   once,
		leader.failed("ControllerPublishVolume", "BootDisk"):   once,
		leader.failed("DeleteVolume", "DiskAttached"):          once,
		nodeA.failed("NodeStageVolume", "DeviceNotFound"):      once,
		nodeA.failed("NodeUnstageVolume", "StillMounted"):      once,
		nodeA.failed("NodePublishVolume", "NotStaged"):         once,
		nodeA.failed("NodeStageVolume", "DiskNotBlank"):        once,
		leader.failed("CreateVolume", "RackFull"):              once,
		nodeA.failed("NodeGetVolumeStats", "FilesystemFailed"): once,
	}},
	{name: "short problems that end without an operator, all the time", differ: series{
		leader.failed("CreateVolume", "SnapshotNotReady"):            eachMinute,
		leader.failed("ControllerPublishVolume", "DiskBusy"):         eachMinute,
		leader.failed("ControllerPublishVolume", "Canceled"):         eachMinute,
		leader.failed("ControllerPublishVolume", "OperationPending"): eachMinute,
		nodeA.failed("NodeStageVolume", "DiskProofPending"):          eachMinute,
		nodeA.failed("NodeGetVolumeStats", "VolumeNotAtPath"):        eachMinute,
	}},
	{name: "a failure now and then", differ: series{
		leader.failed("CreateVolume", "RackError"):           counts(7),
		leader.failed("ControllerPublishVolume", "Conflict"): counts(7),
	}},
	{name: "short calls that change nothing", differ: series{
		standby.of("oxide_csi_calls_in_flight"): strings.Repeat("0 1 ", samples/2),
	}},
	{name: "a busy controller", differ: series{
		leader.of("oxide_csi_calls_in_flight"):            always(20),
		leader.done("CreateVolume"):                       eachMinute,
		leader.failed("CreateVolume", "OperationPending"): counts(7),
	}},
	{name: "a rack that is away for five minutes", differ: series{
		leader.of("oxide_csi_rack_up"):                           awayFor5,
		standby.of("oxide_csi_rack_up"):                          awayFor5,
		leader.failed("CreateVolume", "RackUnavailable"):         for5,
		leader.failed("ControllerPublishVolume", "RackError"):    for5,
		leader.failed("ControllerPublishVolume", "NameTaken"):    for5,
		leader.failed("ControllerPublishVolume", "InstanceFull"): for5,
	}},
	{name: "a node that has all its disks for five minutes", differ: series{
		nodeA.of("oxide_csi_node_disks"): fmt.Sprintf("5x39 12x4 5x%d", samples-46),
	}},
	{name: "an update that replaces the controllers", differ: series{
		leader.of("up"): endsAt40,
		leader.of("oxide_csi_build_info", "version", "v1"): endsAt40,
		leader.of("oxide_csi_rack_up"):                     endsAt40,
		target("new").of("up"):                             beginsAt40,
		target("new").of("oxide_csi_rack_up"):              beginsAt40,
		target("new").of("oxide_csi_build_info", "version", "v2"): fmt.Sprintf("_x39 1x%d",
			samples-40),
	}},
	{name: "single problems of the node keeper", differ: series{
		keeper.problems("Starting"):                     fmt.Sprintf("_x39 1x%d", samples-41),
		keeper.problems("Draining"):                     eachMinute,
		keeper.operations("problem"):                    once,
		keeper.operations("done"):                       counts(12),
		keeper.of("oxide_node_keeper_held_attachments"): fmt.Sprintf("0x39 1x4 0x%d", samples-45),
	}},
	{name: "a volume waits half an hour for a stop", differ: series{
		leader.failed("ControllerPublishVolume", "InstanceMustBeStopped"): fmt.Sprintf("0+1x30 30x%d",
			samples-32),
	}},
	{name: "the node keeper waits for its window", differ: series{
		leader.failed("ControllerPublishVolume", "InstanceMustBeStopped"): eachMinute,
		keeper.of("oxide_node_keeper_waiting_attachments"):                always1,
	}},
	{name: "the node keeper's daily window", interval: 20 * time.Minute, differ: series{
		keeper.of("oxide_node_keeper_waiting_attachments"): fmt.Sprintf("1x71 0 1x%d", samples-74),
	}},
	{name: "another program that is down", differ: series{
		`up{job="another",instance="another:80"}`: always0,
	}},
	{name: "a token that never expires", missing: []target{leader, standby}, differ: series{
		leader.of("oxide_csi_rack_up"): always1,
	}},
}

var rackFaults = []fault{
	{name: "the rack is unreachable", want: []string{"OxideCSIRackDown"}, differ: series{
		leader.of("oxide_csi_rack_up"):                             change(1, 0, 40),
		standby.of("oxide_csi_rack_up"):                            change(1, 0, 40),
		leader.failed("CreateVolume", "RackUnavailable"):           since40,
		leader.failed("ControllerPublishVolume", "EffectUnknown"):  since40,
		leader.failed("ControllerPublishVolume", "RackError"):      since40,
		leader.failed("CreateSnapshot", "DeadlineExceeded"):        since40,
		leader.failed("ControllerUnpublishVolume", "RackUnknown"):  since40,
		leader.failed("ControllerPublishVolume", "VolumeNotFound"): since40,
	}},
	{name: "the token is refused, and kubelet restarts the controllers",
		want: []string{"OxideCSIRackDown"}, differ: series{
			leader.of("up"):                                 restartedUp,
			leader.of("oxide_csi_rack_up"):                  restarted0,
			standby.of("up"):                                restartedUp,
			standby.of("oxide_csi_rack_up"):                 restarted0,
			leader.failed("Probe", "TokenRejected"):         eachMinute,
			leader.failed("CreateVolume", "TokenRejected"):  restarted0,
			leader.failed("Probe", "TokenFileUnreadable"):   eachMinute,
			leader.failed("DeleteVolume", "TokenRejected"):  restarted0,
			standby.failed("Probe", "TokenRejected"):        eachMinute,
			standby.failed("DeleteSnapshot", "RoleMissing"): restarted0,
			standby.failed("DeleteVolume", "TokenRejected"): restarted0,
			standby.failed("CreateVolume", "TokenRejected"): restarted0,
		}},
	{name: "the token expires in three days", want: []string{"OxideCSITokenExpiresSoon"},
		differ: series{
			leader.of("oxide_csi_rack_token_expiry_timestamp_seconds"):  days(3),
			standby.of("oxide_csi_rack_token_expiry_timestamp_seconds"): days(3),
		}},
	{name: "the rack answers, and its requests fail", want: []string{"OxideCSIRackFailing"},
		differ: series{leader.failed("CreateVolume", "RackError"): eachMinute}},
	{name: "the quota is used up", want: []string{"OxideCSIRackFull"},
		differ: series{leader.failed("CreateVolume", "RackFull"): eachMinute}},
	{name: "a node has all its disks", want: []string{"OxideCSINodeFull"},
		differ: series{nodeA.of("oxide_csi_node_disks"): always(12)}},
}

var volumeFaults = []fault{
	{name: "a disk is not blank", want: []string{"OxideCSIDiskRefused"},
		differ: series{nodeA.failed("NodeStageVolume", "DiskNotBlank"): slowly}},
	{name: "a filesystem needs a repair", want: []string{"OxideCSIFilesystemDamaged"},
		differ: series{nodeA.failed("NodeStageVolume", "FilesystemDamaged"): slowly}},
	{name: "a filesystem in use has failed", want: []string{"OxideCSIFilesystemDamaged"},
		differ: series{nodeA.failed("NodeGetVolumeStats", "FilesystemFailed"): eachMinute}},
	{name: "a volume waits for a stop, and no keeper is there",
		want:   []string{"OxideCSIVolumeWaitsForStop"},
		differ: series{leader.failed("ControllerPublishVolume", "InstanceMustBeStopped"): eachMinute}},
	{name: "a volume waits for a stop, and another controller leads",
		want: []string{"OxideCSIVolumeWaitsForStop"}, differ: series{
			leader.failed("ControllerPublishVolume", "InstanceMustBeStopped"): fmt.Sprintf("0+1x44 45x%d",
				samples-46),
			standby.failed("ControllerPublishVolume", "InstanceMustBeStopped"): fmt.Sprintf("0x40 0+1x%d",
				samples-42),
		}},
	{name: "a volume cannot be unmounted", want: []string{"OxideCSICallsFailing"},
		differ: series{nodeB.failed("NodeUnstageVolume", "StillMounted"): slowly}},
	{name: "a call hangs on a node that has no other work", want: []string{"OxideCSICallsStuck"},
		differ: series{
			nodeA.of("oxide_csi_calls_in_flight"): change(0, 1, 40),
			nodeA.done("NodeStageVolume"):         fmt.Sprintf("0+1x38 39x%d", samples-40),
		}},
	{name: "a call hangs on a node that has other work", want: []string{"OxideCSICallsStuck"},
		differ: series{
			nodeA.of("oxide_csi_calls_in_flight"):               change(0, 1, 40),
			nodeA.failed("NodeStageVolume", "OperationPending"): slowly,
		}},
}

var processFaults = []fault{
	{name: "the driver of a node does not answer", want: []string{"OxideCSIDriverDown"},
		missing: []target{nodeB}, differ: series{nodeB.of("up"): always0}},
	{name: "all targets of a job do not answer", want: []string{"OxideCSIDriverDown"}, differ: series{
		`up{job="nodes",instance="node-c:9810"}`:                   change(1, 0, 40),
		`oxide_csi_build_info{job="nodes",instance="node-c:9810"}`: endsAt40,
	}},
	{name: "no controller is there", want: []string{"OxideCSIControllerAbsent"},
		missing: []target{leader, standby}},
	{name: "both controllers do not answer", missing: []target{leader, standby},
		want: []string{"OxideCSIControllerAbsent", "OxideCSIDriverDown"},
		differ: series{
			leader.of("up"):  always0,
			standby.of("up"): always0,
		}},
}

var keeperFaults = []fault{
	{name: "an instance does not start", want: []string{"OxideCSIInstanceNotStarted"},
		differ: series{keeper.problems("Starting"): "_x39 " + fiveMinutely}},
	{name: "an attachment waits for longer than a day", interval: 20 * time.Minute,
		want: []string{"OxideCSIColdAttachOverdue"}, differ: series{
			keeper.of("oxide_node_keeper_waiting_attachments"): fmt.Sprintf("1x50 stale _x%d",
				samples-53),
			target("next").of("oxide_node_keeper_waiting_attachments"): fmt.Sprintf("0x49 1x%d",
				samples-51),
		}},
	{name: "a volume is refused while its instance is stopped", want: []string{"OxideCSIColdAttachHeld"},
		differ: series{keeper.of("oxide_node_keeper_held_attachments"): change(0, 2, 40)}},
	{name: "no drain succeeds", want: []string{"OxideCSIColdAttachFailing"},
		differ: series{keeper.operations("problem"): counts(20)}},
}
