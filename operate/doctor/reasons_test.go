package doctor

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

// place is a field of a Kubernetes object or of a node's report that contains an error of the
// driver. After an edit in counts, the object waits for the failed call. After an edit in overcome,
// the error does not count: the call has succeeded since, or nobody repeats it.
type place struct {
	name             string
	at               Link
	shows            func(reason string) edit
	counts, overcome map[string]edit
}

var (
	released      = all(without(kindClaim), unused, askVolume, isReleased)
	isReleased    = phase(kindVolume, phaseReleased)
	failedVolume  = all(released, phase(kindVolume, phaseFailed))
	deletedVolume = stuck(kindVolume, "external-provisioner")
)

// places contains the fields in which these components record errors: csi-provisioner
// (controller.go of its library), csi-attacher (csi_handler.go), csi-snapshotter
// (snapshot_controller.go), the attach controller, the kubelet, and the driver on the node.
var places = []place{
	{"event ProvisioningFailed of the claim", LinkClaim, func(reason string) edit {
		return event(kindClaim, "data", "ProvisioningFailed",
			`failed to provision volume with StorageClass "oxide-disk": `+rpc(reason))
	}, map[string]edit{"Pending": unbound,
		"deleted": all(unbound, stuck(kindClaim, "kubernetes.io/pvc-protection")),
		"retried": all(unbound, succeeded(kindClaim, "data", "ProvisioningSucceeded", 60)),
		"without a pod": all(unbound, without(kindPod), event(kindClaim, "data",
			"WaitForFirstConsumer", "waiting for first consumer to be created before binding"))},
		map[string]edit{"Bound": all(),
			"Lost":      all(without(kindVolume, kindAttachment), phase(kindClaim, phaseLost)),
			"succeeded": all(unbound, succeeded(kindClaim, "data", "ProvisioningSucceeded", 0))}},
	{"event VolumeFailedDelete of the PersistentVolume", LinkVolume, func(reason string) edit {
		return event(kindVolume, pvName, "VolumeFailedDelete", rpc(reason))
	}, map[string]edit{"Released": released,
		"Released and deleted": all(released, deletedVolume), "Failed": failedVolume,
		"Failed and deleted":             all(failedVolume, deletedVolume),
		"Released, its claim made again": all(unused, askVolume, isReleased, pendingClaim),
		"Released, still attached":       all(askVolume, without(kindPod, kindClaim), isReleased),
		"Released, its disk attached": all(isReleased, askVolume, without(kindPod, kindClaim,
			kindAttachment))},
		map[string]edit{"Bound": all(), "Available": all(released, phase(kindVolume, "Available")),
			"retained": all(released, func(w *world) { w.pv.Spec.ReclaimPolicy = "Retain" })}},
	{"status of the PersistentVolume", LinkVolume, func(reason string) edit {
		return func(w *world) { w.pv.Status.Message = rpc(reason) }
	}, map[string]edit{"Failed": failedVolume, "Failed and deleted": all(failedVolume, deletedVolume)},
		map[string]edit{"Bound": all()}},
	{"attachError", LinkAttachment, func(reason string) edit {
		return attachError(rpc(reason))
	}, map[string]edit{"not attached": notAttached(""),
		"young":   all(notAttached(""), young(kindAttachment)),
		"deleted": all(notAttached(""), deleted(kindAttachment, time.Hour)),
		"after another error": all(notAttached(""), podEvent("FailedAttachVolume", pvName,
			"RoleMissing"))}, map[string]edit{"attached": pending}},
	{"detachError", LinkAttachment, detachError, map[string]edit{
		"deleted": all(without(kindPod), deleted(kindAttachment, time.Second)),
		"overdue": all(without(kindPod), unmounted, deleted(kindAttachment, time.Hour)),
		"after an attach failed": all(notAttached(rpc("RoleMissing")), without(kindPod),
			deleted(kindAttachment, time.Hour)),
		"awaited by a pod": all(secondPod, deleted(kindAttachment, time.Hour))}, nil},
	{"event FailedAttachVolume of the pod", LinkAttachment, func(reason string) edit {
		return podEvent("FailedAttachVolume", pvName, reason)
	}, map[string]edit{"Pending": notAttached(""),
		"without an attachment": all(pending, detached, empty, without(kindAttachment)),
		"deleted":               all(notAttached(""), deleted(kindPod, time.Hour)),
		"detached again": all(notAttached(""), succeeded(kindPod, "db-0", "SuccessfulAttachVolume",
			60))}, map[string]edit{"attached": pending,
		"succeeded": all(notAttached(""), succeeded(kindPod, "db-0", "SuccessfulAttachVolume", 0))}},
	mountPlace("FailedMount"), mountPlace("FailedMapVolume"),
	{"problem in the node's report", LinkDevice, func(reason string) edit {
		return problems(inspection.Problem{Reason: csierr.Reason(reason), Says: sentence})
	}, map[string]edit{"in use": all(), "mounted nowhere": unmounted, "awaited": all(pending, blank)},
		nil},
	{"flight recorder", LinkMounts, func(reason string) edit {
		return recorded(over(flight.Unpublished, time.Hour, csierr.Reason(reason)),
			over(flight.Unpublished, time.Second, csierr.Reason(reason)))
	}, map[string]edit{"its pod gone": without(kindPod), "its pod ended": goingPod},
		map[string]edit{"unmounted": all(without(kindPod), empty)}},
	{"status of a VolumeSnapshotContent", LinkVolume, func(reason string) edit {
		return func(w *world) {
			o := kube.Object{Kind: kindContent, Metadata: kube.Metadata{Name: "snap"}}
			o.Spec.Driver, o.Spec.Source.VolumeHandle = volume.DriverName, racktest.Disk
			o.Spec.VolumeSnapshotRef = kube.Reference{Namespace: "default", Name: "s"}
			o.Status.Error = &kube.Failure{Time: testNow, Message: "Failed to check and update snapshot " +
				"content: failed to take snapshot of the volume " + racktest.Disk + ": " +
				fmt.Sprintf("%q", rpc(reason))}
			w.Cluster.Objects = append(w.Cluster.Objects, o)
		}
	}, map[string]edit{"awaited by a claim": all(unbound, func(w *world) {
		w.claim.Spec.DataSource = kube.Reference{Kind: "VolumeSnapshot", Name: "s"}
	})},
		map[string]edit{"of no volume here": unbound, "in use": all(), "used by nobody": unused,
			"deleted":           keptVolume,
			"of another volume": func(w *world) { w.pv.Spec.CSI.VolumeHandle = racktest.Image }}},
}

