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

// theRun is the run that the specs of this process share.
var theRun *harness.Run

// startRack starts a simulated rack for the current spec or container. At its end it stops the
// rack, and demands that nothing of the rack is left.
func startRack(ctx context.Context, options harness.RackOptions) *harness.Rack {
	GinkgoHelper()
	rack, err := theRun.StartRack(ctx, options)
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func() {
		if rack.Running() {
			Expect(rack.Stop()).To(Succeed())
			return
		}
		// The spec killed the rack for good. One more start and stop frees the loop devices.
		ctx, cancel := context.WithTimeout(context.Background(), harness.StartTimeout)
		defer cancel()
		Expect(rack.Start(ctx)).To(Succeed(), "a killed simulator must start again")
		Expect(rack.Stop()).To(Succeed())
	})
	showOnFailure(rack.LogFile())
	return rack
}

// startPlugin starts the driver for the current spec or container, and stops it at its end.
func startPlugin(
	ctx context.Context, rack *harness.Rack, options harness.PluginOptions,
) *harness.Plugin {
	GinkgoHelper()
	plugin, err := rack.StartPlugin(ctx, options)
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func() {
		if plugin.Running() {
			Expect(plugin.Stop()).To(Succeed())
		}
	})
	showOnFailure(plugin.LogFile)
	return plugin
}

// mustBalance takes a ledger now and another one at the end of the spec or container. Nothing may
// have been added: no disk, snapshot, attachment, loop device, mount, open file or goroutine.
// Call it after the last startRack and startPlugin.
func mustBalance(ctx context.Context, rack *harness.Rack, plugins ...*harness.Plugin) {
	GinkgoHelper()
	start, err := rack.Ledger(ctx, plugins...)
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func(ctx SpecContext) {
		Expect(rack.Balance(ctx, start, plugins...)).To(Succeed(), "the ledger does not balance")
	})
}

// shown has the logs of running processes: the paths, and the lengths at the beginning of the
// current spec.
var shown = map[string]int64{}

func showOnFailure(path string) {
	shown[path] = 0
	DeferCleanup(func() { delete(shown, path) })
}

// watchSpecs keeps the evidence of a failed spec: the log lines of the processes during the spec
// in its report, and the run's directory. Call it once, at the top of the suite.
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
