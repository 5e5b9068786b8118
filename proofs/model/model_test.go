//go:build linux

package model

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

func TestMain(m *testing.M) { namespace.Main(m) }

// A proof runs wholeHistories, or shortHistories in short mode. A history has up to longest wishes.
const (
	wholeHistories = 7
	shortHistories = 1
	longest        = 50
)

// runner runs histories in one environment. After a failed history it makes a new environment.
type runner struct {
	proof   *proof.Proof
	run     *harness.Run
	env     *Environment
	formats proof.Formats
	// page is the path of the page that shows the last failed history.
	page  string
	count counts
}

func newRunner(t testing.TB, name string) *runner {
	t.Helper()
	r := &runner{proof: proof.New(t, name), run: harness.RunFor(t), count: counts{ops: map[op]int{}}}
	t.Cleanup(func() {
		if r.env != nil {
			r.proof.Error(r.env.Close())
		}
	})
	return r
}

// runHistory runs the steps of a history, and then deletes everything that they have created.
func (r *runner) runHistory(ctx context.Context, name string, seed uint64, m *manipulation,
	steps func(*History)) (h *History, err error) {
	if r.env == nil {
		if err := r.newEnvironment(ctx); err != nil {
			return nil, fmt.Errorf("make an environment: %w", err)
		}
	}
	r.env.Rack.History.Begin()
	h = NewHistory(r.env)
	h.count = &r.count
	h.manipulation = m
	err = func() (err error) {
		defer harness.Catch(&err)
		steps(h)
		return h.TearDown(ctx, true)
	}()
	if err != nil {
		r.page = r.proof.Draw(ctx, proof.Failure{Name: name, Seed: seed, Broken: err,
			Repeat: fmt.Sprintf("make model SEED=%d", seed), Dir: r.run.Dir, Rack: r.env.Rack,
			Plugins: r.env.Plugins, History: r.env.Rack.History})
		_, _ = h.world.dropAll(), r.env.Abandon(ctx) // the history's failure has been reported
		r.env = nil
	}
	return h, err
}

func (r *runner) newEnvironment(ctx context.Context) (err error) {
	defer harness.Catch(&err)
	tools := filepath.Join(harness.Got(os.MkdirTemp(r.run.Dir, "tools-")), "bin")
	r.formats = harness.Got(proof.CountFormats(tools))
	r.env, err = NewEnvironment(ctx, r.run, r.proof, "c", proof.BtrfsMember, harness.PluginOptions{
		Args: []string{"--device-timeout=1s"},
		Env:  map[string]string{"PATH": tools + ":" + os.Getenv("PATH")}})
	harness.Must(err)
	return r.env.TakeBaseline(ctx)
}

func TestRandomHistoriesReachOnlyStatesThatTheModelAllows(t *testing.T) { // B-38
	r := newRunner(t, "model")
	p := r.proof
	sum := &r.count
	histories := 0
	var failed []string
	t.Cleanup(func() {
		if len(failed) > 0 {
			t.Logf("the history that failed first, with PROOF_SEED=%d:\n%s",
				p.Seed+uint64(histories), failed[0])
		}
	})
	proof.SetFlags(t, "rapid.checks", proof.OneCheck(), "rapid.nofailfile", "true",
		"rapid.shrinktime", "90s")
	most := wholeHistories
	if p.Short() {
		most = shortHistories
		short.Left(t, wholeHistories-most)
	}
	for ; histories < most && !p.Long() || p.Long() && !p.Over(); histories++ {
		seed := p.Seed + uint64(histories)
		proof.SetFlags(t, "rapid.seed", strconv.FormatUint(max(seed, 1), 10))
		rapid.Check(t, func(rt *rapid.T) {
			volumes := rapid.SliceOfNDistinct(rapid.IntRange(1, len(kinds)-1), 1, 3, rapid.ID[int]).
				Draw(rt, "volumes")
			wishes := rapid.SliceOfN(rapid.Custom(drawWish), longest/2, longest).Draw(rt, "history")
			name := fmt.Sprint("seed ", seed)
			h, err := r.runHistory(t.Context(), name, seed, nil, func(h *History) {
				for _, w := range wishes {
					h.run(t.Context(), h.orchestrator.resolve(w, volumes)...)
				}
			})
			if h == nil {
				rt.Fatal(err)
			}
			if err != nil {
				failed = append(failed, h.Transcript())
				rt.Fatalf("repeat with PROOF_SEED=%d; this history ends with an error:\n%s\n%v",
					seed, h.Transcript(), err)
			}
		})
		p.Say("%d histories, %d steps, %d faults, %d restarts", histories+1, sum.steps, sum.faults,
			sum.restarts)
	}
	p.Figure("histories", histories, "steps", sum.steps, "faults", sum.faults,
		"restarts", sum.restarts, "without_device", sum.bare, "bytes_acknowledged", sum.bytes,
		"bytes_lost", sum.lost)
	p.Error(proof.Print(proof.Line("holders", "trials", sum.holders, "wrong_ok", sum.released,
		"seed", p.Seed)))
	p.Error(proof.Print(proof.Line("acknowledged", "trials", sum.copies, "missing",
		sum.lost/blockSize)))
	if r.env != nil {
		p.Error(r.env.Bystanders.Compare())
	}
	p.Bystanders.Report()
	if !p.Short() { // the short form may have no history with forged records
		p.Forged.Report()
	}
}

