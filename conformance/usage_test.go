//go:build linux

package conformance

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func TestAnImpossibleCommandEndsWithOneLineAndChangesNothing(t *testing.T) {
	t.Parallel()
	run := plainRun(t)
	rack := rackOf(t, run, harness.RackOptions{})
	for name, test := range map[string]struct {
		env  map[string]string
		args string
		says []string
	}{
		"no such verb":              {nil, "purge", []string{`"purge"`, "preflight, run, clean, diff"}},
		"no such flag":              {nil, "run --fast", []string{"fast"}},
		"no such part":              {nil, "run --only zfs", []string{`"zfs"`, "rules, ext4, xfs"}},
		"nothing selected":          {nil, "run --only ,", []string{"nothing", "rules, ext4, xfs"}},
		"an argument too many":      {nil, "run all", []string{`"all"`}},
		"a budget without numbers":  {nil, "run --budget lots", []string{"20,40"}},
		"a budget too small":        {nil, "run --yes --only ext4 --budget 3,3", []string{"fail"}},
		"an invalid run ID":         {nil, "clean --run mine", []string{"8 hexadecimal digits"}},
		"one report":                {nil, "diff one", []string{"two reports"}},
		"an argument after version": {nil, "version 2", []string{`"2"`}},
		"missing reports":           {nil, "diff /nowhere /nowhere", []string{"/nowhere"}},
		"no rack": {set("OXIDE_HOST", "", "OXIDE_PROJECT", ""), "run",
			[]string{"OXIDE_HOST, OXIDE_PROJECT"}},
		"no answer to the question": {nil, "run --only rules", []string{"--yes"}},
		"an unknown token":          {set("OXIDE_TOKEN", canary), "preflight", []string{"fail"}},
		"an unknown certificate":    {set("OXIDE_CA_FILE", ""), "preflight", []string{"fail"}},
		"an unknown project":        {set("OXIDE_PROJECT", "elsewhere"), "preflight", []string{"fail"}},
		"no instance of the rack":   {set("OXIDE_SYSFS_ROOT", "/nowhere"), "preflight", []string{"fail"}},
	} {
		t.Run(name, func(t *testing.T) {
			p := prepare(t, run, rack, test.env, strings.Fields(test.args)...)
			p.exit(t, ExitUsage)
			if said := p.errs.String(); !strings.HasPrefix(said, "oxide-conformance: ") ||
				strings.Count(said, "\n") != 1 {
				t.Errorf("expected one line on standard error; found %q", said)
			}
			if strings.Contains(p.out.String()+p.errs.String(), canary) {
				t.Error("it prints the token")
			}
			for _, word := range test.says {
				if !strings.Contains(p.errs.String(), word) {
					t.Errorf("it does not say %q: %s", word, p.errs.String())
				}
			}
		})
	}
	madeNothing(t, rack)
}

// madeNothing demands that nothing was changed on a rack since its helper was stopped.
func madeNothing(t *testing.T, rack *harness.Rack) {
	t.Helper()
	requests, err := rack.Admin.Requests(t.Context(), 0)
	csitest.Must(t, err)
	for _, r := range requests {
		if r.Method != http.MethodGet && r.Status < 300 && r.Operation != "instance_stop" {
			t.Errorf("the program has made something: %+v", r)
		}
	}
}

func TestAPreflightCreatesNothingAndReportsWhatARunWouldFind(t *testing.T) {
	run := plainRun(t)
	const gib, room = harness.GiB, "the run has at most 15 GiB at one time"
	for name, test := range map[string]struct {
		options harness.RackOptions
		role    string
		args    string
		exit    int
		says    string // separated by commas
	}{
		"a rack in order": {harness.RackOptions{Args: []string{"--token-ttl", "240h"}}, "", "",
			ExitConforms, "pass  host ,pass  simulator ,pass  certificate ,pass  api-version ," +
				"warn  token's expiry ,pass  role ,pass  quota ,pass  this instance ,pass  second instance ," +
				"pass  helper ,pass  tools ,pass  kernel ,skip  hot-plug ,pass  latency ,takes about "},
		"a viewer": {harness.RackOptions{}, "viewer", "", ExitUsage,
			"fail  role ,limited-collaborator"},
		"a silo without room for the rules": {harness.RackOptions{QuotaBytes: 14*gib + 1<<20}, "",
			"--only rules", ExitUsage, "fail  quota ," + room},
		"a silo with room for the rules": {harness.RackOptions{QuotaBytes: 15*gib + 1<<20}, "",
			"--only rules", ExitConforms, "pass  quota ," + room},
	} {
		t.Run(name, func(t *testing.T) {
			rack := rackOf(t, run, test.options)
			if test.role != "" {
				csitest.Must(t, rack.Admin.Switch(t.Context(), map[string]any{"role": test.role}))
			}
			p := prepare(t, run, rack, nil, append([]string{"preflight"}, strings.Fields(test.args)...)...)
			p.exit(t, test.exit)
			for want := range strings.SplitSeq(test.says, ",") {
				if !strings.Contains(p.out.String(), want) {
					t.Errorf("the preflight does not say %q", want)
				}
			}
			madeNothing(t, rack)
		})
	}
}

