//go:build linux

package concurrency

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

// TestManyCallersAtOnceSeeOneState is the proof, on one rack with two controllers and two
// nodes: fifty callers create one name, all callers call for one volume on one node, and 64
// callers run whole lifecycles. Its long form repeats this until its time is over.
func TestManyCallersAtOnceSeeOneState(t *testing.T) { // B-13, D-41
	before := goleak.IgnoreCurrent()
	p := proof.New(t, "concurrency")
	env := newEnvironment(t, p, harness.PluginOptions{})
	for round := 0; round == 0 || p.Long() && !p.Over(); round++ {
		env.oneName(round)
		env.oneVolume(round)
		env.lifecycles(round)
		if t.Failed() {
			break
		}
		p.Say("round %d: %d calls, %d of them aborted, %d formats",
			round+1, env.tally.calls.Load(), env.tally.aborted.Load(), env.formatted())
	}
	env.close()
	goleak.VerifyNone(t, before)
	env.figures()
	p.Bystanders.Report()
}

func (env *environment) figures() {
	n := &env.tally
	for _, line := range []string{
		proof.Line("one-name", "creates", n.creates.Load(), "controllers", len(env.controllers),
			"names", n.names.Load(), "disks", n.disks.Load(), "ids", n.ids.Load(),
			"attaches", n.attaches.Load(), "snapshots", n.snapshots.Load(),
			"deletes", n.deletes.Load()),
		proof.Line("one-volume", "stages", n.stages.Load(), "publishes", n.publishes.Load(),
			"formats", n.formats.Load(), "mounts", n.mounts.Load()),
	} {
		if err := proof.Print(line); err != nil {
			env.t.Error(err)
		}
	}
	env.Proof.Figure("callers", callers, "calls", n.calls.Load(), "aborted", n.aborted.Load(),
		"abandoned", n.abandoned.Load(), "volumes", n.volumes.Load(), "wrong", n.wrong.Load(),
		"races", n.races.Load(), "leaked_goroutines", n.leaked.Load())
}

func TestMain(m *testing.M) { namespace.Main(m) }
