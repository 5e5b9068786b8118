package keeper

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
)

func TestAnObstaclePreventsTheStopOfANodeAndIsNamedInThePlan(t *testing.T) { // D-61
	ended := func(name string, o outcome) func(*fixture) {
		return func(w *fixture) {
			o.Instance = instanceOf(name)
			w.setRecord(name, record{Last: &o})
		}
	}
	const tooOften = "12 times in 24 hours (--max-stops-per-node)"
	often := func(ago time.Duration, change func(*fixture)) func(*fixture) {
		return func(w *fixture) {
			ended("a", outcome{Ended: begin.Add(-ago), Node: history{
				Stops: slices.Repeat([]time.Time{begin.Add(-ago)}, 12)}})(w)
			w.round() // this round sets HeldAnnotation
			if change != nil {
				change(w)
			}
		}
	}
	const unchanged = "failed while the instance was stopped, and nothing about it has changed"
	failed := func(node string, change func(*fixture)) func(*fixture) {
		return func(w *fixture) {
			ended(node, outcome{Ended: begin.Add(-time.Hour), Volumes: map[string]history{
				"data": {Last: cause{Disk: racktest.Disk, Failed: full}}}})(w)
			if change != nil {
				change(w)
			}
		}
	}
	for _, c := range []trial[func(*fixture), string]{ // want is the obstacle, or ""
		{"nothing", func(*fixture) {}, ""},
		{"not registered", func(w *fixture) { keepertest.Delete[*storagev1.CSINode](w.api, "", "a") },
			"the driver is not registered on this node"},
		{"the keeper's own node", func(w *fixture) { w.Config.NodeName = "a" }, "the keeper runs here"},
		{"the keeper's own node, on which another volume has just begun to wait", func(w *fixture) {
			w.Config.NodeName = "a"
			w.wait("a", "new")
		}, "no further volume has begun to wait"},
		{"cordoned", on("", "a", func(n *corev1.Node) { n.Spec.Unschedulable = true }),
			"somebody cordoned this node"},
		{"not ready", func(w *fixture) { w.lose("a") }, "the node is not ready"},
		{"the attacher does not try", func(w *fixture) { w.clock = w.clock.Add(staleAfter) },
			"the attacher has not tried for 10m0s"},
		{"outside the window", func(w *fixture) {
			w.Config.Window = csitest.Got(ParseWindow("0 2 * * *", 1))(w.t)
		}, `waits for the maintenance window, "0 2 * * *"`},
		{"another volume has just begun to wait", func(w *fixture) { w.wait("a", "new") },
			"no further volume has begun to wait"},
		{"an operation has just ended", ended("a", outcome{Ended: begin}), "less than 10m0s ago"},
		{"the volume began to wait in the future", func(w *fixture) { w.advance(-time.Hour) }, ""},
		{"an operation ended in the future", ended("a", outcome{Ended: begin.Add(time.Hour),
			Stopped: true, StoppedWith: map[string]time.Time{"shop/db": begin.Add(time.Hour)}}), ""},
		{"its StatefulSet was stopped elsewhere in the future", ended("b", outcome{Stopped: true,
			Ended: begin.Add(time.Hour), StoppedWith: map[string]time.Time{
				"shop/db": begin.Add(time.Hour)}}), ""},
		{"a pod that would be lost", func(w *fixture) { w.pod("a", "one", "") },
			"no controller that makes another; move it away, or remove the label"},
		{"of the control plane", on("", "a", func(n *corev1.Node) { n.Labels[controlPlane] = "" }),
			"stops no node of the control plane"},
		{"spec.providerID names another instance", on("", "a", func(n *corev1.Node) {
			n.Spec.ProviderID = "oxide://" + instanceOf("b")
		}), "its spec.providerID is oxide://" + instanceOf("b") + ", and its driver is registered with"},
		{"another node has the same instance", func(w *fixture) { w.register("b", "a") },
			"the node b claims the same instance"},
		{"another node has the same instance, which spec.providerID names here", func(w *fixture) {
			w.register("b", "a")
			w.edit("a", func(n *corev1.Node) { n.Spec.ProviderID = "oxide://" + instanceOf("a") })
		}, ""},
		{"a budget", func(w *fixture) {
			w.pod("a", "web-1", "ReplicaSet")
			keepertest.Put(w.api, budget(1, 1, 0))
		}, "the PodDisruptionBudget shop/shop allows no eviction"},
		{"a budget of a pod that waits on another node, too", func(w *fixture) {
			w.pod("a", "db-ready", "StatefulSet", "data")
			w.wait("b", "other")
			w.edit("b", func(n *corev1.Node) { n.Labels = nil })
			keepertest.Put(w.api, budget(3, 1, 0, func(b *pdb) {
				b.Spec.MaxUnavailable = ptr.To(intstr.FromInt32(0))
			}))
		}, "wants 1 healthy pods, and a stop would leave 0"},
		{"its StatefulSet was stopped elsewhere", ended("b", outcome{
			StoppedWith: map[string]time.Time{"shop/db": begin}}), "the StatefulSet shop/db has pods " +
			"here, and had some on the node b"},
		{"its StatefulSet was stopped elsewhere before", ended("b", outcome{
			StoppedWith: map[string]time.Time{"shop/db": begin.Add(-29 * time.Minute)}}), ""},
		{"stopped too often", often(time.Hour, nil), tooOften},
		{"stopped often, a day ago", often(day, nil), ""},
		{"stopped too often, and its Node has the annotation", often(time.Hour, on("", "a",
			func(n *corev1.Node) { metav1.SetMetaDataAnnotation(&n.ObjectMeta, AgainAnnotation, "now") })),
			tooOften},
		{"stopped too often, and the records have the annotation", often(time.Hour, on("oxide",
			RecordsName, func(m *corev1.ConfigMap) {
				metav1.SetMetaDataAnnotation(&m.ObjectMeta, AgainAnnotation, "now")
			})), ""},
		{"it failed while the instance was stopped", failed("a", nil), unchanged},
		{"it failed, and has another attachment", failed("a", func(w *fixture) {
			keepertest.Remove[*storagev1.VolumeAttachment](w.api, "", "va-data")
			w.wait("a", "data")
		}), unchanged},
		{"it failed, and has the annotation", failed("a", on("", "data",
			func(v *corev1.PersistentVolume) {
				v.Annotations = map[string]string{AgainAnnotation: "now"}
			})), ""},
		{"it failed, and has another disk", failed("a", on("", "data", func(v *corev1.PersistentVolume) {
			v.Spec.CSI.VolumeHandle = instanceOf("x")
		})), ""},
		{"it failed, and the node has another instance", failed("a", func(w *fixture) {
			w.register("a", "n")
			w.rack.set("n", "running")
		}), ""},
		{"it failed on another node", failed("b", nil), ""},
		{"it failed, and is to be detached", failed("a", func(w *fixture) {
			keepertest.Edit(w.api, "", "va-data", func(a *storagev1.VolumeAttachment) {
				a.Finalizers = []string{"external-attacher"}
				a.Status = storagev1.VolumeAttachmentStatus{Attached: true, DetachError: a.Status.AttachError}
			})
			keepertest.Delete[*storagev1.VolumeAttachment](w.api, "", "va-data")
			w.pass(time.Minute)
		}), ""},
		// The attachments below may be forged: no pod on the node uses their volume.
		{"no volume", func(w *fixture) { keepertest.Remove[*corev1.PersistentVolume](w.api, "", "data") },
			`there is no PersistentVolume "data" of the driver`},
		{"another driver's volume", on("", "data", func(v *corev1.PersistentVolume) {
			v.Spec.CSI.Driver = "x"
		}), `there is no PersistentVolume "data" of the driver`},
		{"a volume that was never bound", on("", "data", func(v *corev1.PersistentVolume) {
			v.Spec.ClaimRef = nil
		}), "the volume data is bound to no claim"},
		{"a claim that is gone", func(w *fixture) {
			keepertest.Remove[*corev1.PersistentVolumeClaim](w.api, "shop", "data")
		}, "no pod on this node"},
		{"another claim of the name", func(w *fixture) {
			keepertest.Remove[*corev1.PersistentVolumeClaim](w.api, "shop", "data")
			keepertest.Put(w.api, pvc("data"))
		}, "no pod on this node"},
		{"a claim that is bound to another volume", on("shop", "data",
			func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "other" }), "no pod on this node"},
		{"a pod of another node", on("shop", "db-data", func(p *corev1.Pod) { p.Spec.NodeName = "b" }),
			"no pod on this node"},
		{"a pod that has ended", on("shop", "db-data", phase(corev1.PodFailed)), "no pod on this node"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := waiting(t, "a", "b")
			c.given(w)
			_, err := w.Round(t.Context())
			if err != nil && !errors.Is(err, ErrStepAside) && !strings.Contains(err.Error(), c.want) {
				t.Fatal(err)
			}
			if began := w.step("a") == string(draining); began != (c.want == "") ||
				!strings.Contains(w.plan("a"), c.want) {
				t.Errorf("began: %v; the plan is %q, want %q", began, w.plan("a"), c.want)
			}
			a, there := keepertest.Get[*storagev1.VolumeAttachment](w.api, "", "va-data")
			if c.want == "" && (w.metric("held_attachments", "") > 0 || there &&
				a.Annotations[HeldAnnotation] != "") {
				t.Errorf("it is still held: %v", a.Annotations)
			}
			if aside := errors.Is(err, ErrStepAside); aside != (c.name == "the keeper's own node") {
				t.Errorf("the keeper steps aside: %v", aside)
			}
		})
	}
}

