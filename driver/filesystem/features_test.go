//go:build linux

package filesystem

import (
	"encoding/binary"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
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

// TestNewFilesystemsHaveTheFeaturesOfTheDriversList formats disks with programs whose defaults and
// configuration are others, and with programs that do not make what they are told.
func TestNewFilesystemsHaveTheFeaturesOfTheDriversList(t *testing.T) {
	config := filepath.Join(t.TempDir(), "mke2fs.conf")
	t.Setenv("MKE2FS_CONFIG", config)
	csitest.Must(t, os.WriteFile(config, []byte("[defaults]\nbase_features = has_journal,uninit_bg\n"+
		"inode_size = 128\n[fs_types]\next3 = {\nfeatures = extent\n}\n"+
		"ext4 = {\nfeatures = orphan_file,metadata_csum_seed\n}\n"), 0o600))
	page, err := os.ReadFile("../../docs/configuration.md")
	csitest.Must(t, err)
	defaults := `case "${0##*/} $*" in
mke2fs*) set -- ` + config + ` $real "$@"
	exec unshare -m sh -c 'mount --bind "$0" /etc/mke2fs.conf; exec "$@"' "$@";;
"mkfs.xfs "|*list-all|*sparse=*|*no-holes*) ;;
mkfs.xfs*) set -- -m rmapbt=1 -i sparse=0 "$@";;
mkfs.btrfs*) set -- -O ^no-holes "$@";;
esac
exec $real "$@"`
	disobedience := `exec $real $(echo "$@" | sed 's/bigtime=1/bigtime=0/
s/no-holes/^no-holes/
s/dir_index,//')`
	for fsType, features := range newFeatures {
		row := "| `" + fsType + "` | " + strings.ReplaceAll(features, " ", ", ") + " |\n"
		if !strings.Contains(string(page), row) {
			t.Errorf("docs/configuration.md does not have the row %s", row)
		}
		for name, script := range map[string]string{"defaults": defaults, "disobedience": disobedience} {
			t.Run(fsType+" by programs with other "+name, func(t *testing.T) {
				dir := t.TempDir()
				for _, name := range []string{"mke2fs", "mkfs.xfs", "mkfs.btrfs"} {
					real, err := exec.LookPath(name)
					csitest.Must(t, err)
					csitest.Must(t, os.WriteFile(filepath.Join(dir, name),
						[]byte("#!/bin/sh\nreal="+real+"\n"+script), 0o700))
				}
				t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
				p := &Preparation{Device: openDisk(t, 512*guesttest.MiB), Scans: &ZeroScans{},
					Volume: Volume{ID: zeroVolume, SizeBytes: 512 * guesttest.MiB, FSType: fsType},
					Log:    slog.Default(), Begin: func(int64) error { return nil }}
				for range 2 { // the second call finds what the first has left
					_, err := p.Run(t.Context())
					if script == disobedience && (!csierr.Has(err, csierr.NodeToolFailed) ||
						!strings.Contains(err.Error(), features)) {
						t.Fatalf("want an error that names %q, got %v", features, err)
					} else if script == defaults {
						csitest.Must(t, err)
						head, err := p.Device.Read(0, btrfsOffset+btrfsBytes)
						csitest.Must(t, err)
						wantNewFeatures(t, head, p.Volume)
					}
				}
			})
		}
	}
}

// wantNewFeatures fails the test unless the head of a disk has the features of the volume's new
// filesystem, and inodes of at least 256 bytes.
func wantNewFeatures(t *testing.T, head []byte, v Volume) {
	t.Helper()
	made := findSuperblocks(head)
	if len(made) != 1 || !slices.Equal(made[0].chosenFeatures(), v.newFeatures()) {
		t.Errorf("the disk holds %+v, want the features %q", made, v.newFeatures())
	} else if made[0].isExt() && binary.LittleEndian.Uint16(head[extOffset+0x58:]) < 256 {
		t.Error("the inodes are smaller than 256 bytes")
	}
}
