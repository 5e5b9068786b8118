//go:build linux

package corpus_test

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

func TestMain(m *testing.M) { namespace.Main(m) }

func TestOnlyABlankDiskOrAnUnfinishedFormatIsFormatted(t *testing.T) { // E-1, NS-6
	l := newLab(t, "blank-corpus")
	p := l.p
	program, err := proof.BuildMutant(t.Context(), l.run.Dir, mutable(guards()))
	p.Fatal(err)
	c := &tally{lab: l, outcomes: map[outcome]int{}}
	m := &mutation{lab: l, program: program, all: corpus(), unnoticed: map[string]bool{}}
	l.noticesHarm(t.Context())
	tried, removed := chosen(t, m.all), guards()
	if p.Short() {
		tried, removed = some(t, tried, p.Seed), short.Some(t, shortGuards, removed)
	}
	for seed := range p.Rounds() {
		c.round(t.Context(), tried, seed)
		p.Say("%d disks; now without each of %d guards in turn", c.disks, len(removed))
		m.check(t.Context(), removed, seed)
	}
	p.Figure("disks", c.disks, "formatted_blank", c.outcomes[formatted]-c.overwritten,
		"mounted", c.outcomes[mounted], "refused", c.outcomes[refused],
		"formatted_nonblank", c.overwritten, "guards", len(removed),
		"noticed", len(removed)-len(m.unnoticed))
	p.Bystanders.Report()
	if os.Getenv("PROOF_ONLY") != "" {
		return // the chosen disks may have no forged files, and not every outcome
	}
	p.Forged.Report()
	for _, outcome := range []outcome{formatted, mounted, refused} {
		if c.outcomes[outcome] == 0 {
			t.Errorf("no disk was %s", outcome)
		}
	}
}

// shortKinds contains how many disks the short form tries for each wanted outcome, and how many
// with forged records. shortGuards is the number of guards that the short form removes.
var shortKinds = map[string]int{string(formatted): 4, string(mounted): 8, string(refused): 32,
	"forged records": 1}

const shortGuards = 10

// some chooses the generators that the short form tries.
func some(t *testing.T, all []generator, seed uint64) (chosen []generator) {
	kinds := map[string][]generator{}
	for _, g := range all {
		kind := string(g.trial(seed).Want.Outcome)
		if strings.Contains(g.name, "forged records") {
			kind = "forged records"
		}
		kinds[kind] = append(kinds[kind], g)
	}
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		chosen = append(chosen, short.Some(t, shortKinds[kind], kinds[kind])...)
	}
	return chosen
}

// chosen returns the generators whose names PROOF_ONLY matches, or all if it is not set.
func chosen(t *testing.T, all []generator) []generator {
	t.Helper()
	only, err := regexp.Compile(os.Getenv("PROOF_ONLY"))
	if err != nil {
		t.Fatalf("PROOF_ONLY has to be a regular expression: %v", err)
	}
	return slices.DeleteFunc(slices.Clone(all), func(g generator) bool {
		return !only.MatchString(g.name)
	})
}

// lab contains the proof, the run and the prepared filesystems that all benches of a test share.
type lab struct {
	p     *proof.Proof
	t     *testing.T
	run   *harness.Run
	bases *bases
}

func newLab(t *testing.T, name string) *lab {
	t.Helper()
	l := &lab{p: proof.New(t, name), t: t, run: harness.RunFor(t)}
	var err error
	l.bases, err = newBases(l.run.Dir, l.p.Rand())
	l.p.Fatal(err)
	return l
}

// answer logs the answer of a call if PROOF_ANSWERS is set.
func (l *lab) answer(format string, args ...any) {
	if os.Getenv("PROOF_ANSWERS") != "" {
		l.p.Say(format, args...)
	}
}

// tally runs the trials in rounds, and counts their results.
type tally struct {
	*lab
	// features is set in the test of features. All its btrfs images have the same UUID, and the kernel
	// mounts only one btrfs of a UUID at a time. So each trial of a btrfs locks the mutex btrfs.
	features bool
	btrfs    sync.Mutex

	// mu guards the fields below.
	mu                 sync.Mutex
	disks, overwritten int
	outcomes           map[outcome]int
	// notMade counts images whose options mkfs refuses, and internal counts answers with INTERNAL.
	notMade, internal int
}

// benches is the number of drivers that work at once. Each mostly waits for the kernel.
const benches = 3

