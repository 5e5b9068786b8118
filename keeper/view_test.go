package keeper

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// va returns an attachment of the volume "data" on the node "a".
func va(change ...func(*storagev1.VolumeAttachment)) *attachment {
	a := &storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: "va-data",
		CreationTimestamp: metav1.NewTime(begin)}, Spec: storagev1.VolumeAttachmentSpec{
		Attacher: DriverName, NodeName: "a",
		Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: ptr.To("data")}}}
	for _, c := range change {
		c(a)
	}
	return &attachment{VolumeAttachment: a}
}

// failure returns the error of an attempt at this many seconds after begin.
func failure(message string, after int) *storagev1.VolumeError {
	return &storagev1.VolumeError{Message: message,
		Time: metav1.NewTime(begin.Add(time.Duration(after) * time.Second))}
}

func attachFailed(message string, after int) func(*storagev1.VolumeAttachment) {
	return func(a *storagev1.VolumeAttachment) { a.Status.AttachError = failure(message, after) }
}

func attached(a *storagev1.VolumeAttachment) { a.Status.Attached = true }

func deleted(a *storagev1.VolumeAttachment) {
	a.DeletionTimestamp = ptr.To(metav1.NewTime(begin.Add(time.Hour)))
}

func detaching(message string) func(*storagev1.VolumeAttachment) {
	return func(a *storagev1.VolumeAttachment) { a.Status.DetachError = failure(message, 0) }
}

func woken(value string) func(*storagev1.VolumeAttachment) {
	return func(a *storagev1.VolumeAttachment) {
		a.Annotations = map[string]string{WokenAnnotation: value}
	}
}

func TestTheStateOfAnAttachmentFollowsFromItsStatus(t *testing.T) {
	r := &operation{Started: begin}
	earlier := &operation{Started: begin.Add(-time.Hour)}
	const (
		pending = "rpc error: code = Aborted desc = OperationPending: another one is going on"
		late    = "rpc error: code = DeadlineExceeded desc = context deadline exceeded"
	)
	first := va(attachFailed(full, 0)).wakeup(r)
	for _, c := range []struct {
		name                 string
		a                    *attachment
		waits, open, settled bool
	}{
		{"asked for", va(), false, true, false},
		{"attached", va(attached), false, false, true},
		{"waits for a stop", va(attachFailed(mustStop, 0)), true, true, false},
		{"waits for a stop after it was woken", va(attachFailed(mustStop, 1), woken(first)), true, true,
			false},
		{"the reason is quoted", va(attachFailed("see InstanceMustBeStopped", 0)), false, true, false},
		{"another failure, not woken", va(attachFailed(full, 0)), false, true, false},
		{"another failure, not yet tried", va(attachFailed(full, 0), woken(first)), false, true, false},
		{"another failure, woken and tried", va(attachFailed(full, 1), woken(first)), false, true, true},
		{"the rack did not answer", va(attachFailed(away, 1), woken(first)), false, true, false},
		{"another call is in the way", va(attachFailed(pending, 1), woken(first)), false, true, false},
		{"no answer in time", va(attachFailed(late, 1), woken(first)), false, true, false},
		{"woken in an earlier operation", va(attachFailed(full, 1),
			woken(va(attachFailed(full, 0)).wakeup(earlier))), false, true, false},
		{"woken before its first attempt", va(attachFailed(full, 1), woken(va().wakeup(r))), false, true,
			true},
		{"to be detached", va(deleted, attached), false, true, false},
		{"the detach waits for a stop", va(deleted, attached, detaching(mustStop)), true, true, false},
		{"the attach waited before it was given up", va(deleted, attachFailed(mustStop, 0)), false, true,
			false},
		{"a detach failed before", va(attached, detaching(mustStop)), false, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.a.waits() != c.waits || c.a.open() != c.open || c.a.settled(r) != c.settled {
				t.Errorf("waits: %v, open: %v, settled: %v", c.a.waits(), c.a.open(), c.a.settled(r))
			}
		})
	}
}

func TestANodesInstanceIsReadFromItsOwnCSINodeOnly(t *testing.T) {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a", UID: "now"}}
	for _, c := range []struct {
		name   string
		change func(*storagev1.CSINode)
		want   string
	}{
		{"registered", func(*storagev1.CSINode) {}, instanceOf("a")},
		{"of an earlier node of the name", func(c *storagev1.CSINode) {
			c.OwnerReferences[0].UID = "then"
		}, ""},
		{"of nobody", func(c *storagev1.CSINode) { c.OwnerReferences = nil }, ""},
		{"of another node", func(c *storagev1.CSINode) { c.Name = "b" }, ""},
		{"another driver alone", func(c *storagev1.CSINode) { c.Spec.Drivers = c.Spec.Drivers[:1] }, ""},
		{"no instance's ID", func(c *storagev1.CSINode) { c.Spec.Drivers[1].NodeID = "a" }, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			registered := csiNode(n)
			c.change(registered)
			other := csiNode(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "b", UID: "now"}})
			v := newView(begin, []corev1.Node{*n}, []storagev1.CSINode{*other, *registered}, nil, nil)
			if got := v.Nodes[0].Instance; got != c.want {
				t.Errorf("the instance is %q, want %q", got, c.want)
			}
		})
	}
}

func TestVolumesOfPodsWithoutAVolumeAttachmentAreFound(t *testing.T) {
	gone := podOf("a", "gone", "StatefulSet", "old")
	gone.DeletionTimestamp = ptr.To(metav1.NewTime(begin))
	pods := sortPods([]corev1.Pod{*podOf("a", "db-0", "StatefulSet", "data", "log"),
		*podOf("a", "web-1", "ReplicaSet"), *gone},
		claimsOf([]corev1.PersistentVolume{*pv("data"), *pv("log"), *pv("old")},
			[]corev1.PersistentVolumeClaim{*pvc("data"), *pvc("log"), *pvc("old")}))
	v := &view{Attachments: []*attachment{va(deleted)}}
	if diff := cmp.Diff([]string{"log"}, v.unasked(pods)); diff != "" {
		t.Error(diff)
	}
}
