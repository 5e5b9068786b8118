// Package keeper implements oxide-node-keeper, which stops and starts the instances of a Kubernetes
// cluster's nodes. The driver must not do that. The keeper has three duties, each with a switch.
//
// Cold attach: racks without hot-plug attach and detach a disk only while its instance is stopped.
// The keeper looks for VolumeAttachments that wait for a stop. If the node's owner allows it, the
// keeper stops the instance, wakes csi-attacher, and starts the instance again. See cold.go.
//
// Startup taint: a node joins with a taint, which the keeper removes when the driver is registered
// on the node. See leave.go.
//
// Leaving nodes: a node whose kubelet no longer reports, and whose instance the rack reports as
// stopped or destroyed, gets the out-of-service taint, so that Kubernetes moves its pods at once. A
// Leaver in the driver's pod on a node keeps the driver running until the node's volumes are
// detached. See leave.go.
//
// A person can use a Mover to move a volume that is tied to one node. See move.go.
//
// Each Round reads the cluster and the rack, and advances an operation by at most one step. The
// keeper records its next step in a ConfigMap (cluster.go), so that any replica can continue what
// another one began. In memory the keeper has only a list of the instances that it has stopped, so
// that it can start them while the API server is unreachable (StartStopped).
package keeper

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"io"
	"log/slog"
	"slices"
	"strings"
	"time"
	_ "time/tzdata" // the image contains only this binary, and no time zone files

	"github.com/prometheus/client_golang/prometheus"
	"github.com/robfig/cron/v3"
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

// Keeper stops, starts and taints the nodes of one cluster.
type Keeper struct {
	Config     Config
	Kubernetes *Cluster
	Rack       *rack.Client
	// Namespace is the namespace of the ConfigMap in which the keeper records its operations.
	Namespace string
	Log       *slog.Logger
	Metrics   *Metrics
	// Now is the clock; nil means time.Now.
	Now   func() time.Time
	stops stops
}

// ErrStepAside reports that another replica has to lead, because the only node that has to be
// stopped is the one on which this keeper runs.
var ErrStepAside = errors.New("the node to be stopped is the one this keeper runs on")

// Round reads the cluster and the rack once, and acts on their state. It returns the longest pause
// before the next round. After any other error than ErrStepAside, the next round tries again.
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

// Cluster contains a Kubernetes client for each API group that this package uses. The clients share
// their connections. A clientset of client-go also contains clients for all other API groups, which
// take a fifth of the keeper's memory.
type Cluster struct {
	Coordination *coordination.CoordinationV1Client
	Core         *core.CoreV1Client
	Policy       *policy.PolicyV1Client
	Storage      *storage.StorageV1Client
}

// Connect returns the clients of a cluster, with this User-Agent.
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

// component is the keeper's name in events, and the name of its Lease and its ConfigMap.
const component = "oxide-node-keeper"

func (k *Keeper) report(ctx context.Context, n *corev1.Node, r *operation, reason, message string) {
	k.Log.InfoContext(ctx, message, "node", n.Name, "event", reason)
	of := ""
	if r != nil {
		of = r.id() + r.Since.String() // a step that begins again is reported again
	}
	k.event(ctx, nodeReference(n), corev1.EventTypeNormal, of, reason, message)
}

func (k *Keeper) warn(ctx context.Context, about corev1.ObjectReference, reason, message string) {
	k.Log.WarnContext(ctx, message, "kind", about.Kind, "name", about.Name, "event", reason)
	k.event(ctx, about, corev1.EventTypeWarning, "", reason, message)
}

