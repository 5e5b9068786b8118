package keeper

import (
	"testing"
	"time"
)

// putBack sets the keeper's clock back, as if a replica with a slow clock took over from one with a
// fast clock.
func (w *story) putBack(d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.clock = w.clock.Add(-d)
}

// begun contains operations on the node "a", each in a step that does not end by itself, and the
// time limit of that step.
var begun = map[step]struct {
	begin func(*story)
	limit func(*Config) time.Duration
}{
	draining: {func(w *story) {
		w.pod("a", "web-1", "ReplicaSet")
		w.wait("a", "data")
		w.pass(time.Minute)
		w.steps(draining)
	}, func(c *Config) time.Duration { return c.DrainTimeout }},
	stopping: {func(w *story) {
		w.rack.lame = true
		w.wait("a", "data")
		w.pass(time.Minute)
		w.steps(draining, draining, stopping)
	}, func(c *Config) time.Duration { return c.StopTimeout }},
	attaching: {(*story).stopped, func(c *Config) time.Duration { return c.AttachTimeout }},
	starting: {func(w *story) {
		w.stopped()
		w.attach("data", "")
		w.steps(starting)
		w.rack.lame = true
	}, func(c *Config) time.Duration { return c.StartTimeout }},
	returning: {func(w *story) {
		w.stopped()
		w.attach("data", "")
		w.steps(starting, starting, starting, returning)
	}, func(c *Config) time.Duration { return c.ReturnTimeout }},
}

func TestD61AStepWithAStartInTheFutureStillEndsAtItsLimit(t *testing.T) {
	for s, c := range begun {
		for _, skew := range []time.Duration{maxSkew, maxSkew + time.Second, 24 * time.Hour} {
			t.Run(string(s)+", "+skew.String(), func(t *testing.T) {
				w := newStory(t, "a")
				c.begin(w)
				w.putBack(skew)
				if skew <= maxSkew {
					w.steps(s, s, s)
					w.pass(maxSkew + c.limit(&w.Config) + time.Second)
				}
				before := w.metric("problems_total", string(s))
				w.round()
				if now := w.metric("problems_total", string(s)); now != before+1 {
					t.Errorf("the step has %v problems, and had %v: %v", now, before, w.node("a").Annotations)
				}
			})
		}
	}
}

func TestD61AnOutcomeDatedInTheFutureDelaysNothing(t *testing.T) {
	for _, node := range []string{"a", "b"} {
		w := newStory(t, "a", "b")
		w.setRecord(node, record{Last: &outcome{Ended: begin.Add(time.Hour), Instance: instanceOf(node),
			Stopped: true, StoppedWith: map[string]time.Time{"shop/db": begin.Add(time.Hour)}}})
		w.wait("a", "data")
		w.pass(time.Minute)
		w.steps(draining)
	}
}

func TestANodeWhoseVolumeWaitsSinceAFutureTimeIsStopped(t *testing.T) {
	w := newStory(t, "a")
	w.wait("a", "data")
	w.putBack(time.Hour)
	w.steps(draining)
}
