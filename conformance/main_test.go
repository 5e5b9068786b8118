//go:build linux

package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// runTimeout limits a whole run of the program on a busy machine.
const runTimeout = 10 * time.Minute

// canary is a token that no rack accepts, and that no program may print.
const canary = "oxide-token-canary-5c1f"

// bed is a simulated rack with the run that builds and starts its programs.
type bed struct {
	*harness.Rack
	run *harness.Run
}

// rackOf starts a simulated rack with TLS, the running instances a and b, and the stopped instance
// helper. Its programs have no race detector. RACE=-race adds it to the test of a whole run on a
// rack with hot-plug, which covers all but interruptions and clean.
func rackOf(t *testing.T, options harness.RackOptions) *bed {
	t.Helper()
	run := harness.RunFor(t)
	run.Plain = true
	return rackIn(t, run, options)
}

func rackIn(t *testing.T, run *harness.Run, options harness.RackOptions) *bed {
	t.Helper()
	options.TLS = true
	options.Instances = []string{"a", "b", "helper"}
	// Some rules need an object of another project, or an image.
	options.Args = append(options.Args, "--project", "other", "--image", "silos=1048576",
		"--image", "sanity/projects=1073741824")
	rack := got(run.StartRack(t.Context(), options))(t)
	t.Cleanup(func() { csitest.Must(t, rack.Stop()) })
	csitest.Must(t, rack.StopInstance(t.Context(), rack.Instance("helper").ID))
	return &bed{rack, run}
}

// got returns the value of a call that must succeed: got(os.Getwd())(t).
func got[T any](value T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		csitest.Must(t, err)
		return value
	}
}

// inside returns a command that runs a script in an instance, as ssh does on a real rack.
func inside(rack *bed, instance string) string {
	guest := rack.Instance(instance).Guest
	return fmt.Sprintf("env OXIDE_SYSFS_ROOT=%s/sys OXIDE_DEV_ROOT=%s/dev sh -c", guest, guest)
}

func environment(rack *bed) map[string]string {
	guest := rack.Instance("a").Guest
	return map[string]string{
		"OXIDE_HOST": rack.URL, "OXIDE_TOKEN": rack.Token, "OXIDE_PROJECT": rack.Project,
		"OXIDE_CA_FILE":                     rack.CA,
		"OXIDE_SYSFS_ROOT":                  filepath.Join(guest, "sys"),
		"OXIDE_DEV_ROOT":                    filepath.Join(guest, "dev"),
		"OXIDE_CONFORMANCE_SIMULATOR_ADMIN": rack.Admin.URL,
		"OXIDE_CONFORMANCE_SECOND":          "b",
		"OXIDE_CONFORMANCE_SECOND_SHELL":    inside(rack, "b"),
		"OXIDE_CONFORMANCE_HELPER":          "helper",
		"OXIDE_CONFORMANCE_GUEST_SHELL":     inside(rack, "helper"),
		"OXIDE_SANITY_DIR":                  rack.Dir,
	}
}

type program struct {
	*exec.Cmd
	out, errs bytes.Buffer
	// folder is the folder of its report. token is a text that the report must not contain.
	folder, token string
}

func prepare(t *testing.T, rack *bed, env map[string]string, args ...string) *program {
	t.Helper()
	path := got(rack.run.Binary(t.Context(), "oxide-conformance"))(t)
	p := &program{Cmd: exec.Command(path, args...), token: rack.Token,
		folder: filepath.Join(t.TempDir(), "report")}
	all := environment(rack)
	all["OXIDE_CONFORMANCE_REPORT"] = p.folder
	maps.Copy(all, env)
	p.Env = harness.Environ()
	for key, value := range all {
		if value != "" {
			p.Env = append(p.Env, key+"="+value)
		}
	}
	p.Stdout, p.Stderr = &p.out, &p.errs
	p.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%v printed\n%s%s", p.Args, tail(p.out.String()), p.errs.String())
		}
	})
	return p
}

func tail(text string) string { return text[max(0, len(text)-8<<10):] }

func (p *program) exit(t *testing.T, want int) {
	t.Helper()
	csitest.Must(t, p.Start())
	p.await(t, want)
}

func (p *program) await(t *testing.T, want int) {
	t.Helper()
	end := time.AfterFunc(runTimeout, func() { _ = p.Process.Signal(syscall.SIGQUIT) })
	defer end.Stop()
	err := p.Wait()
	var exited *exec.ExitError
	if err != nil && !errors.As(err, &exited) {
		t.Fatal(err)
	}
	if got := p.ProcessState.ExitCode(); got != want {
		t.Errorf("%v ended with %d, want %d", p.Args[1:], got, want)
	}
}

