//go:build linux

package conformance

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// sampled is the number of mutations that the short form tries. The tests of conformance/rules
// and conformance/data try every mutation. This test shows that a run reports what they find.
const sampled = 4

func TestARunNoticesEveryMutationOfARack(t *testing.T) {
	p := proof.New(t, "broken-racks")
	run := harness.RunFor(t)
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
	tried, noticed, preflight := 0, 0, 0
	for _, m := range mutations {
		if p.Over() {
			break
		}
		tried++
		status := runBroken(t, run, m)
		switch status {
		case ExitFails:
			noticed++
		case ExitUsage:
			noticed++
			preflight++
		default:
			t.Errorf("%s, so that %s: the run ended with %d", m.Name, m.Says, status)
		}
		p.Say("%s: %d", m.Name, status)
	}
	p.Figure("of", all, "mutations", tried, "noticed", noticed, "by_preflight", preflight)
}

func ofData(m adminapi.Mutation) bool { return m.Rule == "data" }

// runBroken runs the part that a mutation is about against a rack that has the mutation from the
// start. It returns the exit status.
func runBroken(t *testing.T, run *harness.Run, m adminapi.Mutation) int {
	t.Helper()
	rack := rackOf(t, run, harness.RackOptions{})
	if err := rack.Admin.Mutate(t.Context(), m.Name); err != nil {
		t.Fatal(err)
	}
	part := partRules
	if ofData(m) {
		part = partData
	}
	p := prepare(t, run, rack, nil, "run", "--yes", "--only", part)
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	end := time.AfterFunc(runTimeout, func() { _ = p.Process.Kill() })
	defer end.Stop()
	_ = p.Wait() // the caller checks the exit status
	return p.ProcessState.ExitCode()
}

// noise makes a rack slow and busy: each request takes 50 ms, and one in a hundred is answered
// with 503 or 429.
func noise(t *testing.T, rack *harness.Rack, seed uint64) {
	t.Helper()
	for _, fault := range []adminapi.Fault{
		{Phase: adminapi.Before, Delay: adminapi.Duration(50 * time.Millisecond)},
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

func TestARunPassesOnARackInOrderThatIsSlowAndBusy(t *testing.T) {
	p := proof.New(t, "false-alarms")
	run := harness.RunFor(t)
	runs, args := 1, []string{"run", "--yes", "--only", partRules}
	if p.Long() {
		runs, args = quietRuns, []string{"run", "--yes"}
	}
	programs, ends := make([]*program, runs), make([]error, runs)
	var group errgroup.Group
	group.SetLimit(4) // the runs wait most of the time
	for i := range runs {
		rack := rackOf(t, run, harness.RackOptions{})
		noise(t, rack, p.Seed+2*uint64(i))
		programs[i] = prepare(t, run, rack, nil, args...)
		group.Go(func() error {
			if err := programs[i].Start(); err != nil {
				return err
			}
			end := time.AfterFunc(3*runTimeout, func() { _ = programs[i].Process.Kill() })
			defer end.Stop()
			ends[i] = programs[i].Wait()
			p.Say("run %d: %s", i+1, programs[i].ProcessState)
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
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
	mutations, err := rackOf(t, harness.RunFor(t), harness.RackOptions{}).Admin.
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
