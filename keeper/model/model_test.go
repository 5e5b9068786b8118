//go:build linux

package model

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"pgregory.net/rapid"

	"github.com/oxidecomputer/oxide-csi-plugin/keeper"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

func TestMain(m *testing.M) { proof.Main(m) }

// shortHistories is how many histories the short form has, and longest how many acts one has.
const (
	shortHistories = 40
	longest        = 60
)

// act is one act of a history. What its numbers mean depends on its kind.
type act struct {
	kind string
	a, b int
}

// kinds are the kinds of acts; those that stand here more often happen more often.
var kinds = []string{
	"turn", "turn", "turn", "turn", "turn", "turn", "turn", "turn", "turn", "turn", "turn", "turn",
	"kill before", "kill before", "kill after", "kill after", "refuse", "freeze", "elect",
	"round", "attacher", "kubelets", "controllers", "time", "time", "pod", "pod", "no pod",
	"cordon", "label", "dead kubelet", "no eviction", "stuck pods", "rack refuses", "rack is late",
}

func drawActs(t *rapid.T) []act {
	one := rapid.Custom(func(t *rapid.T) act {
		return act{rapid.SampledFrom(kinds).Draw(t, "kind"), rapid.IntRange(0, 5).Draw(t, "a"),
			rapid.IntRange(1, 4).Draw(t, "b")}
	})
	return rapid.SliceOfN(one, longest/2, longest).Draw(t, "acts")
}

// do does an act.
func (w *world) do(a act) {
	name := names[a.a%len(names)]
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
			w.say("refused")
			return apierrors.NewInternalError(errors.New("try again"))
		}})
	case "freeze":
		w.arm(&gate{at: a.b, act: w.freeze})
	case "elect":
		w.leader = 1 - w.leader
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
			w.say("%s is deleted", p.Name)
			keepertest.Delete[*corev1.Pod](w.api, "default", p.Name)
		}
	default:
		w.disturb(a.kind, name, a)
	}
}

// disturb does what people, and programs out of order, do.
func (w *world) disturb(kind, name string, a act) {
	switch kind {
	case "cordon":
		cordoned := w.node(name).Spec.Unschedulable
		w.say("somebody sets unschedulable of %s to %v", name, !cordoned)
		w.byHand[name] = !cordoned
		w.edit(name, func(n *corev1.Node) { n.Spec.Unschedulable = !cordoned })
	case "label":
		w.edit(name, func(n *corev1.Node) {
			if n.Labels[keeper.ColdAttachLabel] == "" {
				n.Labels = map[string]string{keeper.ColdAttachLabel: keeper.Allowed}
				return
			}
			w.say("somebody takes the label from %s", name)
			n.Labels = nil
		})
	case "dead kubelet":
		w.dead[name] = !w.dead[name]
		w.say("the kubelet of %s is dead: %v", name, w.dead[name])
	case "no eviction":
		w.noEviction = !w.noEviction
		w.budgets()
	case "stuck pods":
		w.stuck = !w.stuck
	case "rack refuses", "rack is late":
		operation := []string{"instance_stop", "instance_start", "instance_view"}[a.a%3]
		fault := adminapi.Fault{Operation: operation, Times: a.b, Phase: adminapi.Instead,
			Response: &adminapi.Response{Status: 503, ErrorCode: "ServiceUnavailable"}}
		if kind == "rack is late" {
			fault.Operation, fault.Times = []string{"instance_stop", "instance_start"}[a.a%2], 1
			fault.Phase, fault.Response = adminapi.Deferred, nil
			fault.Cut, fault.Delay = true, adminapi.Duration(time.Hour)
			w.late = true
			w.stale = true // what is asked for may happen after the next was decided
		}
		w.say("%s: %s", kind, fault.Operation)
		w.fault(fault)
	}
}

func (w *world) fault(f adminapi.Fault) {
	if _, err := w.rack.Admin.AddFault(w.ctx, f); err != nil {
		panic(err)
	}
}

func (w *world) edit(name string, change func(*corev1.Node)) {
	keepertest.Edit(w.api, "", name, change)
}

// turn is what happens in a second or so if nothing is out of order.
func (w *world) turn() {
	w.controllers()
	w.attacher()
	w.round()
	w.kubelets()
	w.pass(2 * time.Second)
}

// arm lets something happen at one of the next changes that the leader makes.
func (w *world) arm(g *gate) { w.keepers[w.leader].gate = g }

// round lets the leader do a round.
func (w *world) round() {
	i := w.leader
	_, err := w.keepers[i].Round(w.ctx)
	switch {
	case errors.Is(err, keeper.ErrStepAside):
		w.leader = 1 - i
	case err != nil:
		w.say("round: %.200s", err)
	}
	if w.killed {
		w.killed = false
		w.restart(i)
		w.leader = w.kills % 2
	}
	w.look()
}

// kill ends the leader at once. Another one takes its place after the round that it did not finish.
func (w *world) kill() error {
	k := w.keepers[w.leader]
	w.say("the keeper on %s is killed", k.node)
	w.killed = true
	w.kills++
	k.cut()
	return keepertest.ErrBreak
}

// freeze lets the world go on, and the other keeper lead, while a keeper stands still before a
// change that it has decided on.
func (w *world) freeze() error {
	frozen := w.leader
	w.say("the keeper on %s freezes", w.keepers[frozen].node)
	w.stale = true
	w.leader = 1 - frozen
	w.keepers[w.leader].gate = nil
	for range 8 {
		w.turn()
		w.pass(3 * time.Second)
	}
	w.leader = frozen
	w.say("the keeper on %s goes on", w.keepers[frozen].node)
	return nil
}

