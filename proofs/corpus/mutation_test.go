//go:build linux

package corpus_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

// mutation removes one guard after the other, and checks that the corpus notices it.
type mutation struct {
	p       *proof.Proof
	t       *testing.T
	run     *harness.Run
	bases   *bases
	program string
	all     []generator

	// mu guards unnoticed, the names of the guards whose absence no trial noticed.
	mu        sync.Mutex
	unnoticed map[string]bool
}

// check runs the mutant of each guard on the guard's trials, with a seed. It also runs the
// mutant that has all guards on all of these trials, which must behave like the driver.
func (m *mutation) check(ctx context.Context, guards []guard, seed uint64) {
	work := make(chan guard)
	var workers sync.WaitGroup
	for range benches {
		workers.Go(func() {
			for g := range work {
				if err := m.one(ctx, g, seed); err != nil {
					m.t.Errorf("guard %q (seed %d): %v", g.name, seed, err)
				}
			}
		})
	}
	if !m.p.Long() {
		guards = withOneTrial(guards, seed)
	}
	work <- guard{trials: trialsOf(guards)}
	for _, g := range guards {
		if m.p.Over() {
			break
		}
		work <- g
	}
	close(work)
	workers.Wait()
}

// withOneTrial returns the guards with one of their trials each, chosen by the seed. Each
// trial alone notices that its guard is absent. The long form runs all trials.
func withOneTrial(all []guard, seed uint64) []guard {
	all = slices.Clone(all)
	for i, g := range all {
		n := (seed + uint64(i)) % uint64(len(g.trials))
		all[i].trials = g.trials[n : n+1]
	}
	return all
}

// trialsOf returns the names of all trials of the guards, each once.
func trialsOf(guards []guard) []string {
	var names []string
	for _, g := range guards {
		names = append(names, g.trials...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// one runs the trials of a guard on a driver without that guard. If the guard has no name, the
// driver has all guards.
func (m *mutation) one(ctx context.Context, g guard, seed uint64) error {
	b, err := newBench(ctx, m.run, m.bases, m.program, map[string]string{proof.RemovedGuard: g.name})
	if err != nil {
		return err
	}
	b.evidence = g.name == ""
	noticed := false
	for _, name := range g.trials {
		i := slices.IndexFunc(m.all, func(g generator) bool { return g.name == name })
		if i < 0 {
			return fmt.Errorf("the corpus has no %q", name)
		}
		v, err := b.try(ctx, m.all[i].trial(seed))
		switch {
		case err != nil:
			return fmt.Errorf("%q cannot be tried: %w", name, err)
		case v.Wrong != nil && g.name == "":
			return fmt.Errorf("the driver with switches, and all guards, on %q: %w", name, v.Wrong)
		case v.Wrong != nil:
			noticed = true
			m.say("without %q, %q: %v", g.name, name, v.Wrong)
		case g.name != "":
			m.t.Errorf("without %q nothing happens to %q (seed %d): %s, %v", g.name, name, seed,
				v.Outcome, v.Answer)
		}
	}
	if !noticed && g.name != "" {
		m.mu.Lock()
		m.unnoticed[g.name] = true
		m.mu.Unlock()
	}
	return b.close()
}

// say prints details for somebody who works on the list of guards.
func (m *mutation) say(format string, args ...any) {
	if os.Getenv("PROOF_ANSWERS") != "" {
		m.p.Say(format, args...)
	}
}
