//go:build linux

package model

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

const callers = 64

// In each step of a history, many callers call two controllers or a node at the same time. Their
// calls are for one volume or for four. The long form repeats the histories for a given time.
func TestConcurrentCallsReachOnlyStatesThatTheModelAllows(t *testing.T) { // B-13, D-41
	before := goleak.IgnoreCurrent()
	r := newRunner(t, "concurrency")
	if r.proof.Short() {
		short.Left(t, 1)
	}
	n := &r.count
	for seed := range r.proof.Rounds() {
		random, round := rand.New(rand.NewPCG(seed, 5)), int(seed-r.proof.Seed)
		_, err := r.runHistory(t.Context(), fmt.Sprint("crowds ", round), r.proof.Seed, nil,
			func(h *History) { h.crowds(t.Context(), random, round) })
		for _, err := range []error{err, r.formatsAre()} {
			if err != nil {
				n.wrong++
				t.Error(err)
			}
		}
		r.proof.Say("round %d: %d calls, %d of them aborted, %d formats", round+1, n.calls.Load(),
			n.aborted.Load(), n.formats)
	}
	races, leaked := r.close(t)
	goleak.VerifyNone(t, before)
	r.proof.Error(proof.Print(proof.Line("one-name", "creates", n.ops[createVolume],
		"controllers", 2, "names", n.names, "disks", n.disks, "ids", n.ids, "attaches", n.ops[attach],
		"snapshots", n.ops[createSnapshot], "deletes", n.ops[deleteVolume])))
	r.proof.Error(proof.Print(proof.Line("one-volume", "stages", n.ops[stage],
		"publishes", n.ops[publish], "formats", n.formats, "mounts", n.mounts)))
	r.proof.Figure("callers", callers, "calls", n.calls.Load(), "aborted", n.aborted.Load(),
		"abandoned", n.abandoned, "volumes", n.volumes, "wrong", n.wrong, "races", races,
		"leaked_goroutines", leaked)
	r.proof.Bystanders.Report()
}

// formatsAre returns an error unless mkfs ran once for every volume with a filesystem.
func (r *runner) formatsAre() (err error) {
	if r.env == nil {
		return nil // a failed history has ended the environment
	}
	n := &r.count
	if n.formats, err = r.formats.Count(); err == nil && n.formats != n.formatted {
		err = fmt.Errorf("%d volumes got their filesystem by %d formats", n.formatted, n.formats)
	}
	return err
}

func (r *runner) close(t *testing.T) (races, leaked int) {
	if r.env == nil {
		return 0, 0
	}
	env := r.env
	r.env = nil
	if err := env.Balance(t.Context()); err != nil {
		t.Errorf("the ledger does not balance: %v", err)
		leaked = strings.Count(err.Error(), "goroutine of")
	}
	r.proof.Error(env.Close()) // also reports a process that the race detector ended
	logs := []string{env.Rack.LogFile()}
	for _, p := range env.Plugins {
		logs = append(logs, p.LogFile)
	}
	for _, log := range logs {
		text, err := os.ReadFile(log)
		r.proof.Error(err)
		races += strings.Count(string(text), "WARNING: DATA RACE")
	}
	return races, leaked
}

// wave describes calls that many callers make at the same time. The callers take the ops in
// rotation. If disturbed is set, a fault of the rack affects one of the calls.
type wave struct {
	ops       []op
	disturbed bool
}

// The waves of waysUp create and use volumes. Those of waysDown remove volumes. After a wave of
// calls that undo each other, all callers make the same call, so that the state is known again.
var (
	waysUp = slices.Concat([]wave{
		{[]op{createVolume}, true}, {[]op{createVolume, deleteVolume}, false},
		{[]op{createVolume}, false},
		{[]op{attach}, true}, {[]op{attach, detach}, false}, {[]op{attach}, false},
	}, slices.Repeat([]wave{
		{[]op{stage}, false}, {[]op{unstage, publish}, false}, {[]op{unpublish}, false},
	}, contended), []wave{
		{[]op{stage}, false}, {[]op{publish}, false}, {[]op{stats, publish}, false},
		// The snapshots come after the stages: prepare() refuses a snapshot of a blank btrfs volume.
		{[]op{createSnapshot}, true}, {[]op{createSnapshot, deleteSnapshot}, false},
		{[]op{createSnapshot}, false},
	})
	waysDown = slices.Concat([]wave{
		{[]op{unpublish}, false},
	}, slices.Repeat([]wave{{[]op{stage, unstage, publish, unpublish}, false}}, contended), []wave{
		{[]op{unpublish}, false}, {[]op{unstage}, false},
		{[]op{stage}, false}, {[]op{publish}, false}, // now the check reads the data
		{[]op{unpublish}, false}, {[]op{unstage}, false}, {[]op{detach}, true},
		{[]op{deleteVolume}, true}, {[]op{deleteSnapshot}, false},
	})
)

