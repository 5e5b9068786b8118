package driver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/node"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
)

// metrics are the driver's Prometheus metrics, which docs/metrics.md lists. They are always
// collected, and served only at MetricsAddress.
type metrics struct {
	registry *prometheus.Registry
	calls    *prometheus.HistogramVec
	results  *prometheus.CounterVec
	inFlight prometheus.Gauge
	requests *prometheus.HistogramVec
	changes  *prometheus.CounterVec

	apiVersion *prometheus.GaugeVec
}

// durations are the buckets of the histograms, in seconds: from the fastest calls of a node to the
// longest timeouts of an orchestrator.
var durations = []float64{0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60}

func newMetrics() *metrics {
	histogram := func(name, help string, labels ...string) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help,
			Buckets: durations}, labels)
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	m := &metrics{
		registry: prometheus.NewRegistry(),
		calls: histogram("oxide_csi_call_seconds", "Duration of CSI calls, by method and gRPC code.",
			"method", "code"),
		results: counter("oxide_csi_calls_total", "CSI calls, by method, gRPC code and reason; the "+
			"reason of a success is empty.", "method", "code", "reason"),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{Name: "oxide_csi_calls_in_flight",
			Help: "CSI calls in progress."}),
		requests: histogram("oxide_csi_rack_request_seconds", "Duration of requests to the rack, by "+
			"operation and HTTP status; none: no response.", "operation", "status"),
		changes: counter("oxide_csi_changes_total", "Changes that this process made to disks, mounts "+
			"and the rack, by event of the flight recorder.", "event"),
		apiVersion: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "oxide_csi_rack_api_info",
			Help: "1, with the version of the API in the requests to the rack."}, []string{"version"}),
	}
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "oxide_csi_build_info",
		Help: "1, with the versions of the driver, of Oxide's client in it, and of Go.",
		ConstLabels: prometheus.Labels{"version": Version(), "client": clientVersion(),
			"go": runtime.Version()},
	})
	build.Set(1)
	for _, known := range flight.Events {
		m.changes.WithLabelValues(string(known.Event))
	}
	m.registry.MustRegister(m.calls, m.results, m.inFlight, m.requests, m.changes, m.apiVersion, build,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *metrics) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler) (any, error) {
	m.inFlight.Inc()
	defer m.inFlight.Dec()
	start := time.Now()
	answer, err := handler(ctx, req)
	method, code := shortMethod(info.FullMethod), status.Code(err).String()
	m.calls.WithLabelValues(method, code).Observe(time.Since(start).Seconds())
	m.results.WithLabelValues(method, code, string(csierr.ReasonOf(err))).Inc()
	return answer, err
}

// knownStatuses are the HTTP statuses of a rack and of common proxies. All others share one series,
// because a server could send any number of them.
var knownStatuses = []int{200, 201, 202, 204, 400, 401, 403, 404, 408, 409, 410, 429, 499, 500, 501,
	502, 503, 504, 507}

func (m *metrics) request(r *http.Request, answer *http.Response, took time.Duration) {
	code := "none"
	if answer != nil {
		if code = "other"; slices.Contains(knownStatuses, answer.StatusCode) {
			code = strconv.Itoa(answer.StatusCode)
		}
	}
	m.requests.WithLabelValues(rack.Operation(r), code).Observe(took.Seconds())
	m.apiVersion.WithLabelValues(r.Header.Get("API-Version")).Set(1)
}

func (m *metrics) watchRack(h *rackHealth) {
	m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "oxide_csi_rack_up",
		Help: "Whether the last check found the rack, the token and the project in order.",
	}, func() float64 {
		if now := h.now(); now.reached && now.fault == nil {
			return 1
		}
		return 0
	}), collector(func(to chan<- prometheus.Metric) {
		if at := h.now().expires; !at.IsZero() {
			to <- gauge("oxide_csi_rack_token_expiry_timestamp_seconds", "When the first of the user's "+
				"tokens expires, if any does. The rack does not tell which one the driver uses.",
				float64(at.Unix()))
		}
	}))
}

func (m *metrics) watchNode(n *node.Service) {
	m.registry.MustRegister(collector(func(to chan<- prometheus.Metric) {
		use, err := n.Use()
		if err != nil {
			return // report the other metrics; the log has the error of the failing calls
		}
		to <- gauge("oxide_csi_node_volumes", "Volumes that are staged or published on this node.",
			float64(use.Volumes))
		to <- gauge("oxide_csi_node_disks", "Disks of this instance, the boot disk included.",
			float64(use.Disks))
		to <- gauge("oxide_csi_node_disks_limit",
			"Disks that the rack lets an instance have (OXIDE_MAX_DISKS).", float64(use.Limit))
	}))
}

// collector sends the metrics that have a value now.
type collector func(to chan<- prometheus.Metric)

// Describe describes nothing, because not every metric always has a value.
func (collector) Describe(chan<- *prometheus.Desc) {}

// Collect sends the metrics.
func (c collector) Collect(to chan<- prometheus.Metric) { c(to) }

func gauge(name, help string, value float64) prometheus.Metric {
	return prometheus.MustNewConstMetric(prometheus.NewDesc(name, help, nil, nil),
		prometheus.GaugeValue, value)
}

func (m *metrics) change(e flight.Entry) { m.changes.WithLabelValues(string(e.Event)).Inc() }

// listenPages listens at an address for HTTP: a socket, or a TCP port.
func listenPages(address string) (net.Listener, error) {
	if strings.HasPrefix(address, "unix:") {
		return listenEndpoint(address)
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", csierr.WithoutPath(err))
	}
	return listener, nil
}

func (m *metrics) pages() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{}))
	return mux
}

func profiles() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return mux
}

func servePages(ctx context.Context, log *slog.Logger, what string, listener net.Listener,
	pages http.Handler) error {
	server := &http.Server{Handler: pages, ReadHeaderTimeout: 10 * time.Second}
	defer async.AfterDone(ctx, log, "shutdown of "+what, func() { _ = server.Close() })()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve %s: %w", what, err)
	}
	return nil
}
