package keeper

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
)

func TestAnAttachEndsEvenIfTheAttacherDoesNot(t *testing.T) { // D-61
	for _, c := range []struct {
		name    string
		given   func(*fixture)
		problem string
	}{
		{"it has attached the volume", func(w *fixture) { w.attach("data", "") }, ""},
		{"it does nothing", func(w *fixture) {
			w.steps(attaching)
			w.pass(4 * time.Minute)
		}, "1 VolumeAttachments were not done within 3m0s, such as va-data"},
		{"the rack has answered none of its calls", func(w *fixture) {
			w.steps(attaching)
			w.pass(2 * time.Second)
			w.attach("data", away)
			w.steps(attaching)
			w.pass(4 * time.Minute)
		}, "1 VolumeAttachments were not done within 3m0s, such as va-data"},
		{"Kubernetes does not ask for another volume of a pod", func(w *fixture) {
			w.attach("data", "")
			w.bind(pv("log"))
			w.pod("a", "db-2", "StatefulSet", "log")
			w.steps(attaching)
			w.pass(4 * time.Minute)
		}, "did not ask for the volume log"},
		{"an earlier volume of the claim's name is still there", func(w *fixture) {
			w.attach("data", "")
			old := pv("old")
			old.Spec.ClaimRef.Name = "data"
			keepertest.Put(w.api, old)
		}, ""},
		{"somebody starts the instance", func(w *fixture) { w.rack.set("a", "running") },
			"somebody started the instance; it is running"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newFixture(t, "a")
			w.stopped()
			c.given(w)
			w.steps(starting)
			if got := w.metric("problems_total", string(attaching)); (got == 1) != (c.problem != "") {
				t.Errorf("the metric has %v problems", got)
			}
			w.rack.mend()
			for w.step("a") == string(starting) {
				w.round()
			}
			w.heartbeatLater("a")
			w.steps("")
			w.ends(c.problem, true)
		})
	}
}

func TestAnInstanceThatTheRackNoLongerShowsIsGivenUpInTheEnd(t *testing.T) {
	w := newFixture(t, "a", "b")
	w.stopped()
	w.attach("data", "")
	w.steps(starting)
	w.rack.set("a", "")
	if _, err := w.Round(t.Context()); err == nil || w.step("a") != string(starting) {
		t.Errorf("the error is %v, the step %s", err, w.step("a"))
	}
	w.pass(6 * time.Minute)
	w.rack.blind = 1000 // the token has lost its role
	w.steps(starting)
	w.rack.mend()
	w.pass(6 * time.Minute)
	w.rack.set("a", "stopped")
	w.rack.blind = 1 // the token gets its role between two requests
	w.steps(starting)
	w.rack.set("a", "")
	w.pass(6 * time.Minute)
	w.steps("")
	if last := w.last("a"); !strings.Contains(last.Problem, "the instance does not run") ||
		!strings.Contains(strings.Join(w.events(), "\n"), "the keeper goes on trying") {
		t.Errorf("it ended with %+v, and people are told %q", last, w.events())
	}
}

// TestANodeHasReturnedOnlyWithANewHeartbeat leaves the node's condition Ready during the stop, as
// Kubernetes does until it notices that the kubelet is silent.
func TestANodeHasReturnedOnlyWithANewHeartbeat(t *testing.T) {
	w := newFixture(t, "a")
	w.stopped()
	w.edit("a", func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionTrue })
	w.attach("data", "")
	w.steps(starting, starting, starting, returning, returning, returning)
	w.rack.set("a", "stopped") // once more, by the rack
	w.steps(starting, starting, returning, returning)
	w.heartbeatLater("a")
	w.steps("")
	w.ends("the instance ran, and then was stopped", true)
}

func TestARecordWithAnUnknownStepIsReported(t *testing.T) {
	w := newFixture(t, "a")
	w.setRecord("a", record{Record: &operation{Step: "Moving"}})
	w.seen()
	_, err := w.Round(t.Context())
	if err == nil || !strings.Contains(err.Error(), `the step "Moving"`) || len(w.seen()) > 0 {
		t.Errorf("the error is %v", err)
	}
}

