package keeper

import (
	"log/slog"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

// complete is an environment that suffices for every duty.
var complete = map[string]string{"OXIDE_HOST": "https://rack.example.com",
	"OXIDE_PROJECT": racktest.Project, "OXIDE_TOKEN": racktest.Token, "K8S_NODE_NAME": "z",
	"K8S_NAMESPACE": "oxide"}

func env(changed ...string) func(string) string {
	set := maps.Clone(complete)
	for i := 0; i < len(changed); i += 2 {
		set[changed[i]] = changed[i+1]
	}
	return func(name string) string { return set[name] }
}

func TestSettingsAreReadFromTheArgumentsAndTheEnvironment(t *testing.T) {
	args := []string{"--cold-attach", "--settle=1s", "--window=0 2 * * 6", "--window-length=2h",
		"--log-format=json", "--log-level=warn", "--leader-election-lease-duration=30s"}
	s := try(ParseSettings(args, env("OXIDE_TOKEN", "", "OXIDE_TOKEN_FILE", "/token ",
		"OXIDE_CA_FILE", "/ca.pem"), nil))(t)
	if !s.ColdAttach || s.Fence || s.DryRun || s.Settle != time.Second ||
		s.MinInterval != 10*time.Minute || s.Window.String() != `"0 2 * * 6" for 2h0m0s` ||
		s.NodeName != "z" || s.LeaseNamespace != "oxide" || s.LeaseDuration != 30*time.Second ||
		!s.LogJSON || s.LogLevel != slog.LevelWarn || s.TokenFile != "/token" ||
		s.Rack.CAFile != "/ca.pem" || s.Rack.Host != "https://rack.example.com" {
		t.Errorf("the settings are %+v", s)
	}
	s = try(ParseSettings([]string{"--startup-taint", "--node-name=y",
		"--leader-election-namespace=there"}, env(), nil))(t)
	if s.NodeName != "y" || s.LeaseNamespace != "there" || s.Window != nil || s.Token == "" {
		t.Errorf("the settings are %+v", s)
	}
}

func TestSettingsThatCannotWorkAreRefused(t *testing.T) {
	for _, c := range []struct {
		args string // after --cold-attach, separated by "|"
		env  []string
		want string
	}{
		{"--drain-timeout=0s", nil, "--drain-timeout is 0s; it has to be positive"},
		{"--settle=-1s", nil, "--settle is -1s; it must not be negative"},
		{"--fence", nil, "--fence is part of --leaving-nodes"},
		{"", []string{"K8S_NODE_NAME", ""}, "K8S_NODE_NAME"},
		{"", []string{"K8S_NAMESPACE", ""}, "K8S_NAMESPACE"},
		{"--leader-election-lease-duration=2s", nil, "has to be 3s at least"},
		{"--cold-attach=false", nil, "no duty is set"},
		{"--window=every night", nil, "--window has to be a cron expression of five fields"},
		{"--window=@every 1h", nil, "--window has to be a cron expression of five fields"},
		{"--window=CRON_TZ=Moon/Tycho 0 2 * * 6", nil, "--window has to be a cron expression"},
		{"--window=0 2 30 2 *", nil, "--window has to be a time that comes"},
		{"--window=0 2 * * 6|--window-length=0s", nil, "--window has to have a positive --window-length"},
		{"--log-format=xml", nil, "--log-format has to be text or json"},
		{"--log-level=loud", nil, "flag -log-level"},
		{"now", nil, "expected 0 arguments beside flags, found 1"},
		{"", []string{"OXIDE_HOST", ""}, "OXIDE_HOST has to be an address"},
		{"", []string{"OXIDE_TOKEN", ""}, "OXIDE_TOKEN_FILE is not set"},
	} {
		t.Run(c.want, func(t *testing.T) {
			args := []string{"--cold-attach"}
			if c.args != "" {
				args = append(args, strings.Split(c.args, "|")...)
			}
			_, err := ParseSettings(args, env(c.env...), nil)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("the error of %q is %v", args, err)
			}
			if err != nil && strings.Contains(err.Error(), racktest.Token) {
				t.Error("the error shows the token")
			}
		})
	}
}

func TestAWindowIsOpenFromItsBeginningForItsLength(t *testing.T) {
	for _, c := range []struct {
		name, window string
		length       time.Duration
		at           string
		open         bool
	}{
		{"before it", "0 2 * * 6", time.Hour, "2030-01-05T01:59:59Z", false},
		{"at its beginning", "0 2 * * 6", time.Hour, "2030-01-05T02:00:00Z", true},
		{"at its end", "0 2 * * 6", time.Hour, "2030-01-05T03:00:00Z", false},
		{"in UTC, wherever the clock is", "0 2 * * 6", time.Hour, "2030-01-05T03:30:00+01:00", true},
		{"beyond midnight", "30 23 * * *", time.Hour, "2030-01-05T00:15:00Z", true},
		{"in winter", "CRON_TZ=Europe/Zurich 0 2 * * *", time.Hour, "2030-01-05T01:30:00Z", true},
		{"in summer", "CRON_TZ=Europe/Zurich 0 2 * * *", time.Hour, "2030-07-05T00:30:00Z", true},
		{"over the day's 25th hour", "CRON_TZ=Europe/Zurich 0 1 * * *", 3 * time.Hour,
			"2030-10-27T01:59:59Z", true}, // the second 2:59 of the day
		{"three hours are three hours", "CRON_TZ=Europe/Zurich 0 1 * * *", 3 * time.Hour,
			"2030-10-27T02:00:00Z", false},
		{"over the hour that is left out", "CRON_TZ=Europe/Zurich 0 1 * * *", 2 * time.Hour,
			"2030-03-31T01:30:00Z", true}, // 3:30 of the day
		{"on the 29th of February of another year", "0 2 29 2 *", time.Hour, "2031-03-01T02:30:00Z",
			false},
		{"when the next is in more than five years", "0 2 29 2 *", time.Hour, "2096-03-01T02:30:00Z",
			false},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := try(ParseWindow(c.window, c.length))(t)
			if got := w.open(try(time.Parse(time.RFC3339, c.at))(t)); got != c.open {
				t.Errorf("%s is open at %s: %v", w, c.at, got)
			}
		})
	}
	if !(*Window)(nil).open(begin) {
		t.Error("without a window, operations do not begin")
	}
}
