//go:build linux

package nodes

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/history"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
)

// names has the names of the nodes and of their instances. Nodes a and b each run a keeper.
var names = []string{"a", "b", "c"}

// testCluster is a simulated cluster on a simulated rack, with two keepers and injected faults.
type testCluster struct {
	t     keepertest.T
	ctx   context.Context
	rack  *harness.Rack
	api   *keepertest.Server
	clock time.Time
	// keepers has both keepers. A new keeper with the same name replaces a killed one.
	keepers [2]*replica
	leader  int

	volumes int
	pods    int
	disks   map[string]string // the disk of each PersistentVolume
	// byHand contains the nodes that a person has to uncordon. dead contains the nodes whose kubelet
	// never reports. lying contains those whose kubelet reports even while the instance is stopped.
	byHand, dead, lying map[string]bool
	corrupted           bool
	// byPeople has, for each instance that a person has to start, when it may have been stopped.
	byPeople map[string]time.Time
	// destroyed contains the instances that the rack does not show any more. hidden is set while the
	// keepers' token has no rights, so that they see no instance.
	destroyed map[string]bool
	hidden    bool
	// noEviction is set while the budgets allow no disruption. stuck is set while deleted pods do not
	// end. lagging is set while Kubernetes does not notice that a kubelet is dead.
	noEviction, stuck, lagging bool
	// outage is the time until which the API server is unavailable. starter is set while a program
	// starts all stopped instances every ten seconds. looked is when the program last did so.
	outage  time.Time
	starter bool
	looked  time.Time
	mended  bool // all disturbances have ended
	// hotAttach is the time from which the rack can attach disks to running instances. hotplug is
	// the time from which it can also detach them.
	hotplug, hotAttach time.Time
	// failing maps a Kubernetes resource or an operation of the rack to how its next requests fail.
	failing map[string]failure
	// refused maps a volume to the error with which the driver refuses to attach or detach it.
	refused map[string]string
	// delays maps an operation of the rack to the delay of its next request.
	delays map[string]time.Duration
	onWay  []onWay
	// changes maps each time_run_state_updated of the rack to w.clock when this value was first seen.
	changes map[string]time.Time
	// stale is set if a keeper may act on data that it read before the other keeper acted. raced is
	// set if a disturbance happened within a round. In both cases most checks are skipped.
	stale, raced bool
	// made is called after the API server has applied the change that a keeper requested.
	made       func()
	operations map[string]*operation
	// causes maps each volume to the stops that it caused in the last day. ask() empties this map.
	// mostStops is the highest number of stops for one volume within a day.
	causes map[string][]stop
	// ends contains the time at which each pod of a Job ends.
	ends      map[string]time.Time
	mostStops int
	counts    map[string]int

	lines    []string
	broken   []string
	brokenAt time.Time
	kills    int
	killed   bool
	stops    int
}

type replica struct {
	*keeper.Keeper
	node string
	gate *gate
	cut  func()
}

// A gate calls act() once, at the keeper's change with the number at: right before it or, if after
// is set, right after it. If reads is set, the number counts the keeper's reads, too.
type gate struct {
	at     int
	after  bool
	reads  bool
	act    func() error
	passed int
}

type failure struct {
	times int
	err   error
}

type stop struct {
	at   time.Time
	node string
}

// onWay is a request that reaches the rack late, even if its sender has ended.
type onWay struct {
	due  time.Time
	send func()
}

var errKilled = errors.New("the keeper is dead")

var errNoServer = apierrors.NewInternalError(errors.New("etcdserver: no leader"))

// pass is called before reads, and before and after changes. At the gate's number it runs act().
func (g *gate) pass(read, after bool) error {
	if g == nil || after != g.after || read && !g.reads {
		return nil
	}
	// The number is reached only once, so the changes that act() makes do not call act() again.
	if g.passed++; g.passed == g.at {
		return g.act()
	}
	return nil
}

