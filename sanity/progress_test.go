//go:build linux

package sanity

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
	. "github.com/onsi/gomega"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

const (
	// progressVariable names the file to which a part appends a byte for each of its specs: when the
	// part begins, and again when the spec has passed or failed.
	progressVariable           = "OXIDE_SANITY_PROGRESS"
	willRun, hasPassed, failed = "-", ".", "F"
	// progressInterval is the time between two lines of progress.
	progressInterval = 15 * time.Second
	// endMargin is the time between the end of a suite and the timeout of its process, which the
	// suite needs to write its report.
	endMargin = time.Minute
)

// reportProgress makes this process report the progress of its specs. Call it at the top of the
// suite.
func reportProgress(path string) {
	if path == "" {
		return
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	Expect(err).NotTo(HaveOccurred())
	say := func(s string) {
		Expect(errOf(file.WriteString(s))).NotTo(HaveOccurred())
	}
	ReportBeforeSuite(func(r Report) { say(strings.Repeat(willRun, r.PreRunStats.SpecsThatWillRun)) })
	ReportAfterEach(func(r SpecReport) {
		switch {
		case r.Failed():
			say(failed)
		case r.NumAttempts > 0:
			say(hasPassed)
		}
	})
}

// watchProgress prints the progress of the parts that report to files in a directory, until ctx
// ends.
func watchProgress(ctx context.Context, run *harness.Run, dir string) {
	start := time.Now()
	tick := time.NewTicker(progressInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			run.Say("%s, %s", progressIn(dir), time.Since(start).Round(time.Second))
		}
	}
}

func progressIn(dir string) string {
	files, _ := filepath.Glob(filepath.Join(dir, "*.progress"))
	var all []byte
	for _, file := range files {
		b, _ := os.ReadFile(file)
		all = append(all, b...)
	}
	count := func(s string) int { return bytes.Count(all, []byte(s)) }
	return fmt.Sprintf("%d of %d specs of the parts that have begun are done, %d failed",
		count(hasPassed)+count(failed), count(willRun), count(failed))
}

// timeLeft returns the time that a process may run if this test starts it now; 0 means no limit.
func timeLeft(t *testing.T) time.Duration {
	deadline, ok := t.Deadline()
	if !ok {
		return 0
	}
	return max(time.Until(deadline)-endMargin, time.Second)
}

// notRun names the specs that a filter selects and that did not run.
func notRun(report types.Report, filter string) []string {
	chosen := types.MustParseLabelFilter(filter)
	var names []string
	for _, s := range report.SpecReports {
		if s.LeafNodeType.Is(types.NodeTypeIt) && s.NumAttempts == 0 &&
			s.State != types.SpecStatePending && chosen(s.Labels()) {
			names = append(names, s.FullText())
		}
	}
	return names
}

func TestSpecsThatDidNotRunBeforeTheTimeoutAreNamed(t *testing.T) {
	spec := func(name, label string, attempts int, state types.SpecState) types.SpecReport {
		return types.SpecReport{LeafNodeType: types.NodeTypeIt, LeafNodeText: name,
			LeafNodeLabels: []string{label}, NumAttempts: attempts, State: state}
	}
	report := types.Report{SpecReports: types.SpecReports{
		spec("passed", "own", 1, types.SpecStatePassed),
		spec("skipped itself", "own", 1, types.SpecStateSkipped),
		spec("pending", "own", 0, types.SpecStatePending),
		spec("too late", "own", 0, types.SpecStateSkipped),
		spec("of another part", "other", 0, types.SpecStateSkipped),
	}}
	if got := notRun(report, "own"); len(got) != 1 || got[0] != "too late" {
		t.Errorf("got %q", got)
	}
}

func TestTheProgressCountsThePartsThatHaveBegun(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"a.progress": "---..F", "b.progress": "--.", "c.json": "{}",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want := "4 of 5 specs of the parts that have begun are done, 1 failed"
	if got := progressIn(dir); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
