// Package keeper implements oxide-node-keeper. It does in a Kubernetes cluster what the driver must
// not do: it stops and starts the instances of nodes. It has three duties, and a switch for each.
//
// Cold attach: racks without hot-plug attach and detach a disk only while its instance is stopped.
// The keeper looks for VolumeAttachments that wait for a stop. If the node's owner allows it, the
// keeper stops the instance, wakes the attacher, and starts the instance again. See cold.go.
//
// Startup taint: a node joins with a taint, which the keeper removes when the driver is registered
// there. See leave.go.
//
// Leaving nodes: a node whose instance the rack reports as stopped or destroyed gets the
// out-of-service taint, so that Kubernetes moves its pods at once. A Leaver in the node's pod keeps
// the driver until the node's volumes are detached. See leave.go.
//
// A person can use a Mover to move a volume that stays with its node. See move.go.
//
// All that the keeper holds in memory is a list of the instances that it has stopped: it starts
// them again even if the API server is unreachable (StartStopped). Each Round reads the cluster and
// the rack, decides, and does at most one thing for a node. The keeper records its next step in a
// ConfigMap (cluster.go), so that any replica can continue what another one began.
package keeper

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"
	core "k8s.io/client-go/kubernetes/typed/core/v1"
	policy "k8s.io/client-go/kubernetes/typed/policy/v1"
	storage "k8s.io/client-go/kubernetes/typed/storage/v1"
	"k8s.io/client-go/rest"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
)

// Keeper looks after the nodes of one cluster.
type Keeper struct {
	Config     Config
	Kubernetes *Cluster
	Rack       *rack.Client
	// Namespace is the namespace of the keeper's records.
	Namespace string
	Log       *slog.Logger
	Metrics   *Metrics
	// Now is the clock; nil means time.Now.
	Now func() time.Time

	mu sync.Mutex
	// guarded by mu: stops contains the instances that this process has asked to stop and has to
	// start, with the times of the requests. silent is when the API server first failed to answer
	// StartStopped; it is zero if the server has answered since.
	stops  map[string]time.Time
	silent time.Time
}

// ErrStepAside reports that only the node on which this keeper runs is left to be stopped, so
// another replica has to lead.
var ErrStepAside = errors.New("the node to be stopped is the one this keeper runs on")

// Round reads the cluster and the rack once, and does the next thing. It returns the longest time
// to wait until the next round. After an error other than ErrStepAside, the next round tries again.
func (k *Keeper) Round(ctx context.Context) (time.Duration, error) {
	v, err := k.observe(ctx)
	if err != nil {
		return k.Config.Interval, err
	}
	// Cold attach comes first: an instance that is stopped for it must not wait for anything else.
	again, err := k.coldAttach(ctx, v)
	errs := []error{err}
	if k.Config.StartupTaint {
		errs = append(errs, k.removeStartupTaints(ctx, v))
	}
	errs = append(errs, k.fence(ctx, v))
	return min(again, k.Config.Interval), errors.Join(errs...)
}

func (k *Keeper) now() time.Time {
	if k.Now != nil {
		return k.Now()
	}
	return time.Now()
}

// Cluster contains the Kubernetes clients that this package uses, which share their connections.
// The clientset of client-go contains the clients of all API groups; the others would take a fifth
// of the keeper's memory.
type Cluster struct {
	Coordination *coordination.CoordinationV1Client
	Core         *core.CoreV1Client
	Policy       *policy.PolicyV1Client
	Storage      *storage.StorageV1Client
}

// Connect returns the clients of a cluster. They send userAgent as their User-Agent.
func Connect(config *rest.Config, userAgent string) (*Cluster, error) {
	config = rest.CopyConfig(config)
	config.UserAgent = userAgent
	http, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("the Kubernetes client: %w", err)
	}
	var c Cluster
	var errs [4]error
	c.Coordination, errs[0] = coordination.NewForConfigAndClient(config, http)
	c.Core, errs[1] = core.NewForConfigAndClient(config, http)
	c.Policy, errs[2] = policy.NewForConfigAndClient(config, http)
	c.Storage, errs[3] = storage.NewForConfigAndClient(config, http)
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("the Kubernetes client: %w", err)
	}
	return &c, nil
}

// component is the keeper's name in events, leases and elsewhere.
const component = "oxide-node-keeper"

// report logs what was done to a node, and creates an event for it.
func (k *Keeper) report(ctx context.Context, n *corev1.Node, r *operation, reason, message string) {
	k.Log.InfoContext(ctx, message, "node", n.Name, "event", reason)
	of := ""
	if r != nil {
		of = r.id() + r.Since.String() // a step that begins again is reported again
	}
	k.event(ctx, nodeReference(n), corev1.EventTypeNormal, of, reason, message)
}

// warn creates an event for something that a person has to look at.
func (k *Keeper) warn(ctx context.Context, about corev1.ObjectReference, reason, message string) {
	k.Log.WarnContext(ctx, message, "kind", about.Kind, "name", about.Name, "event", reason)
	k.event(ctx, about, corev1.EventTypeWarning, "", reason, message)
}