func waits(why string, init ...kube.ContainerStatus) edit {
	s := kube.ContainerStatus{Name: "db"}
	s.State.Waiting.Reason = why
	return all(pending, func(w *world) {
		w.pod.Status.ContainerStatuses = []kube.ContainerStatus{s}
		w.pod.Status.InitContainerStatuses = init
	})
}

var restores = func() (s kube.ContainerStatus) {
	s.Name, s.State.Running = "restore", &struct{}{}
	return s
}()

func mountPlace(reason string) place {
	return place{"event " + reason + " of the pod", LinkMounts, func(driver string) edit {
		return podEvent(reason, pvName, driver)
	}, map[string]edit{"Pending": all(pending, blank),
		"ContainerCreating":  all(waits("ContainerCreating"), blank),
		"deleted":            all(pending, blank, deleted(kindPod, time.Hour)),
		"Unknown":            all(pending, blank, phase(kindPod, "Unknown")),
		"Failed, as evicted": all(pending, blank, phase(kindPod, phaseFailed), askPod("db-0"))},
		map[string]edit{"Running": all(), "Succeeded": phase(kindPod, "Succeeded"),
			"Running without a status":   func(w *world) { w.pod.Status.ContainerStatuses = nil },
			"its image missing":          waits("ImagePullBackOff"),
			"its init container running": waits("PodInitializing", restores)}}
}

// inferences contains edits that add a problem which the doctor could report instead of the error.
var inferences = map[string]edit{"": all(), "the node is not ready": notReady,
	"the driver is not registered": noDriver, "the driver's pod crashes": dead(kindDaemonSet,
		"oxide-plugin")}

