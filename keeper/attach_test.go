package keeper

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
)

func TestD61TheAttacherIsWokenAsSoonAsTheInstanceIsStopped(t *testing.T) {
	w := newStory(t, "a")
	w.rack.disk = "detached"
	w.stopped()
	seen := w.seen()
	stop := slices.Index(seen, "Stopping: stop a")
	if stop < 0 || stop+1 >= len(seen) || seen[stop+1] != "Stopping: patch volumeattachments va-data" {
		t.Fatalf("done: %q", seen)
	}
	// The attacher has attached the disk, and a program has started the instance.
	w.rack.disk = "attached"
	w.rack.set("a", "running")
	w.steps(starting)
	w.attach("data", "")
	w.steps(returning)
	w.heartbeatLater("a")
	w.steps("")
	w.ends(ending{"", true})
}

func TestD61AnInstanceThatIsStartedBeforeItsDisksAreAttachedIsAProblem(t *testing.T) {
	w := newStory(t, "a")
	w.rack.disk = "detached"
	w.stopped()
	w.rack.set("a", "running")
	w.steps(starting, returning)
	w.heartbeatLater("a")
	w.steps("")
	w.ends(ending{"somebody started the instance; it is running", true})
}

// A kubelet may annotate its own Node: these annotations were the records of an earlier keeper.
func TestD61AnAnnotationOfANodeHasNothingAttachedStoppedStartedOrFenced(t *testing.T) {
	for _, step := range []step{stopping, attaching, starting, returning} {
		for name, given := range map[string]func(*story){
			"cold attach is on":      func(*story) {},
			"cold attach is off":     func(w *story) { w.Config.ColdAttach = false },
			"a dry run":              func(w *story) { w.Config.DryRun = true },
			"the node has no label":  func(w *story) { w.edit("a", func(n *corev1.Node) { n.Labels = nil }) },
			"the instance is silent": func(w *story) { w.lose("a") },
		} {
			t.Run(string(step)+", "+name, func(t *testing.T) {
				w := newStory(t, "a", "b")
				w.rack.disk = "detached"
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
				v := va(attachFailed(mustStop, 0)).VolumeAttachment
				v.Spec.NodeName = "a"
				keepertest.Put(w.api, v)
				w.seen()
				for range 3 {
					w.round()
				}
				if seen := w.seen(); slices.ContainsFunc(seen, func(done string) bool {
					return done != "patch nodes a" && done != "patch volumeattachments va-data"
				}) {
					t.Errorf("the keeper did %q", seen)
				}
			})
		}
	}
}