// reportToUsers creates events for what is going to happen: on the pods that stop with the node,
// and on the claims whose volumes wait. Each event names only volumes of its own namespace, whose
// users may read it.
func (k *Keeper) reportToUsers(ctx context.Context, v *view, n *node, pods sorted, verb string) {
	waiting := v.due(n)
	claims := map[string]*corev1.ObjectReference{} // by volume
	for _, volume := range pods.claims {
		claims[volume.Name] = volume.Spec.ClaimRef
	}
	tell := func(about corev1.ObjectReference) {
		own := slices.DeleteFunc(slices.Clone(waiting), func(a *attachment) bool {
			claim := claims[a.volume()]
			return claim == nil || claim.Namespace != about.Namespace
		})
		k.event(ctx, about, corev1.EventTypeNormal, "", "ColdAttachPlanned",
			fmt.Sprintf("the node keeper %s (node %s)", planText(n, waiting, own, pods, verb), n.Name))
	}
	for _, p := range pods.stay {
		tell(corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: p.Namespace, Name: p.Name,
			UID: p.UID})
	}
	for _, a := range waiting {
		if claim := claims[a.volume()]; claim != nil {
			tell(*claim)
		}
	}
}

// event creates an event, but only once: its name is a hash of its content. A failure is only
// logged, because a missing event is no reason to leave an instance stopped.
func (k *Keeper) event(ctx context.Context, about corev1.ObjectReference, kind, of, reason,
	message string) {
	h := fnv.New64a()
	_, _ = fmt.Fprint(h, about.UID, of, reason, message)
	namespace := cmp.Or(about.Namespace, metav1.NamespaceDefault)
	now := metav1.NewTime(k.now())
	_, err := k.Kubernetes.Core.Events(namespace).Create(ctx, &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace,
			Name: fmt.Sprintf("%s.%016x", about.Name, h.Sum64())},
		InvolvedObject: about, Reason: reason, Message: message, Type: kind, Count: 1,
		FirstTimestamp: now, LastTimestamp: now,
		Source:              corev1.EventSource{Component: component, Host: k.Config.NodeName},
		ReportingController: component,
	}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		k.Log.WarnContext(ctx, "no event made", "reason", reason, "about", about.Name, "error", err)
	}
}

// Metrics are the keeper's Prometheus metrics; docs/metrics.md lists them.
type Metrics struct {
	Registry   *prometheus.Registry
	waits      prometheus.Gauge
	working    prometheus.Gauge
	holds      prometheus.Gauge
	operations *prometheus.CounterVec
	problems   *prometheus.CounterVec
	steps      *prometheus.HistogramVec
	evictions  *prometheus.CounterVec
	fences     prometheus.Counter
	rounds     *prometheus.CounterVec
}

// NewMetrics returns metrics with a registry of their own.
func NewMetrics() *Metrics {
	const prefix = "oxide_node_keeper_"
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: prefix + name, Help: help})
	}
	counter := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: prefix + name, Help: help},
			[]string{label})
	}
	m := &Metrics{
		Registry: prometheus.NewRegistry(),
		waits:    gauge("waiting_attachments", "VolumeAttachments that wait until an instance is stopped."),
		working:  gauge("nodes_in_progress", "Nodes with an operation in progress: 0 or 1."),
		holds: gauge("held_attachments", "VolumeAttachments that wait, and for which the keeper stops "+
			"no instance."),
		operations: counter("operations_total", "Operations on nodes that have ended, by result: done "+
			"or problem.", "result"),
		problems: counter("problems_total", "Steps that failed, by step.", "step"),
		steps: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: prefix + "step_seconds",
			Help:    "Duration of the steps of operations.",
			Buckets: []float64{1, 2.5, 5, 10, 30, 60, 120, 300, 600}}, []string{"step"}),
		evictions: counter("evictions_total", "Evictions asked for, by answer: accepted, or refused by "+
			"a PodDisruptionBudget.", "answer"),
		fences: prometheus.NewCounter(prometheus.CounterOpts{Name: prefix + "fences_total",
			Help: "Out-of-service taints set."}),
		rounds: counter("rounds_total", "Rounds of the leader, by result: ok or error.", "result"),
	}
	m.Registry.MustRegister(m.waits, m.working, m.holds, m.operations, m.problems, m.steps,
		m.evictions, m.fences, m.rounds)
	// Start the counters at zero, so that the first event of each kind is an increase.
	for _, s := range []step{draining, stopping, attaching, starting, returning} {
		m.problems.WithLabelValues(string(s))
	}
	m.operations.WithLabelValues("done")
	m.operations.WithLabelValues("problem")
	return m
}

func (m *Metrics) observe(v *view) {
	waits, working := 0, 0
	for _, n := range v.Nodes {
		waits += len(v.waiting(n))
		if n.Record != nil {
			working++
		}
	}
	m.waits.Set(float64(waits))
	m.working.Set(float64(working))
}

// rest sets the gauges to zero. Only the leader sets them to the state of the cluster.
func (m *Metrics) rest() {
	for _, g := range []prometheus.Gauge{m.waits, m.working, m.holds} {
		g.Set(0)
	}
}

func (m *Metrics) step(s step, took time.Duration) {
	m.steps.WithLabelValues(string(s)).Observe(max(0, took).Seconds()) // clocks of replicas may differ
}

func (m *Metrics) operation(problem string) {
	m.operations.WithLabelValues(map[bool]string{true: "problem", false: "done"}[problem != ""]).Inc()
}

func (m *Metrics) round(err error) {
	m.rounds.WithLabelValues(map[bool]string{true: "error", false: "ok"}[err != nil]).Inc()
}
