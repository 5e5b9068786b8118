package keeper

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
)

var begin = time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)

const mustStop = "rpc error: code = FailedPrecondition desc = InstanceMustBeStopped: it is running"

// fixture is a cluster and a rack with a keeper. A node's name is one letter, and its instance's ID
// begins with the letter's ASCII code in hexadecimal (see instanceOf).
type fixture struct {
	*Keeper
	t       *testing.T
	api     *keepertest.Server
	rack    *testRack
	rackURL string
	cut     func()        // disconnects the keeper from the cluster
	idle    time.Duration // the pause between two rounds in simulate, if no operation is in progress
	mu      sync.Mutex
	// mu guards these fields, because requests may be in progress. clock is the time of the keeper and
	// of the API server. effects lists the changes of cluster and rack. Each entry begins with the
	// step that the node "a" had then.
	clock   time.Time
	effects []string
}

type trial[G, W any] struct {
	name  string
	given G
	want  W
}

// newFixture creates a cluster of ready, registered and labeled nodes, whose instances run. The
// keeper runs on the node "z", which exists only if the parameter nodes contains it.
func newFixture(t *testing.T, nodes ...string) *fixture {
	t.Helper()
	w := &fixture{t: t, clock: begin, idle: 4 * time.Minute}
	w.api = keepertest.Serve(t, w.now)
	w.api.Intercept(func(r keepertest.KubeRequest) error {
		if r.Resource != "events" && r.Applied {
			w.note(strings.TrimPrefix(r.String(), "keeper: "))
		}
		return nil
	})
	w.rack = &testRack{w: w, states: map[string]string{}}
	w.rackURL = racktest.At(t, w.rack.ServeHTTP)
	c := Defaults()
	c.ColdAttach, c.LeavingNodes, c.Fence, c.StartupTaint, c.NodeName = true, true, true, true, "z"
	var client *Cluster
	client, w.cut = w.client("keeper")
	w.Keeper = &Keeper{Config: c, Kubernetes: client, Log: slog.New(slog.DiscardHandler),
		Metrics: NewMetrics(), Now: w.now, Namespace: "oxide"}
	racks, closeIdle, err := rack.New(rack.Options{Host: w.rackURL, Project: racktest.Project},
		&rack.Transport{Tokens: &rack.TokenSource{Fixed: racktest.Token}})
	csitest.Must(t, err)
	w.Rack = racks
	t.Cleanup(closeIdle)
	for _, name := range nodes {
		n := keepertest.Put(w.api, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name,
			Labels: map[string]string{ColdAttachLabel: Allowed, volume.InstanceKey: instanceOf(name)}}})
		keepertest.Put(w.api, csiNode(n))
		w.rack.set(name, "running")
		w.heartbeat(name)
	}
	return w
}

// waiting creates a cluster in which a volume has waited on the node "a" for a minute.
func waiting(t *testing.T, nodes ...string) *fixture {
	t.Helper()
	w := newFixture(t, nodes...)
	w.wait("a", "data")
	w.pass(time.Minute)
	return w
}

func (w *fixture) client(name string) (client *Cluster, cut func()) {
	w.t.Helper()
	config, cut := w.api.Client(name)
	return csitest.Got(Connect(config, name))(w.t), cut
}

func (w *fixture) now() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.clock
}

func csiNode(n *corev1.Node) *storagev1.CSINode {
	return &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: n.Name,
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.Name,
			UID: n.UID}}},
		Spec: storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{
			{Name: "other.example.com", NodeID: "other"},
			{Name: DriverName, NodeID: instanceOf(n.Name)}}}}
}

func (w *fixture) register(name, other string) {
	c := csiNode(w.node(name))
	c.Spec.Drivers[1].NodeID = instanceOf(other)
	keepertest.Put(w.api, c)
}

func instanceOf(node string) string { return racktest.Numbered(int(node[0])) }

func (w *fixture) heartbeat(name string) { w.condition(name, corev1.ConditionTrue, w.clock) }

func (w *fixture) lose(name string) {
	_, last := (&node{Node: w.node(name)}).ready()
	w.condition(name, corev1.ConditionUnknown, last)
}

func (w *fixture) condition(name string, status corev1.ConditionStatus, at time.Time) {
	w.edit(name, func(n *corev1.Node) {
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: status,
			LastHeartbeatTime: metav1.NewTime(at)}}
	})
}

func (w *fixture) edit(name string, change func(*corev1.Node)) {
	w.t.Helper()
	if !keepertest.Edit(w.api, "", name, change) {
		w.t.Fatalf("there is no node %s", name)
	}
}