func TestParseStepParsesWhatStringPrints(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		h := NewHistory(nil)
		for _, s := range h.orchestrator.resolve(drawWish(rt), []int{1, 4}) {
			line := strings.ReplaceAll(s.String(), " || ", " = Aborted (busy) || ") + " = OK"
			got, err := parseStep(line)
			if err != nil {
				rt.Fatal(err)
			}
			if got.String() != s.String() {
				rt.Fatalf("%q was read as %q", s, got)
			}
		}
	})
}

// wish is a random intention of the orchestrator, or a disturbance. resolve converts a wish to
// steps in the present state, so a history remains possible when rapid removes wishes from it.
type wish struct {
	kind, vol, node, pod, block, ctl, fault, other int
	op                                             op
	mishap                                         Mishap
	after                                          time.Duration
	move, shadow                                   bool
}

// GoString implements fmt.GoStringer. rapid uses it to print generated values.
func (w wish) GoString() string { return fmt.Sprintf("%d:v%d", w.kind, w.vol) }

// These are kinds of wishes. When rapid simplifies a failed history, it prefers the first kind.
const (
	onwards = iota
	backwards
	anyCall
	again
	writing
	pairing
	misfortune
	restarting
	disturbing
	waiting
)

var shares = []struct{ kind, percent int }{
	{onwards, 28}, {backwards, 10}, {anyCall, 11}, {again, 8}, {writing, 9}, {pairing, 8},
	{misfortune, 11}, {restarting, 5}, {disturbing, 8}, {waiting, 2},
}

func kindOf(percent int) int {
	for _, s := range shares {
		if percent -= s.percent; percent < 0 {
			return s.kind
		}
	}
	return waiting
}

var restarts = []op{killNode, killController, endNode, endController, killRack, restartRack,
	stopInstance}

// disturbances are acts of pods and administrators, and calls that are wrong on purpose.
var disturbances = []op{freeze, thaw, hold, hold, holdByLoop, holdByLoop, letGo, stageAstray,
	unstageAstray, publishOther, unpublishAstray, makeNamesake, makeNamesake, takeNamesake}

func drawWish(t *rapid.T) wish {
	draw := func(most int, what string) int {
		// rapid draws small numbers more often. Here every number has the same probability.
		return int(mixed(rapid.Uint64().Draw(t, what)) % uint64(most+1))
	}
	w := wish{kind: kindOf(draw(99, "kind")), vol: draw(99, "volume")}
	w.node, w.pod, w.block = draw(2, "node"), draw(1, "pod"), draw(blocks-1, "block")
	w.ctl = draw(1, "controller")
	w.move, w.other = draw(19, "move") == 19, draw(99, "other")
	switch w.kind {
	case anyCall:
		w.op = callOps[draw(len(callOps)-1, "call")]
	case writing:
		w.op = []op{writeSynced, write}[draw(1, "synced")]
	case pairing:
		w.op, w.shadow = callOps[draw(len(callOps)-1, "call")], draw(2, "twin") < 2
	case misfortune:
		w.fault, w.shadow = draw(999, "fault"), draw(2, "onwards") > 0
	case disturbing:
		w.op = disturbances[draw(len(disturbances)-1, "disturbance")]
	case restarting:
		w.op = restarts[draw(len(restarts)-1, "restart")]
	}
	if w.kind <= again {
		if chance := draw(99, "mishap"); chance >= 88 {
			w.mishap = []Mishap{Abandoned, Killed, Abandoned, rackDies}[chance%4]
			w.after = time.Duration(draw(30_000, "after")) * time.Microsecond
		}
	}
	return w
}

// mixed is a hash that distributes numbers evenly. mixed(0) is 0.
func mixed(u uint64) uint64 {
	u *= 0x9E3779B97F4A7C15
	u ^= u >> 29
	u *= 0xBF58476D1CE4E5B9
	return u ^ u>>32
}