// unrelated contains edits after which the last event is about another object or by another driver.
var unrelated = map[string]edit{
	"of an earlier object":  lastEvent(func(o *kube.Object) { o.InvolvedObject.UID = racktest.Image }),
	"older than the object": minutesAgo(180, 120),
	"of another namespace":  lastEvent(func(o *kube.Object) { o.InvolvedObject.Namespace = "other" }),
	"of another driver": lastEvent(func(o *kube.Object) {
		o.Message = strings.Replace(o.Message, ": "+sentence, ", "+sentence, 1)
	}),
}

// forged contains objects in which a user has written an error of the driver in place of ERROR.
var forged = map[string]string{
	"a condition of a resize, though the driver expands nothing": strings.Replace(claimJSON,
		`"phase":`, `"conditions":[{"type":"ControllerResizeError","status":"True","message":"ERROR"}],`+
			`"phase":`, 1),
	"an annotation of a claim": strings.Replace(claimJSON, `"note":"x"`, `"note":"ERROR"`, 1),
	"the annotation with the node keeper's plan": strings.Replace(nodeJSON, `"name":"worker-1"`,
		`"name":"worker-1","annotations":{"csi.oxide.computer/cold-attach-plan":"ERROR"}`, 1),
	"a message of a container": strings.Replace(podJSON, `"state":{`,
		`"state":{"waiting":{"message":"ERROR"},`, 1),
	"an event of another kind": `{"kind":"Event","metadata":{"name":"data.1","namespace":"default"},` +
		`"reason":"Notice","message":"ERROR","involvedObject":{"name":"data",` +
		`"kind":"PersistentVolumeClaim","namespace":"default"}}`,
}

// The test writes each reason into each of places, after each edit in place.counts, and with each
// edit in inferences. The finding must have the reason, its sentence and its advice. After an edit
// in place.overcome or in unrelated, the error must not be found.
func TestDriverErrorsTakePrecedenceOverInferences(t *testing.T) {
	pairs, right, history := 0, 0, 0
	isHistory := func(what string, edits ...edit) {
		history++
		d := Diagnose(*healthy(t, edits...))
		if strings.Contains(text(d), sentence) || strings.Contains(text(d), theRecorder) {
			t.Errorf("an error that no longer counts is found: %s\n%s", what, text(d))
		}
	}
	for _, p := range places {
		isEvent := strings.HasPrefix(p.name, "event ")
		for _, reason := range short.Some(t, 6, csierr.Reasons()) {
			a := advices[reason]
			explained, _ := csierr.Explain(reason)
			link := a.Link
			if link == "" || link == LinkClaim {
				link = p.at
			}
			for phase, state := range p.counts {
				for beside, inferred := range inferences {
					pairs++
					d := Diagnose(*healthy(t, inferred, state, p.shows(string(reason))))
					f := d.Chains[0].Finding
					if f == nil || f.Link != link && phase != "awaited by a claim" || f.Reason != reason ||
						f.ByItself != a.ByItself || f.Do != strings.ReplaceAll(explained.Do, "`", "") ||
						f.Next == "" || !strings.Contains(f.Wrong, sentence) && p.name != "flight recorder" ||
						isEvent != strings.HasSuffix(f.Source, forgeable) {
						t.Errorf("%s in %s, %s, %s: got %+v\n%s", reason, p.name, phase, beside, f, text(d))
						continue
					}
					right++
				}
			}
		}
		shown := p.shows(string(csierr.DiskNotOurs))
		for phase, state := range p.overcome {
			isHistory(p.name+", "+phase, state, shown)
		}
		for phase, state := range p.counts {
			for why, change := range unrelated {
				if isEvent {
					isHistory(p.name+", "+phase+", "+why, state, shown, change)
				}
			}
		}
	}
	fmt.Printf("FIGURE doctor-reasons pairs=%d right=%d history=%d\n", pairs, right, history)
	if right != pairs || pairs == 0 {
		t.Errorf("%d of %d pairs are right", right, pairs)
	}
}

