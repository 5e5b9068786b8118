package keeper

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

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
	m := &Metrics{
		Registry: prometheus.NewRegistry(),
		waits: prometheus.NewGauge(prometheus.GaugeOpts{Name: "oxide_node_keeper_waiting_attachments",
			Help: "VolumeAttachments that wait until an instance is stopped."}),
		working: prometheus.NewGauge(prometheus.GaugeOpts{Name: "oxide_node_keeper_nodes_in_progress",
			Help: "Nodes with an operation in progress: 0 or 1."}),
		holds: prometheus.NewGauge(prometheus.GaugeOpts{Name: "oxide_node_keeper_held_attachments",
			Help: "VolumeAttachments that wait, and for which the keeper stops no instance."}),
		operations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "oxide_node_keeper_operations_total",
			Help: "Operations on nodes that have ended, by result: done or problem."}, []string{"result"}),
		problems: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "oxide_node_keeper_problems_total",
			Help: "Steps that did not reach their aim in time, by step."}, []string{"step"}),
		steps: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "oxide_node_keeper_step_seconds",
			Help:    "Duration of the steps of operations.",
			Buckets: []float64{1, 2.5, 5, 10, 30, 60, 120, 300, 600},
		}, []string{"step"}),
		evictions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "oxide_node_keeper_evictions_total",
			Help: "Evictions asked for, by answer: accepted, or refused by a PodDisruptionBudget.",
		}, []string{"answer"}),
		fences: prometheus.NewCounter(prometheus.CounterOpts{Name: "oxide_node_keeper_fences_total",
			Help: "Out-of-service taints set."}),
		rounds: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "oxide_node_keeper_rounds_total",
			Help: "Rounds of the leader, by result: ok or error."}, []string{"result"}),
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

func (m *Metrics) held(n int) { m.holds.Set(float64(n)) }

// rest sets the gauges that only a leader knows to zero when another replica leads.
func (m *Metrics) rest() {
	for _, g := range []prometheus.Gauge{m.waits, m.working, m.holds} {
		g.Set(0)
	}
}

func (m *Metrics) step(s step, took time.Duration) {
	m.steps.WithLabelValues(string(s)).Observe(max(0, took).Seconds()) // clocks of replicas may differ
}

func (m *Metrics) problem(s step) { m.problems.WithLabelValues(string(s)).Inc() }

func (m *Metrics) operation(problem string) {
	result := "done"
	if problem != "" {
		result = "problem"
	}
	m.operations.WithLabelValues(result).Inc()
}

func (m *Metrics) eviction(answer string) { m.evictions.WithLabelValues(answer).Inc() }

func (m *Metrics) fenced() { m.fences.Inc() }

func (m *Metrics) round(err error) {
	result := "ok"
	if err != nil {
		result = "error"
	}
	m.rounds.WithLabelValues(result).Inc()
}
