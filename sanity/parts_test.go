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

	"github.com/onsi/ginkgo/v2/types"
	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/csisuite"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

var programs = []string{"oxide-simulator", "oxide-csi-plugin"}

// part is a part of the suite. It runs as a process of its own, at the same time as other parts,
// and starts its own racks.
type part struct {
	name, filter string
	// whole means that the short form leaves the part out.
	whole bool
}

func parts() []part {
	all := []part{
		{name: "our own specs of the controller", filter: "controller"},
		{name: "our own specs of nodes", filter: "!csi-sanity && !controller"},
	}
	for _, c := range csisuite.Combinations() {
		// The short form has a filesystem and raw block, one process and two.
		inShort := c.Filesystem == "ext4" && !c.Split || c.Filesystem == "" && c.Split
		all = append(all, part{"csi-sanity over " + c.String(), strings.Join(c.Labels(), " && "),
			!inShort})
	}
	return all
}

const runsSpecs = "OXIDE_SANITY_PART"

// specsCommand returns a command that runs specs with this binary in a mount namespace of its own.
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
		// The first interrupt makes Ginkgo end the specs and clean up; a second one makes it skip the
		// clean-up. In a process group of its own the part gets no interrupt from the terminal, only
		// the one that this process sends.
		Setpgid:   true,
		Pdeathsig: syscall.SIGINT,
	}
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 2 * harness.StopTimeout
	return cmd
}

func runChosen(t *testing.T, run *harness.Run) {
	ctx, stop := signal.NotifyContext(t.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	cmd := specsCommand(ctx, t, run, os.Args[1:])
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		t.Error(err)
	}
}

// runParts runs the whole suite: it starts this binary once for each part, up to four at a time.
func runParts(t *testing.T, run *harness.Run) {
	start := time.Now()
	ctx, stop := signal.NotifyContext(t.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var (
		// mu guards whole.
		mu    sync.Mutex
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
		cmd := specsCommand(ctx, t, run, []string{"-test.run=^TestSanity$",
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
	fmt.Print(bullets(whole.Explanations()))
	if err := proof.Print(whole.Line("sanity")); err != nil {
		t.Error(err)
	}
	faults := whole.Faults
	if !t.Failed() { // otherwise not everything has run
		faults = slices.Concat(faults, whole.Unused())
	}
	if len(faults) > 0 {
		t.Errorf("%d skips are not as listed:\n%s", len(faults), bullets(faults))
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

func TestThePartsAreDisjointAndCoverEverySpec(t *testing.T) {
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

// endMargin is the time that a suite needs between its end and the timeout of its process, to write
// its report.
const endMargin = time.Minute

// timeLeft returns the time limit for a process that this test starts now; 0 means no limit.
func timeLeft(t *testing.T) time.Duration {
	deadline, ok := t.Deadline()
	if !ok {
		return 0
	}
	return max(time.Until(deadline)-endMargin, time.Second)
}
