package driver

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/node"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// Mode selects the services of a process: controller, node or both. Every process has Identity.
type Mode string

// The modes of the plugin.
const (
	ModeController Mode = "controller"
	ModeNode       Mode = "node"
	ModeAll        Mode = "all"
)

func (m Mode) controller() bool { return m != ModeNode }

func (m Mode) node() bool { return m != ModeController }

// Config is the plugin's configuration, which ParseConfig fills.
type Config struct {
	Mode     Mode
	Endpoint string // unix:///absolute/path.sock
	// LivenessEndpoint is a second socket, whose Probe succeeds while the process works; may be empty.
	LivenessEndpoint string

	Host      string
	Token     string
	TokenFile string // wins over Token, and is read again when it changes
	Project   string
	ClusterID string
	CAFile    string // empty means the system's certificates

	SysfsRoot            string
	DevRoot              string
	StateDir             string // empty means no volume records
	InstanceID           string
	InstanceMetadataFile string
	MaxDisks             int
	DeviceTimeout        time.Duration
	LateLimit            time.Duration
	LookLimit            time.Duration

	// Topology lists the locations from which the rack's disks can be reached, in order of preference.
	// On a node it has at most one location, the node's own.
	Topology []volume.Segments
	// TopologyInstance makes every node report its instance's id in addition to its location.
	TopologyInstance bool

	LogLevel       slog.Level
	LogJSON        bool
	MetricsAddress string // unix:///path or host:port; empty means none
	PprofAddress   string // unix:///path or localhost:port; empty means none
	LeaveSocket    string // an absolute path; used only by the subcommand prestop

	PrintVersion bool
}

type setting struct {
	flag, env, preset, usage string
	// set parses and stores a value, which is trimmed and not empty. Errors never contain the value.
	set func(value string) error
}

// settings returns all settings. The token has no flag: the process list shows arguments to all.
func (c *Config) settings() []setting {
	return []setting{
		{"mode", "OXIDE_MODE", "", "what to serve: controller, node or all", c.setMode},
		{"endpoint", "CSI_ENDPOINT", "", "the CSI socket: unix:///path/name.sock", socket(&c.Endpoint)},
		{"liveness-endpoint", "OXIDE_LIVENESS_ENDPOINT", "", "a second socket, whose Probe reports " +
			"only that the process works, for what restarts it: unix:///path/name.sock",
			socket(&c.LivenessEndpoint)},
		{"host", "OXIDE_HOST", "", "the rack's address, https://silo.sys.example.com (controller)",
			c.setHost},
		{"", "OXIDE_TOKEN", "", "the rack's token (controller)", c.setToken},
		{"token-file", "OXIDE_TOKEN_FILE", "", "a file with the token, read again when it changes; " +
			"wins over OXIDE_TOKEN (controller)", text(&c.TokenFile)},
		{"project", "OXIDE_PROJECT", "", "the project of the disks and instances (controller)",
			c.setProject},
		{"cluster-id", "OXIDE_CLUSTER_ID", "", "keeps the volumes of several clusters in one project " +
			"apart (controller)", c.setClusterID},
		{"ca-file", "OXIDE_CA_FILE", "", "PEM certificates to trust instead of the system's " +
			"(controller)", text(&c.CAFile)},
		{"topology", "OXIDE_TOPOLOGY", "", "the rack's location, such as rack=a,zone=b; further " +
			"locations that reach its disks, after semicolons", c.setTopology},
		{"", "OXIDE_TOPOLOGY_RACK", "", "one key of the topology", c.setTopologyKey("rack")},
		{"", "OXIDE_TOPOLOGY_REGION", "", "one key of the topology", c.setTopologyKey("region")},
		{"", "OXIDE_TOPOLOGY_ZONE", "", "one key of the topology", c.setTopologyKey("zone")},
		{"topology-instance", "OXIDE_TOPOLOGY_INSTANCE", "false", "true or false: whether nodes report " +
			"their instance, for volumes with placement: instance", either(&c.TopologyInstance, "true",
			"true or false")},
		{"instance-id", node.InstanceIDKey, "", "the UUID of this node's instance; not needed on a " +
			"rack (node)", text(&c.InstanceID)},
		{"instance-metadata-file", "OXIDE_INSTANCE_METADATA_FILE", "", "a file of KEY=VALUE lines with " +
			"OXIDE_INSTANCE_ID (node)", text(&c.InstanceMetadataFile)},
		{"max-disks", "OXIDE_MAX_DISKS", "12", "the rack's limit of disks per instance, including the " +
			"boot disk", c.setMaxDisks},
		{"device-timeout", "OXIDE_DEVICE_TIMEOUT", "30s", "how long to wait for an attached disk's " +
			"device (node)", duration(&c.DeviceTimeout)},
		{"late-limit", "OXIDE_LATE_LIMIT", "1m", "how long the rack may take to carry out a change " +
			"that it did not answer (controller)", duration(&c.LateLimit)},
		{"look-limit", "OXIDE_LOOK_LIMIT", rack.DefaultLookLimit.String(), "how long after a look at " +
			"the rack the change that it allows may be sent (controller)", duration(&c.LookLimit)},
		{"sysfs-root", "OXIDE_SYSFS_ROOT", node.DefaultSysfsRoot, "where sysfs is mounted (node)",
			text(&c.SysfsRoot)},
		{"dev-root", "OXIDE_DEV_ROOT", node.DefaultDevRoot, "the directory of the device nodes (node)",
			text(&c.DevRoot)},
		{"state-dir", "OXIDE_STATE_DIR", node.DefaultStateDir, "the directory of the volume records; " +
			"has to outlive the process, not the machine (node)", absolute(&c.StateDir)},
		{"log-level", "OXIDE_LOG_LEVEL", "info", "debug, info, warn or error", c.setLogLevel},
		{"log-format", "OXIDE_LOG_FORMAT", "text", "text or json", either(&c.LogJSON, "json",
			"text or json")},
		{"leave-socket", "OXIDE_LEAVE_SOCKET", "", "where oxide-csi-plugin prestop waits: " +
			"/path/name.sock (node)", absolute(&c.LeaveSocket)},
		{"metrics-address", "OXIDE_METRICS_ADDRESS", "", "where to serve Prometheus metrics: " +
			"unix:///path/name.sock or host:port", address(&c.MetricsAddress, false)},
		{"pprof-address", "OXIDE_PPROF_ADDRESS", "", "where to serve profiles of this process: " +
			"unix:///path/name.sock or localhost:port", address(&c.PprofAddress, true)},
	}
}

