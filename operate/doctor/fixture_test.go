package doctor

import (
	"bytes"
	_ "embed" // for volume.json
	"fmt"
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
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

var testNow = time.Date(2026, 6, 12, 12, 0, 0, 0, time.UTC)

const (
	podUID    = "0c0ffee0-7e5c-4b7a-9a52-0a4c9a1f0b77"
	diskBytes = 10 * volume.GiB
	pvName    = "pvc-11111111-2222-4333-8444-555555555555"
)

var diskName = volume.DiskName("blue", "pvc-1")

//go:embed testdata/volume.json
var allObjects string

// The objects of a volume that a pod uses, as kubectl prints them. Each line has one object.
var (
	objectLines    = strings.Split(strings.TrimSuffix(allObjects, "\n]}\n"), "\n")
	objectLine     = func(n int) string { return strings.TrimSuffix(objectLines[n], ",") }
	claimJSON      = objectLine(1)
	pvJSON         = objectLine(2)
	attachmentJSON = objectLine(3)
	csiNodeJSON    = objectLine(4)
	nodeJSON       = objectLine(5)
	podJSON        = objectLine(6)
	driverPodJSON  = objectLine(7)
	ownJSON        = strings.Join(objectLines[7:], "\n") // in the driver's namespace
)

func listJSON(items ...string) string {
	return `{"kind":"List","apiVersion":"v1","metadata":{},"items":[` + strings.Join(items, ",") + `]}`
}

func theNode() inspection.Report {
	device := inspection.Device{Name: "nvme1n1", Number: "259:1", Serial: diskName,
		SizeBytes: diskBytes, BlockBytes: 4096}
	return inspection.Report{Format: inspection.Format, Version: "v1", At: testNow,
		Instance: racktest.Instance, Devices: []inspection.Device{device},
		Volumes: []inspection.Volume{{ID: racktest.Disk, Serial: diskName, From: "the volume's record",
			Record:  &inspection.VolumeRecord{Disk: diskName, Instance: racktest.Instance},
			Devices: []inspection.Device{device},
			Filesystems: []inspection.Filesystem{{Type: "ext4", UUID: uuid.MustParse(racktest.Disk),
				SizeBytes: diskBytes}},
			Mounts: []inspection.Mount{
				{Path: "/var/lib/kubelet/plugins/kubernetes.io/csi/x/globalmount", FSType: "ext4"},
				{Path: "/var/lib/kubelet/pods/" + podUID + "/volumes/kubernetes.io~csi/" + pvName + "/mount",
					FSType: "ext4"},
				{Path: "/data", FSType: "ext4", Process: "77 (postgres)"},
			},
		}}}
}

// world contains the evidence of a test, and pointers through which edits change the objects in it.
// An edit may add more objects to Cluster.Objects.
type world struct {
	t testing.TB
	*Evidence
	of                               map[string]*kube.Object // keys: kinds
	claim, pv, attachment, node, pod *kube.Object
	disk                             *Disk
	machine                          *Machine
	onNode                           *inspection.Volume // in the node's report
	filesystem                       *inspection.Filesystem
}

type edit = func(*world)

func healthy(t testing.TB, edits ...edit) *Evidence {
	t.Helper()
	objects, report := csitest.Got(kube.Parse([]byte(allObjects)))(t), theNode()
	w := &world{t: t, Evidence: &Evidence{Version: "v1", At: testNow,
		Question: Question{AskClaim, "default", "data"}}, of: map[string]*kube.Object{},
		disk: &Disk{ID: racktest.Disk, Name: diskName, State: diskAttached, Instance: racktest.Instance,
			SizeBytes: diskBytes, BlockBytes: 4096, FilesystemUUID: racktest.Disk, Claim: "default/data"},
		machine: &Machine{racktest.Instance, "worker-1", instanceRunning}, onNode: &report.Volumes[0]}
	for i := range objects[:6] {
		w.of[objects[i].Kind] = &objects[i]
	}
	w.claim, w.pv, w.attachment = w.of[kindClaim], w.of[kindVolume], w.of[kindAttachment]
	w.node, w.pod, w.filesystem = w.of[kindNode], w.of[kindPod], &w.onNode.Filesystems[0]
	w.Cluster.Unseen = map[string]string{}
	w.Nodes = Nodes{Reports: map[string]inspection.Report{racktest.Instance: report},
		Namespace: "oxide-csi", DriverPods: slices.Clip(objects[6:8]), Unseen: map[string]string{}}
	w.Rack = RackObjects{Cluster: "blue", Project: racktest.ProjectID,
		Disks:      map[string]Found[Disk]{racktest.Disk: {Object: w.disk}},
		Instances:  map[string]Found[Machine]{racktest.Instance: {Object: w.machine}},
		Neighbours: map[string]Found[[]Disk]{racktest.Instance: {Object: &[]Disk{*w.disk}}}}
	all(edits...)(w)
	w.Cluster.Objects = slices.Concat(slices.DeleteFunc(objects[:6], func(o kube.Object) bool {
		return w.of[o.Kind] == nil
	}), w.Cluster.Objects)
	(&gatherer{e: *w.Evidence}).sift() // also changes w.Evidence, because the copy shares its objects
	return w.Evidence
}

func all(edits ...edit) edit {
	return func(w *world) {
		for _, change := range edits {
			change(w)
		}
	}
}

func ask(q Question) edit { return func(w *world) { w.Question = q } }

func askPod(name string) edit { return ask(Question{AskPod, "default", name}) }

func without(kinds ...string) edit {
	return func(w *world) {
		for _, kind := range kinds {
			delete(w.of, kind)
		}
		w.Cluster.Objects = slices.DeleteFunc(w.Cluster.Objects,
			func(o kube.Object) bool { return slices.Contains(kinds, o.Kind) })
	}
}

// event adds an event about an object, first seen 20 minutes ago and last seen a minute ago.
func event(kind, name, reason, message string) edit {
	return func(w *world) {
		o := kube.Object{Kind: kindEvent}
		o.Metadata.Name, o.Metadata.Namespace = name+".1", "default"
		o.Reason, o.Message = reason, message
		o.InvolvedObject = kube.Reference{Kind: kind, Namespace: "default", Name: name}
		if kind == kindVolume {
			o.InvolvedObject.Namespace = ""
		}
		w.Cluster.Objects = append(w.Cluster.Objects, o)
		minutesAgo(20, 1)(w)
	}
}

// sentence follows the reason in every error of the driver that these tests use.
const sentence = "expected this, found that"

func rpc(reason string) string {
	return "rpc error: code = FailedPrecondition desc = " + reason + ": " + sentence
}

func phase(kind, phase string) edit { return func(w *world) { w.of[kind].Status.Phase = phase } }

// minutesAgo sets how long ago the last added event was first and last seen.
func minutesAgo(first, last time.Duration) edit {
	return lastEvent(func(o *kube.Object) {
		o.FirstTimestamp = testNow.Add(-first * time.Minute)
		o.LastTimestamp = testNow.Add(-last * time.Minute)
	})
}

// succeeded() adds an event that reports a successful call for the volume. ago is in minutes.
func succeeded(kind, name, reason string, ago time.Duration) edit {
	return all(event(kind, name, reason, `AttachVolume.Attach succeeded for volume "`+pvName+`"`),
		minutesAgo(ago, ago))
}

func podEvent(cause, volume, reason string) edit {
	return event(kindPod, "db-0", cause, `failed for volume "`+volume+`" : `+rpc(reason))
}

func lastEvent(change func(*kube.Object)) edit {
	return func(w *world) { change(&w.Cluster.Objects[len(w.Cluster.Objects)-1]) }
}

func deleted(kind string, ago time.Duration) edit {
	return func(w *world) { w.of[kind].Metadata.DeletionTimestamp = testNow.Add(-ago) }
}

func stuck(kind, finalizer string) edit {
	return all(deleted(kind, 40*time.Minute), func(w *world) {
		w.of[kind].Metadata.Finalizers = []string{finalizer}
	})
}

func young(kind string) edit {
	return func(w *world) { w.of[kind].Metadata.CreationTimestamp = testNow.Add(-time.Second) }
}

func attachError(message string) edit {
	return func(w *world) {
		w.attachment.Status.AttachError = &kube.Failure{Time: testNow.Add(-time.Minute), Message: message}
	}
}

func detachError(reason string) edit {
	return func(w *world) {
		w.attachment.Status.DetachError = &kube.Failure{Time: testNow, Message: rpc(reason)}
	}
}

func problems(found ...inspection.Problem) edit {
	return func(w *world) { w.onNode.Problems = found }
}

func recorded(entries ...flight.Entry) edit {
	return func(w *world) { w.onNode.Flight = entries }
}

func begun(events ...flight.Event) edit {
	return func(w *world) {
		for _, event := range events {
			w.onNode.Open = append(w.onNode.Open, entry(event, time.Hour))
		}
	}
}

var (
	pending = func(w *world) {
		w.pod.Status.Phase, w.pod.Status.ContainerStatuses = "Pending", nil
	}
	notReady     = func(w *world) { w.node.Status.Conditions[0].Status = "Unknown" }
	noDriver     = func(w *world) { w.of[kindCSINode].Spec.Drivers = nil }
	detached     = func(w *world) { w.disk.State, w.disk.Instance = diskDetached, "" }
	faulted      = func(w *world) { w.disk.State, w.disk.Instance = diskFaulted, "" }
	empty        = all(blank, func(w *world) { w.onNode.Record, w.onNode.Devices = nil, nil })
	blank        = all(unmounted, noFilesystem)
	noFilesystem = func(w *world) { w.onNode.Filesystems = nil }
	unmounted    = func(w *world) { w.onNode.Mounts = nil }
	staged       = func(w *world) { w.onNode.Mounts = w.onNode.Mounts[:1] }
	unused       = all(without(kindPod, kindAttachment), detached, empty)
	unscheduled  = all(pending, func(w *world) { w.pod.Spec.NodeName = "" }, without(kindAttachment),
		empty, detached)
	pendingClaim = func(w *world) {
		w.claim.Status.Phase, w.claim.Spec.VolumeName = "Pending", ""
	}
	unbound = all(pendingClaim, unscheduled, without(kindVolume), func(w *world) {
		w.Rack.Disks = map[string]Found[Disk]{}
	})
	keptVolume = all(without(kindPod, kindClaim), stuck(kindVolume,
		"external-provisioner.volume.kubernetes.io/finalizer"), askVolume)
	askVolume    = ask(Question{Kind: AskVolume, Name: racktest.Disk})
	askNode      = ask(Question{Kind: AskNode, Name: "worker-1"})
	askCluster   = ask(Question{Kind: AskCluster})
	noReport     = func(w *world) { w.Nodes.Reports, w.Nodes.Unseen[""] = nil, "no node was asked" }
	noRack       = func(w *world) { w.Rack = RackObjects{Unseen: "OXIDE_HOST is not set"} }
	noKubernetes = all(askVolume, func(w *world) {
		clear(w.of)
		for kind := range resources {
			w.Cluster.Unseen[kind] = "there is no Kubernetes"
		}
	})
	twoReports = func(w *world) { w.Nodes.Reports[racktest.OtherInstance] = theNode() }
)

// walk calls visit() for each JSON value below a value. visit() gets the path, and functions that
// set and remove the value. visit() has to restore the value before it returns.
func walk(path string, value any, set func(any), visit func(path string, part any, set func(any),
	remove func())) {
	switch v := value.(type) {
	case map[string]any:
		for _, key := range sortedKeys(v) {
			below, part, put := path+"/"+key, v[key], func(x any) { v[key] = x }
			visit(below, part, put, func() { delete(v, key) })
			walk(below, part, put, visit)
		}
	case []any:
		for i, part := range v {
			below := fmt.Sprint(path, "/", i)
			if o, ok := part.(map[string]any); ok && o["metadata"] != nil {
				below = fmt.Sprint(path, "/", o["kind"], ":", o["metadata"].(map[string]any)["name"])
			}
			put := func(x any) { v[i] = x; set(v) }
			visit(below, part, put, func() { set(slices.Delete(slices.Clone(v), i, i+1)) })
			walk(below, part, put, visit)
		}
	}
}

func notAttached(message string) edit {
	failed := all()
	if message != "" {
		failed = attachError(message)
	}
	return all(pending, detached, empty, failed, func(w *world) {
		w.attachment.Status.Attached = false
	})
}

func entry(event flight.Event, age time.Duration) flight.Entry {
	e := flight.Entry{Time: testNow.Add(-age), Event: event, Outcome: flight.Begun}
	if e.Path = theNode().Volumes[0].Mounts[1].Path; event == flight.Unmounted {
		e.Path = theNode().Volumes[0].Mounts[0].Path
	}
	return e
}

// over() returns the entry of a change that has ended. A change with a reason has failed.
func over(event flight.Event, age time.Duration, reason csierr.Reason) flight.Entry {
	e := entry(event, age)
	if e.Outcome = flight.Done; reason != "" {
		e.Outcome, e.Reason = flight.Failed, string(reason)
	}
	return e
}

func text(d Diagnosis) string {
	var b bytes.Buffer
	d.writeLinks(&b)
	return b.String()
}
