package keeper

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
)

// outage makes the API server answer nobody.
func (w *story) outage() {
	gone := func(keepertest.KubeRequest) error { return keepertest.ErrBreak }
	w.api.Intercept(gone)
	w.api.InterceptReads(gone)
}

// advance sets the clock forward.
func (w *story) advance(d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.clock = w.clock.Add(d)
}

func TestD61AnInstanceIsStartedWithoutTheAPIServer(t *testing.T) {
	for _, c := range []struct {
		name  string
		early bool // whether it is started at once
		given func(*story)
	}{
		{"the rack starts it", true, func(*story) {}},
		{"the rack refused the start once", false, func(w *story) { w.rack.fail["start a"] = 503 }},
		{"the token has no role for a while", false, func(w *story) { w.rack.blind = 1000 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newStory(t, "a", "b")
			w.stopped()
			if err := w.Repay(t.Context()); err != nil || w.rack.state("a") != "stopped" {
				t.Fatalf("with an API server, the instance is %s: %v", w.rack.state("a"), err)
			}
			w.outage()
			c.given(w)
			round, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if _, err := w.Round(round); err == nil {
				t.Fatal("a round succeeds without an API server")
			}
			_ = w.Repay(t.Context())
			if w.rack.state("a") != "stopped" {
				t.Error("the instance is started when one request has failed")
			}
			w.advance(outage + time.Second)
			_ = w.Repay(t.Context())
			if early := w.rack.state("a") == "running"; early != c.early {
				t.Errorf("at once, the instance is %s", w.rack.state("a"))
			}
			w.rack.mend()
			w.advance(w.Config.AttachTimeout)
			csitest.Must(t, w.Repay(t.Context()))
			if w.rack.state("a") != "running" {
				t.Errorf("after %s, the instance is %s", w.Config.AttachTimeout, w.rack.state("a"))
			}
		})
	}
}

func TestD61AnInstanceThatAnotherKeeperStartedIsNotStartedAgain(t *testing.T) {
	w := newStory(t, "a", "b")
	w.stopped()
	w.setRecord("a", record{})
	csitest.Must(t, w.Repay(t.Context()))
	w.outage()
	_ = w.Repay(t.Context())
	w.advance(2 * outage)
	if err := w.Repay(t.Context()); err != nil || w.rack.state("a") != "stopped" {
		t.Errorf("the instance is %s: %v", w.rack.state("a"), err)
	}
}

// New volumes begin to wait on one node again and again, while another node waits that has pods of
// the same StatefulSet.
func TestD61NoNodeIsStarvedByAnotherNodeWithItsStatefulSet(t *testing.T) {
	w := newStory(t, "a", "b")
	w.Config.MaxStopsPerNode = 1000
	attach := func(string) string { return "" }
	for i := range 12 {
		w.wait("a", fmt.Sprintf("v%d", i))
		if i == 1 {
			w.wait("b", "data")
		}
		w.live(10*time.Minute, attach)
	}
	stops := w.stops()
	if stops["a"] == 0 || stops["b"] != 1 {
		t.Errorf("in 2 hours the instances were stopped %v times", stops)
	}
}
