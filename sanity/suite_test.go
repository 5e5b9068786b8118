//go:build linux

package sanity

import (
	"fmt"
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
	describeCSISanity()
	suite.PollProgressAfter = time.Minute
	suite.Timeout = timeLeft(t)
	reporter.NoColor, reporter.SilenceSkips = true, true
	RunSpecs(t, "sanity", suite, reporter)
}

func bullets(lines []string) string {
	var text strings.Builder
	for _, line := range lines {
		fmt.Fprintf(&text, "  %s\n", line)
	}
	return text.String()
}
