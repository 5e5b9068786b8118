//go:build linux

package corpus_test

import "slices"

// blanks returns disks that must be formatted. Without them a driver that refuses everything
// would pass.
func blanks() []generator {
	var all []generator
	for _, fs := range ours {
		all = append(all, generator{"blank for " + fs, func(t *trial) {
			t.FS = fs
			t.Want.Outcome = formatted
		}}, generator{"blank with 4096-byte blocks for " + fs, func(t *trial) {
			t.FS, t.BlockSize = fs, 4096
			t.Want.Outcome = formatted
		}})
	}
	all = append(all, each(4, "blank of an odd size", func(t *trial) {
		t.Size += 512 * t.Rand.Int64N(4*mib/512)
		t.FS = ours[t.Rand.IntN(len(ours))]
		t.Want.Outcome = formatted
	})...)
	return slices.Concat(all, []generator{
		{"blank and large", func(t *trial) {
			t.Size = gib * (5 + t.Rand.Int64N(296))
			t.FS = []string{ext4, xfs, btrfs}[t.Rand.IntN(3)]
			t.Want.Outcome = formatted
		}},
		{"blank, its zeros written", func(t *trial) {
			t.Fill = func(im *image) {
				zeros := make([]byte, 3*mib)
				im.write(0, zeros...)
				im.write(-3*mib, zeros...)
			}
			t.Want.Outcome = formatted
		}},
	})
}
