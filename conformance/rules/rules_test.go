//go:build linux

package rules

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/legal"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

func TestEveryRuleIsCompleteAndHasAUniqueID(t *testing.T) {
	seen := map[string]bool{}
	for _, rule := range All() {
		switch {
		case !regexp.MustCompile(`^A\d\d$`).MatchString(rule.ID) || seen[rule.ID]:
			t.Errorf("rule %q: its ID is malformed, or given twice", rule.ID)
		case rule.Says == "" || rule.Why == "" || rule.Source == "" || rule.Check == nil:
			t.Errorf("%s lacks what it says, why, its source or its check", rule.ID)
		case len(rule.Calls) == 0:
			t.Errorf("%s names no operation that its check is about", rule.ID)
		case strings.Contains(rule.Why, "looks first") != (rule.Look != ""):
			t.Errorf("%s does not name the operation with which the driver looks first", rule.ID)
		}
		for _, name := range rule.Calls {
			if !slices.ContainsFunc(operations, func(o operation) bool { return o.name == name }) {
				t.Errorf("%s is about %s, which OperationOf does not know", rule.ID, name)
			}
		}
		seen[rule.ID] = true
	}
	if rows := strings.Count(assumptions, "\n| A"); rows != len(seen) || len(table) != rows {
		t.Errorf("ASSUMPTIONS.md has %d rules, of which %d were read; %d have checks", rows, len(seen),
			len(table))
	}
}

func TestTheSimulatorCitesEveryRuleAndNoOther(t *testing.T) {
	cited := map[string]bool{}
	files, err := filepath.Glob("../../simulator/*.go")
	csitest.Must(t, err)
	deeper, err := filepath.Glob("../../simulator/*/*.go")
	csitest.Must(t, err)
	for _, file := range append(files, deeper...) {
		if strings.HasSuffix(file, "_test.go") || strings.Contains(file, "/broken/") {
			continue
		}
		text, err := os.ReadFile(file)
		csitest.Must(t, err)
		for _, id := range regexp.MustCompile(`\bA\d\d\b`).FindAllString(string(text), -1) {
			cited[id] = true
		}
	}
	for _, rule := range All() {
		if !cited[rule.ID] {
			t.Errorf("the simulator does not cite %s: it does not imitate the rule, "+
				"or does not say where", rule.ID)
		}
		delete(cited, rule.ID)
	}
	for id := range cited {
		t.Errorf("the simulator cites %s, which is no rule", id)
	}
}

// marks gives each run other names, because a run on a broken rack may leave objects that would
// disturb the next one.
var marks atomic.Int64

// openRack opens the checks of a simulated rack, as from inside its first instance.
func openRack(t *testing.T, rack *harness.Rack, hotplug bool) *TestedRack {
	t.Helper()
	r, err := Open(configOf(rack, hotplug))
	csitest.Must(t, err)
	return r
}

func configOf(rack *harness.Rack, hotplug bool) Config {
	here := rack.Instance("")
	return Config{Host: rack.URL, Token: rack.Token, Project: rack.Project, CAFile: rack.CA,
		Mark: fmt.Sprintf("t%d", marks.Add(1)), Description: "made by a test", Hotplug: hotplug,
		Admin: &rack.Admin,
		Restart: func(ctx context.Context) error {
			mutations, err := rack.Admin.Mutations(ctx)
			rack.Kill()
			err = errors.Join(err, rack.Start(ctx))
			for _, m := range mutations {
				if m.Active && err == nil {
					err = rack.Admin.Mutate(ctx, m.Name) // a broken rack stays broken
				}
			}
			return err
		},
		Here: &GuestFiles{ID: here.ID, Sys: os.DirFS(filepath.Join(here.Guest, "sys"))}}
}

// startRack starts a rack. In make proofs, only racks that are started with arguments have the race
// detector: those of TestARackInOrderKeepsEveryRule.
func startRack(t *testing.T, options harness.RackOptions) *harness.Rack {
	t.Helper()
	run := harness.RunFor(t)
	run.Plain = len(options.Args) == 0
	// Some rules need an object of another project, or an image.
	options.Args = append(options.Args, "--project", "other", "--image", "silos=1048576",
		"--image", "sanity/projects=1073741824")
	rack, err := run.StartRack(t.Context(), options)
	csitest.Must(t, err)
	t.Cleanup(func() { csitest.Must(t, rack.Stop()) })
	return rack
}

