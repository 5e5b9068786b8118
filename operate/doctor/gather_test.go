package doctor

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

// mayRun matches the arguments with which the doctor may run kubectl. Such a command changes
// nothing, and kubectl cannot take an object's name for a flag.
var mayRun = regexp.MustCompile(`^(get [a-z,]+ --output=json( --all-namespaces| --namespace=` +
	`[-a-z0-9]+)?|exec --namespace=oxide-csi [a-z0-9][-a-z0-9.]* --container=oxide-plugin -- ` +
	`/oxide-csi-plugin inspect( --volume=[-0-9a-f]{36}(=[a-z0-9][-a-z0-9.]*)?)*)$`)

type cluster struct {
	t                  *testing.T
	forbidden, refusal string // kubectl refuses forbidden (a resource or "exec") with refusal
	report             string // the report of each node
	own                string // the objects in the driver's namespace; "" means ownJSON
	all                string // if set, the list of PersistentVolumes and ownKinds; others are empty
	mu                 sync.Mutex
	ran                []string // guarded by mu, because nodes are asked concurrently
}

func (k *cluster) kubectl(_ context.Context, args ...string) ([]byte, error) {
	line := strings.Join(args, " ")
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.ran = append(k.ran, line); !mayRun.MatchString(line) {
		k.t.Errorf("kubectl %s was run", line)
	}
	const ownKinds = "pods,daemonsets,replicasets,deployments"
	switch what := args[1]; {
	case k.forbidden != "" && (args[0] == k.forbidden || what == k.forbidden):
		return nil, errors.New(cmp.Or(k.refusal, args[0]+": forbidden"))
	case args[0] == "exec":
		return []byte(k.report), nil
	case k.all != "" && (what == "persistentvolumes" || what == ownKinds):
		return []byte(k.all), nil // objects of all kinds
	case k.all != "":
		return []byte(listJSON()), nil
	case what == ownKinds:
		return []byte(listJSON(cmp.Or(k.own, ownJSON))), nil
	default:
		return []byte(listJSON(map[string][]string{"persistentvolumes": {pvJSON},
			"persistentvolumeclaims": {claimJSON}, "volumeattachments": {attachmentJSON},
			"csinodes": {csiNodeJSON}, "nodes": {nodeJSON}, "pods": {podJSON}}[what]...)), nil
	}
}

// servedBy returns a client of a rack. The rack calls asked() with the path of each GET. It answers
// with the body for the path or, if there is none, with the project.
func servedBy(t *testing.T, bodies map[string]string, asked func(path string)) *rack.Client {
	t.Helper()
	return clientOf(t, racktest.At(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet {
			t.Errorf("%s %s", r.Method, r.URL)
		}
		asked(r.URL.Path)
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Request-Id", "r-1")
		_, _ = io.WriteString(w, cmp.Or(bodies[r.URL.Path], racktest.ProjectOf()))
	}))
}

func usualRack() map[string]string {
	return rackWith(racktest.DiskOf(racktest.AttachedHere), racktest.InstanceOf("running"))
}

func rackWith(disk, instance string) map[string]string {
	return map[string]string{"/v1/me": racktest.UserOf(racktest.Silo),
		"/v1/disks/" + racktest.Disk: disk, "/v1/instances/" + racktest.Instance: instance,
		"/v1/disks": racktest.PageOf("", disk), "/v1/instances": racktest.PageOf("", instance),
		"/v1/instances/" + racktest.Instance + "/disks": racktest.PageOf("", disk)}
}

func clientOf(t *testing.T, url string) *rack.Client {
	t.Helper()
	client, closeIdle, err := rack.New(rack.Options{Host: url, Project: racktest.Project},
		&rack.Transport{Tokens: &rack.TokenSource{Fixed: racktest.Token,
			Log: slog.New(slog.DiscardHandler)}})
	csitest.Must(t, err)
	t.Cleanup(closeIdle)
	return client
}