func TestTheAdminListenerOfAnotherRackIsRefused(t *testing.T) {
	t.Parallel()
	run := plainRun(t)
	rack, other := rackOf(t, run, harness.RackOptions{}), rackOf(t, run, harness.RackOptions{})
	before, err := other.Admin.Requests(t.Context(), 0)
	csitest.Must(t, err)
	p := prepare(t, run, rack, set("OXIDE_CONFORMANCE_SIMULATOR_ADMIN", other.Admin.URL),
		"run", "--yes")
	p.exit(t, ExitUsage)
	after, err := other.Admin.Requests(t.Context(), 0)
	csitest.Must(t, err)
	if !strings.Contains(p.out.String(), "fail  simulator ") || len(after) != len(before) {
		t.Errorf("it does not refuse: %d requests to the other rack", len(after)-len(before))
	}
	madeNothing(t, rack)
}

func TestEveryVerbPrintsTheHelpWithEveryVerbAndSetting(t *testing.T) {
	questions, words := [][]string{{"help"}, {"--help"}, {"-h"}}, []string{}
	for verb := range verbs {
		questions = append(questions, []string{verb, "--help"}, []string{verb, "-h"})
		words = append(words, "oxide-conformance "+verb)
	}
	for _, s := range allSettings {
		words = append(words, s.flag, s.env)
	}
	for _, args := range questions {
		var out, errs strings.Builder
		p := Program{Args: args, Getenv: func(string) string { return "" }, Stdout: &out, Stderr: &errs}
		if status := p.Main(t.Context()); status != ExitConforms || errs.Len() > 0 {
			t.Errorf("%s: %d, %s", args, status, errs.String())
		}
		for _, word := range words {
			if !strings.Contains(out.String(), word) {
				t.Errorf("%s: the help does not have %s", args, word)
			}
		}
	}
}

// set returns an environment from alternating names and values.
func set(pairs ...string) map[string]string {
	env := map[string]string{}
	for i := 0; i+1 < len(pairs); i += 2 {
		env[pairs[i]] = pairs[i+1]
	}
	return env
}

// shellOf writes an executable file with a script, and returns its command.
func shellOf(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "shell")
	csitest.Must(t, os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o700))
	return path
}

func TestAHangingShellDoesNotDelayAnInterrupt(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	const hangs = 15 * time.Second
	began := time.Now()
	// The process that holds the output open is a child of the shell.
	shell := shellOf(t, fmt.Sprintf("sleep %d & wait", hangs/time.Second))
	got := askShell(ctx, "--second-shell", shell, &oxide.Instance{Name: "b"})
	if took := time.Since(began); got.Status != report.Fail || took > hangs/2 {
		t.Errorf("%s after %s", got.Status, took)
	}
}

func TestAShellDoesNotGetTheToken(t *testing.T) {
	t.Setenv("OXIDE_TOKEN", "oxide-token-of-the-rack")
	shell := shellOf(t, `echo 0; echo "$OXIDE_TOKEN"`)
	got := askShell(t.Context(), "--second-shell", shell, &oxide.Instance{Name: "b", Id: "b"})
	if got.Status != report.Fail || !strings.Contains(got.Found, `found ["0"]`) {
		t.Errorf("the shell says %s: %s", got.Status, got.Found)
	}
}

func TestAShellThatReachesAnotherInstanceLaterChecksNoData(t *testing.T) {
	t.Parallel()
	run := plainRun(t)
	rack := rackOf(t, run, harness.RackOptions{})
	p := prepare(t, run, rack, set("OXIDE_CONFORMANCE_SECOND_SHELL", shellOf(t, fmt.Sprintf(
		"case $1 in *agent*) exec %s \"$1\";; esac\nexec %s \"$1\"\n", inside(rack, "a"),
		inside(rack, "b")))), "run", "--yes", "--only", partData)
	p.exit(t, ExitUsage)
	if r := p.report(t); !strings.Contains(r.Why, "--second-shell reaches instance") {
		t.Errorf("%s: %s", r.Verdict, r.Why)
	}
}
