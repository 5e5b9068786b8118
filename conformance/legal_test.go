//go:build linux

package conformance

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/legal"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

// sampledKinds is the number of alterations that are tried outside of the long form. The tests of
// conformance/rules try every alteration.
const sampledKinds = 3

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
			starts, err := legalRuns(t, run, rack, kind, p.Seed+round*uint64(len(kinds))+uint64(i), args)
			if err != nil {
				t.Fatal(err)
			}
			group.Go(func() error {
				for _, program := range starts() {
					mu.Lock()
					runs++
					verdict := judged(program)
					verdicts[verdict]++
					if verdict == report.DoesNotConform {
						alarms++
						t.Errorf("%s (%s): %s", kind.Name, kind.Says, tail(program.out.String()))
					}
					p.Say("%s: %s: %s", kind.Name, program.ProcessState, verdict)
					mu.Unlock()
				}
				return nil
			})
		}
		if err := group.Wait(); err != nil {
			t.Fatal(err)
		}
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

// legalRuns prepares the program on an altered rack as on a real one, without an admin listener.
// The function that it returns runs the program, or two at the same time for a rack that two runs
// check.
func legalRuns(t *testing.T, run *harness.Run, rack *harness.Rack, kind legal.Kind, seed uint64,
	args []string,
) (func() []*program, error) {
	front, err := legal.Front(t.Context(), rack, kind, seed)
	if err != nil {
		return nil, err
	}
	env := map[string]string{"OXIDE_HOST": front.URL, "OXIDE_CA_FILE": "",
		"OXIDE_CONFORMANCE_SIMULATOR_ADMIN": "", "OXIDE_CONFORMANCE_SECOND": "",
		"OXIDE_CONFORMANCE_SECOND_SHELL": "", "OXIDE_CONFORMANCE_HELPER": "",
		"OXIDE_CONFORMANCE_GUEST_SHELL": ""}
	programs := []*program{prepare(t, run, rack, env, args...)}
	if kind.Twins {
		programs = append(programs, prepare(t, run, rack, env, args...))
	}
	return func() []*program {
		defer front.Close()
		strangers, end := context.WithCancel(t.Context())
		var beside, group errgroup.Group
		if kind.Busy {
			beside.Go(func() error {
				return legal.Strangers(strangers, rack, rack.Instance("b").ID, seed)
			})
		}
		for _, p := range programs {
			group.Go(func() error {
				_ = p.limited() // the report has the result
				return nil
			})
		}
		err := group.Wait()
		end()
		if errBeside := beside.Wait(); err == nil {
			err = errBeside
		}
		if err != nil {
			t.Error(fmt.Errorf("%s: %w", kind.Name, err))
		}
		return programs
	}, nil
}
