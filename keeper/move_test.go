package keeper

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
)

// moving is a fixture with a volume that stays with the node "a", and its pod there.
type moving struct {
	*fixture
	mover  *Mover
	out    bytes.Buffer
	old    *corev1.PersistentVolume // before the move
	losing sync.Mutex
	// guarded by losing: lose decides for each change of the Mover whether the connection breaks
	lose func(r keepertest.KubeRequest) bool
}

var finalizers = []string{"kubernetes.io/pv-protection", "external-attacher/csi-oxide-computer"}

func newMoving(t *testing.T) *moving {
	t.Helper()
	m := &moving{fixture: newFixture(t, "a", "b")}
	m.mover = &Mover{Kubernetes: m.Kubernetes, Out: &m.out, Pace: time.Millisecond}
	m.api.Intercept(m.intercept)
	keepertest.Put(m.api, &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: DriverName}})
	claim := keepertest.Put(m.api, &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{
		Namespace: "shop", Name: "data"}, Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "pv-1"},
		Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound}})
	v := pv("data")
	v.Name, v.Labels, v.Annotations = "pv-1", map[string]string{"team": "shop"},
		map[string]string{"pv.kubernetes.io/provisioned-by": DriverName}
	v.Finalizers = finalizers
	v.Spec.ClaimRef.UID = claim.UID
	v.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimDelete
	v.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
			{Key: "rack", Operator: corev1.NodeSelectorOpIn, Values: []string{"r1"}},
			{Key: volume.InstanceKey, Operator: corev1.NodeSelectorOpIn,
				Values: []string{instanceOf("a")}}}}}}}
	v.Status.Phase = corev1.VolumeBound
	m.old = keepertest.Put(m.api, v)
	m.pod("a", "db-0", "StatefulSet", "data")
	m.pod("a", "web-0", "StatefulSet", "logs")
	return m
}

// intercept acts as the controller of volumes, and checks that no disk is deleted: the provisioner
// deletes the disk of a volume that is removed and not set to Retain.
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

// bind binds the claim and its volume, as the controller of volumes does.
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

// belongs checks that the volume belongs to a node now, and is otherwise unchanged.
func (m *moving) belongs(to string) {
	m.t.Helper()
	v, _ := keepertest.Get[*corev1.PersistentVolume](m.api, "", "pv-1")
	want := m.old.DeepCopy()
	want.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[1].Values =
		[]string{instanceOf(to)}
	// The server sets these.
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

// evicted reports whether the eviction of a pod was requested.
func (m *moving) evicted(name string) bool {
	p, ok := keepertest.Get[*corev1.Pod](m.api, "shop", name)
	return !ok || p.DeletionTimestamp != nil
}

func TestAMoveThatIsNotPossibleIsRefused(t *testing.T) {
	edit := func(change func(*corev1.PersistentVolume)) func(*moving) {
		return func(m *moving) { keepertest.Edit(m.api, "", "pv-1", change) }
	}
	for _, c := range []struct {
		name  string
		given func(*moving)
		want  string
	}{
		{"there is no such volume", func(m *moving) {
			edit(func(v *corev1.PersistentVolume) { v.Finalizers = nil })(m)
			keepertest.Remove[*corev1.PersistentVolume](m.api, "", "pv-1")
		}, "read the PersistentVolume pv-1"},
		{"another driver's", edit(func(v *corev1.PersistentVolume) {
			v.Spec.CSI.Driver = "other.example.com"
		}), "is not one of the driver"},
		{"without a node affinity", edit(func(v *corev1.PersistentVolume) { v.Spec.NodeAffinity = nil }),
			"does not stay with a node"},
		{"with an affinity to a rack only", edit(func(v *corev1.PersistentVolume) {
			terms := v.Spec.NodeAffinity.Required.NodeSelectorTerms
			terms[0].MatchExpressions = terms[0].MatchExpressions[:1]
		}), "does not stay with a node"},
		{"released", edit(func(v *corev1.PersistentVolume) { v.Status.Phase = corev1.VolumeReleased }),
			"is Released; only a bound one can be moved"},
		{"bound to an earlier claim", edit(func(v *corev1.PersistentVolume) {
			v.Spec.ClaimRef.UID = "earlier"
		}), "an earlier claim of the name shop/data"},
		{"the claim is gone", func(m *moving) {
			keepertest.Remove[*corev1.PersistentVolumeClaim](m.api, "shop", "data")
		}, "read the claim shop/data"},
		{"the claim goes with its pod", func(m *moving) {
			keepertest.Edit(m.api, "shop", "data", func(c *corev1.PersistentVolumeClaim) {
				c.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "db-0",
					UID: "pod", Controller: ptr.To(true)}}
			})
		}, "is an ephemeral volume of the pod db-0"},
		{"the node is unknown", func(m *moving) { keepertest.Remove[*corev1.Node](m.api, "", "b") },
			"read the Node b"},
		{"the driver is not registered there", func(m *moving) {
			keepertest.Edit(m.api, "", "b", func(c *storagev1.CSINode) { c.Spec.Drivers = nil })
		}, "the node b: the driver is not registered on this node"},
		{"the driver is registered with another instance than spec.providerID", func(m *moving) {
			m.edit("b", func(n *corev1.Node) { n.Spec.ProviderID = "oxide://" + instanceOf("a") })
		}, "the node b: its spec.providerID is oxide://" + instanceOf("a")},
		{"the node has no topology of instances", func(m *moving) {
			m.edit("b", func(n *corev1.Node) { n.Labels = nil })
		}, "placement of volumes on instances"},
		{"the annotation is not what a move writes", func(m *moving) {
			keepertest.Edit(m.api, "", DriverName, func(d *storagev1.CSIDriver) {
				d.Annotations = map[string]string{movingKey("pv-1"): "soon"}
			})
		}, "is not what a move writes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMoving(t)
			c.given(m)
			before := len(m.api.Log())
			if err := m.move("b"); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("the error is %v, want %q", err, c.want)
			}
			for _, r := range m.api.Log()[before:] {
				if r.Verb != "get" && r.Verb != "list" {
					t.Errorf("the Mover changes something: %s", r)
				}
			}
		})
	}
}

// interrupted breaks the connection at the Mover's change number at, counted from 1, before or
// after the change is applied. It reports whether there were that many changes.
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

func TestAMoveThatIsInterruptedAnywhereContinues(t *testing.T) {
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
	m.api.Intercept(m.intercept) // on a slow machine the volume may not exist yet
	m.bind()
	csitest.Must(t, m.move("b"))
	m.belongs("b")
}

func TestAMoveNamesThePodWhoseEvictionIsRefused(t *testing.T) {
	m := newMoving(t)
	b := budget(policyv1.PodDisruptionBudgetSpec{}, 1, 1, 0)
	keepertest.Put(m.api, &b)
	if err := m.move("b"); err == nil ||
		!strings.Contains(err.Error(), "shop/db-0 does not allow its eviction") {
		t.Errorf("the error is %v", err)
	}
	b.Status.DisruptionsAllowed = 1
	keepertest.Put(m.api, &b)
	if err := m.move("b"); err != nil || !m.evicted("db-0") {
		t.Errorf("the error is %v", err)
	}
}

func TestAMoveDoesNotEvictAPodThatWasCreatedSince(t *testing.T) {
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

func TestAMoveDoesNotTouchAVolumeThatReplacedTheOneItFound(t *testing.T) {
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
