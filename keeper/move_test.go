package keeper

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
)

type moving struct {
	*fixture
	mover  *Mover
	out    bytes.Buffer
	old    *corev1.PersistentVolume // before the move
	losing sync.Mutex
	// losing guards lose. If lose(r) is true, the server breaks the connection at the change r.
	lose func(r keepertest.KubeRequest) bool
}

var finalizers = []string{"kubernetes.io/pv-protection", "external-attacher/csi-oxide-computer"}

func newMoving(t *testing.T) *moving {
	t.Helper()
	m := &moving{fixture: newFixture(t, "a", "b")}
	m.mover = &Mover{Kubernetes: m.Kubernetes, Out: &m.out, Pace: time.Millisecond}
	m.api.Intercept(m.intercept)
	keepertest.Put(m.api, &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: DriverName}})
	v := pv("data")
	v.Name, v.Labels, v.Annotations = "pv-1", map[string]string{"team": "shop"},
		map[string]string{"pv.kubernetes.io/provisioned-by": DriverName}
	v.Finalizers = finalizers
	v.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimDelete
	v.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
			{Key: "rack", Operator: corev1.NodeSelectorOpIn, Values: []string{"r1"}},
			{Key: volume.InstanceKey, Operator: corev1.NodeSelectorOpIn,
				Values: []string{instanceOf("a")}}}}}}}
	keepertest.Bind(m.api, v)
	m.bind()
	m.old, _ = keepertest.Get[*corev1.PersistentVolume](m.api, "", "pv-1")
	m.pod("a", "db-0", "StatefulSet", "data")
	m.pod("a", "web-0", "StatefulSet", "logs")
	return m
}

// intercept acts as the PersistentVolume controller. It fails the test if a volume without the
// policy Retain is deleted: the provisioner would delete its disk.
func (m *moving) intercept(r keepertest.KubeRequest) error {
	v, there := keepertest.Get[*corev1.PersistentVolume](m.api, "", "pv-1")
	gone := r.Verb == "delete" && !r.Applied || there && v.DeletionTimestamp != nil
	if gone && there && v.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimRetain {
		m.t.Errorf("%s: the volume's disk is deleted", r)
	}
	if r.Applied {
		m.bind()
	}
	m.losing.Lock()
	defer m.losing.Unlock()
	if m.lose != nil && m.lose(r) {
		return keepertest.ErrBreak
	}
	return nil
}

func (m *moving) bind() {
	v, there := keepertest.Get[*corev1.PersistentVolume](m.api, "", "pv-1")
	keepertest.Edit(m.api, "shop", "data", func(c *corev1.PersistentVolumeClaim) {
		c.Status.Phase = corev1.ClaimLost
		if there && v.Spec.ClaimRef.UID == c.UID {
			c.Status.Phase = corev1.ClaimBound
		}
	})
	if there {
		keepertest.Edit(m.api, "", "pv-1", func(v *corev1.PersistentVolume) {
			v.Status.Phase = corev1.VolumeBound
		})
	}
}

func (m *moving) loses(lose func(keepertest.KubeRequest) bool) {
	m.losing.Lock()
	defer m.losing.Unlock()
	m.lose = lose
}

func (m *moving) move(to string) error {
	ctx, cancel := context.WithTimeout(m.t.Context(), 10*time.Second)
	defer cancel()
	return m.mover.Move(ctx, "pv-1", to)
}

// belongs checks that the volume belongs to the node "to", and is otherwise unchanged.
func (m *moving) belongs(to string) {
	m.t.Helper()
	v, _ := keepertest.Get[*corev1.PersistentVolume](m.api, "", "pv-1")
	want := m.old.DeepCopy()
	want.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[1].Values =
		[]string{instanceOf(to)}
	want.UID, want.ResourceVersion = v.UID, v.ResourceVersion
	want.CreationTimestamp = v.CreationTimestamp
	if diff := cmp.Diff(want, v); diff != "" {
		m.t.Errorf("the volume differs from what it was (-):\n%s", diff)
	}
	c, _ := keepertest.Get[*corev1.PersistentVolumeClaim](m.api, "shop", "data")
	d, _ := keepertest.Get[*storagev1.CSIDriver](m.api, "", DriverName)
	if len(d.Annotations) > 0 || c.Status.Phase != corev1.ClaimBound {
		m.t.Errorf("the claim is %s, and the driver has %v", c.Status.Phase, d.Annotations)
	}
}

func (m *moving) evicted(name string) bool {
	p, ok := keepertest.Get[*corev1.Pod](m.api, "shop", name)
	return !ok || p.DeletionTimestamp != nil
}

