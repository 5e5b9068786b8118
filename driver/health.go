package driver

import (
	"cmp"
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
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/node"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

const (
	rackCheckInterval   = time.Minute
	rackRecheckInterval = 5 * time.Second // after a failed check
	rackCheckTimeout    = 10 * time.Second
)

// rackHealth checks the rack in the background, so that Probe need not wait for it.
type rackHealth struct {
	Rack   *rack.Client
	Tokens *rack.TokenSource // nil: no token file to check
	Log    *slog.Logger

	// A value in this channel requests a check before the interval ends.
	asked chan struct{}

	mu sync.Mutex
	// guarded by mu
	known rackKnown
	// askedExpiry is when readExpiry last asked the rack. Only the goroutine of run() uses it.
	askedExpiry time.Time
}

type rackKnown struct {
	checked bool
	fault   error
	// reported is the reason that report() logged last; report() does not log the same reason again.
	reported string
	reached  bool // the last check succeeded
	answered bool // the rack has answered a check
	// unanswered is the last check's error until the rack answers a check; from then on it is nil.
	unanswered error
	// expires is when the first of the user's tokens expires; zero if none does, or none is known.
	expires time.Time
}

func (h *rackHealth) now() rackKnown {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.known
}

const expiryInterval = time.Hour

// readExpiry asks the rack when the user's tokens expire, at most hourly. An error is only logged.
func (h *rackHealth) readExpiry(ctx context.Context) {
	if time.Since(h.askedExpiry) < expiryInterval {
		return
	}
	h.askedExpiry = time.Now()
	var first time.Time
	err := h.Rack.EachToken(ctx, func(token *oxide.DeviceAccessToken) {
		// Skip expired tokens. The driver's own is not among them: the rack has just accepted it.
		if at := token.TimeExpires; at != nil && at.After(time.Now()) &&
			(first.IsZero() || at.Before(first)) {
			first = *at
		}
	})
	if err != nil {
		h.Log.DebugContext(ctx, "the rack does not report when tokens expire", "error",
			csierr.Message(err))
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.known.expires = first
}

// checkSoon requests a check and does not wait. It is called when the rack refuses a token.
func (h *rackHealth) checkSoon() {
	select {
	case h.asked <- struct{}{}:
	default:
	}
}

func (h *rackHealth) run(ctx context.Context) {
	for {
		wait := rackCheckInterval
		if !h.guardedCheck(ctx) {
			wait = rackRecheckInterval
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		case <-h.soon():
			timer.Stop()
		}
	}
}

// soon returns the channel on which refused calls request a check. While a fault is known, it
// returns nil, so that many refused calls cause only one check.
func (h *rackHealth) soon() <-chan struct{} {
	if h.now().fault != nil {
		return nil
	}
	return h.asked
}

func (h *rackHealth) guardedCheck(ctx context.Context) (fine bool) {
	err := async.Guard(ctx, h.Log, "the rack check", func() error {
		fine = h.check(ctx)
		return nil
	})
	if err != nil {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.known.checked, h.known.fault = true, err
	}
	return fine
}

func (h *rackHealth) check(ctx context.Context) bool {
	limited, cancel := context.WithTimeout(ctx, rackCheckTimeout)
	defer cancel()
	_, err := h.Rack.LookAtWorld(limited)
	if ctx.Err() != nil {
		return true
	}
	if err == nil {
		h.readExpiry(limited)
	}
	fault, fileFault := healthFault(err), h.Tokens.Fault()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.report(limited, err, cmp.Or(fault, fileFault))
	known := &h.known
	known.reached = err == nil
	known.answered = known.answered || err == nil || fault != nil
	if known.unanswered = nil; !known.answered {
		known.unanswered = err
	}
	if err != nil && fault == nil && known.checked {
		// The rack cannot be reached, so the last result stays valid (PR-5).
		return false
	}
	known.checked, known.fault = true, fault
	return err == nil && fileFault == nil
}

// report logs a line if a check's result differs from the previous result. The caller holds mu.
func (h *rackHealth) report(ctx context.Context, err, fault error) {
	why := fault
	if why == nil {
		why = err
	}
	trouble := csierr.Message(why)
	// The text may have a request id, which differs each time, so compare only the reason.
	told := string(csierr.ReasonOf(why))
	switch {
	case told == h.known.reported:
	case fault != nil && err == nil:
		h.Log.ErrorContext(ctx, "the rack accepts the token, but its file cannot be read again", "error",
			trouble)
	case fault != nil:
		h.Log.ErrorContext(ctx, "the rack does not accept this controller", "error", trouble)
	case err != nil:
		h.Log.WarnContext(ctx, "the rack at OXIDE_HOST does not answer; calls fail until it does",
			"error", trouble)
	default:
		h.Log.InfoContext(ctx, "the rack accepts this controller again")
	}
	h.known.reported = told
}

// healthFault returns an error only for causes that a person has to repair, not for an outage.
func healthFault(err error) error {
	switch reason := csierr.ReasonOf(err); reason {
	case csierr.TokenRejected, csierr.RoleMissing, csierr.ProjectChanged:
		return csierr.Coded(codes.FailedPrecondition, reason, "%w", err)
	case csierr.ProjectNotFound:
		return csierr.New(csierr.ProjectNotFound, "this token sees no project with the name or id in "+
			"OXIDE_PROJECT; create it, or give the token's user a role on it")
	}
	return nil
}

func (h *rackHealth) state() (ready bool, err error) {
	fileFault, now := h.Tokens.Fault(), h.now()
	return now.checked, cmp.Or(now.fault, fileFault)
}

func toolsHealth() error {
	if missing := filesystem.MissingTools(); len(missing) > 0 {
		return csierr.New(csierr.ToolsMissing, "the node service runs %s and cannot find it; install "+
			"e2fsprogs, xfsprogs, btrfs-progs and util-linux", strings.Join(missing, ", "))
	}
	return nil
}

type identityService struct {
	csi.UnimplementedIdentityServer

	// Topology adds the topology to the capabilities. It must have the same value in all processes.
	Topology bool
	// Health reports whether the process is ready, or returns an error whose cause a person has to
	// repair. It must not wait for the rack. Nil means always ready.
	Health func() (ready bool, err error)
	// Waiting, unless nil, returns a sentence that names what a healthy process has waited for since
	// its start, or "" if the process does not wait.
	Waiting func() string
}

// waitingTrailer is the key of the gRPC trailer in which Probe returns the sentence of Waiting.
// CSI's response has no field for it. While the process waits, Probe succeeds: after "not ready" a
// CO starts nothing and shows no reason, and after an error a supervisor may restart the plugin.
// The ending -bin allows a value that is not ASCII.
const waitingTrailer = "oxide-csi-waiting-bin"

// GetPluginInfo returns the driver's name and version.
func (i *identityService) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (
	*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: volume.DriverName, VendorVersion: Version()}, nil
}

// GetPluginCapabilities lists what the plugin as a whole supports, because CSI wants the same
// answer from every process. A rack has no group snapshots, snapshot metadata or expansion.
func (i *identityService) GetPluginCapabilities(context.Context,
	*csi.GetPluginCapabilitiesRequest) (
	*csi.GetPluginCapabilitiesResponse, error) {
	types := []csi.PluginCapability_Service_Type{csi.PluginCapability_Service_CONTROLLER_SERVICE}
	if i.Topology {
		types = append(types, csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS)
	}
	var list []*csi.PluginCapability
	for _, t := range types {
		list = append(list, &csi.PluginCapability{Type: &csi.PluginCapability_Service_{
			Service: &csi.PluginCapability_Service{Type: t},
		}})
	}
	return &csi.GetPluginCapabilitiesResponse{Capabilities: list}, nil
}

// Probe reports whether this process is ready. It sends nothing to the rack, so it may be called at
// any rate. During an outage of the rack it succeeds, because a restart does not end the outage. A
// refused token and missing programs are errors, because a person has to repair them.
func (i *identityService) Probe(ctx context.Context, _ *csi.ProbeRequest) (*csi.ProbeResponse,
	error) {
	ready := true
	if i.Health != nil {
		var err error
		if ready, err = i.Health(); err != nil {
			return nil, err
		}
	}
	if i.Waiting != nil {
		if why := i.Waiting(); why != "" {
			// SetTrailer fails only outside of a gRPC call, where nobody reads the trailer.
			_ = grpc.SetTrailer(ctx, metadata.Pairs(waitingTrailer, why))
		}
	}
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(ready)}, nil
}

