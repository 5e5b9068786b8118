//go:build linux

package data_test

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/data"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

// noticed names a check that must fail when data is corrupted, and the kinds of access for which it
// must fail. The error must contain one of the texts in says, which are separated by "|".
type noticed struct{ check, accesses, says string }

// unmountable has the driver's errors for a filesystem that lacks blocks.
const (
	filesystems = "ext4 xfs btrfs"
	unmountable = "FilesystemDamaged: mount |NodeToolFailed: mount |the filesystem is damaged, or "
)

// tampers maps each way in which the simulator can corrupt data to the checks that must fail.
var tampers = map[string][]noticed{
	"swapped-disks": {{"D07", "block", "of another volume (its seed is"},
		{"D07", filesystems, "WrongFilesystem: "}},
	"stale-read": {{"D01", "block " + filesystems, "of generation 1 instead of 2"}},
	"torn-snapshot": {{"D04", "block", "the snapshot is torn"},
		{"D04", filesystems, "the snapshot is torn|" + unmountable}},
	"serial-missing": {{"D10", "ext4", "shows 0 devices with the serial"},
		{"D11", "ext4", "shows 0 devices with the serial"}, {"D01", "ext4", "DeviceNotFound: "}},
	"serial-doubled": {{"D10", "ext4", "shows 2 devices with the serial"},
		{"D07", "ext4 block", "DeviceNotUnique: "}},
	"device-smaller": {{"D10", "ext4", "expected the size of the rack's disk"},
		{"D11", "btrfs", "expected the size of the rack's disk"},
		{"D01", "ext4 block", "DeviceWrongSize: "}},
	"device-larger": {{"D10", "ext4", "expected the size of the rack's disk"},
		{"D01", "ext4 block", "DeviceWrongSize: "}},
	"device-late": {{"D10", "ext4", "shows 0 devices with the serial"},
		{"D01", "ext4", "DeviceNotFound: "}},
	"device-never": {{"D10", "ext4", "shows 0 devices with the serial"},
		{"D11", "xfs", "shows 0 devices with the serial"}, {"D01", "ext4", "DeviceNotFound: "}},
	"device-left": {{"D10", "ext4", "shows 1 devices with the serial"}},
	"delete-another": {{"D07", "block", "which is zero"},
		{"D07", "ext4", "not there: the file is missing"}},
	"other-snapshot":   {{"D05", "block ext4", "of generation 2 instead of 1"}},
	"device-elsewhere": {{"D02", "ext4", "the volume is in another instance, too"}},
}

// noticedBy returns the ID of the check that must notice a wrong block. For a new disk, D08 notices
// a block that is not zero, D07 a block that two disks share, and D01 a lost write.
func noticedBy(wrong, moment string) string {
	by := map[string]string{"stale:new": "D08", "foreign:new": "D08", "shared:new": "D07",
		"new": "D01", "large": "D14", "recreated": "D13"}
	return cmp.Or(by[wrong+":"+moment], by[moment], "D12")
}

// product returns tampers with further entries for the known names of the form WRONG:MOMENT:PLACE
// (what is wrong, when, where). Without PROOF_DURATION the seed chooses half of these names.
func product(p *proof.Proof, known []string) map[string][]noticed {
	all := maps.Clone(tampers)
	for n, name := range slices.Sorted(slices.Values(known)) {
		words := strings.Split(name, ":")
		if len(words) != 3 || !p.Long() && n%2 == int(p.Seed%2) {
			continue
		}
		all[name] = []noticed{{noticedBy(words[0], words[1]), "block",
			"blocks are not what was written|blocks hold something|is another: expected the SHA-256"}}
		if words[0] == "foreign" && words[1] == "larger" {
			// The driver finds the damage and does not grow the filesystem, so D05 reports that the
			// workload has too few bytes.
			all[name] = append(all[name], noticed{"D05", "ext4", "a workload has "})
		}
	}
	// The driver reads byte 65536, where btrfs has its superblock, and so finds the disk not blank.
	const begins = "foreign:new:65536"
	all[begins] = append(all[begins], noticed{"D01", filesystems, "DiskNotBlank: "})
	// The checks once missed the block 8192 bytes before the end of a blank disk of over 1 GiB.
	all["foreign:new:-8192:2147483648"] = []noticed{{"D08", "block", "is not zero"}}
	all["foreign:large:-8192:18253611008"] = []noticed{{"D14", "block", "is not zero"}}
	all["lost:new:0"] = []noticed{{"D11", "block", "which is zero"}}
	return all
}

