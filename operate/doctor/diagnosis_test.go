package doctor

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

func TestAVolumeThatWorksHasNoFinding(t *testing.T) {
	for name, edits := range map[string][]edit{
		"in use": nil,
		"in use, after errors that were overcome": {
			podEvent("FailedMount", pvName, "DiskNotBlank"),
			podEvent("FailedAttachVolume", pvName, "InstanceFull"),
			event(kindClaim, "data", "ProvisioningFailed", rpc("RackFull"))},
		"used by nobody": {unused},
		"used by nobody, with no node to ask": {without(kindPod, kindAttachment),
			detached, noReport},
		"of a pod whose image is missing": {pending, object(kindPod, func(o *kube.Object) {
			o.Status.ContainerStatuses = make([]kube.ContainerStatus, 1)
			o.Status.ContainerStatuses[0].State.Waiting.Reason = "ImagePullBackOff"
		})},
		"of a pod whose init container takes long": {pending, object(kindPod, func(o *kube.Object) {
			o.Status.InitContainerStatuses = []kube.ContainerStatus{{Name: "restore"}}
			o.Status.InitContainerStatuses[0].State.Running = &struct{}{}
			o.Status.ContainerStatuses = []kube.ContainerStatus{{Name: "db"}}
			o.Status.ContainerStatuses[0].State.Waiting.Reason = "PodInitializing"
		})},
		"with a read-only device, and mounted read-only": {onNode(func(v *inspection.Volume) {
			v.Devices[0].ReadOnly = true
		})},
		"with events of another pod of that name": {pending, object(kindPod, young),
			podEvent("FailedMount", pvName, "DiskNotBlank"),
			lastEvent(func(o *kube.Object) { o.InvolvedObject.UID = racktest.Image })},
		"with events of another namespace": {pending, object(kindPod, young),
			podEvent("FailedMount", pvName, "DiskNotBlank"),
			lastEvent(func(o *kube.Object) { o.InvolvedObject.Namespace = "other" })},
		"with events about another volume of the pod": {pending, object(kindPod, young),
			podEvent("FailedMount", "pvc-2", "DiskNotBlank")},
		"about to leave another node": {secondPod, deleted(kindAttachment, time.Second),
			without(kindPod), secondPod},
		"waiting for a pod": {unbound, without(kindPod), event(kindClaim, "data", "WaitForFirstConsumer",
			"waiting for first consumer to be created before binding")},
		"on its way":           {notAttached(""), object(kindAttachment, young), object(kindPod, young)},
		"just left by its pod": {without(kindPod), recorded(over(flight.Unpublished, time.Second, ""))},
		"of a pod that has ended, after errors that were overcome": {
			object(kindPod, func(o *kube.Object) { o.Status.Phase = "Succeeded" }),
			podEvent("FailedMount", pvName, "NotStaged"), ask(Question{AskPod, "default", "db-0"}),
			recorded(over(flight.Published, time.Second, ""))},
		"unmounted at last": {recorded(over(flight.Unmounted, time.Minute, csierr.StillMounted),
			over(flight.Published, time.Second, ""))},
		"of a pod that is on its way out": {object(kindPod, func(o *kube.Object) {
			o.Metadata.DeletionTimestamp = testNow
		}), staged},
		"with a change that was interrupted, and repeated since": {onNode(func(v *inspection.Volume) {
			v.Open = []flight.Entry{entry(flight.Formatted, time.Hour), entry(flight.Mounted, time.Hour)}
		})},
	} {
		t.Run(name, func(t *testing.T) {
			e := healthy(t, edits...)
			d := Diagnose(*e)
			if len(d.Chains) != 1 || d.Chains[0].Finding != nil || d.Status() != 0 {
				t.Errorf("status %d\n%s", d.Status(), text(d))
			}
		})
	}
}

// failingUnmount is a path that the node cannot unmount: the orchestrator tries again and again.
var failingUnmount = onNode(func(v *inspection.Volume) {
	for _, age := range []time.Duration{time.Hour, time.Second} {
		e := over(flight.Unpublished, age, csierr.StillMounted)
		e.Path = v.Mounts[1].Path
		v.Flight = append(v.Flight, e)
	}
})

