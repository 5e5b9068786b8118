package driver

import (
	"bytes"
	"errors"
	"flag"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func goodEnv(more map[string]string) func(string) string {
	env := map[string]string{
		"OXIDE_MODE": "controller", "CSI_ENDPOINT": "unix:///csi/csi.sock",
		"OXIDE_HOST": "https://silo.sys.example.com", "OXIDE_TOKEN": racktest.Token,
		"OXIDE_PROJECT": "kittens", "OXIDE_CLUSTER_ID": "blue",
	}
	maps.Copy(env, more)
	return func(key string) string { return env[key] }
}

func TestMisconfigurationNamesTheVariableAndNeverItsValue(t *testing.T) { // B-26
	const canary = "tweety tweety"
	set := func(key, value string) map[string]string { return map[string]string{key: value} }
	for _, test := range []struct {
		name string
		env  map[string]string
		args []string
		want string
	}{
		{"no mode (B-28)", set("OXIDE_MODE", ""), nil, "OXIDE_MODE"},
		{"a bad mode", set("OXIDE_MODE", canary), nil, "OXIDE_MODE"},
		{"a bad mode as a flag", nil, []string{"--mode=" + canary}, "--mode"},
		{"no endpoint", set("CSI_ENDPOINT", ""), nil, "CSI_ENDPOINT"},
		{"a bad endpoint", set("CSI_ENDPOINT", "tcp://"+canary), nil, "CSI_ENDPOINT"},
		{"no host", set("OXIDE_HOST", ""), nil, "OXIDE_HOST"},
		{"a bad host", set("OXIDE_HOST", canary), nil, "OXIDE_HOST"},
		{"a host with a path", set("OXIDE_HOST", "https://x/tweety"), nil, "OXIDE_HOST"},
		{"a host with a password", set("OXIDE_HOST", "https://u:tweety@x"), nil, "OXIDE_HOST"},
		{"no token", set("OXIDE_TOKEN", ""), nil, "OXIDE_TOKEN"},
		{"a token of two words", set("OXIDE_TOKEN", canary), nil, "OXIDE_TOKEN"},
		{"no project", set("OXIDE_PROJECT", ""), nil, "OXIDE_PROJECT"},
		{"a bad project", set("OXIDE_PROJECT", canary), nil, "OXIDE_PROJECT"},
		{"a bad cluster", set("OXIDE_CLUSTER_ID", canary), nil, "OXIDE_CLUSTER_ID"},
		{"the mark of a conformance run", set("OXIDE_CLUSTER_ID", "oxide-conformance-20261126"), nil,
			"OXIDE_CLUSTER_ID"},
		{"a bad topology", set("OXIDE_TOPOLOGY", canary), nil, "OXIDE_TOPOLOGY"},
		{"a bad rack (D-73)", set("OXIDE_TOPOLOGY_RACK", canary), nil, "OXIDE_TOPOLOGY_RACK"},
		{"a rack given twice", map[string]string{"OXIDE_TOPOLOGY": "rack=tweety",
			"OXIDE_TOPOLOGY_RACK": "tweety"}, nil, "OXIDE_TOPOLOGY_RACK"},
		{"a node in two locations", map[string]string{"OXIDE_MODE": "node",
			"OXIDE_TOPOLOGY": "rack=tweety;rack=b"}, nil, "OXIDE_TOPOLOGY"},
		{"the instance among the operator's keys", set("OXIDE_TOPOLOGY", "rack=tweety,instance=b"), nil,
			"OXIDE_TOPOLOGY"},
		{"a switch that is neither true nor false", set("OXIDE_TOPOLOGY_INSTANCE", canary), nil,
			"OXIDE_TOPOLOGY_INSTANCE"},
		{"max disks no number", set("OXIDE_MAX_DISKS", canary), nil, "OXIDE_MAX_DISKS"},
		{"max disks zero", set("OXIDE_MAX_DISKS", "0"), nil, "OXIDE_MAX_DISKS"},
		{"a bad duration", set("OXIDE_DEVICE_TIMEOUT", canary), nil, "OXIDE_DEVICE_TIMEOUT"},
		{"a negative duration", set("OXIDE_DEVICE_TIMEOUT", "-1s"), nil, "OXIDE_DEVICE_TIMEOUT"},
		{"a bad late limit", set("OXIDE_LATE_LIMIT", canary), nil, "OXIDE_LATE_LIMIT"},
		{"a state directory that is not absolute", map[string]string{"OXIDE_MODE": "node",
			"OXIDE_STATE_DIR": canary}, nil, "OXIDE_STATE_DIR"},
		{"profiles for other machines", set("OXIDE_PPROF_ADDRESS", "0.0.0.0:0"), nil,
			"OXIDE_PPROF_ADDRESS"},
		{"no sysfs", map[string]string{"OXIDE_MODE": "node", "OXIDE_SYSFS_ROOT": canary}, nil,
			"OXIDE_SYSFS_ROOT"},
		{"no dev", map[string]string{"OXIDE_MODE": "node", "OXIDE_DEV_ROOT": canary}, nil,
			"OXIDE_DEV_ROOT"},
		{"a bad level", set("OXIDE_LOG_LEVEL", canary), nil, "OXIDE_LOG_LEVEL"},
		{"a bad format", set("OXIDE_LOG_FORMAT", canary), nil, "OXIDE_LOG_FORMAT"},
		{"a bad liveness endpoint", set("OXIDE_LIVENESS_ENDPOINT", canary), nil,
			"OXIDE_LIVENESS_ENDPOINT"},
		{"a second socket beside CSI's", nil, []string{"--endpoint=unix:///csi/csi.sock",
			"--liveness-endpoint=unix:///csi/liveness.sock"}, "OXIDE_LIVENESS_ENDPOINT"},
		{"a bad leave socket", set("OXIDE_LEAVE_SOCKET", canary), nil, "OXIDE_LEAVE_SOCKET"},
		{"a bad metrics address", set("OXIDE_METRICS_ADDRESS", canary), nil, "OXIDE_METRICS_ADDRESS"},
		{"an unknown flag", nil, []string{"--token=" + canary}, "-token"},
		{"a flag without a name", nil, []string{"--=" + canary}, "--help"},
		{"a version flag that is no boolean", nil, []string{"--version=" + canary}, "--help"},
		{"an unknown flag of two lines", nil, []string{"--a\nb=" + canary}, "--help"},
		{"an argument", nil, []string{canary}, "--help"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := ParseConfig(test.args, goodEnv(test.env), io.Discard)
			if err == nil {
				t.Fatal("accepted")
			}
			if text := err.Error(); !strings.Contains(text, test.want) ||
				strings.Contains(text, "tweety") || strings.Contains(text, "\n") {
				t.Errorf("got %q; it has to name %s, in one line, without the value", text, test.want)
			}
		})
	}
}

