package driver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/async"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/flight"
)

// metrics are the driver's Prometheus metrics. They are always collected, and served only at
// MetricsAddress.
type metrics struct {
	registry *prometheus.Registry
	calls    *prometheus.HistogramVec
	inFlight prometheus.Gauge
	requests *prometheus.HistogramVec
	changes  *prometheus.CounterVec
}

func newMetrics() *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		calls: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "oxide_csi_call_seconds",
			Help:    "Duration of CSI calls, by method and gRPC code.",
			Buckets: prometheus.ExponentialBuckets(0.001, 4, 9),
		}, []string{"method", "code"}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "oxide_csi_calls_in_flight",
			Help: "CSI calls in progress.",
		}),
		requests: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "oxide_csi_rack_request_seconds",
			Help:    "Duration of requests to the rack, by HTTP method and status; none means no response.",
			Buckets: prometheus.ExponentialBuckets(0.001, 4, 9),
		}, []string{"method", "status"}),
		changes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "oxide_csi_changes_total",
			Help: "Changes that this process made to disks, mounts and the rack, by event of the flight " +
				"recorder.",
		}, []string{"event"}),
	}
	for _, known := range flight.Events {
		m.changes.WithLabelValues(string(known.Event))
	}
	m.registry.MustRegister(m.calls, m.inFlight, m.requests, m.changes, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *metrics) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler) (any, error) {
	m.inFlight.Inc()
	defer m.inFlight.Dec()
	start := time.Now()
	answer, err := handler(ctx, req)
	m.calls.WithLabelValues(shortMethod(info.FullMethod), status.Code(err).String()).
		Observe(time.Since(start).Seconds())
	return answer, err
}

func (m *metrics) request(method string, answer *http.Response, took time.Duration) {
	code := "none"
	if answer != nil {
		code = strconv.Itoa(answer.StatusCode)
	}
	m.requests.WithLabelValues(method, code).Observe(took.Seconds())
}

// change counts a change that was made.
func (m *metrics) change(e flight.Entry) { m.changes.WithLabelValues(string(e.Event)).Inc() }

// listen listens at the metrics' address: a socket, or a TCP port.
func (m *metrics) listen(address string) (net.Listener, error) {
	if !strings.HasPrefix(address, "unix:") {
		listener, err := net.Listen("tcp", address)
		if err != nil {
			return nil, fmt.Errorf("listen: %w", csierr.WithoutPath(err))
		}
		return listener, nil
	}
	path, err := socketPath(address)
	if err != nil {
		return nil, err
	}
	return listenUnix(path)
}

// serve serves the metrics, and a dump of the goroutines, until ctx ends.
func (m *metrics) serve(ctx context.Context, log *slog.Logger, listener net.Listener) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{}))
	mux.Handle("GET /debug/pprof/goroutine", pprof.Handler("goroutine"))
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	stop := async.AfterDone(ctx, log, "shutdown of the metrics", func() { _ = server.Close() })
	defer stop()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve metrics: %w", err)
	}
	return nil
}