func gather(t *testing.T, s Sources, o Options) Evidence {
	t.Helper()
	s.ClusterID, s.Version = "blue", "v1"
	e, err := Gather(t.Context(), s, o)
	csitest.Must(t, err)
	if time.Since(e.At) > time.Minute {
		t.Errorf("the evidence is of %s", e.At)
	}
	return e
}

// In testdata/cluster.json the node has several volumes. The doctor must ask the node only once.
func TestTheDoctorRepeatsNoRequest(t *testing.T) {
	for _, q := range []Question{{AskClaim, "default", "data"}, {AskPod, "default", "db-0"},
		{Kind: AskVolume, Name: racktest.Disk}, {Kind: AskNode, Name: "worker-1"},
		{Kind: AskCluster}} {
		t.Run(q.Kind, func(t *testing.T) {
			asked := map[string]int{}
			k := &cluster{t: t, report: racktest.JSON(theNode())}
			if q.Kind == AskCluster {
				k.all = string(csitest.Got(os.ReadFile("testdata/cluster.json"))(t))
			}
			e := gather(t, Sources{Rack: servedBy(t, usualRack(), func(path string) { asked[path]++ }),
				Kubectl: k.kubectl}, Options{Question: q, Kubectl: true})
			d, last := Diagnose(e), k.ran[len(k.ran)-1]
			for _, line := range k.ran {
				asked[line]++
			}
			for what, times := range asked {
				if times != 1 {
					t.Errorf("%s was asked %d times", what, times)
				}
			}
			if q.Kind == AskCluster {
				// kubectl: nine lists and one exec. Rack: the project, the user, the disks and the instances.
				if len(asked) != 14 || len(d.Chains) < 5 {
					t.Errorf("%d chains; asked %v", len(d.Chains), asked)
				}
				return
			}
			disk := e.Rack.Disks[racktest.Disk].Object
			if disk == nil || disk.FilesystemUUID != racktest.Disk || disk.Foreign != "" ||
				e.Rack.Neighbours[racktest.Instance].Object == nil || d.Status() != 0 {
				t.Errorf("status %d, got %+v\n%s", d.Status(), e.Rack, text(d))
			}
			if want := "exec --namespace=oxide-csi oxide-csi-node-x --container=oxide-plugin -- " +
				"/oxide-csi-plugin inspect --volume=" + racktest.Disk + "=" + diskName; last != want {
				t.Errorf("asked the node by %q, want %q", last, want)
			}
		})
	}
}

func TestEventsAreAlsoReadFromTheDefaultNamespace(t *testing.T) {
	k := &cluster{t: t}
	gather(t, Sources{NoRack: "none", Kubectl: k.kubectl}, Options{Kubectl: true,
		Question: Question{AskClaim, "shop", "data"}})
	const events = "get events --output=json --namespace="
	if !slices.Contains(k.ran, events+"shop") || !slices.Contains(k.ran, events+"default") {
		t.Errorf("asked %q", k.ran)
	}
}

// mayShow lists the fields that the doctor shows although users can write them.
var mayShow = []shown{
	{`(PersistentVolumeClaim|PersistentVolume|VolumeAttachment|CSINode|Node|Pod|Event)/metadata/` +
		`(name|namespace|uid|finalizers/0)`, "a chain is objects, which a finalizer may keep", false},
	{`PersistentVolumeClaim/(spec/(volumeName|storageClassName)|metadata/annotations/` +
		`volume.kubernetes.io/storage-provisioner)`, "the next link, and the class for a command", false},
	{`PersistentVolume/spec/(claimRef/(namespace|name|uid)|storageClassName|csi/(driver|` +
		`volumeAttributes/diskName))`, "the next link, and the serial number", false},
	{`VolumeAttachment/spec/(attacher|nodeName|source/persistentVolumeName)`, "the next link", false},
	{`Pod/(spec/(nodeName|volumes/./(name|persistentVolumeClaim/claimName))|status/` +
		`containerStatuses/./name|metadata/ownerReferences/0/uid)`, "the next link", false},
	{`Event/involvedObject/(name|namespace|uid)`, "the object that the event is about", false},
	{`report/.*`, "it comes from a pod of the driver's DaemonSet", true},
	{`(disk|instance)/.*`, "it is the operator's own rack", true},
}

