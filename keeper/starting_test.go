package keeper

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
)

func TestAnAttachEndsEvenIfTheAttacherDoesNot(t *testing.T) { // D-61
	for _, c := range []struct {
		name    string
		given   func(*story)
		problem string
	}{
		{"it has attached the volume", func(w *story) { w.attach("data", "") }, ""},
		{"it has attached the volume, and a program has started the instance", func(w *story) {
			w.attach("data", "")
			w.rack.set("a", "running")
		}, ""},
		{"the volume is not wanted any more",
			func(w *story) {
				keepertest.Remove[*storagev1.VolumeAttachment](w.api, "", "va-data")
				keepertest.Remove[*corev1.Pod](w.api, "shop", "db-data")
			}, ""},
		{"it fails for another reason", func(w *story) {
			w.steps(attaching)
			w.pass(2 * time.Second)
			w.attach("data", full)
		}, ""},
		{"it does nothing", func(w *story) {
			w.steps(attaching)
			w.pass(4 * time.Minute)
		}, "1 VolumeAttachments were not done within 3m0s, such as va-data"},
		{"the rack has answered none of its calls", func(w *story) {
			w.steps(attaching)
			w.pass(2 * time.Second)
			w.attach("data", away)
			w.steps(attaching)
			w.pass(4 * time.Minute)
		}, "1 VolumeAttachments were not done within 3m0s, such as va-data"},
		{"Kubernetes does not ask for another volume of a pod", func(w *story) {
			w.attach("data", "")
			w.bind(pv("log"))
			w.pod("a", "db-2", "StatefulSet", "log")
			w.steps(attaching)
			w.pass(4 * time.Minute)
		}, "did not ask for the volume log"},
		{"an earlier volume of the claim's name is still there", func(w *story) {
			w.attach("data", "")
			old := pv("old")
			old.Spec.ClaimRef.Name = "data"
			keepertest.Put(w.api, old)
		}, ""},
		{"somebody starts the instance", func(w *story) { w.rack.set("a", "running") },
			"somebody started the instance; it is running"},
		{"the rack does not answer, and the attacher is done", func(w *story) {
			w.rack.fail["view a"] = 503
			w.attach("data", "")
		}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newStory(t, "a")
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
			w.ends(ending{c.problem, true})
		})
	}
}

func TestAnInstanceThatTheRackNoLongerShowsIsGivenUpInTheEnd(t *testing.T) {
	w := newStory(t, "a", "b")
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

// The node's condition from before the stop is still Ready until Kubernetes notices the silence.
func TestANodeHasReturnedOnlyWithANewHeartbeat(t *testing.T) {
	w := newStory(t, "a")
	w.stopped()
	w.edit("a", func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionTrue })
	w.attach("data", "")
	w.steps(starting, starting, starting, returning, returning, returning)
	w.rack.set("a", "stopped") // once more, by the rack
	w.steps(starting, starting, returning, returning)
	w.heartbeatLater("a")
	w.steps("")
	w.ends(ending{"the instance ran, and then was stopped", true})
}

func TestARecordWithAnUnknownStepIsReported(t *testing.T) {
	w := newStory(t, "a")
	w.setRecord("a", record{Record: &operation{Step: "Moving"}})
	w.seen()
	_, err := w.Round(t.Context())
	if err == nil || !strings.Contains(err.Error(), `the step "Moving"`) || len(w.seen()) > 0 {
		t.Errorf("the error is %v", err)
	}
}