func TestALateStopIsUndoneEvenIfTheKeeperMayStopNoInstances(t *testing.T) { // D-61
	unlabel := func(w *fixture) {
		w.edit("a", func(n *corev1.Node) { delete(n.Labels, ColdAttachLabel) })
	}
	for _, c := range []struct {
		name          string
		before, since func(*fixture) // changes before and after the end of the operation
		left          bool           // whether the instance stays stopped
	}{
		{name: "cold attach is switched off", since: func(w *fixture) { w.Config.ColdAttach = false }},
		{name: "a dry run begins", since: func(w *fixture) { w.Config.DryRun = true }},
		{name: "the label was removed before the end", before: unlabel},
		{name: "the label was removed after the end", since: unlabel, left: true},
		{name: "the outcome is of another instance", since: func(w *fixture) {
			c := csiNode(w.node("a"))
			c.Spec.Drivers[1].NodeID = instanceOf("x")
			keepertest.Put(w.api, c)
		}, left: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newFixture(t, "a")
			w.Config.Fence = false
			w.stopped()
			w.attach("data", "")
			w.steps(starting, starting, starting, returning)
			if c.before != nil {
				c.before(w)
			}
			w.heartbeatLater("a")
			w.steps("")
			w.rack.set("a", "stopped")
			w.lose("a")
			if c.since != nil {
				c.since(w)
			}
			for range 4 {
				w.round()
			}
			if got := w.rack.state("a"); (got == "stopped") != c.left {
				t.Errorf("the instance is %s", got)
			}
		})
	}
}

func TestAnInstanceIsStartedEvenIfNoRecordCanBeWritten(t *testing.T) { // D-61
	for name, given := range map[string]func(*fixture){
		"the attacher is done": func(w *fixture) { w.attach("data", "") },
		"the attacher is not":  func(*fixture) {},
		"the start was recorded": func(w *fixture) {
			w.attach("data", "")
			w.steps(starting)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newFixture(t, "a")
			w.stopped()
			given(w)
			w.api.Intercept(func(r keepertest.KubeRequest) error {
				if r.Resource == "configmaps" {
					return errBroken
				}
				return nil
			})
			if _, err := w.Round(t.Context()); err == nil && name != "the attacher is not" {
				t.Error("the write has no error")
			}
			w.pass(6 * time.Minute)
			if w.rack.state("a") != "stopped" {
				t.Fatalf("the instance is %s", w.rack.state("a"))
			}
			if _, err := w.Round(t.Context()); err == nil || w.rack.state("a") != "running" {
				t.Errorf("the instance is %s; the error is %v", w.rack.state("a"), err)
			}
		})
	}
}

func TestACordonThatSomebodySetsDuringAnOperationStays(t *testing.T) {
	for _, s := range []step{attaching, starting, returning} {
		w := newFixture(t, "a")
		begun[s].begin(w)
		w.edit("a", func(n *corev1.Node) { n.Spec.Unschedulable = false })
		w.round()
		w.edit("a", func(n *corev1.Node) { n.Spec.Unschedulable = true })
		w.rack.mend()
		w.attach("data", "")
		for w.step("a") != string(returning) {
			w.round()
		}
		w.heartbeatLater("a")
		w.steps("")
		if !w.node("a").Spec.Unschedulable {
			t.Errorf("%s: somebody's cordon is removed", s)
		}
	}
}

// outage makes the API server answer nobody.
func (w *fixture) outage() {
	gone := func(keepertest.KubeRequest) error { return keepertest.ErrBreak }
	w.api.Intercept(gone)
	w.api.InterceptReads(gone)
}

func (w *fixture) advance(d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.clock = w.clock.Add(d)
}

func TestAnInstanceThatAnotherKeeperStartedIsNotStartedAgain(t *testing.T) { // D-61
	w := newFixture(t, "a", "b")
	w.stopped()
	w.setRecord("a", record{})
	csitest.Must(t, w.StartStopped(t.Context()))
	w.outage()
	_ = w.StartStopped(t.Context())
	w.advance(2 * outage)
	if err := w.StartStopped(t.Context()); err != nil || w.rack.state("a") != "stopped" {
		t.Errorf("the instance is %s: %v", w.rack.state("a"), err)
	}
}

// TestNoNodeIsStarvedByAnotherNodeWithItsStatefulSet lets new volumes begin to wait on one node
// again and again, while another node waits that has pods of the same StatefulSet.
func TestNoNodeIsStarvedByAnotherNodeWithItsStatefulSet(t *testing.T) { // D-61
	w := newFixture(t, "a", "b")
	w.Config.MaxStopsPerNode = 1000
	attach := func(string) string { return "" }
	for i := range 12 {
		w.wait("a", fmt.Sprintf("v%d", i))
		if i == 1 {
			w.wait("b", "data")
		}
		w.live(10*time.Minute, attach)
	}
	stops := w.stops()
	if stops["a"] == 0 || stops["b"] != 1 {
		t.Errorf("in 2 hours the instances were stopped %v times", stops)
	}
}
