//go:build linux

package powercut_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
)

// TestAWipeThatIsTornIsRepeated tears each write with which the driver wipes the remains of
// mkfs.btrfs: the first sector is written and the rest is not. The remains of a block must
// still show whose block it is.
func TestAWipeThatIsTornIsRepeated(t *testing.T) {
	p := proof.New(t, "torn-wipe")
	b, r := startBench(t), rand.New(rand.NewPCG(p.Seed, 400))
	v := newVolume(btrfs)
	v.size = 128 * mib // the smallest, because the driver reads every image whole
	rec, err := aResumption(t.Context(), b, b, v, r)
	if err != nil {
		t.Fatal(err)
	}
	s, err := newSampler(rec, r)
	if err != nil {
		t.Fatal(err)
	}
	wipes := 0
	var images []image
	for i, e := range s.epochs {
		for _, one := range s.changes(e) {
			record := rec.log[one]
			if one > rec.used || record.Kind != flakydisk.Write || !isZero(record.Data) {
				continue
			}
			wipes++
			torn := append(s.whole(e.First, one), flakydisk.Piece{Entry: record, To: 1})
			images = s.add(images, i, one+1, fmt.Sprintf("a wipe at %d torn", record.Offset), torn...)
		}
	}
	images = short.Some(t, 5, images)
	p.Say("%d wipes, %d images", wipes, len(images))
	for _, m := range images {
		if v, err := b.check(t.Context(), m); err != nil || !v.converged || v.wrong != nil {
			t.Errorf("%s: converged %t, %v, %v", m.name, v.converged, v.wrong, err)
		}
	}
	if s.err != nil || wipes == 0 {
		t.Errorf("%d writes wiped something, %v", wipes, s.err)
	}
}
