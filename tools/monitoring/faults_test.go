package monitoring

import (
	stdcmp "cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// samples is the number of samples in a series: one a minute, unless a fault has another interval.
const samples = 90

// target is the name of a pod that Prometheus scrapes.
type target string

const (
	leader, standby target = "controller-1", "controller-2"
	nodeA, nodeB    target = "node-a", "node-b"
	keeper          target = "node-keeper"
)

// of() returns a metric's name with the pod's labels and further ones. Names and values alternate.
func (p target) of(metric string, labels ...string) string {
	text := fmt.Sprintf(`%s{job="oxide-csi/oxide-csi-driver",namespace="oxide-csi",pod="%s",`+
		`instance="%s:9809"`, metric, p, p)
	for i := 0; i < len(labels); i += 2 {
		text += fmt.Sprintf(`,%s="%s"`, labels[i], labels[i+1])
	}
	return text + "}"
}

func (p target) failed(method, reason string) string {
	return p.of("oxide_csi_calls_total", "method", method, "code", "FailedPrecondition",
		"reason", reason)
}

func (p target) done(method string) string {
	return p.of("oxide_csi_calls_total", "method", method, "code", "OK", "reason", "")
}

func (p target) problems(step string) string {
	return p.of("oxide_node_keeper_problems_total", "step", step)
}

func (p target) operations(result string) string {
	return p.of("oxide_node_keeper_operations_total", "result", result)
}

// The values of series, in promtool's notation.
var (
	always0, always1 = always(0), always(1)
	// eachMinute counts the retries of a sidecar.
	eachMinute = fmt.Sprintf("0+1x%d", samples)
	// slowly counts the retries of kubelet, one every two minutes.
	slowly = counts(2)
	// restarted0 is a gauge of a container that restarts: zero for the 2 of every 7 minutes in which
	// the container runs, otherwise missing. restartedUp is the series "up" of the container's pod.
	restarted0  = strings.Repeat("0 0 stale _x4 ", samples/7+1)
	restartedUp = strings.Repeat("1 1 0 0 0 0 0 ", samples/7+1)
	// fiveMinutely grows by one every five minutes, from 1 to 10.
	fiveMinutely = "1x4 2x4 3x4 4x4 5x4 6x4 7x4 8x4 9x4 10x4"
	endsAt40     = fmt.Sprintf("1x39 stale _x%d", samples-41)
	beginsAt40   = fmt.Sprintf("_x39 0 1x%d", samples-41)
	brieflyInUse = fmt.Sprintf("0 1 0 2 0 0 1 0x%d", samples-8)
)

func always(n int) string { return fmt.Sprintf("%dx%d", n, samples) }

// counts() returns a counter that grows by one every n samples.
func counts(n int) string {
	var text strings.Builder
	for i := range samples {
		fmt.Fprint(&text, i/n, " ")
	}
	return text.String()
}

func change(from, to, after int) string {
	return fmt.Sprintf("%dx%d %dx%d", from, after-1, to, samples-after)
}

// The first three are counters that grow by one in minute 40. The second grows in each later
// minute, too, and the third in the next four minutes.
var (
	once     = change(0, 1, 40)
	since40  = fmt.Sprintf("0x39 1+1x%d", samples-41)
	for5     = fmt.Sprintf("0x39 1+1x4 5x%d", samples-46)
	awayFor5 = fmt.Sprintf("1x39 0x4 1x%d", samples-46)
)

// days() returns a constant series: a time in seconds, n days after the first sample.
func days(n int) string { return always(n * 86400) }

// healthy returns the series of a cluster in which nothing fails.
func healthy() series {
	all := series{}
	for _, p := range []target{leader, standby, nodeA, nodeB} {
		all[p.of("up")] = always1
		all[p.of("oxide_csi_build_info", "version", "v1")] = always1
		all[p.of("oxide_csi_calls_in_flight")] = brieflyInUse
		all[p.done("Probe")] = fmt.Sprintf("0+6x%d", samples)
	}
	for _, p := range []target{leader, standby} {
		all[p.of("oxide_csi_rack_up")] = always1
		all[p.of("oxide_csi_rack_token_expiry_timestamp_seconds")] = days(60)
	}
	for _, method := range []string{"CreateVolume", "ControllerPublishVolume", "CreateSnapshot"} {
		all[leader.done(method)] = counts(7)
	}
	for _, p := range []target{nodeA, nodeB} {
		all[p.of("oxide_csi_node_disks")] = always(5)
		all[p.of("oxide_csi_node_disks_limit")] = always(12)
		all[p.done("NodeStageVolume")] = counts(9)
		all[p.done("NodeGetVolumeStats")] = fmt.Sprintf("0+3x%d", samples)
	}
	return all
}

// fault contains the series that differ from a healthy cluster's, and the alerts that have to fire.
type fault struct {
	name     string
	differ   series
	missing  []target // pods that do not exist
	want     []string
	interval time.Duration // the time between samples, if not a minute
}

func TestEachFaultCausesExactlyTheListedAlerts(t *testing.T) {
	wanted := map[string]bool{}
	for _, f := range slices.Concat(quiet, loud) {
		t.Run(f.name, func(t *testing.T) {
			all := healthy()
			for _, p := range f.missing {
				maps.DeleteFunc(all, func(name, _ string) bool {
					return strings.Contains(name, fmt.Sprintf("pod=%q", p))
				})
			}
			maps.Copy(all, f.differ)
			found, ever := firing(t, stdcmp.Or(f.interval, interval), all)
			if diff := cmp.Diff(append([]string{}, f.want...), names(found)); diff != "" {
				t.Errorf("expected alerts (-) and those that fire at the end (+):\n%s", diff)
			}
			if diff := cmp.Diff(append([]string{}, f.want...), append([]string{}, ever...)); diff != "" {
				t.Errorf("expected alerts (-) and those that have ever fired (+):\n%s", diff)
			}
			checkTexts(t, found)
		})
		for _, name := range f.want {
			wanted[name] = true
		}
	}
	for _, alert := range alerts(t) {
		if !wanted[alert.Alert] {
			t.Errorf("no fault makes %s fire", alert.Alert)
		}
	}
}

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
		leader.of("oxide_csi_build_info", "version", "v1"):        endsAt40,
		leader.of("oxide_csi_rack_up"):                            endsAt40,
		target("new").of("up"):                                    beginsAt40,
		target("new").of("oxide_csi_rack_up"):                     beginsAt40,
		target("new").of("oxide_csi_build_info", "version", "v2"): fmt.Sprintf("_x39 1x%d", samples-40),
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

var loud = []fault{
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
