package sanity

import (
	"context"
	"os"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
	. "github.com/onsi/gomega"
)

// simulated are the containers that Simulated collected.
var simulated []func()

// Simulated registers a container of specs that bring simulated racks with them. Spec files call it
// at package level, as they would call Describe; but importing this package must not make every
// program run all specs, so they join the suite only when RegisterSimulated is called.
//
//	var _ = Simulated("the life of a volume", func() {
//		It("CV-1 …", func(ctx SpecContext) {
//			rack := NewRack(ctx, RackOptions{})
//			node := rack.Plugin(ctx, PluginOptions{Instance: "b"})
//			…
//		})
//	})
func Simulated(text string, args ...any) bool {
	args = append([]any{types.NewCodeLocation(1)}, args...)
	simulated = append(simulated, func() { Describe(text, args...) })
	return true
}

// RegisterSimulated adds csi-sanity in all combinations and our own specs to the Ginkgo suite of
// this process.
func RegisterSimulated() {
	describeCSISanity()
	for _, register := range simulated {
		register()
	}
}

// theRun is the run that this process's specs share.
var theRun *Run

// shareRun opens the run of this process.
func shareRun() (*Run, error) {
	run, err := NewRun(os.Stdout)
	theRun = run
	return run, err
}

// NewRack starts a simulated rack for the spec or container that asks, and stops it at its end,
// when nothing of it may be left.
func NewRack(ctx context.Context, options RackOptions) *Rack {
	GinkgoHelper()
	rack, err := theRun.StartRack(ctx, options)
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func() {
		if rack.proc.running() {
			Expect(rack.Stop()).To(Succeed())
			return
		}
		// The spec killed it for good, so its loop devices are let go by a last start.
		ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
		defer cancel()
		Expect(rack.Start(ctx)).To(Succeed(), "a killed simulator must start again")
		Expect(rack.Stop()).To(Succeed())
	})
	showOnFailure(rack.LogFile())
	return rack
}

// Plugin starts the driver for the spec or container that asks, and stops it at its end.
func (r *Rack) Plugin(ctx context.Context, options PluginOptions) *Plugin {
	GinkgoHelper()
	plugin, err := r.StartPlugin(ctx, options)
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func() {
		if plugin.proc.running() {
			Expect(plugin.Stop()).To(Succeed())
		}
	})
	showOnFailure(plugin.LogFile)
	return plugin
}

// Balanced takes stock now and demands at the end of the spec or container that nothing has been
// added: no disk, snapshot, attachment, loop device, mount, open file or goroutine. Call it after
// the last NewRack and Plugin.
func (r *Rack) Balanced(ctx context.Context, plugins ...*Plugin) {
	GinkgoHelper()
	start, err := r.Ledger(ctx, plugins...)
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func(ctx SpecContext) {
		Expect(r.Balance(ctx, start, plugins...)).To(Succeed(), "the ledger does not balance")
	})
}

// Await asks until the question is answered without an error; after the timeout the spec fails
// with the last one.
func Await(ctx context.Context, timeout time.Duration, what string, ask func() error) {
	GinkgoHelper()
	Expect(await(ctx, timeout, ask)).To(Succeed(), what)
}

// shown are the logs of running processes: their paths, and how long they were when the current
// spec began.
var shown = map[string]int64{}

func showOnFailure(path string) {
	shown[path] = 0
	DeferCleanup(func() { delete(shown, path) })
}

// watchSpecs keeps the evidence of a failed spec: what the processes logged during it, in its
// report, and the run's directory. It is called once, at the top of the suite.
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
				strings.TrimSpace(tailOf(path, min(sizeOf(path)-since, 8<<10))))
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
