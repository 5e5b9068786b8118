package doctor

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

var update = flag.Bool("update", false, "write testdata/reports.txt")

// inOrder matches the lines of links without a finding, empty lines, and the FIGURE line.
var inOrder = regexp.MustCompile(`(?m)^(  \w+ +(ok|idle) .*|FIGURE .*|)\n`)

// The test checks that findings are complete, and compares the reports with testdata/reports.txt,
// which go test ./operate/doctor -run Report -update writes. It removes the lines that inOrder
// matches from all reports but the first two and those of a cluster.
func TestReportsMatchTheGoldenFile(t *testing.T) {
	var all strings.Builder
	for i, s := range situations {
		e := healthy(t, s.change)
		d := Diagnose(*e)
		for _, c := range d.broken() {
			if f := c.Finding; f.Wrong == "" || f.Source == "" || f.ByItself == "" || f.Do == "" ||
				f.Next == "" || strings.ContainsAny(f.Next, "{}\n") {
				t.Errorf("%s: incomplete: %+v", s.name, f)
			}
		}
		var b bytes.Buffer
		csitest.Must(t, d.Write(&b, Options{Question: e.Question}))
		report := "==== " + s.name + "\n" + b.String() + "\n"
		if i > 1 && e.Question.Kind != AskCluster {
			report = inOrder.ReplaceAllString(report, "")
		}
		all.WriteString(report)
	}
	const path = "testdata/reports.txt"
	if *update {
		csitest.Must(t, os.WriteFile(path, []byte(all.String()), 0o600))
	}
	want, err := os.ReadFile(path)
	csitest.Must(t, err)
	diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(all.String(), "\n"))
	if diff != "" {
		t.Errorf("if this is meant, run the test with -update:\n%s", diff)
	}
}

type broke struct{}

func (broke) Write([]byte) (int, error) { return 0, errors.New("no space left") }

func TestWriteReturnsTheErrorOfItsWriter(t *testing.T) {
	e := healthy(t)
	d := Diagnose(*e)
	for name, write := range map[string]func(io.Writer) error{
		"text":   func(w io.Writer) error { return d.Write(w, Options{}) },
		"JSON":   func(w io.Writer) error { return d.Write(w, Options{JSON: true}) },
		"bundle": func(w io.Writer) error { return WriteBundle(w, d, *e) }, "page": d.WriteHTML,
	} {
		var b bytes.Buffer
		if err := write(&b); err != nil || json.Valid(b.Bytes()) != (name == "JSON" || name == "bundle") {
			t.Errorf("%s: %v: %s", name, err, b.String())
		}
		if err := write(broke{}); err == nil {
			t.Errorf("%s: an error of the writer is lost", name)
		}
	}
}

// FuzzDiagnose makes a diagnosis from any objects and any report of a node. The diagnosis must not
// be much larger than its input, and every finding must be complete.
func FuzzDiagnose(f *testing.F) {
	f.Fuzz(func(t *testing.T, objects, report string) {
		e := healthy(t)
		if found, err := kube.Parse([]byte(objects)); err == nil {
			e.Cluster.Objects = found
		}
		if r, err := inspection.Parse([]byte(report)); err == nil {
			e.Nodes.Reports[racktest.Instance] = r
		}
		for _, q := range []Question{{AskClaim, "default", "data"}, {AskPod, "default", "db-0"},
			{Kind: AskVolume, Name: racktest.Disk}, {Kind: AskNode, Name: "worker-1"}} {
			e.Question = q
			g := &gatherer{options: Options{Question: q}, e: *e}
			g.sift()
			g.prune()
			d := Diagnose(g.e)
			// A step contains at most a few texts for each object, each of at most a thousand bytes.
			if got, most := len(text(d)), 256<<10+64*(len(objects)+len(report)); got > most {
				t.Errorf("%d bytes from %d", got, len(objects)+len(report))
			}
			for _, c := range d.Chains {
				if f := c.Finding; f != nil && (f.Wrong == "" || f.Do == "" || f.Next == "") {
					t.Errorf("incomplete: %+v", f)
				}
			}
		}
	})
}

// In this chain every name is known, so no placeholder may become a word in capitals.
func TestEveryAdvisedCommandIsReadOnlyAndComplete(t *testing.T) {
	reads := regexp.MustCompile(`^(kubectl (get|describe|logs|exec|debug) |oxide (disk|instance) ` +
		`(view|disk list) |oxide-csi-plugin (doctor|audit) )`)
	unknown := regexp.MustCompile(`[{}]|\b[A-Z]{2,}\b|--delete`)
	c := resolve(healthy(t))[0]
	for reason, a := range advices {
		command := c.commandAt("", a.Next)
		if !reads.MatchString(command) || unknown.MatchString(command) || a.ByItself == "" ||
			a.Link != "" && at(a.Link) < 0 || !slices.Contains(csierr.Reasons(), reason) {
			t.Errorf("%s: %+v: %s", reason, a, command)
		}
	}
	listed := 0
	for _, a := range advised {
		listed += len(a.Reasons)
	}
	if len(advices) != len(csierr.Reasons()) || listed != len(advices) {
		t.Errorf("%d of %d reasons have an advice, %d times", len(advices), len(csierr.Reasons()), listed)
	}
}