func TestTheWaitingMetricIgnoresNodesThatTheKeeperDoesNotStop(t *testing.T) {
	for _, c := range []trial[func(*fixture), float64]{
		{"a node with the label", func(*fixture) {}, 1},
		{"a node without the label", func(w *fixture) {
			w.edit("a", func(n *corev1.Node) { delete(n.Labels, ColdAttachLabel) })
		}, 0},
		{"cold attach is off", func(w *fixture) { w.Config.ColdAttach = false }, 0},
		{"a dry run", func(w *fixture) { w.Config.DryRun = true }, 0},
	} {
		w := waiting(t, "a")
		c.given(w)
		w.round()
		if got := w.metric("waiting_attachments", ""); got != c.want {
			t.Errorf("%s: %v attachments wait, want %v", c.name, got, c.want)
		}
	}
}

func TestRoundsAreFrequentOnlyDuringAnOperation(t *testing.T) {
	for _, on := range []bool{true, false} {
		w := waiting(t, "a")
		w.Config.ColdAttach = on
		want, got := slices.Repeat([]time.Duration{w.Config.Interval}, 3), []time.Duration{}
		if on {
			want[0], want[1] = pace, pace
		}
		for range want {
			got = append(got, csitest.Got(w.Round(t.Context()))(t))
			w.edit("a", func(n *corev1.Node) { n.Labels = nil }) // this ends the operation
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("with cold attach %v, it looks after (-want +got):\n%s", on, diff)
		}
	}
}