func TestConfigurationHasDefaults(t *testing.T) {
	c, err := ParseConfig(nil, goodEnv(nil), io.Discard)
	must(t, err)
	if c.Mode != ModeController || c.MaxDisks != 12 || c.SysfsRoot != "/sys" || c.DevRoot != "/dev" ||
		c.DeviceTimeout != 30*time.Second || c.LogLevel != slog.LevelInfo || c.LogJSON ||
		c.MetricsAddress != "" || c.Topology != nil || c.TopologyInstance || c.declaresTopology() ||
		c.Host != "https://silo.sys.example.com" {
		t.Errorf("got %+v", c)
	}
}

func TestAFlagWinsOverItsVariable(t *testing.T) {
	c, err := ParseConfig([]string{"--mode=node", "--endpoint", "unix:///other/x.sock",
		"--max-disks=8", "--log-level=DEBUG", "--log-format=json", "--topology=rack=r1"},
		goodEnv(map[string]string{"OXIDE_MAX_DISKS": "9", "OXIDE_TOPOLOGY_ZONE": "z1"}), io.Discard)
	must(t, err)
	want := volume.Segments{volume.TopologyPrefix + "rack": "r1", volume.TopologyPrefix + "zone": "z1"}
	if c.Mode != ModeNode || c.Endpoint != "unix:///other/x.sock" || c.MaxDisks != 8 ||
		c.LogLevel != slog.LevelDebug || !c.LogJSON || !maps.Equal(c.Topology[0], want) {
		t.Errorf("got %+v", c)
	}
}

