//go:build linux

package nodes

import (
	"cmp"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
)

// These functions simulate the programs of a cluster: attacher, controllers, kubelets, and a
// program that starts stopped instances.

// attacher tries every attachment that is not done once, like external-attacher with the driver.
func (w *testCluster) attacher() {
	states := w.states()
	for _, a := range keepertest.List[*storagev1.VolumeAttachment](w.api, "") {
		if a.DeletionTimestamp == nil && a.Status.Attached {
			continue
		}
		refused := w.refused[*a.Spec.Source.PersistentVolumeName]
		since := w.hotAttach
		if a.DeletionTimestamp != nil {
			since = w.hotplug
		}
		if states[a.Spec.NodeName] == oxide.InstanceStateRunning && since.IsZero() ||
			!since.IsZero() && strings.Contains(refused, "InstanceMustBeStopped") {
			refused = ""
		}
		path := oxide.DiskPath{Disk: oxide.NameOrId(w.disks[*a.Spec.Source.PersistentVolumeName])}
		instance := oxide.NameOrId(w.rack.Instance(a.Spec.NodeName).ID)
		var err error
		switch {
		case refused != "":
			err = errors.New(refused)
		case a.DeletionTimestamp == nil:
			err = w.attachOnce(oxide.InstanceDiskAttachParams{Instance: instance, Body: &path})
		default:
			_, err = w.rack.Client.InstanceDiskDetach(w.ctx,
				oxide.InstanceDiskDetachParams{Instance: instance, Body: &path})
		}
		var failed *storagev1.VolumeError
		if err != nil {
			failed = &storagev1.VolumeError{Time: metav1.NewTime(w.clock),
				Message: cmp.Or(refused, explain(err))}
		}
		keepertest.Edit(w.api, "", a.Name, func(a *storagev1.VolumeAttachment) {
			switch {
			case a.DeletionTimestamp != nil && err == nil:
				a.Finalizers, a.Status.Attached = nil, false
			case a.DeletionTimestamp != nil:
				a.Status.DetachError = failed
			default:
				a.Status.Attached, a.Status.AttachError = err == nil, failed
			}
		})
		if a.DeletionTimestamp != nil && err == nil {
			keepertest.Remove[*storagev1.VolumeAttachment](w.api, "", a.Name)
		}
	}
}

// attachOnce attaches a disk, unless the rack shows it as attached, like the driver.
func (w *testCluster) attachOnce(p oxide.InstanceDiskAttachParams) error {
	attached, err := w.rack.Client.InstanceDiskListAllPages(w.ctx,
		oxide.InstanceDiskListParams{Instance: p.Instance})
	if err != nil || slices.ContainsFunc(attached, func(d oxide.Disk) bool {
		return d.Id == string(p.Body.Disk)
	}) {
		return err
	}
	_, err = w.rack.Client.InstanceDiskAttach(w.ctx, p)
	return err
}

// explain returns the driver's message for a refusal.
func explain(err error) string {
	var answer *oxide.HTTPError
	if errors.As(err, &answer) && answer.HTTPResponse.StatusCode == http.StatusBadRequest {
		return "rpc error: code = FailedPrecondition desc = InstanceMustBeStopped: the instance is " +
			"running and must be stopped"
	}
	return "rpc error: code = Unavailable desc = RackUnavailable: the rack does not answer"
}

// controllers create attachments, and delete those of pods that are gone. They create pods
// again and update the budgets.
func (w *testCluster) controllers() {
	alive := w.alive()
	wanted := map[string]string{} // the node for each volume
	for _, p := range keepertest.List[*corev1.Pod](w.api, "default") {
		for _, v := range p.Spec.Volumes {
			wanted[v.PersistentVolumeClaim.ClaimName] = p.Spec.NodeName
		}
		if tainted(w.node(p.Spec.NodeName), corev1.TaintNodeOutOfService) {
			keepertest.Remove[*corev1.Pod](w.api, "default", p.Name)
		}
		if alive[p.Spec.NodeName] {
			w.end(p)
		}
	}
	for _, a := range keepertest.List[*storagev1.VolumeAttachment](w.api, "") {
		volume := *a.Spec.Source.PersistentVolumeName
		if wanted[volume] != a.Spec.NodeName && a.DeletionTimestamp == nil {
			keepertest.Delete[*storagev1.VolumeAttachment](w.api, "", a.Name)
		}
		delete(wanted, volume)
	}
	for volume, node := range wanted {
		keepertest.Put(w.api, &storagev1.VolumeAttachment{
			ObjectMeta: metav1.ObjectMeta{Name: "csi-" + volume + "-" + node,
				Finalizers: []string{"external-attacher/csi-oxide-computer"}},
			Spec: storagev1.VolumeAttachmentSpec{Attacher: keeper.DriverName, NodeName: node,
				Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: ptr.To(volume)}}})
	}
	w.budgets()
}

// end ends a pod that has a deletion timestamp, and creates it again on another node.
func (w *testCluster) end(p *corev1.Pod) {
	if p.DeletionTimestamp == nil || w.stuck {
		return
	}
	keepertest.Remove[*corev1.Pod](w.api, "default", p.Name)
	if len(p.OwnerReferences) == 0 || len(p.Spec.Volumes) > 0 {
		return
	}
	for _, name := range names {
		if n := w.node(name); n.UID != "" && !n.Spec.Unschedulable && name != p.Spec.NodeName {
			w.pods++
			again := p.DeepCopy()
			again.ObjectMeta = metav1.ObjectMeta{Namespace: "default", Name: p.Name + "x",
				Labels: p.Labels, OwnerReferences: p.OwnerReferences}
			again.Spec.NodeName = name
			keepertest.Put(w.api, again)
			return
		}
	}
}

