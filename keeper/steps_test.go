package keeper

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
)

func TestAColdAttachRecordsEachStepBeforeItTakesIt(t *testing.T) { // D-61
	w := newFixture(t, "a", "b")
	w.pod("a", "web-1", "ReplicaSet")
	earlier := begin.Add(-11 * time.Minute)
	w.setRecord("a", record{Last: &outcome{Ended: earlier, StoppedWith: map[string]time.Time{
		"shop/cache": earlier, "shop/old": begin.Add(-time.Hour)}}})
	w.stoppedAfterDrain(func() { keepertest.Remove[*corev1.Pod](w.api, "shop", "web-1") })
	if n := w.node("a"); !n.Spec.Unschedulable {
		t.Error("the node takes pods while its instance is stopped")
	}
	w.steps(attaching, attaching) // the attacher is woken, once
	if w.metric("nodes_in_progress", "") != 1 || w.metric("waiting_attachments", "") != 1 {
		t.Error("the metrics do not have one node in progress, and one attachment that waits")
	}
	w.attach("data", "")
	w.steps(starting, starting, starting) // to record the heartbeat, and then to request the start
	w.steps(returning, returning)
	w.pass(time.Second)
	w.heartbeat("a")
	w.steps("", "")
	want := []string{
		"patch nodes a", // the plan
		"Draining: update configmaps oxide/oxide-node-keeper",
		"Draining: update nodes a", // the cordon
		"Draining: create pods/eviction shop/web-1",
		"Draining: patch volumeattachments va-data",
		"Stopping: update configmaps oxide/oxide-node-keeper",
		"Stopping: stop a",
		"Stopping: patch volumeattachments va-data",
		"Attaching: update configmaps oxide/oxide-node-keeper",
		"Starting: update configmaps oxide/oxide-node-keeper",
		"Starting: update configmaps oxide/oxide-node-keeper", // the heartbeat
		"Starting: start a",
		"Returning: update configmaps oxide/oxide-node-keeper",
		"Returning: update nodes a", // no cordon any more
		"update configmaps oxide/oxide-node-keeper",
	}
	if diff := cmp.Diff(want, w.seen()); diff != "" {
		t.Errorf("done (+), expected (-):\n%s", diff)
	}
	n := w.node("a")
	if last := w.last("a"); n.Spec.Unschedulable || w.plan("a") != "" || !last.Stopped ||
		last.Problem != "" || last.Failures != 0 || last.Instance != instanceOf("a") ||
		cmp.Diff(map[string]time.Time{"shop/cache": earlier, "shop/db": w.clock},
			last.StoppedWith) != "" || !last.Node.Stops[0].Equal(w.clock) ||
		!last.Volumes["data"].Stops[0].Equal(w.clock) ||
		!last.Ended.Equal(w.clock) {
		t.Errorf("the node is left as %v, unschedulable %v", n.Annotations, n.Spec.Unschedulable)
	}
	for _, s := range []step{draining, stopping, attaching, starting, returning} {
		if got := w.metric("step_seconds", string(s)); got != 1 {
			t.Errorf("the metric counts %v steps %s", got, s)
		}
	}
	if w.metric("operations_total", "done") != 1 || w.metric("evictions_total", "accepted") != 1 {
		t.Error("the metrics have no operation done, or no eviction")
	}
	for _, reason := range []string{"Planned", "Draining", "Stopping", "Attaching", "Starting",
		"Returning", "Ended"} {
		if !strings.Contains(strings.Join(w.events(), "\n"), "Node a: ColdAttach"+reason+": ") {
			t.Errorf("there is no event %s:\n%s", reason, strings.Join(w.events(), "\n"))
		}
	}
}

// ends checks that the operation on the node "a" has ended and that the node is as before. It also
// checks that the operation's problem contains the parameter or, if that is "", is empty.
func (w *fixture) ends(problem string, stopped bool) {
	w.t.Helper()
	last, n := w.last("a"), w.node("a")
	if !strings.Contains(last.Problem, problem) || (last.Problem == "") != (problem == "") ||
		last.Stopped != stopped || n.Spec.Unschedulable || w.step("a") != "" ||
		w.rack.state("a") != "running" || last.Unlabeled == (n.Labels[ColdAttachLabel] == Allowed) ||
		(last.Failures > 0) != (problem != "" && problem != nothingWaits) {
		w.t.Errorf("the operation ended with %+v, want %q, stopped: %v; the instance is %s; "+
			"unschedulable: %v", last, problem, stopped, w.rack.state("a"), n.Spec.Unschedulable)
	}
}

