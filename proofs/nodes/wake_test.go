//go:build linux

package nodes

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/workqueue"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// startsAfter is the time from a stop of an instance to its start by the controller of Cluster
// API's provider.
const startsAfter = 10 * time.Second

// threads is the number of the attacher's worker threads in the chart. callTime is the duration of
// each of its calls for another node while the attacher is busy.
const (
	threads  = 32
	callTime = 500 * time.Millisecond
)

// queue is the queue of external-attacher: each of its workers tries one attachment at a time. An
// attachment is added when it is created or annotated, and after each failure when its backoff is
// over.
type queue struct {
	workqueue.TypedRateLimitingInterface[string]
	w        *testCluster
	attached chan time.Duration // the time from the instance's stop
}

// follow adds the attachments that are created or annotated.
func (q *queue) follow(ctx context.Context, kube *keeper.Cluster) {
	watch := harness.Got(kube.Storage.VolumeAttachments().Watch(ctx, metav1.ListOptions{}))
	defer watch.Stop()
	seen := map[string]map[string]string{}
	for {
		select {
		case <-ctx.Done():
			return
		case event := <-watch.ResultChan():
			a, ok := event.Object.(*storagev1.VolumeAttachment)
			if before, known := seen[a.GetName()]; ok && (!known || !maps.Equal(before, a.Annotations)) {
				seen[a.Name] = a.Annotations
				q.Add(a.Name)
			}
		}
	}
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

// try tries an attachment as the driver does.
func (q *queue) try(name string) {
	a, ok := keepertest.Get[*storagev1.VolumeAttachment](q.w.api, "", name)
	if !ok || a.Status.Attached {
		return
	}
	id := oxide.NameOrId(q.w.rack.Instance(a.Spec.NodeName).ID)
	err := q.w.attachOnce(oxide.InstanceDiskAttachParams{Instance: id, Body: &oxide.DiskPath{
		Disk: oxide.NameOrId(q.w.disks[*a.Spec.Source.PersistentVolumeName])}})
	keepertest.Edit(q.w.api, "", name, func(a *storagev1.VolumeAttachment) {
		if a.Status.Attached = err == nil; err != nil {
			a.Status.AttachError = &storagev1.VolumeError{Time: metav1.Now(), Message: explain(err)}
		}
	})
	if err != nil {
		q.AddRateLimited(name)
		return
	}
	instance := harness.Got(q.w.rack.Client.InstanceView(q.w.ctx,
		oxide.InstanceViewParams{Instance: id}))
	q.attached <- time.Since(*instance.TimeRunStateUpdated)
}

// onStop calls a function when a stop is requested.
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
// attacher has attached the disk. When the stop is requested, the attacher gets so many other calls
// to make, and a program starts the instance ten seconds later.
func wake(t *testing.T, r *harness.Rack, others int) time.Duration {
	t.Helper()
	w := newTestCluster(t.Context(), t, r)
	w.api.Intercept(nil)
	w.api.InterceptReads(nil)
	defer func() { harness.Must(w.clear()) }()
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[string](time.Second, 30*time.Second)
	q := &queue{workqueue.NewTypedRateLimitingQueue(limiter), w, make(chan time.Duration, 1)}
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
	kube := harness.Got(keeper.Connect(config, "keeper"))
	k := keeper.Keeper{Kubernetes: kube, Rack: racks, Log: slog.New(slog.DiscardHandler),
		Namespace: namespaceOfRecords, Metrics: keeper.NewMetrics(), Config: keeper.Defaults()}
	k.Config.ColdAttach, k.Config.NodeName, k.Config.Settle = true, "b", 0
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer q.ShutDown()
	defer cancel()
	running.Go(func() { q.follow(ctx, kube) })
	for range threads {
		running.Go(func() { q.work(ctx) })
	}
	w.addPod("a", 0)
	w.controllers()
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

func TestTheWokenAttacherIsFasterThanAProgramThatStartsTheInstance(t *testing.T) { // D-61
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

// A rack that records an attach first may leave a volume attached without a device. To Kubernetes
// the volume is attached, so the keeper stops no node for it, until somebody deletes the pod: then
// the detach needs a stop, and the next pod has its device (D-61, docs/hot-plug.md).
func TestTheStopForADetachHealsAVolumeWithoutADevice(t *testing.T) { // D-61
	rack, _ := startRack(t)
	w := newTestCluster(t.Context(), t, rack)
	defer func() { harness.Must(w.clear()) }()
	w.hotAttach = w.clock
	harness.Must(rack.Admin.Switch(w.ctx, map[string]any{
		"hotplug": adminapi.HotplugAttachOnly.With(adminapi.RecordFirst)}))
	harness.Got(rack.Admin.AddFault(w.ctx, adminapi.Fault{Operation: "instance_disk_attach", Times: 1,
		Device: &adminapi.DeviceFault{Fails: true}}))
	devices := func() int {
		return len(harness.Got(rack.Instance("a").Devices()))
	}

	w.addPod("a", 0)
	w.pass(time.Minute)
	for range 10 { // the attacher's second call finds the disk attached, like the driver
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
