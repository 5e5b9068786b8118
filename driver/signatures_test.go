//go:build linux

package driver

import (
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
)

func TestEverySignatureIsReadAndFound(t *testing.T) {
	for _, size := range []int64{64 * guesttest.MiB, guesttest.GiB, 3*guesttest.GiB + 8*guesttest.MiB, 100*guesttest.GiB - 512, 1023 * guesttest.GiB} {
		areas := markAreas(size)
		for _, s := range signatures {
			offset := s.offset(size)
			if offset < 0 || offset+int64(len(s.Magic)) > size {
				continue
			}
			// Signatures lie in one area each, so what was read can be compared at once.
			i := slices.IndexFunc(areas, func(a area) bool {
				return a.Offset <= offset && offset+int64(len(s.Magic)) <= a.end()
			})
			if i < 0 {
				t.Errorf("size %d: %s at offset %d is not read whole", size, s.Name, offset)
				continue
			}
			data := make([]byte, areas[i].Bytes)
			copy(data[offset-areas[i].Offset:], s.Magic)
			v := survey{Path: "/dev/x", Strange: -1, SizeBytes: size, Pieces: []piece{{areas[i], data}}}
			found := findSignatures(size, v.at)
			if !slices.ContainsFunc(found, func(f finding) bool {
				return f.Name == s.Name && f.Offset == offset && f.Sure == (len(s.Magic) >= sureBytes)
			}) {
				t.Errorf("size %d: %s at offset %d is not found: %v", size, s.Name, offset, found)
			}
			if err := v.checkBlank(); err == nil || !strings.Contains(err.Error(), "at offset") {
				t.Errorf("size %d: a disk with %s: %v", size, s.Name, err)
			}
		}
	}
}

func TestWhatToolsWriteIsNamed(t *testing.T) {
	for _, c := range []struct {
		tool []string
		want string
	}{
		{[]string{"mkswap"}, "swap at offset 4086"},
		{[]string{"mkswap", "-p", "65536"}, "swap at offset 65526"},
		{[]string{"mkfs.cramfs", "/etc/apt"}, "cramfs at offset 0"},
	} {
		t.Run(strings.Join(c.tool, " "), func(t *testing.T) {
			g := newGuest(t)
			v := g.volume(g.Attach(testSerial, 64*guesttest.MiB), volume.Ext4)
			guesttest.Run(t, c.tool[0], append(c.tool[1:], v.disk.Loop)...)
			err := v.stage()
			if !strings.Contains(err.Error(), c.want) {
				t.Fatalf("%q is not said: %v", c.want, err)
			}
		})
	}
}

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
	for _, c := range []struct {
		name   string
		fsType string
		write  func(*testing.T, *guesttest.Disk)
		whole  bool
	}{
		{"md at the end, behind an ext4", volume.Ext4, at(-8192, mdMagic), false},
		{"md at the end, behind an ext3", volume.Ext3, at(-8192, mdMagic), false},
		{"a GPT at the end, behind an ext4", volume.Ext4, at(-512, "EFI PART"),
			false},
		{"LUKS before an ext4", volume.Ext4, at(0, "LUKS\xba\xbe\x00\x02"), false},
		{"LVM before a btrfs", volume.Btrfs, at(512, "LABELONE"), false},
		{"what is a file of an ext4", volume.Ext4, at(-8192, mdMagic), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newGuest(t)
			v := g.volume(g.Attach(testSerial, 256*guesttest.MiB), volume.Ext4)
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
