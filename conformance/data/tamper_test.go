//go:build linux

package data_test

import (
	"context"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/data"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

// noticed names the check that notices a tamper, with each of some accesses, and a part of its
// error. A | separates alternatives. A reason of the driver means that the driver refuses the rack.
type noticed struct{ check, accesses, says string }

// filesystems are the accesses with a filesystem. unmountable are the driver's errors for one that
// lacks some of its blocks.
const (
	filesystems = "ext4 xfs btrfs"
	unmountable = "FilesystemDamaged: mount |NodeToolFailed: mount |the filesystem is damaged, or "
)

// tampers are the simulator's tampers, by name.
var tampers = map[string][]noticed{
	"swapped-disks": {{"D07", "block", "of another volume (its seed is"},
		{"D07", filesystems, "WrongFilesystem: "}},
	"stale-read": {{"D01", "block " + filesystems, "of generation 1 instead of 2"}},
	"torn-snapshot": {{"D04", "block", "the snapshot is torn"},
		{"D04", filesystems, "the snapshot is torn|" + unmountable}},
	"serial-missing": {{"D10", "ext4", "shows 0 devices with the serial"},
		{"D01", "ext4", "DeviceNotFound: "}},
	"serial-doubled": {{"D10", "ext4", "shows 2 devices with the serial"},
		{"D07", "ext4 block", "DeviceNotUnique: "}},
	"device-smaller": {{"D10", "ext4", "expected the size of the rack's disk"},
		{"D01", "ext4 block", "DeviceWrongSize: "}},
	"device-larger": {{"D10", "ext4", "expected the size of the rack's disk"},
		{"D01", "ext4 block", "DeviceWrongSize: "}},
	"device-late": {{"D10", "ext4", "shows 0 devices with the serial"},
		{"D01", "ext4", "DeviceNotFound: "}},
	"device-never": {{"D10", "ext4", "shows 0 devices with the serial"},
		{"D01", "ext4", "DeviceNotFound: "}},
	"device-left": {{"D10", "ext4", "shows 1 devices with the serial"}},
	"delete-another": {{"D07", "block", "which is zero"},
		{"D07", "ext4", "not there: the file is missing"}},
	"other-snapshot":   {{"D05", "block ext4", "of generation 2 instead of 1"}},
	"device-elsewhere": {{"D02", "ext4", "the volume is in another instance, too"}},
}

// noticedBy returns the check that notices a wrong block. For a new disk it depends on the error: a
// block that is not zero, a block that loses a write, or a block that another disk shares.
func noticedBy(wrong, moment string) string {
	switch moment {
	case "new":
		switch wrong {
		case "stale", "foreign":
			return "D08"
		case "shared":
			return "D07"
		}
		return "D01"
	case "large":
		return "D14"
	case "recreated":
		return "D13"
	}
	return "D12"
}

// product adds the simulator's combined tampers, WRONG:MOMENT:PLACE, to those above: all of them in
// the long form, otherwise every second one. The seed chooses.
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
			// The driver finds the damage, and does not grow the filesystem.
			all[name] = append(all[name], noticed{"D05", "ext4", "a workload has "})
		}
	}
	// A filesystem begins here, so the driver refuses the disk.
	const begins = "foreign:new:65536"
	all[begins] = append(all[begins], noticed{"D01", filesystems, "DiskNotBlank: "})
	// These were passed over once: two blocks before the end of a blank disk of more than 1 GiB.
	all["foreign:new:-8192:2147483648"] = []noticed{{"D08", "block", "is not zero"}}
	all["foreign:large:-8192:18253611008"] = []noticed{{"D14", "block", "is not zero"}}
	return all
}

func TestEveryTamperIsNoticed(t *testing.T) {
	t.Parallel()
	p := proof.New(t, "broken-data")
	b := newBench(t, harness.RackOptions{})
	mutations, err := b.env.Rack.Admin.Mutations(t.Context())
	csitest.Must(t, err)
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

// notices demands that a check fails for a reason on a rack with a tamper.
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

// runTampered runs a check on a rack with a tamper, and returns what the check says.
func (b *bench) runTampered(t *testing.T, tamper string, check data.Check) error {
	t.Helper()
	ctx := context.Background()
	csitest.Must(t, b.env.Rack.Admin.Mutate(ctx, tamper))
	err := check.Run(ctx, b.Bench)
	csitest.Must(t, b.env.Rack.Admin.Mend(ctx))
	csitest.Must(t, b.env.Balance(ctx))
	return err
}
