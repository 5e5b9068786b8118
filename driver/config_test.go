package driver

import (
	"bytes"
	"cmp"
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

func TestConfigurationErrorsNameTheVariableAndNotItsValue(t *testing.T) { // B-26
	const canary = "tweety tweety"
	type mistake struct {
		name string
		env  string // lines of KEY=value
		args []string
		want string // text in the error; empty means the first variable in env
	}
	mistakes := []mistake{
		{"no mode (B-28)", "OXIDE_MODE=", nil, ""},
		{"no endpoint", "CSI_ENDPOINT=", nil, ""},
		{"a bad mode as a flag", "", []string{"--mode=" + canary}, "--mode"},
		{"a bad endpoint", "CSI_ENDPOINT=tcp://" + canary, nil, ""},
		{"a host with a path", "OXIDE_HOST=https://x/tweety", nil, ""},
		{"a host with a password", "OXIDE_HOST=https://u:tweety@x", nil, ""},
		{"the mark of a conformance run", "OXIDE_CLUSTER_ID=oxide-conformance-20261126", nil, ""},
		{"a bad rack (D-73)", "OXIDE_TOPOLOGY_RACK=" + canary, nil, ""},
		{"a rack given twice", "OXIDE_TOPOLOGY_RACK=tweety\nOXIDE_TOPOLOGY=rack=tweety", nil, ""},
		{"a node in two locations", "OXIDE_TOPOLOGY=rack=tweety;rack=b\nOXIDE_MODE=node", nil, ""},
		{"the instance among the operator's keys", "OXIDE_TOPOLOGY=rack=tweety,instance=b", nil, ""},
		{"max disks zero", "OXIDE_MAX_DISKS=0", nil, ""},
		{"a negative duration", "OXIDE_DEVICE_TIMEOUT=-1s", nil, ""},
		{"profiles for other machines", "OXIDE_PPROF_ADDRESS=0.0.0.0:0", nil, ""},
		{"a second socket beside CSI's", "OXIDE_LIVENESS_ENDPOINT=unix:///csi/liveness.sock", nil, ""},
		{"an unknown flag", "", []string{"--token=" + canary}, "-token"},
		{"a flag without a name", "", []string{"--=" + canary}, "--help"},
		{"a version flag that is no boolean", "", []string{"--version=" + canary}, "--help"},
		{"an unknown flag of two lines", "", []string{"--a\nb=" + canary}, "--help"},
		{"an argument", "", []string{canary}, "--help"},
	}
	for name := range strings.FieldsSeq("MODE HOST TOKEN PROJECT CLUSTER_ID TOPOLOGY " +
		"TOPOLOGY_INSTANCE MAX_DISKS DEVICE_TIMEOUT LATE_LIMIT STATE_DIR SYSFS_ROOT DEV_ROOT LOG_LEVEL " +
		"LOG_FORMAT LIVENESS_ENDPOINT LEAVE_SOCKET METRICS_ADDRESS") {
		env := "OXIDE_" + name + "=" + canary
		if strings.HasSuffix(name, "_DIR") || strings.HasSuffix(name, "_ROOT") {
			env += "\nOXIDE_MODE=node"
		}
		mistakes = append(mistakes, mistake{"a bad " + name, env, nil, ""})
	}
	for _, test := range mistakes {
		t.Run(test.name, func(t *testing.T) {
			want, _, _ := strings.Cut(cmp.Or(test.want, test.env), "=")
			_, err := ParseConfig(test.args, goodEnv(csitest.Pairs(test.env)), io.Discard)
			if err == nil {
				t.Fatal("accepted")
			}
			if text := err.Error(); !strings.Contains(text, want) || strings.Contains(text, "tweety") ||
				strings.Contains(text, "\n") {
				t.Errorf("got %q; it has to name %s, in one line, without the value", text, want)
			}
		})
	}
}

func TestConfigurationHasDefaults(t *testing.T) {
	c := csitest.Got(ParseConfig(nil, goodEnv(nil), io.Discard))(t)
	if c.Mode != ModeController || c.MaxDisks != 12 || c.SysfsRoot != "/sys" || c.DevRoot != "/dev" ||
		c.DeviceTimeout != 30*time.Second || c.LogLevel != slog.LevelInfo || c.LogJSON ||
		c.MetricsAddress != "" || c.Topology != nil || c.TopologyInstance || c.declaresTopology() ||
		c.Host != "https://silo.sys.example.com" {
		t.Errorf("got %+v", c)
	}
}

func TestAFlagOverridesItsVariable(t *testing.T) {
	c := csitest.Got(ParseConfig([]string{"--mode=node", "--endpoint", "unix:///other/x.sock",
		"--max-disks=8", "--log-level=DEBUG", "--log-format=json", "--topology=rack=r1"},
		goodEnv(map[string]string{"OXIDE_MAX_DISKS": "9", "OXIDE_TOPOLOGY_ZONE": "z1"}), io.Discard))(t)
	want := volume.Segments{volume.TopologyPrefix + "rack": "r1", volume.TopologyPrefix + "zone": "z1"}
	if c.Mode != ModeNode || c.Endpoint != "unix:///other/x.sock" || c.MaxDisks != 8 ||
		c.LogLevel != slog.LevelDebug || !c.LogJSON || !maps.Equal(c.Topology[0], want) {
		t.Errorf("got %+v", c)
	}
}

func TestANodesTopologyFollowsItsSettings(t *testing.T) { // NI-3
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

func TestNodesNeedNoSettingsOfTheRack(t *testing.T) { // D-64
	c, err := ParseConfig([]string{"--mode=node"}, goodEnv(map[string]string{
		"OXIDE_HOST": "", "OXIDE_TOKEN": "", "OXIDE_PROJECT": ""}), io.Discard)
	if err != nil || c.Mode != ModeNode {
		t.Errorf("got %+v, %v", c, err)
	}
}

func TestTheHostSettingBecomesAURL(t *testing.T) {
	for value, want := range map[string]string{
		"silo.sys.example.com":       "https://silo.sys.example.com",
		"https://silo.example.com/":  "https://silo.example.com",
		"http://127.0.0.1:12220":     "http://127.0.0.1:12220",
		"https://[2001:db8::1]:8443": "https://[2001:db8::1]:8443",
	} {
		var c Config
		if err := c.setHost(value); err != nil || c.Host != want {
			t.Errorf("%q becomes %q, %v", value, c.Host, err)
		}
	}
}

func TestEverySettingHasAVariableAndIsInTheHelp(t *testing.T) { // B-23
	var help bytes.Buffer
	if _, err := ParseConfig([]string{"--help"}, goodEnv(nil), &help); !errors.Is(err, flag.ErrHelp) {
		t.Fatalf("got %v", err)
	}
	for _, s := range (&Config{}).settings() {
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

func TestAStartupErrorNamesTheSettingAndNotItsValue(t *testing.T) { // B-26
	dir := t.TempDir()
	junk := filepath.Join(dir, "tweety")
	must(t, os.WriteFile(junk, []byte("no pem, no token"), 0o600))
	good := csitest.Got(ParseConfig(nil, goodEnv(nil), io.Discard))(t)
	good.Endpoint = "unix://" + filepath.Join(dir, "csi.sock")
	missing := "unix://" + dir + "/tweety-missing/x.sock"
	for want, change := range map[string]func(*Config){
		"OXIDE_CA_FILE":         func(c *Config) { c.CAFile = junk },
		"--ca-file":             func(c *Config) { c.CAFile = filepath.Join(dir, "tweety-missing") },
		"OXIDE_TOKEN_FILE":      func(c *Config) { c.TokenFile = junk },
		"--token-file":          func(c *Config) { c.TokenFile = filepath.Join(dir, "tweety-missing") },
		"CSI_ENDPOINT":          func(c *Config) { c.Endpoint = missing },
		"OXIDE_METRICS_ADDRESS": func(c *Config) { c.MetricsAddress = missing },
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

// spokenDefaults has the documented defaults of the settings whose field preset is empty.
var spokenDefaults = map[string]string{
	"OXIDE_CA_FILE": "the system's", "OXIDE_INSTANCE_ID": "SMBIOS", "OXIDE_METRICS_ADDRESS": "none",
	"OXIDE_PPROF_ADDRESS": "none", "OXIDE_LIVENESS_ENDPOINT": "none", "OXIDE_LEAVE_SOCKET": "none",
}

func TestTheDocumentationListsEverySetting(t *testing.T) { // B-37
	text := csitest.Got(os.ReadFile("../docs/configuration.md"))(t)
	_, table, _ := strings.Cut(string(text), "| flag | variable | default | meaning |\n")
	table, _, _ = strings.Cut(table, "\n\n")
	var want []string
	for _, s := range (&Config{}).settings() {
		if strings.HasPrefix(s.env, "OXIDE_TOPOLOGY_") && s.flag == "" {
			// The row of OXIDE_TOPOLOGY names this variable, or only its ending, such as _RACK.
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