// reportToUsers creates events about a planned stop: on the pods that stop with the node, and on
// the claims whose volumes wait. A namespace's users can read its events, so each event names only
// volumes of its own namespace.
func (k *Keeper) reportToUsers(ctx context.Context, v *view, n *node, pods sorted, verb string) {
	waiting := v.due(n)
	claims := map[string]*corev1.ObjectReference{} // by volume
	for _, volume := range v.claims {
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
// logged: no instance must stay stopped because an event could not be created.
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
		waits: gauge("waiting_attachments", "VolumeAttachments that wait until the keeper stops "+
			"an instance."),
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

// observe sets the gauges of operations and of waiting attachments. m.waits counts only attachments
// for which the keeper stops nodes: a value above 0 silences the alert OxideCSIVolumeWaitsForStop.
func (m *Metrics) observe(v *view, stops bool) {
	waits, working := 0, 0
	for _, n := range v.Nodes {
		if stops && n.allowed() {
			waits += len(v.waiting(n))
		}
		if n.Record != nil {
			working++
		}
	}
	m.waits.Set(float64(waits))
	m.working.Set(float64(working))
}

// rest sets the gauges to zero: only the leader reports the cluster's state.
func (m *Metrics) rest() {
	for _, g := range []prometheus.Gauge{m.waits, m.working, m.holds} {
		g.Set(0)
	}
}

func (m *Metrics) step(s step, took time.Duration) {
	m.steps.WithLabelValues(string(s)).Observe(max(0, took).Seconds()) // clocks of replicas may differ
}

// failed counts a failed step if the failure was recorded. err is the result of recording it.
func (m *Metrics) failed(s step, err error) error {
	if err == nil {
		m.problems.WithLabelValues(string(s)).Inc()
	}
	return err
}

func (m *Metrics) operation(problem string) {
	m.operations.WithLabelValues(map[bool]string{true: "problem", false: "done"}[problem != ""]).Inc()
}

func (m *Metrics) round(err error) {
	m.rounds.WithLabelValues(map[bool]string{true: "error", false: "ok"}[err != nil]).Inc()
}

// Settings are the keeper's settings from its arguments and environment variables.
type Settings struct {
	Config
	Kubeconfig     string // empty: the pod's service account
	HTTPEndpoint   string // host:port of metrics and health; empty: none
	LeaseNamespace string
	// LeaseDuration is how long a leader that does not renew its lease still counts as leader.
	LeaseDuration time.Duration

	Rack      rack.Options
	Token     string
	TokenFile string

	LogLevel slog.Level
	LogJSON  bool
	Version  bool
}

// ParseSettings parses the arguments, and the environment variables that name the rack and the pod.
// With --help it writes the help text and returns flag.ErrHelp.
func ParseSettings(args []string, getenv func(string) string, help io.Writer) (Settings, error) {
	s := Settings{Config: Defaults(), LeaseDuration: 15 * time.Second}
	var window string
	var length time.Duration
	logFormat := "text"
	flags := flag.NewFlagSet(component, flag.ContinueOnError)
	s.flags(flags)
	flags.StringVar(&window, "window", "", "when operations may begin: a cron `expression` such as "+
		"\"CRON_TZ=Europe/Zurich 0 2 * * 6\"; empty means always")
	flags.DurationVar(&length, "window-length", time.Hour, "how long the window lasts")
	flags.StringVar(&logFormat, "log-format", logFormat, "text or json")
	if _, err := parse(flags, args, help, 0); err != nil || s.Version {
		return s, err
	}
	if window != "" {
		var err error
		if s.Window, err = ParseWindow(window, length); err != nil {
			return s, fmt.Errorf("--window %w", err)
		}
	}
	if s.LogJSON = logFormat == "json"; !s.LogJSON && logFormat != "text" {
		return s, errors.New("--log-format has to be text or json")
	}
	s.NodeName = cmp.Or(s.NodeName, getenv("K8S_NODE_NAME"))
	s.LeaseNamespace = cmp.Or(s.LeaseNamespace, getenv("K8S_NAMESPACE"))
	return s, errors.Join(s.setRack(getenv), s.Check(), s.complete())
}

const about = `oxide-node-keeper looks after the nodes of a Kubernetes cluster on Oxide racks.

  oxide-node-keeper [flags]       the keeper; the rack by OXIDE_HOST, OXIDE_PROJECT,
                                  OXIDE_TOKEN or OXIDE_TOKEN_FILE, and OXIDE_CA_FILE, as the
                                  driver has them
  oxide-node-keeper leave         wait in a node's pod until the node's volumes are detached
  oxide-node-keeper move PV NODE  move a volume that stays with its node to another node`

func (s *Settings) flags(f *flag.FlagSet) {
	c := &s.Config
	f.BoolVar(&c.ColdAttach, "cold-attach", false, "stop and start instances whose nodes have the "+
		"label "+ColdAttachLabel+"="+Allowed+", for volumes that wait for it")
	f.BoolVar(&c.StartupTaint, "startup-taint", false, "remove the taint "+StartupTaint+" from nodes "+
		"where the driver is registered")
	f.BoolVar(&c.LeavingNodes, "leaving-nodes", false, "look after nodes that are gone")
	f.BoolVar(&c.DryRun, "dry-run", false, "only report what --cold-attach would do")
	f.BoolVar(&c.Fence, "fence", false, "set the out-of-service taint on nodes whose kubelet no "+
		"longer reports and whose instances the rack reports as stopped or destroyed")
	f.StringVar(&c.NodeName, "node-name", "", "the `node` of this keeper [$K8S_NODE_NAME]")
	for name, d := range c.durations() {
		f.DurationVar(d.value, name, *d.value, d.usage)
	}
	f.DurationVar(&s.LeaseDuration, "leader-election-lease-duration", s.LeaseDuration, "how long a "+
		"leader that does not renew its lease stays the leader; at least 3s")
	f.IntVar(&c.MaxStopsPerVolume, "max-stops-per-volume", c.MaxStopsPerVolume, "how often in 24 "+
		"hours instances are stopped for one volume")
	f.IntVar(&c.MaxStopsPerNode, "max-stops-per-node", c.MaxStopsPerNode, "how often in 24 hours a "+
		"node is stopped")
	f.StringVar(&s.LeaseNamespace, "leader-election-namespace", "", "the `namespace` of the lease "+
		"[$K8S_NAMESPACE]")
	f.StringVar(&s.Kubeconfig, "kubeconfig", "", "a kubeconfig `file`, for a keeper outside a cluster")
	f.StringVar(&s.HTTPEndpoint, "http-endpoint", "", "where to serve /metrics and /healthz: "+
		"`host:port`")
	f.TextVar(&s.LogLevel, "log-level", slog.LevelInfo, "debug, info, warn or error")
	f.BoolVar(&s.Version, "version", false, "print the version and end")
}

func (s *Settings) setRack(getenv func(string) string) (err error) {
	get := func(name string) string { return strings.TrimSpace(getenv(name)) }
	s.Rack.CAFile, s.TokenFile, s.Token = get("OXIDE_CA_FILE"), get("OXIDE_TOKEN_FILE"),
		get("OXIDE_TOKEN")
	if s.Rack.Host, err = rack.ParseHost(get("OXIDE_HOST")); err != nil {
		return fmt.Errorf("OXIDE_HOST %w", err)
	}
	if s.Rack.Project = get("OXIDE_PROJECT"); s.Rack.Project == "" {
		return errors.New("OXIDE_PROJECT is not set: the keeper has to know the project of the instances")
	}
	if s.TokenFile != "" {
		return nil
	}
	if err := rack.CheckToken(s.Token); err != nil {
		return fmt.Errorf("OXIDE_TOKEN %w, and OXIDE_TOKEN_FILE is not set", err)
	}
	return nil
}

func (s *Settings) complete() error {
	switch {
	case !s.ColdAttach && !s.StartupTaint && !s.LeavingNodes:
		return errors.New("no duty is set; set --cold-attach, --startup-taint or --leaving-nodes")
	case s.LeaseNamespace == "":
		return errors.New("K8S_NAMESPACE (--leader-election-namespace) is not set: the replicas need a " +
			"namespace for their lease")
	case s.LeaseDuration < 3*time.Second:
		return fmt.Errorf("--leader-election-lease-duration is %s; it has to be 3s at least",
			s.LeaseDuration)
	}
	return nil
}

// Config contains the settings that an operator chooses. Its zero value is not valid; see Defaults.
type Config struct {
	// ColdAttach, StartupTaint and LeavingNodes switch the duties on. With DryRun, cold attach only
	// reports what it would do. Fence allows the keeper to set the out-of-service taint.
	ColdAttach, StartupTaint, LeavingNodes, DryRun, Fence bool
	// NodeName is the node on which this keeper runs. The keeper never stops it.
	NodeName string
	// Settle is how long no further volume may begin to wait on a node before the keeper stops it. The
	// keeper also stops the node when a volume has waited five times as long.
	Settle time.Duration
	// These fields limit how often nodes are stopped; see the flags. A nil Window is always open.
	MinInterval, StatefulSetInterval   time.Duration
	MaxStopsPerVolume, MaxStopsPerNode int
	Window                             *Window
	// These fields limit the time of a step. After a longer drain or return, the operation ends with a
	// problem. After a longer stop or attach, the keeper starts the instance. After a longer start, it
	// reports a problem and goes on trying.
	DrainTimeout, StopTimeout, AttachTimeout, StartTimeout, ReturnTimeout time.Duration
	// Interval is the time between rounds if nothing changes.
	Interval time.Duration
}

// Defaults returns a configuration in which no duty is switched on.
func Defaults() Config {
	return Config{
		Settle: 30 * time.Second, MinInterval: 10 * time.Minute, StatefulSetInterval: 30 * time.Minute,
		MaxStopsPerVolume: 4, MaxStopsPerNode: 12,
		DrainTimeout: 5 * time.Minute, StopTimeout: 2 * time.Minute, AttachTimeout: 3 * time.Minute,
		StartTimeout: 5 * time.Minute, ReturnTimeout: 5 * time.Minute,
		Interval: 10 * time.Second,
	}
}

type duration struct {
	value    *time.Duration
	optional bool
	usage    string
}

func (c *Config) durations() map[string]duration {
	return map[string]duration{
		"settle": {&c.Settle, true, "how long no further volume may begin to wait before a node is " +
			"stopped"},
		"min-interval": {&c.MinInterval, true, "the least time between the end of a node's operation " +
			"and its next"},
		"stateful-set-interval": {&c.StatefulSetInterval, true, "the least time between stops of two " +
			"nodes with pods of one StatefulSet"},
		"drain-timeout": {&c.DrainTimeout, false, "how long evictions may take"},
		"stop-timeout":  {&c.StopTimeout, false, "how long an instance's stop may take"},
		"attach-timeout": {&c.AttachTimeout, false, "how long the attacher may take while an instance " +
			"is stopped"},
		"start-timeout": {&c.StartTimeout, false, "after which the keeper reports that an instance " +
			"does not start"},
		"return-timeout": {&c.ReturnTimeout, false, "how long a node may take to be ready again"},
		"interval":       {&c.Interval, false, "the time between rounds if nothing changes"},
	}
}

// Check returns why the configuration cannot be used, or nil.
func (c *Config) Check() error {
	for name, d := range c.durations() {
		switch {
		case *d.value <= 0 && !d.optional:
			return fmt.Errorf("--%s is %s; it has to be positive", name, *d.value)
		case *d.value < 0:
			return fmt.Errorf("--%s is %s; it must not be negative", name, *d.value)
		}
	}
	for name, value := range map[string]int{"max-stops-per-volume": c.MaxStopsPerVolume,
		"max-stops-per-node": c.MaxStopsPerNode} {
		if value < 1 {
			return fmt.Errorf("--%s is %d; it has to be at least 1", name, value)
		}
	}
	if c.Fence && !c.LeavingNodes {
		return errors.New("--fence is part of --leaving-nodes, which is off; set both")
	}
	if c.ColdAttach && c.NodeName == "" {
		return errors.New("K8S_NODE_NAME (--node-name) is not set: the keeper has to know its own " +
			"node, which it must not stop; set it with a fieldRef to spec.nodeName")
	}
	return nil
}

// Window is a period that repeats, such as the first hour of every Saturday.
type Window struct {
	begins cron.Schedule
	length time.Duration
	text   string
}

// fiveFields refuses "@every 1h", which names no time of day.
var fiveFields = cron.NewParser(cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow)

// ParseWindow parses a window that begins at the times of a cron expression of five fields, such as
// "0 2 * * 6" or "CRON_TZ=Europe/Zurich 0 2 * * 6". Without a zone the times are UTC.
func ParseWindow(expression string, length time.Duration) (*Window, error) {
	begins, err := fiveFields.Parse(expression)
	switch {
	case err != nil:
		return nil, errors.New("has to be a cron expression of five fields, such as 0 2 * * 6 for " +
			"Saturdays at two, with CRON_TZ=Europe/Zurich before it for another zone than UTC")
	case begins.Next(time.Now()).IsZero():
		return nil, errors.New("has to be a time that comes within five years")
	case length <= 0:
		return nil, errors.New("has to have a positive --window-length")
	}
	return &Window{begins, length, expression}, nil
}

func (w *Window) open(now time.Time) bool {
	if w == nil {
		return true
	}
	now = now.UTC()
	next := w.begins.Next(now.Add(-w.length))
	return !next.IsZero() && !next.After(now) // zero: there is none within five years
}

// String returns the window's cron expression and its length.
func (w *Window) String() string { return fmt.Sprintf("%q for %s", w.text, w.length) }