func TestTheNextOperationWaitsLongerAfterEachFailure(t *testing.T) {
	c := Config{MinInterval: time.Minute}
	for failures, want := range map[int]time.Duration{0: 1, 1: 2, 3: 8, 4: 16, 5: 16, 100: 16} {
		if got := c.pauseAfter(&outcome{Failures: failures}); got != want*time.Minute {
			t.Errorf("after %d failures, the pause is %s", failures, got)
		}
	}
}

func TestAnotherValueOfTheLabelRemovesThePlanAndPreventsTheStop(t *testing.T) { // D-61
	w := newFixture(t, "a")
	w.wait("a", "data")
	w.round()
	if w.plan("a") == "" {
		t.Error("there is no plan for a node that waits")
	}
	w.pass(time.Minute)
	w.edit("a", func(n *corev1.Node) { n.Labels[ColdAttachLabel] = "yes" })
	w.seen()
	w.round()
	w.round()
	if diff := cmp.Diff([]string{"patch nodes a"}, w.seen()); diff != "" || w.plan("a") != "" {
		t.Errorf("the plan is %q; done:\n%s", w.plan("a"), diff)
	}
}

func TestADryRunOnlyReportsItsPlan(t *testing.T) { // D-61
	w := newFixture(t, "a", "b")
	w.Config.DryRun = true
	w.wait("a", "data")
	w.pod("a", "web-1", "ReplicaSet")
	w.pass(time.Minute)
	w.seen()
	for range 3 {
		w.round()
	}
	if diff := cmp.Diff([]string{"patch nodes a"}, w.seen()); diff != "" {
		t.Errorf("done:\n%s", diff)
	}
	what := "would stop the instance " + instanceOf("a") + " for 1 volumes that wait (data); 1 pods " +
		"are evicted, 1 stay and stop with it"
	if got := w.plan("a"); got != what {
		t.Errorf("the plan is %q", got)
	}
	if diff := cmp.Diff([]string{"Node a: ColdAttachPlanned: " + what,
		"PersistentVolumeClaim data: ColdAttachPlanned: the node keeper " + what + " (node a)",
		"Pod db-data: ColdAttachPlanned: the node keeper " + what + " (node a)"}, w.events()); diff !=
		"" {
		t.Errorf("the events:\n%s", diff)
	}
	e := keepertest.List[*corev1.Event](w.api, "default")[0]
	if e.InvolvedObject.UID != "a" || e.Source.Component != component || e.Type != "Normal" {
		t.Errorf("the Node's event is %+v", e)
	}
	w.Config.DryRun = false
	w.steps(draining)
}

