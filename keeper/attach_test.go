package keeper

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
)

func TestD61TheDisksAreAttachedAsSoonAsTheInstanceIsStopped(t *testing.T) {
	w := newStory(t, "a")
	w.rack.disk = "detached"
	w.stopped()
	seen := w.seen()
	stop := slices.Index(seen, "Stopping: stop a")
	if stop < 0 || stop+1 >= len(seen) || seen[stop+1] != "Stopping: disks/attach a" {
		t.Fatalf("done: %q", seen)
	}
	// A program has started the instance, and the attacher has not been woken yet.
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
	w.rack.disk = "faulted"
	w.stopped()
	w.rack.set("a", "running")
	w.steps(starting, returning)
	w.heartbeatLater("a")
	w.steps("")
	w.ends(ending{"somebody started the instance; it is running", true})
	if slices.Contains(w.seen(), "Stopping: disks/attach a") {
		t.Error("a disk is attached that is not detached")
	}
}

func TestD61OnlyDisksThatTheDriverHasCheckedInTheOperationAreAttachedByTheKeeper(t *testing.T) {
	named := func(name string, change ...func(*storagev1.VolumeAttachment)) *attachment {
		return va(append(change, func(a *storagev1.VolumeAttachment) {
			a.Name, a.Spec.Source.PersistentVolumeName = name, &name
		})...)
	}
	r := &operation{Started: begin}
	first := va(attachFailed(mustStop, 0)).wakeup(r)
	v := &view{Now: begin.Add(time.Minute),
		volumes: []corev1.PersistentVolume{*pv("tried"), *pv("new")},
		Attachments: []*attachment{named("tried", attachFailed(mustStop, 1), woken(first)),
			named("new", attachFailed(mustStop, 0), woken(first))}}
	n := &node{Node: &corev1.Node{}, Record: r}
	n.Name = "a"
	got := v.causes(n)
	refused := map[string]bool{}
	for name, c := range got {
		refused[name] = c.Refused
	}
	if diff := cmp.Diff(map[string]bool{"tried": true, "new": false}, refused); diff != "" {
		t.Error(diff)
	}
}