// newTestCluster makes a cluster of three nodes. The rack's instances must run and have no disks.
func newTestCluster(ctx context.Context, t keepertest.T, r *harness.Rack) *testCluster {
	r.History.Begin()
	w := &testCluster{t: t, ctx: ctx, rack: r, clock: time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC),
		disks: map[string]string{}, byHand: map[string]bool{}, byPeople: map[string]time.Time{},
		changes: map[string]time.Time{}, operations: map[string]*operation{},
		causes: map[string][]stop{}, ends: map[string]time.Time{}, counts: map[string]int{}}
	w.calm()
	harness.Must(r.Admin.Switch(ctx, map[string]any{"hotplug": "none"}))
	w.api = keepertest.Serve(t, func() time.Time { return w.clock })
	w.api.Intercept(w.intercept)
	w.api.InterceptReads(w.interceptRead)
	for _, name := range names {
		w.join(name)
	}
	w.kubelets()
	for i := range w.keepers {
		w.restart(i, config(names[i]))
	}
	return w
}

func (w *testCluster) calm() {
	w.noEviction, w.stuck, w.lagging, w.hidden, w.starter = false, false, false, false, false
	w.outage = time.Time{}
	w.dead, w.lying, w.destroyed = map[string]bool{}, map[string]bool{}, map[string]bool{}
	w.failing, w.delays = map[string]failure{}, map[string]time.Duration{}
	w.refused = map[string]string{}
}

// join creates a Node, and registers its driver. The keepers do not know the last operation of an
// earlier Node with this name. So if a late request stops the instance, a person has to start it.
func (w *testCluster) join(name string) {
	w.operations[name] = &operation{}
	for volume, stops := range w.causes {
		w.causes[volume] = slices.DeleteFunc(stops, func(s stop) bool { return s.node == name })
	}
	if len(w.onWay) > 0 || w.stale {
		w.mayStop(name)
	}
	keepertest.Put(w.api, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name,
		Labels: map[string]string{keeper.ColdAttachLabel: keeper.Allowed}}})
	w.register(name, w.rack.Instance(name).ID)
}

func (w *testCluster) register(name, instance string) {
	c := &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: name,
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: name,
			UID: w.node(name).UID}}}}
	if instance != "" {
		c.Spec.Drivers = []storagev1.CSINodeDriver{{Name: keeper.DriverName, NodeID: instance}}
	}
	keepertest.Put(w.api, c)
}

// windowLength is the length of a keeper's maintenance window, which begins at each full hour.
const windowLength = 10 * time.Minute

func config(node string) keeper.Config {
	c := keeper.Defaults()
	c.ColdAttach, c.StartupTaint, c.LeavingNodes, c.Fence, c.NodeName = true, true, true, true, node
	c.MinInterval, c.StatefulSetInterval = 2*time.Minute, 3*time.Minute
	return c
}

// restart ends replica i, if it runs, and starts a new keeper in its place.
func (w *testCluster) restart(i int, c keeper.Config) {
	if old := w.keepers[i]; old != nil {
		old.cut()
	}
	k := &replica{node: names[i]}
	name := fmt.Sprintf("keeper-%d", i)
	config, cut := w.api.Client(name)
	k.cut = cut
	config.Wrap(func(to http.RoundTripper) http.RoundTripper { return waiting{to} })
	client := harness.Got(keeper.Connect(config, name))
	log := slog.New(slog.DiscardHandler)
	transport := &rack.Transport{Tokens: &rack.TokenSource{Fixed: w.rack.Token, Log: log}}
	racks, _, err := rack.New(rack.Options{Host: w.rack.URL, Project: w.rack.Project,
		UserAgent: "keeper"}, transport)
	harness.Must(err)
	transport.Base = &gatedTransport{transport.Base, w, k, i}
	k.Keeper = &keeper.Keeper{Config: c, Kubernetes: client, Rack: racks, Log: log,
		Namespace: namespaceOfRecords, Metrics: keeper.NewMetrics(),
		Now: func() time.Time { return w.clock }}
	w.keepers[i] = k
}

// waiting is a transport that waits for the cluster's answer even if the request's context has
// ended, because the keeper must not go on while a gate's act() runs within the request.
type waiting struct{ http.RoundTripper }

func (w waiting) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := w.RoundTripper.RoundTrip(r.WithContext(context.WithoutCancel(r.Context())))
	if ended := r.Context().Err(); ended != nil && err == nil {
		_ = response.Body.Close()
		return nil, ended
	}
	return response, err
}

type gatedTransport struct {
	http.RoundTripper
	w *testCluster
	k *replica
	i int
}

