//go:build linux

package model

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

// names are the nodes and the instances alike. A keeper runs on each of the first two.
var names = []string{"a", "b", "c"}

// world is what a history happens in.
type world struct {
	t     keepertest.T
	ctx   context.Context
	rack  *harness.Rack
	api   *keepertest.Server
	clock time.Time
	// keepers are the two replicas; one that was killed is replaced by another of the same name.
	keepers [2]*replica
	leader  int

	volumes int
	pods    int
	disks   map[string]string // of a PersistentVolume
	// byHand are the nodes that a person has cordoned, dead those whose kubelet does not come back.
	byHand, dead map[string]bool
	// noEviction lets the budget allow nothing; stuck lets no pod end.
	noEviction, stuck bool
	// late reports that the rack may do things late; waited is the time since it last did.
	late   bool
	waited time.Duration
	// stale reports that a keeper has acted on what it saw before another one acted.
	stale bool

	lines  []string
	broken []string
	kills  int
	killed bool
	stops  int
}

// replica is one process of the keeper.
type replica struct {
	*keeper.Keeper
	node string
	gate *gate
	cut  func()
}

// gate counts the changes that a keeper makes, and does something at one of them: before it reaches
// the cluster or the rack, or after it is done there.
type gate struct {
	at     int
	after  bool
	act    func() error
	passed int
}

var errKilled = errors.New("the keeper is dead")

// pass is called before and after each change.
func (g *gate) pass(after bool) error {
	if g == nil || after != g.after {
		return nil
	}
	// Once: what it does makes changes, too.
	if g.passed++; g.passed == g.at {
		return g.act()
	}
	return nil
}

// newWorld makes a cluster of three nodes on the rack, whose instances run and have no disks.
func newWorld(ctx context.Context, t keepertest.T, r *harness.Rack) *world {
	w := &world{t: t, ctx: ctx, rack: r, clock: time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC),
		disks: map[string]string{}, byHand: map[string]bool{}, dead: map[string]bool{}}
	w.api = keepertest.Serve(t, func() time.Time { return w.clock })
	w.api.Intercept(w.intercept)
	for _, name := range names {
		node := keepertest.Put(w.api, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name,
			Labels: map[string]string{keeper.ColdAttachLabel: keeper.Allowed}}})
		keepertest.Put(w.api, &storagev1.CSINode{
			ObjectMeta: metav1.ObjectMeta{Name: name, OwnerReferences: []metav1.OwnerReference{{
				APIVersion: "v1", Kind: "Node", Name: name, UID: node.UID}}},
			Spec: storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{
				Name: keeper.DriverName, NodeID: r.Instance(name).ID}}}})
	}
	w.kubelets()
	for i := range w.keepers {
		w.restart(i)
	}
	return w
}

// config makes the keeper as strict as usual, in the world's own time.
func config(node string) keeper.Config {
	c := keeper.Defaults()
	c.ColdAttach, c.LeavingNodes, c.Fence, c.NodeName = true, true, true, node
	c.MinInterval, c.StatefulSetInterval = 2*time.Minute, 3*time.Minute
	return c
}

// restart starts a keeper in the place of another.
func (w *world) restart(i int) {
	k := &replica{node: names[i]}
	kube, cut := w.api.Client(fmt.Sprintf("keeper-%d", i))
	k.cut = cut
	client, err := kubernetes.NewForConfig(kube)
	if err != nil {
		panic(err)
	}
	log := slog.New(slog.DiscardHandler)
	transport := &rack.Transport{Tokens: &rack.TokenSource{Fixed: w.rack.Token, Log: log}}
	racks, _, err := rack.New(rack.Options{Host: w.rack.URL, UserAgent: "keeper"}, transport)
	if err != nil {
		panic(err)
	}
	transport.Base = &gatedTransport{transport.Base, w, k, i}
	k.Keeper = &keeper.Keeper{Config: config(names[i]), Kubernetes: client, Rack: racks, Log: log,
		Metrics: keeper.NewMetrics(), Now: func() time.Time { return w.clock }}
	w.keepers[i] = k
}

// gatedTransport is how a keeper reaches the rack.
type gatedTransport struct {
	http.RoundTripper
	w *world
	k *replica
	i int
}

// RoundTrip sends a request, unless the keeper dies before it.
func (g *gatedTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodGet {
		return g.RoundTripper.RoundTrip(r)
	}
	if g.w.keepers[g.i] != g.k {
		return nil, errKilled
	}
	if err := g.k.gate.pass(false); err != nil {
		return nil, err
	}
	g.w.checkRackRequest(g.k, r)
	response, err := g.RoundTripper.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	if err := g.k.gate.pass(true); err != nil {
		_ = response.Body.Close()
		return nil, err
	}
	return response, nil
}

// intercept lets each change of a keeper in the cluster pass its gate.
func (w *world) intercept(r keepertest.Request) error {
	if r.Resource == "events" {
		return nil
	}
	for i, k := range w.keepers {
		if r.Client == fmt.Sprintf("keeper-%d", i) {
			if !r.Applied {
				w.checkClusterRequest(r)
			}
			return k.gate.pass(r.Applied)
		}
	}
	return nil
}

// say adds a line to the transcript.
func (w *world) say(format string, args ...any) {
	w.lines = append(w.lines, w.clock.Format("15:04:05 ")+fmt.Sprintf(format, args...))
}

