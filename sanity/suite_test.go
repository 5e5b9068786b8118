//go:build linux

package sanity

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	csisanity "github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	. "github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
	. "github.com/onsi/gomega"
	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/csisuite"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

func TestMain(m *testing.M) { namespace.Main(m) }

// The test runs csi-sanity in all combinations, and this package's specs, on simulated racks. It
// runs the whole suite in parts, several at a time. With -ginkgo.label-filter ('ext4 && split') or
// -ginkgo.focus, it runs only the chosen specs.
//
// The specs run in further processes of this binary, each in a mount namespace of its own. So a run
// sees no mounts of another run, and the mounts of a failed spec disappear when the run ends.
func TestTheDriverPassesCSISanity(t *testing.T) {
	run := harness.RunFor(t)
	theRun = run
	suite, reporter := GinkgoConfiguration()
	switch {
	case os.Getenv(runsSpecs) != "":
		RegisterFailHandler(Fail)
		csisuite.Quiet()
		watchSpecs()
		describeCSISanity()
		suite.PollProgressAfter = time.Minute
		suite.Timeout = timeLeft(t)
		reporter.NoColor, reporter.SilenceSkips = true, true
		RunSpecs(t, "sanity", suite, reporter)
	case suite.LabelFilter == "" && len(suite.FocusStrings)+len(suite.SkipStrings)+
		len(suite.FocusFiles)+len(suite.SkipFiles) == 0:
		runParts(t, run)
	default:
		ctx, stop := signal.NotifyContext(t.Context(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		cmd := specsCommand(ctx, t, run, os.Args[1:])
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		if err := cmd.Run(); err != nil {
			t.Error(err)
		}
	}
}

// describeCSISanity gives each combination a rack of its own, because csi-sanity uses the same
// volume names in all of them.
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
				if c.Split {
					controller := startPlugin(ctx, rack, harness.PluginOptions{Mode: harness.ModeController})
					node := startPlugin(ctx, rack, harness.PluginOptions{Mode: harness.ModeNode})
					config.ControllerAddress, config.Address = controller.Endpoint, node.Endpoint
					plugins = []*harness.Plugin{controller, node}
				} else {
					all := startPlugin(ctx, rack, harness.PluginOptions{})
					config.Address, plugins = all.Endpoint, []*harness.Plugin{all}
				}
				csisuite.Place(config, rack.Dir)
				start = got(rack.Ledger(ctx, plugins...))
			})
			AfterAll(func(ctx SpecContext) {
				if start == nil {
					return // the rack or the driver did not start
				}
				suite.Finalize()
				Expect(rack.Balance(ctx, start, plugins...)).To(Succeed(), "csi-sanity over %s has leaked", c)
			})
			suite = csisanity.GinkgoTest(config)
		})
	}
}

var theRun *harness.Run

// startRack starts a rack, and stops it at the end of the spec or container. It fails the spec if
// the rack leaves anything behind.
func startRack(ctx context.Context, options harness.RackOptions) *harness.Rack {
	GinkgoHelper()
	rack := got(theRun.StartRack(ctx, options))
	DeferCleanup(func() {
		Expect(rack.Stop()).To(Succeed())
	})
	showOnFailure(rack.LogFile())
	return rack
}

func startPlugin(ctx context.Context, rack *harness.Rack, options harness.PluginOptions,
) *harness.Plugin {
	GinkgoHelper()
	plugin := got(rack.StartPlugin(ctx, options))
	DeferCleanup(func() {
		Expect(plugin.Stop()).To(Succeed())
	})
	showOnFailure(plugin.LogFile)
	return plugin
}

// mustBalance counts disks, snapshots, attachments, loop devices, mounts, open files and
// goroutines, and fails at the end of the spec or container if any number has grown. Call it after
// the last startRack and startPlugin, so that the processes still run at the end.
func mustBalance(ctx context.Context, rack *harness.Rack, plugins ...*harness.Plugin) {
	GinkgoHelper()
	start := got(rack.Ledger(ctx, plugins...))
	DeferCleanup(func(ctx SpecContext) {
		Expect(rack.Balance(ctx, start, plugins...)).To(Succeed(), "the ledger does not balance")
	})
}

// shown maps the path of each running process's log to its length when the current spec began.
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

var programs = []string{"oxide-simulator", "oxide-csi-plugin"}

// part is a subset of the specs. It runs as a process of its own, at the same time as other parts,
// and starts its own racks.
type part struct {
	name, filter string
	// whole marks a part that "go test -short" omits.
	whole bool
}

