//go:build linux

package node

import (
	"encoding/binary"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

func TestAFilesystemWithAnotherOwnerAroundItIsNotMounted(t *testing.T) {
	at := func(offset int64, b string) func(*testing.T, *guesttest.Disk) {
		return func(t *testing.T, d *guesttest.Disk) {
			t.Helper()
			if offset < 0 {
				offset += d.SizeBytes
			}
			d.WriteAt(t, offset, []byte(b))
		}
	}
	mkswap := func(t *testing.T, d *guesttest.Disk) {
		t.Helper()
		guesttest.Run(t, "mkswap", "-q", d.Loop)
	}
	for _, c := range []struct {
		name   string
		fsType string
		write  func(*testing.T, *guesttest.Disk)
		whole  bool
	}{
		{"LUKS before an ext4", volume.Ext4, at(0, "LUKS\xba\xbe\x00\x02"), false},
		{"swap before a btrfs", volume.Btrfs, mkswap, false},
		{"what is a file of an ext4", volume.Ext4, at(-8192, mdBytes), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newGuest(t)
			v := g.volume(g.Attach(guesttest.Serial, 256*guesttest.MiB), volume.Ext4)
			v.FSType = c.fsType
			command := []string{"mke2fs", "-q", "-t", c.fsType, v.disk.Loop, "240M"}
			switch {
			case c.fsType == volume.Btrfs:
				command = []string{"mkfs.btrfs", "-q", v.disk.Loop}
			case c.whole:
				command = command[:5] // else it ends before the disk does, as a member of a RAID
			}
			guesttest.Run(t, command[0], command[1:]...)
			c.write(t, v.disk)
			before := v.disk.Digest(t)
			err := v.stage()
			if c.whole {
				must(t, err)
				return
			}
			csitest.Want(t, err, codes.FailedPrecondition, csierr.DiskNotBlank)
			if v.disk.Digest(t) != before {
				t.Error("the disk was written")
			}
		})
	}
}

func TestOnlyABlankDiskIsFormatted(t *testing.T) {
	const smallDisk = 128 * guesttest.MiB
	noise := make([]byte, 64<<10)
	for i := range noise {
		noise[i] = byte(rand.Uint32())
	}
	writeAt := func(offset int64, b []byte) func(t *testing.T, d *guesttest.Disk) {
		return func(t *testing.T, d *guesttest.Disk) {
			t.Helper()
			if offset < 0 {
				offset += d.SizeBytes
			}
			f, err := os.OpenFile(d.Loop, os.O_WRONLY, 0)
			must(t, err)
			_, err = f.WriteAt(b, offset)
			must(t, err)
			must(t, f.Close())
		}
	}
	tool := func(args ...string) func(t *testing.T, d *guesttest.Disk) {
		return func(t *testing.T, d *guesttest.Disk) {
			guesttest.Run(t, args[0], append(args[1:],
				d.Loop)...)
		}
	}
	for _, c := range []struct {
		name string
		fill func(*testing.T, *guesttest.Disk)
		says string // the message has it
	}{
		{"another filesystem", tool("mkfs.btrfs", "-q"), "btrfs"},
		{"ext2, which volumes do not have", tool("mke2fs", "-q", "-t", "ext2"), "ext2"},
		{"vfat", writeAt(0, fatBootSector()), "vfat"},
		{"swap", tool("mkswap"), "swap"},
		{"a GPT", writeAt(512, gpt(1)), "offset 512"},
		{"a GPT with its protective MBR", func(t *testing.T, d *guesttest.Disk) {
			writeAt(0, mbr(0xEE))(t, d)
			writeAt(512, gpt(1))(t, d)
		}, "partition table (gpt)"},
		{"an MBR", writeAt(0, mbr(0x83)), "partition table (dos)"},
		{"the backup of a GPT only", writeAt(-512, gpt(smallDisk/512-1)), "offset 134217216"},
		{"a LUKS header", writeAt(0, []byte("LUKS\xba\xbe\x00\x02")), "offset 0"},
		{"random bytes at the start", writeAt(0, noise), ""},
		{"one byte in the first MiB", writeAt(guesttest.MiB-1, []byte{1}), "offset 1048575"},
		{"one byte in the last MiB", writeAt(-guesttest.MiB, []byte{1}), "offset 133169152"},
		{"the last byte", writeAt(-1, []byte{1}), "offset 134217727"},
		{"a btrfs whose mkfs did not end", func(t *testing.T, d *guesttest.Disk) {
			tool("mkfs.btrfs", "-q")(t, d)
			writeAt(64<<10+0x40, []byte("!BHRfS_M"))(t, d)
		}, "unfinished btrfs"},
		{"ext4 under an old MBR", func(t *testing.T, d *guesttest.Disk) {
			tool("mke2fs", "-q", "-t", "ext4")(t, d)
			writeAt(0, mbr(0x83))(t, d)
		}, ""},
	} {
		t.Run("NS-10 "+c.name+" is refused, the bytes untouched", func(t *testing.T) {
			g := newGuest(t)
			v := g.volume(g.Attach(guesttest.Serial, smallDisk), volume.Ext4)
			c.fill(t, v.disk)
			before := v.disk.Digest(t)
			err := v.stage()
			csitest.Want(t, err, codes.FailedPrecondition, csierr.DiskNotBlank)
			if !strings.Contains(err.Error(), c.says) {
				t.Errorf("the message does not say %q: %v", c.says, err)
			}
			if v.disk.Digest(t) != before {
				t.Error("the disk was written")
			}
			if got := guesttest.Mounts(t, g.Dir); len(got) != 0 {
				t.Errorf("mounts: %q", got)
			}
		})
	}
	for _, fsType := range volume.Filesystems {
		t.Run("a healthy "+fsType+" whose device was cut short is refused, the bytes untouched",
			func(t *testing.T) {
				g := newGuest(t)
				whole := g.volume(g.Attach(guesttest.Serial, 512*guesttest.MiB), fsType)
				must(t, whole.stage())
				must(t, whole.unstage())
				g.Unplug(whole.disk)
				file := copyDisk(t, whole.disk.File)
				must(t, os.Truncate(file, 400*guesttest.MiB))
				v := g.volume(g.AttachFile(guesttest.Serial, file), fsType)
				before := v.disk.Digest(t)
				csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.FilesystemTooLarge)
				if v.disk.Digest(t) != before {
					t.Error("the disk was written")
				}
			})
	}
	t.Run("a disk that cannot be read is refused", func(t *testing.T) {
		g := newGuest(t)
		v := g.volume(g.Attach(guesttest.Serial, 8*guesttest.MiB), volume.Ext4)
		// The loop device keeps its size, and reads beyond the file's end fail.
		must(t, os.Truncate(v.disk.File, 0))
		csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DeviceUnreadable)
	})
	t.Run("a filesystem without a checksum is mounted when blkid knows it too",
		func(t *testing.T) {
			g := newGuest(t)
			v := g.volume(g.Attach(guesttest.Serial, 16*guesttest.MiB), volume.Ext3) // ext3 has no checksum
			must(t, v.stage())
			must(t, v.unstage())
			writeAt(0, []byte("\xeb\x63 boot code"))(t, v.disk)
			must(t, v.stage())
		})
}

