//go:build linux

package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// runTimeout limits a whole run of the program on a busy machine.
const runTimeout = 10 * time.Minute

// canary is a token that no rack accepts, and that no program may print.
const canary = "oxide-token-canary-5c1f"

// plainRun makes a run whose programs have no race detector. With RACE=-race, the whole run on a
// rack with hot-plug has it, which contains everything but interruptions and clean.
func plainRun(t *testing.T) *harness.Run {
	t.Helper()
	run := harness.RunFor(t)
	run.Plain = true
	return run
}

// rackOf starts a simulated rack with TLS and the instances a and b, and helper, which is
// stopped.
func rackOf(t *testing.T, run *harness.Run, options harness.RackOptions) *harness.Rack {
	t.Helper()
	options.TLS = true
	options.Instances = []string{"a", "b", "helper"}
	// Some rules need an object of another project, or an image.
	options.Args = append(options.Args, "--project", "other", "--image", "silos=1048576",
		"--image", "sanity/projects=1073741824")
	rack, err := run.StartRack(t.Context(), options)
	if err == nil {
		t.Cleanup(func() { csitest.Must(t, rack.Stop()) })
		err = rack.StopInstance(t.Context(), rack.Instance("helper").ID)
	}
	csitest.Must(t, err)
	return rack
}

// inside returns a command that runs a script in an instance, as ssh does on a real rack.
func inside(rack *harness.Rack, instance string) string {
	guest := rack.Instance(instance).Guest
	return fmt.Sprintf("env OXIDE_SYSFS_ROOT=%s/sys OXIDE_DEV_ROOT=%s/dev sh -c", guest, guest)
}

// environment returns the variables that an operator sets in the instance a.
func environment(rack *harness.Rack) map[string]string {
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

// program is one start of oxide-conformance.
type program struct {
	*exec.Cmd
	out, errs bytes.Buffer
	// folder is the folder of its report, and token a text that the report must not contain.
	folder, token string
}

// prepare prepares one start of the program.
func prepare(t *testing.T, run *harness.Run, rack *harness.Rack, env map[string]string,
	args ...string,
) *program {
	t.Helper()
	path, err := run.Binary(t.Context(), "oxide-conformance")
	csitest.Must(t, err)
	p := &program{Cmd: exec.Command(path, args...), folder: filepath.Join(t.TempDir(), "report")}
	all := map[string]string{}
	if rack != nil {
		all, p.token = environment(rack), rack.Token
		all["OXIDE_CONFORMANCE_REPORT"] = p.folder
	}
	for key, value := range env {
		all[key] = value
	}
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

// exit runs the program and demands an exit status.
func (p *program) exit(t *testing.T, want int) {
	t.Helper()
	csitest.Must(t, p.Start())
	p.await(t, want)
}

// await waits for the end of the program and demands an exit status.
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

// report reads the report that the program wrote, and demands that the token is not in it.
func (p *program) report(t *testing.T) *report.Report {
	t.Helper()
	r, err := report.Read(p.folder)
	csitest.Must(t, err)
	err = filepath.WalkDir(p.folder, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		if strings.Contains(string(text), p.token) {
			t.Errorf("%s has the token", path)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	if strings.Contains(p.out.String()+p.errs.String(), p.token) {
		t.Error("the program has printed the token")
	}
	return r
}

// statuses counts the results of some groups of a report, by status.
func statuses(r *report.Report, groups ...string) map[report.Status]int {
	count := map[report.Status]int{}
	for _, result := range r.Results {
		if len(groups) == 0 || slices.Contains(groups, result.Group) {
			count[result.Status]++
		}
	}
	return count
}

// balance records the objects of the rack. The returned function demands that the rack has the same
// objects, unchanged.
func balance(ctx context.Context, t *testing.T, rack *harness.Rack) func() {
	t.Helper()
	before, err := rack.Ledger(ctx)
	csitest.Must(t, err)
	return func() {
		t.Helper()
		if err := rack.Balance(ctx, before); err != nil {
			t.Errorf("the rack is not as before: %s", err)
		}
		now, err := rack.Ledger(ctx)
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