// shown allows output of the fields whose paths match places, and of any text if texts is set.
type shown struct {
	places, why string
	texts       bool
}

// The test replaces each text that the doctor reads by three texts with the word canary: a name,
// free text, and the old text with a suffix. Only the fields in mayShow may show this word.
func TestTheDoctorWritesNoSecret(t *testing.T) { // B-26
	var read map[string]any
	csitest.Must(t, json.Unmarshal(fmt.Appendf(nil, `{"objects":%s,"report":%s,"disk":%s,`+
		`"instance":%s,"kubectl":"Error from server (Forbidden): x"}`,
		csitest.Got(os.ReadFile("testdata/cluster.json"))(t), racktest.JSON(theNode()),
		racktest.DiskOf(racktest.AttachedHere), racktest.InstanceOf("running")), &read))
	read["report"].(map[string]any)["environment"] = "x"
	k := &cluster{t: t}
	bodies := map[string]string{}
	client := servedBy(t, bodies, func(string) {})
	writes := func(q Question) string {
		k.all, k.report = racktest.JSON(read["objects"]), racktest.JSON(read["report"])
		k.refusal = read["kubectl"].(string)
		maps.Copy(bodies, rackWith(racktest.JSON(read["disk"]), racktest.JSON(read["instance"])))
		e := gather(t, Sources{Rack: client, Kubectl: k.kubectl}, Options{Question: q, Kubectl: true})
		var b bytes.Buffer
		d := Diagnose(e)
		csitest.Must(t, errors.Join(d.Write(&b, Options{Question: q}), d.Write(&b, Options{JSON: true}),
			WriteBundle(&b, d, e), d.WriteHTML(&b)))
		return b.String()
	}
	questions := []Question{{Kind: AskCluster}, {AskPod, "default", "db-0"},
		{AskPod, "default", "db-1"}, {AskPod, "default", "job-0"}, {Kind: AskNode, Name: "worker-1"},
		{Kind: AskVolume, Name: racktest.Disk}, {AskClaim, "default", "left"}, {Kind: AskRack}}
	used, seen := map[int]bool{}, map[string]bool{}
	places, runs, left, leaked := 0, 0, 0, map[string]bool{}
	allowed := func(place string) int {
		return slices.IndexFunc(mayShow, func(m shown) bool {
			return regexp.MustCompile("^(" + m.places + ")$").MatchString(place)
		})
	}
	check := func(place, shape, written string) {
		runs++
		at := strings.Index(written, "canary")
		switch i := allowed(place); {
		case at < 0:
		case i >= 0 && (shape != "text" || mayShow[i].texts):
			used[i] = true
		default:
			leaked[place] = true
			t.Errorf("%s leaks its %s: %s", place, shape, written[max(0, at-80):min(len(written), at+80)])
		}
	}
	var atOnce []func()
	ofObject := regexp.MustCompile(`^/objects/items/(\w+):[^/]+`)
	walk("", read, nil, func(path string, part any, set func(any), _ func()) {
		text, isText := part.(string)
		place := strings.Trim(ofObject.ReplaceAllString(path, "$1"), "/")
		if !isText || seen[place+text] || strings.Contains(text, "canary") {
			return // another object of the kind had this text, or the text has a canary
		}
		seen[place+text] = true
		if places++; testing.Short() && places%16 != 1 {
			left++
			return
		}
		if k.forbidden = ""; place == "kubectl" {
			k.forbidden = "persistentvolumeclaims"
		}
		for _, canary := range []struct{ shape, text string }{{"name", "canary-1"},
			{"text", "canary 1=p@ss\n"}, {"end", text + " password=canary"}} {
			set(canary.text)
			if _, _, own := csierr.ParseMessage(text); own && canary.shape == "end" {
				continue
			}
			check(place, canary.shape, writes(questions[runs%len(questions)]))
		}
		set(text)
		// Leave out kinds and times: kube.Parse refuses an object whose kind or time is invalid.
		if allowed(place) < 0 && !strings.Contains(strings.ToLower(place), "time") &&
			!strings.HasSuffix(place, "/kind") {
			atOnce = append(atOnce, func() { set("password=canary") })
		}
	})
	for _, set := range atOnce {
		set()
	}
	for _, q := range questions {
		check("all at once", "text", writes(q))
	}
	for i, m := range mayShow {
		if !used[i] && left == 0 {
			t.Errorf("nothing of %s was shown (%s)", m.places, m.why)
		}
	}
	short.Left(t, left)
	t.Logf("FIGURE doctor-canaries places=%d runs=%d leaked=%d", places-left, runs, len(leaked))
}