// breaks notes a broken promise.
func (w *world) breaks(format string, args ...any) {
	w.say("BROKEN: "+format, args...)
	w.broken = append(w.broken, fmt.Sprintf(format, args...))
}

// states are the instances' states, by a request that no fault is about.
func (w *world) states() map[string]oxide.InstanceState {
	page, err := w.rack.Client.InstanceList(w.ctx,
		oxide.InstanceListParams{Project: oxide.NameOrId(w.rack.Project)})
	if err != nil {
		panic(err)
	}
	states := map[string]oxide.InstanceState{}
	for _, i := range page.Items {
		states[string(i.Name)] = i.RunState
	}
	return states
}

func (w *world) node(name string) *corev1.Node {
	n, ok := keepertest.Get[*corev1.Node](w.api, "", name)
	if !ok {
		panic("no node " + name)
	}
	return n
}

// busy are the nodes with an operation in progress.
func (w *world) busy() []string {
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool {
		return w.node(name).Annotations[keeper.RecordAnnotation] == ""
	})
}

// checkRackRequest holds what a keeper asks the rack against the promises.
func (w *world) checkRackRequest(k *replica, r *http.Request) {
	operation := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
	w.say("%s asks the rack: %s", k.node, operation)
	switch operation {
	case "start":
		return
	case "stop":
	default:
		w.breaks("a keeper asks the rack for %s %s", r.Method, r.URL.Path)
		return
	}
	w.stops++
	i := slices.IndexFunc(names, func(name string) bool {
		return strings.Contains(r.URL.Path, w.rack.Instance(name).ID)
	})
	name := names[i]
	n := w.node(name)
	if name == k.node {
		w.breaks("the keeper on %s stops its own instance", name)
	}
	if w.stale {
		return // of two leaders, one of whom was frozen, only the end is promised
	}
	if !strings.Contains(n.Annotations[keeper.RecordAnnotation], `"Stopping"`) ||
		!n.Spec.Unschedulable {
		w.breaks("the instance of %s is stopped without a record of it: %v, unschedulable %v", name,
			n.Annotations, n.Spec.Unschedulable)
	}
	if n.Labels[keeper.ColdAttachLabel] != keeper.Allowed {
		w.breaks("the instance of %s is stopped, and nobody allows it", name)
	}
	for other, state := range w.states() {
		if other != name && state != oxide.InstanceStateRunning {
			w.breaks("the instance of %s is stopped while that of %s is %s", name, other, state)
		}
	}
}

// checkClusterRequest holds what a keeper changes in the cluster against the promises.
func (w *world) checkClusterRequest(r keepertest.Request) {
	allowed := []string{"update nodes", "patch nodes", "patch volumeattachments",
		"create pods/eviction"}
	resource := strings.TrimSuffix(r.Resource+"/"+r.Subresource, "/")
	if !slices.Contains(allowed, r.Verb+" "+resource) {
		w.breaks("a keeper does what it must not: %s", r)
	}
	w.say("%s", r)
}

// addPod schedules a pod to a node: with a volume of its own, or without.
func (w *world) addPod(name string, kind int) {
	w.pods++
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default",
		Name: fmt.Sprintf("pod-%d", w.pods), Labels: map[string]string{"app": "web"}},
		Spec: corev1.PodSpec{NodeName: name}}
	owner := metav1.OwnerReference{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "web",
		UID: "web", Controller: ptr.To(true)}
	if kind%2 == 0 {
		owner.Kind, owner.Name, owner.UID = "StatefulSet", "db", "db"
		pod.Labels = map[string]string{"app": "db"}
		w.addVolume(pod)
	}
	if kind != 5 {
		pod.OwnerReferences = []metav1.OwnerReference{owner}
	}
	if kind == 3 {
		pod.Labels = nil
	}
	keepertest.Put(w.api, pod)
	w.say("%s %s is scheduled to %s", owner.Kind, pod.Name, name)
}

// addVolume makes a disk and what Kubernetes has of it, and asks for its attachment.
func (w *world) addVolume(pod *corev1.Pod) {
	w.volumes++
	volume := fmt.Sprintf("pvc-%d", w.volumes)
	disk, err := w.rack.Client.DiskCreate(w.ctx, oxide.DiskCreateParams{
		Project: oxide.NameOrId(w.rack.Project),
		Body: &oxide.DiskCreate{Name: oxide.Name(fmt.Sprintf("d%d-%d", time.Now().UnixNano(), w.volumes)),
			Size: oxide.ByteCount(harness.GiB), DiskBackend: oxide.DiskBackend{
				Value: &oxide.DiskBackendDistributed{DiskSource: oxide.DiskSource{
					Value: &oxide.DiskSourceBlank{BlockSize: 512}}}}}})
	if err != nil {
		panic(err)
	}
	w.disks[volume] = disk.Id
	keepertest.Put(w.api, &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: volume},
		Spec: corev1.PersistentVolumeSpec{
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{
				Driver: keeper.DriverName, VolumeHandle: disk.Id}},
			ClaimRef: &corev1.ObjectReference{Namespace: "default", Name: volume,
				UID: types.UID(volume)}}})
	pod.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{
		PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: volume}}}}
}