func (g *gatedTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	w := g.w
	if w.keepers[g.i] != g.k {
		return nil, errKilled
	}
	read := r.Method == http.MethodGet
	if err := g.k.gate.pass(read, false); err != nil {
		return nil, err
	}
	if !read {
		w.checkRackRequest(g.k, r)
	}
	if response, err := w.hinder(g.RoundTripper, r); response != nil || err != nil {
		return response, err
	}
	answered := w.rack.History.Call("keeper "+g.k.node, r.Method+" "+path.Base(r.URL.Path))
	response, err := g.RoundTripper.RoundTrip(r)
	if err != nil {
		answered(err.Error(), true)
		return nil, err
	}
	answered(response.Status, response.StatusCode >= http.StatusMultipleChoices)
	if read {
		return w.inTime(response)
	}
	w.states()
	if err := g.k.gate.pass(false, true); err != nil {
		_ = response.Body.Close()
		return nil, err
	}
	return response, nil
}

// hinder returns an answer or an error if a disturbance keeps the request from the rack. Otherwise
// it returns nil twice.
func (w *testCluster) hinder(to http.RoundTripper, r *http.Request) (*http.Response, error) {
	operation := "view"
	if r.Method != http.MethodGet {
		operation = r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
	}
	for name := range w.destroyed {
		if strings.Contains(r.URL.Path, w.rack.Instance(name).ID) {
			w.count("destroyed instance asked for")
			return answer(http.StatusNotFound, "ObjectNotFound"), nil
		}
	}
	switch {
	case w.hidden:
		w.count("hidden instance asked for")
		return answer(http.StatusNotFound, "ObjectNotFound"), nil
	case w.failing[operation].times > 0:
		_ = w.fails(operation)
		return answer(http.StatusServiceUnavailable, "ServiceUnavailable"), nil
	case w.delays[operation] > 0:
		w.log("it is on its way for %s", w.delays[operation])
		w.count("late request")
		w.stale = true // a keeper may decide something else before the request arrives
		later := r.Clone(w.ctx)
		w.onWay = append(w.onWay, onWay{w.clock.Add(w.delays[operation]), func() {
			w.log("the rack is asked late: %s", operation)
			answer, err := to.RoundTrip(later)
			harness.Must(err)
			_ = answer.Body.Close()
			w.states()
		}})
		delete(w.delays, operation)
		return nil, errLate
	}
	return nil, nil
}

var errLate = errors.New("the connection is broken")

func answer(status int, code string) *http.Response {
	return &http.Response{StatusCode: status,
		Header: http.Header{"Content-Type": {"application/json"}},
		Body: io.NopCloser(strings.NewReader(fmt.Sprintf(
			`{"error_code": %q, "message": "no", "request_id": "1"}`, code)))}
}

// fails returns the injected error of the next request for the resource or operation, or nil.
func (w *testCluster) fails(what string) error {
	f := w.failing[what]
	if f.times == 0 {
		return nil
	}
	w.failing[what] = failure{f.times - 1, f.err}
	w.count("failed " + what)
	return f.err
}

// inTime replaces time_run_state_updated in the rack's answer with the time that changed returns.
func (w *testCluster) inTime(response *http.Response) (*http.Response, error) {
	body, err := io.ReadAll(response.Body)
	_ = response.Body.Close()
	if err != nil {
		return nil, err
	}
	var instance map[string]any
	if json.Unmarshal(body, &instance) == nil && instance["time_run_state_updated"] != nil {
		changed, err := time.Parse(time.RFC3339, instance["time_run_state_updated"].(string))
		if err != nil {
			return nil, err
		}
		instance["time_run_state_updated"] = w.changed(changed)
		if body, err = json.Marshal(instance); err != nil {
			return nil, err
		}
	}
	response.Body, response.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	return response, nil
}

// changed returns the time of w.clock at which an instance's change was first seen.
func (w *testCluster) changed(rack time.Time) time.Time {
	key := rack.UTC().String()
	if _, known := w.changes[key]; !known {
		w.changes[key] = w.clock
	}
	return w.changes[key]
}