// fatBootSector is enough of a FAT for a probe.
func fatBootSector() []byte {
	b := make([]byte, 512)
	copy(b, "\xeb\x3c\x90mkfs.fat")
	copy(b[11:], []byte{0, 2, 4, 4, 0, 2, 0, 2, 0, 0, 0xf8, 0xc8, 0, 32, 0, 64, 0, 0, 0, 0, 0, 0,
		0x40, 0x0b, 0})
	copy(b[36:], "\x80\x00\x29\x01\x02\x03\x04NO NAME    FAT16   ")
	b[510], b[511] = 0x55, 0xAA
	return b
}

// mbr is a partition table with one partition of that type.
func mbr(kind byte) []byte {
	b := make([]byte, 512)
	copy(b[446:], []byte{0, 0, 2, 0, kind, 0xff, 0xff, 0xff, 1, 0, 0, 0, 0xff, 0x1f, 0, 0})
	b[510], b[511] = 0x55, 0xAA
	return b
}

// gpt is the header of an empty GUID partition table for that sector.
func gpt(sector uint64) []byte {
	const last = 128*guesttest.MiB/512 - 1
	le := binary.LittleEndian
	b := make([]byte, 512)
	copy(b, "EFI PART")
	le.PutUint32(b[8:], 0x10000)
	le.PutUint32(b[12:], 92)
	le.PutUint64(b[24:], sector)
	le.PutUint64(b[32:], last+1-sector)
	le.PutUint64(b[40:], 34)
	le.PutUint64(b[48:], last-33)
	b[56] = 1 // the disk's GUID
	le.PutUint64(b[72:], 2)
	if sector != 1 {
		le.PutUint64(b[72:], last-32)
	}
	le.PutUint32(b[80:], 128)
	le.PutUint32(b[84:], 128)
	le.PutUint32(b[88:], crc32.ChecksumIEEE(make([]byte, 128*128)))
	le.PutUint32(b[16:], crc32.ChecksumIEEE(b[:92]))
	return b
}