// look holds the state of the cluster against the promises.
func (w *world) look() {
	if busy := w.busy(); len(busy) > 1 && !w.stale {
		w.breaks("the keepers work on several nodes at once: %v", busy)
	}
}

// mend takes away all that hinders.
func (w *world) mend() {
	admin := w.rack.Admin
	if err := errors.Join(admin.RunDeferred(w.ctx), admin.ClearFaults(w.ctx)); err != nil {
		panic(err)
	}
	w.keepers[0].gate, w.keepers[1].gate = nil, nil
	w.late = false
	w.noEviction, w.stuck, w.dead = false, false, map[string]bool{}
	for _, name := range names {
		w.edit(name, func(n *corev1.Node) {
			n.Labels = map[string]string{keeper.ColdAttachLabel: keeper.Allowed}
			if w.byHand[name] && n.Annotations[keeper.RecordAnnotation] == "" {
				n.Spec.Unschedulable = false
			}
		})
	}
	for _, p := range keepertest.List[*corev1.Pod](w.api, "default") {
		if len(p.OwnerReferences) == 0 && len(p.Spec.Volumes) == 0 {
			keepertest.Remove[*corev1.Pod](w.api, "default", p.Name)
		}
	}
	w.say("everything is mended")
}

// unrest is what keeps the world from being at rest, or "".
func (w *world) unrest() string {
	states := w.states()
	for _, name := range names {
		n := w.node(name)
		switch state := states[name]; {
		case state != oxide.InstanceStateRunning:
			return fmt.Sprintf("the instance of %s is %s", name, state)
		case n.Annotations[keeper.RecordAnnotation] != "":
			return fmt.Sprintf("%s has a record: %s", name, n.Annotations[keeper.RecordAnnotation])
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

// rest lets the world go on until it is at rest. Failures make a keeper wait for half an hour at
// most.
func (w *world) rest() error {
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

// clear gives the rack back as it was: instances that run and have no disks.
func (w *world) clear() error {
	for _, name := range names {
		_, err := w.rack.Client.InstanceStop(w.ctx,
			oxide.InstanceStopParams{Instance: oxide.NameOrId(w.rack.Instance(name).ID)})
		if err != nil {
			return err
		}
	}
	if err := w.await(oxide.InstanceStateStopped); err != nil {
		return err
	}
	state, err := w.rack.Admin.State(w.ctx)
	if err != nil {
		return err
	}
	for _, a := range state.Attachments {
		_, err := w.rack.Client.InstanceDiskDetach(w.ctx, oxide.InstanceDiskDetachParams{
			Instance: oxide.NameOrId(a.InstanceID),
			Body:     &oxide.DiskPath{Disk: oxide.NameOrId(a.DiskID)}})
		if err != nil {
			return err
		}
	}
	for _, disk := range w.disks {
		if err := w.rack.Client.DiskDelete(w.ctx,
			oxide.DiskDeleteParams{Disk: oxide.NameOrId(disk)}); err != nil {
			return err
		}
	}
	for _, name := range names {
		_, err := w.rack.Client.InstanceStart(w.ctx,
			oxide.InstanceStartParams{Instance: oxide.NameOrId(w.rack.Instance(name).ID)})
		if err != nil {
			return err
		}
	}
	return w.await(oxide.InstanceStateRunning)
}

// await waits until all instances are in a state.
func (w *world) await(want oxide.InstanceState) error {
	return harness.Await(w.ctx, 10*time.Second, func() error {
		for name, s := range w.states() {
			if s != want {
				return fmt.Errorf("the instance %s is %s, not %s", name, s, want)
			}
		}
		return nil
	})
}

// run runs a history.
func run(ctx context.Context, t keepertest.T, r *harness.Rack, acts []act) (*world, error) {
	w := newWorld(ctx, t, r)
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
	}
	return w, errors.Join(err, w.clear())
}

// TestWhateverHappensToTheKeeperEveryInstanceRunsInTheEnd is the proof (D-61).
func TestWhateverHappensToTheKeeperEveryInstanceRunsInTheEnd(t *testing.T) {
	p := proof.New(t, "keeper-model")
	rack, err := harness.RunFor(t).StartRack(t.Context(),
		harness.RackOptions{Instances: names, ColdPlug: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = rack.Stop() })
	proof.SetFlags(t, "rapid.checks", "1", "rapid.nofailfile", "true", "rapid.shrinktime", "20s")
	histories, kills, stops, attached := 0, 0, 0, 0
	for ; histories < shortHistories && !p.Long() || p.Long() && !p.Over(); histories++ {
		seed := p.Seed + uint64(histories)
		proof.SetFlags(t, "rapid.seed", strconv.FormatUint(max(seed, 1), 10))
		rapid.Check(t, func(rt *rapid.T) {
			acts := drawActs(rt)
			w, err := run(t.Context(), rt, rack, acts)
			if err != nil {
				rt.Fatalf("repeat with PROOF_SEED=%d:\n  %s\n%v", seed, strings.Join(w.lines, "\n  "), err)
			}
			kills, stops, attached = kills+w.kills, stops+w.stops, attached+w.volumes
		})
		if histories%20 == 19 {
			p.Say("%d histories, %d kills, %d stops", histories+1, kills, stops)
		}
	}
	p.Figure("histories", histories, "kills", kills, "stops", stops, "volumes", attached,
		"violations", 0)
}