// contended is the number of repetitions of each wave of node calls that undo each other.
const contended = 3

func (h *History) crowds(ctx context.Context, r *rand.Rand, round int) {
	lives := [][]int{{1 + round%4}, {1, 2, 3, 4}}
	if h.env.Proof.Short() {
		lives = lives[:1]
	}
	for _, volumes := range lives {
		for _, w := range waysUp {
			h.crowd(ctx, r, volumes, w)
		}
		for _, v := range volumes {
			h.count.volumes++
			if !kinds[v].block() {
				h.count.formatted++
			}
			for _, p := range pods {
				h.run(ctx, Step{op: writeSynced, vol: v, node: h.orchestrator.goals[v], pod: p,
					block: r.IntN(blocks)})
			}
		}
		for _, w := range waysDown {
			h.crowd(ctx, r, volumes, w)
		}
	}
}

// crowd makes the calls of a wave at once. Some callers abandon their call, but not the first
// caller. No detach is abandoned, because the rack might carry it out after the next attach.
func (h *History) crowd(ctx context.Context, r *rand.Rand, volumes []int, w wave) {
	var first *Step
	late := false
	for i := range callers {
		v := volumes[i%len(volumes)]
		s := &Step{op: w.ops[i/len(volumes)%len(w.ops)], vol: v, ctl: 1 + r.IntN(2),
			pod: pods[r.IntN(2)], node: h.orchestrator.goals[v], with: first}
		switch s.op {
		case createSnapshot, deleteSnapshot:
			s.vol, s.snap = 0, []int{0, 1, 3, 4, 2}[v]
		case attach, detach:
			if s.node = h.world.seen[holderField(v)]; s.node == "" || len(w.ops) > 1 {
				s.node = nodes[r.IntN(2)]
			}
		}
		if i < callers-1 && s.op != detach && r.IntN(8) == 0 {
			s.mishap, s.after = Abandoned, time.Duration(r.IntN(20))*time.Millisecond
			h.count.abandoned++
			late = true
		}
		h.count.ops[s.op]++
		first = s
	}
	if w.disturbed {
		h.run(ctx, h.faultOf(r, *first))
	}
	harness.Must(h.step(ctx, *first))
	if h.ended == nil {
		fail("the orchestrator cannot make the calls: %s", first.brief())
	}
	if late {
		harness.Must(h.Wait(ctx))
	}
	h.noteCrowd(volumes, w)
}

// faultOf returns a step that injects a fault into the rack's operation that the call s needs.
func (h *History) faultOf(r *rand.Rand, s Step) Step {
	names := slices.DeleteFunc(faultNames(), func(name string) bool {
		return faults[name].Operation != operations[s.op] || faults[name].Device != nil
	})
	return Step{op: fault, fault: names[r.IntN(len(names))]}
}

// noteCrowd counts the results of a wave, and sets each volume's goal to the node that has it. It
// fails if a wave's only op never succeeded for a volume, or a published filesystem is not staged.
func (h *History) noteCrowd(volumes []int, w wave) {
	ids, seen, n := map[string]bool{}, h.world.seen, h.count
	all := op("") // the only op of the wave, or "" if it has several
	if len(w.ops) == 1 {
		all = w.ops[0]
	}
	for _, c := range h.ended {
		if c.how == succeeded {
			ids[c.id] = true
		}
	}
	if all != "" && len(ids) < len(volumes) {
		fail("the calls succeed for %d of %d volumes", len(ids), len(volumes))
	}
	for _, v := range volumes {
		node := cmp.Or(seen[holderField(v)], h.orchestrator.goals[v])
		h.orchestrator.goals[v] = node
		if !kinds[v].block() && seen.published(v, node) && seen[stagedField(v, node)] == "" {
			fail("v%d is published on %s and not staged", v, node)
		}
		if all == createVolume && seen[diskField(v)] != "" {
			n.disks++
		}
		for _, p := range pods {
			if all == publish && seen[publishedField(v, node, p)] != "" {
				n.mounts++
			}
		}
	}
	if all == createVolume {
		n.names, n.ids = n.names+len(volumes), n.ids+len(ids)
	}
}