func TestAForgedDriverErrorIsNotQuoted(t *testing.T) {
	for place, text := range forged {
		objects := csitest.Got(kube.Parse([]byte(strings.Replace(text, "ERROR", rpc("RackFull"), 1))))(t)
		if !strings.Contains(text, "ERROR") {
			t.Fatal(place)
		}
		got := racktest.JSON(Diagnose(*healthy(t, pending, blank, without(objects[0].Kind),
			func(w *world) { w.Cluster.Objects = append(w.Cluster.Objects, objects...) })))
		if strings.Contains(got, sentence) {
			t.Errorf("%s is quoted: %s", place, got)
		}
	}
}

// parts says what the doctor must report if an object or field is missing from a healthy chain. The
// first entry whose pattern matches the path applies: the doctor must report its link or an earlier
// one. If the link is empty, the diagnosis must not change, for the reason in why.
var parts = []struct {
	pattern string
	link    Link
	why     string
}{
	{`.*/(metadata/(creationTimestamp|uid)|Pod:oxide-[^/]+/metadata/namespace|` +
		`VolumeAttachment:csi-1/metadata|(VolumeAttachment:csi-1|Pod:[^/]+)/metadata/name)`, "",
		"every object has it"},
	{`.*/PersistentVolumeClaim:data/(metadata/annotations(/.*)?|spec/storageClassName)`, "",
		"it matters until the claim is bound"},
	{`.*/PersistentVolume(Claim)?:[^/]+/spec/volumeMode`, "", "without one, it is Filesystem"},
	{`.*/PersistentVolume:[^/]+/spec/capacity(/.*)?`, "", "the disk has the size"},
	{`.*/PersistentVolume:[^/]+/spec/csi/volumeAttributes(/.*)?`, "", "the rack has the disk's name"},
	{`/rack/disks/[^/]+/object/claim`, "", "it is a label"},
	{`.*/CSINode:worker-1/spec/drivers/0(/.*)?`, "", "it is of another driver"},
	{`.*/CSINode:worker-1/spec/drivers/1/allocatable(/.*)?`, "",
		"it limits the next volumes, not this one"},
	{`.*/conditions/0/lastTransitionTime`, "", "the state counts, not its time"},
	{`.*/Pod:db-0/spec/volumes/0/name`, "", "the claim's name counts"},
	{`.*/Pod:db-0/status/(phase|containerStatuses(/.*)?)`, "",
		"the pod runs by the one or by the other, and a container that is not ready has its volumes"},
	{`.*/Pod:oxide-csi-node-x/metadata/ownerReferences/0/uid`, "", "Gather compared them"},
	{`.*/Pod:oxide-csi-node-x/status/containerStatuses/[0-9](/name|/state|/state/running)?`, "",
		"ready counts"},
	{`.*/Pod:oxide-csi-controller-x(/.*)?`, "",
		"it matters only if something waits for it; see situations"},
	{`/nodes/namespace`, "", "it is for commands"},
	{`/nodes/reports/[^/]+/(at|format|version)`, "", "the parser refuses another format"},
	{`/nodes/reports/[^/]+/instance`, "", "it is also the key of the report"},
	{`/nodes/reports/[^/]+/devices(/.*)?`, "", "the volume has its device in a list of its own"},
	{`/nodes/reports/[^/]+/volumes/0/devices/0/(blockBytes|name|number|serial)`, "",
		"the device was found by its serial number; the rest is shown"},
	{`/nodes/reports/[^/]+/volumes/0/filesystems/0/(sizeBytes|type)`, "",
		"the UUID tells whose it is"},
	{`/nodes/reports/[^/]+/volumes/0/(flight|open|from)`, "", "only the present state counts"},
	{`/nodes/reports/[^/]+/volumes/0/record(/instance)?`, "", "the driver needs no memory"},
	{`/nodes/reports/[^/]+/volumes/0/mounts/[0-9]/fsType`, "", "it is shown"},
	{`/nodes/reports/[^/]+/volumes/0/mounts/(0|2)(/.*)?`, "",
		"the pod has the volume by its own path"},
	{`/rack/cluster`, "", "a cluster may have no id"},
	{`/rack/disks/[^/]+/object/(filesystemUUID|id)`, "",
		"it is asked for by its id; the others may be missing"},
	{`/rack/instances/[^/]+/object/(id|name)`, "", "it is asked for by its id"},
	{`/rack/neighbours/[^/]+/object/0(/[^i].*|/instance)?`, "", "it is the disk itself"},
	{`/cluster/objects/PersistentVolumeClaim.*`, LinkClaim, ""},
	{`/cluster/objects/PersistentVolume.*`, LinkVolume, ""},
	{`/cluster/objects/VolumeAttachment.*`, LinkAttachment, ""},
	{`/cluster/objects/(CSINode|Node).*`, LinkNode, ""},
	{`/cluster/objects/Pod.*`, LinkPod, ""},
	{`/nodes/(driverPods|namespace).*`, LinkNode, ""},
	{`/rack/(cluster|project).*`, LinkRack, ""},
	{`/rack/instances.*`, LinkInstance, ""},
	{`/rack/disks.*`, LinkDisk, ""},
	{`/rack/neighbours.*`, LinkSerial, ""},
	{`/nodes/reports/[^/]+/volumes/0/record.*`, LinkSerial, ""},
	{`/nodes/reports/[^/]+/volumes/0/filesystems.*`, LinkFilesystem, ""},
	{`/nodes/reports/[^/]+/volumes/0/mounts.*`, LinkMounts, ""},
	{`/nodes/reports.*`, LinkDevice, ""},
}

