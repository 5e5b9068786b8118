package keeper

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"

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
	f.BoolVar(&c.DryRun, "dry-run", false, "only say what --cold-attach would do")
	f.BoolVar(&c.Fence, "fence", false, "set the out-of-service taint on nodes whose instances the "+
		"rack reports as stopped or destroyed")
	f.StringVar(&c.NodeName, "node-name", "", "the `node` of this keeper [$K8S_NODE_NAME]")
	for name, d := range c.durations() {
		f.DurationVar(d.value, name, *d.value, d.usage)
	}
	f.DurationVar(&s.LeaseDuration, "leader-election-lease-duration", s.LeaseDuration, "how long a "+
		"silent leader stays one; at least 3s")
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

// complete returns which setting is missing, as an error.
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
