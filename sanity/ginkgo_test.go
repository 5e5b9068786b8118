//go:build linux

package sanity

import (
	"context"
	"os"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

var theRun *harness.Run

// startRack starts a simulated rack for the current spec or container. When that ends, startRack
// stops the rack and demands that it has left nothing.
func startRack(ctx context.Context, options harness.RackOptions) *harness.Rack {
	GinkgoHelper()
	rack, err := theRun.StartRack(ctx, options)
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func() {
		Expect(rack.Stop()).To(Succeed())
	})
	showOnFailure(rack.LogFile())
	return rack
}

// startPlugin starts the driver for the current spec or container, and stops it when that ends.
func startPlugin(
	ctx context.Context, rack *harness.Rack, options harness.PluginOptions,
) *harness.Plugin {
	GinkgoHelper()
	plugin, err := rack.StartPlugin(ctx, options)
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func() {
		Expect(plugin.Stop()).To(Succeed())
	})
	showOnFailure(plugin.LogFile)
	return plugin
}

// mustBalance takes a ledger now and another one at the end of the spec or container, and demands
// that no disk, snapshot, attachment, loop device, mount, open file or goroutine was added. Call it
// after the last startRack and startPlugin.
func mustBalance(ctx context.Context, rack *harness.Rack, plugins ...*harness.Plugin) {
	GinkgoHelper()
	start, err := rack.Ledger(ctx, plugins...)
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func(ctx SpecContext) {
		Expect(rack.Balance(ctx, start, plugins...)).To(Succeed(), "the ledger does not balance")
	})
}

// shown maps the paths of the logs of running processes to the lengths of the logs at the beginning
// of the current spec.
var shown = map[string]int64{}

func showOnFailure(path string) {
	shown[path] = 0
	DeferCleanup(func() { delete(shown, path) })
}

// watchSpecs adds the log lines of all processes to the report of a failed spec, and makes the run
// keep its directory. Call it once, at the top of the suite.
func watchSpecs() {
	BeforeEach(func() {
		for path := range shown {
			shown[path] = sizeOf(path)
		}
	})
	JustAfterEach(func() {
		if !CurrentSpecReport().Failed() {
			return
		}
		theRun.Failed()
		for path, since := range shown {
			AddReportEntry(path, ReportEntryVisibilityFailureOrVerbose,
				strings.TrimSpace(harness.TailOf(path, min(sizeOf(path)-since, 8<<10))))
		}
	})
}

func sizeOf(path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}
