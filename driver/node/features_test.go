//go:build linux

package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// twoDisks is a filesystem of two disks.
type twoDisks struct{ first, second *guesttest.Disk }

// tool runs a program. The words 1 and 2 in its command are the disks.
func (d twoDisks) tool(t *testing.T, command string) {
	t.Helper()
	words := strings.Fields(command)
	for i, w := range words {
		words[i] = strings.NewReplacer("$1", d.first.Loop, "$2", d.second.Loop).Replace(w)
	}
	guesttest.Run(t, words[0], words[1:]...)
}

// cutOff mounts the filesystem, has a file written and synced, and restores the bytes that the
// disks had then: those that a power failure leaves.
func (d twoDisks) cutOff(t *testing.T, fsType, options string) {
	t.Helper()
	dir := t.TempDir()
	replaced := strings.NewReplacer("$1", d.first.Loop, "$2", d.second.Loop).Replace(options)
	guesttest.Run(t, "mount", "-t", fsType, "-o", "noatime"+replaced, d.first.Loop, dir)
	f, err := os.Create(filepath.Join(dir, "hello"))
	must(t, err)
	_, err = f.WriteString("rack")
	must(t, err)
	must(t, f.Sync())
	must(t, f.Close())
	disks := []*guesttest.Disk{d.first, d.second}
	var copies []string
	for _, disk := range disks {
		copies = append(copies, copyDisk(t, disk.File))
	}
	must(t, unix.Unmount(dir, 0))
	for i, disk := range disks {
		guesttest.Run(t, "dd", "if="+copies[i], "of="+disk.Loop, "bs=1M", "conv=fsync")
	}
}

// A filesystem that has a part on another disk is refused before anything can write to that disk:
// a mount or a check would replay a journal there, also that of a restored copy.
func TestAFilesystemWithAPartOnAnotherDiskIsRefused(t *testing.T) {
	for _, c := range []struct {
		name, fsType string
		make         func(*testing.T, twoDisks)
		want         string
	}{
		{"an ext4 with its journal on another disk", volume.Ext4, func(t *testing.T, d twoDisks) {
			d.tool(t, "mke2fs -q -O journal_dev -b 4096 $2")
			d.tool(t, "mke2fs -q -t ext4 -b 4096 -J device=$2 $1")
			d.cutOff(t, volume.Ext4, "")
		}, "s_journal_uuid: 0x"},
		{"an ext3 with its journal on another disk", volume.Ext3, func(t *testing.T, d twoDisks) {
			d.tool(t, "mke2fs -q -O journal_dev -b 4096 $2")
			d.tool(t, "mke2fs -q -t ext3 -b 4096 -J device=$2 $1")
			d.cutOff(t, volume.Ext3, "")
		}, "s_journal_uuid: 0x"},
		{"the journal of an ext4", volume.Ext4, func(t *testing.T, d twoDisks) {
			d.tool(t, "mke2fs -q -O journal_dev -b 4096 $1")
			d.tool(t, "mke2fs -q -t ext4 -b 4096 -J device=$1 $2")
		}, "s_feature_incompat: journal_dev"},
		{"a btrfs of two disks", volume.Btrfs, func(t *testing.T, d twoDisks) {
			d.tool(t, "mkfs.btrfs -q -d raid1 -m raid1 $1 $2")
			d.cutOff(t, volume.Btrfs, ",device=$2")
		}, "num_devices: 2"},
		{"a btrfs that is a seed for another disk", volume.Btrfs, func(t *testing.T, d twoDisks) {
			d.tool(t, "mkfs.btrfs -q $1")
			d.tool(t, "btrfstune -S 1 $1")
		}, "flags>>32: seeding"},
		{"an xfs with its log on another disk", volume.XFS, func(t *testing.T, d twoDisks) {
			d.tool(t, "mkfs.xfs -q -l logdev=$2,size=64m $1")
			d.cutOff(t, volume.XFS, ",logdev=$2")
		}, "sb_logstart: an external log"},
		{"an xfs with a realtime part on another disk", volume.XFS, func(t *testing.T, d twoDisks) {
			d.tool(t, "mkfs.xfs -q -m reflink=0,rmapbt=0 -r rtdev=$2 $1")
		}, "sb_rblocks: 0x"},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newGuest(t)
			size := max(128*guesttest.MiB, smallest(c.fsType))
			d := twoDisks{g.Attach(guesttest.Serial, size), g.Attach(guesttest.OtherSerial, size)}
			c.make(t, d)
			if c.fsType == volume.Btrfs {
				t.Cleanup(func() { // or the kernel remembers them
					guesttest.Run(t, "btrfs", "device", "scan", "--forget", d.first.Loop)
				})
			}
			g.Unplug(d.first) // it has the serial of its copy
			restored := g.AttachFile(guesttest.Serial, copyDisk(t, d.first.File))
			g.Unplug(restored)
			for _, disk := range []*guesttest.Disk{d.first, restored} {
				g.Plug(disk)
				v := g.volume(disk, c.fsType)
				readOnly := v
				readOnly.Tag = map[string]string{volume.CtxReadOnly: "true"}
				before, other := disk.Digest(t), d.second.Digest(t)
				for _, v := range []testVolume{v, readOnly} {
					err := v.stage()
					if err == nil || !strings.Contains(err.Error(), c.want) {
						t.Errorf("got %v, want a refusal that names %q", err, c.want)
					}
				}
				if disk.Digest(t) != before || d.second.Digest(t) != other {
					t.Error("a disk was written")
				}
				g.Unplug(disk)
			}
		})
	}
}

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

// Signatures that the driver does not know are found by blkid, which decides for every filesystem
// without the UUID that the driver gave to the volume.
func TestASignatureThatOnlyBlkidKnowsIsAnotherOwners(t *testing.T) {
	for _, owner := range []struct {
		name, magic string
		at          int64
	}{
		{"UFS1 of big-endian machines", "\x00\x01\x19\x54", 8<<10 + 1372},
		{"UFS2 of big-endian machines", "\x19\x54\x01\x19", 64<<10 + 1372},
		{"UFS2 in a partition of old", "\x19\x01\x54\x19", 256<<10 + 1372},
	} {
		for _, fsType := range []string{volume.Ext4, volume.XFS, volume.Btrfs} {
			if fsType == volume.Btrfs && owner.at == 64<<10+1372 {
				continue // inside its superblock
			}
			t.Run(fsType+" with the signature of "+owner.name, func(t *testing.T) {
				g := newGuest(t)
				v := g.volume(g.Attach(guesttest.Serial, smallest(fsType)), fsType)
				guesttest.Run(t, "mkfs."+fsType, "-q", v.disk.Loop)
				v.disk.WriteAt(t, owner.at, []byte(owner.magic))
				before := v.disk.Digest(t)
				csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DiskNotBlank)
				if v.disk.Digest(t) != before {
					t.Fatal("the disk was written")
				}
			})
		}
	}
}