func (s setting) name() string {
	if s.flag == "" {
		return s.env
	}
	return s.env + " (--" + s.flag + ")"
}

// value trims whitespace, because the value of a Secret often ends with a newline.
func (s setting) value(flags map[string]string, getenv func(string) string) string {
	value, given := flags[s.flag]
	if s.flag == "" || !given {
		value = getenv(s.env)
	}
	return strings.TrimSpace(value)
}

// ParseConfig parses the arguments and the environment. Its error is one line that names the
// variable and never its value. With --help it writes to help and returns flag.ErrHelp.
func ParseConfig(args []string, getenv func(string) string, help io.Writer) (Config, error) {
	var c Config
	values, err := flagValues(args, &c.PrintVersion, help)
	if err != nil || c.PrintVersion {
		return c, err
	}
	if err := c.apply(c.settings(), values, getenv); err != nil {
		return Config{}, err
	}
	return c, c.complete()
}

func (c *Config) apply(list []setting, flags map[string]string, getenv func(string) string) error {
	for _, s := range list {
		value := cmp.Or(s.value(flags, getenv), s.preset)
		if value == "" {
			continue
		}
		if err := s.set(value); err != nil {
			return fmt.Errorf("%s: %w", s.name(), err)
		}
	}
	if strings.HasPrefix(c.ClusterID, runPrefix) && getenv(runVariable) != c.ClusterID {
		return errors.New("OXIDE_CLUSTER_ID (--cluster-id): has to begin with something else than " +
			runPrefix + ", because oxide-conformance deletes what has that")
	}
	return nil
}

func addFlags(flags *flag.FlagSet, list []setting) (given map[string]string) {
	given = map[string]string{}
	for _, s := range list {
		if s.flag != "" {
			flags.Func(s.flag, s.usage+" [$"+s.env+"]", func(value string) error {
				given[s.flag] = value
				return nil
			})
		}
	}
	return given
}

func flagValues(args []string, version *bool, help io.Writer) (map[string]string, error) {
	flags := flag.NewFlagSet("oxide-csi-plugin", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	values := addFlags(flags, (&Config{}).settings())
	flags.BoolVar(version, "version", false, "print the version and exit")
	err := flags.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		printHelp(help)
		return nil, err
	case err != nil:
		return nil, fmt.Errorf("%s; see --help", flagProblem(err))
	case flags.NArg() > 0:
		return nil, fmt.Errorf("expected flags only, found %d other arguments; see --help", flags.NArg())
	}
	return values, nil
}

// flagProblem returns the text of err, but a fixed text if err may quote a value.
func flagProblem(err error) string {
	for _, harmless := range []string{"flag provided but not defined: ", "flag needs an argument: "} {
		if strings.HasPrefix(err.Error(), harmless) {
			return csierr.Plain(err.Error())
		}
	}
	return "an argument is not of the form --flag=value"
}