// The test begins a step, and disturbs it. A disturbed drain ends without a stop. After a
// disturbance of a later step the keeper starts the instance again.
func TestADisturbedOperationEndsWithARunningInstance(t *testing.T) { // D-61
	// loses returns a function that creates a budget and makes its status stale by calling lose().
	loses := func(lose func(*fixture)) func(*fixture) {
		return func(w *fixture) {
			w.pod("a", "db-a", "StatefulSet", "data")
			w.pod("b", "db-b", "StatefulSet")
			keepertest.Put(w.api, budget(1, 2, 1))
			lose(w)
		}
	}
	for _, c := range []struct {
		name    string
		step    step
		given   func(*fixture)
		problem string // a part of it
		counted bool   // the metric problems_total counts the problem
	}{
		{"somebody uncordons the node", draining, on("", "a", func(n *corev1.Node) {
			n.Spec.Unschedulable = false
		}), "somebody uncordoned the node", false},
		{"somebody removes the label", draining, on("", "a", func(n *corev1.Node) { n.Labels = nil }),
			"somebody removed the label", false},
		{"cold attach is switched off", draining, func(w *fixture) { w.Config.ColdAttach = false },
			"cold attach was switched off, or --dry-run was set", false},
		{"the window ends", draining, func(w *fixture) {
			w.Config.Window = csitest.Got(ParseWindow("0 2 * * *", 1))(w.t)
		}, "window", false},
		{"the keeper runs on the node now", draining, func(w *fixture) { w.Config.NodeName = "a" },
			"runs on this node", false},
		{"a dry run begins", draining, func(w *fixture) { w.Config.DryRun = true },
			"cold attach was switched off, or --dry-run was set", false},
		{"nothing waits any more", draining, func(w *fixture) { w.attach("data", "") },
			"nothing waits any more", false},
		{"a pod comes that would not come back", draining, func(w *fixture) { w.pod("a", "one", "") },
			"shop/one would", false},
		{"a budget is exhausted", draining, func(w *fixture) {
			keepertest.Remove[*corev1.Pod](w.api, "shop", "web-1")
			w.pod("a", "db-ready", "StatefulSet", "data")
			keepertest.Put(w.api, budget(1, 1, 0))
			w.steps(draining) // the budget may still change
			w.pass(6 * time.Minute)
		}, "wants 1 healthy pods", true},
		{"an eviction takes too long", draining, func(w *fixture) {
			w.steps(draining)
			w.pass(6 * time.Minute)
		}, "1 pods were still there after 5m0s, such as shop/web-1", true},
		{"the instance fails", stopping, func(w *fixture) { w.rack.set("a", "failed") },
			"failed while", true},
		{"another pod of a budget is deleted", stopping, loses(func(w *fixture) {
			keepertest.Delete[*corev1.Pod](w.api, "shop", "db-b")
		}), "wants 1 healthy pods", true},
		{"another pod of a budget is not ready", stopping, loses(func(w *fixture) {
			keepertest.Edit(w.api, "shop", "db-b", func(p *corev1.Pod) { p.Status.Conditions = nil })
		}), "wants 1 healthy pods", true},
		{"a person records another operation", stopping, func(w *fixture) {
			w.setRecord("b", record{Record: &operation{Step: returning, Instance: instanceOf("b")}})
		}, "an operation is in progress on the node b, too", true},
		{"the volume is attached", attaching, func(w *fixture) { w.attach("data", "") }, "", false},
		{"the attacher does nothing", attaching, func(w *fixture) {
			w.steps(attaching)
			w.pass(4 * time.Minute)
		}, "1 VolumeAttachments were not done within 3m0s, such as va-data", true},
		{"Kubernetes does not ask for another volume of a pod", attaching, func(w *fixture) {
			w.attach("data", "")
			keepertest.Bind(w.api, pv("log"))
			w.pod("a", "db-2", "StatefulSet", "log")
			w.steps(attaching)
			w.pass(4 * time.Minute)
		}, "did not ask for the volume log", true},
		{"somebody starts the instance", attaching, func(w *fixture) { w.rack.set("a", "running") },
			"somebody started the instance; it is running", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newFixture(t, "a", "b")
			begun[c.step].begin(w)
			c.given(w)
			w.seen()
			w.round()
			if got := w.metric("problems_total", string(c.step)); (got == 1) != c.counted {
				t.Errorf("the metric has %v problems of this step", got)
			}
			if seen := w.seen(); c.step == draining && len(seen) != 2 || // the node and its record
				strings.Contains(strings.Join(seen, ";"), "stop a") {
				t.Errorf("the keeper did %v", seen)
			}
			if c.step != draining {
				if got := w.step("a"); got != string(starting) {
					t.Fatalf("the step is %q", got)
				}
				w.rack.stuck = false
				w.lose("a")
				for w.step("a") == string(starting) {
					w.round()
				}
				w.heartbeatLater("a")
				w.steps("")
			}
			w.ends(c.problem, c.step != draining)
			if got := w.metric("operations_total", "problem"); (got == 1) != (c.problem != "") {
				t.Errorf("the metric has %v operations with a problem", got)
			}
		})
	}
}

