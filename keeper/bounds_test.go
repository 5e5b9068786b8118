package keeper

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
)

// These are errors that the driver returns while the instance is stopped.
const (
	full = "rpc error: code = ResourceExhausted desc = InstanceFull: 8 of 8 disks"
	away = "rpc error: code = Unavailable desc = RackUnavailable: it does not answer"
)

// live simulates the cluster for a time: kubelets report, the attacher tries each attachment again
// and again, and the keeper does its rounds. For a volume on a stopped instance the attacher gets
// the error that refused returns; "" means that it attaches or detaches the volume.
func (w *fixture) live(d time.Duration, refused func(volume string) string) {
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

// stops returns how often each node's instance was stopped since the last call.
func (w *fixture) stops() map[string]int {
	stops := map[string]int{}
	for _, effect := range w.seen() {
		if _, node, found := strings.Cut(effect, "Stopping: stop "); found {
			stops[node]++
		} else if node, found := strings.CutPrefix(effect, "stop "); found {
			stops[node]++
		}
	}
	return stops
}

func TestAFailingAttachmentCausesFewStops(t *testing.T) { // D-61
	for _, c := range []struct {
		name, refused string
		most          int
	}{
		{"the instance is full", full, 1},
		{"the rack does not answer", away, Defaults().MaxStopsPerVolume},
		{"the rack refuses a stopped instance as it does a running one", mustStop,
			Defaults().MaxStopsPerVolume},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newFixture(t, "a", "b")
			w.wait("a", "data")
			w.live(day-time.Hour, func(string) string { return c.refused })
			if got := w.stops(); got["a"] != c.most || got["b"] != 0 {
				t.Errorf("in a day the instances were stopped %v times, want %d of a", got, c.most)
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
			w.live(day, func(string) string { return c.refused })
			if got := w.stops()["a"]; c.most == 1 && got > 0 || got > 2*c.most {
				t.Errorf("on the next day the instance was stopped %d times", got)
			}
		})
	}
}

// editVolume returns a function that changes the volume "data".
func editVolume(change func(*corev1.PersistentVolume)) func(*fixture) {
	return func(w *fixture) { keepertest.Edit(w.api, "", "data", change) }
}

func TestAFailedAttachmentIsRepeatedAfterAChange(t *testing.T) { // D-61
	for _, c := range []struct {
		name   string
		change func(*fixture)
		again  bool
	}{
		{"nothing", func(*fixture) {}, false},
		{"another attachment of the same volume", func(w *fixture) {
			keepertest.Remove[*storagev1.VolumeAttachment](w.api, "", "va-data")
			w.wait("a", "data")
		}, false},
		{"its pod", func(w *fixture) {
			keepertest.Remove[*corev1.Pod](w.api, "shop", "db-data")
			w.pod("a", "db-data", "StatefulSet", "data")
		}, false},
		{"a person asks", editVolume(func(v *corev1.PersistentVolume) {
			v.Annotations = map[string]string{AgainAnnotation: "now"}
		}), true},
		{"its disk", editVolume(func(v *corev1.PersistentVolume) {
			v.Spec.CSI.VolumeHandle = instanceOf("x")
		}), true},
		{"the node's instance", func(w *fixture) {
			c, _ := keepertest.Get[*storagev1.CSINode](w.api, "", "a")
			c.Spec.Drivers[1].NodeID = instanceOf("n")
			keepertest.Put(w.api, c)
			w.rack.set("n", "running")
		}, true},
		{"its node", func(w *fixture) {
			keepertest.Remove[*storagev1.VolumeAttachment](w.api, "", "va-data")
			keepertest.Remove[*corev1.Pod](w.api, "shop", "db-data")
			w.wait("b", "data")
		}, true},
		{"it is to be detached", func(w *fixture) {
			keepertest.Edit(w.api, "", "va-data", func(a *storagev1.VolumeAttachment) {
				a.Finalizers = []string{"external-attacher"}
			})
			keepertest.Delete[*storagev1.VolumeAttachment](w.api, "", "va-data")
		}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newFixture(t, "a", "b")
			w.wait("a", "data")
			refused := func(string) string { return full }
			w.live(2*time.Hour, refused)
			w.stops()
			c.change(w)
			w.live(2*time.Hour, refused)
			stops := w.stops()
			if again := len(stops) > 0; again != c.again {
				t.Errorf("the instances were stopped %v times: %v", stops, w.node("a").Annotations)
			}
		})
	}
}