func printHelp(w io.Writer) {
	_, _ = fmt.Fprintln(w, "oxide-csi-plugin serves Oxide disks as CSI volumes. Every flag has an "+
		"environment variable; the flag wins.")
	for _, s := range (&Config{}).settings() {
		left := "$" + s.env
		if s.flag != "" {
			left = "--" + s.flag + ", " + left
		}
		right := s.usage
		if s.preset != "" {
			right += " (default " + s.preset + ")"
		}
		_, _ = fmt.Fprintf(w, "  %-56s %s\n", left, right)
	}
	_, _ = fmt.Fprintf(w, "  %-56s %s\n", "--version", "print the version and exit")
	_, _ = fmt.Fprintln(w, "\nPrograms for an operator, each with a --help of its own:\n"+
		"  oxide-csi-plugin audit    find and delete disks and snapshots that nobody uses\n"+
		"  oxide-csi-plugin claim    grow a claim, or revert it to a snapshot\n"+
		"  oxide-csi-plugin doctor   explain why a volume does not work\n"+
		"  oxide-csi-plugin inspect  print what a node sees of its volumes\n"+
		"  oxide-csi-plugin ready    say why the plugin at CSI_ENDPOINT cannot work, if it cannot\n"+
		"  oxide-csi-plugin prestop  keep a node's driver until its node has no volumes any more")
}

var errNoEndpoint = errors.New("CSI_ENDPOINT (--endpoint) is not set: it has to be " +
	"unix:///path/name.sock")

func (c *Config) complete() error {
	switch {
	case c.Mode == "":
		return errors.New("OXIDE_MODE (--mode) is not set: it has to be controller, node or all")
	case c.Endpoint == "":
		return errNoEndpoint
	case c.LivenessEndpoint != "" && filepath.Dir(c.LivenessEndpoint) == filepath.Dir(c.Endpoint):
		return errors.New("OXIDE_LIVENESS_ENDPOINT (--liveness-endpoint): has to be in another " +
			"directory than the socket of CSI_ENDPOINT, where CSI wants nothing else")
	case c.Mode.controller() && c.noRack() != "":
		return fmt.Errorf("%s: the controller needs the rack's address, a token and a project",
			c.noRack())
	case c.Mode.node() && runtime.GOOS != "linux":
		return errors.New("OXIDE_MODE (--mode): the node service needs Linux; run it on the instance")
	case c.Mode.node() && len(c.Topology) > 1:
		return errors.New("OXIDE_TOPOLOGY (--topology) names several locations: a node is in one")
	case c.Mode.node() && !isDirectory(c.SysfsRoot):
		return errors.New("OXIDE_SYSFS_ROOT (--sysfs-root): has to be an existing directory")
	case c.Mode.node() && !isDirectory(c.DevRoot):
		return errors.New("OXIDE_DEV_ROOT (--dev-root): has to be an existing directory")
	}
	return nil
}

func (c *Config) noRack() string {
	switch {
	case c.Host == "":
		return "OXIDE_HOST (--host) is not set"
	case c.Token == "" && c.TokenFile == "":
		return "OXIDE_TOKEN is not set, and neither is OXIDE_TOKEN_FILE"
	case c.Project == "":
		return "OXIDE_PROJECT (--project) is not set"
	}
	return ""
}

func isDirectory(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

func text(field *string) func(string) error {
	return func(value string) error {
		*field = value
		return nil
	}
}

// either returns a function that accepts only the values in the parameter words, "text or json" for
// example. The function sets *field to whether the value equals the parameter yes.
func either(field *bool, yes, words string) func(string) error {
	return func(value string) error {
		if !slices.Contains(strings.Split(words, " or "), value) {
			return errors.New("has to be " + words)
		}
		*field = value == yes
		return nil
	}
}

func (c *Config) setMode(value string) error {
	switch c.Mode = Mode(value); c.Mode {
	case ModeController, ModeNode, ModeAll:
		return nil
	}
	return errors.New("has to be controller, node or all")
}

func socket(field *string) func(string) error {
	return func(value string) error {
		*field = value
		_, err := socketPath(value)
		return err
	}
}

func absolute(field *string) func(string) error {
	return func(value string) error {
		if !filepath.IsAbs(value) {
			return errors.New("has to be an absolute path")
		}
		*field = filepath.Clean(value)
		return nil
	}
}

func (c *Config) setMaxDisks(value string) (err error) {
	const most = 1000
	if c.MaxDisks, err = strconv.Atoi(value); err != nil || c.MaxDisks < 1 || c.MaxDisks > most {
		return fmt.Errorf("has to be a number from 1 to %d", most)
	}
	return nil
}

func duration(field *time.Duration) func(string) error {
	return func(value string) (err error) {
		if *field, err = time.ParseDuration(value); err != nil || *field <= 0 || *field > time.Hour {
			return errors.New("has to be a duration such as 30s, at most 1h")
		}
		return nil
	}
}

func (c *Config) setLogLevel(value string) error {
	for _, level := range []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn,
		slog.LevelError} {
		if strings.EqualFold(value, level.String()) {
			c.LogLevel = level
			return nil
		}
	}
	return errors.New("has to be debug, info, warn or error")
}

