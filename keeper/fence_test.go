package keeper

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
)

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
		{"destroyed, in words", func(w *fixture) { w.rack.set("a", "destroyed") }, true},
		{"destroyed, and it was the only node", func(w *fixture) {
			w.rack.set("a", "")
			keepertest.Delete[*corev1.Node](w.api, "", "b")
		}, true},
		{"the token has no role", func(w *fixture) { w.rack.set("a", ""); w.rack.blind = 1000 }, false},
		{"the token's role returns after one answer", func(w *fixture) {
			w.round() // with which the project is known
			w.rack.blind = 1
		}, false},
		{"its driver is registered with the instance of another node, which is stopped",
			func(w *fixture) {
				w.rack.set("b", "stopped")
				c := csiNode(w.node("a"))
				c.Spec.Drivers[1].NodeID = instanceOf("b")
				keepertest.Put(w.api, c)
			}, false},
		{"its driver is registered with an instance that its spec.providerID does not name",
			func(w *fixture) {
				w.edit("a", func(n *corev1.Node) { n.Spec.ProviderID = "oxide://" + instanceOf("x") })
				w.rack.set("a", "stopped")
			}, false},
		{"the rack does not answer", func(w *fixture) {
			w.rack.set("a", "stopped")
			w.rack.fail["view a"] = 503
		}, false},
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
	for _, text := range []string{"", "{", `{"operation":{"since":"today"}}`, `["Stopping"]`} {
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