func TestAnImpossibleMoveIsRefused(t *testing.T) {
	for _, c := range []trial[func(*fixture), string]{
		{"there is no such volume", func(w *fixture) {
			on("", "pv-1", func(v *corev1.PersistentVolume) { v.Finalizers = nil })(w)
			keepertest.Remove[*corev1.PersistentVolume](w.api, "", "pv-1")
		}, "read the PersistentVolume pv-1"},
		{"another driver's", on("", "pv-1", func(v *corev1.PersistentVolume) {
			v.Spec.CSI.Driver = "other.example.com"
		}), "is not one of the driver"},
		{"without a node affinity", on("", "pv-1", func(v *corev1.PersistentVolume) {
			v.Spec.NodeAffinity = nil
		}), "does not stay with a node"},
		{"with an affinity to a rack only", on("", "pv-1", func(v *corev1.PersistentVolume) {
			terms := v.Spec.NodeAffinity.Required.NodeSelectorTerms
			terms[0].MatchExpressions = terms[0].MatchExpressions[:1]
		}), "does not stay with a node"},
		{"released", on("", "pv-1", func(v *corev1.PersistentVolume) {
			v.Status.Phase = corev1.VolumeReleased
		}), "is Released; only a bound one can be moved"},
		{"bound to an earlier claim", on("", "pv-1", func(v *corev1.PersistentVolume) {
			v.Spec.ClaimRef.UID = "earlier"
		}), "an earlier claim of the name shop/data"},
		{"the claim is gone", func(w *fixture) {
			keepertest.Remove[*corev1.PersistentVolumeClaim](w.api, "shop", "data")
		}, "read the claim shop/data"},
		{"the claim goes with its pod", on("shop", "data", func(c *corev1.PersistentVolumeClaim) {
			c.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "db-0",
				UID: "pod", Controller: ptr.To(true)}}
		}), "is an ephemeral volume of the pod db-0"},
		{"the node is unknown", func(w *fixture) { keepertest.Remove[*corev1.Node](w.api, "", "b") },
			"there is no Node b"},
		{"the driver is not registered there", on("", "b", func(c *storagev1.CSINode) {
			c.Spec.Drivers = nil
		}), "the node b: the driver is not registered on this node"},
		{"the driver is registered with another instance than spec.providerID", on("", "b",
			func(n *corev1.Node) { n.Spec.ProviderID = "oxide://" + instanceOf("a") }),
			"the node b: its spec.providerID is oxide://" + instanceOf("a")},
		{"another node has the same instance", func(w *fixture) { w.register("a", "b") },
			"the node b: the node a claims the same instance"},
		{"the node has no topology of instances", on("", "b", func(n *corev1.Node) { n.Labels = nil }),
			"placement of volumes on instances"},
		{"the annotation is not what a move writes", on("", DriverName, func(d *storagev1.CSIDriver) {
			d.Annotations = map[string]string{movingKey("pv-1"): "soon"}
		}), "is not what a move writes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMoving(t)
			c.given(m.fixture)
			before := len(m.api.Log())
			csitest.Says(t, m.move("b"), c.want)
			for _, r := range m.api.Log()[before:] {
				if r.Verb != "get" && r.Verb != "list" {
					t.Errorf("the Mover changes something: %s", r)
				}
			}
		})
	}
}

// interrupted starts a move, and breaks the connection at one change; at = 1 means the first. If
// applied is set, the server applies that change. It returns true if the move failed.
func (m *moving) interrupted(to string, at int, applied bool) bool {
	m.t.Helper()
	n := 0
	m.loses(func(r keepertest.KubeRequest) bool {
		if r.Applied == applied {
			n++
		}
		return r.Applied == applied && n == at
	})
	err := m.move(to)
	m.loses(nil)
	if (err != nil) != (n >= at) {
		m.t.Errorf("interrupted at %d of %d: %v", at, n, err)
	}
	return err != nil
}

func TestAnInterruptedMoveCanBeRepeatedOrReversed(t *testing.T) {
	for _, applied := range []bool{false, true} {
		for _, to := range []string{"b", "a"} { // repeat the move, or move back
			at := 1
			for more := true; more; at++ {
				t.Run(fmt.Sprintf("at change %d, applied %v, then to %s", at, applied, to), func(t *testing.T) {
					m := newMoving(t)
					more = m.interrupted("b", at, applied)
					csitest.Must(t, m.move(to))
					m.belongs(to)
					if m.evicted("web-0") || to == "b" && !m.evicted("db-0") {
						t.Error("it is not the pod of the volume alone that is evicted")
					}
				})
			}
			if at < 7 {
				t.Errorf("a move has %d changes only", at-1)
			}
		}
	}
}

