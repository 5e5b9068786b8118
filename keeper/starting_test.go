package keeper

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
)

func TestD61AnAttachEndsEvenIfTheAttacherDoesNot(t *testing.T) {
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

func TestD61AStartThatIsRefusedIsTriedUntilTheInstanceRuns(t *testing.T) {
	w := newStory(t, "a")
	w.stopped()
	w.attach("data", "")
	w.steps(starting)
	w.rack.fail["start a"] = 503
	for range 3 { // each time --start-timeout passes
		for range 3 {
			_, _ = w.Round(t.Context())
		}
		w.pass(6 * time.Minute)
		w.steps(starting) // the step begins again
	}
	if got := w.metric("problems_total", string(starting)); got != 3 {
		t.Errorf("the metric has %v problems", got)
	}
	if said := strings.Count(strings.Join(w.events(), "\n"), "the keeper goes on trying"); said != 3 {
		t.Errorf("people are told %d times", said)
	}
	w.rack.mend()
	w.steps(starting, returning)
	w.heartbeatLater("a")
	w.steps("")
	w.ends(ending{"does not run 5m0s after its start", true})
}

func TestD61AnInstanceIsStartedWhereverTheOperationStands(t *testing.T) {
	for _, c := range []struct {
		name  string
		given func(*story)
	}{
		{"the node has no heartbeat", func(w *story) {
			w.edit("a", func(n *corev1.Node) { n.Status.Conditions = nil })
		}},
		{"the label is gone", func(w *story) { w.edit("a", func(n *corev1.Node) { n.Labels = nil }) }},
		{"the node is uncordoned",
			func(w *story) { w.edit("a", func(n *corev1.Node) { n.Spec.Unschedulable = false }) }},
		{"the driver is not registered",
			func(w *story) { keepertest.Remove[*storagev1.CSINode](w.api, "", "a") }},
		{"the duty is taken", func(w *story) { w.Config.ColdAttach = false }},
		{"a dry run begins", func(w *story) { w.Config.DryRun = true }},
		{"the keeper runs there", func(w *story) { w.Config.NodeName = "a" }},
		{"the instance failed", func(w *story) { w.rack.set("a", "failed") }},
		{"another node has a record that nobody knows", func(w *story) {
			w.addNode("A")
			w.setRecord("A", record{Record: &operation{Step: "Moving"}})
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newStory(t, "a")
			w.stopped()
			c.given(w)
			w.attach("data", "")
			for range 6 {
				_, _ = w.Round(t.Context())
			}
			w.heartbeatLater("a")
			_, _ = w.Round(t.Context())
			if w.rack.state("a") != "running" || w.step("a") != "" || w.node("a").Spec.Unschedulable {
				t.Errorf("the instance is %s, the step %s", w.rack.state("a"), w.step("a"))
			}
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
	if last := w.last("a"); !strings.Contains(last.Problem, "the instance does not run") {
		t.Errorf("it ended with %+v", last)
	}
}

func TestAnOperationEndsWithAProblemIfItsNodeDoesNotReturn(t *testing.T) {
	w := newStory(t, "a")
	w.stopped()
	w.attach("data", "")
	w.steps(starting, starting, starting, returning, returning)
	// The rack stops the instance once more.
	w.rack.set("a", "stopped")
	w.steps(starting, starting, returning)
	w.pass(6 * time.Minute)
	w.steps("")
	w.ends(ending{"the instance ran, and then was stopped", true})
	if w.metric("problems_total", string(returning)) != 2 {
		t.Errorf("the metric has %v problems", w.metric("problems_total", string(returning)))
	}
}

// The node's condition from before the stop is still Ready until Kubernetes notices the silence.
func TestANodeHasReturnedOnlyWithANewHeartbeat(t *testing.T) {
	w := newStory(t, "a")
	w.stopped()
	w.edit("a", func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionTrue })
	w.attach("data", "")
	w.steps(starting, starting, starting, returning, returning, returning)
	w.heartbeatLater("a")
	w.steps("")
	w.ends(ending{stopped: true})
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

func TestD61AnInstanceThatALateRequestStoppedIsStartedOnce(t *testing.T) {
	w := newStory(t, "a")
	w.stopped()
	w.attach("data", "")
	w.steps(starting, starting, starting, returning)
	w.heartbeatLater("a")
	w.steps("")
	w.rack.set("a", "stopped") // by the keeper's late request
	w.lose("a")
	w.Config.Fence = false
	w.steps(starting, starting, starting, returning)
	if n := w.node("a"); n.Spec.Unschedulable {
		t.Error("the node that only starts is cordoned")
	}
	w.heartbeatLater("a")
	w.steps("")
	w.ends(ending{"a stop that was on its way may have come late", true})
	w.seen()
	w.rack.set("a", "stopped") // by somebody
	w.steps("", "")
	if seen := w.seen(); len(seen) > 0 {
		t.Errorf("the keeper undoes what somebody wants: %v", seen)
	}
}

func TestAnInstanceThatSomebodyElseStoppedIsNotStarted(t *testing.T) {
	for name, o := range map[string]outcome{"without a stop": {Ended: begin},
		"once before": {Stopped: true, Ended: begin, Late: true},
		"too late":    {Stopped: true, Ended: begin.Add(-3 * time.Minute)}} {
		t.Run(name, func(t *testing.T) {
			w := newStory(t, "a")
			o.Instance = instanceOf("a")
			w.setRecord("a", record{Last: &o})
			w.rack.set("a", "stopped")
			w.seen()
			w.steps("")
			if seen := w.seen(); len(seen) > 0 {
				t.Errorf("the keeper does %v", seen)
			}
		})
	}
}

func TestD61ALateStopIsUndoneEvenIfTheKeeperMayStopNoInstances(t *testing.T) {
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
func TestD61AnInstanceIsStartedEvenIfNoRecordCanBeWritten(t *testing.T) {
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

func TestD61TheInstanceOfANodeThatIsDeletedInAnOperationIsStarted(t *testing.T) {
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
func TestD61AnAnnotationOfANodeHasNothingAttachedStoppedStartedOrFenced(t *testing.T) {
	for _, step := range []step{stopping, attaching, starting, returning} {
		for name, given := range map[string]func(*story){
			"cold attach is on":  func(*story) {},
			"cold attach is off": func(w *story) { w.Config.ColdAttach = false },
			"a dry run":          func(w *story) { w.Config.DryRun = true },
			"without the label":  func(w *story) { w.edit("a", func(n *corev1.Node) { n.Labels = nil }) },
		} {
			t.Run(string(step)+", "+name, func(t *testing.T) {
				w := newStory(t, "a", "b")
				w.rack.set("b", "stopped") // by somebody
				given(w)
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
}
