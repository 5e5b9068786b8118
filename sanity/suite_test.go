package sanity

import (
	"os"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
	. "github.com/onsi/gomega"
)

// TestSanity runs csi-sanity in all combinations and our own specs against simulated racks. The
// whole suite is run in parts, side by side; a part that is chosen with -ginkgo.label-filter
// ('ext4 && split') or -ginkgo.focus runs in this process.
func TestSanity(t *testing.T) {
	run, err := shareRun()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			run.Failed()
		}
		if err := run.Close(); err != nil {
			t.Error(err)
		}
	})
	suite, reporter := GinkgoConfiguration()
	if fullRun(suite) {
		runParts(t, run)
		return
	}
	runSpecs(t, suite, reporter)
}

// runSpecs runs the chosen specs in this process.
func runSpecs(t *testing.T, suite types.SuiteConfig, reporter types.ReporterConfig) {
	RegisterFailHandler(Fail)
	quietCSISanity()
	watchSpecs()
	RegisterSimulated()
	auditSuite("sanity", csiSanitySkips, os.Stdout)
	suite.PollProgressAfter = time.Minute
	suite.Timeout = partTimeout
	reporter.NoColor, reporter.SilenceSkips = true, true
	RunSpecs(t, "sanity", suite, reporter)
}
