package conformance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	csisanity "github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	. "github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/formatter"
	"github.com/onsi/ginkgo/v2/types"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/csisuite"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// runCSISanity runs csi-sanity for the selected kinds of access against one driver that is
// controller and node.
func (w *job) runCSISanity(ctx context.Context) error {
	driver, err := w.startDriver(ctx, harness.ModeAll)
	if err != nil {
		return fmt.Errorf("start the driver: %w", err)
	}
	log, err := os.Create(filepath.Join(w.dir.Dir, "csi-sanity.log"))
	if err != nil {
		return errors.Join(err, driver.Stop())
	}
	defer log.Close()
	formatter.ColorableStdOut = log
	suite, reporter := GinkgoConfiguration()
	suite.PollProgressAfter = time.Minute
	suite.GracePeriod = time.Minute
	reporter.NoColor, reporter.SilenceSkips = true, true
	var accesses []string
	for _, combination := range csisuite.Combinations() {
		access := combination.Access()
		if combination.Split || !w.selects(access) {
			continue
		}
		accesses = append(accesses, access)
		w.registerCSISanity(combination, driver)
	}
	if !w.rack.Hotplug {
		suite.SkipStrings = []string{csisuite.SkipPattern(csisuite.AttachSkips)}
	}
	RegisterFailHandler(Fail)
	csisuite.Quiet()
	w.followCSISanity(ctx, accesses)
	elsewhere(func() { RunSpecs(&verdictOfSpecs{}, "csi-sanity", suite, reporter) })
	return driver.Stop()
}

// elsewhere calls do in the root directory. Ginkgo ends a program whose working directory is gone,
// and then nothing would be removed.
func elsewhere(do func()) {
	here, err := os.Getwd()
	_ = os.Chdir("/") // always exists
	do()
	if err == nil {
		_ = os.Chdir(here) // the directory may be gone
	}
}

// verdictOfSpecs implements the interface that RunSpecs needs outside go test. The report has the
// results.
type verdictOfSpecs struct{}

// Fail ignores a failed spec, because the report has it.
func (*verdictOfSpecs) Fail() {}

// registerCSISanity adds csi-sanity's suite for one kind of access.
func (w *job) registerCSISanity(c csisuite.Combination, driver *harness.Plugin) {
	config := c.Config()
	config.Address = driver.Endpoint
	config.DialOptions = append(config.DialOptions,
		grpc.WithChainUnaryInterceptor(withMark(w.mark+"-"+c.Access()), w.intercept))
	config.ControllerDialOptions = config.DialOptions
	csisuite.Place(config, driver.Dir)
	Describe(c.Access(), Label(c.Access()), func() { csisanity.GinkgoTest(config) })
}

// startDriver starts the driver that is built into this program, with the configuration of the
// environment.
func (w *job) startDriver(ctx context.Context, mode string) (*harness.Plugin, error) {
	env := map[string]string{"OXIDE_HOST": w.host, "OXIDE_TOKEN": w.token, "OXIDE_PROJECT": w.project,
		"OXIDE_CA_FILE": w.caFile, "OXIDE_SYSFS_ROOT": w.sysfsRoot, "OXIDE_DEV_ROOT": w.devRoot,
		"OXIDE_CLUSTER_ID": w.mark, "OXIDE_CONFORMANCE_MARK": w.mark}
	driver, err := w.dir.StartPlugin(ctx, harness.PluginOptions{Mode: mode, Env: env})
	if err == nil {
		err = driver.AwaitReady(ctx)
	}
	return driver, err
}

// followCSISanity converts Ginkgo's report of each spec into a result.
func (w *job) followCSISanity(ctx context.Context, accesses []string) {
	var point int
	done := map[string]int{}
	count := map[string]int{}
	ReportBeforeSuite(func(r Report) {
		// The specs are the same for each access.
		for _, access := range accesses {
			count[access] = r.PreRunStats.TotalSpecs / len(accesses)
		}
	})
	ReportBeforeEach(func(r SpecReport) {
		access := accessOf(r)
		if done[access] == 0 && access != "" && w.progress.part != access {
			w.progress.enter(access, count[access])
		}
		point = len(w.calls.since(0))
	})
	ReportAfterEach(func(r SpecReport) {
		if access := accessOf(r); access != "" {
			done[access]++
			w.result(w.unlessLost(ctx, resultOf(access, r, w.calls.since(point), w.rack.Hotplug)))
			if err := w.lost(); err != nil {
				AbortSuite(err.Error())
			}
		}
	})
}

