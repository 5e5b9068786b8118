package sanity

import (
	"os"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

// TestSanity runs csi-sanity in all combinations and our own specs against simulated racks.
// Choose a part with -ginkgo.label-filter ('ext4 && split') or -ginkgo.focus.
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
	for _, program := range []string{"oxide-simulator", "oxide-csi-plugin"} {
		if _, err := run.Binary(t.Context(), program); err != nil {
			t.Fatal(err)
		}
	}
	RegisterFailHandler(Fail)
	watchSpecs()
	RegisterSimulated()
	auditSuite("sanity", csiSanitySkips, os.Stdout)

	suite, reporter := GinkgoConfiguration()
	suite.PollProgressAfter = time.Minute
	suite.Timeout = 20 * time.Minute
	reporter.NoColor = true
	RunSpecs(t, "sanity", suite, reporter)
}
