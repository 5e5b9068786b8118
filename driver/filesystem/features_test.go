//go:build linux

package filesystem

import (
	"encoding/binary"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
)

// The masks of the features that Linux 6.18 supports on one device, without those that the driver
// refuses: EXT4_FEATURE_*_SUPP, XFS_SB_VERSION_OKBITS, XFS_SB_FEAT_*_ALL, BTRFS_FEATURE_*_SUPP.
var knownFeatures = map[string]uint64{
	"s_rev_level": 1, "s_feature_compat": 0x1E3F, "s_feature_incompat": 0x3E7D6,
	"s_feature_ro_compat": 0x1A77F,
	"sb_versionnum":       0xFDF5, "sb_features2": 0x38A, "sb_features_ro_compat": 0xF,
	"sb_features_incompat": 0x1EF, "sb_features_log_incompat": 1,
	"flags": 3, "compat_ro_flags": 0xF, "incompat_flags": 0x10FFF, "csum_type": 3,
}

func TestOnlyKnownFeaturesAreAllowed(t *testing.T) {
	for _, c := range []struct {
		mkfs  string
		at    int
		order binary.ByteOrder
		words []featureWord
	}{
		{"mke2fs -q -F -t ext4", extOffset, binary.LittleEndian, extFeatures},
		{"mkfs.xfs -q", 0, binary.BigEndian, append(xfsFeatures, xfsV5Features...)},
		{"mkfs.btrfs -q", btrfsOffset, binary.LittleEndian, btrfsFeatures},
	} {
		head := freshDisk(t, 300*guesttest.MiB, strings.Fields(c.mkfs)...)
		for _, w := range c.words {
			for bit := range 8 * w.Bytes {
				b := append([]byte(nil), head...)
				at := c.at + w.At + bit/8
				if c.order == binary.BigEndian {
					at = c.at + w.At + w.Bytes - 1 - bit/8
				}
				b[at] |= 1 << (bit % 8)
				found := findSuperblocks(b)
				if len(found) != 1 {
					t.Fatalf("%s: found %d filesystems", c.mkfs, len(found))
				}
				named := strings.Contains(found[0].Refused, w.Field+": ")
				if allowed := knownFeatures[w.Field]>>bit&1 == 1; named == allowed {
					t.Errorf("bit %d of %s: allowed is %t; refused for %q", bit, w.Field, allowed,
						found[0].Refused)
				}
			}
		}
	}
}