// on returns a function that changes an object. A cluster-wide object has the namespace "".
func on[O keepertest.Object](namespace, name string, change func(O)) func(*fixture) {
	return func(w *fixture) { keepertest.Edit(w.api, namespace, name, change) }
}

func (w *fixture) node(name string) *corev1.Node {
	w.t.Helper()
	n, ok := keepertest.Get[*corev1.Node](w.api, "", name)
	if !ok {
		w.t.Fatalf("there is no node %s", name)
	}
	return n
}

func (w *fixture) step(name string) string {
	if r := w.recorded(name).Record; r != nil {
		return string(r.Step)
	}
	return ""
}

func (w *fixture) recorded(name string) record {
	w.t.Helper()
	found, _ := keepertest.Get[*corev1.ConfigMap](w.api, "oxide", RecordsName)
	if found == nil {
		return record{}
	}
	for _, text := range found.Data {
		var r record
		csitest.Must(w.t, json.Unmarshal([]byte(text), &r))
		if r.NodeName == name {
			return r
		}
	}
	return record{}
}

func (w *fixture) setRecord(name string, r record) {
	w.t.Helper()
	r.NodeName = name
	w.setRecordText(name, string(csitest.Got(json.Marshal(r))(w.t)))
}

func (w *fixture) setRecordText(name, text string) {
	found, has := keepertest.Get[*corev1.ConfigMap](w.api, "oxide", RecordsName)
	if !has {
		found = &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "oxide", Name: RecordsName}}
	}
	if found.Data == nil {
		found.Data = map[string]string{}
	}
	found.Data[string(w.node(name).UID)] = text
	keepertest.Put(w.api, found)
}

func (w *fixture) last(name string) outcome {
	w.t.Helper()
	last := w.recorded(name).Last
	if last == nil {
		w.t.Fatalf("no operation on the node %s has ended: %+v", name, w.recorded(name))
	}
	return *last
}

func (w *fixture) plan(name string) string { return w.node(name).Annotations[PlanAnnotation] }

// pod creates a ready pod with volumes, and with an owner of this kind unless kind is "".
func (w *fixture) pod(node, name, kind string, volumes ...string) {
	keepertest.Put(w.api, podOf(node, name, kind, volumes...))
}

func podOf(node, name, kind string, volumes ...string) *corev1.Pod {
	p := keepertest.Pod("shop", name, node, volumes...)
	p.Labels = map[string]string{"app": "shop"}
	p.Status = corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{
		{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
	if kind != "" {
		owner, _, _ := strings.Cut(name, "-")
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: kind,
			Name: owner, UID: "owner", Controller: ptr.To(true)}}
	}
	return p
}

func pv(name string) *corev1.PersistentVolume {
	return keepertest.Volume("shop", name, DriverName, racktest.Disk)
}

func pvc(name string) *corev1.PersistentVolumeClaim {
	return &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name,
		UID: types.UID("claim-" + name)}, Spec: corev1.PersistentVolumeClaimSpec{VolumeName: name}}
}

func (w *fixture) wait(node, volume string) {
	keepertest.Bind(w.api, pv(volume))
	w.pod(node, "db-"+volume, "StatefulSet", volume)
	keepertest.Edit(w.api, "shop", "db-"+volume, func(p *corev1.Pod) { p.Status.Conditions = nil })
	keepertest.Put(w.api, va(func(a *storagev1.VolumeAttachment) {
		a.Name, a.Spec.NodeName, a.Spec.Source.PersistentVolumeName = "va-"+volume, node, &volume
	}).VolumeAttachment)
	w.attach(volume, mustStop)
}

// attach sets the attacher's last result: success if failed is "", otherwise the error failed.
func (w *fixture) attach(volume, failed string) {
	keepertest.Edit(w.api, "", "va-"+volume, func(a *storagev1.VolumeAttachment) {
		a.Status = storagev1.VolumeAttachmentStatus{Attached: failed == ""}
		if failed != "" {
			a.Status.AttachError = &storagev1.VolumeError{Time: metav1.NewTime(w.clock), Message: failed}
		}
	})
}

func (w *fixture) pass(d time.Duration) {
	w.advance(d)
	for _, n := range keepertest.List[*corev1.Node](w.api, "") {
		if ready, _ := (&node{Node: n}).ready(); ready {
			w.heartbeat(n.Name)
		}
	}
	for _, a := range keepertest.List[*storagev1.VolumeAttachment](w.api, "") {
		if a.Status.AttachError != nil {
			w.attach(*a.Spec.Source.PersistentVolumeName, a.Status.AttachError.Message)
		}
	}
}

func (w *fixture) round() {
	w.t.Helper()
	if _, err := w.Round(w.t.Context()); err != nil {
		w.t.Fatalf("round: %v", err)
	}
	w.retry()
}