func TestDataChecksFailWheneverTheSimulatorCorruptsData(t *testing.T) {
	t.Parallel()
	p := proof.New(t, "broken-data")
	b := newBench(t)
	mutations := harness.Need(b.env.Rack.Admin.Mutations(t.Context()))(t)
	var known, written []string
	for _, m := range mutations {
		if m.Rule != "data" {
			continue
		}
		if known = append(known, m.Name); !strings.Contains(m.Name, ":") {
			written = append(written, m.Name)
		}
	}
	if slices.Sort(written); !slices.Equal(written, slices.Sorted(maps.Keys(tampers))) {
		t.Errorf("the rack has the mutations %q of data; the ones here are %q", written,
			slices.Sorted(maps.Keys(tampers)))
	}
	all := product(p, known)
	caught := 0
	for _, name := range short.Some(t, 10, slices.Sorted(maps.Keys(all))) {
		every := true
		for _, want := range all[name] {
			for access := range strings.FieldsSeq(want.accesses) {
				every = t.Run(name+" by "+want.check+" with "+access, func(t *testing.T) {
					b.notices(t, name, want, access)
				}) && every
			}
		}
		if every {
			caught++
		}
	}
	p.Figure("of", len(known), "tampers", len(all), "noticed", caught)
}

func (b *bench) notices(t *testing.T, tamper string, want noticed, access string) {
	checks := data.Checks()
	i := slices.IndexFunc(checks, func(c data.Check) bool { return c.ID == want.check })
	if i < 0 {
		t.Fatalf("there is no check %s", want.check)
	}
	b.Accesses = []string{access}
	if b.Blocks = 0; strings.Contains(tamper, ":") {
		b.Blocks = 16
	}
	err := b.runTampered(t, tamper, checks[i])
	if err == nil || !slices.ContainsFunc(strings.Split(want.says, "|"),
		func(says string) bool { return strings.Contains(err.Error(), says) }) {
		t.Errorf("the check says %v, want an error with %q", err, want.says)
	}
}

func (b *bench) runTampered(t *testing.T, tamper string, check data.Check) error {
	t.Helper()
	ctx := context.Background()
	csitest.Must(t, b.env.Rack.Admin.Mutate(ctx, tamper))
	err := check.Run(ctx, b.Bench)
	csitest.Must(t, b.env.Rack.Admin.Mend(ctx))
	csitest.Must(t, b.env.Balance(ctx))
	return err
}

// recorded is a check that ran on a healthy rack, with the blocks that it compared.
type recorded struct {
	check  data.Check
	looks  []*data.Look
	extent report.Extent
}

// byteMutant makes the block at one offset wrong on every disk of look's kind and size. It does so
// when the disk is new (the moment "new"), or at every detach ("kept").
type byteMutant struct {
	wrong, moment string
	look          *data.Look
	at            int64
}

func (m byteMutant) String() string {
	return fmt.Sprintf("%s at byte %d of %s", m.wrong, m.at, m.look.What(m.moment))
}

// tamper returns the simulator's name for this corruption.
func (m byteMutant) tamper() string {
	moments := map[string]string{data.Blank: "new", data.Restored: "restored", data.Larger: "larger",
		data.Again: "recreated"}
	return fmt.Sprintf("%s:%s:%d:%d", m.wrong, moments[m.look.Kind], m.at, m.look.Bytes)
}

// boundary is the distance between the boundaries of the pieces into which a rack divides a disk.
const boundary = 64 * harness.MiB

