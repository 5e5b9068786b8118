//go:build linux

package nodes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// attacher tries each unfinished attach and detach once, like external-attacher with the driver.
func (w *testCluster) attacher() {
	states := w.states()
	for _, a := range keepertest.List[*storagev1.VolumeAttachment](w.api, "") {
		if a.DeletionTimestamp == nil && a.Status.Attached {
			continue
		}
		volume := *a.Spec.Source.PersistentVolumeName
		refused := w.refused[volume]
		since := w.hotAttach
		if a.DeletionTimestamp != nil {
			since = w.hotplug
		}
		if states[a.Spec.NodeName] == oxide.InstanceStateRunning && since.IsZero() ||
			!since.IsZero() && strings.Contains(refused, "InstanceMustBeStopped") {
			refused = ""
		}
		var err error
		switch {
		case refused != "":
			err = errors.New(refused)
		case a.DeletionTimestamp == nil:
			err = w.attachOnce(a)
		default:
			err = w.rack.DetachDisk(w.ctx, w.disks[volume], w.rack.Instance(a.Spec.NodeName).ID)
		}
		var failed *storagev1.VolumeError
		if err != nil {
			failed = &storagev1.VolumeError{Time: metav1.NewTime(w.clock),
				Message: cmp.Or(refused, explain(err))}
		}
		keepertest.Edit(w.api, "", a.Name, func(a *storagev1.VolumeAttachment) {
			switch {
			case a.DeletionTimestamp != nil && err == nil:
				a.Finalizers, a.Status.Attached = nil, false
			case a.DeletionTimestamp != nil:
				a.Status.DetachError = failed
			default:
				a.Status.Attached, a.Status.AttachError = err == nil, failed
			}
		})
		if a.DeletionTimestamp != nil && err == nil {
			keepertest.Remove[*storagev1.VolumeAttachment](w.api, "", a.Name)
		}
	}
}

// attachOnce attaches a disk unless the rack already shows it as attached, as the driver does.
func (w *testCluster) attachOnce(a *storagev1.VolumeAttachment) error {
	disk, instance := w.disks[*a.Spec.Source.PersistentVolumeName], w.rack.Instance(a.Spec.NodeName).ID
	attached, err := w.rack.Client.InstanceDiskListAllPages(w.ctx,
		oxide.InstanceDiskListParams{Instance: oxide.NameOrId(instance)})
	if err != nil || slices.ContainsFunc(attached, func(d oxide.Disk) bool { return d.Id == disk }) {
		return err
	}
	return w.rack.AttachDisk(w.ctx, disk, instance)
}

// explain returns the driver's message about an error of the rack.
func explain(err error) string {
	var answer *oxide.HTTPError
	if errors.As(err, &answer) && answer.HTTPResponse.StatusCode == http.StatusBadRequest {
		return "rpc error: code = FailedPrecondition desc = InstanceMustBeStopped: the instance is " +
			"running and must be stopped"
	}
	return "rpc error: code = Unavailable desc = RackUnavailable: the rack does not answer"
}

// controllers creates attachments for pods, deletes attachments without a pod, ends and recreates
// deleted pods, and updates the budgets.
func (w *testCluster) controllers() {
	alive := w.alive()
	wanted := map[string]string{} // the node for each volume
	for _, p := range keepertest.List[*corev1.Pod](w.api, "default") {
		for _, v := range p.Spec.Volumes {
			wanted[v.PersistentVolumeClaim.ClaimName] = p.Spec.NodeName
		}
		if tainted(w.node(p.Spec.NodeName), corev1.TaintNodeOutOfService) {
			keepertest.Remove[*corev1.Pod](w.api, "default", p.Name)
		}
		if alive[p.Spec.NodeName] {
			w.end(p)
		}
	}
	for _, a := range keepertest.List[*storagev1.VolumeAttachment](w.api, "") {
		volume := *a.Spec.Source.PersistentVolumeName
		if wanted[volume] != a.Spec.NodeName && a.DeletionTimestamp == nil {
			keepertest.Delete[*storagev1.VolumeAttachment](w.api, "", a.Name)
		}
		delete(wanted, volume)
	}
	for volume, node := range wanted {
		keepertest.Put(w.api, &storagev1.VolumeAttachment{
			ObjectMeta: metav1.ObjectMeta{Name: "csi-" + volume + "-" + node,
				Finalizers: []string{"external-attacher/csi-oxide-computer"}},
			Spec: storagev1.VolumeAttachmentSpec{Attacher: keeper.DriverName, NodeName: node,
				Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: ptr.To(volume)}}})
	}
	w.budgets()
}

