//go:build linux

package node

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// A feature that the driver knows is refused by name where this node's kernel lacks it.
func TestAFeatureThatTheKernelRefusesIsNamed(t *testing.T) {
	refused := 0
	for _, c := range []struct{ fsType, mkfs, want string }{
		{volume.Ext4, "mke2fs -q -t ext4 -O casefold", "casefold"},
		{volume.Ext4, "mke2fs -q -F -t ext4 -b 65536", "s_feature_incompat: filetype extents"},
		{volume.XFS, "mkfs.xfs -q -m crc=0", "sb_versionnum: "},
		{volume.XFS, "mkfs.xfs -q -n version=ci", "asciici"},
	} {
		t.Run(c.mkfs, func(t *testing.T) {
			g := newGuest(t)
			v := g.volume(g.Attach(guesttest.Serial, smallest(volume.XFS)), c.fsType)
			words := strings.Fields(c.mkfs)
			guesttest.Run(t, words[0], append(words[1:], v.disk.Loop)...)
			before := v.disk.Digest(t)
			err := v.stage()
			if err == nil {
				return // this kernel has it
			}
			refused++
			csitest.Want(t, err, codes.FailedPrecondition, csierr.FilesystemFeature)
			v.Flags = []string{"noatime"}
			csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.FilesystemFeature)
			v.Flags = []string{"grpid"} // of ext4 and xfs, and may be the cause
			csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.MountFlags)
			if !strings.Contains(err.Error(), c.want) || v.disk.Digest(t) != before {
				t.Fatalf("the disk was written, or %q is not named: %v", c.want, err)
			}
		})
	}
	if refused == 0 {
		t.Error("this kernel has every feature; add one to the table")
	}
}