// backwards returns the next step to delete a volume or, after its deletion, to create it again.
func (o *orchestrator) backwards(v int) Step {
	if s := o.away(v); s.op != "" {
		return s
	}
	return o.towards(v, o.goals[v])
}

func (o *orchestrator) resolve(w wish, volumes []int) []Step {
	v, n := volumes[w.vol%len(volumes)], nodes[w.node]
	if w.move || o.goals[v] == "" {
		o.goals[v] = n
	}
	s := Step{op: w.op, ctl: 1 + w.ctl, vol: v, snap: 1 + w.vol%(len(snapOf)-1), node: n,
		pod: pods[w.pod], block: w.block, other: volumes[w.other%len(volumes)]}
	switch w.kind {
	case onwards:
		s = o.towards(v, o.goals[v])
	case backwards:
		s = o.backwards(v)
	case anyCall:
		if w.node == 0 && s.op.onNode() {
			s.node = o.goals[v] // the node that has the volume is chosen more often
		}
	case again:
		if s = o.last; !s.op.isCall() || s.ctl == 0 && !s.op.onNode() {
			s = o.towards(v, o.goals[v])
		} else if s.ctl != 0 {
			s.ctl = 1 + w.ctl
		}
		s.mishap, s.with = None, nil
	case writing, disturbing:
		if s.node = o.goals[v]; s.op == hold || s.op == holdByLoop {
			return o.holding(s, volumes)
		}
	case pairing:
		if w.pod == 1 {
			s.vol = volumes[w.block%len(volumes)]
		}
		s = o.pair(w, v, s)
	case misfortune:
		return o.misfortune(w, v)
	case restarting:
		if o.world.rackDown {
			s.op = startRack
		} else if o.world.down[n] && (s.op == stopInstance || s.op == killNode || s.op == endNode) {
			s.op = startInstance
		}
	case waiting:
		s = Step{op: wait}
	}
	if s.op.isCall() {
		o.last = s
		if !s.op.astray() {
			s.mishap, s.after = w.mishap, w.after
		}
		if s.op == stage {
			s.after *= 5 // a stage takes longer than other calls, because it may format the disk
		}
	}
	return []Step{s}
}

// holding returns steps: the first keeps the device of a published volume open, and the others are
// calls that try to release the volume.
func (o *orchestrator) holding(s Step, volumes []int) []Step {
	v := slices.IndexFunc(volumes, func(v int) bool { return o.goals[v] != "" })
	if v < 0 {
		return []Step{s}
	}
	s.vol = volumes[v]
	s.node = o.goals[s.vol]
	var calls []Step
	for _, p := range pods {
		if o.world.seen[publishedField(s.vol, s.node, p)] != "" {
			s.pod = p
			calls = append(calls, Step{op: unpublish, vol: s.vol, node: s.node, pod: p})
		}
	}
	if calls == nil {
		return []Step{o.towards(s.vol, s.node)}
	}
	calls = append(calls, Step{op: unstage, vol: s.vol, node: s.node})
	return append([]Step{s}, calls...)
}

// misfortune returns a step that adds a fault, and a call that may meet the fault.
func (o *orchestrator) misfortune(w wish, v int) []Step {
	next := o.towards(v, o.goals[v])
	if !w.shadow {
		next = o.backwards(v)
	}
	if operations[next.op] == "" {
		// No fault affects this call. An attach is possible in every state, so it replaces the call.
		next = Step{op: attach, ctl: 1 + w.ctl, vol: v, node: o.goals[v]}
	}
	names := slices.DeleteFunc(faultNames(), func(name string) bool {
		operation := faults[name].Operation
		return operation != operations[next.op] &&
			(w.fault%8 != 0 || !strings.HasSuffix(operation, "_view"))
	})
	if next.op == attach { // this fault leads to many states, so it is chosen more often
		names = append(names, slices.Repeat([]string{noDevice}, 4)...)
	}
	return []Step{{op: fault, fault: names[w.fault%len(names)]}, next}
}

// operations maps a call to the rack's operation by which the driver carries it out.
var operations = map[op]string{
	createVolume: "disk_create", deleteVolume: "disk_delete", attach: "instance_disk_attach",
	detach: "instance_disk_detach", detachAll: "instance_disk_detach",
	createSnapshot: "snapshot_create", deleteSnapshot: "snapshot_delete",
}

// pair pairs the volume's next call with the same call if w.shadow is set, and else with other.
func (o *orchestrator) pair(w wish, v int, other Step) Step {
	s := o.towards(v, o.goals[v])
	if !s.op.isCall() {
		if s = o.away(v); s.op == "" {
			return Step{op: wait}
		}
	}
	if w.shadow {
		other = s
		if other.ctl != 0 {
			other.ctl = 3 - s.ctl
		}
	}
	s.with = &other
	return s
}
