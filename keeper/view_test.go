package keeper

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
)

func va(change ...func(*storagev1.VolumeAttachment)) *attachment {
	return &attachment{VolumeAttachment: changed(&storagev1.VolumeAttachment{
		ObjectMeta: metav1.ObjectMeta{Name: "va-data", CreationTimestamp: metav1.NewTime(begin)},
		Spec: storagev1.VolumeAttachmentSpec{Attacher: DriverName, NodeName: "a",
			Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: ptr.To("data")}}}, change...)}
}

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

func TestAnAttachmentIsDoneAfterASuccessOrALastingFailure(t *testing.T) {
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
		{"not tried yet", va(), false, true, false},
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
		{"an earlier attach waited for a stop", va(deleted, attachFailed(mustStop, 0)), false, true,
			false},
		{"an earlier detach failed", va(attached, detaching(mustStop)), false, false, true},
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
	for _, c := range []trial[func(*storagev1.CSINode), string]{
		{"registered", func(*storagev1.CSINode) {}, instanceOf("a")},
		{"of an earlier node of the name", func(c *storagev1.CSINode) {
			c.OwnerReferences[0].UID = "then"
		}, ""},
		{"without an owner", func(c *storagev1.CSINode) { c.OwnerReferences = nil }, ""},
		{"of another node", func(c *storagev1.CSINode) { c.Name = "b" }, ""},
		{"another driver alone", func(c *storagev1.CSINode) { c.Spec.Drivers = c.Spec.Drivers[:1] }, ""},
		{"whose node ID is no UUID", func(c *storagev1.CSINode) { c.Spec.Drivers[1].NodeID = "a" }, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			registered := csiNode(n)
			c.given(registered)
			other := csiNode(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "b", UID: "now"}})
			v := newView(begin, []corev1.Node{*n}, []storagev1.CSINode{*other, *registered}, nil, nil)
			if got := v.Nodes[0].Instance; got != c.want {
				t.Errorf("the instance is %q, want %q", got, c.want)
			}
		})
	}
}

func TestAPodsVolumesThatHaveNoVolumeAttachmentAreFound(t *testing.T) {
	gone := podOf("a", "gone", "StatefulSet", "old")
	gone.DeletionTimestamp = ptr.To(metav1.NewTime(begin))
	claims := claimsOf([]corev1.PersistentVolume{*pv("data"), *pv("log"), *pv("old")},
		[]corev1.PersistentVolumeClaim{*pvc("data"), *pvc("log"), *pvc("old")})
	pods := sortPods([]corev1.Pod{*podOf("a", "db-0", "StatefulSet", "data", "log"),
		*podOf("a", "web-1", "ReplicaSet"), *gone}, claims)
	v := &view{Attachments: []*attachment{va(deleted)}, claims: claims}
	if diff := cmp.Diff([]string{"log"}, v.unasked(pods)); diff != "" {
		t.Error(diff)
	}
}

func changed[O any](o O, changes ...func(O)) O {
	for _, change := range changes {
		change(o)
	}
	return o
}

func phase(phase corev1.PodPhase) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Status.Phase = phase }
}

func initializing(p *corev1.Pod) {
	p.Status.Phase = corev1.PodPending
	p.Status.InitContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{
		Running: &corev1.ContainerStateRunning{}}}}
}

func never(p *corev1.Pod) { p.Spec.RestartPolicy = corev1.RestartPolicyNever }

