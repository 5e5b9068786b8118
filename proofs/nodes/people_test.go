//go:build linux

package nodes

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
)

// disturbances contains acts of people, and failures of programs and racks. Most of them last until
// the same disturbance happens again.
var disturbances = map[string]func(w *testCluster, name string, a act){
	"cordon":         (*testCluster).cordon,
	"label":          (*testCluster).label,
	"forged records": (*testCluster).forge,
	"corrupt record": (*testCluster).corrupt,
	"registration":   (*testCluster).reregister,
	"node deleted":   (*testCluster).deleteNode,
	"startup taint":  (*testCluster).taint,
	"stop by hand":   (*testCluster).stopByHand,
	"destroyed":      (*testCluster).destroy,
	"hot-plug":       (*testCluster).plug,
	"configuration":  (*testCluster).configure,
	"dead kubelet": func(w *testCluster, name string, _ act) {
		w.dead[name] = !w.dead[name]
		w.log("the kubelet of %s is dead: %v", name, w.dead[name])
	},
	"lying kubelet": func(w *testCluster, name string, _ act) {
		w.lying[name] = !w.lying[name]
		w.log("the kubelet of %s lies: %v", name, w.lying[name])
	},
	"lagging": func(w *testCluster, _ string, _ act) {
		w.lagging = !w.lagging
		w.log("Kubernetes notices no dead kubelet: %v", w.lagging)
	},
	"no eviction": func(w *testCluster, _ string, _ act) {
		w.noEviction = !w.noEviction
		w.log("the budgets allow nothing: %v", w.noEviction)
		w.budgets()
	},
	"stuck pods":      func(w *testCluster, _ string, _ act) { w.stuck = !w.stuck },
	"refused volumes": (*testCluster).refuse,
	"no API server":   (*testCluster).cutOff,
	"job":             func(w *testCluster, name string, a act) { w.addPod(name, 5+a.b) },
	"starter": func(w *testCluster, name string, a act) {
		w.starter = !w.starter
		w.log("a program starts stopped instances: %v", w.starter)
		if !w.raced {
			w.untilBusy(name, a.b+2)
		}
	},
	"hidden": func(w *testCluster, _ string, _ act) {
		w.hidden = !w.hidden
		w.log("the token has no rights: %v", w.hidden)
	},
	// The cluster continues while a keeper waits for the rack's answer.
	"slow rack": func(w *testCluster, _ string, a act) {
		for range a.b {
			w.turnOf(func() {})
		}
	},
}

func init() {
	for _, resource := range []string{"nodes", "pods", "poddisruptionbudgets", "persistentvolumes",
		"volumeattachments", "csinodes"} {
		disturbances["failing "+resource] = func(w *testCluster, _ string, a act) {
			w.failing[resource] = failure{4 * a.b, []error{
				apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", nil),
				apierrors.NewInternalError(errors.New("etcdserver: leader changed")),
				apierrors.NewTimeoutError("slow", 0)}[a.b%3]}
			w.log("reads of %s fail", resource)
		}
	}
	for _, operation := range []string{"stop", "start", "view"} {
		disturbances["failing "+operation] = func(w *testCluster, _ string, a act) {
			w.failing[operation] = failure{a.b, errors.New("503")}
			w.log("the rack refuses: %s", operation)
		}
	}
	for _, operation := range []string{"stop", "start"} {
		disturbances["late "+operation] = func(w *testCluster, _ string, a act) {
			w.delays[operation] = time.Duration(a.b*a.b*7-5) * time.Second // less than two minutes
			w.log("the rack is to be asked late: %s", operation)
		}
	}
}

// disturb causes a disturbance at once, during a keeper's operation, or during a keeper's round.
func (w *testCluster) disturb(a act) {
	name, does := names[a.a%len(names)], disturbances[a.kind]
	if a.at%2 != 0 || strings.HasSuffix(a.kind, "record") {
		w.untilBusy(name, a.b)
	}
	if a.at <= 0 || a.kind == "configuration" {
		does(w, name, a)
		return
	}
	w.arm(&gate{at: a.at, reads: true, act: func() error {
		w.raced = true
		w.count("within a round")
		does(w, name, a)
		return nil
	}})
}