func TestANodeReportsItsInstanceOnRequest(t *testing.T) { // NI-3
	const rack, id = volume.TopologyPrefix + "rack", racktest.Instance
	for _, test := range []struct {
		args     []string
		want     volume.Segments
		declares bool // CAP-2
	}{
		{nil, volume.Segments{}, false},
		{[]string{"--topology=rack=a"}, volume.Segments{rack: "a"}, true},
		{[]string{"--topology-instance=true"}, volume.Segments{volume.InstanceKey: id}, true},
		{[]string{"--topology-instance=false"}, volume.Segments{}, false},
		{[]string{"--topology-instance=true", "--topology=rack=a"},
			volume.Segments{rack: "a", volume.InstanceKey: id}, true},
	} {
		c, err := ParseConfig(append(test.args, "--mode=node"), goodEnv(nil), io.Discard)
		if got := c.nodeTopology(id); err != nil || !maps.Equal(got, test.want) ||
			c.declaresTopology() != test.declares {
			t.Errorf("%q: the node is at %v, declared %v, %v; want %v, %v", test.args, got,
				c.declaresTopology(), err, test.want, test.declares)
		}
	}
}

func TestNodesNeedNoRack(t *testing.T) { // D-64
	c, err := ParseConfig([]string{"--mode=node"}, goodEnv(map[string]string{
		"OXIDE_HOST": "", "OXIDE_TOKEN": "", "OXIDE_PROJECT": ""}), io.Discard)
	if err != nil || c.Mode != ModeNode {
		t.Errorf("got %+v, %v", c, err)
	}
}

func TestAHostIsAnAddress(t *testing.T) {
	for value, want := range map[string]string{
		"silo.sys.example.com":       "https://silo.sys.example.com",
		"https://silo.example.com/":  "https://silo.example.com",
		"http://127.0.0.1:12220":     "http://127.0.0.1:12220",
		"https://[2001:db8::1]:8443": "https://[2001:db8::1]:8443",
	} {
		var c Config
		if err := setHost(&c, value); err != nil || c.Host != want {
			t.Errorf("%q becomes %q, %v", value, c.Host, err)
		}
	}
}

func TestEverySettingHasAVariableAndIsInTheHelp(t *testing.T) { // B-23
	var help bytes.Buffer
	if _, err := ParseConfig([]string{"--help"}, goodEnv(nil), &help); !errors.Is(err, flag.ErrHelp) {
		t.Fatalf("got %v", err)
	}
	for _, s := range settings {
		if s.env == "" || (!strings.HasPrefix(s.env, "OXIDE_") && s.env != "CSI_ENDPOINT") {
			t.Errorf("B-24: --%s has the variable %q", s.flag, s.env)
		}
		if !strings.Contains(help.String(), "$"+s.env) {
			t.Errorf("--help does not mention %s", s.env)
		}
	}
	c, err := ParseConfig([]string{"--version"}, func(string) string { return "" }, io.Discard)
	if err != nil || !c.PrintVersion {
		t.Errorf("--version needs nothing else: %v", err)
	}
}