func TestARackInOrderKeepsEveryRule(t *testing.T) {
	t.Parallel()
	// The rules cover these requirements.
	const requirements = "OF-1 OF-2 OF-3 OF-4 OF-5 OF-6 OF-7 OF-8 OF-9 OF-10 OF-11 OF-12 OF-13 " +
		"OF-14 OF-15 B-51 a rack "
	for name, hotplug := range map[string]adminapi.Hotplug{"with hot-plug": adminapi.HotplugFull,
		"that only attaches": adminapi.HotplugAttachOnly, "without": adminapi.HotplugNone} {
		t.Run(requirements+name, func(t *testing.T) {
			t.Parallel()
			cold := hotplug != adminapi.HotplugFull
			// A check must not rely on the speed of a simulated rack.
			rack := startRack(t, harness.RackOptions{Hotplug: hotplug,
				Args: []string{"--instance-delay", "100ms", "--device-delay", "50ms"}})
			if cold { // the instance has a boot disk
				ctx, instance := t.Context(), rack.Instance("").ID
				disk, err := rack.CreateDisk(ctx, rack.Project, "boot-disk-of-an-instance", GiB)
				csitest.Must(t, err)
				csitest.Must(t, rack.StopInstance(ctx, instance))
				csitest.Must(t, rack.AttachDisk(ctx, disk.Id, instance))
				csitest.Must(t, rack.StartInstance(ctx, instance))
			}
			r := openRack(t, rack, !cold)
			r.AttachOnly = hotplug == adminapi.HotplugAttachOnly
			before, err := rack.Ledger(t.Context())
			csitest.Must(t, err)
			count := map[Status]int{}
			for _, rule := range All() {
				result := r.Run(t.Context(), rule)
				count[result.Status]++
				switch {
				case result.Status == failed, result.Status == blocked && !cold:
					t.Errorf("%s %s: %s", rule.ID, result.Status, result.Reason)
				case result.Status == notTested:
					t.Errorf("%s is not tested on a simulated rack: %s", rule.ID, result.Reason)
				case result.Status == passed && len(result.Extent) == 0:
					t.Errorf("%s does not state how far it looked", rule.ID)
				case len(result.Extent.Partly()) > 0:
					t.Errorf("%s looked at less than there is: %s", rule.ID, result.Extent.Partly())
				case result.Tries > 1:
					t.Errorf("%s took %d tries", rule.ID, result.Tries)
				}
				t.Logf("%s %s in %s, %d requests", rule.ID, result.Status, result.Took, len(result.Exchanges))
			}
			if err := r.Close(t.Context()); err != nil {
				t.Error(err)
			}
			if err := rack.Balance(t.Context(), before); err != nil {
				t.Errorf("the checks have left something: %s", err)
			}
			csitest.Must(t, proof.Print(proof.Line("rules", "rack", fmt.Sprintf("%q", name), "rules",
				len(All()), "passed", count[passed], "blocked", count[blocked])))
		})
	}
}

// onRacks tries the cases on several racks at the same time.
func onRacks[T any](t *testing.T, cases []T, try func(*harness.Rack, T) error) {
	t.Helper()
	var racks [3]*harness.Rack
	for i := range racks {
		racks[i] = startRack(t, harness.RackOptions{})
	}
	csitest.Must(t, harness.Share(len(racks), cases, func(worker int, cases <-chan T) (err error) {
		for c := range cases {
			err = errors.Join(err, try(racks[worker], c))
		}
		return err
	}))
}

type breach struct {
	rule Rule
	adminapi.Mutation
}

func TestEveryBrokenRuleIsNoticed(t *testing.T) {
	t.Parallel()
	mutations, err := startRack(t, harness.RackOptions{}).Admin.Mutations(t.Context())
	csitest.Must(t, err)
	var all []breach
	names := map[string]bool{}
	for _, m := range mutations {
		if names[m.Name] || m.Says == "" || m.Rule == "" {
			t.Errorf("a mutation with a name that another one has, or without words: %+v", m)
		}
		names[m.Name] = true
	}
	for _, rule := range All() {
		before := len(all)
		for _, m := range mutations {
			if m.Rule == rule.ID {
				all = append(all, breach{rule, m})
			}
		}
		if len(all) == before {
			t.Errorf("nothing breaks %s: the simulator has no mutation for it", rule.ID)
		}
	}
	all = short.Some(t, len(all)/4, all)
	var noticed atomic.Int64
	onRacks(t, all, func(rack *harness.Rack, broken breach) error {
		ctx := t.Context()
		// Open the rack again, so that this check shares no object with the one before.
		r, err := Open(configOf(rack, true))
		if err = errors.Join(err, rack.Admin.Mutate(ctx, broken.Name)); err != nil {
			return fmt.Errorf("%s: %w", broken.Name, err)
		}
		r.pause = time.Millisecond // a broken rule stays broken
		result := r.Run(ctx, broken.rule)
		if err := errors.Join(rack.Admin.Mend(ctx), r.Close(ctx)); err != nil {
			return fmt.Errorf("%s: %w", broken.Name, err)
		}
		if result.Status == failed {
			noticed.Add(1)
			t.Logf("%s: %s", broken.Name, result.Reason)
		} else {
			t.Errorf("%s: %s: the check of %s says %s %s", broken.Name, broken.Says, broken.rule.ID,
				result.Status, result.Reason)
		}
		return nil
	})
	csitest.Must(t, proof.Print(proof.Line("broken-rules", "mutations", len(all), "noticed",
		noticed.Load())))
}

// sampledRules is the number of rules checked on each rack if PROOF_DURATION is not set.
const sampledRules = 12

// alwaysChecked are the rules whose checks have once failed on healthy racks.
var alwaysChecked = []string{"A01", "A09", "A10", "A16", "A29", "A38", "A41", "A43", "A59"}

func TestNoCheckFailsOnAHealthyRack(t *testing.T) {
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
	p.Figure("kinds", len(kinds), "runs", runs, "results", count[passed]+count[notTested],
		"not_tested", count[notTested], "false_alarms", alarms)
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
			case result.Status == failed, result.Status == blocked:
				alarms = append(alarms, rule.ID+": "+result.Reason)
			case result.Status == notTested && result.Reason == "":
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
