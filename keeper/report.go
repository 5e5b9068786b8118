package keeper

import (
	"context"
	"fmt"
	"hash/fnv"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

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
	namespace := about.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault
	}
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
		waits: gauge("waiting_attachments", "VolumeAttachments that wait until an instance is "+
			"stopped."),
		working: gauge("nodes_in_progress", "Nodes with an operation in progress: 0 or 1."),
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
	result := "done"
	if problem != "" {
		result = "problem"
	}
	m.operations.WithLabelValues(result).Inc()
}

func (m *Metrics) round(err error) {
	result := "ok"
	if err != nil {
		result = "error"
	}
	m.rounds.WithLabelValues(result).Inc()
}