func (w *testCluster) intercept(r keepertest.KubeRequest) error {
	k := w.sender(r)
	if k == nil || r.Resource == "events" {
		return nil
	}
	if w.away() {
		return errNoServer // the client would retry a broken connection for seconds
	}
	if !r.Applied {
		w.made = func() {}
		if err := k.gate.pass(false, false); err != nil {
			return err
		}
		w.made = w.checkClusterRequest(k, r)
		return nil
	}
	w.rack.History.Mark("keeper "+k.node, strings.Join([]string{r.Verb, r.Resource, r.Subresource,
		r.Name}, " "))
	if r.Status < http.StatusMultipleChoices {
		w.made()
	}
	return k.gate.pass(false, true)
}

func (w *testCluster) interceptRead(r keepertest.KubeRequest) error {
	k := w.sender(r)
	if k == nil {
		return nil
	}
	if err := k.gate.pass(true, false); err != nil {
		return err
	}
	if w.away() {
		return errNoServer
	}
	return w.fails(r.Resource)
}

func (w *testCluster) away() bool { return w.clock.Before(w.outage) }

func (w *testCluster) sender(r keepertest.KubeRequest) *replica {
	for i, k := range w.keepers {
		if r.Client == fmt.Sprintf("keeper-%d", i) {
			return k
		}
	}
	return nil
}

func (w *testCluster) count(what string) { w.counts[what]++ }

// log adds a line to the transcript, unless the last line ends with the same text.
func (w *testCluster) log(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if len(w.lines) == 0 || !strings.HasSuffix(w.lines[len(w.lines)-1], text) {
		line := w.clock.Format("15:04:05 ") + text
		w.lines = append(w.lines, line)
		w.rack.History.Mark(history.Orchestrator, line)
	}
}

func (w *testCluster) breaks(format string, args ...any) {
	w.log("BROKEN: "+format, args...)
	if w.brokenAt.IsZero() {
		w.brokenAt = time.Now()
	}
	w.broken = append(w.broken, fmt.Sprintf(format, args...))
}

// states returns the states of the instances. No disturbance affects its request.
func (w *testCluster) states() map[string]oxide.InstanceState {
	page := harness.Got(w.rack.Client.InstanceList(w.ctx,
		oxide.InstanceListParams{Project: oxide.NameOrId(w.rack.Project)}))
	states := map[string]oxide.InstanceState{}
	for _, i := range page.Items {
		states[string(i.Name)] = i.RunState
		if i.TimeRunStateUpdated != nil {
			w.changed(*i.TimeRunStateUpdated)
		}
	}
	return states
}

// node returns a Node, or an empty one if the Node was deleted.
func (w *testCluster) node(name string) *corev1.Node {
	n, ok := keepertest.Get[*corev1.Node](w.api, "", name)
	if !ok {
		return &corev1.Node{}
	}
	return n
}

func (w *testCluster) busy() []string {
	return slices.Sorted(maps.Keys(w.records()))
}

// addPod schedules a pod to a node. kind determines the pod's owner, and whether it has a volume.
func (w *testCluster) addPod(name string, kind int) {
	w.pods++
	owner, app, claims := "ReplicaSet", "web", []string{}
	if kind%2 == 0 {
		owner, app, claims = "StatefulSet", "db", []string{w.addVolume()}
	}
	pod := keepertest.Pod("default", fmt.Sprintf("pod-%d", w.pods), name, claims...)
	if kind != 3 {
		pod.Labels = map[string]string{"app": app}
	}
	if kind >= 6 {
		owner, app, pod.Labels = "Job", "job", nil
		pod.Spec.RestartPolicy, pod.Status.Phase = corev1.RestartPolicyNever, corev1.PodPending
		w.ends[pod.Name] = w.clock.Add(time.Duration(5+kind) * time.Minute)
	}
	if kind != 5 {
		pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: owner, Name: app,
			UID: types.UID(app), Controller: ptr.To(true)}}
	}
	keepertest.Put(w.api, pod)
	w.budgets()
	w.log("%s %s is scheduled to %s", owner, pod.Name, name)
}

// addVolume creates a disk, and returns the name of both its claim and its PersistentVolume.
func (w *testCluster) addVolume() string {
	w.volumes++
	volume := fmt.Sprintf("pvc-%d", w.volumes)
	w.disks[volume] = harness.Got(w.rack.CreateDisk(w.ctx, w.rack.Project,
		fmt.Sprintf("d%d-%d", time.Now().UnixNano(), w.volumes), harness.GiB)).Id
	keepertest.Bind(w.api,
		keepertest.Volume("default", volume, keeper.DriverName, w.disks[volume]))
	return volume
}
