//go:build linux

package nodes

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"pgregory.net/rapid"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

func TestMain(m *testing.M) { namespace.Main(m) }

// longest is the maximum number of acts in a history.
const (
	wholeHistories = 20
	shortHistories = 3
	longest        = 44
)

// act is one event of a history. Its kind determines what a and b mean.
type act struct {
	kind string
	a, b int
	// If at is odd, the disturbance first waits until a keeper's operation is in progress. Then, if at
	// is positive, it waits for the leader's request with this number.
	at int
}

// kinds contains the kinds of acts other than disturbances. A repeated kind happens more often.
var kinds = []string{
	"turn", "turn", "turn", "turn", "turn", "turn", "turn", "turn", "turn", "turn", "turn", "turn",
	"kill before", "kill before", "kill after", "kill after", "refuse", "freeze", "elect",
	"round", "attacher", "kubelets", "controllers", "time", "time", "pod", "pod", "no pod",
}

// drawActs generates the acts of a history. A history has only a few kinds of disturbances, so that
// part of the cluster still works. The parameter turn selects two of these kinds, so that a few
// histories with successive values of turn have all kinds.
func drawActs(t *rapid.T, turn uint64) []act {
	all := slices.Sorted(maps.Keys(disturbances))
	n := uint64(len(all))
	two := []string{all[2*turn%n], all[(2*turn+1)%n]}
	some := append(rapid.SliceOfN(rapid.SampledFrom(all), 1, 3).Draw(t, "some"), two...)
	one := rapid.Custom(func(t *rapid.T) act {
		from := kinds
		if rapid.IntRange(0, 4).Draw(t, "disturbed") == 4 {
			from = some
		}
		return act{rapid.SampledFrom(from).Draw(t, "kind"), rapid.IntRange(0, 5).Draw(t, "a"),
			rapid.IntRange(1, 4).Draw(t, "b"), rapid.IntRange(-8, 8).Draw(t, "at")}
	})
	acts := rapid.SliceOfN(one, longest/2, longest).Draw(t, "acts")
	acts[len(acts)/3].kind, acts[2*len(acts)/3].kind = two[0], two[1]
	return acts
}

func (w *testCluster) do(a act) {
	name := names[a.a%len(names)]
	w.count(a.kind)
	switch a.kind {
	case "turn":
		for range a.b {
			w.turn()
		}
	case "round":
		w.round()
	case "kill before", "kill after":
		w.arm(&gate{at: a.b, after: a.kind == "kill after", act: w.kill})
	case "refuse":
		w.arm(&gate{at: a.b, act: func() error {
			w.log("refused")
			return apierrors.NewInternalError(errors.New("try again"))
		}})
	case "freeze":
		w.arm(&gate{at: a.b, act: w.freeze})
	case "elect":
		w.elect(1 - w.leader)
	case "attacher":
		w.attacher()
	case "kubelets":
		w.kubelets()
	case "controllers":
		w.controllers()
	case "time":
		w.pass([]time.Duration{time.Second, 5 * time.Second, 40 * time.Second, 2 * time.Minute,
			6 * time.Minute, 20 * time.Second}[a.a])
	case "pod":
		w.addPod(name, a.a)
	case "no pod":
		if pods := keepertest.List[*corev1.Pod](w.api, "default"); len(pods) > 0 {
			p := pods[a.b%len(pods)]
			w.log("%s is deleted", p.Name)
			keepertest.Delete[*corev1.Pod](w.api, "default", p.Name)
			w.budgets()
		}
	default:
		w.disturb(a)
	}
}

// turn runs every program of the cluster and the leading keeper once, and adds 2 s to the clock.
func (w *testCluster) turn() { w.turnOf(w.round) }

func (w *testCluster) turnOf(round func()) {
	w.controllers()
	w.attacher()
	round()
	w.kubelets()
	w.pass(2 * time.Second)
}

func (w *testCluster) arm(g *gate) { w.keepers[w.leader].gate = g }

func (w *testCluster) round() {
	i := w.leader
	w.raced = false
	_, err := w.keepers[i].Round(w.ctx)
	w.startStopped()
	switch {
	case errors.Is(err, keeper.ErrStepAside):
		w.elect(1 - i)
	case err != nil:
		w.log("round: %.200s", err)
	}
	if w.killed {
		w.killed = false
		w.restart(i, w.keepers[i].Config)
		w.elect(w.kills % 2)
	}
	if busy := w.busy(); len(busy) > 1 {
		w.breaks("the keepers work on several nodes at once: %v", busy)
	}
}