// goingPod has ended, and should be gone.
var goingPod = object(kindPod, func(o *kube.Object) {
	o.Status.Phase, o.Metadata.DeletionTimestamp = "Succeeded", testNow.Add(-time.Hour)
})

// secondPod is a pod that waits on another node, which has nothing of the volume.
func secondPod(t testing.TB, e *Evidence) {
	second := strings.NewReplacer("db-0", "db-1", "worker-1", "worker-2", podUID, racktest.Image,
		`"phase":"Running"`, `"phase":"Pending"`, racktest.Instance, racktest.OtherInstance,
		before(time.Hour), before(time.Second))
	for _, text := range []string{podJSON, csiNodeJSON, nodeJSON, driverPodJSON} {
		objects, err := kube.Parse([]byte(second.Replace(text)))
		csitest.Must(t, err)
		if text == driverPodJSON {
			e.Nodes.DriverPods = append(e.Nodes.DriverPods, objects...)
			continue
		}
		e.Cluster.Objects = append(e.Cluster.Objects, objects...)
	}
	e.Rack.Instances[racktest.OtherInstance] = Found[Machine]{Object: &Machine{
		racktest.OtherInstance, "worker-2", instanceRunning}}
	r := theNode()
	r.Instance, r.Devices = racktest.OtherInstance, nil
	r.Volumes = []inspection.Volume{{ID: racktest.Disk, Serial: diskName, From: "the request"}}
	e.Nodes.Reports[racktest.OtherInstance] = r
}

// situation is what is wrong, and where and with which reason a diagnosis has to say so.
type situation struct {
	name   string
	edits  []edit
	link   Link
	reason csierr.Reason
}

// mounting edits a volume whose mount ended with a reason.
func mounting(reason string) edit {
	return all(pending, blank, podEvent("FailedMount", pvName, reason))
}