func TestAMoveStopsWaitingForKubernetesWhenItsContextEnds(t *testing.T) {
	m := newMoving(t)
	m.api.Intercept(func(r keepertest.KubeRequest) error {
		if r.Applied && r.Verb == "create" {
			return nil // nobody binds the volume
		}
		return m.intercept(r)
	})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := m.mover.Move(ctx, "pv-1", "b"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the error is %v", err)
	}
	m.api.Intercept(m.intercept) // binds a volume that is created only later
	m.bind()
	csitest.Must(t, m.move("b"))
	m.belongs("b")
}

func TestAMoveNamesThePodWhoseEvictionIsRefused(t *testing.T) {
	m := newMoving(t)
	keepertest.Put(m.api, budget(1, 1, 0))
	csitest.Says(t, m.move("b"), "shop/db-0 does not allow its eviction")
	keepertest.Put(m.api, budget(1, 1, 1))
	if err := m.move("b"); err != nil || !m.evicted("db-0") {
		t.Errorf("the error is %v", err)
	}
}

func TestAMoveDoesNotEvictALaterPodOfTheSameName(t *testing.T) {
	m := newMoving(t)
	m.loses(func(r keepertest.KubeRequest) bool {
		if r.Subresource == "eviction" && !r.Applied {
			keepertest.Remove[*corev1.Pod](m.api, "shop", "db-0")
			m.pod("b", "db-0", "StatefulSet", "data")
		}
		return false
	})
	csitest.Must(t, m.move("b"))
	if m.evicted("db-0") || strings.Contains(m.out.String(), "evicted") {
		t.Errorf("the pod that was made since is evicted:\n%s", m.out.String())
	}
}

func TestAMoveDoesNotTouchALaterVolumeOfTheSameName(t *testing.T) {
	m := newMoving(t)
	other := m.old.DeepCopy()
	other.Finalizers = nil
	m.loses(func(r keepertest.KubeRequest) bool {
		if r.Resource == "persistentvolumes" && r.Verb == "patch" && !r.Applied {
			keepertest.Edit(m.api, "", "pv-1", func(v *corev1.PersistentVolume) {
				v.Finalizers, v.Spec.PersistentVolumeReclaimPolicy = nil, corev1.PersistentVolumeReclaimRetain
			})
			keepertest.Remove[*corev1.PersistentVolume](m.api, "", "pv-1")
			other = keepertest.Put(m.api, other)
		}
		return false
	})
	if err := m.move("b"); err == nil {
		t.Error("there is no error")
	}
	now, there := keepertest.Get[*corev1.PersistentVolume](m.api, "", "pv-1")
	if diff := cmp.Diff(other, now); !there || diff != "" {
		t.Errorf("the other volume was changed:\n%s", diff)
	}
}

func TestANodeIsLeavingIfItIsCordonedDeletedTaintedOrShutDown(t *testing.T) {
	taint := func(key string) func(*corev1.Node) {
		return func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: "mine"}, {Key: key}} }
	}
	condition := func(status corev1.ConditionStatus, message string) func(*corev1.Node) {
		return func(n *corev1.Node) {
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeDiskPressure, Message: message},
				{Type: corev1.NodeReady, Status: status, Message: message}}
		}
	}
	for _, c := range []trial[func(*corev1.Node), string]{
		{"nobody", func(*corev1.Node) {}, ""},
		{"a person cordons it", func(n *corev1.Node) { n.Spec.Unschedulable = true }, "cordoned"},
		{"a person deletes it", func(n *corev1.Node) { n.DeletionTimestamp = ptr.To(metav1.Now()) },
			"being deleted"},
		{"the keeper stops it", func(n *corev1.Node) {
			n.Spec.Unschedulable = true
			n.Annotations = map[string]string{CordonAnnotation: "now"}
		}, ""},
		{"the keeper fences it", taint("node.kubernetes.io/out-of-service"), "out-of-service"},
		{"the cluster autoscaler removes it", taint("ToBeDeletedByClusterAutoscaler"), "Autoscaler"},
		{"Karpenter removes it", taint("karpenter.sh/disrupted"), "karpenter"},
		{"the cloud's controller finds it shut down", taint("node.cloudprovider.kubernetes.io/shutdown"),
			"shutdown"},
		{"it has a taint of another kind", taint("node.kubernetes.io/not-ready"), ""},
		{"its kubelet shuts down", condition(corev1.ConditionFalse, "node is shutting down"),
			"node is shutting down"},
		{"it is not ready", condition(corev1.ConditionFalse, "PLEG is not healthy"), ""},
		{"it was about to shut down", condition(corev1.ConditionTrue, "node is shutting down"), ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := &corev1.Node{}
			c.given(n)
			if got := leaves(n); (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
				t.Errorf("the node leaves because %q, want %q", got, c.want)
			}
		})
	}
}