// startStopped lets both keepers start stopped instances. A keeper need not lead for this.
func (w *testCluster) startStopped() {
	for _, k := range w.keepers {
		if err := k.StartStopped(w.ctx); err != nil {
			w.log("%s: %.200s", k.node, err)
		}
	}
}

// elect makes keeper i the leader. It resets the field stale if no request is delayed and every
// instance runs, because then no earlier decision can still have an effect.
func (w *testCluster) elect(i int) {
	w.leader = i
	if !w.stale || len(w.onWay) > 0 || len(w.busy()) > 1 {
		return
	}
	for name, state := range w.states() {
		if state != oxide.InstanceStateRunning && w.byPeople[name].IsZero() {
			return
		}
	}
	w.stale = false
}

// kill stops the leader. Afterwards round() starts a new keeper and elects a leader.
func (w *testCluster) kill() error {
	k := w.keepers[w.leader]
	w.log("the keeper on %s is killed", k.node)
	w.killed = true
	w.kills++
	k.cut()
	return keepertest.ErrBreak
}

// freeze halts the leader right before a change. Meanwhile the cluster continues with the other
// keeper as the leader.
func (w *testCluster) freeze() error {
	frozen := w.leader
	w.log("the keeper on %s freezes", w.keepers[frozen].node)
	w.stale = true
	w.leader = 1 - frozen
	w.keepers[w.leader].gate = nil
	for range 8 {
		w.turn()
		w.pass(3 * time.Second)
	}
	w.leader = frozen
	w.log("the keeper on %s goes on", w.keepers[frozen].node)
	return nil
}

// unrest returns the reason why the cluster is not at rest, or "".
func (w *testCluster) unrest() string {
	states := w.states()
	for _, name := range names {
		n := w.node(name)
		switch state := states[name]; {
		case state != oxide.InstanceStateRunning:
			return fmt.Sprintf("the instance of %s is %s", name, state)
		case w.records()[name] != nil:
			return fmt.Sprintf("%s has a record: %+v", name, w.records()[name])
		case n.Spec.Unschedulable:
			return name + " is cordoned"
		case len(n.Spec.Taints) > 0:
			return fmt.Sprintf("%s has the taints %v", name, n.Spec.Taints)
		}
	}
	for _, a := range keepertest.List[*storagev1.VolumeAttachment](w.api, "") {
		if a.DeletionTimestamp != nil || !a.Status.Attached {
			return fmt.Sprintf("%s is not done: %v; %v", a.Name, a.Status,
				w.node(a.Spec.NodeName).Annotations)
		}
	}
	return ""
}

// rest runs turns until the cluster is at rest. Its limit allows for keepers that wait half an hour
// after failures.
func (w *testCluster) rest() error {
	unrest := ""
	for i := range 700 {
		w.turn()
		if unrest = w.unrest(); unrest == "" && i > 3 {
			return nil
		}
		if len(w.busy()) == 0 {
			w.pass(18 * time.Second)
		}
	}
	return errors.New("the world does not come to rest: " + unrest)
}

// clear stops the instances, deletes the disks, and starts the instances again.
func (w *testCluster) clear() (err error) {
	for _, i := range w.rack.Instances {
		err = errors.Join(err, w.rack.StopInstance(w.ctx, i.ID))
	}
	state, failed := w.rack.Admin.State(w.ctx)
	err = errors.Join(err, failed)
	for _, a := range state.Attachments {
		err = errors.Join(err, w.rack.DetachDisk(w.ctx, a.DiskID, a.InstanceID))
	}
	for _, disk := range w.disks {
		err = errors.Join(err, w.rack.DeleteDisk(w.ctx, disk))
	}
	for _, i := range w.rack.Instances {
		err = errors.Join(err, w.rack.StartInstance(w.ctx, i.ID))
	}
	return err
}

func run(ctx context.Context, t keepertest.T, r *harness.Rack, acts []act) (*testCluster, error) {
	w := newTestCluster(ctx, t, r)
	for i := range 4 {
		w.addPod(names[i%len(names)], i)
	}
	w.pass(time.Minute)
	for _, a := range acts {
		w.do(a)
	}
	w.mend()
	err := w.rest()
	if len(w.broken) > 0 {
		err = errors.New(strings.Join(w.broken, "\n"))
	} else if err != nil {
		w.brokenAt = time.Now()
	}
	return w, errors.Join(err, w.clear())
}

