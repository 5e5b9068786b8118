//go:build linux

package conformance

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
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
			must(t, os.WriteFile(w.folder(), nil, 0o600))
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
			must(t, os.Mkdir(w.dir.Dir, 0o700))
			must(t, w.tryFolder())
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
	must(t, w.tryFolder())
	must(t, os.WriteFile(filepath.Join(w.folder(), "report.json"), nil, 0o600))
	if err := w.tryFolder(); err == nil || !strings.Contains(err.Error(), "--report") {
		t.Errorf("into the folder of another report: %v", err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestARunEndsInOrderWhenItsDirectoryIsRemoved(t *testing.T) {
	run := harness.RunFor(t)
	rack := rackOf(t, run, harness.RackOptions{})
	check := balance(t.Context(), t, rack)
	p := prepare(t, run, rack, nil, "run", "--yes", "--only", "rules,ext4")
	p.Dir = filepath.Join(t.TempDir(), "here")
	if err := os.Mkdir(p.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	first := lastRequest(t, rack, 0)
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	if err := harness.Await(t.Context(), runTimeout, func() error {
		if lastRequest(t, rack, first)-first < 100 {
			return errors.New("the rules are not being checked yet")
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(p.Dir); err != nil {
		t.Fatal(err)
	}
	p.await(t, ExitConforms)
	check()
}