func TestARefusedEvictionIsRequestedAgain(t *testing.T) {
	w := newFixture(t, "a")
	begun[draining].begin(w)
	keepertest.Put(w.api, budget(1, 1, 0))
	w.steps(draining, draining)
	keepertest.Put(w.api, budget(1, 1, 1))
	w.steps(draining, draining) // the second time the pod is being deleted
	if refused, accepted := w.metric("evictions_total", "refused"),
		w.metric("evictions_total", "accepted"); refused != 2 || accepted != 1 {
		t.Errorf("%v evictions were refused, %v accepted", refused, accepted)
	}
}

func TestNoStopOrStartIsSentIfTheReadBeforeItIsTooOld(t *testing.T) { // D-61
	w := waiting(t, "a")
	w.steps(draining, draining, stopping)
	w.Rack.LookLimit = time.Nanosecond
	w.seen()
	if _, err := w.Round(t.Context()); err == nil || len(w.seen()) > 0 ||
		!strings.Contains(err.Error(), "have passed since") {
		t.Errorf("the instance is %s: %v", w.rack.state("a"), err)
	}
	w.Rack.LookLimit = 0
	w.steps(stopping, attaching)
	w.attach("data", "")
	w.steps(starting, starting)
	w.Rack.LookLimit = time.Nanosecond
	if _, err := w.Round(t.Context()); err == nil || w.rack.state("a") != "stopped" {
		t.Errorf("the instance is %s: %v", w.rack.state("a"), err)
	}
}

// begun contains two functions for each step. One begins the step on the node "a" and keeps it from
// ending. The other returns the step's time limit.
var begun = map[step]struct {
	begin func(*fixture)
	limit func(*Config) time.Duration
}{
	draining: {func(w *fixture) {
		w.pod("a", "web-1", "ReplicaSet")
		w.wait("a", "data")
		w.pass(time.Minute)
		w.steps(draining)
	}, func(c *Config) time.Duration { return c.DrainTimeout }},
	stopping: {func(w *fixture) {
		w.rack.stuck = true
		w.wait("a", "data")
		w.pass(time.Minute)
		w.steps(draining, draining, stopping)
	}, func(c *Config) time.Duration { return c.StopTimeout }},
	attaching: {(*fixture).stopped, func(c *Config) time.Duration { return c.AttachTimeout }},
	starting: {func(w *fixture) {
		w.stopped()
		w.attach("data", "")
		w.steps(starting)
		w.rack.stuck = true
	}, func(c *Config) time.Duration { return c.StartTimeout }},
	returning: {func(w *fixture) {
		w.stopped()
		w.attach("data", "")
		w.steps(starting, starting, starting, returning)
	}, func(c *Config) time.Duration { return c.ReturnTimeout }},
}

func TestAStepTimesOutEvenIfItsRecordedTimeIsInTheFuture(t *testing.T) { // D-61
	for s, c := range begun {
		for _, skew := range []time.Duration{maxSkew, maxSkew + time.Second, 24 * time.Hour} {
			t.Run(string(s)+", "+skew.String(), func(t *testing.T) {
				w := newFixture(t, "a")
				c.begin(w)
				w.advance(-skew) // a replica with a slow clock takes over from one with a fast clock
				if skew <= maxSkew {
					w.steps(s, s, s)
					w.pass(maxSkew + c.limit(&w.Config) + time.Second)
				}
				before := w.metric("problems_total", string(s))
				w.round()
				if now := w.metric("problems_total", string(s)); now != before+1 {
					t.Errorf("the step has %v problems, and had %v: %v", now, before, w.node("a").Annotations)
				}
			})
		}
	}
}

func TestAnOperationEndsIfItsInstanceIsGone(t *testing.T) {
	w := newFixture(t, "a", "b")
	w.stopped()
	w.attach("data", "")
	w.steps(starting)
	w.rack.set("a", "")
	if _, err := w.Round(t.Context()); err == nil || w.step("a") != string(starting) {
		t.Errorf("the error is %v, the step %s", err, w.step("a"))
	}
	w.pass(6 * time.Minute)
	w.rack.blind = 1000
	w.steps(starting)
	w.rack.blind = 0
	w.pass(6 * time.Minute)
	w.steps("")
	if last := w.last("a"); !strings.Contains(last.Problem, "the instance does not run") ||
		!strings.Contains(strings.Join(w.events(), "\n"), "the keeper goes on trying") {
		t.Errorf("it ended with %+v, and people are told %q", last, w.events())
	}
}

