//go:build linux

package sanity

import (
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
	. "github.com/onsi/gomega"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/csisuite"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

func TestMain(m *testing.M) { namespace.Main(m) }

// TestSanity runs csi-sanity in all combinations and our own specs against simulated racks. It
// runs the whole suite in parts, several at a time, or the specs that -ginkgo.label-filter ('ext4
// && split') or -ginkgo.focus chooses.
//
// The specs run in this binary, which is started again in a mount namespace of its own. So a run
// sees no mounts of another run, and the mounts of a failed spec disappear when the run ends.
func TestSanity(t *testing.T) {
	run := harness.RunFor(t)
	theRun = run
	suite, reporter := GinkgoConfiguration()
	switch {
	case os.Getenv(runsSpecs) != "":
		runSpecs(t, suite, reporter)
	case csisuite.FullRun(suite):
		runParts(t, run)
	default:
		runChosen(t, run)
	}
}

// runSpecs runs the chosen specs in this process.
func runSpecs(t *testing.T, suite types.SuiteConfig, reporter types.ReporterConfig) {
	RegisterFailHandler(Fail)
	csisuite.Quiet()
	watchSpecs()
	reportProgress(os.Getenv(progressVariable))
	describeCSISanity()
	auditSuite("sanity", csisuite.Skips, os.Stdout)
	suite.PollProgressAfter = time.Minute
	suite.Timeout = timeLeft(t)
	reporter.NoColor, reporter.SilenceSkips = true, true
	RunSpecs(t, "sanity", suite, reporter)
}

// auditSuite registers the last step of the suite: it prints the figures, and fails if a skip has
// no explanation.
func auditSuite(name string, skips []csisuite.ExplainedSkip, out io.Writer) {
	ReportAfterSuite("every skip is explained", func(report types.Report) {
		audit := csisuite.NewAudit(skips)
		audit.Add(report)
		faults := audit.Faults
		if csisuite.FullRun(report.SuiteConfig) {
			faults = append(faults, audit.Unused()...)
		}
		fmt.Fprintf(out, "\n%s%s\n", bullets(audit.Explanations()), audit.Line(name))
		if len(faults) > 0 {
			Fail(fmt.Sprintf("%d skips are not in order:\n%s", len(faults), bullets(faults)))
		}
	})
}

func bullets(lines []string) string {
	var text strings.Builder
	for _, line := range lines {
		fmt.Fprintf(&text, "  %s\n", line)
	}
	return text.String()
}