func parts() []part {
	all := []part{
		{name: "our own specs of the controller", filter: "controller"},
		{name: "our own specs of nodes", filter: "!csi-sanity && !controller"},
	}
	for _, c := range csisuite.Combinations() {
		// "go test -short" covers ext4 in one process and raw block in two processes.
		inShort := c.Filesystem == "ext4" && !c.Split || c.Filesystem == "" && c.Split
		all = append(all, part{"csi-sanity over " + c.String(), strings.Join(c.Labels(), " && "),
			!inShort})
	}
	return all
}

const runsSpecs = "OXIDE_SANITY_PART"

func specsCommand(ctx context.Context, t *testing.T, run *harness.Run, args []string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Env = append(os.Environ(), runsSpecs+"=1")
	for _, program := range programs {
		path, err := run.Binary(ctx, program)
		if err != nil {
			t.Fatal(err)
		}
		cmd.Env = append(cmd.Env, harness.BinaryVariable(program)+"="+path)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		// Ginkgo ends the specs and cleans up at the first interrupt, and skips the clean-up at the
		// second. In a process group of its own, the part gets the interrupt that this process sends, and
		// no second one from the terminal.
		Setpgid:   true,
		Pdeathsig: syscall.SIGINT,
	}
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 2 * harness.StopTimeout
	return cmd
}

func runParts(t *testing.T, run *harness.Run) {
	start := time.Now()
	ctx, stop := signal.NotifyContext(t.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var (
		mu    sync.Mutex // guards whole
		whole = csisuite.NewAudit(csisuite.Skips)
	)
	chosen := parts()
	if testing.Short() {
		chosen = slices.DeleteFunc(chosen, func(p part) bool { return p.whole })
		short.Left(t, len(parts())-len(chosen))
	}
	var group errgroup.Group
	group.SetLimit(4)
	for i, p := range chosen {
		file := filepath.Join(run.Dir, fmt.Sprintf("part-%d.json", i))
		cmd := specsCommand(ctx, t, run, []string{"-test.run=^TestTheDriverPassesCSISanity$",
			"-ginkgo.label-filter=" + p.filter, "-ginkgo.json-report=" + file})
		group.Go(func() error {
			if ctx.Err() != nil {
				return fmt.Errorf("%s is not run: %w", p.name, ctx.Err())
			}
			cmd.Args = append(cmd.Args, "-test.timeout="+timeLeft(t).String())
			report, output, err := runPart(cmd, file)
			share := csisuite.NewAudit(csisuite.Skips)
			share.Add(report)
			run.Say("%s: %d passed, %d failed, %d skips explained, %.1fs", p.name,
				share.Passed, share.Failed, share.Explained, share.Seconds)
			mu.Lock()
			defer mu.Unlock()
			whole.Add(report)
			if err != nil {
				t.Errorf("%s: %v\n%s", p.name, err, output)
			}
			return nil // the other parts continue
		})
	}
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
	whole.Seconds = time.Since(start).Seconds()
	if err := proof.Print(whole.Line("sanity")); err != nil {
		t.Error(err)
	}
	faults := whole.Faults
	if !t.Failed() { // after a failure, some specs may not have run
		faults = slices.Concat(faults, whole.Unused())
	}
	if len(faults) > 0 {
		t.Errorf("%d skips are not as listed:\n  %s", len(faults), strings.Join(faults, "\n  "))
	}
	if whole.Passed == 0 {
		t.Error("no spec has run")
	}
}

func runPart(cmd *exec.Cmd, file string) (types.Report, []byte, error) {
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	err := cmd.Run()
	data, errRead := os.ReadFile(file)
	if errRead != nil {
		return types.Report{}, output.Bytes(), errors.Join(err, errRead)
	}
	var reports []types.Report
	if errJSON := json.Unmarshal(data, &reports); errJSON != nil || len(reports) != 1 {
		return types.Report{}, output.Bytes(), errors.Join(err,
			fmt.Errorf("%s is not one report: %w", file, errJSON))
	}
	return reports[0], output.Bytes(), err
}

func TestEverySpecIsInExactlyOnePartOfTheSuite(t *testing.T) {
	var filters []types.LabelFilter
	for _, p := range parts() {
		filters = append(filters, types.MustParseLabelFilter(p.filter))
	}
	specs := [][]string{nil, {"own"}, {"controller"}}
	for _, c := range csisuite.Combinations() {
		specs = append(specs, c.Labels())
	}
	for _, labels := range specs {
		matches := 0
		for _, filter := range filters {
			if filter(labels) {
				matches++
			}
		}
		if matches != 1 {
			t.Errorf("a spec with the labels %q is in %d parts, want 1", labels, matches)
		}
	}
}

// endMargin is the time for a suite to write its report before the deadline of its process.
const endMargin = time.Minute

// timeLeft returns the time limit for a process that this test starts now; 0 means no limit.
func timeLeft(t *testing.T) time.Duration {
	deadline, ok := t.Deadline()
	if !ok {
		return 0
	}
	return max(time.Until(deadline)-endMargin, time.Second)
}