// retry makes the attacher fail again if the keeper has woken it while the node "a" is drained.
func (w *fixture) retry() {
	if w.step("a") != string(draining) {
		return
	}
	for _, a := range keepertest.List[*storagev1.VolumeAttachment](w.api, "") {
		woken := a.Annotations[WokenAnnotation]
		if failed := a.Status.AttachError; failed != nil && woken != "" &&
			strings.HasSuffix(woken, failed.Time.UTC().Format(time.RFC3339)) {
			keepertest.Edit(w.api, "", a.Name, func(a *storagev1.VolumeAttachment) {
				a.Status.AttachError.Time = metav1.NewTime(failed.Time.Add(time.Second))
			})
		}
	}
}

func (w *fixture) steps(want ...step) {
	w.t.Helper()
	for _, s := range want {
		w.round()
		if got := w.step("a"); got != string(s) {
			w.t.Fatalf("the step is %q, want %q; last: %v", got, s, w.recorded("a"))
		}
	}
}

// stopped lets a volume wait on the node "a" for a minute, and then advances an operation on the
// node to the step Attaching.
func (w *fixture) stopped() { w.stoppedAfterDrain(func() {}) }

func (w *fixture) stoppedAfterDrain(drained func()) {
	w.t.Helper()
	w.wait("a", "data")
	w.pass(time.Minute)
	w.steps(draining)
	if pods := keepertest.List[*corev1.Pod](w.api, ""); len(pods) > 1 {
		w.steps(draining)
	}
	drained()
	w.steps(draining, stopping, stopping, attaching) // after the first round the attacher tries again
	w.lose("a")
}

func (w *fixture) heartbeatLater(name string) {
	w.pass(time.Second)
	w.heartbeat(name)
}

func (w *fixture) events() []string {
	var found []string
	for _, e := range keepertest.List[*corev1.Event](w.api, "") {
		found = append(found, fmt.Sprintf("%s %s: %s: %s", e.InvolvedObject.Kind, e.InvolvedObject.Name,
			e.Reason, e.Message))
	}
	slices.Sort(found)
	return found
}

func (w *fixture) note(effect string) {
	step := w.step("a")
	if step != "" {
		step += ": "
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.effects = append(w.effects, step+effect)
}

func (w *fixture) seen() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	seen := w.effects
	w.effects = nil
	return seen
}

// metric returns the value of a metric with this label, or a histogram's number of samples.
func (w *fixture) metric(name, label string) float64 {
	w.t.Helper()
	for _, family := range csitest.Got(w.Metrics.Registry.Gather())(w.t) {
		if family.GetName() != "oxide_node_keeper_"+name {
			continue
		}
		for _, m := range family.GetMetric() {
			if len(m.GetLabel()) == 0 || m.GetLabel()[0].GetValue() == label {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue() +
					float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return 0
}

var errBroken = errors.New("broken")

type testRack struct {
	w  *fixture
	mu sync.Mutex
	// mu guards these fields.
	states map[string]string // by instance; if "away", requests for the instance get 503
	stuck  bool              // requests are accepted, and have no effect
	blind  int               // how many of the next requests get 404, as if the token had no role
}

func (r *testRack) set(node, state string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.states[instanceOf(node)] = state
}

func (r *testRack) state(node string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.states[instanceOf(node)]
}

func (r *testRack) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.blind--
	status, path := http.StatusOK, request.URL.Path
	var body string
	switch id, verb, changes := strings.Cut(strings.TrimPrefix(path, "/v1/instances/"), "/"); {
	case r.blind >= 0:
		status, body = racktest.NotFound.Status, racktest.NotFound.Body
	case strings.HasPrefix(path, "/v1/projects/"):
		body = racktest.ProjectOf()
	case path == "/v1/me":
		body = racktest.UserOf(racktest.Numbered(9))
	default:
		if changes {
			letter := csitest.Got(strconv.ParseUint(id[:8], 16, 8))(r.w.t)
			r.w.note(verb + " " + string(rune(letter)))
		}
		status, body = r.answer(id, verb, changes)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Request-Id", "r-1")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(body))
}

func (r *testRack) answer(id, verb string, changes bool) (status int, body string) {
	status = http.StatusOK
	switch {
	case r.states[id] == "away":
		return 503, racktest.Error(503, "ServiceUnavailable", "try again").Body
	case r.states[id] == "":
		return racktest.NotFound.Status, racktest.NotFound.Body
	case changes:
		if status = http.StatusAccepted; !r.stuck {
			r.states[id] = map[string]string{"stop": "stopped", "start": "running"}[verb]
		}
	}
	return status, racktest.InstanceOf(r.states[id], racktest.With("id", id))
}