var situations = []situation{
	// The claim and the volume.
	{"a claim that does not exist", []edit{without(kindClaim, kindVolume, kindAttachment,
		kindPod)}, LinkClaim, ""},
	{"a claim that nobody provisions", []edit{unbound}, LinkClaim, ""},
	{"a claim without its volume", []edit{without(kindVolume, kindAttachment)}, LinkVolume, ""},
	{"a claim that a pod keeps from going", []edit{object(kindClaim,
		stuck("kubernetes.io/pvc-protection"))}, LinkClaim, ""},
	{"a volume that does not go", []edit{keptVolume}, LinkVolume, ""},
	{"a volume that does not go and has no claim", []edit{keptVolume,
		object(kindVolume, func(o *kube.Object) { o.Spec.ClaimRef = kube.Reference{} })}, LinkVolume, ""},
	{"a volume of another claim", []edit{object(kindVolume, func(o *kube.Object) {
		o.Spec.ClaimRef.Name = "other"
	})}, LinkVolume, ""},
	{"a lost claim", []edit{without(kindVolume, kindAttachment),
		object(kindClaim, func(o *kube.Object) { o.Status.Phase = phaseLost })}, LinkClaim, ""},
	{"a class that Kubernetes does not know", []edit{unknownClass}, LinkClaim, ""},
	{"a class that Kubernetes does not know, after it waited for a pod", []edit{unknownClass,
		event(kindClaim, "data", "WaitForFirstConsumer", "waiting"), lastEvent(func(o *kube.Object) {
			o.LastTimestamp = testNow.Add(-time.Hour)
			o.FirstTimestamp = o.LastTimestamp
		})}, LinkClaim, ""},
	{"a volume that cannot be deleted", []edit{unused,
		object(kindVolume, func(o *kube.Object) { o.Status.Phase = phaseFailed }),
		event(kindVolume, pvName, "VolumeFailedDelete", rpc("DiskNotOurs"))}, LinkDisk,
		csierr.DiskNotOurs},
	// The attachment.
	{"an instance that must be stopped", []edit{notAttached(rpc("InstanceMustBeStopped"))},
		LinkInstance, csierr.InstanceMustBeStopped},
	{"a full instance", []edit{notAttached(rpc("InstanceFull"))}, LinkInstance, csierr.InstanceFull},
	{"a disk that another instance has", []edit{notAttached(rpc("DiskAttachedElsewhere")),
		disk(func(d *Disk) { d.State, d.Instance = diskAttached, racktest.OtherInstance })}, LinkDisk,
		csierr.DiskAttachedElsewhere},
	{"a serial number that is taken", []edit{notAttached(rpc("SerialTaken"))}, LinkSerial,
		csierr.SerialTaken},
	{"an attach that only the pod's event tells of", []edit{notAttached(""),
		podEvent("FailedAttachVolume", pvName, "RackUnavailable")}, LinkRack, csierr.RackUnavailable},
	{"an attach that fails without a word of the driver's",
		[]edit{notAttached("context deadline exceeded")}, LinkAttachment, ""},
	{"an attach that nobody does", []edit{notAttached("")}, LinkAttachment, ""},
	{"no attachment for a pod on a node", []edit{pending, without(kindAttachment), empty, detached},
		LinkAttachment, ""},
	{"a second pod on another node", []edit{secondPod}, LinkAttachment, csierr.DiskAttachedElsewhere},
	{"a detach that is refused", []edit{without(kindPod), refusedDetach, empty}, LinkInstance,
		csierr.InstanceMustBeStopped},
	{"a pod that waits for a detach that is refused", []edit{secondPod, refusedDetach}, LinkInstance,
		csierr.InstanceMustBeStopped},
	{"a claim that waits although its pod is on a node", []edit{unbound, object(kindPod,
		func(o *kube.Object) { o.Spec.NodeName = "worker-1" }), event(kindClaim, "data",
		"WaitForFirstConsumer", "waiting for pod db-0 to be scheduled")}, LinkClaim, ""},
	{"a volume whose deletion only its status tells of", []edit{unused,
		object(kindVolume, func(o *kube.Object) {
			o.Status.Phase, o.Status.Message = phaseFailed, rpc("DiskAttached")
		})}, LinkDisk, csierr.DiskAttached},
	{"a detach that nobody does", []edit{without(kindPod), deleted(kindAttachment, time.Hour), empty},
		LinkAttachment, ""},
	// The node and its instance.
	{"a node without the driver", []edit{notAttached(""), noDriver, object(kindAttachment, young)},
		LinkNode, ""},
	{"a node without a CSINode", []edit{notAttached(""), without(kindCSINode),
		object(kindAttachment, young)}, LinkNode, ""},
	{"a node that does not report", []edit{notReady}, LinkNode, ""},
	{"a node whose instance is gone", []edit{machine(""), notReady}, LinkInstance,
		csierr.InstanceNotFound},
	{"a stopped instance", []edit{machine(instanceStopped)}, LinkInstance, ""},
	{"a failed instance", []edit{machine(instanceFailed)}, LinkInstance, csierr.InstanceState},
	{"a node that became another instance", []edit{func(_ testing.TB, e *Evidence) {
		r := theNode()
		r.Instance = racktest.OtherInstance
		e.Nodes.Reports[racktest.Instance] = r
	}}, LinkNode, ""},
	// The disk.
	{"a faulted disk", []edit{faulted}, LinkDisk, csierr.DiskFaulted},
	{"a disk whose import was not finalized", []edit{disk(func(d *Disk) {
		d.State, d.Instance = "import_ready", ""
	})}, LinkDisk, csierr.DiskImporting},
	{"a disk that is gone", []edit{func(_ testing.TB, e *Evidence) {
		e.Rack.Disks[racktest.Disk] = Found[Disk]{}
	}}, LinkDisk, csierr.VolumeNotFound},
	{"a disk that was detached by hand", []edit{detached}, LinkDisk, csierr.DeviceNotFound},
	{"a disk that was moved by hand", []edit{disk(func(d *Disk) {
		d.Instance = racktest.OtherInstance
	})}, LinkDisk, csierr.DiskAttachedElsewhere},
	{"a disk that stayed attached", []edit{without(kindPod, kindAttachment), empty}, LinkDisk,
		csierr.DiskAttached},
	{"a volume attribute of another disk", []edit{object(kindVolume, func(o *kube.Object) {
		o.Spec.CSI.VolumeAttributes.DiskName = "another"
	})}, LinkSerial, csierr.FieldInvalid},
	{"a neighbour with the same serial number", []edit{func(_ testing.TB, e *Evidence) {
		all := append(slices.Clone(*e.Rack.Neighbours[racktest.Instance].Object),
			Disk{ID: racktest.Image, Name: diskName + "-copy"})
		e.Rack.Neighbours[racktest.Instance] = Found[[]Disk]{Object: &all}
	}}, LinkSerial, csierr.SerialTaken},
	{"a record of another disk", []edit{onNode(func(v *inspection.Volume) {
		v.Record.Disk = "csi-another000000000"
	})}, LinkSerial, csierr.StagedDifferently},
	// The device and what is on it.
	{"no device", []edit{pending, empty}, LinkDevice, csierr.DeviceNotFound},
	{"two devices", []edit{onNode(func(v *inspection.Volume) {
		v.Devices = append(v.Devices, inspection.Device{Name: "nvme2n1", Serial: diskName})
	})}, LinkDevice, csierr.DeviceNotUnique},
	{"a device of another size", []edit{onNode(func(v *inspection.Volume) {
		v.Devices[0].SizeBytes = 1
	})}, LinkDevice, csierr.DeviceWrongSize},
	{"a device with other blocks", []edit{onNode(func(v *inspection.Volume) {
		v.Devices[0].BlockBytes = 512
	})}, LinkDevice, csierr.DeviceDiffers},
	{"a device without its node", []edit{onNode(func(v *inspection.Volume) {
		v.Filesystems, v.Mounts = nil, nil
		v.Problems = []inspection.Problem{{Reason: csierr.DeviceNotFound, Says: "no device node"}}
		v.Unseen = []inspection.Unseen{{Part: inspection.PartFilesystem, Why: "no device node"}}
	})}, LinkDevice, csierr.DeviceNotFound},
	{"a device that became read-only under a mount for writing", []edit{onNode(
		func(v *inspection.Volume) { v.Devices[0].ReadOnly, v.Mounts[1].Writable = true, true })},
		LinkDevice, csierr.DeviceReadOnly},
	{"a filesystem that was overwritten under its mount", []edit{onNode(func(v *inspection.Volume) {
		v.Filesystems = nil
	})}, LinkFilesystem, csierr.FilesystemDamaged},
	{"a filesystem that was overwritten after its use", []edit{pending, blank,
		recorded(over(flight.Formatted, time.Hour, ""))}, LinkFilesystem, csierr.FilesystemDamaged},
	{"a device that cannot be read", []edit{onNode(func(v *inspection.Volume) {
		v.Problems = []inspection.Problem{{Reason: csierr.DeviceUnreadable, Says: "I/O error"},
			{Reason: "NoReason", Says: "x"}}
	})}, LinkDevice, csierr.DeviceUnreadable},
	{"a disk that is not blank", []edit{mounting("DiskNotBlank")}, LinkFilesystem,
		csierr.DiskNotBlank},
	{"a damaged filesystem", []edit{mounting("FilesystemDamaged")}, LinkFilesystem,
		csierr.FilesystemDamaged},
	{"a device in use", []edit{mounting("DeviceHeld")}, LinkDevice, csierr.DeviceHeld},
	{"a filesystem that errors made read-only", []edit{onNode(func(v *inspection.Volume) {
		v.Mounts[0].Failed = "read-only after errors"
	})}, LinkFilesystem, csierr.FilesystemFailed},
	{"another filesystem", []edit{onNode(func(v *inspection.Volume) {
		v.Filesystems[0].UUID = uuid.MustParse(racktest.Image)
	})}, LinkFilesystem, csierr.WrongFilesystem},
	{"a filesystem that is too large", []edit{onNode(func(v *inspection.Volume) {
		v.Filesystems[0].SizeBytes = 2 * diskBytes
	})}, LinkFilesystem, csierr.FilesystemTooLarge},
	{"a filesystem that was not grown", []edit{onNode(func(v *inspection.Volume) {
		v.Filesystems[0].NotGrown = true
	})}, LinkFilesystem, csierr.FilesystemNotGrown},
	{"a format that was interrupted", []edit{pending, blank, begun(flight.Formatted)},
		LinkFilesystem, ""},
	// The mounts.
	{"a mount that was interrupted", []edit{pending, unmounted, begun(flight.Mounted)}, LinkMounts,
		""},
	{"a volume that is mounted nowhere under a running pod", []edit{unmounted}, LinkMounts,
		csierr.NotStaged},
	{"a volume that is not published to the pod", []edit{staged}, LinkMounts, csierr.VolumeNotAtPath},
	{"a volume that is still mounted", []edit{without(kindPod), deleted(kindAttachment, time.Second)},
		LinkMounts, csierr.StillMounted},
	{"a volume that is still mounted long after its pod", []edit{without(kindPod)}, LinkMounts,
		csierr.StillMounted},
	{"a volume whose unmount fails again and again", []edit{without(kindPod), failingUnmount},
		LinkMounts, csierr.StillMounted},
	{"a pod that has ended, whose volume cannot be unmounted", []edit{goingPod, failingUnmount},
		LinkMounts, csierr.StillMounted},
	{"a pod that should be gone, and shows nothing of why it is not", []edit{goingPod, staged},
		LinkPod, ""},
	{"a volume that is mounted in another namespace only", []edit{without(kindPod),
		deleted(kindAttachment, time.Second), onNode(func(v *inspection.Volume) {
			v.Mounts = v.Mounts[2:]
		})}, LinkMounts, csierr.StillMounted},
	{"a second pod", []edit{mounting("PublishedElsewhere")}, LinkMounts, csierr.PublishedElsewhere},
	{"an error that any call may have", []edit{mounting("Internal")}, LinkMounts, csierr.Internal},
	// The pod.
	{"a pod that cannot be scheduled", []edit{unscheduled, event(kindPod, "db-0", "FailedScheduling",
		"0/3 nodes are available")}, LinkPod, ""},
	{"a pod that waits for no visible cause", []edit{pending}, LinkPod, ""},
	// What a report says besides, in testdata/reports.txt.
	{"a stop that the node keeper plans", []edit{notAttached(rpc("InstanceMustBeStopped")),
		object(kindNode, func(o *kube.Object) {
			o.Metadata.Annotations.KeeperPlan = "waits for the maintenance window, 0 2 * * *"
		})}, LinkInstance, csierr.InstanceMustBeStopped},
	{"a message of the kubelet's own, which is quoted", []edit{pending, event(kindPod, "db-0",
		"FailedMount", `MountVolume.SetUp failed for volume "config" : configmap "db" not found`)},
		LinkPod, ""},
	{"a failed call of another node, which the command is for", []edit{secondPod,
		detachError("InstanceState")}, LinkInstance, csierr.InstanceState},
	{"an error of the driver about a link that is broken anyway, which is noted",
		[]edit{notAttached(rpc("DiskAttachedElsewhere")), faulted}, LinkDisk, csierr.DiskFaulted},
}