func (c *Config) setHost(value string) (err error) {
	c.Host, err = rack.ParseHost(value)
	return err
}

func (c *Config) rackWarnings() []string {
	var warnings []string
	if u, err := url.Parse(c.Host); err == nil && u.Scheme == "http" && !thisMachine(u.Hostname()) {
		warnings = append(warnings, "OXIDE_HOST is an http:// address of another machine: everybody on "+
			"the network path can read the token; set an https:// address")
	}
	if c.ClusterID == "" {
		warnings = append(warnings, "OXIDE_CLUSTER_ID is not set: if another cluster in this project "+
			"has none either, the two share their disks, and each deletes the other's; set a different id "+
			"for every cluster before its first volume, and keep it")
	}
	return warnings
}

func thisMachine(host string) bool {
	ip := net.ParseIP(host)
	return strings.EqualFold(host, "localhost") || ip != nil && ip.IsLoopback()
}

func (c *Config) setToken(value string) error {
	c.Token = value
	return rack.CheckToken(c.Token)
}

func (c *Config) setProject(value string) error {
	id, isID := rack.ID(value)
	switch {
	case isID:
		c.Project = string(id)
	case volume.RackName.MatchString(value):
		c.Project = value
	default:
		return errors.New("has to be the name or the UUID of a project")
	}
	return nil
}

var clusterID = volume.Word{Most: 63,
	Looks: regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?$`)}

// runPrefix begins each cluster ID that oxide-conformance gives to its driver. That program deletes
// all objects of such an ID. So a driver accepts one only if the variable runVariable equals it.
const (
	runPrefix   = "oxide-conformance-"
	runVariable = "OXIDE_CONFORMANCE_MARK"
)

func (c *Config) setClusterID(value string) error {
	c.ClusterID = value
	if !clusterID.MatchString(value) {
		return errors.New("has to be at most 63 letters, digits, dots, hyphens and underscores, " +
			"with a letter or digit at both ends")
	}
	return nil
}

func (c *Config) setTopology(value string) (err error) {
	c.Topology, err = volume.ParseTopology(value)
	return err
}

func (c *Config) setTopologyKey(name string) func(string) error {
	return func(value string) error {
		if len(c.Topology) == 0 {
			c.Topology = []volume.Segments{{}}
		}
		for _, location := range c.Topology {
			if err := location.Add(name, value); err != nil {
				return err
			}
		}
		return nil
	}
}

func (c *Config) nodeTopology(instance string) map[string]string {
	segments := map[string]string{}
	for _, location := range c.Topology {
		maps.Copy(segments, location)
	}
	if c.TopologyInstance {
		segments[volume.InstanceKey] = instance
	}
	return segments
}

func (c *Config) declaresTopology() bool { return len(c.Topology) > 0 || c.TopologyInstance }

// address returns a function that stores an address in *field. If local is true, the function
// refuses an address that other machines can reach.
func address(field *string, local bool) func(string) error {
	return func(value string) error {
		if strings.HasPrefix(value, "unix:") {
			return socket(field)(value)
		}
		*field = value
		host, port, err := net.SplitHostPort(value)
		switch bad := err != nil || port == ""; {
		case local && (bad || host != "localhost" && !net.ParseIP(host).IsLoopback()):
			return errors.New("has to be unix:///path/name.sock, localhost:port or 127.0.0.1:port: " +
				"profiles are not for other machines")
		case bad:
			return errors.New("has to be unix:///path/name.sock or host:port")
		}
		return nil
	}
}

func (c *Config) startFields() []any {
	fields := []any{"version", Version(), "mode", string(c.Mode)}
	if u, err := url.Parse(c.Host); err == nil && c.Mode.controller() {
		fields = append(fields, "rack", u.Host, "project", c.Project, "cluster", c.ClusterID)
	}
	return fields
}

func (c *Config) rackOptions() rack.Options {
	return rack.Options{Host: c.Host, Project: c.Project, CAFile: c.CAFile,
		UserAgent: "oxide-csi-plugin/" + Version()}
}

func tokensOf(c Config, h *hidden, log *slog.Logger) *rack.TokenSource {
	h.add(c.Token)
	return &rack.TokenSource{Fixed: c.Token, Path: c.TokenFile, OnToken: h.add, Log: log}
}