var apps = []string{"db", "web"}

// most returns how many pods of an app may be unavailable. After the repairs it is at least the
// number of pods on each node, so that each node can be stopped.
func (w *testCluster) most(app string) int {
	most, on, healthies := 2, map[string]int{}, 0
	for _, p := range keepertest.List[*corev1.Pod](w.api, "default") {
		if p.Labels["app"] != app {
			continue
		}
		if on[p.Spec.NodeName]++; w.mended {
			most = max(most, on[p.Spec.NodeName])
		}
		if healthy(p) {
			healthies++
		}
	}
	switch {
	case w.noEviction:
		return 0
	// Few pods are healthy, because others were lost with their nodes. With the usual budget no node
	// could be stopped any more.
	case w.mended && healthies <= most:
		return 100
	}
	return most
}

// budgets updates the number of disruptions that each PodDisruptionBudget allows.
func (w *testCluster) budgets() {
	for _, app := range apps {
		expected, current := int32(0), int32(0)
		for _, p := range keepertest.List[*corev1.Pod](w.api, "default") {
			if p.Labels["app"] != app {
				continue
			}
			expected++
			if healthy(p) {
				current++
			}
		}
		most := int32(w.most(app))
		keepertest.Put(w.api, &policyv1.PodDisruptionBudget{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: app},
			Spec: policyv1.PodDisruptionBudgetSpec{MaxUnavailable: ptr.To(intstr.FromInt32(most)),
				Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}},
			Status: policyv1.PodDisruptionBudgetStatus{ExpectedPods: expected, CurrentHealthy: current,
				DesiredHealthy:     max(0, expected-most),
				DisruptionsAllowed: max(0, current-max(0, expected-most))}})
	}
}

func (w *testCluster) alive() map[string]bool {
	alive := map[string]bool{}
	for name, state := range w.states() {
		alive[name] = state == oxide.InstanceStateRunning && !w.dead[name]
	}
	return alive
}

// kubelets reports nodes and pods. For a node without a working kubelet, it reports what
// Kubernetes does: the node and its pods are lost.
func (w *testCluster) kubelets() {
	attached := map[string]bool{}
	for _, a := range keepertest.List[*storagev1.VolumeAttachment](w.api, "") {
		attached[*a.Spec.Source.PersistentVolumeName+"@"+a.Spec.NodeName] = a.Status.Attached
	}
	works := w.alive()
	for _, name := range names {
		if w.mended && w.node(name).UID == "" {
			w.join(name)
		}
		alive := works[name] || w.lying[name]
		if !alive && w.lagging {
			continue
		}
		keepertest.Edit(w.api, "", name, func(n *corev1.Node) {
			now, status := metav1.NewTime(w.clock), corev1.ConditionTrue
			if !alive {
				now, status = ready(n).LastHeartbeatTime, corev1.ConditionUnknown
			}
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: status,
				LastHeartbeatTime: now}}
		})
		for _, p := range keepertest.List[*corev1.Pod](w.api, "default") {
			if p.Spec.NodeName != name {
				continue
			}
			ready := alive && !slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool {
				return !attached[v.PersistentVolumeClaim.ClaimName+"@"+name]
			})
			keepertest.Edit(w.api, "default", p.Name, func(p *corev1.Pod) {
				w.runJob(p, ready)
				p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady,
					Status: corev1.ConditionFalse}}
				if ready {
					p.Status.Conditions[0].Status = corev1.ConditionTrue
				}
			})
		}
	}
	w.budgets()
}

// runJob advances the pod of a Job: it begins with an init container, runs, and ends.
func (w *testCluster) runJob(p *corev1.Pod, ready bool) {
	if p.Spec.RestartPolicy != corev1.RestartPolicyNever || !ready {
		return
	}
	left := w.ends[p.Name].Sub(w.clock)
	switch {
	case left <= 0:
		p.Status.Phase = corev1.PodSucceeded
	case left < 4*time.Minute:
		p.Status.Phase = corev1.PodRunning
	}
	p.Status.InitContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{
		Running: &corev1.ContainerStateRunning{}}}}
}

// starts simulates a program that starts stopped instances every ten seconds.
func (w *testCluster) starts() {
	if !w.starter || w.clock.Sub(w.looked) < 10*time.Second {
		return
	}
	w.looked = w.clock
	for name, state := range w.states() {
		if state == oxide.InstanceStateStopped && w.byPeople[name].IsZero() && !w.destroyed[name] {
			w.log("the program starts the instance of %s", name)
			w.count("started by a program")
			harness.Must(w.rack.StartInstance(w.ctx, w.rack.Instance(name).ID))
		}
	}
}

// pass advances the clock. Delayed requests reach the rack when they are due.
func (w *testCluster) pass(d time.Duration) {
	end := w.clock.Add(d)
	w.onWay = slices.DeleteFunc(w.onWay, func(r onWay) bool {
		if r.due.After(end) {
			return false
		}
		if r.due.After(w.clock) {
			w.clock = r.due
		}
		r.send()
		return true
	})
	w.clock = end
	w.starts()
}