// metrics are the driver's Prometheus metrics, which docs/metrics.md lists.
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

// knownStatuses limits the metric's series: a server could send any number of statuses.
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

// A collector sends those metrics that have a value at the time of a collection.
type collector func(to chan<- prometheus.Metric)

// Describe sends nothing, so that Prometheus accepts collections without some of the metrics.
func (collector) Describe(chan<- *prometheus.Desc) {}

func (c collector) Collect(to chan<- prometheus.Metric) { c(to) }

func gauge(name, help string, value float64) prometheus.Metric {
	return prometheus.MustNewConstMetric(prometheus.NewDesc(name, help, nil, nil),
		prometheus.GaugeValue, value)
}

func (m *metrics) change(e flight.Entry) { m.changes.WithLabelValues(string(e.Event)).Inc() }

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

// servePages returns a function that serves pages until its context ends.
func servePages(log *slog.Logger, what string, pages http.Handler) func(context.Context,
	net.Listener) error {
	return func(ctx context.Context, listener net.Listener) error {
		server := &http.Server{Handler: pages, ReadHeaderTimeout: 10 * time.Second}
		defer async.AfterDone(ctx, log, "shutdown of "+what, func() { _ = server.Close() })()
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve %s: %w", what, err)
		}
		return nil
	}
}