func TestRunFailsFastOnMisconfiguration(t *testing.T) { // B-26
	dir := t.TempDir()
	junk := filepath.Join(dir, "tweety")
	must(t, os.WriteFile(junk, []byte("no pem, no token"), 0o600))
	good, err := ParseConfig(nil, goodEnv(nil), io.Discard)
	must(t, err)
	good.Endpoint = "unix://" + filepath.Join(dir, "csi.sock")
	for want, change := range map[string]func(*Config){
		"OXIDE_CA_FILE":    func(c *Config) { c.CAFile = junk },
		"--ca-file":        func(c *Config) { c.CAFile = filepath.Join(dir, "tweety-missing") },
		"OXIDE_TOKEN_FILE": func(c *Config) { c.TokenFile = junk },
		"--token-file":     func(c *Config) { c.TokenFile = filepath.Join(dir, "tweety-missing") },
		"CSI_ENDPOINT": func(c *Config) {
			c.Endpoint = "unix://" + dir +
				"/tweety-missing/csi.sock"
		},
		"OXIDE_METRICS_ADDRESS": func(c *Config) {
			c.MetricsAddress = "unix://" + dir + "/tweety-missing/m.sock"
		},
		"OXIDE_INSTANCE_ID": func(c *Config) {
			c.Mode, c.SysfsRoot, c.InstanceID = ModeNode, dir, "tweety"
		},
		"OXIDE_STATE_DIR": func(c *Config) {
			c.Mode, c.SysfsRoot, c.InstanceID = ModeNode, dir, racktest.Instance
			c.StateDir = junk + "/volumes"
		},
	} {
		c := good
		change(&c)
		var log bytes.Buffer
		err := Run(t.Context(), c, &log)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(),
			"tweety") || strings.Contains(err.Error(), "\n") || log.Len() > 0 {
			t.Errorf("%s: got %v, and the log %q", want, err, log.String())
		}
	}
}

// spokenDefaults are the defaults in the table of docs/configuration.md that the program describes
// in no setting.
var spokenDefaults = map[string]string{
	"OXIDE_CA_FILE": "the system's", "OXIDE_INSTANCE_ID": "SMBIOS", "OXIDE_METRICS_ADDRESS": "none",
	"OXIDE_PPROF_ADDRESS": "none", "OXIDE_LIVENESS_ENDPOINT": "none", "OXIDE_LEAVE_SOCKET": "none",
}

func TestTheDocumentationListsEverySetting(t *testing.T) { // B-37
	text, err := os.ReadFile("../docs/configuration.md")
	must(t, err)
	_, table, _ := strings.Cut(string(text), "| flag | variable | default | meaning |\n")
	table, _, _ = strings.Cut(table, "\n\n")
	var want []string
	for _, s := range settings {
		if strings.HasPrefix(s.env, "OXIDE_TOPOLOGY_") && s.flag == "" {
			// The row of OXIDE_TOPOLOGY lists its variants by their endings.
			short := strings.TrimPrefix(s.env, "OXIDE_TOPOLOGY")
			if !strings.Contains(table, "`"+s.env+"`") && !strings.Contains(table, "`"+short+"`") {
				t.Errorf("docs/configuration.md does not name %s", s.env)
			}
			continue
		}
		flag, preset := "", spokenDefaults[s.env]
		if s.flag != "" {
			flag = "`--" + s.flag + "`"
		}
		if s.preset != "" {
			preset = "`" + s.preset + "`"
		}
		want = append(want, flag+", `"+s.env+"`, "+preset)
	}
	var got []string
	for line := range strings.Lines(table) {
		if cells := strings.Split(line, "|"); len(cells) == 6 && !strings.Contains(line, "|---|") {
			got = append(got, strings.TrimSpace(cells[1])+", "+strings.TrimSpace(cells[2])+", "+
				strings.TrimSpace(cells[3]))
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("docs/configuration.md lists\n%s\nand the program knows\n%s", strings.Join(got, "\n"),
			strings.Join(want, "\n"))
	}
}

// FuzzConfig checks that no configuration shows a value in its error, or writes more than one line.
func FuzzConfig(f *testing.F) {
	f.Fuzz(func(t *testing.T, text string) {
		env := csitest.Pairs(strings.ReplaceAll(text, "%", canary))
		_, err := ParseConfig(nil, func(name string) string { return env[name] }, io.Discard)
		if err != nil && (strings.Contains(err.Error(), canary) ||
			strings.ContainsAny(err.Error(), "\n\r\x00")) {
			t.Fatalf("%q: the error is %q", env, err)
		}
	})
}