// untilBusy runs turns until an operation of a keeper is in progress, and then some more turns.
func (w *testCluster) untilBusy(name string, steps int) {
	w.addPod(name, 0)
	for i := 0; i < 20 && len(w.busy()) == 0; i++ {
		w.turn()
		w.pass(8 * time.Second)
	}
	for range 2*steps - 2 {
		w.turn()
	}
}

func (w *testCluster) edit(name string, change func(*corev1.Node)) {
	keepertest.Edit(w.api, "", name, change)
}

func (w *testCluster) cordon(name string, _ act) {
	cordoned := w.node(name).Spec.Unschedulable
	w.log("somebody sets unschedulable of %s to %v", name, !cordoned)
	w.byHand[name] = !cordoned
	w.edit(name, func(n *corev1.Node) { n.Spec.Unschedulable = !cordoned })
}

func (w *testCluster) label(name string, _ act) {
	w.edit(name, func(n *corev1.Node) {
		if n.Labels[keeper.ColdAttachLabel] == "" {
			n.Labels = map[string]string{keeper.ColdAttachLabel: keeper.Allowed}
			return
		}
		w.log("somebody takes the label from %s", name)
		n.Labels = nil
	})
}

// refusals are errors with which the driver can refuse an attach or detach at a stopped instance.
var refusals = []string{
	"rpc error: code = ResourceExhausted desc = InstanceFull: 8 of 8 disks",
	"rpc error: code = Unavailable desc = RackUnavailable: the rack does not answer",
	"rpc error: code = FailedPrecondition desc = UseDiffers: made for other use",
	"rpc error: code = Aborted desc = OperationPending: another one",
	"rpc error: code = DeadlineExceeded desc = context deadline exceeded",
	"rpc error: code = FailedPrecondition desc = InstanceMustBeStopped: it must be stopped",
	"rpc error: code = Internal desc = RackError: 500",
}

// refuse makes the driver refuse, for hours, every volume that waits for an attach or detach.
func (w *testCluster) refuse(name string, a act) {
	w.addPod(name, 0)
	w.controllers()
	for _, v := range keepertest.List[*storagev1.VolumeAttachment](w.api, "") {
		if v.Spec.NodeName == name && (!v.Status.Attached || v.DeletionTimestamp != nil) {
			w.refused[*v.Spec.Source.PersistentVolumeName] = refusals[(a.a+a.b+len(w.lines))%len(refusals)]
			w.log("%s is refused: %s", v.Name, w.refused[*v.Spec.Source.PersistentVolumeName])
		}
	}
	for range 60 * a.b {
		w.turn()
		if len(w.busy()) == 0 {
			w.pass(10 * time.Minute)
		}
	}
}

// cutOff makes the API server unavailable for hours. The keepers and the rack continue.
func (w *testCluster) cutOff(name string, a act) {
	if !w.raced {
		w.untilStopped(name, a)
	}
	w.outage = w.clock.Add(time.Duration(a.b) * time.Hour)
	w.log("the API server is away until %s", w.outage.Format("15:04:05"))
	stoppedIt := map[string]bool{}
	for _, name := range w.busy() {
		stoppedIt[name] = w.stoppedBy(name) == w.keepers[w.leader]
	}
	kills := w.kills
	for w.away() {
		w.startStopped()
		w.pass(5 * time.Second)
		if passed := w.outage.Sub(w.clock); passed < time.Duration(a.b)*time.Hour-10*time.Minute {
			w.pass(passed)
		}
	}
	for name, state := range w.states() {
		if stoppedIt[name] {
			w.count("no API server after a stop")
		}
		if stoppedIt[name] && kills == w.kills && state != oxide.InstanceStateRunning &&
			w.byPeople[name].IsZero() && len(w.onWay) == 0 && !w.hidden && !w.destroyed[name] {
			w.breaks("without an API server, the instance of %s is %s for %d hours", name, state, a.b)
		}
	}
	w.log("the API server is back")
}

