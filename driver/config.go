package driver

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/node"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// Mode selects the services of a process. Identity is always among them.
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
	// LivenessEndpoint is a second socket, whose Probe reports only that the process works; empty
	// means none.
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

	// Topology lists the locations from which the rack's disks can be reached, best first; a node is
	// in one.
	Topology []volume.Segments
	// TopologyInstance makes every node report its instance, beside its location.
	TopologyInstance bool

	LogLevel       slog.Level
	LogJSON        bool
	MetricsAddress string // unix:///path or host:port; empty means none
	PprofAddress   string // unix:///path or localhost:port; empty means none
	LeaveSocket    string // an absolute path; used by the program prestop alone

	PrintVersion bool
}

type setting struct {
	flag, env, preset, usage string
	// set parses a value, which is not empty and has no surrounding whitespace. Its error states what
	// was expected, never the value.
	set func(c *Config, value string) error
}

// The token has no flag, because the process list shows arguments to everybody.
var settings = []setting{
	{"mode", "OXIDE_MODE", "", "what to serve: controller, node or all", setMode},
	{"endpoint", "CSI_ENDPOINT", "", "the CSI socket: unix:///path/name.sock",
		socket(func(c *Config) *string { return &c.Endpoint })},
	{"liveness-endpoint", "OXIDE_LIVENESS_ENDPOINT", "", "a second socket, whose Probe reports only " +
		"that the process works, for what restarts it: unix:///path/name.sock",
		socket(func(c *Config) *string { return &c.LivenessEndpoint })},
	{"host", "OXIDE_HOST", "", "the rack's address, https://silo.sys.example.com (controller)",
		setHost},
	{"", "OXIDE_TOKEN", "", "the rack's token (controller)", setToken},
	{"token-file", "OXIDE_TOKEN_FILE", "", "a file with the token, read again when it changes; " +
		"wins over OXIDE_TOKEN (controller)", text(func(c *Config) *string { return &c.TokenFile })},
	{"project", "OXIDE_PROJECT", "", "the project of the disks and instances (controller)",
		setProject},
	{"cluster-id", "OXIDE_CLUSTER_ID", "", "keeps the volumes of several clusters in one project " +
		"apart (controller)", setClusterID},
	{"ca-file", "OXIDE_CA_FILE", "", "PEM certificates to trust instead of the system's " +
		"(controller)", text(func(c *Config) *string { return &c.CAFile })},
	{"topology", "OXIDE_TOPOLOGY", "", "the rack's location, such as rack=a,zone=b; further " +
		"locations that reach its disks, after semicolons", setTopology},
	{"", "OXIDE_TOPOLOGY_RACK", "", "one key of the topology", setTopologyKey("rack")},
	{"", "OXIDE_TOPOLOGY_REGION", "", "one key of the topology", setTopologyKey("region")},
	{"", "OXIDE_TOPOLOGY_ZONE", "", "one key of the topology", setTopologyKey("zone")},
	{"topology-instance", "OXIDE_TOPOLOGY_INSTANCE", "false", "true or false: whether nodes report " +
		"their instance, for volumes with placement: instance", setTopologyInstance},
	{"instance-id", node.InstanceIDKey, "", "the UUID of this node's instance; not needed on a rack " +
		"(node)", text(func(c *Config) *string { return &c.InstanceID })},
	{"instance-metadata-file", "OXIDE_INSTANCE_METADATA_FILE", "", "a file of KEY=VALUE lines with " +
		"OXIDE_INSTANCE_ID (node)",
		text(func(c *Config) *string { return &c.InstanceMetadataFile })},
	{"max-disks", "OXIDE_MAX_DISKS", "12", "the rack's limit of disks per instance, including the " +
		"boot disk", setMaxDisks},
	{"device-timeout", "OXIDE_DEVICE_TIMEOUT", "30s", "how long to wait for an attached disk's " +
		"device (node)", duration(func(c *Config) *time.Duration { return &c.DeviceTimeout })},
	{"late-limit", "OXIDE_LATE_LIMIT", "1m", "how long the rack may take to carry out a change that " +
		"it did not answer (controller)",
		duration(func(c *Config) *time.Duration { return &c.LateLimit })},
	{"look-limit", "OXIDE_LOOK_LIMIT", rack.DefaultLookLimit.String(), "how long after a look at " +
		"the rack the change that it allows may be sent (controller)",
		duration(func(c *Config) *time.Duration { return &c.LookLimit })},
	{"sysfs-root", "OXIDE_SYSFS_ROOT", node.DefaultSysfsRoot, "where sysfs is mounted (node)",
		text(func(c *Config) *string { return &c.SysfsRoot })},
	{"dev-root", "OXIDE_DEV_ROOT", node.DefaultDevRoot, "the directory of the device nodes (node)",
		text(func(c *Config) *string { return &c.DevRoot })},
	{"state-dir", "OXIDE_STATE_DIR", node.DefaultStateDir, "the directory of the volume records; " +
		"has to outlive the process, not the machine (node)",
		absolute(func(c *Config) *string { return &c.StateDir })},
	{"log-level", "OXIDE_LOG_LEVEL", "info", "debug, info, warn or error", setLogLevel},
	{"log-format", "OXIDE_LOG_FORMAT", "text", "text or json", setLogFormat},
	{"leave-socket", "OXIDE_LEAVE_SOCKET", "", "where oxide-csi-plugin prestop waits: " +
		"/path/name.sock (node)", absolute(func(c *Config) *string { return &c.LeaveSocket })},
	{"metrics-address", "OXIDE_METRICS_ADDRESS", "", "where to serve Prometheus metrics: " +
		"unix:///path/name.sock or host:port",
		address(func(c *Config) *string { return &c.MetricsAddress }, false)},
	{"pprof-address", "OXIDE_PPROF_ADDRESS", "", "where to serve profiles of this process: " +
		"unix:///path/name.sock or localhost:port",
		address(func(c *Config) *string { return &c.PprofAddress }, true)},
}

