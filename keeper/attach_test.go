package keeper

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
)

func TestD61TheAttacherIsWokenAsSoonAsTheInstanceIsStopped(t *testing.T) {
	w := newStory(t, "a")
	w.wait("a", "data")
	w.pass(time.Minute)
	w.steps(draining, draining, stopping)
	w.seen()
	w.round()
	want := []string{"Stopping: stop a", "Stopping: patch volumeattachments va-data"}
	if seen := w.seen(); !slices.Equal(seen, want) {
		t.Fatalf("the round that stops the instance did %q", seen)
	}
	w.steps(attaching)
	// The attacher has attached the disk, and a program has started the instance.
	w.attach("data", "")
	w.rack.set("a", "running")
	w.steps(starting, returning)
	w.heartbeatLater("a")
	w.steps("")
	w.ends(ending{"", true})
}

func TestD61AnInstanceThatIsStartedBeforeItsDisksAreAttachedIsAProblem(t *testing.T) {
	w := newStory(t, "a")
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