// untilStopped runs turns until a keeper has requested the stop of an instance, and then some
// rounds of the leading keeper.
func (w *testCluster) untilStopped(name string, a act) {
	w.untilBusy(name, 1)
	for range 20 {
		if slices.ContainsFunc(w.busy(), func(name string) bool { return w.stoppedBy(name) != nil }) {
			break
		}
		w.turn()
	}
	for range a.a {
		w.round()
	}
}

// stoppedBy returns the keeper that has requested the stop of an instance in the present operation,
// or nil.
func (w *testCluster) stoppedBy(name string) *replica { return w.operations[name].stopper }

// forge writes records of another instance's operation into annotations of a Node, as its kubelet
// could. The keepers must ignore these records. But a cordoned node stays cordoned if its
// CordonAnnotation is overwritten.
func (w *testCluster) forge(name string, a act) {
	w.log("the kubelet of %s forges records", name)
	w.byHand[name] = true
	forged := fmt.Sprintf(
		`{"step":"Starting","since":%[1]q,"instance":%[2]q,"stopped":true,"ended":%[1]q}`,
		w.clock.Format(time.RFC3339), w.rack.Instance(names[(a.a+1)%len(names)]).ID)
	w.edit(name, func(n *corev1.Node) {
		for _, key := range []string{keeper.CordonAnnotation, keeper.CordonAnnotation + "-last",
			keeper.DriverName + "/fenced", keeper.AgainAnnotation} {
			metav1.SetMetaDataAnnotation(&n.ObjectMeta, key, forged)
		}
	})
}

// corrupt makes the records unreadable, so that the keepers do not know the last operations. A
// person who corrupts records has to check the instances.
func (w *testCluster) corrupt(string, act) {
	w.log("somebody corrupts the records")
	w.corrupted = true
	for _, name := range names {
		w.mayStop(name)
		w.byHand[name] = true
		o := w.operations[name]
		o.ended, o.stopped, o.stoppedSets = time.Time{}, time.Time{}, nil
	}
	keepertest.Edit(w.api, namespaceOfRecords, keeper.RecordsName, func(m *corev1.ConfigMap) {
		for uid := range m.Data {
			m.Data[uid] = `{"operation": `
		}
	})
}

// mayStop records that the instance is perhaps stopped, and that a person has to start it.
func (w *testCluster) mayStop(name string) { w.byPeople[name] = w.clock }

// reregister registers the driver of a node with no instance, with another node's instance, or with
// the right instance. It first corrects the other nodes' registrations, because a keeper cannot
// handle two wrong ones.
func (w *testCluster) reregister(name string, a act) {
	w.correctOthers(name)
	other := names[(a.a+1)%len(names)]
	instance := ""
	switch own := w.rack.Instance(name).ID; {
	case w.registered(name) != own:
		instance = own
	case a.b%2 == 0 && w.registered(other) != "" && w.node(other).DeletionTimestamp == nil:
		instance = w.rack.Instance(other).ID
	}
	w.log("the driver of %s is registered with %q", name, instance)
	w.register(name, instance)
}

func (w *testCluster) correctOthers(name string) {
	for _, other := range names {
		if other != name && w.node(other).UID != "" {
			w.register(other, w.rack.Instance(other).ID)
		}
	}
}

func (w *testCluster) deleteNode(name string, a act) {
	w.correctOthers(name)
	n := w.node(name)
	if n.UID == "" {
		w.log("the Node %s joins", name)
		w.join(name)
		if a.b%2 == 0 {
			w.register(name, "")
		}
		return
	}
	w.log("somebody deletes the Node %s: %v", name, n.Annotations)
	if keepertest.Remove[*corev1.Node](w.api, "", name); w.records()[name] != nil {
		w.count("node deleted in an operation")
	}
}

// taint adds the taint that a kubelet sets when it registers a new node.
func (w *testCluster) taint(name string, _ act) {
	w.edit(name, func(n *corev1.Node) {
		if !tainted(n, keeper.StartupTaint) {
			n.Spec.Taints = append(n.Spec.Taints,
				corev1.Taint{Key: keeper.StartupTaint, Effect: corev1.TaintEffectNoSchedule})
		}
	})
}