func TestAVolumeThatWorksHasNoFinding(t *testing.T) {
	for name, edits := range map[string][]edit{
		"in use":                                         nil,
		"used by nobody":                                 {unused},
		"used by nobody, with no node to ask":            {unused, noReport},
		"of a pod whose image is missing":                {waits("ImagePullBackOff")},
		"of a pod whose init container takes long":       {waits("PodInitializing", restores)},
		"with a read-only device, and mounted read-only": {put(ofVolume+"devices/0/readOnly", true)},
		"with events about another volume of the pod": {pending, object(kindPod, young),
			podEvent("FailedMount", "pvc-2", "DiskNotBlank"),
			put("cluster/objects/Event/involvedObject/uid", podUID)},
		"about to leave another node": {secondPod, deleted(kindAttachment, time.Second),
			without(kindPod), secondPod},
		"waiting for a pod": {unbound, without(kindPod), event(kindClaim, "data", "WaitForFirstConsumer",
			"waiting for first consumer to be created before binding")},
		"on its way":           {notAttached(""), object(kindAttachment, young), object(kindPod, young)},
		"just left by its pod": {without(kindPod), recorded(over(flight.Unpublished, time.Second, ""))},
		"unmounted at last": {recorded(over(flight.Unmounted, time.Minute, csierr.StillMounted),
			over(flight.Published, time.Second, ""))},
		"of a pod that is being deleted": {deleted(kindPod, 0), staged},
		"with a change that was interrupted, and repeated since": {begun(flight.Formatted,
			flight.Mounted)},
	} {
		t.Run(name, func(t *testing.T) {
			d := Diagnose(*healthy(t, edits...))
			if len(d.Chains) != 1 || d.Chains[0].Finding != nil || d.Status() != 0 {
				t.Errorf("status %d\n%s", d.Status(), text(d))
			}
		})
	}
}

// goingPod makes the pod one that has ended and whose deletion is overdue.
var goingPod = object(kindPod, func(o *kube.Object) {
	o.Status.Phase, o.Metadata.DeletionTimestamp = "Succeeded", testNow.Add(-time.Hour)
})

// secondPod adds a pod that waits on another node, to which the volume is not attached.
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

// ofVolume is the path of the volume in the node's report.
const ofVolume = "nodes/reports/*/volumes/0/"