type leaving struct {
	*fixture
	leaver *Leaver
	stop   func() // asks the Leaver to end
	result chan error
	ended  chan struct{} // closed when the driver's connection has ended
	closed atomic.Bool   // reports whether the driver's connection has ended
}

func leave(t *testing.T, limit time.Duration) *leaving {
	t.Helper()
	l := &leaving{fixture: newFixture(t, "a"), result: make(chan error, 1), ended: make(chan struct{})}
	l.wait("a", "data")
	l.leaver = &Leaver{Kubernetes: l.Kubernetes, NodeName: "a", Limit: limit,
		Socket: filepath.Join(t.TempDir(), "leave.sock"), Log: slog.New(slog.DiscardHandler)}
	// An earlier process was killed, and its socket is still there.
	stale := csitest.Got(net.ListenUnix("unix", &net.UnixAddr{Name: l.leaver.Socket, Net: "unix"}))(t)
	stale.SetUnlinkOnClose(false)
	csitest.Must(t, stale.Close())
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	l.stop = cancel
	go func() { l.result <- l.leaver.Run(ctx) }()
	csitest.Await(t, "the driver connects", func() bool {
		connection, err := net.Dial("unix", l.leaver.Socket)
		if err != nil {
			return false
		}
		go func() {
			_, _ = connection.Read(make([]byte, 1))
			_ = connection.Close()
			l.closed.Store(true)
			close(l.ended)
		}()
		return true
	})
	return l
}

func (l *leaving) end() error {
	err := <-l.result
	<-l.ended
	if _, there := os.Stat(l.leaver.Socket); there == nil {
		l.t.Error("the socket is left")
	}
	return err
}

func (l *leaving) drained() {
	l.edit("a", func(n *corev1.Node) { n.Spec.Unschedulable = true })
}

func TestTheDriverOfALeavingNodeRunsUntilItsVolumesAreDetached(t *testing.T) {
	l := leave(t, time.Minute)
	// VolumeAttachments of other drivers or nodes must not matter.
	for name, change := range map[string]func(*storagev1.VolumeAttachment){
		"other": func(a *storagev1.VolumeAttachment) { a.Spec.Attacher = "other.example.com" },
		"b":     func(a *storagev1.VolumeAttachment) { a.Spec.NodeName = "b" }} {
		a := va(change)
		a.Name = name
		keepertest.Put(l.api, a.VolumeAttachment)
	}
	l.drained()
	l.stop()
	looks := func() (n int) {
		for _, r := range l.api.Log() {
			if r.Resource == "volumeattachments" && r.Verb == "list" {
				n++
			}
		}
		return n
	}
	csitest.Await(t, "the Leaver looks twice", func() bool { return looks() > 1 })
	if l.closed.Load() {
		t.Error("the driver ends while a volume is attached")
	}
	keepertest.Remove[*storagev1.VolumeAttachment](l.api, "", "va-data")
	if err := l.end(); err != nil {
		t.Error(err)
	}
}

func TestTheDriverOfALeavingNodeRunsForALimitedTime(t *testing.T) {
	refused := func(refusal error) func(*leaving) {
		return func(l *leaving) {
			l.drained()
			l.api.InterceptReads(func(keepertest.KubeRequest) error { return refusal })
		}
	}
	for _, c := range []struct {
		name  string
		limit time.Duration
		given func(*leaving)
		want  string
		least time.Duration // the shortest time that the driver is kept
	}{
		{"drained", 2 * time.Second, (*leaving).drained, "1 of its volumes", 2 * time.Second},
		{"deleted", 2 * time.Second, func(l *leaving) {
			keepertest.Remove[*corev1.Node](l.api, "", "a")
		}, "1 of its volumes", 2 * time.Second},
		{"Kubernetes does not answer", 50 * time.Millisecond, func(l *leaving) { l.cut() },
			"could not be read within 50ms", 50 * time.Millisecond},
		{"its rights are removed", time.Minute, refused(apierrors.NewForbidden(
			schema.GroupResource{Resource: "nodes"}, "a", nil)), "lacks some", refusedLimit},
		{"its account is removed", time.Minute, refused(apierrors.NewUnauthorized("it is gone")),
			"lacks some", refusedLimit},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel() // it waits for real seconds
			l := leave(t, c.limit)
			c.given(l)
			begun := time.Now()
			l.stop()
			if err := l.end(); err == nil || !strings.Contains(err.Error(), c.want) ||
				time.Since(begun) < c.least {
				t.Errorf("after %s, the error is %v", time.Since(begun), err)
			}
		})
	}
}