func TestTheFirstBrokenLinkIsFound(t *testing.T) {
	for _, s := range situations {
		t.Run(s.name, func(t *testing.T) {
			e := healthy(t, s.edits...)
			checkFinding(t, Diagnose(*e), s.link, s.reason)
		})
	}
}

// checkFinding checks where a diagnosis of one chain sees the first broken link, and that it says
// what people need.
func checkFinding(t *testing.T, d Diagnosis, link Link, reason csierr.Reason) {
	t.Helper()
	if len(d.Chains) == 0 || d.Chains[0].Finding == nil {
		t.Fatalf("nothing was found\n%s", text(d))
	}
	f := d.Chains[0].Finding
	if f.Link != link || f.Reason != reason {
		t.Errorf("found %s %q, want %s %q\n%s", f.Link, f.Reason, link, reason, text(d))
	}
	if f.Wrong == "" || f.Source == "" || f.ByItself == "" || f.Do == "" || f.Next == "" ||
		strings.ContainsAny(f.Next, "{}\n") {
		t.Errorf("incomplete: %+v", f)
	}
	if d.Status() != 2 {
		t.Errorf("the status is %d", d.Status())
	}
}

func TestEveryReasonOfACreateIsFoundAtItsLink(t *testing.T) {
	for _, reason := range csierr.Reasons() {
		t.Run(string(reason), func(t *testing.T) {
			e := healthy(t)
			unbound(t, e)
			event(kindClaim, "data", "ProvisioningFailed",
				`failed to provision volume with StorageClass "oxide-disk": `+rpc(string(reason)))(t, e)
			want := advices[reason].Link
			if want == "" {
				want = LinkClaim
			}
			d := Diagnose(*e)
			checkFinding(t, d, want, reason)
			f := d.Chains[0].Finding
			if !f.Since.Equal(testNow.Add(-20*time.Minute)) || !f.Last.Equal(testNow.Add(-time.Minute)) ||
				f.Wrong != "expected this, found that" {
				t.Errorf("got %+v", f)
			}
		})
	}
}

