package concurrency

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/proof"
)

// TestConcurrency is the proof: fifty creates of one name, everybody at one volume of one node, and
// sixty-four callers with whole lives, on one rack with two controllers and two nodes. Its long
// form goes round until its time is over.
func TestConcurrency(t *testing.T) {
	before := goleak.IgnoreCurrent()
	p := proof.New(t, "concurrency")
	s := newSite(t, p)
	for round := 0; round == 0 || p.Long() && !p.Over(); round++ {
		s.oneName(round)
		s.oneVolume(round)
		s.lives(round)
		if t.Failed() {
			break
		}
		p.Say("round %d: %d calls, %d of them told to come again, %d formats",
			round+1, s.tally.calls.Load(), s.tally.aborted.Load(), s.formatted())
	}
	s.close()
	goleak.VerifyNone(t, before)
	s.figures()
}

func (s *site) figures() {
	n := &s.tally
	for _, line := range []string{
		proof.Line("one-name", "creates", n.creates.Load(), "controllers", len(s.controllers),
			"names", n.names.Load(), "disks", n.disks.Load(), "ids", n.ids.Load(),
			"attaches", n.attaches.Load(), "snapshots", n.snapshots.Load(),
			"deletes", n.deletes.Load()),
		proof.Line("one-volume", "stages", n.stages.Load(), "publishes", n.publishes.Load(),
			"formats", n.formats.Load(), "mounts", n.mounts.Load()),
	} {
		if err := proof.Print(line); err != nil {
			s.t.Error(err)
		}
	}
	s.proof.Figure("callers", callers, "calls", n.calls.Load(), "aborted", n.aborted.Load(),
		"abandoned", n.abandoned.Load(), "volumes", n.volumes.Load(), "wrong", n.wrong.Load(),
		"races", n.races.Load(), "leaked_goroutines", n.leaked.Load())
}
