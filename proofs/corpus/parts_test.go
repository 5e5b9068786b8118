//go:build linux

package corpus_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os/exec"
	"path/filepath"

	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// The functions that correct the checksum of a superblock after a patch.
func sumExt(b []byte) {
	if b[0x65]&4 != 0 { // metadata_csum
		le.PutUint32(b[0x3FC:], ^crc32.Checksum(b[:0x3FC], castagnoli))
	}
}

func sumXFS(b []byte) {
	if binary.BigEndian.Uint16(b[100:])&0xF == 5 {
		clear(b[224:228])
		le.PutUint32(b[224:], crc32.Checksum(b, castagnoli))
	}
}

func sumBtrfs(b []byte) { le.PutUint32(b, crc32.Checksum(b[0x20:], castagnoli)) }

// patch overwrites a part of the superblock at an offset, and corrects its checksum.
func (im *image) patch(offset, n, at int64, bytes []byte, sum func([]byte)) {
	b := im.read(offset, n)
	copy(b[at:], bytes)
	sum(b)
	im.write(offset, b...)
}

// foreignParts returns filesystems that have a part on another disk, or an unknown feature.
func foreignParts() []generator {
	return []generator{
		across("ext4 with its journal on another disk", ext4, "s_journal_uuid: 0x",
			"mke2fs -q -F -O journal_dev -b 4096 $2",
			"mke2fs -q -F -t ext4 -b 4096 -J device=$2 $1"),
		across("ext4 with its journal on another disk, as only a copy of its superblock says", ext4,
			"s_journal_uuid: 0x", "mke2fs -q -F -O journal_dev -b 4096 $2",
			"mke2fs -q -F -t ext4 -b 4096 -J device=$2 $1 100000").then(hideJournal),
		across("the journal of an ext4", ext4, "s_feature_incompat: journal_dev",
			"mke2fs -q -F -O journal_dev -b 4096 $1"),
		across("xfs with its log on another disk", xfs, "sb_logstart: an external log",
			"mkfs.xfs -q -f -l logdev=$2,size=64m $1"),
		across("xfs with a realtime part on another disk", xfs, "sb_rblocks: 0x",
			"mkfs.xfs -q -f -m reflink=0,rmapbt=0 -r rtdev=$2 $1"),
		across("btrfs of two disks", btrfs, "num_devices: 2", "mkfs.btrfs -q -f -d raid1 -m raid1 $1 $2"),
		across("btrfs of two disks that says it has one", btrfs, "incompat_flags: ",
			"mkfs.btrfs -q -f -d raid1 -m raid1 $1 $2", "btrfs device scan $2").then(countOne),
		across("btrfs that is a seed", btrfs, "flags>>32: seeding", "mkfs.btrfs -q -f $1",
			"btrfstune -S 1 $1"),
		{"ext4 with a feature that nobody knows", func(t *trial) {
			kindOf(ext4).of(t)
			t.Fill = func(im *image) {
				im.filesystem(kindOf(ext4))
				im.patch(kib, kib, 0x5F, []byte{0x40}, sumExt)
			}
			t.Want = refuse(feature)
			t.Want.Says = []string{"s_feature_compat: 0x40000000"}
		}},
	}
}

// hideJournal damages the superblock of an ext4 so that it does not show its journal any more,
// and so that the driver uses a copy of it for a check. A user who has the disk as a raw
// device can forge all this.
func hideJournal(f *fixture) error {
	f.image.patch(kib, kib, 0xD0, make([]byte, 0x18), sumExt)
	f.image.patch(kib, kib, 0xE0, []byte{8}, func(b []byte) {})
	if f.image.err != nil {
		return f.image.err
	}
	return f.poke(proof.GrowthSlots(f.image.Size)[0],
		f.forgery().GrowthRecord(f.image.Size, 0, true)...)
}

// then returns the generator with one more change of the disk.
func (g generator) then(do func(*fixture) error) generator {
	return generator{g.name, func(t *trial) {
		g.make(t)
		set := t.Set
		t.Set = func(f *fixture) error {
			if err := errors.Join(set(f), f.loop.Sync()); err != nil {
				return err
			}
			return do(f)
		}
	}}
}

// countOne patches the number of disks in all superblocks of a btrfs.
func countOne(f *fixture) error {
	for _, at := range []int64{64 * kib, 64 * mib} {
		f.image.patch(at, 4*kib, 0x88, []byte{1}, sumBtrfs)
	}
	return f.image.err
}

// featureTrials returns the names of the trials that only the check of features decides. blkid
// does not recognize the journal of an ext4, and the kernel does not accept a wrong number.
func featureTrials() []string {
	var names []string
	for _, g := range foreignParts() {
		if g.name != "the journal of an ext4" && g.name != "btrfs of two disks that says it has one" {
			names = append(names, g.name)
		}
	}
	return names
}

// across returns a filesystem that commands make from the disk $1 and a bystander $2. The
// driver must not write to the bystander.
func across(name, fs, says string, commands ...string) generator {
	return generator{name, func(t *trial) {
		var bystander *image
		var before string
		t.Size, t.FS = 512*mib, fs
		t.Set = func(f *fixture) error {
			bystander = newImage(filepath.Join(f.dir, "bystander"), 512*mib)
			other, err := f.attach(context.Background(), bystander, false)
			if err != nil {
				return err
			}
			for _, command := range commands {
				line := fmt.Sprintf("set -- %s %s; %s", f.loop.Path, other.Path, command)
				if out, err := exec.Command("sh", "-c", line).CombinedOutput(); err != nil {
					return fmt.Errorf("%s: %w\n%s", command, err, out)
				}
			}
			if fs == btrfs {
				f.atEnd(func() error { // so that the kernel forgets it
					return exec.Command("btrfs", "device", "scan", "--forget", f.loop.Path).Run()
				})
			}
			if err := other.Sync(); err != nil {
				return err
			}
			before, err = digest(bystander.Path, 0)
			return err
		}
		t.Check = func(*fixture) error {
			after, err := digest(bystander.Path, 0)
			if err == nil && after != before {
				err = errors.New("another disk was written")
			}
			return err
		}
		t.Want = refuse(feature, notBlank)
		t.Want.Says, t.Want.Names = []string{says}, []string{says}
	}}
}