func startRack(t *testing.T) (rack *harness.Rack, dir string) {
	run := harness.RunFor(t)
	rack = harness.Need(run.StartRack(t.Context(),
		harness.RackOptions{Instances: names, Hotplug: "none"}))(t)
	t.Cleanup(func() { _ = rack.Stop() })
	return rack, run.Dir
}

func (w *testCluster) draw(p *proof.Proof, dir string, seed uint64, broken error) string {
	return p.Draw(w.ctx, proof.Failure{Name: fmt.Sprint("seed ", seed), Seed: seed, Broken: broken,
		At: w.brokenAt, Repeat: fmt.Sprintf("make nodes SEED=%d", seed), Dir: dir, Rack: w.rack,
		Omit: "instance_list", History: w.rack.History})
}

// A keeper must not stop the instance on which it runs. The test makes it stop this instance.
func TestStoppingTheKeepersOwnInstanceIsNoticedAndGetsAFailurePage(t *testing.T) {
	p := proof.New(t, "keeper-model")
	rack, dir := startRack(t)
	w := newTestCluster(t.Context(), t, rack)
	w.turn()
	_, err := w.keepers[0].Rack.InstanceStop(t.Context(), oxide.InstanceStopParams{
		Instance: oxide.NameOrId(rack.Instance(names[0]).ID)})
	p.Fatal(err)
	if len(w.broken) == 0 {
		t.Fatal("nobody notices the stop")
	}
	page := w.draw(p, dir, p.Seed, errors.New(strings.Join(w.broken, "\n")))
	p.Error(p.CheckPage(page, w.broken[0], "keeper a", "POST stop", "instance_stop",
		"make nodes SEED="))
}

// TestEveryInstanceRunsAfterKillsAndDisturbancesOfTheKeeper runs random histories (D-61).
func TestEveryInstanceRunsAfterKillsAndDisturbancesOfTheKeeper(t *testing.T) {
	p := proof.New(t, "keeper-model")
	rack, dir := startRack(t)
	proof.SetFlags(t, "rapid.checks", proof.OneCheck(), "rapid.nofailfile", "true",
		"rapid.shrinktime", "0s")
	histories, kills, stops, attached, most := 0, 0, 0, 0, 0
	counts := map[string]int{}
	many := wholeHistories
	if p.Short() {
		many = shortHistories
		short.Left(t, wholeHistories-many)
	}
	for ; histories < many && !p.Long() || p.Long() && !p.Over(); histories++ {
		seed := p.Seed + uint64(histories)
		proof.SetFlags(t, "rapid.seed", strconv.FormatUint(max(seed, 1), 10))
		rapid.Check(t, func(rt *rapid.T) {
			acts := drawActs(rt, seed)
			w, err := run(t.Context(), rt, rack, acts)
			if err != nil {
				failure := fmt.Sprintf("repeat with PROOF_SEED=%d:\n  %s\n%v", seed,
					strings.Join(w.lines, "\n  "), err)
				w.draw(p, dir, seed, err)
				t.Log(failure) // rapid repeats a failed history, and prints only the last failure
				rt.Fatal(failure)
			}
			kills, stops, attached = kills+w.kills, stops+w.stops, attached+w.volumes
			most = max(most, w.mostStops)
			for what, n := range w.counts {
				counts[what] += n
			}
		})
		p.SayOften("%d histories, %d kills, %d stops", histories+1, kills, stops)
	}
	want := append(slices.Clone(kinds), slices.Collect(maps.Keys(disturbances))...)
	if histories >= 10*wholeHistories {
		want = append(want, effects...)
	}
	for _, what := range want {
		if histories >= wholeHistories && counts[what] == 0 {
			t.Errorf("%d histories have none of this: %s", histories, what)
		}
	}
	p.Say("%v", counts)
	p.Figure("histories", histories, "kills", kills, "stops", stops, "volumes", attached,
		"kinds", len(counts), "in-rounds", counts["within a round"], "late", counts["late request"],
		"restarted", counts["started, stopped late"],
		"fenced", counts["fenced"], "max_stops_per_volume_day", most, "violations", 0)
}

// effects contains events that a run of many histories must cause at least once.
var effects = []string{"failed nodes", "failed pods", "failed poddisruptionbudgets",
	"failed persistentvolumes", "failed volumeattachments", "failed csinodes", "failed stop",
	"failed start", "failed view", "late request", "started, stopped late", "within a round",
	"node deleted in an operation", "hidden instance asked for", "destroyed instance asked for",
	"fenced", "unfenced", "freed", "started by a program", "attach only", "no API server after a stop"}