func TestAnErrorLastsSinceItsFirstEvent(t *testing.T) {
	e := healthy(t)
	unbound(t, e)
	for _, s := range []struct {
		reason      string
		first, last time.Duration
	}{{"RackFull", 50, 40}, {"RackError", 39, 30}, {"RackFull", 29, 2}, {"RackFull", 20, 10}} {
		event(kindClaim, "data", "ProvisioningFailed", rpc(s.reason))(t, e)
		lastEvent(func(o *kube.Object) {
			o.FirstTimestamp = testNow.Add(-s.first * time.Minute)
			o.LastTimestamp = testNow.Add(-s.last * time.Minute)
		})(t, e)
	}
	f := Diagnose(*e).Chains[0].Finding
	if f.Reason != csierr.RackFull || !f.Since.Equal(testNow.Add(-50*time.Minute)) ||
		!f.Last.Equal(testNow.Add(-2*time.Minute)) {
		t.Errorf("got %+v", f)
	}
}

func TestAnAttachmentsErrorLastsSinceTheFirstEventOfThePod(t *testing.T) {
	e := healthy(t)
	notAttached(rpc("InstanceFull"))(t, e)
	event(kindPod, "db-0", "FailedAttachVolume", `failed for volume "`+pvName+`" : `+
		rpc("InstanceFull"))(t, e)
	f := Diagnose(*e).Chains[0].Finding
	if f.Source != "VolumeAttachment csi-1" || !f.Since.Equal(testNow.Add(-20*time.Minute)) ||
		!f.Last.Equal(testNow.Add(-time.Minute)) {
		t.Errorf("got %+v", f)
	}
}