// round runs each generator's trial once. It stops when the proof's time is over, but it always
// completes the first round of the corpus.
func (c *tally) round(ctx context.Context, all []generator, seed uint64) {
	c.p.Error(harness.Share(benches, all, func(i int, jobs <-chan generator) error {
		b, err := c.newBench(ctx, "", "")
		if err == nil {
			b.Forged = c.p.Forged
			err = b.AddBystanders(ctx, proof.Members[i%len(proof.Members)], c.p.Bystanders)
		}
		if err != nil {
			return fmt.Errorf("start a driver: %w", err)
		}
		b.evidence = !c.features
		for g := range jobs {
			if (c.features || seed != c.p.Seed) && c.p.Over() {
				break
			}
			c.one(ctx, b, g, seed, len(all))
		}
		return b.close()
	}))
}

func (c *tally) one(ctx context.Context, b *bench, g generator, seed uint64, of int) {
	t := g.trial(seed)
	if c.features && t.FS == btrfs {
		c.btrfs.Lock()
		defer c.btrfs.Unlock()
	}
	start := time.Now()
	v, err := b.try(ctx, t)
	took := time.Since(start).Round(time.Millisecond)
	c.mu.Lock()
	defer c.mu.Unlock()
	if errors.Is(err, errNotMade) {
		c.notMade++
		return
	}
	c.disks++
	c.outcomes[v.Outcome]++
	if v.Overwritten {
		c.overwritten++
	}
	if status.Code(v.Answer) == codes.Internal {
		c.internal++
	}
	if err != nil {
		c.t.Errorf("%q (seed %d) cannot be tried: %v", g.name, seed, err)
	}
	if v.Wrong != nil {
		c.t.Errorf("%q (seed %d): %v", g.name, seed, v.Wrong)
	}
	c.answer("%q: %v %s %v", g.name, took, v.Outcome, v.Answer)
	c.p.SayOften("%d disks, %d in a round; the last one: %s", c.disks, of, g.name)
}

func (g generator) trial(seed uint64) *trial {
	h := fnv.New64a()
	fmt.Fprint(h, g.name)
	t := defaults(g.name, rand.New(rand.NewPCG(seed, h.Sum64())))
	g.make(t)
	return t
}

// mutation runs the driver without one guard at a time, and checks that the guard's trials fail.
type mutation struct {
	*lab
	program string
	all     []generator

	// mu guards unnoticed, the names of the guards whose trials passed although the guard was removed.
	mu        sync.Mutex
	unnoticed map[string]bool
}

// check runs the trials of each guard on a driver without this guard, where they must fail. It also
// runs all these trials on the mutant program with all its guards, where they must pass.
func (m *mutation) check(ctx context.Context, guards []guard, seed uint64) {
	if !m.p.Long() {
		guards = withOneTrial(guards, seed)
	}
	guards = append([]guard{{trials: trialsOf(guards)}}, guards...)
	m.p.Error(harness.Share(benches, guards, func(_ int, jobs <-chan guard) error {
		var errs []error
		for g := range jobs {
			if g.name != "" && m.p.Over() {
				break
			}
			if err := m.one(ctx, g, seed); err != nil {
				errs = append(errs, fmt.Errorf("guard %q (seed %d): %w", g.name, seed, err))
			}
		}
		return errors.Join(errs...)
	}))
}

// withOneTrial reduces each guard to one of its trials, which the seed selects. Each trial of a
// guard fails without the guard, so one is enough. The long form runs all trials.
func withOneTrial(all []guard, seed uint64) []guard {
	all = slices.Clone(all)
	for i, g := range all {
		n := (seed + uint64(i)) % uint64(len(g.trials))
		all[i].trials = g.trials[n : n+1]
	}
	return all
}

func trialsOf(guards []guard) []string {
	var names []string
	for _, g := range guards {
		names = append(names, g.trials...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// one runs the trials of a guard on a driver without this guard. If the guard has no name, the
// driver keeps all guards.
func (m *mutation) one(ctx context.Context, g guard, seed uint64) error {
	b, err := m.newBench(ctx, m.program, g.name)
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
			return fmt.Errorf("the mutant with all guards, on %q: %w", name, v.Wrong)
		case v.Wrong != nil:
			noticed = true
			m.answer("without %q, %q: %v", g.name, name, v.Wrong)
		case g.name != "":
			m.t.Errorf("without %q the trial %q does not fail (seed %d): %s, %v", g.name, name, seed,
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