// end ends a deleted pod. If the pod has an owner and no volume, another node gets a new pod.
func (w *testCluster) end(p *corev1.Pod) {
	if p.DeletionTimestamp == nil || w.stuck {
		return
	}
	keepertest.Remove[*corev1.Pod](w.api, "default", p.Name)
	if len(p.OwnerReferences) == 0 || len(p.Spec.Volumes) > 0 {
		return
	}
	for _, name := range names {
		if n := w.node(name); n.UID != "" && !n.Spec.Unschedulable && name != p.Spec.NodeName {
			w.pods++
			again := p.DeepCopy()
			again.ObjectMeta = metav1.ObjectMeta{Namespace: "default", Name: p.Name + "x",
				Labels: p.Labels, OwnerReferences: p.OwnerReferences}
			again.Spec.NodeName = name
			keepertest.Put(w.api, again)
			return
		}
	}
}

var apps = []string{"db", "web"}

// most returns the maxUnavailable of an app's disruption budget. After mend(), that is at least the
// number of the app's pods on any one node, so each node can be stopped.
func (w *testCluster) most(app string) int {
	most, on, healthies := 2, map[string]int{}, 0
	for _, p := range keepertest.List[*corev1.Pod](w.api, "default") {
		if p.Labels["app"] != app {
			continue
		}
		if on[p.Spec.NodeName]++; w.mended {
			most = max(most, on[p.Spec.NodeName])
		}
		if healthy(p) {
			healthies++
		}
	}
	switch {
	case w.noEviction:
		return 0
	// If most pods were lost with their nodes, the usual budget would permit no stop of a node.
	case w.mended && healthies <= most:
		return 100
	}
	return most
}

func (w *testCluster) budgets() {
	for _, app := range apps {
		expected, current := int32(0), int32(0)
		for _, p := range keepertest.List[*corev1.Pod](w.api, "default") {
			if p.Labels["app"] != app {
				continue
			}
			expected++
			if healthy(p) {
				current++
			}
		}
		most := int32(w.most(app))
		keepertest.Put(w.api, &policyv1.PodDisruptionBudget{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: app},
			Spec: policyv1.PodDisruptionBudgetSpec{MaxUnavailable: ptr.To(intstr.FromInt32(most)),
				Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}},
			Status: policyv1.PodDisruptionBudgetStatus{ExpectedPods: expected, CurrentHealthy: current,
				DesiredHealthy:     max(0, expected-most),
				DisruptionsAllowed: max(0, current-max(0, expected-most))}})
	}
}

func (w *testCluster) alive() map[string]bool {
	alive := map[string]bool{}
	for name, state := range w.states() {
		alive[name] = state == oxide.InstanceStateRunning && !w.dead[name]
	}
	return alive
}

// kubelets updates the status of nodes and pods. If a kubelet does not work, its node becomes
// Unknown and its pods become unready, as in Kubernetes.
func (w *testCluster) kubelets() {
	attached := map[string]bool{}
	for _, a := range keepertest.List[*storagev1.VolumeAttachment](w.api, "") {
		attached[*a.Spec.Source.PersistentVolumeName+"@"+a.Spec.NodeName] = a.Status.Attached
	}
	works := w.alive()
	for _, name := range names {
		if w.mended && w.node(name).UID == "" {
			w.join(name)
		}
		alive := works[name] || w.lying[name]
		if !alive && w.lagging {
			continue
		}
		keepertest.Edit(w.api, "", name, func(n *corev1.Node) {
			now, status := metav1.NewTime(w.clock), corev1.ConditionTrue
			if !alive {
				now, status = ready(n).LastHeartbeatTime, corev1.ConditionUnknown
			}
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: status,
				LastHeartbeatTime: now}}
		})
		for _, p := range keepertest.List[*corev1.Pod](w.api, "default") {
			if p.Spec.NodeName != name {
				continue
			}
			ready := alive && !slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool {
				return !attached[v.PersistentVolumeClaim.ClaimName+"@"+name]
			})
			keepertest.Edit(w.api, "default", p.Name, func(p *corev1.Pod) {
				w.runJob(p, ready)
				p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady,
					Status: corev1.ConditionFalse}}
				if ready {
					p.Status.Conditions[0].Status = corev1.ConditionTrue
				}
			})
		}
	}
	w.budgets()
}

// runJob advances the pod of a Job: an init container runs, then the containers, and the pod ends.
func (w *testCluster) runJob(p *corev1.Pod, ready bool) {
	if p.Spec.RestartPolicy != corev1.RestartPolicyNever || !ready {
		return
	}
	left := w.ends[p.Name].Sub(w.clock)
	switch {
	case left <= 0:
		p.Status.Phase = corev1.PodSucceeded
	case left < 4*time.Minute:
		p.Status.Phase = corev1.PodRunning
	}
	p.Status.InitContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{
		Running: &corev1.ContainerStateRunning{}}}}
}