// report reads the report that the program wrote, and checks that the token is not in it.
func (p *program) report(t *testing.T) *report.Report {
	t.Helper()
	r := got(report.Read(p.folder))(t)
	if err := filepath.WalkDir(p.folder, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		if strings.Contains(string(text), p.token) {
			t.Errorf("%s has the token", path)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
	if strings.Contains(p.out.String()+p.errs.String(), p.token) {
		t.Error("the program has printed the token")
	}
	return r
}

func statuses(r *report.Report, groups ...string) map[report.Status]int {
	count := map[report.Status]int{}
	for _, result := range r.Results {
		if len(groups) == 0 || slices.Contains(groups, result.Group) {
			count[result.Status]++
		}
	}
	return count
}

// balance records the objects of the rack. The returned function checks that the rack has the same
// objects, unchanged.
func balance(t *testing.T, rack *bed) func() {
	t.Helper()
	before := got(rack.Ledger(t.Context()))(t)
	return func() {
		t.Helper()
		if err := rack.Balance(t.Context(), before); err != nil {
			t.Errorf("the rack is not as before: %s", err)
		}
		now, err := rack.Ledger(t.Context())
		for _, gone := range before.More(now) {
			if kind, _, _ := strings.Cut(gone, " "); slices.Contains([]string{"disk", "snapshot", "image",
				"attachment"}, kind) {
				err = errors.Join(err, errors.New(gone))
			}
		}
		if err != nil {
			t.Errorf("of others there was, and is no more: %s", err)
		}
	}
}

func TestInvalidCommandPrintsOneLineAndChangesNothing(t *testing.T) {
	t.Parallel()
	rack := rackOf(t, harness.RackOptions{})
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
		"one report":                {nil, "diff one", []string{"two reports"}},
		"an argument after version": {nil, "version 2", []string{`"2"`}},
		"missing reports":           {nil, "diff /nowhere /nowhere", []string{"/nowhere"}},
		"an invalid run ID": {set("OXIDE_CA_FILE", "main.go"), "clean --run mine",
			[]string{"8 hexadecimal digits"}},
		"no rack": {set("OXIDE_HOST", "", "OXIDE_PROJECT", ""), "run",
			[]string{"OXIDE_HOST, OXIDE_PROJECT"}},
		"no answer to the question": {nil, "run --only rules", []string{"--yes"}},
		"an unknown token":          {set("OXIDE_TOKEN", canary), "preflight", []string{"fail"}},
		"an unknown certificate":    {set("OXIDE_CA_FILE", ""), "preflight", []string{"fail"}},
		"an unknown project":        {set("OXIDE_PROJECT", "elsewhere"), "preflight", []string{"fail"}},
		"no instance of the rack":   {set("OXIDE_SYSFS_ROOT", "/nowhere"), "preflight", []string{"fail"}},
	} {
		t.Run(name, func(t *testing.T) {
			p := prepare(t, rack, test.env, strings.Fields(test.args)...)
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

// madeNothing checks in the rack's log that no request changed anything but the helper's state.
func madeNothing(t *testing.T, rack *bed) {
	t.Helper()
	for _, r := range got(rack.Admin.Requests(t.Context(), 0))(t) {
		if r.Method != http.MethodGet && r.Status < 300 && r.Operation != "instance_stop" {
			t.Errorf("the program has made something: %+v", r)
		}
	}
}

func TestPreflightReportsProblemsAndCreatesNothing(t *testing.T) {
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
		"a viewer": {harness.RackOptions{}, "viewer", "", ExitUsage, "fail  role ,limited-collaborator"},
		"a silo without room for the rules": {harness.RackOptions{QuotaBytes: 14*gib + 1<<20}, "",
			"--only rules", ExitUsage, "fail  quota ," + room},
		"a silo with room for the rules": {harness.RackOptions{QuotaBytes: 15*gib + 1<<20}, "",
			"--only rules", ExitConforms, "pass  quota ," + room},
	} {
		t.Run(name, func(t *testing.T) {
			rack := rackOf(t, test.options)
			if test.role != "" {
				csitest.Must(t, rack.Admin.Switch(t.Context(), map[string]any{"role": test.role}))
			}
			p := prepare(t, rack, nil, append([]string{"preflight"}, strings.Fields(test.args)...)...)
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

func TestRunRefusesTheAdminListenerOfAnotherRack(t *testing.T) {
	t.Parallel()
	rack, other := rackOf(t, harness.RackOptions{}), rackOf(t, harness.RackOptions{})
	before := got(other.Admin.Requests(t.Context(), 0))(t)
	p := prepare(t, rack, set("OXIDE_CONFORMANCE_SIMULATOR_ADMIN", other.Admin.URL), "run", "--yes")
	p.exit(t, ExitUsage)
	after := got(other.Admin.Requests(t.Context(), 0))(t)
	if !strings.Contains(p.out.String(), "fail  simulator ") || len(after) != len(before) {
		t.Errorf("it does not refuse: %d requests to the other rack", len(after)-len(before))
	}
	madeNothing(t, rack)
}

func TestHelpListsEveryVerbAndSetting(t *testing.T) {
	questions, words := [][]string{{"help"}, {"--help"}, {"-h"}}, []string{}
	for verb := range verbs {
		questions = append(questions, []string{verb, "--help"}, []string{verb, "-h"})
		words = append(words, "oxide-conformance "+verb)
	}
	for _, s := range (&settings{}).all() {
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
	// After the shell is killed, its child sleep keeps the output open.
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

func TestRunChecksNoDataIfAShellReachesTheWrongInstance(t *testing.T) {
	t.Parallel()
	rack := rackOf(t, harness.RackOptions{})
	p := prepare(t, rack, set("OXIDE_CONFORMANCE_SECOND_SHELL", shellOf(t, fmt.Sprintf(
		"case $1 in *agent*) exec %s \"$1\";; esac\nexec %s \"$1\"\n", inside(rack, "a"),
		inside(rack, "b")))), "run", "--yes", "--only", partData)
	p.exit(t, ExitUsage)
	if r := p.report(t); !strings.Contains(r.Why, "--second-shell reaches instance") {
		t.Errorf("%s: %s", r.Verdict, r.Why)
	}
}
