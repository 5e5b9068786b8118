//go:build linux

package sanity

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	csisanity "github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	. "github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
	. "github.com/onsi/gomega"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/csisuite"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

func TestMain(m *testing.M) { namespace.Main(m) }

// TestSanity runs csi-sanity in all combinations and our own specs against simulated racks. It
// runs the whole suite in parts, several at a time, or only the specs that are chosen by
// -ginkgo.label-filter ('ext4 && split') or -ginkgo.focus.
//
// The specs run in further processes of this binary, each in a mount namespace of its own. So a run
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

// describeCSISanity registers csi-sanity's suite once for each combination. Each has a rack of its
// own: csi-sanity uses the same volume names each time, so two suites cannot share a project.
func describeCSISanity() {
	for _, c := range csisuite.Combinations() {
		Describe("csi-sanity over "+c.String(), Ordered, ContinueOnFailure, c.Labels(), func() {
			config := c.Config()
			var (
				rack    *harness.Rack
				plugins []*harness.Plugin
				start   harness.Ledger
				suite   *csisanity.TestContext
			)
			BeforeAll(func(ctx SpecContext) {
				rack = startRack(ctx, harness.RackOptions{})
				plugins = startPlugins(ctx, c, rack, config)
				csisuite.Place(config, rack.Dir)
				var err error
				start, err = rack.Ledger(ctx, plugins...)
				Expect(err).NotTo(HaveOccurred())
			})
			AfterAll(func(ctx SpecContext) {
				if start == nil {
					return // the rack or the driver did not start
				}
				suite.Finalize()
				Expect(rack.Balance(ctx, start, plugins...)).To(Succeed(),
					"csi-sanity over %s has leaked", c)
			})
			suite = csisanity.GinkgoTest(config)
		})
	}
}

// startPlugins starts the driver's processes for the combination and configures their addresses for
// csi-sanity.
func startPlugins(
	ctx context.Context, c csisuite.Combination, rack *harness.Rack, config *csisanity.TestConfig,
) []*harness.Plugin {
	GinkgoHelper()
	if !c.Split {
		all := startPlugin(ctx, rack, harness.PluginOptions{})
		config.Address = all.Endpoint
		return []*harness.Plugin{all}
	}
	controller := startPlugin(ctx, rack, harness.PluginOptions{Mode: harness.ModeController})
	node := startPlugin(ctx, rack, harness.PluginOptions{Mode: harness.ModeNode})
	config.ControllerAddress, config.Address = controller.Endpoint, node.Endpoint
	return []*harness.Plugin{controller, node}
}