// The secrets are not ASCII, and overlap in the text.
func TestOverlappingSecretsAreReplacedCompletely(t *testing.T) { // B-26
	s := sifter{secrets: []string{"pässwörd", "wörd€"}}
	if got := s.redact("ä pässwörd€ö pässwörd"); got != "ä ***ö ***" {
		t.Errorf("got %q", got)
	}
}

func TestDoctorReportsForbiddenResourcesAsUnseen(t *testing.T) {
	for forbidden, links := range map[string][]Link{
		"persistentvolumeclaims": {LinkClaim, LinkVolume, LinkAttachment, LinkDisk},
		"persistentvolumes":      {LinkVolume}, "volumeattachments": {LinkAttachment},
		"csinodes": {LinkNode}, "exec": {LinkDevice, LinkMounts}, "pods": {LinkPod}} {
		t.Run(forbidden, func(t *testing.T) {
			k := &cluster{t: t, forbidden: forbidden, report: racktest.JSON(theNode())}
			d := Diagnose(gather(t, Sources{NoRack: "OXIDE_HOST is not set", Kubectl: k.kubectl},
				Options{Question: Question{AskClaim, "default", "data"}, Kubectl: true}))
			for _, step := range d.Chains[0].Links {
				if d.Status() != 3 || slices.Contains(links, step.Link) && (step.State != Unseen ||
					!strings.Contains(step.What, "forbidden")) {
					t.Errorf("status %d, %+v\n%s", d.Status(), step, text(d))
				}
			}
		})
	}
}

func TestDoctorReportsFaultedDisksAndErrorsOfTheRack(t *testing.T) {
	refused := racktest.Error(401, "Unauthorized", "no").To(racktest.ViewProject)
	utilization := func(capacity, provisioned int) racktest.Exchange {
		const use = `{"cpus":1,"memory":1,"storage":%d}`
		return racktest.OK("GET /v1/utilization", fmt.Sprintf(`{"capacity":`+use+`,"provisioned":`+use+
			`}`, capacity, provisioned))
	}
	room := utilization(1<<40, 1<<39)
	const list = "GET /v1/disks"
	page := func(next string, items ...string) racktest.Exchange {
		return racktest.OK(list, racktest.PageOf(next, items...))
	}
	faulted := racktest.DiskOf("faulted", racktest.With("description", volume.Tag{Name: "pvc-1",
		Cluster: "blue", Claim: "shop/data"}.Description()))
	invalid := racktest.DiskOf("detached", racktest.With("size", 0))
	type script []racktest.Exchange
	whole, disk := Question{Kind: AskRack}, Question{Kind: AskVolume, Name: racktest.Disk}
	for name, test := range map[string]struct {
		question Question
		lines    script
		status   int
		says     string
	}{
		"in order": {whole, script{page("next", racktest.DiskOf("detached")), page(""), room}, 0,
			"512 GiB left of the silo's quota"},
		"a fault": {whole, script{page("next", faulted), page(""), room}, 2, "1 disks are faulted: " +
			volume.DiskName("blue", "pvc-1") + " (" + racktest.Disk + ") of the claim shop/data\n" +
			"  reason      DiskFaulted"},
		"full": {whole, script{page(""), utilization(1<<40, 1<<40-5)}, 2, "5 bytes are left of the " +
			"silo's quota, less than a volume of 1 GiB needs\n  reason      RackFull"},
		"no list": {whole, script{racktest.Error(500, "Internal", "no").To(list), room}, 3,
			"the disks of the cluster could not be seen: RackUnavailable"},
		"an invalid disk": {whole, script{page("next", invalid), room}, 3, "RackResponseInvalid"},
		"no room": {whole, script{page(""), racktest.OK("GET /v1/utilization", `{}`)}, 3,
			"what is left of the quota could not be seen"},
		"it refuses, and is the question": {whole, script{refused}, 2, "TokenRejected"},
		"it refuses, and is unseen":       {disk, script{refused}, 3, "TokenRejected"},
		"no disk": {disk, script{racktest.NotFound.To(racktest.ViewDisk)}, 2,
			"VolumeNotFound"},
	} {
		t.Run(name, func(t *testing.T) {
			d := Diagnose(gather(t, Sources{Rack: clientOf(t, racktest.Serve(t, test.lines...))},
				Options{Question: test.question}))
			if d.Status() != test.status || !strings.Contains(text(d), test.says) {
				t.Errorf("status %d\n%s", d.Status(), text(d))
			}
		})
	}
}

