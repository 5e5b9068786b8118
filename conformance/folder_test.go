//go:build linux

package conformance

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func TestARunPrintsTheFolderThatContainsItsReport(t *testing.T) {
	// A run that begins in the directory of temporary files has its own directory there, too.
	t.Chdir(t.TempDir())
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		folder string
		spoil  func(w *job)
		status int
		says   string
	}{
		"next to the run's directory": {"", func(*job) {}, ExitConforms, ""},
		"in a folder that cannot be written": {"gone", func(w *job) {
			csitest.Must(t, os.WriteFile(w.folder(), nil, 0o600))
		}, ExitUsage, "folder of the report"},
		"a report that does not add up": {"odd", func(w *job) {
			w.report.Results = append(w.report.Results, w.report.Results[0])
		}, ExitUsage, "add up"},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			w := &job{Program: &Program{Stdout: &out}, settings: &settings{report: test.folder},
				operator: operator{id: newRunID()}, budget: newBudget(amount{1, 1}),
				report: &report.Report{Schema: report.SchemaVersion, Results: []report.Result{{
					Group: partRules, ID: "A01", Name: "x", Status: report.Passed, Tries: 1}},
					Rack: report.RackFacts{HotPlug: report.HotPlugUnknown}}}
			w.report.Run.ID = w.id
			w.dir = &harness.Run{Dir: filepath.Join(here, workDir(w.id)), Progress: &out}
			csitest.Must(t, os.Mkdir(w.dir.Dir, 0o700))
			csitest.Must(t, w.tryFolder())
			test.spoil(w)
			status, err := w.finish(t.Context())
			if status != test.status || (err != nil) != (test.says != "") ||
				err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("ended with %d, %v", status, err)
			}
			_, line, _ := strings.Cut(out.String(), "The report: ")
			page, _, _ := strings.Cut(line, "\n")
			text, err := os.ReadFile(page)
			if err != nil || !strings.Contains(string(text), w.id) {
				t.Errorf("it says that its report is %s: %v", page, err)
			}
		})
	}
}

func TestARunDoesNotReplaceTheReportOfAnother(t *testing.T) {
	w := &job{settings: &settings{report: t.TempDir()}}
	csitest.Must(t, w.tryFolder())
	csitest.Must(t, os.WriteFile(filepath.Join(w.folder(), "report.json"), nil, 0o600))
	if err := w.tryFolder(); err == nil || !strings.Contains(err.Error(), "--report") {
		t.Errorf("into the folder of another report: %v", err)
	}
}

func TestARunEndsInOrderWhenItsDirectoryIsRemoved(t *testing.T) {
	t.Parallel()
	run := plainRun(t)
	rack := rackOf(t, run, harness.RackOptions{})
	check := balance(t.Context(), t, rack)
	hold := func(hold string) {
		csitest.Must(t, rack.Admin.Switch(t.Context(), map[string]any{"create_hold": hold}))
	}
	hold("1h") // the run waits for its first disk
	p := prepare(t, run, rack, nil, "run", "--yes", "--only", "ext4")
	p.Dir = filepath.Join(t.TempDir(), "here")
	if err := os.Mkdir(p.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	if err := harness.Await(t.Context(), runTimeout, func() error {
		disks, err := rack.Client.DiskListAllPages(t.Context(),
			oxide.DiskListParams{Project: oxide.NameOrId(rack.Project)})
		if err == nil && len(disks) == 0 {
			err = errors.New("the run has not begun to create its first disk")
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(p.Dir); err != nil {
		t.Fatal(err)
	}
	hold("0s")
	p.await(t, ExitConforms)
	check()
}