func (s setting) name() string {
	if s.flag == "" {
		return s.env
	}
	return s.env + " (--" + s.flag + ")"
}

// value returns the value from the flags or the environment; empty means not set. Surrounding
// whitespace is trimmed, because the value of a Secret often ends with a newline.
func (s setting) value(flags map[string]string, getenv func(string) string) string {
	value, given := flags[s.flag]
	if s.flag == "" || !given {
		value = getenv(s.env)
	}
	return strings.TrimSpace(value)
}

// ParseConfig parses the arguments and the environment. Its error is one line that names the
// variable and never its value. --help writes its text to help and returns flag.ErrHelp.
func ParseConfig(args []string, getenv func(string) string, help io.Writer) (Config, error) {
	var c Config
	values, err := flagValues(args, &c.PrintVersion, help)
	if err != nil || c.PrintVersion {
		return c, err
	}
	if err := c.apply(settings, values, getenv); err != nil {
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
		if err := s.set(c, value); err != nil {
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
	values := addFlags(flags, settings)
	flags.BoolVar(version, "version", false, "print the version and exit")
	err := flags.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		printHelp(help)
		return nil, err
	case err != nil:
		return nil, fmt.Errorf("%s; see --help", flagProblem(err))
	case flags.NArg() > 0:
		return nil, fmt.Errorf("expected flags only, found %d other arguments; see --help",
			flags.NArg())
	}
	return values, nil
}

// flagProblem returns the message of package flag for an invalid argument if it does not quote a
// value.
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
	for _, s := range settings {
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

func text(field func(*Config) *string) func(*Config, string) error {
	return func(c *Config, value string) error {
		*field(c) = value
		return nil
	}
}

func setMode(c *Config, value string) error {
	switch c.Mode = Mode(value); c.Mode {
	case ModeController, ModeNode, ModeAll:
		return nil
	}
	return errors.New("has to be controller, node or all")
}

func socket(field func(*Config) *string) func(*Config, string) error {
	return func(c *Config, value string) error {
		*field(c) = value
		_, err := socketPath(value)
		return err
	}
}

func absolute(field func(*Config) *string) func(*Config, string) error {
	return func(c *Config, value string) error {
		if !filepath.IsAbs(value) {
			return errors.New("has to be an absolute path")
		}
		*field(c) = filepath.Clean(value)
		return nil
	}
}

func setMaxDisks(c *Config, value string) (err error) {
	const most = 1000
	if c.MaxDisks, err = strconv.Atoi(value); err != nil || c.MaxDisks < 1 || c.MaxDisks > most {
		return fmt.Errorf("has to be a number from 1 to %d", most)
	}
	return nil
}

func duration(field func(*Config) *time.Duration) func(*Config, string) error {
	return func(c *Config, value string) (err error) {
		if *field(c), err = time.ParseDuration(value); err != nil || *field(c) <= 0 ||
			*field(c) > time.Hour {
			return errors.New("has to be a duration such as 30s, at most 1h")
		}
		return nil
	}
}

func setLogLevel(c *Config, value string) error {
	for _, level := range []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn,
		slog.LevelError} {
		if strings.EqualFold(value, level.String()) {
			c.LogLevel = level
			return nil
		}
	}
	return errors.New("has to be debug, info, warn or error")
}

func setLogFormat(c *Config, value string) error {
	if value != "text" && value != "json" {
		return errors.New("has to be text or json")
	}
	c.LogJSON = value == "json"
	return nil
}
