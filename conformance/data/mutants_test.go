//go:build linux

package data_test

import (
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/data"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

// recorded is a check that ran on a rack in order, with where it looked.
type recorded struct {
	check  data.Check
	looks  []data.Look
	extent report.Extent
}

// byteMutant is an error in a block of every disk of a kind and size: when the disk is new, or
// whenever it is detached.
type byteMutant struct {
	wrong, moment string
	look          data.Look
	at            int64
}

func (m byteMutant) String() string {
	return fmt.Sprintf("%s at byte %d of %s", m.wrong, m.at, m.look.What(m.moment))
}

// tamper is the name of the simulator's tamper.
func (m byteMutant) tamper() string {
	moments := map[string]string{data.Blank: "new", data.Restored: "restored", data.Larger: "larger",
		data.Again: "recreated"}
	return fmt.Sprintf("%s:%s:%d:%d", m.wrong, moments[m.look.Kind], m.at, m.look.Bytes)
}

// boundary is the distance between the places at which a rack divides a disk.
const boundary = 64 * harness.MiB

// drawBytes draws a mutant from the disks that a run has made: a block at an end, around a
// boundary, or anywhere.
func drawBytes(random *rand.Rand, looks []data.Look) byteMutant {
	m := byteMutant{moment: "new", wrong: "foreign", look: looks[random.IntN(len(looks))]}
	if m.look.Kind != data.Blank && random.IntN(2) == 0 {
		m.moment, m.wrong = "kept", "decayed"
	} else if m.look.Kind == data.Blank && random.IntN(2) == 0 {
		m.moment = "kept"
		m.wrong = []string{"decayed", "lost"}[random.IntN(2)]
	}
	first, blocks := int64(0), m.look.Bytes/guest.BlockBytes
	if m.look.Kind == data.Larger {
		first = blocks / 2 // the rest is of the snapshot
	}
	near := random.Int64N(16)
	switch random.IntN(4) {
	case 0:
		m.at = first + near
	case 1:
		m.at = blocks - 1 - near
	case 2:
		boundaries := m.look.Bytes / boundary
		m.at = max(first, random.Int64N(boundaries)*(boundary/guest.BlockBytes)-8+near)
	default:
		m.at = first + random.Int64N(blocks-first)
	}
	if m.wrong == "lost" { // only a block that holds something can be lost
		for n := range blocks {
			if at := (m.at + n) % blocks; m.look.Written[at] {
				m.at = at
				break
			}
		}
	}
	m.at *= guest.BlockBytes
	return m
}

// noticed reports whether a check has compared the block at the mutant's moment.
func (m byteMutant) noticed(r recorded) bool {
	return slices.ContainsFunc(r.looks, func(l data.Look) bool {
		return l.What("") == m.look.What("") && l.At(m.moment)[m.at/guest.BlockBytes] &&
			(m.wrong != "lost" || l.Written[m.at/guest.BlockBytes])
	})
}

// said reports whether a report says that such disks were not looked at in full, and none says that
// they were.
func (m byteMutant) said(run []recorded) (said bool) {
	for _, r := range run {
		for _, measure := range r.extent {
			if measure.What != m.look.What(m.moment) {
				continue
			}
			if measure.Looked == measure.Of {
				return false
			}
			said = true
		}
	}
	return said
}

// kindsOf returns the kinds and sizes of disks of a run, with all blocks that were written on any
// of them.
func kindsOf(run []recorded) (all []data.Look) {
	for _, r := range run {
		for _, l := range r.looks {
			i := slices.IndexFunc(all, func(k data.Look) bool { return k.What("") == l.What("") })
			if i < 0 {
				i = len(all)
				all = append(all, data.Look{Kind: l.Kind, Bytes: l.Bytes,
					Written: make([]bool, len(l.Written))})
			}
			for block, written := range l.Written {
				all[i].Written[block] = all[i].Written[block] || written
			}
		}
	}
	return all
}

func TestEveryMutantOfDataIsNoticedOrReportedAsUntested(t *testing.T) {
	t.Parallel()
	p := proof.New(t, "verdict-mutants")
	b := newBench(t, harness.RackOptions{})
	b.Accesses, b.Blocks, b.SampleTime = []string{"block"}, 64, 1
	draws, really, short := 500, 24, []string{"D08", "D09", "D13", "D14"}
	if p.Short() {
		draws, really = 100, 2
	}
	var run []recorded
	for _, check := range data.Checks() {
		if check.ID == "D10" || p.Short() && !slices.Contains(short, check.ID) {
			continue // it reads no bytes
		}
		b.Log = &data.Log{}
		if err := check.Run(t.Context(), b.Bench); err != nil {
			t.Fatalf("%s: %s", check.ID, err)
		}
		run = append(run, recorded{check, b.Log.Looks(), b.Log.Extent()})
	}
	kinds := kindsOf(run)
	drawn, noticed, said, real := 0, 0, 0, 0
	for ; drawn < draws && !p.Over(); drawn++ {
		m := drawBytes(p.Rand(), kinds)
		by := slices.IndexFunc(run, m.noticed)
		switch {
		case by >= 0:
			noticed++
		case m.said(run):
			said++
		default:
			t.Errorf("a run would not notice, and does not say so: %s", m)
		}
		if drawn%(draws/really) == 0 {
			real++
			b.reallyRun(t, m, run, by)
		}
	}
	p.Figure("of", "bytes", "drawn", drawn, "noticed", noticed, "said_untested", said, "missed",
		drawn-noticed-said, "kinds", len(kinds), "really_run", real)
}

// reallyRun runs a check on a rack with the mutant: the check that was judged to notice it, or one
// that has such a disk and was judged not to. The error must name the block, or the disk's
// checksum.
func (b *bench) reallyRun(t *testing.T, m byteMutant, run []recorded, by int) {
	t.Helper()
	if by < 0 {
		by = slices.IndexFunc(run, func(r recorded) bool {
			return slices.ContainsFunc(r.looks, func(l data.Look) bool {
				return l.What("") == m.look.What("")
			})
		})
	}
	err := b.runTampered(t, m.tamper(), run[by].check)
	about := fmt.Sprintf(`at byte %d\b|is another: expected the SHA-256`, m.at)
	blamed := err != nil && regexp.MustCompile(about).MatchString(err.Error())
	if blamed != (err != nil) || blamed != m.noticed(run[by]) {
		t.Errorf("%s: %s was judged to notice it: %t; it says %v", m, run[by].check.ID,
			m.noticed(run[by]), err)
	}
}
