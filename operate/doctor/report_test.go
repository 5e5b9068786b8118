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
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

var update = flag.Bool("update", false, "write testdata/reports.txt")

// inOrder matches empty lines, lines with FIGURE, and lines of links that are ok or idle.
var inOrder = regexp.MustCompile(`(?m)^(  \w+ +(ok|idle) .*|FIGURE .*|)\n`)

// The test checks that findings are complete, and compares the reports with testdata/reports.txt,
// which go test ./operate/doctor -run Report -update writes. Only the first two reports and those
// of a cluster keep the lines that inOrder matches.
func TestReportsMatchTheGoldenFile(t *testing.T) {
	var all strings.Builder
	for i, s := range situations {
		e := healthy(t, s.change)
		d := Diagnose(*e)
		for _, c := range d.Broken() {
			if f := c.Finding; f.Wrong == "" || f.Source == "" || f.ByItself == "" || f.Do == "" ||
				f.Next == "" || strings.ContainsAny(f.Next, "{}\n") {
				t.Errorf("%s: incomplete: %+v", s.name, f)
			}
		}
		if strings.HasPrefix(s.name, works) && d.Status() == 2 {
			t.Errorf("%s: %+v", s.name, d)
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
	want := string(csitest.Got(os.ReadFile(path))(t))
	if diff := cmp.Diff(strings.Split(want, "\n"), strings.Split(all.String(), "\n")); diff != "" {
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
			// For each object, a step contains at most a few texts of at most a thousand bytes.
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

// A word in capitals stands for an unknown name. This test knows all names, so it is an error.
func TestEveryAdvisedCommandIsAllowedAndHasNoPlaceholder(t *testing.T) {
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
	for _, reason := range csierr.Reasons() {
		listed := 0
		for _, a := range advised {
			if slices.Contains(a.Reasons, reason) {
				listed++
			}
		}
		if listed != 1 {
			t.Errorf("%s is in %d entries of the table advised in errors.go, want 1", reason, listed)
		}
	}
}

var goingPod = all(phase(kindPod, "Succeeded"), deleted(kindPod, time.Hour))

func readOnly(w *world) { w.onNode.Devices[0].ReadOnly = true }

func secondPod(w *world) {
	second := strings.NewReplacer("db-0", "db-1", "worker-1", "worker-2", podUID, racktest.Image,
		`"phase":"Running"`, `"phase":"Pending"`, racktest.Instance, racktest.OtherInstance,
		"11:00:00Z", "11:59:59Z")
	objects := csitest.Got(kube.Parse([]byte(second.Replace(listJSON(podJSON, csiNodeJSON, nodeJSON,
		driverPodJSON)))))(w.t)
	w.Cluster.Objects = append(w.Cluster.Objects, objects[:3]...)
	w.Nodes.DriverPods = append(w.Nodes.DriverPods, objects[3])
	w.Rack.Instances[racktest.OtherInstance] = Found[Machine]{Object: &Machine{
		racktest.OtherInstance, "worker-2", instanceRunning}}
	r := theNode()
	r.Instance, r.Devices = racktest.OtherInstance, nil
	r.Volumes = []inspection.Volume{{ID: racktest.Disk, Serial: diskName, From: "the request"}}
	w.Nodes.Reports[racktest.OtherInstance] = r
}

// A situation whose name begins with this text must have no finding.
const works = "a volume that works"

// situations contains edits with which the volume works, and then edits that break a link or hide
// an object. reports.txt has a report of each.
var situations = []struct {
	name   string
	change edit
}{
	{works, all()},
	{works + ", on a node that was not asked", noReport},
	{works + ", used by nobody", unused},
	{works + ", used by nobody, with no node to ask", all(unused, noReport)},
	{works + ", of a pod whose image is missing", waits("ImagePullBackOff")},
	{works + ", of a pod whose init container takes long", waits("PodInitializing", restores)},
	{works + ", with a read-only device, and mounted read-only", readOnly},
	{works + ", with events about another volume of the pod", all(pending, young(kindPod),
		func(w *world) {
			other := *w.pv
			other.Metadata.Name = "pvc-2"
			w.Cluster.Objects = append(w.Cluster.Objects, other)
		}, podEvent("FailedMount", "pvc-2", "DiskNotBlank"),
		lastEvent(func(o *kube.Object) { o.InvolvedObject.UID = podUID }))},
	{works + ", about to leave another node", all(deleted(kindAttachment, time.Second),
		without(kindPod), secondPod)},
	{works + ", waiting for a pod", all(unbound, without(kindPod), event(kindClaim, "data",
		"WaitForFirstConsumer", "waiting for first consumer to be created before binding"))},
	{works + ", on its way", all(notAttached(""), young(kindAttachment), young(kindPod))},
	{works + ", just left by its pod", all(without(kindPod), recorded(over(flight.Unpublished,
		time.Second, "")))},
	{works + ", unmounted at last", recorded(over(flight.Unmounted, time.Minute,
		csierr.StillMounted), over(flight.Published, time.Second, ""))},
	{works + ", of a pod that is being deleted", all(deleted(kindPod, 0), staged)},
	{works + ", with a change that was interrupted, and repeated since", begun(flight.Formatted,
		flight.Mounted)},
	{"a claim whose deletion a pod blocks", stuck(kindClaim, "kubernetes.io/pvc-protection")},
	{"a volume whose deletion is overdue", keptVolume},
	{"a volume of another claim", func(w *world) { w.pv.Spec.ClaimRef.Name = "other" }},
	{"a lost claim", all(without(kindVolume, kindAttachment), phase(kindClaim, phaseLost))},
	{"a class that Kubernetes does not know, after it waited for a pod", all(unbound,
		event(kindClaim, "data", "ProvisioningFailed", `storageclass.storage.k8s.io "x" not found`),
		succeeded(kindClaim, "data", "WaitForFirstConsumer", 60))},
	{"a claim that waits although its pod is on a node", all(unbound,
		func(w *world) { w.pod.Spec.NodeName = "worker-1" }, event(kindClaim, "data",
			"WaitForFirstConsumer", "waiting for pod db-0 to be scheduled"))},
	{"an attach whose error is not the driver's", notAttached("context deadline exceeded")},
	{"no attachment for a pod on a node", all(pending, without(kindAttachment), empty, detached)},
	{"a second pod on another node", secondPod},
	{"a detach that is overdue", all(without(kindPod), deleted(kindAttachment, time.Hour), empty)},
	{"a node without the driver", all(notAttached(""), noDriver, young(kindAttachment))},
	{"a failed instance", func(w *world) { w.machine.State = instanceFailed }},
	{"a node that became another instance", func(w *world) {
		r := w.Nodes.Reports[racktest.Instance]
		r.Instance = racktest.OtherInstance
		w.Nodes.Reports[racktest.Instance] = r
	}},
	{"a faulted disk", faulted},
	{"a disk whose import was not finalized", all(detached,
		func(w *world) { w.disk.State = "import_ready" })},
	{"a disk that was detached by hand", detached},
	{"a disk that was moved by hand", func(w *world) { w.disk.Instance = racktest.OtherInstance }},
	{"a disk that stayed attached", all(without(kindPod, kindAttachment), empty)},
	{"a volume attribute of another disk", func(w *world) {
		w.pv.Spec.CSI.VolumeAttributes.DiskName = "another"
	}},
	{"a neighbour with the same serial number", func(w *world) {
		disks := w.Rack.Neighbours[racktest.Instance].Object
		*disks = append(*disks, Disk{ID: racktest.Image, Name: diskName + "-copy"})
	}},
	{"a record of another disk", func(w *world) { w.onNode.Record.Disk = "csi-another000000000" }},
	{"no device", all(pending, empty)},
	{"two devices", func(w *world) {
		w.onNode.Devices = append(w.onNode.Devices, inspection.Device{Name: "nvme2n1", Serial: diskName})
	}},
	{"a device of another size", func(w *world) { w.onNode.Devices[0].SizeBytes = 1 }},
	{"a device with other blocks", func(w *world) { w.onNode.Devices[0].BlockBytes = 512 }},
	{"a device that became read-only under a mount for writing", all(readOnly,
		func(w *world) { w.onNode.Mounts[1].Writable = true })},
	{"a device that cannot be read", problems(inspection.Problem{Reason: "NoReason", Says: "x"},
		inspection.Problem{Reason: csierr.DeviceUnreadable, Says: "I/O error"})},
	{"a filesystem that was overwritten under its mount", noFilesystem},
	{"a filesystem that was overwritten after its use", all(pending, blank,
		recorded(over(flight.Formatted, time.Hour, "")))},
	{"a filesystem that errors made read-only", func(w *world) {
		w.onNode.Mounts[0].Failed = "read-only after errors"
	}},
	{"another filesystem", func(w *world) { w.filesystem.UUID = uuid.MustParse(racktest.Image) }},
	{"a filesystem that is too large", func(w *world) { w.filesystem.SizeBytes = 2 * diskBytes }},
	{"a filesystem that was not grown", func(w *world) { w.filesystem.NotGrown = true }},
	{"a format that was interrupted", all(pending, blank, begun(flight.Formatted))},
	{"a mount that was interrupted", all(pending, unmounted, begun(flight.Mounted))},
	{"a volume that is mounted nowhere under a running pod", unmounted},
	{"a volume that is not published to the pod", staged},
	{"a volume that is still mounted long after its pod", without(kindPod)},
	{"a pod whose deletion is overdue for no visible cause", all(goingPod, staged)},
	{"a volume that is mounted in another namespace only", all(without(kindPod), staged,
		deleted(kindAttachment, time.Second), func(w *world) {
			w.onNode.Mounts[0].Process = "77 (postgres)"
		})},
	{"a pod that waits for no visible cause", pending},
	{"a message of the kubelet's own, which is quoted", all(pending, event(kindPod, "db-0",
		"FailedMount", `MountVolume.SetUp failed for volume "config" : configmap "db" not found`))},
	{"a disk of others, which is noted", func(w *world) { w.disk.Foreign = "has no ownership tag" }},
	{"an error that alternates with another, since its first event", all(unbound,
		event(kindClaim, "data", "ProvisioningFailed", rpc("RackFull")), minutesAgo(50, 40),
		event(kindClaim, "data", "ProvisioningFailed", rpc("RackError")), minutesAgo(39, 30),
		event(kindClaim, "data", "ProvisioningFailed", rpc("RackFull")), minutesAgo(29, 2),
		event(kindClaim, "data", "ProvisioningFailed", rpc("RackFull")), minutesAgo(20, 10))},
	{"an attachment's error, since the first event of the pod", all(notAttached(rpc("InstanceFull")),
		podEvent("FailedAttachVolume", pvName, "InstanceFull"))},
	{"a node without attachments", all(askNode, without(kindAttachment))},
	{"a node whose attachments are not seen", all(askNode, without(kindAttachment),
		func(w *world) { w.Cluster.Unseen[kindAttachment] = "forbidden" })},
	{"the only report, of a node that is not known", all(noKubernetes, noRack)},
	{"one of two reports, of a node that is not known", all(noKubernetes, noRack, twoReports)},
	{"one of two reports, of the node that the rack knows", all(noKubernetes, twoReports)},
	{"a report of another node", all(twoReports, func(w *world) {
		delete(w.Nodes.Reports, racktest.Instance)
	})},
	{"a pod with two claims, of which one is missing", all(askPod("db-0"), func(w *world) {
		w.pod.Spec.Volumes = append(w.pod.Spec.Volumes, kube.PodVolume{Name: "scratch",
			Ephemeral: &struct{}{}}, kube.PodVolume{Name: "config"})
	})},
	{"a pod that works, beside another one that waits", all(secondPod, askPod("db-0"))},
	{"a pod that waits for the volume of another one", all(secondPod, askPod("db-1"))},
	{"a stop that the node keeper plans", all(notAttached(rpc("InstanceMustBeStopped")),
		func(w *world) { w.node.Metadata.Annotations.KeeperPlan = "waits, 0 2 * * *" })},
	{"a failed call of another node, which the command is for", all(secondPod,
		detachError("InstanceState"))},
	{"an error of the driver about a link that is broken anyway, which is noted",
		all(notAttached(rpc("DiskAttachedElsewhere")), faulted)},
	{"a provisioner that crashes", all(unbound, dead(kindReplicaSet, "csi-provisioner"))},
	{"a provisioner's driver that crashes", all(unbound, dead(kindReplicaSet, "oxide-plugin"))},
	{"an attacher that crashes", all(notAttached(""), dead(kindReplicaSet, "csi-attacher"))},
	{"an attacher's driver that crashes", all(notAttached(""), dead(kindReplicaSet, "oxide-plugin"))},
	{"no pod of the controller", all(notAttached(""), func(w *world) {
		w.Nodes.DriverPods = w.Nodes.DriverPods[:1]
	})},
	{"a node's driver that crashes", dead(kindDaemonSet, "oxide-plugin")},
	{"a registrar that crashes", dead(kindDaemonSet, "node-driver-registrar")},
	{"a registrar that crashes before it registered", all(dead(kindDaemonSet,
		"node-driver-registrar"), noDriver)},
	{"a kubelet that is silent", notReady},
	{"a stopped instance", func(w *world) { w.machine.State = instanceStopped }},
	{"a pod that is not scheduled", unscheduled},
	{"a cluster in order", askCluster},
	{"a cluster with a faulted disk", all(askCluster, faulted)},
	{"a cluster with a volume that nobody uses", all(askCluster, unused)},
	{"a cluster with a claim that has no volume", all(askCluster, unbound)},
	{"a cluster with a disk that has no PersistentVolume", all(askCluster, without(kindVolume,
		kindClaim, kindPod, kindAttachment))},
	{"a cluster in which no node was asked", all(askCluster, noReport)},
}

func TestAClusterReportEscapesNames(t *testing.T) {
	hostile := func(w *world) { w.disk.Name = "<script>\x1b[2J\u202e" }
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
