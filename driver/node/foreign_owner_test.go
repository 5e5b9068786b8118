//go:build linux

package node

import (
	"encoding/binary"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// mdBytes begin a superblock of Linux' software RAID.
const mdBytes = "\xfc\x4e\x2b\xa9"

// zfsLabel is the ring of uberblocks in the first label of a pool's member.
func zfsLabel(d *guesttest.Disk, t *testing.T) {
	uberblock := make([]byte, 1<<10)
	binary.LittleEndian.PutUint64(uberblock, 0x00bab10c)
	binary.LittleEndian.PutUint64(uberblock[8:], 5000)
	for i := range int64(8) {
		d.WriteAt(t, 128<<10+i<<10, uberblock)
	}
}

func ufs2(d *guesttest.Disk, t *testing.T) { d.WriteAt(t, 64<<10+1372, []byte("\x19\x01\x54\x19")) }

// mdMember is a RAID's superblock that adds up, before the end of the disk.
func mdMember(d *guesttest.Disk, t *testing.T) {
	at := (d.SizeBytes/512 - 16) &^ 7 * 512
	b := make([]byte, 4096)
	copy(b, mdBytes)
	binary.LittleEndian.PutUint32(b[4:], 1)
	copy(b[16:], "the RAID's UUID.")
	binary.LittleEndian.PutUint64(b[144:], uint64(at/512))
	var sum uint64
	for i := 0; i < 256; i += 4 {
		sum += uint64(binary.LittleEndian.Uint32(b[i:]))
	}
	binary.LittleEndian.PutUint32(b[216:], uint32(sum)+uint32(sum>>32))
	d.WriteAt(t, at, b)
}

// gptBackup is for a disk of 128 MiB.
func gptBackup(d *guesttest.Disk, t *testing.T) {
	d.WriteAt(t, d.SizeBytes-512, gpt(uint64(d.SizeBytes/512-1)))
}

// The UUID that the driver gave to the filesystem decides; on a filesystem of somebody else, blkid
// does.
func TestAMarkOfAnotherOwner(t *testing.T) {
	for _, c := range []struct {
		name, fsType string
		mark         func(*guesttest.Disk, *testing.T)
		disputed     bool // by blkid, too
	}{
		{"an ext4 with labels of ZFS", volume.Ext4, zfsLabel, true},
		{"a btrfs with labels of ZFS", volume.Btrfs, zfsLabel, true},
		{"an ext3 with the magic of UFS2", volume.Ext3, ufs2, true},
		{"an xfs whose end is that of a RAID's member", volume.XFS, mdMember, true},
		{"an ext4 whose end is that of a RAID's member", volume.Ext4, mdMember, true},
		{"an ext3 whose end is that of a RAID's member", volume.Ext3, mdMember, true},
		{"a btrfs whose end is that of a RAID's member", volume.Btrfs, mdMember, true},
		// blkid finds no GPT that the start of the disk does not announce.
		{"a btrfs whose end is the backup of a GPT", volume.Btrfs, gptBackup, false},
		{"an ext4 whose end has the magic of a RAID and nothing else", volume.Ext4,
			func(d *guesttest.Disk, t *testing.T) { d.WriteAt(t, d.SizeBytes-8<<10, []byte(mdBytes)) },
			false},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newGuest(t)
			v := g.volume(g.Attach(guesttest.Serial, max(128*guesttest.MiB, smallest(c.fsType))), c.fsType)
			must(t, v.stage())
			must(t, v.unstage())
			c.mark(v.disk, t)
			if c.disputed {
				before := v.disk.Digest(t)
				err := v.stage()
				csitest.Want(t, err, codes.FailedPrecondition, csierr.DiskNotBlank)
				if !strings.Contains(err.Error(), "blkid finds") || v.disk.Digest(t) != before {
					t.Fatalf("written, or another evidence: %v", err)
				}
			} else {
				must(t, v.stage())
				must(t, v.unstage())
			}
			must(t, v.expecting(v.ID).stage())
		})
	}
}
