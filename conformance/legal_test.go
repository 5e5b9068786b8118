//go:build linux

package conformance

import (
	"strings"
	"sync"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/legal"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

// sampledKinds is the number of alterations that are tried outside of the long form. The tests of
// conformance/rules try every alteration.
const sampledKinds = 3

// TestNoRunBlamesALegalRack checks as on a real rack, without an admin listener.
func TestNoRunBlamesALegalRack(t *testing.T) {
	short.Skip(t, sampledKinds)
	t.Parallel()
	p := proof.New(t, "legal-runs")
	kinds := legal.Kinds()
	p.Rand().Shuffle(len(kinds), func(i, j int) { kinds[i], kinds[j] = kinds[j], kinds[i] })
	args := []string{"run", "--yes"}
	if !p.Long() {
		kinds, args = kinds[:sampledKinds], append(args, "--only", partRules)
	}
	run := plainRun(t)
	var mu sync.Mutex
	// mu guards the counts.
	runs, alarms, verdicts := 0, 0, map[report.Verdict]int{}
	for round := uint64(0); round == 0 || p.Long() && !p.Over(); round++ {
		var group errgroup.Group
		group.SetLimit(4) // the runs wait most of the time
		for i, kind := range kinds {
			rack := rackOf(t, run, harness.RackOptions{})
			seed := p.Seed + round*uint64(len(kinds)) + uint64(i)
			group.Go(func() error {
				return legal.Try(t.Context(), rack, kind, seed, func(host string) error {
					env := asOthersHave(rack, "SECOND", "SECOND_SHELL", "HELPER", "GUEST_SHELL")
					env["OXIDE_HOST"], env["OXIDE_CA_FILE"] = host, ""
					program := prepare(t, run, rack, env, args...)
					_ = program.Run() // the report has the result
					mu.Lock()
					defer mu.Unlock()
					runs++
					verdict := judged(program)
					verdicts[verdict]++
					if verdict == report.DoesNotConform {
						alarms++
						t.Errorf("%s (%s): %s", kind.Name, kind.Says, tail(program.out.String()))
					}
					p.Say("%s: %s: %s", kind.Name, program.ProcessState, verdict)
					return nil
				})
			})
		}
		csitest.Must(t, group.Wait())
	}
	p.Figure("kinds", len(kinds), "runs", runs, "conforms", verdicts[report.Conforms], "incomplete",
		verdicts[report.Incomplete], "nothing_made", verdicts[nothingMade], "false_alarms", alarms)
}

// nothingMade is the verdict of a preflight that refused the run.
const nothingMade report.Verdict = "none"

// judged returns the verdict of a program that has ended.
func judged(p *program) report.Verdict {
	r, err := report.Read(p.folder)
	if err == nil {
		return r.Verdict
	}
	if p.ProcessState.ExitCode() == ExitUsage &&
		strings.Contains(p.errs.String(), "nothing was made") {
		return nothingMade
	}
	return report.DoesNotConform // a run without a report is an error on any rack
}