// The test removes each object and each field of a healthy chain, one at a time. The diagnosis must
// report the link in the table parts, or an earlier link, as broken or unseen.
func TestDoctorReportsOnlyMissingObjectsAndFieldsThatMatter(t *testing.T) {
	var evidence map[string]any
	csitest.Must(t, json.Unmarshal([]byte(racktest.JSON(healthy(t))), &evidence))
	removed, right, irrelevant := 0, 0, 0
	used := map[int]bool{}
	of := func(path string) Link {
		for i, p := range parts {
			if regexp.MustCompile("^(" + p.pattern + ")$").MatchString(path) {
				used[i] = true
				return p.link
			}
		}
		t.Errorf("no link has the part %s", path)
		return ""
	}
	inside := regexp.MustCompile(`^/(cluster|nodes|rack)/`)
	walk("", evidence, nil, func(path string, item any, set func(any), remove func()) {
		if !inside.MatchString(path) || strings.HasSuffix(path, "/unseen") ||
			path == "/cluster/objects" {
			return // the part need not exist, or has objects of several links
		}
		remove()
		var e Evidence
		if err := json.Unmarshal([]byte(racktest.JSON(evidence)), &e); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		set(item)
		d, want := Diagnose(e), of(path)
		var named Link
		for _, s := range slices.Backward(d.Chains[0].Links) {
			if s.State == Broken || s.State == Unseen {
				named = s.Link
			}
		}
		if removed++; (named == "") != (want == "") || at(named) > at(want) {
			t.Errorf("without %s the doctor names %q, want %q or a link before it:\n%s", path, named, want,
				text(d))
			return
		}
		if right++; want == "" {
			irrelevant++
		}
	})
	for i, p := range parts {
		if !used[i] {
			t.Errorf("no part of a healthy chain is %s (%s)", p.pattern, p.why)
		}
	}
	fmt.Printf("FIGURE doctor-removals removed=%d right=%d irrelevant=%d\n", removed, right,
		irrelevant)
	if removed < 150 || right != removed {
		t.Errorf("%d of %d removals are right", right, removed)
	}
}

func at(l Link) int {
	return slices.IndexFunc(volumeLinks, func(j judgement) bool { return j.link == l })
}

func dead(controller, container string) edit {
	return func(w *world) {
		i := slices.IndexFunc(w.Nodes.DriverPods, func(pod kube.Object) bool {
			return pod.Metadata.Controller().Kind == controller
		})
		all := w.Nodes.DriverPods[i].Status.ContainerStatuses
		s := &all[slices.IndexFunc(all, func(s kube.ContainerStatus) bool { return s.Name == container })]
		s.Ready, s.State.Running, s.State.Waiting.Reason = false, nil, "CrashLoopBackOff"
	}
}
