package doctor

import (
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

// FuzzDiagnose gives any objects and any report of a node to a diagnosis. It has to end with a
// result whose size is bounded by theirs, and every finding has to be complete.
func FuzzDiagnose(f *testing.F) {
	f.Fuzz(func(t *testing.T, objects, report string) {
		e := healthy(t)
		if found, err := kube.Parse([]byte(objects)); err == nil {
			e.Cluster.Objects = found
		}
		if r, err := inspection.Parse([]byte(report)); err == nil {
			e.Nodes.Reports[racktest.Instance] = r
		}
		for _, q := range []Question{{AskClaim, "default", "data"}, {AskPod, "default", "db-0"},
			{Kind: AskVolume, Name: racktest.Disk}, {Kind: AskNode, Name: "worker-1"}} {
			e.Question = q
			g := &gatherer{options: Options{Question: q}, e: *e}
			g.sift()
			g.prune()
			d := Diagnose(g.e)
			// A step has at most a few texts of a thousand bytes for each of the objects.
			if got, most := len(text(d)), 256<<10+64*(len(objects)+len(report)); got > most {
				t.Errorf("%d bytes from %d", got, len(objects)+len(report))
			}
			for _, c := range d.Chains {
				if f := c.Finding; f != nil && (f.Wrong == "" || f.Do == "" || f.Next == "") {
					t.Errorf("incomplete: %+v", f)
				}
			}
		}
	})
}