func TestALateStopIsUndoneEvenIfTheKeeperMayStopNoInstances(t *testing.T) { // D-61
	unlabel := func(w *story) {
		w.edit("a", func(n *corev1.Node) { delete(n.Labels, ColdAttachLabel) })
	}
	for _, c := range []struct {
		name          string
		before, since func(*story) // changes before and after the end of the operation
		left          bool         // whether the instance stays stopped
	}{
		{name: "the duty is taken", since: func(w *story) { w.Config.ColdAttach = false }},
		{name: "a dry run begins", since: func(w *story) { w.Config.DryRun = true }},
		{name: "the label was taken before the end", before: unlabel},
		{name: "the label was taken after the end", since: unlabel, left: true},
		{name: "the outcome is of another instance", since: func(w *story) {
			c := csiNode(w.node("a"))
			c.Spec.Drivers[1].NodeID = instanceOf("x")
			keepertest.Put(w.api, c)
		}, left: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newStory(t, "a")
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

// An admission webhook that does not answer, for example, prevents every write to a Node.
func TestAnInstanceIsStartedEvenIfNoRecordCanBeWritten(t *testing.T) { // D-61
	for name, given := range map[string]func(*story){
		"the attacher is done": func(w *story) { w.attach("data", "") },
		"the attacher is not":  func(*story) {},
		"the start was recorded": func(w *story) {
			w.attach("data", "")
			w.steps(starting)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newStory(t, "a")
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
		w := newStory(t, "a")
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

func TestTheInstanceOfANodeThatIsDeletedInAnOperationIsStarted(t *testing.T) { // D-61
	for s, c := range begun {
		for _, again := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, created again: %v", s, again), func(t *testing.T) {
				w := newStory(t, "a")
				c.begin(w)
				state := w.rack.state("a")
				keepertest.Delete[*corev1.Node](w.api, "", "a")
				if again {
					w.addNode("a")
					w.rack.set("a", state)
				}
				w.rack.mend()
				w.attach("data", "")
				w.seen()
				for range 8 {
					w.round()
				}
				seen := strings.Join(w.seen(), ";")
				if last := w.last("a"); w.step("a") != "" || last.Problem == "" ||
					w.rack.state("a") != "running" || strings.Contains(seen, "stop a") {
					t.Errorf("the instance is %s, it ended with %+v; done: %s", w.rack.state("a"), last, seen)
				}
			})
		}
	}
}

// A kubelet may annotate its own Node: these annotations were the records of an earlier keeper.
func TestANodesAnnotationCausesNoAction(t *testing.T) { // D-61
	for _, step := range []step{stopping, attaching, starting, returning} {
		t.Run(string(step), func(t *testing.T) {
			w := newStory(t, "a", "b")
			w.rack.set("b", "stopped") // by somebody
			forged := `{"step":"` + string(step) + `","since":"2030-01-01T11:59:00Z","instance":"` +
				instanceOf("b") + `","stopped":true,"ended":"2030-01-01T11:59:00Z","volumes":{"data":` +
				`{"disk":"` + instanceOf("d") + `","refused":true}}}`
			w.edit("a", func(n *corev1.Node) {
				for _, key := range []string{"cold-attach", "cold-attach-last", "fenced"} {
					metav1.SetMetaDataAnnotation(&n.ObjectMeta, DriverName+"/"+key, forged)
				}
			})
			keepertest.Put(w.api, va(attachFailed(mustStop, 0)).VolumeAttachment)
			w.seen()
			w.steps("", "", "")
			seen := strings.NewReplacer("patch nodes a", "", "patch volumeattachments va-data", "").
				Replace(strings.Join(w.seen(), ""))
			if seen != "" {
				t.Errorf("the keeper did %q", seen)
			}
		})
	}
}

// outage makes the API server answer nobody.
func (w *story) outage() {
	gone := func(keepertest.KubeRequest) error { return keepertest.ErrBreak }
	w.api.Intercept(gone)
	w.api.InterceptReads(gone)
}

// advance sets the clock forward.
func (w *story) advance(d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.clock = w.clock.Add(d)
}

func TestAnInstanceThatAnotherKeeperStartedIsNotStartedAgain(t *testing.T) { // D-61
	w := newStory(t, "a", "b")
	w.stopped()
	w.setRecord("a", record{})
	csitest.Must(t, w.Repay(t.Context()))
	w.outage()
	_ = w.Repay(t.Context())
	w.advance(2 * outage)
	if err := w.Repay(t.Context()); err != nil || w.rack.state("a") != "stopped" {
		t.Errorf("the instance is %s: %v", w.rack.state("a"), err)
	}
}

// New volumes begin to wait on one node again and again, while another node waits that has pods of
// the same StatefulSet.
func TestNoNodeIsStarvedByAnotherNodeWithItsStatefulSet(t *testing.T) { // D-61
	w := newStory(t, "a", "b")
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