func TestEachPodIsClassifiedByWhatAStopDoesToIt(t *testing.T) {
	foreign := pv("foreign")
	foreign.Spec.CSI.Driver = "other.example.com"
	unbound := pv("unbound")
	unbound.Spec.ClaimRef = nil
	claims := claimsOf([]corev1.PersistentVolume{*pv("data"), *pv("db-0-scratch"), *foreign, *unbound,
		{ObjectMeta: metav1.ObjectMeta{Name: "nfs"}}}, []corev1.PersistentVolumeClaim{*pvc("data"),
		*pvc("db-0-scratch"), *pvc("foreign"), *pvc("unbound")})
	ephemeral := func(p *corev1.Pod) {
		p.Spec.Volumes = []corev1.Volume{{Name: "scratch", VolumeSource: corev1.VolumeSource{
			Ephemeral: &corev1.EphemeralVolumeSource{}}}}
	}
	mirror := func(namespace, label, value string) *corev1.Pod {
		return changed(podOf("a", "static-a", "Node"), func(p *corev1.Pod) {
			p.Namespace, p.Labels = namespace, map[string]string{label: value}
			p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
		})
	}
	for _, c := range []trial[*corev1.Pod, string]{ // want "evict", "stay", "", or a part of lost
		{"with a volume", podOf("a", "db-0", "StatefulSet", "data"), "stay"},
		{"with an ephemeral volume", changed(podOf("a", "db-0", "StatefulSet"), ephemeral), "stay"},
		{"with another driver's volume", podOf("a", "web-1", "ReplicaSet", "foreign"), "evict"},
		{"with a volume of no claim", podOf("a", "web-1", "ReplicaSet", "unbound"), "evict"},
		{"with a claim of that name in another namespace",
			changed(podOf("a", "web-1", "ReplicaSet", "data"), func(p *corev1.Pod) {
				p.Namespace = "other"
			}), "evict"},
		{"of a DaemonSet", podOf("a", "log-1", "DaemonSet"), ""},
		{"a mirror pod of etcd", mirror("kube-system", "component", "etcd"), "is of the control plane"},
		{"a mirror pod of the API server", mirror("kube-system", "component", "kube-apiserver"),
			"is of the control plane"},
		{"a mirror pod of the scheduler", mirror("kube-system", "tier", "control-plane"),
			"is of the control plane"},
		{"a mirror pod of every node", mirror("kube-system", "tier", "node"), ""},
		{"a mirror pod of somebody's etcd", mirror("shop", "component", "etcd"), ""},
		{"that succeeded", changed(podOf("a", "one", ""), phase(corev1.PodSucceeded)), ""},
		{"bare, with a volume", podOf("a", "one", "", "data"), "stay"},
		{"bare, with a volume, never restarted", changed(podOf("a", "one", "", "data"), never),
			"restartPolicy Never"},
		{"never restarted, after its init container has failed",
			changed(podOf("a", "job-1", "Job", "data"), never, initializing, func(p *corev1.Pod) {
				p.Status.InitContainerStatuses[0] = corev1.ContainerStatus{RestartCount: 1}
			}), "restartPolicy Never"},
		{"never restarted, and waits for its volume", changed(podOf("a", "job-1", "Job", "data"), never,
			initializing, func(p *corev1.Pod) {
				p.Status.InitContainerStatuses[0].State = corev1.ContainerState{
					Waiting: &corev1.ContainerStateWaiting{Reason: "PodInitializing"}}
			}), "stay"},
		{"restarted, in its init container", changed(podOf("a", "db-0", "StatefulSet", "data"),
			initializing), "stay"},
		{"of a Job, without a volume", changed(podOf("a", "job-1", "Job"), never),
			"shop/job-1 has not ended: it has restartPolicy Never"},
		{"of a Job, without a volume, that has not begun", changed(podOf("a", "job-1", "Job"), never,
			phase(corev1.PodPending)), "has not ended"},
		{"of a Job that restarts on failure, without a volume",
			changed(podOf("a", "job-1", "Job"), func(p *corev1.Pod) {
				p.Spec.RestartPolicy = corev1.RestartPolicyOnFailure
			}), "has not ended: it has restartPolicy OnFailure"},
		{"its owner is not its controller", changed(podOf("a", "one", "ConfigMap"),
			func(p *corev1.Pod) { p.OwnerReferences[0].Controller = nil }),
			"no controller that makes another"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := sortPods([]corev1.Pod{*c.given}, claims)
			got := s.lost
			switch {
			case got != "":
			case len(s.evict) == 1:
				got = "evict"
			case len(s.stay) == 1:
				got = "stay"
			}
			if got != c.want && (s.lost == "" || c.want == "" || !strings.Contains(got, c.want)) {
				t.Errorf("the pod is sorted as %q, want %q", got, c.want)
			}
		})
	}
}

type pdb = policyv1.PodDisruptionBudget