// Each case changes one text in the driver's objects. Every user can create objects like the
// changed ones: pods with the driver's label and any owner, or a DaemonSet in another namespace.
func TestDoctorIgnoresPodsOutsideTheDriversDaemonSet(t *testing.T) {
	for name, change := range map[string]struct{ old, new string }{
		"none":                 {driverPodJSON + ",", ""},
		"of no owner":          {`"controller":true`, `"x":1`},
		"of another owner":     {`"uid":"s-uid","controller"`, `"uid":"x","controller"`},
		"of another kind":      {`"kind":"DaemonSet","name"`, `"kind":"ReplicaSet","name"`},
		"of another namespace": {`"oxide-csi","ownerReferences"`, `"x","ownerReferences"`},

		"of a DaemonSet of another namespace": {`"namespace":"oxide-csi"`, `"namespace":"shop"`},
		"of a DaemonSet without the driver":   {`[{"name":"oxide-plugin"}]`, `[{"name":"other"}]`},
		"of a DaemonSet of another name":      {`"oxide-csi-node","namespace"`, `"x","namespace"`},
	} {
		says := "no pod of the driver is on the node worker-1"
		if strings.HasPrefix(name, "of a DaemonSet") {
			says = "no DaemonSet of the driver is in the namespace oxide-csi"
		}
		for _, file := range []bool{false, true} {
			k := &cluster{t: t, report: racktest.JSON(theNode()),
				own: strings.ReplaceAll(ownJSON, change.old, change.new)}
			o := Options{Kubectl: true, Question: Question{AskClaim, "default", "data"}}
			if file {
				o.Objects = writeFile(t, listJSON(claimJSON, pvJSON, attachmentJSON, csiNodeJSON, k.own))
			}
			e := gather(t, Sources{NoRack: "none", Kubectl: k.kubectl}, o)
			asked := slices.ContainsFunc(k.ran, func(s string) bool { return strings.HasPrefix(s, "exec") })
			known := slices.ContainsFunc(e.Nodes.DriverPods, func(pod kube.Object) bool {
				return pod.Metadata.Name == "oxide-csi-node-x"
			})
			if asked || known || k.own == ownJSON ||
				!file && !strings.Contains(text(Diagnose(e)), says) {
				t.Errorf("%s: it was asked %v, %+v\n%s", name, asked, e.Nodes, text(Diagnose(e)))
			}
		}
	}
}