func TestAnEventOfAPodOrClaimNamesOnlyVolumesOfItsNamespace(t *testing.T) {
	w := newFixture(t, "a")
	w.Config.DryRun = true
	w.wait("a", "data")
	w.wait("a", "secret")
	for namespace, volume := range map[string]string{"bank": "secret", "third": "quiet"} {
		p, v := podOf("a", "db-"+volume, "StatefulSet", volume), pv(volume)
		p.Namespace, v.Spec.ClaimRef.Namespace = namespace, namespace
		keepertest.Put(w.api, p)
		keepertest.Bind(w.api, v)
	}
	keepertest.Remove[*corev1.Pod](w.api, "shop", "db-secret")
	w.pass(time.Minute)
	w.round()
	for namespace, want := range map[string]string{"shop": "2 volumes that wait (data);",
		"bank": "2 volumes that wait (secret);", "third": "2 volumes that wait; ",
		"default": "2 volumes that wait (data, secret);"} { // the Node's events
		events := keepertest.List[*corev1.Event](w.api, namespace)
		for _, e := range events {
			if !strings.Contains(e.Message, want) {
				t.Errorf("an event in the namespace %s says %q, want %q", namespace, e.Message, want)
			}
		}
		if len(events) == 0 {
			t.Errorf("there are no events in the namespace %s", namespace)
		}
	}
}

func TestAPlanNamesAtMostThreeVolumes(t *testing.T) {
	named := func(name string) *attachment {
		return va(func(a *storagev1.VolumeAttachment) { a.Spec.Source.PersistentVolumeName = &name })
	}
	inline := va(func(a *storagev1.VolumeAttachment) { a.Spec.Source.PersistentVolumeName = nil })
	for want, all := range map[string][]*attachment{"": {inline}, "a, b, c": {named("b"), named("c"),
		named("a")}, "a, b, c, …": {named("d"), named("b"), named("c"), named("a")}} {
		if got := volumesText(all); got != want {
			t.Errorf("the text is %q, want %q", got, want)
		}
	}
}

// In most trials one write fails, before or after the API server has applied it.
func TestOnlyTheNodeThatHasWaitedLongestIsStopped(t *testing.T) { // D-61
	for _, fails := range []string{"", "create configmaps", "update nodes"} {
		for _, applied := range []bool{false, true} {
			w := newFixture(t, "a", "b", "c")
			w.Config.StatefulSetInterval = 0
			for _, name := range []string{"c", "a", "b"} {
				w.wait(name, "of-"+name)
				w.pass(time.Second)
			}
			w.pass(time.Minute)
			failed := fails == ""
			w.api.Intercept(func(r keepertest.KubeRequest) error {
				if failed || r.Verb+" "+r.Resource != fails || r.Applied != applied {
					return nil
				}
				failed = true
				return errBroken
			})
			for range 3 {
				_, err := w.Round(t.Context())
				if w.step("a") != "" || w.step("b") != "" {
					t.Errorf("%s %t: the steps are %q and %q after the error %v", fails, applied, w.step("a"),
						w.step("b"), err)
				}
			}
			if !failed || w.step("c") == "" {
				t.Errorf("%s %t: the oldest is not stopped; a write has failed: %v", fails, applied, failed)
			}
		}
	}
}

