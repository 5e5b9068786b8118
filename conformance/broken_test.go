//go:build linux

package conformance

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// sampled is the number of mutations that are tried outside of the long form. The tests of
// conformance/rules and conformance/data try every mutation. This test shows that a run reports
// what they find.
const sampled = 3

func TestARunNoticesEveryMutationOfARack(t *testing.T) {
	short.Skip(t, sampled)
	t.Parallel()
	p := proof.New(t, "broken-racks")
	run := plainRun(t)
	mutations, err := rackOf(t, run, harness.RackOptions{}).Admin.Mutations(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	all := len(mutations)
	rand.New(rand.NewPCG(p.Seed, p.Seed)).Shuffle(all, func(i, j int) {
		mutations[i], mutations[j] = mutations[j], mutations[i]
	})
	if !p.Long() {
		// Only one mutation of the part data is tried, because that part takes longest.
		one := slices.IndexFunc(mutations, ofData)
		data := mutations[one]
		mutations = slices.DeleteFunc(mutations, ofData)[:sampled-1]
		mutations = append(mutations, data)
	}
	var mu sync.Mutex
	// mu guards the counts.
	tried, noticed, preflight := 0, 0, 0
	var group errgroup.Group
	group.SetLimit(4) // the runs wait most of the time
	for _, m := range mutations {
		if p.Over() {
			break
		}
		program := brokenRun(t, run, m)
		group.Go(func() error {
			_ = program.limited() // the exit status counts
			mu.Lock()
			defer mu.Unlock()
			tried++
			switch status := program.ProcessState.ExitCode(); status {
			case ExitFails:
				noticed++
			case ExitUsage:
				noticed++
				preflight++
			default:
				t.Errorf("%s, so that %s: the run ended with %d", m.Name, m.Says, status)
			}
			p.Say("%s: %s", m.Name, program.ProcessState)
			return nil
		})
	}
	_ = group.Wait() // no run returns an error
	p.Figure("of", all, "mutations", tried, "noticed", noticed, "by_preflight", preflight)
}

func ofData(m adminapi.Mutation) bool { return m.Rule == "data" }

// brokenRun prepares a run of the part that a mutation is about, on a rack that has the mutation
// from the start.
func brokenRun(t *testing.T, run *harness.Run, m adminapi.Mutation) *program {
	t.Helper()
	rack := rackOf(t, run, harness.RackOptions{})
	if err := rack.Admin.Mutate(t.Context(), m.Name); err != nil {
		t.Fatal(err)
	}
	part := partRules
	if ofData(m) {
		part = partData
	}
	return prepare(t, run, rack, nil, "run", "--yes", "--only", part)
}

// noise makes a rack slow and busy: each request takes a while, and one in a hundred is answered
// with 503 or 429.
func noise(t *testing.T, rack *harness.Rack, delay time.Duration, seed uint64) {
	t.Helper()
	for _, fault := range []adminapi.Fault{
		{Phase: adminapi.Before, Delay: adminapi.Duration(delay)},
		{Phase: adminapi.Before, Probability: 0.005, Seed: seed, Response: &adminapi.Response{
			Status: 503, ErrorCode: "ServiceNotAvailable", Message: "Service Unavailable"}},
		{Phase: adminapi.Before, Probability: 0.005, Seed: seed + 1, Response: &adminapi.Response{
			Status: 429, Message: "Too Many Requests"}},
	} {
		if _, err := rack.Admin.AddFault(t.Context(), fault); err != nil {
			t.Fatal(err)
		}
	}
}

// quietRuns is the number of runs that the long form makes.
const quietRuns = 20

// Outside of the long form the run has no more disks and space than a preflight demands for the
// rules.
func TestARunPassesOnARackInOrderThatIsSlowAndBusy(t *testing.T) {
	short.Skip(t, 1)
	t.Parallel()
	p := proof.New(t, "false-alarms")
	run := plainRun(t)
	need := needOf([]string{partRules})
	runs, delay, args := 1, 20*time.Millisecond, []string{"run", "--yes", "--only", partRules,
		"--budget", fmt.Sprintf("%d,%d", need.objects, need.gib)}
	if p.Long() {
		runs, delay, args = quietRuns, 50*time.Millisecond, []string{"run", "--yes"}
	}
	programs, ends := make([]*program, runs), make([]error, runs)
	var group errgroup.Group
	group.SetLimit(4) // the runs wait most of the time
	for i := range runs {
		rack := rackOf(t, run, harness.RackOptions{})
		noise(t, rack, delay, p.Seed+2*uint64(i))
		programs[i] = prepare(t, run, rack, nil, args...)
		group.Go(func() error {
			ends[i] = programs[i].limited()
			p.Say("run %d: %s", i+1, programs[i].ProcessState)
			return nil
		})
	}
	_ = group.Wait() // no run returns an error
	alarms, results, again := 0, 0, 0
	for i, end := range ends {
		if end != nil {
			alarms++
			t.Errorf("run %d: %v", i+1, end)
			continue
		}
		r := programs[i].report(t)
		results += len(r.Results)
		for _, result := range r.Results {
			if result.Tries > 1 {
				again++
			}
		}
	}
	p.Figure("runs", runs, "alarms", alarms, "results", results, "checked_again", again)
}

func TestTheNamesOfTheRacksMutationsAreUnique(t *testing.T) {
	mutations, err := rackOf(t, plainRun(t), harness.RackOptions{}).Admin.
		Mutations(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]int{}
	for _, m := range mutations {
		if names[m.Name]++; names[m.Name] > 1 || m.Says == "" || m.Rule == "" {
			t.Errorf("a mutation with a name that another one has, or without words: %+v", m)
		}
	}
	if !slices.ContainsFunc(mutations, func(m adminapi.Mutation) bool { return m.Rule == "data" }) {
		t.Error("nothing breaks data")
	}
}