func (w *testCluster) stopByHand(name string, _ act) {
	w.log("somebody stops the instance of %s", name)
	w.mayStop(name)
	harness.Must(w.rack.StopInstance(w.ctx, w.rack.Instance(name).ID))
	w.states()
}

// destroy stops an instance and makes the rack hide it or, if it is hidden, show it again.
func (w *testCluster) destroy(name string, a act) {
	if w.destroyed[name] {
		delete(w.destroyed, name)
		w.log("the rack shows the instance of %s again", name)
		return
	}
	w.stopByHand(name, a)
	w.log("it is destroyed")
	w.destroyed[name] = true
}

// plug enables hot-plug on the rack. If a.a is even, the first call enables it only for attaches.
func (w *testCluster) plug(_ string, a act) {
	mode := "full"
	switch {
	case !w.hotplug.IsZero():
		return
	case w.hotAttach.IsZero():
		w.hotAttach = w.clock
		if a.a%2 == 0 {
			mode = "attach-only"
			w.count("attach only")
			break
		}
		fallthrough
	default:
		w.hotplug = w.clock
	}
	w.log("the rack has the hot-plug %s", mode)
	harness.Must(w.rack.Admin.Switch(w.ctx, map[string]any{"hotplug": mode}))
}

func (w *testCluster) configure(_ string, a act) {
	for i := range w.keepers {
		if a.b < 3 && i != a.b%2 {
			continue
		}
		c := config(names[i])
		switch a.a {
		case 0:
			c.ColdAttach = false
		case 1:
			c.DryRun = true
		case 2:
			c.Fence, c.StartupTaint = false, false
		case 3:
			c.Window = harness.Got(keeper.ParseWindow("0 * * * *", windowLength))
		}
		w.log("the keeper on %s: cold attach %v, dry run %v, fence %v, window %v", c.NodeName,
			c.ColdAttach, c.DryRun, c.Fence, c.Window != nil)
		w.restart(i, c)
	}
}

// ask sets AgainAnnotation, as people do after repairs, so that the keepers forget earlier stops.
func (w *testCluster) ask() {
	for _, v := range keepertest.List[*corev1.PersistentVolume](w.api, "") {
		keepertest.Edit(w.api, "", v.Name, func(v *corev1.PersistentVolume) {
			v.Annotations = map[string]string{keeper.AgainAnnotation: "mended"}
		})
	}
	keepertest.Edit(w.api, namespaceOfRecords, keeper.RecordsName, func(m *corev1.ConfigMap) {
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, keeper.AgainAnnotation, "mended")
		maps.DeleteFunc(m.Data, func(_, text string) bool { return !json.Valid([]byte(text)) })
	})
	w.causes = map[string][]stop{}
}

// mend ends all disturbances, and makes the repairs that only people can make.
func (w *testCluster) mend() {
	for _, r := range w.onWay {
		r.send()
	}
	w.onWay = nil
	w.calm()
	for i := range w.keepers {
		w.restart(i, config(names[i]))
	}
	for _, name := range names {
		if w.node(name).UID == "" {
			w.join(name)
		}
		w.register(name, w.rack.Instance(name).ID)
		w.edit(name, func(n *corev1.Node) {
			n.Labels = map[string]string{keeper.ColdAttachLabel: keeper.Allowed}
			if w.byHand[name] {
				n.Spec.Unschedulable = false
			}
			if w.corrupted {
				n.Spec.Taints = slices.DeleteFunc(n.Spec.Taints, func(t corev1.Taint) bool {
					return t.Key == corev1.TaintNodeOutOfService
				})
			}
		})
	}
	w.ask()
	for _, name := range slices.Sorted(maps.Keys(w.byPeople)) {
		harness.Must(w.rack.StartInstance(w.ctx, w.rack.Instance(name).ID))
	}
	for _, p := range keepertest.List[*corev1.Pod](w.api, "default") {
		if len(p.OwnerReferences) == 0 && len(p.Spec.Volumes) == 0 {
			keepertest.Remove[*corev1.Pod](w.api, "default", p.Name)
		}
	}
	w.mended = true
	w.log("everything is mended")
}