func TestGatherTriesAMissingOrHangingKubectlOnlyOnce(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	for name, kubectl := range map[string]func(context.Context, ...string) ([]byte, error){
		"executable file not found": kube.Kubectl,
		hiddenText: func(ctx context.Context, _ ...string) ([]byte, error) {
			<-ctx.Done()
			return nil, errors.New("killed")
		}} {
		calls := 0
		s := Sources{Rack: clientOf(t, racktest.Silent(t)), Timeout: 50 * time.Millisecond,
			Kubectl: func(ctx context.Context, args ...string) ([]byte, error) {
				calls++
				return kubectl(ctx, args...)
			}}
		d := Diagnose(gather(t, s, Options{Question: Question{AskClaim, "default", "data"},
			Kubectl: true}))
		if calls != 1 || d.Status() != 3 || !strings.Contains(text(d), name) ||
			!strings.Contains(text(d), string(csierr.DeadlineExceeded)) {
			t.Errorf("%s: %d calls of kubectl, status %d\n%s", name, calls, d.Status(), text(d))
		}
	}
}

func writeFile(t testing.TB, text string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "file.json")
	csitest.Must(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func TestObjectsAndNodeReportsAreReadFromFiles(t *testing.T) {
	o := Options{Question: Question{AskClaim, "default", "data"}, Kubectl: true,
		Objects: writeFile(t, allObjects), NodeReports: []string{writeFile(t, racktest.JSON(theNode()))}}
	e := gather(t, Sources{Rack: servedBy(t, usualRack(), func(string) {})}, o)
	d, pods := Diagnose(e), e.Nodes.DriverPods
	if d.Status() != 0 || e.Cluster.Unseen[kindEvent] == "" || e.Cluster.Unseen[kindPod] != "" ||
		len(pods) != 2 || pods[0].Metadata.Name != "oxide-csi-node-x" {
		t.Errorf("status %d, unseen %v, pods %+v\n%s", d.Status(), e.Cluster.Unseen, pods, text(d))
	}
	for _, o := range e.Cluster.Objects {
		if o.Metadata.Name == "oxide-csi-node-x" || len(o.Spec.Drivers) > 1 {
			t.Errorf("kept what the question is not about: %+v", o)
		}
	}
}

func TestGatherFailsIfAnInputFileIsMissingOrInvalid(t *testing.T) {
	report := theNode()
	report.Format++
	for name, o := range map[string]Options{
		"no such file":         {Objects: "/nonexistent/objects"},
		"a directory":          {Objects: "/"},
		"objects that are cut": {Objects: writeFile(t, allObjects[:100])},
		"no such report":       {NodeReports: []string{"/nonexistent/report"}},
		"a report that is cut": {NodeReports: []string{writeFile(t, `{"format":1`)}},
		"two reports":          {NodeReports: []string{writeFile(t, `{"format":1}{"format":1}`)}},
		"a later format":       {NodeReports: []string{writeFile(t, racktest.JSON(report))}},
	} {
		o.Question = Question{AskClaim, "default", "data"}
		if _, err := Gather(t.Context(), Sources{NoRack: "none"}, o); err == nil ||
			!strings.HasPrefix(err.Error(), "--") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestParseQuestionAcceptsOnlyValidQuestions(t *testing.T) {
	for args, want := range map[string]string{
		"pvc default/data": "pvc default/data", "pod a/b-0": "pod a/b-0",
		"node worker-1": "node worker-1",
		"volume " + strings.ToUpper(racktest.Disk): "volume " + racktest.Disk, "rack": "rack",
		"": "", "pvc": "", "pvc data": "", "pvc /data": "", "pvc default/": "", "pvc default/--all": "",
		"pod default/a/b": "", "volume data": "", "node --x": "", "node": "", "rack now": "",
		"pv x": "", "pvc default/data more": "",
	} {
		q, err := ParseQuestion(strings.Fields(args))
		if (err == nil) != (want != "") || err == nil && q.String() != want {
			t.Errorf("%q: got %q, %v", args, q, err)
		}
	}
}