func accessOf(r SpecReport) string {
	if r.LeafNodeType != types.NodeTypeIt || len(r.ContainerHierarchyTexts) == 0 {
		return ""
	}
	return r.ContainerHierarchyTexts[0]
}

// resultOf returns the result of one of csi-sanity's specs on a rack with hot-plug or without.
func resultOf(access string, r SpecReport, calls []rpc, hotplug bool) report.Result {
	name := strings.TrimSpace(strings.TrimPrefix(r.FullText(), access))
	result := report.Result{Group: access, Name: name, Seconds: r.RunTime.Seconds(), Tries: 1,
		Evidence: evidence(calls)}
	for _, c := range calls {
		result.Extent.Answer(c.name, strings.TrimSpace(c.code.String()+" "+c.reason))
	}
	switch {
	case r.State.Is(types.SpecStatePassed):
		result.Status = report.Passed
		if fault := aboutItself(name, calls); fault != "" {
			result.Status, result.Reason = report.Failed, fault
		}
	case r.State.Is(types.SpecStateInterrupted | types.SpecStateAborted):
		result.Status, result.Reason = report.Interrupted, "the run was interrupted"
	case r.State.Is(types.SpecStateSkipped | types.SpecStatePending):
		result.Tries = 0
		offered := csisuite.Explain(csisuite.Skips, r)
		blocked := csisuite.Explain(csisuite.AttachSkips, r)
		switch {
		case offered >= 0:
			skip := csisuite.Skips[offered]
			result.Status, result.Reason = report.NotApplicable, skip.Capability+": "+skip.Reason
		case blocked >= 0 && !hotplug:
			skip := csisuite.AttachSkips[blocked]
			result.Status, result.Reason = report.Blocked, skip.Capability+": "+skip.Reason
		case r.Failure.IsZero():
			result.Status, result.Reason = report.Interrupted, "the run was interrupted before it"
		default:
			result.Status = report.Failed
			result.Reason = "skipped without an explanation: " + r.Failure.Message
		}
	default:
		result.Status, result.Reason = report.Failed, failure(r)
	}
	return result
}

func failure(r SpecReport) string {
	reason := strings.TrimSpace(r.Failure.Message)
	if r.Failure.ForwardedPanic != "" {
		reason += "\npanic: " + r.Failure.ForwardedPanic
	}
	return fmt.Sprintf("%s\nat %s", reason, r.Failure.Location)
}

// rpcNames matches the names of CSI's RPCs, longest first. A spec's name contains the RPC that it
// is about.
var rpcNames = regexp.MustCompile(`\b(ControllerPublishVolume|ControllerUnpublishVolume|` +
	`ValidateVolumeCapabilities|ControllerGetCapabilities|ControllerGetVolume|GetPluginCapabilities|` +
	`GetPluginInfo|GetCapacity|CreateVolume|DeleteVolume|ListVolumes|CreateSnapshot|DeleteSnapshot|` +
	`ListSnapshots|GetSnapshot|NodeStageVolume|NodeUnstageVolume|NodePublishVolume|` +
	`NodeUnpublishVolume|NodeGetVolumeStats|NodeGetCapabilities|NodeGetInfo|Probe)\b`)

// aboutItself explains why a passed spec proves nothing: it called nothing, or not the RPC that it
// is about.
func aboutItself(name string, calls []rpc) string {
	if len(calls) == 0 {
		return "the spec has made no call of the driver, and so has shown nothing"
	}
	about := rpcNames.FindString(name)
	if about == "" || slices.ContainsFunc(calls, func(c rpc) bool { return c.name == about }) {
		return ""
	}
	return fmt.Sprintf("the spec has not called %s, which it is about", about)
}
