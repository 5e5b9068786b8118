package doctor

import (
	_ "embed" // for volume.json
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
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

// before returns the time d before testNow, in Kubernetes' format.
func before(d time.Duration) string { return testNow.Add(-d).Format(time.RFC3339) }

//go:embed testdata/volume.json
var allObjects string

// The objects of a volume that a pod uses, as kubectl prints them. Each line has one object.
var (
	objectLines       = strings.Split(strings.TrimSuffix(allObjects, "\n]}\n"), "\n")
	objectLine        = func(n int) string { return strings.TrimSuffix(objectLines[n], ",") }
	claimJSON         = objectLine(1)
	pvJSON            = objectLine(2)
	attachmentJSON    = objectLine(3)
	csiNodeJSON       = objectLine(4)
	nodeJSON          = objectLine(5)
	podJSON           = objectLine(6)
	driverPodJSON     = objectLine(7)
	controllerPodJSON = objectLine(8)
	workloadsJSON     = strings.Join(objectLines[9:], "\n") // the driver's DaemonSet and Deployment
)

func listJSON(items ...string) string {
	return `{"kind":"List","apiVersion":"v1","metadata":{},"items":[` + strings.Join(items, ",") + `]}`
}

// theNode returns a node's report, about a volume that works.
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

// healthy returns the evidence of a volume that works, after these edits.
func healthy(t testing.TB, edits ...edit) *Evidence {
	t.Helper()
	e := &Evidence{Version: "v1", At: testNow, Question: Question{AskClaim, "default", "data"}}
	objects, err := kube.Parse([]byte(allObjects))
	csitest.Must(t, err)
	e.Cluster.Objects, e.Cluster.Unseen = slices.Clip(objects[:6]), map[string]string{}
	e.Nodes.Reports = map[string]inspection.Report{racktest.Instance: theNode()}
	e.Nodes.Unseen, e.Nodes.Namespace = map[string]string{}, "oxide-csi"
	e.Nodes.DriverPods = slices.Clip(objects[6:8])
	disk := Disk{ID: racktest.Disk, Name: diskName, State: diskAttached, Instance: racktest.Instance,
		SizeBytes: diskBytes, BlockBytes: 4096, Type: "distributed", FilesystemUUID: racktest.Disk,
		Claim: "default/data"}
	neighbours := []Disk{disk}
	e.Rack = RackObjects{Cluster: "blue", Project: racktest.ProjectID,
		Disks: map[string]Found[Disk]{racktest.Disk: {Object: &disk}},
		Instances: map[string]Found[Machine]{racktest.Instance: {Object: &Machine{racktest.Instance,
			"worker-1", instanceRunning}}},
		Neighbours: map[string]Found[[]Disk]{racktest.Instance: {Object: &neighbours}}}
	all(edits...)(t, e)
	(&gatherer{e: *e}).sift() // it changes the objects, which e shares
	return e
}

type edit func(t testing.TB, e *Evidence)

func all(edits ...edit) edit {
	return func(t testing.TB, e *Evidence) {
		for _, change := range edits {
			change(t, e)
		}
	}
}

func ask(q Question) edit { return func(_ testing.TB, e *Evidence) { e.Question = q } }

func askPod(name string) edit { return ask(Question{AskPod, "default", name}) }

// without removes all objects of these kinds.
func without(kinds ...string) edit {
	return func(_ testing.TB, e *Evidence) {
		e.Cluster.Objects = slices.DeleteFunc(slices.Clone(e.Cluster.Objects),
			func(o kube.Object) bool { return slices.Contains(kinds, o.Kind) })
	}
}

func object(kind string, change func(*kube.Object)) edit {
	return func(t testing.TB, e *Evidence) {
		for i := range e.Cluster.Objects {
			if e.Cluster.Objects[i].Kind == kind {
				change(&e.Cluster.Objects[i])
				return
			}
		}
		t.Fatalf("there is no %s", kind)
	}
}

// event adds an event about an object, first seen 20 minutes ago and last seen a minute ago.
func event(kind, name, reason, message string) edit {
	return func(_ testing.TB, e *Evidence) {
		o := kube.Object{Kind: kindEvent}
		o.Metadata.Name, o.Metadata.Namespace = name+".1", "default"
		o.Reason, o.Message = reason, message
		o.FirstTimestamp, o.LastTimestamp = testNow.Add(-20*time.Minute), testNow.Add(-time.Minute)
		o.InvolvedObject = kube.Reference{Kind: kind, Namespace: "default", Name: name}
		if kind == kindVolume {
			o.InvolvedObject.Namespace = ""
		}
		e.Cluster.Objects = append(e.Cluster.Objects, o)
	}
}

// sentence follows the reason in every error of the driver that these tests use.
const sentence = "expected this, found that"

// rpc returns the text of an error of the driver with gRPC's prefix.
func rpc(reason string) string {
	return "rpc error: code = FailedPrecondition desc = " + reason + ": " + sentence
}

func phase(kind, phase string) edit {
	return object(kind, func(o *kube.Object) { o.Status.Phase = phase })
}

// minutesAgo sets how long ago the last added event was first and last seen.
func minutesAgo(first, last time.Duration) edit {
	return lastEvent(func(o *kube.Object) {
		o.FirstTimestamp = testNow.Add(-first * time.Minute)
		o.LastTimestamp = testNow.Add(-last * time.Minute)
	})
}

// succeeded adds an event about an object: some minutes ago, a call for the volume succeeded.
func succeeded(kind, name, reason string, ago time.Duration) edit {
	return all(event(kind, name, reason, `AttachVolume.Attach succeeded for volume "`+pvName+`"`),
		minutesAgo(ago, ago))
}

// podEvent adds an event about the pod: a call for a volume failed with an error of the driver.
func podEvent(cause, volume, reason string) edit {
	return event(kindPod, "db-0", cause, `failed for volume "`+volume+`" : `+rpc(reason))
}

func lastEvent(change func(*kube.Object)) edit {
	return func(_ testing.TB, e *Evidence) { change(&e.Cluster.Objects[len(e.Cluster.Objects)-1]) }
}

// deleted marks the first object of a kind as deleted some time ago.
func deleted(kind string, ago time.Duration) edit {
	return object(kind, func(o *kube.Object) { o.Metadata.DeletionTimestamp = testNow.Add(-ago) })
}

// stuck marks an object as deleted 40 minutes ago, and adds a finalizer.
func stuck(finalizer string) func(*kube.Object) {
	return func(o *kube.Object) {
		o.Metadata.DeletionTimestamp = testNow.Add(-40 * time.Minute)
		o.Metadata.Finalizers = []string{finalizer}
	}
}

func young(o *kube.Object) { o.Metadata.CreationTimestamp = testNow.Add(-time.Second) }

func detachError(reason string) edit {
	return object(kindAttachment, func(o *kube.Object) {
		o.Status.DetachError = &kube.Failure{Time: testNow, Message: rpc(reason)}
	})
}

func recorded(entries ...flight.Entry) edit {
	return onNode(func(v *inspection.Volume) { v.Flight = entries })
}

// begun adds to the report changes that began an hour ago and did not end.
func begun(events ...flight.Event) edit {
	return onNode(func(v *inspection.Volume) {
		for _, event := range events {
			v.Open = append(v.Open, entry(event, time.Hour))
		}
	})
}

func disk(change func(*Disk)) edit {
	return func(_ testing.TB, e *Evidence) {
		d := *e.Rack.Disks[racktest.Disk].Object
		change(&d)
		e.Rack.Disks[racktest.Disk] = Found[Disk]{Object: &d}
	}
}

func onNode(change func(*inspection.Volume)) edit {
	return func(_ testing.TB, e *Evidence) {
		r, reported := e.Nodes.Reports[racktest.Instance]
		if !reported {
			r = theNode()
		}
		change(&r.Volumes[0])
		e.Nodes.Reports[racktest.Instance] = r
	}
}

// Edits that several tests share.
var (
	// pending makes the pod, which has a node, wait for its volumes.
	pending = object(kindPod, func(o *kube.Object) {
		o.Status.Phase = "Pending"
		o.Status.ContainerStatuses = nil
	})
	notReady = object(kindNode, func(o *kube.Object) { o.Status.Conditions[0].Status = "Unknown" })
	noDriver = object(kindCSINode, func(o *kube.Object) { o.Spec.Drivers = nil })
	detached = disk(func(d *Disk) { d.State, d.Instance = diskDetached, "" })
	faulted  = disk(func(d *Disk) { d.State, d.Instance = diskFaulted, "" })
	// empty removes the volume's record, device, filesystem and mounts from the node's report.
	empty = onNode(func(v *inspection.Volume) {
		v.Record, v.Devices, v.Filesystems, v.Mounts = nil, nil, nil, nil
	})
	blank     = onNode(func(v *inspection.Volume) { v.Mounts, v.Filesystems = nil, nil })
	unmounted = onNode(func(v *inspection.Volume) { v.Mounts = nil })
	staged    = onNode(func(v *inspection.Volume) { v.Mounts = v.Mounts[:1] })
	// unused removes the pods that use the volume, and detaches its disk.
	unused = all(without(kindPod, kindAttachment), detached, empty)
	// unscheduled removes the pod from its node, so that it waits for the scheduler.
	unscheduled = all(object(kindPod, func(o *kube.Object) {
		o.Status.Phase, o.Spec.NodeName, o.Status.ContainerStatuses = "Pending", "", nil
	}), without(kindAttachment), empty, detached)
	// unbound removes the volume, so that the claim waits for one.
	unbound = all(object(kindClaim, func(o *kube.Object) {
		o.Status.Phase, o.Spec.VolumeName = "Pending", ""
	}), unscheduled, without(kindVolume), func(_ testing.TB, e *Evidence) {
		e.Rack.Disks = map[string]Found[Disk]{}
	})
	// keptVolume leaves only a PersistentVolume that was deleted 40 minutes ago and has a finalizer.
	keptVolume = all(without(kindPod, kindClaim), object(kindVolume,
		stuck("external-provisioner.volume.kubernetes.io/finalizer")), askVolume)
	askVolume  = ask(Question{Kind: AskVolume, Name: racktest.Disk})
	askNode    = ask(Question{Kind: AskNode, Name: "worker-1"})
	askCluster = ask(Question{Kind: AskCluster})
	// noReport removes the node's report, as if nobody had asked the node.
	noReport = all(put("nodes/reports", nil), put("nodes/unseen/", "no node was asked"))
	noRack   = put("rack", RackObjects{Unseen: "OXIDE_HOST is not set"})
	// noKubernetes removes every object, as if Kubernetes could not be read.
	noKubernetes = all(askVolume, func(_ testing.TB, e *Evidence) {
		e.Cluster = Cluster{Unseen: map[string]string{}}
		for kind := range resources {
			e.Cluster.Unseen[kind] = "there is no Kubernetes"
		}
	})
	twoReports = put("nodes/reports/"+racktest.OtherInstance, theNode())
)

// put sets the value at a path of JSON names in the evidence; nil removes it. In the path, a kind
// is the first object of this kind, * the first field, and + a new item of a list.
func put(path string, value any) edit {
	return func(t testing.TB, e *Evidence) {
		var whole any
		csitest.Must(t, json.Unmarshal([]byte(racktest.JSON(e)), &whole))
		whole = with(whole, strings.Split(path, "/"), value)
		*e = Evidence{}
		csitest.Must(t, json.Unmarshal([]byte(racktest.JSON(whole)), e))
	}
}

// with sets the value at a path below a JSON value, and returns the changed JSON value.
func with(part any, path []string, value any) any {
	if len(path) == 0 {
		return value
	}
	key, rest := path[0], path[1:]
	if list, isList := part.([]any); isList || key == "+" {
		if key == "+" {
			return append(list, with(nil, rest, value))
		}
		i := slices.IndexFunc(list, func(item any) bool {
			o, _ := item.(map[string]any)
			return o["kind"] == key
		})
		if n, err := strconv.Atoi(key); err == nil {
			i = n
		}
		list[i] = with(list[i], rest, value)
		return list
	}
	fields, _ := part.(map[string]any)
	if fields == nil {
		fields = map[string]any{}
	}
	if key == "*" {
		key = sortedKeys(fields)[0]
	}
	fields[key] = with(fields[key], rest, value)
	return fields
}

// walk calls visit for each JSON value below value. visit gets its path, and functions that set and
// remove it. Before it returns, visit has to set the old value again.
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

// notAttached detaches the disk, and makes the pod wait for the attach. message is the last error.
func notAttached(message string) edit {
	return all(pending, detached, empty, object(kindAttachment, func(o *kube.Object) {
		o.Status.Attached = false
		if message != "" {
			o.Status.AttachError = &kube.Failure{Time: testNow.Add(-time.Minute), Message: message}
		}
	}))
}

func entry(event flight.Event, age time.Duration) flight.Entry {
	return flight.Entry{Time: testNow.Add(-age), Event: event, Outcome: flight.Begun}
}

// over returns the entry of a change that was made or, with a reason, has failed.
func over(event flight.Event, age time.Duration, reason csierr.Reason) flight.Entry {
	e := entry(event, age)
	if e.Outcome = flight.Done; reason != "" {
		e.Outcome, e.Reason = flight.Failed, string(reason)
	}
	return e
}

func text(d Diagnosis) string { return string(d.text()) }
