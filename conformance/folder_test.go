//go:build linux

package conformance

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func TestARunPrintsTheFolderThatContainsItsReport(t *testing.T) {
	// A run that begins in the directory of temporary files has its own directory there, too.
	t.Chdir(t.TempDir())
	here, err := os.Getwd()
	csitest.Must(t, err)
	for name, test := range map[string]struct {
		folder string
		damage func(w *job)
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
					Group: partRules, ID: "A01", Name: "x", Status: report.Passed, Tries: 1,
					Extent: report.Extent{{What: "ping", Looked: 1}}}},
					Rack: report.RackFacts{HotPlug: report.HotPlugUnknown}}}
			w.report.Run.ID = w.id
			w.dir = &harness.Run{Dir: filepath.Join(here, workDir(w.id)), Progress: &out}
			csitest.Must(t, os.Mkdir(w.dir.Dir, 0o700))
			csitest.Must(t, w.tryFolder())
			test.damage(w)
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

func TestAReportReplacesNothing(t *testing.T) {
	there := func(path string) error { return os.Mkdir(path, 0o700) }
	for name, create := range map[string]func(path string) error{
		"a folder": there,
		"a site": func(path string) error {
			return errors.Join(there(path), os.WriteFile(filepath.Join(path, "index.html"), nil, 0o600))
		},
		"a file":            func(path string) error { return os.WriteFile(path, nil, 0o600) },
		"a FIFO":            func(path string) error { return unix.Mkfifo(path, 0o600) },
		"a link to nothing": func(path string) error { return os.Symlink(path+"-target", path) },
	} {
		w := &job{settings: &settings{report: filepath.Join(t.TempDir(), "report")},
			report: &report.Report{}}
		csitest.Must(t, w.tryFolder())
		csitest.Must(t, create(w.folder()))
		if err := w.tryFolder(); err == nil || !strings.Contains(err.Error(), "--report") {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := w.writeReport(); !errors.Is(err, report.ErrNotWritten) {
			t.Errorf("%s at the end of a run: %v", name, err)
		}
		if made, err := filepath.Glob(filepath.Join(filepath.Dir(w.folder()), "*", "*")); err != nil ||
			len(made) > 1 {
			t.Errorf("%s: there are %q, %v", name, made, err)
		}
	}
}

// The rack repeats the token in every error, the disks of other users have descriptions, and the
// command that reaches the second instance has a password.
func TestAReportContainsNoCredentialsAndNoDescriptionsOfOthers(t *testing.T) {
	all := []string{"run", "--yes", "--second-shell", "ssh -p " + canary, "--budget=" + canary, "-x"}
	if got := strings.Join(flagsOf(all), " "); got != "run --yes --second-shell --budget" {
		t.Errorf("of the command line it has %q", got)
	}
	own := mark{Run: "1a2b3c4d"}
	text, err := json.MarshalIndent(map[string]string{"description": own.description()}, "", " ")
	csitest.Must(t, err)
	for answer, want := range map[string]string{
		`{"description": "my \"` + canary + `", "name":"x"}`: `{"description":"(not kept)", "name":"x"}`,
		`{"description":"` + canary:                          `{"description":"(not kept)`,
		string(text):                                         string(text),
	} {
		for operation, want := range map[string]string{"disk_view": want, "disk_list": ""} {
			got := answers([]rules.RecordedCall{{Operation: operation, Status: 200, Answer: answer}})
			if got[0].Answer != want {
				t.Errorf("of the answer %s to %s it has %s", answer, operation, got[0].Answer)
			}
		}
	}
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusForbidden)
		_, _ = fmt.Fprintf(w, `{"message":"no %s","request_id":"1"}`, r.Header.Get("Authorization"))
	}))
	defer front.Close()
	for _, host := range []string{front.URL, strings.Replace(front.URL, "//", "//me:"+canary+"@", 1),
		"https://me:%zz" + canary + "@rack"} {
		var out strings.Builder
		p := Program{Args: []string{"preflight"}, Stdout: &out, Stderr: &out,
			Getenv: func(name string) string {
				return set("OXIDE_HOST", host, "OXIDE_TOKEN", canary, "OXIDE_PROJECT", "p")[name]
			}}
		if status := p.Main(t.Context()); status != ExitUsage || strings.Contains(out.String(), canary) {
			t.Errorf("with the host %s: %d, %s", host, status, out.String())
		}
	}
}

func TestARunEndsInOrderWhenItsDirectoryIsRemoved(t *testing.T) {
	t.Parallel()
	run := plainRun(t)
	rack := rackOf(t, run, harness.RackOptions{})
	check := balance(t.Context(), t, rack)
	p := prepare(t, run, rack, asOthersHave(rack))
	p.Dir = filepath.Join(t.TempDir(), "here")
	csitest.Must(t, os.Mkdir(p.Dir, 0o700))
	c := begin(t, run, rack, p, death{how: killedLater, part: "ext4", at: 2})
	<-c.made // its first disk
	csitest.Must(t, os.Remove(p.Dir))
	if <-c.ended; c.exit != nil {
		t.Error(c.exit)
	}
	check()
}