// drawBytes draws a byteMutant whose block is near an end, near a boundary, or anywhere else.
func drawBytes(random *rand.Rand, looks []*data.Look) byteMutant {
	m := byteMutant{moment: "new", wrong: "foreign", look: looks[random.IntN(len(looks))]}
	if m.look.Kind != data.Blank && random.IntN(2) == 0 {
		m.moment, m.wrong = "kept", "decayed"
	} else if m.look.Kind == data.Blank && random.IntN(2) == 0 {
		m.moment = "kept"
		m.wrong = []string{"decayed", "lost"}[random.IntN(2)]
	}
	first, blocks := int64(0), m.look.Bytes/guest.BlockBytes
	if m.look.Kind == data.Larger {
		first = blocks / 2 // the first half is the snapshot's
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
	if m.wrong == "lost" { // only a block that was written can be lost
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

func (m byteMutant) on(l *data.Look) bool { return l.What("") == m.look.What("") }

// noticed reports whether a check compared the mutant's block while that block was wrong.
func (m byteMutant) noticed(r recorded) bool {
	return slices.ContainsFunc(r.looks, func(l *data.Look) bool {
		return m.on(l) && l.Seen[m.moment][m.at/guest.BlockBytes] &&
			(m.wrong != "lost" || l.Written[m.at/guest.BlockBytes])
	})
}

// said(run) is true if the run states that it did not read the mutant's disks in full.
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

// kindsOf returns a Look for each kind and size of disk, with the blocks that any check wrote.
func kindsOf(run []recorded) (all []*data.Look) {
	for _, r := range run {
		for _, l := range r.looks {
			i := slices.IndexFunc(all, func(k *data.Look) bool { return k.What("") == l.What("") })
			if i < 0 {
				i = len(all)
				all = append(all, &data.Look{Kind: l.Kind, Bytes: l.Bytes,
					Written: make([]bool, len(l.Written))})
			}
			for block, written := range l.Written {
				all[i].Written[block] = all[i].Written[block] || written
			}
		}
	}
	return all
}

func TestDataChecksFindEachWrongBlockOrReportAPartialRead(t *testing.T) {
	t.Parallel()
	p := proof.New(t, "verdict-mutants")
	b := newBench(t)
	b.Accesses, b.Blocks, b.SampleTime = []string{"block"}, 64, 1
	draws, really, short := 500, 24, []string{"D08", "D09", "D13", "D14"}
	if p.Short() {
		draws, really = 100, 2
	}
	var run []recorded
	for _, check := range data.Checks() {
		if check.ID == "D10" || p.Short() && !slices.Contains(short, check.ID) {
			continue // D10 reads no bytes
		}
		b.Log = &data.Log{}
		if err := check.Run(t.Context(), b.Bench); err != nil {
			t.Fatalf("%s: %s", check.ID, err)
		}
		run = append(run, recorded{check, b.Log.Looks, b.Log.Extent()})
	}
	b.Log = nil // a run with a mutant must not change what these runs have recorded
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

// reallyRun runs a check on a rack with the mutant. If the index "by" is not negative, run[by] must
// fail, and its error must name the block or the disk's checksum. Otherwise reallyRun chooses a
// check that has a disk of the mutant's kind and size, and that check must succeed.
func (b *bench) reallyRun(t *testing.T, m byteMutant, run []recorded, by int) {
	t.Helper()
	if by < 0 {
		by = slices.IndexFunc(run, func(r recorded) bool { return slices.ContainsFunc(r.looks, m.on) })
	}
	err := b.runTampered(t, m.tamper(), run[by].check)
	about := fmt.Sprintf(`at byte %d\b|is another: expected the SHA-256`, m.at)
	blamed := err != nil && regexp.MustCompile(about).MatchString(err.Error())
	if blamed != (err != nil) || blamed != m.noticed(run[by]) {
		t.Errorf("%s: %s was judged to notice it: %t; it says %v", m, run[by].check.ID,
			m.noticed(run[by]), err)
	}
}