func TestAReportOfAnUnknownNodeIsUsedIfItIsTheOnlyOneAndNoNodeIsKnown(t *testing.T) {
	e := healthy(t)
	e.Question = Question{Kind: AskVolume, Name: racktest.Disk}
	e.Cluster.Objects, e.Rack = nil, RackObjects{Unseen: "OXIDE_HOST is not set"}
	for kind := range resources {
		e.Cluster.Unseen[kind] = "there is no Kubernetes"
	}
	if got := text(Diagnose(*e)); !strings.Contains(got, "nvme1n1 (259:1)") {
		t.Error(got)
	}
	e.Nodes.Reports[racktest.OtherInstance] = theNode()
	if got := text(Diagnose(*e)); strings.Contains(got, "nvme1n1 (259:1)") {
		t.Errorf("one of two was chosen:\n%s", got)
	}
	e.Rack = healthy(t).Rack // tells which instance has the disk
	if got := text(Diagnose(*e)); !strings.Contains(got, "nvme1n1 (259:1)") {
		t.Error(got)
	}
	// A report of another node says nothing of this one.
	e = healthy(t)
	e.Nodes.Reports = map[string]inspection.Report{racktest.OtherInstance: theNode()}
	if d := Diagnose(*e); d.Status() != 3 || strings.Contains(text(d), "nvme1n1 (259:1)") {
		t.Error(text(d))
	}
}