// budget returns a PodDisruptionBudget for the pods of the app "shop", with the numbers that its
// controller computes.
func budget(desired, healthy, allowed int32, changes ...func(*pdb)) *pdb {
	return changed(&pdb{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "shop"},
		Spec: policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{
			MatchLabels: map[string]string{"app": "shop"}}},
		Status: policyv1.PodDisruptionBudgetStatus{DesiredHealthy: desired, CurrentHealthy: healthy,
			DisruptionsAllowed: allowed}}, changes...)
}

func TestABudgetForbidsAStopThatWouldViolateIt(t *testing.T) {
	least := func(b *pdb) { b.Spec.MinAvailable = ptr.To(intstr.FromInt32(2)) }
	most := func(b *pdb) { b.Spec.MaxUnavailable = ptr.To(intstr.FromInt32(1)) }
	third := func(b *pdb) { b.Spec.MaxUnavailable = ptr.To(intstr.FromString("34%")) }
	db := func(name string) *corev1.Pod { return podOf("a", name, "StatefulSet", "data") }
	unhealthy := func(p *corev1.Pod) *corev1.Pod {
		return changed(p, func(p *corev1.Pod) { p.Status.Conditions = nil })
	}
	web := podOf("a", "web-1", "ReplicaSet")
	many := func(pods ...*corev1.Pod) []*corev1.Pod { return pods }
	for _, c := range []struct {
		name                 string
		budget               *pdb
		evict, stay, waiting []*corev1.Pod
		want                 string // a part of the reason, or "" if the stop is allowed
	}{
		{name: "too few are left", budget: budget(2, 3, 1, least), stay: many(db("db-0"), db("db-1")),
			want: "wants 2 healthy pods, and a stop would leave 1"},
		{name: "the unhealthy pod waits for its volume", budget: budget(2, 2, 0, most),
			stay: many(db("db-0"), unhealthy(db("db-2"))), waiting: many(unhealthy(db("db-2")))},
		{name: "the unhealthy pod waits on another node", budget: budget(2, 2, 0, third),
			stay: many(db("db-0")), waiting: many(unhealthy(db("db-2")))},
		{name: "a pod waits, and the budget has a minimum", budget: budget(2, 2, 0, least),
			stay: many(db("db-0")), waiting: many(unhealthy(db("db-2"))), want: "would leave 1"},
		{name: "a healthy pod waits for another volume", budget: budget(2, 2, 0, most),
			stay: many(db("db-0")), waiting: many(db("db-1")), want: "would leave 1"},
		{name: "no healthy pod is stopped", budget: budget(2, 0, 0, least),
			stay: many(unhealthy(db("db-0")))},
		{name: "no eviction is allowed", budget: budget(2, 2, 0, least), evict: many(web),
			want: "shop/shop allows no eviction"},
		{name: "its status is older than its spec", stay: many(db("db-0")),
			budget: budget(2, 3, 1, least, func(b *pdb) {
				b.Generation, b.Status.ObservedGeneration = 2, 1
			}), want: "has changed, and its controller has not counted its pods since"},
		{name: "of another namespace", evict: many(web), stay: many(db("db-0")),
			budget: budget(9, 9, 0, least, func(b *pdb) { b.Namespace = "other" })},
		{name: "of other pods", evict: many(web), stay: many(db("db-0")),
			budget: budget(9, 9, 0, least, func(b *pdb) { b.Spec.Selector.MatchLabels["app"] = "other" })},
		{name: "of no pods", evict: many(web), stay: many(db("db-0")),
			budget: budget(9, 9, 0, least, func(b *pdb) { b.Spec.Selector = nil })},
		{name: "with an invalid selector", want: "no valid selector",
			budget: budget(9, 9, 0, least, func(b *pdb) {
				b.Spec.Selector.MatchExpressions = []metav1.LabelSelectorRequirement{{Operator: "x"}}
			})},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := exhausted([]pdb{*c.budget}, sorted{evict: c.evict, stay: c.stay}, c.waiting)
			if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
				t.Errorf("the budget hinders by %q, want %q", got, c.want)
			}
		})
	}
}