// The test keeps the node Ready, as Kubernetes does until it notices the kubelet's silence.
func TestAnOperationEndsOnlyAfterANewHeartbeatOfTheNode(t *testing.T) {
	w := newFixture(t, "a")
	w.stopped()
	w.edit("a", func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionTrue })
	w.attach("data", "")
	w.steps(starting, starting, starting, returning, returning, returning)
	w.rack.set("a", "stopped") // the rack stops it again
	w.steps(starting, starting, returning, returning)
	w.heartbeatLater("a")
	w.steps("")
	w.ends("the instance ran, and then was stopped", true)
}

func TestAnInstanceThatStopsAfterItsOperationIsStartedAgain(t *testing.T) { // D-61
	unlabel := on("", "a", func(n *corev1.Node) { delete(n.Labels, ColdAttachLabel) })
	for _, c := range []struct {
		name      string
		unlabeled bool           // when the operation ended
		since     func(*fixture) // what happened after it ended
		left      bool           // the instance stays stopped
	}{
		{"cold attach is switched off", false, func(w *fixture) { w.Config.ColdAttach = false }, false},
		{"the label was removed before the end", true, unlabel, false},
		{"the label was removed after the end", false, unlabel, true},
		{"the outcome is of another instance", false, func(w *fixture) { w.register("a", "x") }, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newFixture(t, "a")
			w.Config.Fence = false
			w.setRecord("a", record{Last: &outcome{Ended: begin, Instance: instanceOf("a"),
				Stopped: true, Unlabeled: c.unlabeled}})
			w.rack.set("a", "stopped")
			w.lose("a")
			c.since(w)
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

func TestAnOperationKeepsACordonThatSomebodyElseSets(t *testing.T) {
	for _, s := range []step{attaching, starting, returning} {
		w := newFixture(t, "a")
		begun[s].begin(w)
		w.edit("a", func(n *corev1.Node) { n.Spec.Unschedulable = false })
		w.round()
		w.edit("a", func(n *corev1.Node) { n.Spec.Unschedulable = true })
		w.rack.stuck = false
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

func (w *fixture) advance(d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.clock = w.clock.Add(d)
}

func TestAKeeperStartsTheInstancesItStoppedIfTheAPIServerIsDown(t *testing.T) { // D-61
	for _, c := range []struct {
		name  string
		given func(*fixture)
		late  time.Duration // from the first start to one that has an effect
		want  string
	}{
		{"the rack starts it", func(*fixture) {}, 0, "running"},
		{"the first starts have no effect", func(w *fixture) { w.rack.stuck = true }, time.Minute,
			"running"},
		{"the token has no role for a while", func(w *fixture) { w.rack.blind = 1000 }, time.Minute,
			"running"},
		{"another keeper has started it", func(w *fixture) { w.setRecord("a", record{}) }, 0, "stopped"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newFixture(t, "a", "b")
			w.stopped()
			c.given(w)
			start := func(later time.Duration) (string, error) {
				w.advance(later)
				return w.rack.state("a"), w.StartStopped(t.Context())
			}
			csitest.Must(t, csitest.Err(start(0)))
			w.cut()
			for _, later := range []time.Duration{0, outage / 2, outage + time.Second} {
				if state, _ := start(later); state != "stopped" {
					t.Fatalf("after %s without the API server, the instance is %s", later, state)
				}
			}
			if late := w.rack.state("a") != "running"; late != (c.late > 0 || c.want == "stopped") {
				t.Errorf("at once, the instance is %s", w.rack.state("a"))
			}
			w.rack.stuck, w.rack.blind = false, 0
			csitest.Must(t, csitest.Err(start(c.late)))
			csitest.Must(t, csitest.Err(start(w.Config.AttachTimeout+time.Second)))
			if got := w.rack.state("a"); got != c.want || len(w.Keeper.stops.all()) != 0 {
				t.Errorf("the instance is %s, and still to start are %v", got, w.Keeper.stops.all())
			}
		})
	}
}

// New volumes wait for a stop of the node "a" again and again. One volume waits for a stop of the
// node "b", which has pods of the same StatefulSet.
func TestNewVolumesOnOneNodeDoNotStarveAnotherNode(t *testing.T) { // D-61
	w := newFixture(t, "a", "b")
	w.Config.MaxStopsPerNode = 1000
	attach := func(string) string { return "" }
	for i := range 12 {
		w.wait("a", fmt.Sprintf("v%d", i))
		if i == 1 {
			w.wait("b", "data")
		}
		w.simulate(10*time.Minute, attach)
	}
	stops := w.stops()
	if stops["a"] == 0 || stops["b"] != 1 {
		t.Errorf("in 2 hours the instances were stopped %v times", stops)
	}
}
