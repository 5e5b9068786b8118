//go:build linux

package data_test

import (
	"context"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/data"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/proof"
)

// noticed says which check notices a tamper with an access, and what its error says, with one of
// several things after |. A reason of the driver's is what it refuses such a rack with.
type noticed struct{ check, access, says string }

// unmountable is what the driver says of a filesystem that lacks some of its blocks.
const unmountable = "FilesystemDamaged: mount |NodeToolFailed: mount |" +
	"the filesystem is damaged, or "

// tampers are those of the simulator, by name.
var tampers = map[string][]noticed{
	"lost-write": {
		{"D01", "block", "which is zero"},
		{"D01", "ext4", unmountable},
		{"D01", "xfs", unmountable},
		{"D01", "btrfs", unmountable},
		{"D02", "block", "which is zero"},
		{"D03", "block", "which is zero"},
		{"D06", "block", "which is zero"},
		{"D09", "block", "is another after detaching and attaching"},
	},
	"lost-end": {{"D09", "block", "is another after detaching and attaching"}},
	"swapped-disks": {
		{"D07", "block", "of another volume (its seed is"},
		{"D07", "ext4", "WrongFilesystem: "},
		{"D07", "xfs", "WrongFilesystem: "},
		{"D07", "btrfs", "WrongFilesystem: "},
	},
	"stale-read": {
		{"D01", "block", "of generation 1 instead of 2"},
		{"D01", "ext4", "of generation 1 instead of 2"},
		{"D01", "xfs", "of generation 1 instead of 2"},
		{"D01", "btrfs", "of generation 1 instead of 2"},
	},
	"torn-snapshot": {
		{"D04", "block", "the snapshot is torn"},
		{"D04", "ext4", "the snapshot is torn|" + unmountable},
		{"D04", "xfs", "the snapshot is torn|" + unmountable},
		{"D04", "btrfs", "the snapshot is torn|" + unmountable},
	},
	"serial-missing": {
		{"D10", "ext4", "shows 0 devices with the serial"},
		{"D01", "ext4", "DeviceNotFound: "},
	},
	"serial-doubled": {
		{"D10", "ext4", "shows 2 devices with the serial"},
		{"D07", "ext4", "DeviceNotUnique: "},
		{"D07", "block", "DeviceNotUnique: "},
	},
	"device-smaller": {
		{"D10", "ext4", "expected the size of the rack's disk"},
		{"D01", "ext4", "DeviceWrongSize: "},
		{"D01", "block", "DeviceWrongSize: "},
	},
	"device-larger": {
		{"D10", "ext4", "expected the size of the rack's disk"},
		{"D01", "ext4", "DeviceWrongSize: "},
		{"D01", "block", "DeviceWrongSize: "},
	},
	"device-late": {
		{"D10", "ext4", "shows 0 devices with the serial"},
		{"D01", "ext4", "DeviceNotFound: "},
	},
	"device-never": {
		{"D10", "ext4", "shows 0 devices with the serial"},
		{"D01", "ext4", "DeviceNotFound: "},
	},
	"device-left": {{"D10", "ext4", "shows 1 devices with the serial"}},
	"delete-another": {
		{"D07", "block", "which is zero"},
		{"D07", "ext4", "not there: the file is missing"},
	},
	"not-zero": {
		{"D08", "block", "is not zero: 3 of its blocks hold something"},
		{"D01", "ext4", "DiskNotBlank: "},
		{"D01", "xfs", "DiskNotBlank: "},
		{"D01", "btrfs", "DiskNotBlank: "},
	},
	"other-snapshot": {
		{"D05", "block", "of generation 2 instead of 1"},
		{"D05", "ext4", "of generation 2 instead of 1"},
	},
}

func TestEveryTamperIsNoticed(t *testing.T) {
	b := newBench(t, harness.RackOptions{})
	mutations, err := b.env.Rack.Admin.Mutations(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var known []string
	for _, m := range mutations {
		if m.Rule == "data" {
			known = append(known, m.Name)
		}
	}
	if slices.Sort(known); !slices.Equal(known, slices.Sorted(maps.Keys(tampers))) {
		t.Errorf("the rack has the mutations %q of data; the ones here are %q", known,
			slices.Sorted(maps.Keys(tampers)))
	}
	caught := 0
	for name, all := range tampers {
		every := true
		for _, want := range all {
			every = t.Run(name+" by "+want.check+" with "+want.access, func(t *testing.T) {
				b.notices(t, name, want)
			}) && every
		}
		if every {
			caught++
		}
	}
	err = proof.Print(proof.Line("broken-data", "mutations", len(known), "noticed", caught))
	if err != nil {
		t.Error(err)
	}
}

// notices runs a check on a rack that tampers, and demands that it fails for that.
func (b *bench) notices(t *testing.T, tamper string, want noticed) {
	ctx := context.Background()
	checks := data.Checks()
	i := slices.IndexFunc(checks, func(c data.Check) bool { return c.ID == want.check })
	if i < 0 {
		t.Fatalf("there is no check %s", want.check)
	}
	if err := b.env.Rack.Admin.Mutate(ctx, tamper); err != nil {
		t.Fatal(err)
	}
	b.Accesses = []string{want.access}
	err := checks[i].Run(ctx, b.Bench)
	if err := b.env.Rack.Admin.Mend(ctx); err != nil {
		t.Fatal(err)
	}
	if err == nil || !slices.ContainsFunc(strings.Split(want.says, "|"),
		func(says string) bool { return strings.Contains(err.Error(), says) }) {
		t.Errorf("the check says %v, want an error with %q", err, want.says)
	} else {
		t.Log(err)
	}
	if err := b.env.Balance(ctx); err != nil {
		t.Fatal(err)
	}
}