func TestANodeWhoseAttachmentsCouldNotBeSeenIsNotFine(t *testing.T) {
	e := healthy(t)
	e.Question = Question{Kind: AskNode, Name: "worker-1"}
	without(kindAttachment)(t, e)
	if d := Diagnose(*e); d.Status() != 0 || len(d.Chains) != 1 {
		t.Error(text(d))
	}
	e.Cluster.Unseen[kindAttachment] = "forbidden"
	if d := Diagnose(*e); d.Status() != 3 {
		t.Error(text(d))
	}
}

func TestWhatCouldNotBeSeenIsNotFine(t *testing.T) {
	for name, test := range map[string]struct {
		change edit
		unseen Link
	}{
		"the rack": {func(_ testing.TB, e *Evidence) {
			e.Rack = RackObjects{Unseen: "RackUnavailable: nobody answers", Reason: "RackUnavailable"}
		}, LinkRack},
		"the disk": {func(_ testing.TB, e *Evidence) {
			e.Rack.Disks[racktest.Disk] = Found[Disk]{Unseen: "RackError: no"}
		}, LinkDisk},
		"the instance": {func(_ testing.TB, e *Evidence) {
			e.Rack.Instances[racktest.Instance] = Found[Machine]{Unseen: "RackError: no"}
		}, LinkInstance},
		"the node's devices": {func(_ testing.TB, e *Evidence) {
			r := theNode()
			r.Unseen = []inspection.Unseen{{Part: inspection.PartDevices, Why: "no sysfs"}}
			e.Nodes.Reports[racktest.Instance] = r
		}, LinkDevice},
		"a filesystem": {onNode(func(v *inspection.Volume) {
			v.Filesystems = nil
			v.Unseen = []inspection.Unseen{{Part: inspection.PartFilesystem, Why: "input/output error"}}
		}), LinkFilesystem},
		"the volume of a report of others": {onNode(func(v *inspection.Volume) {
			v.ID = racktest.Image
		}), LinkDevice},
	} {
		t.Run(name, func(t *testing.T) {
			d := Diagnose(*healthy(t, test.change))
			i := slices.IndexFunc(d.Chains[0].Links, func(s Step) bool { return s.Link == test.unseen })
			if d.Status() != 3 || i < 0 || d.Chains[0].Links[i].State != Unseen ||
				!strings.Contains(text(d), "these links could not be seen: ") {
				t.Errorf("status %d\n%s", d.Status(), text(d))
			}
		})
	}
}

func TestADiskOfOthersIsNoted(t *testing.T) {
	e := healthy(t)
	if got := text(Diagnose(*e)); strings.Contains(got, "does not delete") {
		t.Error(got)
	}
	disk(func(d *Disk) { d.Foreign = "has no ownership tag of this driver" })(t, e)
	if got := text(Diagnose(*e)); !strings.Contains(got, "the disk has no ownership tag") {
		t.Error(got)
	}
}

func TestAPodHasAChainForEachOfItsClaims(t *testing.T) {
	e := healthy(t)
	e.Question = Question{AskPod, "default", "db-0"}
	object(kindPod, func(o *kube.Object) {
		o.Spec.Volumes = append(o.Spec.Volumes, kube.PodVolume{Name: "scratch", Ephemeral: &struct{}{}},
			kube.PodVolume{Name: "config"})
	})(t, e)
	d := Diagnose(*e)
	if len(d.Chains) != 2 || d.Chains[0].Finding != nil || d.Chains[1].Finding == nil ||
		d.Chains[1].Finding.Link != LinkClaim || !strings.Contains(text(d), "db-0-scratch") {
		t.Error(text(d))
	}
	e.Question.Name = "db-1"
	checkFinding(t, Diagnose(*e), LinkPod, "")
	// A pod that works is not to blame for another one that waits.
	e = healthy(t)
	secondPod(t, e)
	for name, status := range map[string]int{"db-0": 0, "db-1": 2} {
		e.Question = Question{AskPod, "default", name}
		if d := Diagnose(*e); d.Status() != status {
			t.Errorf("%s: status %d\n%s", name, d.Status(), text(d))
		}
	}
}
