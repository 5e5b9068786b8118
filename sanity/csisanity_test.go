//go:build linux

package sanity

import (
	"context"

	csisanity "github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/csisuite"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// describeCSISanity registers csi-sanity's suite once for each combination. Each combination has
// a rack of its own, because csi-sanity repeats its volume names, so two suites cannot share a
// project.
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

// startPlugins starts the driver's processes for the combination and passes their address to
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