// situations contains edits that break a link or hide an object. reports.txt has a report of each.
var situations = []struct {
	name   string
	change edit
}{
	{"a volume that works", all()},
	{"a volume that works, on a node that was not asked", noReport},
	// Situations of the claim and the volume.
	{"a claim whose deletion a pod blocks", object(kindClaim, stuck("kubernetes.io/pvc-protection"))},
	{"a volume whose deletion is overdue", keptVolume},
	{"a volume of another claim", put("cluster/objects/PersistentVolume/spec/claimRef/name", "other")},
	{"a lost claim", all(without(kindVolume, kindAttachment), phase(kindClaim, phaseLost))},
	{"a class that Kubernetes does not know, after it waited for a pod", all(unbound,
		event(kindClaim, "data", "ProvisioningFailed", `storageclass.storage.k8s.io "x" not found`),
		succeeded(kindClaim, "data", "WaitForFirstConsumer", 60))},
	{"a claim that waits although its pod is on a node", all(unbound, put(
		"cluster/objects/Pod/spec/nodeName", "worker-1"), event(kindClaim, "data",
		"WaitForFirstConsumer", "waiting for pod db-0 to be scheduled"))},
	// Situations of the attachment.
	{"an attach whose error is not the driver's", notAttached("context deadline exceeded")},
	{"no attachment for a pod on a node", all(pending, without(kindAttachment), empty, detached)},
	{"a second pod on another node", secondPod},
	{"a detach that is overdue", all(without(kindPod), deleted(kindAttachment, time.Hour), empty)},
	// Situations of the node and its instance.
	{"a node without the driver", all(notAttached(""), noDriver, object(kindAttachment, young))},
	{"a failed instance", put("rack/instances/*/object/state", instanceFailed)},
	{"a node that became another instance", put("nodes/reports/*/instance", racktest.OtherInstance)},
	// Situations of the disk.
	{"a faulted disk", faulted},
	{"a disk whose import was not finalized", all(detached, put("rack/disks/*/object/state",
		"import_ready"))},
	{"a disk that was detached by hand", detached},
	{"a disk that was moved by hand", put("rack/disks/*/object/instance", racktest.OtherInstance)},
	{"a disk that stayed attached", all(without(kindPod, kindAttachment), empty)},
	{"a volume attribute of another disk", put(
		"cluster/objects/PersistentVolume/spec/csi/volumeAttributes/diskName", "another")},
	{"a neighbour with the same serial number", put("rack/neighbours/*/object/+",
		Disk{ID: racktest.Image, Name: diskName + "-copy"})},
	{"a record of another disk", put(ofVolume+"record/disk", "csi-another000000000")},
	// Situations of the device and the filesystem.
	{"no device", all(pending, empty)},
	{"two devices", put(ofVolume+"devices/+", inspection.Device{Name: "nvme2n1", Serial: diskName})},
	{"a device of another size", put(ofVolume+"devices/0/sizeBytes", 1)},
	{"a device with other blocks", put(ofVolume+"devices/0/blockBytes", 512)},
	{"a device that became read-only under a mount for writing", all(put(
		ofVolume+"devices/0/readOnly", true), put(ofVolume+"mounts/1/writable", true))},
	{"a device that cannot be read", all(put(ofVolume+"problems/+", inspection.Problem{
		Reason: "NoReason", Says: "x"}), put(ofVolume+"problems/+", inspection.Problem{
		Reason: csierr.DeviceUnreadable, Says: "I/O error"}))},
	{"a filesystem that was overwritten under its mount", put(ofVolume+"filesystems", nil)},
	{"a filesystem that was overwritten after its use", all(pending, blank,
		recorded(over(flight.Formatted, time.Hour, "")))},
	{"a filesystem that errors made read-only", put(ofVolume+"mounts/0/failed",
		"read-only after errors")},
	{"another filesystem", put(ofVolume+"filesystems/0/uuid", racktest.Image)},
	{"a filesystem that is too large", put(ofVolume+"filesystems/0/sizeBytes", 2*diskBytes)},
	{"a filesystem that was not grown", put(ofVolume+"filesystems/0/notGrown", true)},
	{"a format that was interrupted", all(pending, blank, begun(flight.Formatted))},
	// Situations of the mounts and the pod.
	{"a mount that was interrupted", all(pending, unmounted, begun(flight.Mounted))},
	{"a volume that is mounted nowhere under a running pod", unmounted},
	{"a volume that is not published to the pod", staged},
	{"a volume that is still mounted long after its pod", without(kindPod)},
	{"a pod whose deletion is overdue for no visible cause", all(goingPod, staged)},
	{"a volume that is mounted in another namespace only", all(without(kindPod), staged,
		deleted(kindAttachment, time.Second), put(ofVolume+"mounts/0/process", "77 (postgres)"))},
	{"a pod that waits for no visible cause", pending},
	{"a message of the kubelet's own, which is quoted", all(pending, event(kindPod, "db-0",
		"FailedMount", `MountVolume.SetUp failed for volume "config" : configmap "db" not found`))},
	// Notes, times, reports of other nodes, and several pods.
	{"a disk of others, which is noted", put("rack/disks/*/object/foreign", "has no ownership tag")},
	{"an error that alternates with another, since its first event", all(unbound,
		event(kindClaim, "data", "ProvisioningFailed", rpc("RackFull")), minutesAgo(50, 40),
		event(kindClaim, "data", "ProvisioningFailed", rpc("RackError")), minutesAgo(39, 30),
		event(kindClaim, "data", "ProvisioningFailed", rpc("RackFull")), minutesAgo(29, 2),
		event(kindClaim, "data", "ProvisioningFailed", rpc("RackFull")), minutesAgo(20, 10))},
	{"an attachment's error, since the first event of the pod", all(notAttached(rpc("InstanceFull")),
		podEvent("FailedAttachVolume", pvName, "InstanceFull"))},
	{"a node without attachments", all(askNode, without(kindAttachment))},
	{"a node whose attachments are not seen", all(askNode, without(kindAttachment),
		put("cluster/unseen", map[string]string{kindAttachment: "forbidden"}))},
	{"the only report, of a node that is not known", all(noKubernetes, noRack)},
	{"one of two reports, of a node that is not known", all(noKubernetes, noRack, twoReports)},
	{"one of two reports, of the node that the rack knows", all(noKubernetes, twoReports)},
	{"a report of another node", put("nodes/reports", map[string]inspection.Report{
		racktest.OtherInstance: theNode()})},
	{"a pod with two claims, of which one is missing", all(askPod("db-0"), put(
		"cluster/objects/Pod/spec/volumes/+", kube.PodVolume{Name: "scratch", Ephemeral: &struct{}{}}),
		put("cluster/objects/Pod/spec/volumes/+", kube.PodVolume{Name: "config"}))},
	{"a pod that works, beside another one that waits", all(secondPod, askPod("db-0"))},
	{"a pod that waits for the volume of another one", all(secondPod, askPod("db-1"))},
	{"a stop that the node keeper plans", all(notAttached(rpc("InstanceMustBeStopped")), object(
		kindNode, func(o *kube.Object) { o.Metadata.Annotations.KeeperPlan = "waits, 0 2 * * *" }))},
	{"a failed call of another node, which the command is for", all(secondPod,
		detachError("InstanceState"))},
	{"an error of the driver about a link that is broken anyway, which is noted",
		all(notAttached(rpc("DiskAttachedElsewhere")), faulted)},
	// Pods of the driver, kubelets and instances that do not work.
	{"a provisioner that crashes", all(unbound, dead(kindReplicaSet, "csi-provisioner"))},
	{"a provisioner's driver that crashes", all(unbound, dead(kindReplicaSet, "oxide-plugin"))},
	{"an attacher that crashes", all(notAttached(""), dead(kindReplicaSet, "csi-attacher"))},
	{"an attacher's driver that crashes", all(notAttached(""), dead(kindReplicaSet, "oxide-plugin"))},
	{"no pod of the controller", all(notAttached(""), func(_ testing.TB, e *Evidence) {
		e.Nodes.DriverPods = e.Nodes.DriverPods[:1]
	})},
	{"a node's driver that crashes", dead(kindDaemonSet, "oxide-plugin")},
	{"a registrar that crashes", dead(kindDaemonSet, "node-driver-registrar")},
	{"a registrar that crashes before it registered", all(dead(kindDaemonSet,
		"node-driver-registrar"), noDriver)},
	{"a kubelet that is silent", notReady},
	{"a stopped instance", put("rack/instances/*/object/state", instanceStopped)},
	{"a pod that is not scheduled", unscheduled},
	// Reports of a whole cluster.
	{"a cluster in order", askCluster},
	{"a cluster with a faulted disk", all(askCluster, faulted)},
	{"a cluster with a volume that nobody uses", all(askCluster, unused)},
	{"a cluster with a claim that has no volume", all(askCluster, unbound)},
	{"a cluster with a disk that has no PersistentVolume", all(askCluster, without(kindVolume,
		kindClaim, kindPod, kindAttachment))},
	{"a cluster in which no node was asked", all(askCluster, noReport)},
}

