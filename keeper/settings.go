package keeper

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"
	_ "time/tzdata" // the image contains only this binary, and no time zone files

	"github.com/robfig/cron/v3"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
)

// Settings contains what the arguments and the environment of the program set.
type Settings struct {
	Config
	Kubeconfig   string // empty: the pod's service account
	HTTPEndpoint string // host:port of metrics and health; empty: none
	// LeaseNamespace is where the replicas elect their leader.
	LeaseNamespace string
	// LeaseDuration is how long a leader that does not renew its lease still counts as the leader.
	LeaseDuration time.Duration

	Rack      rack.Options
	Token     string
	TokenFile string

	LogLevel slog.Level
	LogJSON  bool
	Version  bool
}

// ParseSettings parses the arguments and the environment variables of the rack and of the pod. With
// --help it writes the help text and returns flag.ErrHelp.
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
	if s.NodeName == "" {
		s.NodeName = getenv("K8S_NODE_NAME")
	}
	if s.LeaseNamespace == "" {
		s.LeaseNamespace = getenv("K8S_NAMESPACE")
	}
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
	f.BoolVar(&c.Fence, "fence", false, "set the out-of-service taint on nodes whose instances the "+
		"rack reports as stopped or destroyed")
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

// setRack reads the environment variables of the rack.
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

// complete returns an error if a setting is missing, or if the lease is too short.
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

// Config contains an operator's decisions. Zero values are no defaults; see Defaults.
type Config struct {
	// The duties that are switched on.
	ColdAttach, StartupTaint, LeavingNodes bool
	// DryRun makes the keeper report what a cold attach would do, without doing it.
	DryRun bool
	// Fence allows LeavingNodes to set the out-of-service taint.
	Fence bool

	// NodeName is the node that this keeper runs on. It never stops that node's instance.
	NodeName string

	// Settle is the time in which no further volume must begin to wait on a node before the keeper
	// begins. It begins anyway when a volume has waited five times as long.
	Settle time.Duration
	// MinInterval is the least time between the end of a node's operation and its next.
	MinInterval time.Duration
	// StatefulSetInterval is the least time between operations on two nodes with pods of the same
	// StatefulSet.
	StatefulSetInterval time.Duration
	// MaxStopsPerVolume limits how often instances are stopped for one volume in 24 hours.
	// MaxStopsPerNode limits how often one node is stopped in 24 hours.
	MaxStopsPerVolume, MaxStopsPerNode int
	// Window limits when operations may begin; nil means always.
	Window *Window

	// The time limits of the steps. After its limit, a drain ends the operation; a stop or an attach
	// goes on to the start of the instance; a start is tried again; and a return counts as failed.
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

// duration is a duration that a flag sets. It may be zero only if it is optional.
type duration struct {
	value    *time.Duration
	optional bool
	usage    string
}

func (c *Config) durations() map[string]duration {
	return map[string]duration{
		"settle": {&c.Settle, true, "how long no further volume may begin to wait before a node is " +
			"stopped"},
		"min-interval": {&c.MinInterval, true, "the least time between two stops of a node"},
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

// Check returns why a configuration cannot be used, or nil.
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

// fiveFields does not accept "@every 1h", because that names no time of day.
var fiveFields = cron.NewParser(cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow)

// ParseWindow parses a window that begins at the times of a cron expression of five fields, such as
// "0 2 * * 6", or "CRON_TZ=Europe/Zurich 0 2 * * 6". Without a zone the times are UTC.
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
