//go:build linux

package rules

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/legal"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

// sampledRules is the number of rules that are checked on each rack outside of the long form.
const sampledRules = 12

// alwaysChecked are the rules whose checks have blamed healthy racks.
var alwaysChecked = []string{"A01", "A09", "A10", "A16", "A29", "A38", "A41", "A43", "A59"}

func TestNoRuleBlamesALegalRack(t *testing.T) {
	t.Parallel()
	p := proof.New(t, "legal-racks")
	kinds := short.Some(t, 4, legal.Kinds())
	var mu sync.Mutex
	// mu guards count and the other results of the runs.
	runs, alarms, count := 0, 0, map[Status]int{}
	for round := uint64(0); round == 0 || p.Long() && !p.Over(); round++ {
		var group errgroup.Group
		group.SetLimit(len(kinds)) // the runs wait most of the time
		for i, kind := range kinds {
			seed := p.Seed + round*uint64(len(kinds)) + uint64(i)
			sample := All()
			if !p.Long() {
				sample = sampleOf(sample, seed)
			}
			rack := startRack(t, harness.RackOptions{})
			group.Go(func() error {
				failed, statuses, err := runLegal(t.Context(), rack, kind, seed, sample)
				mu.Lock()
				defer mu.Unlock()
				runs++
				alarms += len(failed)
				for status, n := range statuses {
					count[status] += n
				}
				for _, alarm := range failed {
					t.Errorf("%s (%s), seed %d: %s", kind.Name, kind.Says, seed, alarm)
				}
				p.Say("%s: %v", kind.Name, statuses)
				if err != nil {
					return fmt.Errorf("%s: %w", kind.Name, err)
				}
				return nil
			})
		}
		csitest.Must(t, group.Wait())
	}
	p.Figure("kinds", len(kinds), "runs", runs, "results", count[Passed]+count[NotTested],
		"not_tested", count[NotTested], "false_alarms", alarms)
}

// sampleOf chooses some rules, and keeps their order.
func sampleOf(all []Rule, seed uint64) []Rule {
	chosen := map[int]bool{}
	for _, i := range rand.New(rand.NewPCG(seed, seed)).Perm(len(all))[:sampledRules] {
		chosen[i] = true
	}
	var sample []Rule
	for i, rule := range all {
		if chosen[i] || slices.Contains(alwaysChecked, rule.ID) {
			sample = append(sample, rule)
		}
	}
	return sample
}

// runLegal checks rules on an altered rack as on a real one, without an admin listener. It
// returns the failures that blame the rack.
func runLegal(ctx context.Context, rack *harness.Rack, kind legal.Kind, seed uint64, sample []Rule,
) (alarms []string, count map[Status]int, err error) {
	var mu sync.Mutex
	// mu guards the results of the runs.
	count = map[Status]int{}
	err = legal.Try(ctx, rack, kind, seed, func(host string) error {
		config := configOf(rack, true)
		config.Admin, config.Restart, config.Host, config.CAFile = nil, nil, host, ""
		r, err := Open(config)
		if err != nil {
			return err
		}
		for _, rule := range sample {
			result := r.Run(ctx, rule)
			mu.Lock()
			count[result.Status]++
			switch {
			case result.Status == Failed, result.Status == Blocked:
				alarms = append(alarms, rule.ID+": "+result.Reason)
			case result.Status == NotTested && result.Reason == "":
				alarms = append(alarms, rule.ID+" is not tested, without a reason")
			case strings.Contains(result.Reason, "has had no answer"):
				alarms = append(alarms, rule.ID+" has had answers: "+result.Reason)
			}
			mu.Unlock()
		}
		return r.Close(ctx)
	})
	return alarms, count, err
}