func TestAClusterReportEscapesNames(t *testing.T) {
	hostile := disk(func(d *Disk) { d.Name = "<script>\x1b[2J\u202e" })
	d := Diagnose(*healthy(t, askCluster, hostile, faulted))
	var b bytes.Buffer
	csitest.Must(t, d.Write(&b, Options{Question: Question{Kind: AskCluster}, Colour: true}))
	text := b.String()
	if !strings.Contains(text, "\x1b[1;31mbroken  \x1b[0m") || strings.Contains(text, "\x1b[2J") ||
		strings.Contains(text, "\u202e") {
		t.Errorf("the text is %q", text)
	}
	b.Reset()
	csitest.Must(t, d.WriteHTML(&b))
	html := b.String()
	for _, want := range []string{"default-src 'none'", "&lt;script&gt;", `class="state broken"`,
		"<dt>reason</dt><dd>DiskFaulted</dd>"} {
		if !strings.Contains(html, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	if strings.Contains(html, "<script") || strings.ContainsAny(html, "\x1b\u202e") {
		t.Errorf("the page is %q", html)
	}
}

// The node has several volumes, so the doctor could ask it several times.
func TestADiagnosisOfAClusterMakesEachRequestOnce(t *testing.T) {
	objects, err := os.ReadFile("testdata/cluster.json")
	csitest.Must(t, err)
	var mu sync.Mutex
	var paths []string
	k := &cluster{t: t, all: string(objects), report: racktest.JSON(theNode())}
	client := servedBy(t, rackWith(racktest.DiskOf(racktest.AttachedHere),
		racktest.InstanceOf("running")), func(path string) {
		mu.Lock()
		defer mu.Unlock()
		paths = append(paths, path)
	})
	d := Diagnose(gather(t, Sources{Rack: client, Kubectl: k.kubectl},
		Options{Question: Question{Kind: AskCluster}, Kubectl: true}))
	asked := map[string]int{}
	for _, what := range append(paths, k.ran...) {
		asked[what]++
	}
	for what, times := range asked {
		if times != 1 {
			t.Errorf("%s was asked %d times", what, times)
		}
	}
	// kubectl makes nine lists and one exec. The rack shows project, user, disks and instances.
	if len(asked) != 14 || len(d.Chains) < 5 {
		t.Errorf("%d chains; asked %v", len(d.Chains), asked)
	}
}