func TestANodeIsStoppedAtMostMaxStopsPerNodeTimesADay(t *testing.T) { // D-61
	w := newFixture(t, "a")
	w.Config.MaxStopsPerNode = 3
	attach := func(string) string { return "" }
	for i := range 10 {
		w.wait("a", fmt.Sprintf("v%d", i))
		w.live(time.Hour, attach)
	}
	if got := w.stops()["a"]; got != 3 {
		t.Errorf("the instance was stopped %d times", got)
	}
	if !strings.Contains(w.plan("a"), "3 times in 24 hours (--max-stops-per-node)") {
		t.Errorf("the plan is %q", w.plan("a"))
	}
	w.edit("a", func(n *corev1.Node) { // only its kubelet does that
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, AgainAnnotation, "now")
	})
	w.live(time.Hour, attach)
	if got := w.stops()["a"]; got > 0 {
		t.Errorf("an annotation of the Node had the instance stopped %d times", got)
	}
	keepertest.Edit(w.api, "oxide", RecordsName, func(m *corev1.ConfigMap) {
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, AgainAnnotation, "now")
	})
	w.live(time.Hour, attach)
	if got := w.stops()["a"]; got != 1 || w.plan("a") != "" || w.metric("held_attachments", "") != 0 {
		t.Errorf("a person has asked, and the instance was stopped %d times; the plan is %q", got,
			w.plan("a"))
	}
	for _, a := range keepertest.List[*storagev1.VolumeAttachment](w.api, "") {
		if !a.Status.Attached || a.Annotations[HeldAnnotation] != "" {
			t.Errorf("%s is left as %v, %v", a.Name, a.Annotations, a.Status)
		}
	}
}

func TestAnAttachmentThatFailsDelaysNoOther(t *testing.T) { // D-61
	w := newFixture(t, "a")
	w.wait("a", "bad")
	w.wait("a", "good")
	refused := func(volume string) string {
		if volume == "bad" {
			return full
		}
		return ""
	}
	w.live(time.Hour, refused)
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
	w.live(time.Hour, refused)
	if got := w.stops()["a"]; got != 2 {
		t.Errorf("the instance was stopped %d times, want once for each that can be attached", got)
	}
	keepertest.Remove[*corev1.PersistentVolume](w.api, "", "bad")
	keepertest.Remove[*storagev1.VolumeAttachment](w.api, "", "va-bad")
	keepertest.Remove[*corev1.Pod](w.api, "shop", "db-bad")
	w.wait("a", "last")
	w.live(time.Hour, refused)
	if got := slices.Collect(maps.Keys(w.last("a").Volumes)); slices.Contains(got, "bad") {
		t.Errorf("a volume that is gone is remembered: %v", got)
	}
}

// leave makes a volume that is attached wait to be detached, as when its pod is gone.
func (w *fixture) leave(node, volume string) {
	w.bind(pv(volume))
	name := "va-" + volume
	keepertest.Put(w.api, va(attached, func(a *storagev1.VolumeAttachment) {
		a.Name, a.Spec.NodeName, a.Spec.Source.PersistentVolumeName = name, node, &volume
		a.Finalizers = []string{"external-attacher/csi-oxide-computer"}
	}).VolumeAttachment)
	keepertest.Delete[*storagev1.VolumeAttachment](w.api, "", name)
}

// TestGrowingAClaimStopsItsNodeOnce replaces the disk of a claim while its pod is stopped: the
// earlier disk has to be detached, and some time later the new one has to be attached.
func TestGrowingAClaimStopsItsNodeOnce(t *testing.T) { // D-61
	for _, c := range []struct {
		name  string
		to    string // the node of the pod when it comes back
		after time.Duration
		want  map[string]int
		// most is how long the pod may wait for the new disk, with the stop.
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
			w.live(c.after, willing)
			w.wait(c.to, "data")
			asked, done := w.clock, false
			for end := w.clock.Add(20 * time.Minute); !done && w.clock.Before(end); {
				w.live(time.Second, willing)
				a, _ := keepertest.Get[*storagev1.VolumeAttachment](w.api, "", "va-data")
				done = a.Status.Attached
			}
			took := w.clock.Sub(asked)
			w.live(5*time.Minute, willing)
			stops := w.stops()
			total := 0
			for _, n := range stops {
				total += n
			}
			t.Logf("FIGURE claim-keeper same_node=%t seconds_to_attach_request=%.0f stops=%d "+
				"seconds_to_attached=%.0f", c.to == "a", c.after.Seconds(), total, took.Seconds())
			if !maps.Equal(stops, c.want) || !done || took > c.most {
				t.Errorf("the instances were stopped %v times, want %v; attached: %t after %s", stops, c.want,
					done, took)
			}
			if _, there := keepertest.Get[*storagev1.VolumeAttachment](w.api, "", "va-old"); there {
				t.Error("the earlier disk is not detached")
			}
		})
	}
}