func lost(t *testing.T) *fixture {
	t.Helper()
	w := newFixture(t, "a", "b")
	w.lose("a")
	return w
}

func (w *fixture) fenced(name string) bool {
	n := w.node(name)
	tainted := (&node{Node: n}).tainted(corev1.TaintNodeOutOfService)
	if r := w.recorded(name); (r.Fenced != "") != tainted {
		w.t.Errorf("the taints of %s are %v, and its record %+v", name, n.Spec.Taints, r)
	}
	return tainted
}

func TestANodeIsFencedOnlyIfItsInstanceIsKnownToBeOff(t *testing.T) {
	for _, c := range []trial[func(*fixture), bool]{
		{"stopped", func(w *fixture) { w.rack.set("a", "stopped") }, true},
		{"destroyed", func(w *fixture) { w.rack.set("a", "") }, true},
		{"in the state destroyed", func(w *fixture) { w.rack.set("a", "destroyed") }, true},
		{"destroyed, and it was the only node", func(w *fixture) {
			w.rack.set("a", "")
			keepertest.Delete[*corev1.Node](w.api, "", "b")
		}, true},
		{"the token has no role any more", func(w *fixture) {
			w.round() // this round reads the project's ID
			w.rack.blind = 1000
		}, false},
		{"the token's role returns after one answer", func(w *fixture) {
			w.round()
			w.rack.blind = 1
		}, false},
		{"its driver is registered with the instance of another node, which is stopped",
			func(w *fixture) {
				w.rack.set("b", "stopped")
				w.register("a", "b")
			}, false},
		{"the rack does not answer", func(w *fixture) { w.rack.set("a", "away") }, false},
		{"running", func(*fixture) {}, false},
		{"failed", func(w *fixture) { w.rack.set("a", "failed") }, false},
		{"stopping", func(w *fixture) { w.rack.set("a", "stopping") }, false},
		{"starting", func(w *fixture) { w.rack.set("a", "starting") }, false},
		{"rebooting", func(w *fixture) { w.rack.set("a", "rebooting") }, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := lost(t)
			c.given(w)
			_, _ = w.Round(t.Context())
			_, _ = w.Round(t.Context())
			if got := w.fenced("a"); got != c.want {
				t.Errorf("fenced: %v", got)
			}
			if got := w.metric("fences_total", ""); got != map[bool]float64{true: 1}[c.want] {
				t.Errorf("the metric has %v fences", got)
			}
		})
	}
}

func TestTheEventOfAnUnfencedNodeGivesTheReason(t *testing.T) {
	for want, given := range map[string]func(*fixture){
		"the instance " + instanceOf("a") + " runs again": func(w *fixture) {
			w.rack.set("a", "running")
		},
		"the node's kubelet reports again": func(w *fixture) { w.heartbeat("a") },
		"the node has no taint of the keeper": func(w *fixture) {
			w.edit("a", func(n *corev1.Node) { n.Spec.Taints = nil })
		},
	} {
		w := lost(t)
		w.rack.set("a", "stopped")
		w.round()
		given(w)
		w.round()
		if got := w.events(); !slices.Contains(got, "Node a: Unfenced: "+want) {
			t.Errorf("%q is not among the events %q", want, got)
		}
	}
}

func TestANodeWithAnUnreadableRecordIsNotFenced(t *testing.T) {
	w := lost(t)
	w.rack.set("a", "stopped")
	for _, text := range []string{"", "{", `{"operation":{"since":"today"}}`, `["Stopping"]`,
		`{"operation":{"step":"Moving"}}`} {
		w.setRecordText("a", text)
		_, err := w.Round(t.Context())
		if n := w.node("a"); len(n.Spec.Taints) > 0 || err == nil ||
			!strings.Contains(err.Error(), "then remove the key") {
			t.Errorf("with the record %q, the node has %v; the error is %v", text, n.Spec.Taints, err)
		}
	}
}

func TestTheKeeperDoesNotRemoveATaintSetByAPerson(t *testing.T) {
	w := lost(t)
	w.edit("a", func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{outOfService} })
	for _, state := range []string{"stopped", "running"} {
		w.rack.set("a", state)
		w.round()
	}
	w.heartbeat("a")
	w.round()
	if seen := w.seen(); len(seen) > 0 {
		t.Errorf("the keeper did %v", seen)
	}
}