// starts() acts as a program that starts the stopped instances every ten seconds.
func (w *testCluster) starts() {
	if !w.starter || w.clock.Sub(w.looked) < 10*time.Second {
		return
	}
	w.looked = w.clock
	for name, state := range w.states() {
		if state == oxide.InstanceStateStopped && w.byPeople[name].IsZero() && !w.destroyed[name] {
			w.log("the program starts the instance of %s", name)
			w.count("started by a program")
			harness.Must(w.rack.StartInstance(w.ctx, w.rack.Instance(name).ID))
		}
	}
}

// pass advances the clock, and sends the delayed requests whose time has come.
func (w *testCluster) pass(d time.Duration) {
	end := w.clock.Add(d)
	w.onWay = slices.DeleteFunc(w.onWay, func(r onWay) bool {
		if r.due.After(end) {
			return false
		}
		if r.due.After(w.clock) {
			w.clock = r.due
		}
		r.send()
		return true
	})
	w.clock = end
	w.starts()
}

// startsAfter is the time after which Cluster API's provider starts a stopped instance.
const startsAfter = 10 * time.Second

// threads is the number of the attacher's worker threads, as in the chart. callTime is how long a
// thread is busy with an attachment of another node than the tested one.
const (
	threads  = 32
	callTime = 500 * time.Millisecond
)

// queue is the queue of external-attacher. Each worker tries one attachment at a time. An
// attachment is added when it is created, when it is annotated, and when the backoff after a
// failure is over.
type queue struct {
	workqueue.TypedRateLimitingInterface[string]
	w        *testCluster
	attached chan time.Duration // the time from the instance's stop to the attach
}

func (q *queue) work(ctx context.Context) {
	for {
		name, end := q.Get()
		if end {
			return
		}
		if strings.HasPrefix(name, "other") {
			select {
			case <-ctx.Done():
			case <-time.After(callTime):
			}
		} else {
			q.try(name)
		}
		q.Done(name)
	}
}

func (q *queue) try(name string) {
	a, ok := keepertest.Get[*storagev1.VolumeAttachment](q.w.api, "", name)
	if !ok || a.Status.Attached {
		return
	}
	err := q.w.attachOnce(a)
	keepertest.Edit(q.w.api, "", name, func(a *storagev1.VolumeAttachment) {
		if a.Status.Attached = err == nil; err != nil {
			a.Status.AttachError = &storagev1.VolumeError{Time: metav1.Now(), Message: explain(err)}
		}
	})
	if err != nil {
		q.AddRateLimited(name)
		return
	}
	instance := harness.Got(q.w.rack.Client.InstanceView(q.w.ctx, oxide.InstanceViewParams{
		Instance: oxide.NameOrId(q.w.rack.Instance(a.Spec.NodeName).ID)}))
	q.attached <- time.Since(*instance.TimeRunStateUpdated)
}

// onStop calls do() before it sends a request to stop an instance.
type onStop struct {
	http.RoundTripper
	do func()
}

func (o onStop) RoundTrip(r *http.Request) (*http.Response, error) {
	if strings.HasSuffix(r.URL.Path, "/stop") {
		o.do()
	}
	return o.RoundTripper.RoundTrip(r)
}

