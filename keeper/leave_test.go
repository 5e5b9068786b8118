package keeper

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
)

func TestANodeLeavesWhenItIsCordonedDeletedTaintedOrShutDown(t *testing.T) {
	taint := func(key string) func(*corev1.Node) {
		return func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: "mine"}, {Key: key}} }
	}
	condition := func(status corev1.ConditionStatus, message string) func(*corev1.Node) {
		return func(n *corev1.Node) {
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeDiskPressure, Message: message},
				{Type: corev1.NodeReady, Status: status, Message: message}}
		}
	}
	for _, c := range []struct {
		name   string
		change func(*corev1.Node)
		want   string // a part
	}{
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
			c.change(n)
			if got := leaves(n); (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
				t.Errorf("the node leaves because %q, want %q", got, c.want)
			}
		})
	}
}

// leaving is a Leaver for the node "a", and a driver that waits until its connection is closed.
type leaving struct {
	*fixture
	leaver *Leaver
	stop   func() // asks the Leaver to end
	result chan error
	ended  chan struct{} // the driver's connection
	closed atomic.Bool   // reports whether that connection has ended
}

func leave(t *testing.T, limit time.Duration) *leaving {
	t.Helper()
	l := &leaving{fixture: newFixture(t, "a"), result: make(chan error, 1), ended: make(chan struct{})}
	l.wait("a", "data")
	l.leaver = &Leaver{Kubernetes: l.Kubernetes, NodeName: "a", Limit: limit,
		Socket: filepath.Join(t.TempDir(), "leave.sock"), Log: slog.New(slog.DiscardHandler)}
	// An earlier process was killed, and its socket is still there.
	stale := try(net.ListenUnix("unix", &net.UnixAddr{Name: l.leaver.Socket, Net: "unix"}))(t)
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

// end waits until the Leaver has ended and the driver's connection is closed.
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

func TestTheDriverOfALeavingNodeIsKeptUntilItsVolumesAreDetached(t *testing.T) {
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

func TestTheDriverIsKeptForALimitedTime(t *testing.T) {
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
		least time.Duration // the driver is kept at least so long
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

// lost returns a fixture whose node "a" is no longer ready.
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

func TestANodeIsFencedOnlyIfItsInstanceIsOffForCertain(t *testing.T) {
	for _, c := range []struct {
		name  string
		given func(*fixture)
		want  bool
	}{
		{"stopped", func(w *fixture) { w.rack.set("a", "stopped") }, true},
		{"destroyed", func(w *fixture) { w.rack.set("a", "") }, true},
		{"in the state destroyed", func(w *fixture) { w.rack.set("a", "destroyed") }, true},
		{"destroyed, and it was the only node", func(w *fixture) {
			w.rack.set("a", "")
			keepertest.Delete[*corev1.Node](w.api, "", "b")
		}, true},
		{"the token has no role", func(w *fixture) { w.rack.set("a", ""); w.rack.blind = 1000 }, false},
		{"the token's role returns after one answer", func(w *fixture) {
			w.round() // which reads the project's ID
			w.rack.blind = 1
		}, false},
		{"its driver is registered with the instance of another node, which is stopped",
			func(w *fixture) {
				w.rack.set("b", "stopped")
				c := csiNode(w.node("a"))
				c.Spec.Drivers[1].NodeID = instanceOf("b")
				keepertest.Put(w.api, c)
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

func TestANodeWhoseRecordCannotBeReadIsNotFenced(t *testing.T) {
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

func TestATaintThatAPersonSetIsNotRemoved(t *testing.T) {
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
