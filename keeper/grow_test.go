package keeper

import (
	"maps"
	"testing"
	"time"

	storagev1 "k8s.io/api/storage/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
)

// leave makes a volume that is attached wait to be detached, as when its pod is gone.
func (w *story) leave(node, volume string) {
	w.bind(pv(volume))
	name := "va-" + volume
	keepertest.Put(w.api, va(attached, func(a *storagev1.VolumeAttachment) {
		a.Name, a.Spec.NodeName, a.Spec.Source.PersistentVolumeName = name, node, &volume
		a.Finalizers = []string{"external-attacher/csi-oxide-computer"}
	}).VolumeAttachment)
	keepertest.Delete[*storagev1.VolumeAttachment](w.api, "", name)
}

// The disk of the claim is replaced while its pod is stopped: the earlier disk is to be detached,
// and some time later the new one is to be attached.
func TestD61AClaimThatIsGrownStopsItsNodeOnceIfItsPodComesBackInTime(t *testing.T) {
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
			w := newStory(t, "a", "b")
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