func TestNoEventIsCreatedTwice(t *testing.T) {
	for _, c := range []struct {
		name, resource string
		applied        bool // the write is applied, and only its response is lost
		events         int  // the least number of events
	}{
		{"nothing", "", false, 9},
		{"records", "configmaps", false, 9},
		{"responses to records", "configmaps", true, 0},
		{"events", "events", false, 0},
		{"responses to events", "events", true, 9},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := waiting(t, "a")
			lost := map[string]bool{}
			w.api.Intercept(func(r keepertest.KubeRequest) error {
				key := w.step("a") + r.Name
				w.mu.Lock()
				defer w.mu.Unlock()
				if r.Resource != c.resource || r.Applied != c.applied || lost[key] {
					return nil
				}
				lost[key] = true
				return keepertest.ErrBreak
			})
			for range 20 {
				_, _ = w.Round(t.Context())
				w.pass(time.Second)
				if w.step("a") == string(attaching) {
					w.attach("data", "")
				}
			}
			if last := w.last("a"); last.Problem != "" || w.step("a") != "" {
				t.Errorf("the operation ended with %+v", last)
			}
			said := w.events()
			w.mu.Lock()
			defer w.mu.Unlock()
			if once := slices.Compact(slices.Clone(said)); len(once) != len(said) ||
				len(said) < c.events || (len(lost) > 4) != (c.resource != "") {
				t.Errorf("%d were lost; the events are\n%s", len(lost), strings.Join(said, "\n"))
			}
		})
	}
}

// The driver returns these errors while the instance is stopped.
const (
	full = "rpc error: code = ResourceExhausted desc = InstanceFull: 8 of 8 disks"
	away = "rpc error: code = Unavailable desc = RackUnavailable: it does not answer"
)

// simulate runs the cluster for the time d: kubelets report, the attacher tries each attachment
// again and again, and the keeper does its rounds. On a stopped instance the attacher fails with
// the error that refused() returns for the volume, or succeeds if the error is "".
func (w *fixture) simulate(d time.Duration, refused func(volume string) string) {
	w.t.Helper()
	for end := w.clock.Add(d); w.clock.Before(end); {
		for _, n := range keepertest.List[*corev1.Node](w.api, "") {
			if w.rack.state(n.Name) == "running" {
				w.heartbeat(n.Name)
			} else {
				w.lose(n.Name)
			}
		}
		for _, a := range keepertest.List[*storagev1.VolumeAttachment](w.api, "") {
			volume := *a.Spec.Source.PersistentVolumeName
			said := mustStop
			if w.rack.state(a.Spec.NodeName) == "stopped" {
				said = refused(volume)
			}
			switch {
			case a.DeletionTimestamp != nil && said == "":
				keepertest.Edit(w.api, "", a.Name, func(a *storagev1.VolumeAttachment) { a.Finalizers = nil })
			case a.DeletionTimestamp != nil:
				keepertest.Edit(w.api, "", a.Name, func(a *storagev1.VolumeAttachment) {
					a.Status.DetachError = &storagev1.VolumeError{Time: metav1.Time{Time: w.clock}, Message: said}
				})
			case !a.Status.Attached:
				w.attach(volume, said)
			}
		}
		again, err := w.Round(w.t.Context())
		if err != nil && !errors.Is(err, ErrStepAside) {
			w.t.Fatalf("round: %v", err)
		}
		if again > pace && w.step("a") == "" {
			again = w.idle
		}
		w.advance(max(again, 3*time.Second))
	}
}

func (w *fixture) stops() map[string]int {
	stops := map[string]int{}
	for _, effect := range w.seen() {
		if _, node, found := strings.Cut(": "+effect, ": stop "); found {
			stops[node]++
		}
	}
	return stops
}

func TestAFailingAttachmentCausesALimitedNumberOfStops(t *testing.T) { // D-61
	for _, c := range []trial[string, int]{
		{"the instance is full", full, 1},
		{"the rack does not answer", away, Defaults().MaxStopsPerVolume},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newFixture(t, "a", "b")
			w.wait("a", "data")
			w.simulate(day-time.Hour, func(string) string { return c.given })
			if got := w.stops(); got["a"] != c.want || got["b"] != 0 {
				t.Errorf("in a day the instances were stopped %v times, want %d of a", got, c.want)
			}
			said := strings.Join(w.events(), "\n")
			for _, want := range []string{"Node a: ColdAttachHeld: waits, and the keeper does not stop",
				"PersistentVolumeClaim data: ColdAttachHeld: waits, and the keeper does not stop",
				"run kubectl annotate --overwrite pv data csi.oxide.computer/cold-attach-again="} {
				if !strings.Contains(said, want) {
					t.Errorf("no event says %q:\n%s", want, said)
				}
			}
			a, _ := keepertest.Get[*storagev1.VolumeAttachment](w.api, "", "va-data")
			if a.Annotations[HeldAnnotation] == "" || !strings.Contains(w.plan("a"),
				a.Annotations[HeldAnnotation]) || w.metric("held_attachments", "") != 1 {
				t.Errorf("the attachment has %v, the plan is %q", a.Annotations, w.plan("a"))
			}
			w.simulate(day, func(string) string { return c.given })
			if got := w.stops()["a"]; c.want == 1 && got > 0 || got > 2*c.want {
				t.Errorf("on the next day the instance was stopped %d times", got)
			}
		})
	}
}