// wake lets a keeper stop an instance in real time, and returns how long after the stop the
// attacher attached the disk. The parameter others is the number of calls for other nodes that the
// attacher also gets at the stop. Another program starts the instance after the time startsAfter.
func wake(t *testing.T, r *harness.Rack, others int) time.Duration {
	t.Helper()
	w := newTestCluster(t.Context(), t, r)
	w.api.InterceptReads(nil)
	defer func() { harness.Must(w.clear()) }()
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[string](time.Second, 30*time.Second)
	q := &queue{workqueue.NewTypedRateLimitingQueue(limiter), w, make(chan time.Duration, 1)}
	w.api.Intercept(func(r keepertest.KubeRequest) error {
		if r.Applied && r.Resource == "volumeattachments" {
			q.Add(r.Name)
		}
		return nil
	})
	transport := &rack.Transport{Tokens: &rack.TokenSource{Fixed: r.Token, Log: slog.Default()}}
	racks, _, err := rack.New(rack.Options{Host: r.URL, Project: r.Project}, transport)
	harness.Must(err)
	var starter *time.Timer
	transport.Base = onStop{transport.Base, func() {
		starter = time.AfterFunc(startsAfter, func() {
			harness.Must(r.StartInstance(w.ctx, r.Instance("a").ID))
		})
		for i := range others {
			q.Add(fmt.Sprint("other-", i))
		}
	}}
	config, cut := w.api.Client("keeper")
	defer cut()
	k := keeper.Keeper{Kubernetes: harness.Got(keeper.Connect(config, "keeper")), Rack: racks,
		Log: slog.New(slog.DiscardHandler), Namespace: namespaceOfRecords,
		Metrics: keeper.NewMetrics(), Config: keeper.Defaults()}
	k.Config.ColdAttach, k.Config.NodeName, k.Config.Settle = true, "b", 0
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer q.ShutDown()
	defer cancel()
	for range threads {
		running.Go(func() { q.work(ctx) })
	}
	w.addPod("a", 0)
	w.controllers()
	q.Add(keepertest.List[*storagev1.VolumeAttachment](w.api, "")[0].Name)
	limit := time.After(time.Minute)
	for {
		if _, err := k.Round(ctx); err != nil {
			t.Fatal(err)
		}
		select {
		case took := <-q.attached:
			starter.Stop()
			return took
		case <-limit:
			t.Fatal("the disk is not attached within a minute")
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func TestTheDiskIsAttachedSoonAfterTheKeeperStopsTheInstance(t *testing.T) { // D-61
	p := proof.New(t, "keeper-wake")
	rack, _ := startRack(t)
	many, busyCalls := 20, 10*threads
	if testing.Short() {
		many = 3
		short.Left(t, 17)
	}
	var idle []time.Duration
	for range many {
		idle = append(idle, wake(t, rack, 0))
	}
	slices.Sort(idle)
	busy := wake(t, rack, busyCalls)
	p.Figure("ms_p50", idle[many/2].Milliseconds(), "ms_max", idle[many-1].Milliseconds(),
		"attached", many, "busy_calls", busyCalls, "busy_call_ms", callTime.Milliseconds(), "busy_ms",
		busy.Milliseconds(), "started_after_ms", startsAfter.Milliseconds())
	if idle[many-1] > startsAfter || busy > startsAfter {
		t.Errorf("the attacher needed %s, and %s while it was busy", idle[many-1], busy)
	}
}

// A rack may record an attach and then fail to give the instance the device. For Kubernetes the
// volume is attached, so the keeper stops no instance for it. When the pod is deleted, the detach
// needs a stop of the instance. Then the next pod gets the device (D-61, docs/hot-plug.md).
func TestRecreatingThePodRepairsAVolumeWithoutADevice(t *testing.T) { // D-61
	rack, _ := startRack(t)
	w := newTestCluster(t.Context(), t, rack)
	defer func() { harness.Must(w.clear()) }()
	w.hotAttach = w.clock
	harness.Must(rack.Admin.Switch(w.ctx, map[string]any{
		"hotplug": adminapi.HotplugAttachOnly.With(adminapi.RecordFirst)}))
	harness.Got(rack.Admin.AddFault(w.ctx, adminapi.Fault{Operation: "instance_disk_attach", Times: 1,
		Device: &adminapi.DeviceFault{Fails: true}}))
	devices := func() int { return len(harness.Got(rack.Instance("a").Devices())) }

	w.addPod("a", 0)
	w.pass(time.Minute)
	for range 10 { // the second call of attachOnce finds the disk attached
		w.turn()
		w.pass(time.Minute)
	}
	if why := w.unrest(); why != "" || w.stops > 0 || devices() > 0 {
		t.Fatalf("there are %d stops and %d devices, want none, and a cluster at rest: %s", w.stops,
			devices(), why)
	}

	pod := keepertest.List[*corev1.Pod](w.api, "default")[0]
	volume := pod.Spec.Volumes[0].PersistentVolumeClaim.ClaimName
	keepertest.Delete[*corev1.Pod](w.api, "default", pod.Name)
	for range 200 {
		if w.controllers(); len(keepertest.List[*storagev1.VolumeAttachment](w.api, "")) == 0 {
			break
		}
		w.turn()
		w.pass(20 * time.Second)
	}
	if w.stops != 1 {
		t.Fatalf("the keeper made %d stops for the detach, want 1:\n%v", w.stops, w.lines)
	}
	pod.UID, pod.DeletionTimestamp, pod.ResourceVersion = "", nil, ""
	pod.Name += "-again"
	keepertest.Put(w.api, pod)
	harness.Must(w.rest())
	if w.stops != 1 || devices() != 1 {
		t.Errorf("%s has %d devices after %d stops, want 1 of each:\n%v", volume, devices(), w.stops,
			w.lines)
	}
	for _, broken := range w.broken {
		t.Error(broken)
	}
}