func TestAFailingAttachmentDoesNotDelayOthers(t *testing.T) { // D-61
	w := newFixture(t, "a")
	w.wait("a", "bad")
	w.wait("a", "good")
	refused := func(volume string) string {
		if volume == "bad" {
			return full
		}
		return ""
	}
	w.simulate(time.Hour, refused)
	if last := w.last("a"); last.Problem != "" || last.Failures != 0 ||
		last.Volumes["bad"].Last.Failed != full || last.Volumes["good"].Last.Failed != "" {
		t.Errorf("the operation ended with %+v", last)
	}
	if said := strings.Join(w.events(), "\n"); !strings.Contains(said, "ColdAttachEnded: done: the "+
		"instance runs, and the node takes pods again; the volume bad failed while the instance was "+
		"stopped: "+full) {
		t.Errorf("the events are\n%s", said)
	}
	w.wait("a", "later")
	w.simulate(time.Hour, refused)
	if got := w.stops()["a"]; got != 2 {
		t.Errorf("the instance was stopped %d times, want once for each that can be attached", got)
	}
	keepertest.Remove[*corev1.PersistentVolume](w.api, "", "bad")
	keepertest.Remove[*storagev1.VolumeAttachment](w.api, "", "va-bad")
	keepertest.Remove[*corev1.Pod](w.api, "shop", "db-bad")
	w.wait("a", "last")
	w.simulate(time.Hour, refused)
	if got := slices.Collect(maps.Keys(w.last("a").Volumes)); slices.Contains(got, "bad") {
		t.Errorf("a volume that is gone is remembered: %v", got)
	}
}

// leave creates an attached volume whose VolumeAttachment is being deleted.
func (w *fixture) leave(node, volume string) {
	keepertest.Bind(w.api, pv(volume))
	name := "va-" + volume
	keepertest.Put(w.api, va(attached, func(a *storagev1.VolumeAttachment) {
		a.Name, a.Spec.NodeName, a.Spec.Source.PersistentVolumeName = name, node, &volume
		a.Finalizers = []string{"external-attacher/csi-oxide-computer"}
	}).VolumeAttachment)
	keepertest.Delete[*storagev1.VolumeAttachment](w.api, "", name)
}

// In each trial, the disk of a claim is replaced while its pod is stopped. First the earlier disk
// has to be detached, and some time later the new one has to be attached.
func TestGrowingAClaimStopsItsNodeAtMostOnceForEachDisk(t *testing.T) { // D-61
	for _, c := range []struct {
		name  string
		to    string // the node of the pod when it comes back
		after time.Duration
		want  map[string]int
		// most is the longest time that the pod may wait for the new disk.
		most time.Duration
	}{
		{"the pod comes back to its node within --settle", "a", 20 * time.Second,
			map[string]int{"a": 1}, time.Minute},
		{"the pod comes back after the node was stopped for the earlier disk", "a", 2 * time.Minute,
			map[string]int{"a": 2}, 12 * time.Minute},
		{"the pod comes to another node", "b", 20 * time.Second, map[string]int{"a": 1, "b": 1},
			2 * time.Minute},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newFixture(t, "a", "b")
			w.idle = 0
			willing := func(string) string { return "" }
			w.leave("a", "old")
			w.simulate(c.after, willing)
			w.wait(c.to, "data")
			asked, done := w.clock, false
			for end := w.clock.Add(20 * time.Minute); !done && w.clock.Before(end); {
				w.simulate(time.Second, willing)
				a, _ := keepertest.Get[*storagev1.VolumeAttachment](w.api, "", "va-data")
				done = a.Status.Attached
			}
			took := w.clock.Sub(asked)
			w.simulate(5*time.Minute, willing)
			if stops := w.stops(); !maps.Equal(stops, c.want) || !done || took > c.most {
				t.Errorf("the instances were stopped %v times, want %v; attached: %t after %s", stops, c.want,
					done, took)
			}
			if _, there := keepertest.Get[*storagev1.VolumeAttachment](w.api, "", "va-old"); there {
				t.Error("the earlier disk is not detached")
			}
		})
	}
}
