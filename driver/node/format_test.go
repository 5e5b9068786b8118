//go:build linux

package node

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// tools puts scripts, by name, before the machine's programs.
func tools(t *testing.T, scripts map[string]string) {
	t.Helper()
	dir := t.TempDir()
	for name, script := range scripts {
		real, err := exec.LookPath(name)
		must(t, err)
		script = "#!/bin/sh\nreal=" + real + "\n" + script + "\n"
		must(t, os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755))
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

// interruptFormat stages a volume with a script in place of mkfs.
func interruptFormat(t *testing.T, script string, stage func() error) {
	t.Helper()
	before := os.Getenv("PATH")
	tools(t, map[string]string{"mke2fs": script, "mkfs.xfs": script, "mkfs.btrfs": script})
	defer func() { must(t, os.Setenv("PATH", before)) }()
	csitest.Want(t, stage(), codes.Internal, csierr.NodeToolFailed)
}

// formatRecord is the sector that the driver writes before it formats the volume.
func (v testVolume) formatRecord(t *testing.T) []byte {
	t.Helper()
	nv, err := parseVolume(v.ID, v.capability(), v.published(), v.Context)
	must(t, err)
	b, err := filesystem.RecordOf(nv.Volume).Encode()
	must(t, err)
	return b
}

// hasRecord reports whether the disk has a record of the driver at an offset.
func hasRecord(t *testing.T, d *guesttest.Disk, offset int64) bool {
	t.Helper()
	return bytes.HasPrefix(d.ReadAt(t, offset, 512), []byte("oxide-csi format"))
}

// device is the volume's disk as the node sees it.
func (v testVolume) device(t *testing.T) blockdev.Device {
	t.Helper()
	d, err := v.guest.node().host().Lookup(v.disk.Serial)
	must(t, err)
	return d
}

// filesystems lists the filesystems on the volume's disk that the driver could have made.
func (v testVolume) filesystems(t *testing.T) []filesystem.Superblock {
	t.Helper()
	device, err := v.guest.node().host().Open(v.device(t))
	must(t, err)
	found, err := filesystem.Find(device)
	must(t, errors.Join(err, device.Close()))
	return found
}

// recordsOn counts the format records on the disk.
func recordsOn(t *testing.T, d *guesttest.Disk) int {
	t.Helper()
	n := 0
	for _, slot := range filesystem.RecordOffsets(d.SizeBytes) {
		if hasRecord(t, d, slot) {
			n++
		}
	}
	return n
}

func uuidOf(t *testing.T, d *guesttest.Disk) string {
	t.Helper()
	return guesttest.Run(t, "blkid", "-p", "-s", "UUID", "-s", "TYPE", d.Loop)
}

// smallest is a disk that takes the filesystem.
func smallest(fsType string) int64 {
	switch fsType {
	case volume.XFS:
		return 300 * guesttest.MiB
	case volume.Btrfs:
		return 128 * guesttest.MiB
	}
	return 64 * guesttest.MiB
}

func TestACutOffFormatIsDoneAgain(t *testing.T) {
	cuts := []struct{ name, script string }{
		{"before it wrote", "exit 1"},
		{"after its end", `"$real" "$@" && exit 1`},
		{"after a moment", `timeout -s KILL 0.003 "$real" "$@"; exit 1`},
		{"after a while", `timeout -s KILL 0.008 "$real" "$@"; exit 1`},
		{"after a longer while", `timeout -s KILL 0.02 "$real" "$@"; exit 1`},
	}
	for _, fsType := range volume.Filesystems {
		for _, c := range cuts {
			t.Run("a "+fsType+" whose mkfs was cut off "+c.name, func(t *testing.T) {
				g := newGuest(t)
				v := g.volume(g.Attach(guesttest.Serial, smallest(fsType)), fsType)
				interruptFormat(t, c.script, v.stage)
				if n := recordsOn(t, v.disk); n == 0 {
					t.Fatal("no mark is left on the disk")
				}
				if fsType != volume.Btrfs || c.script == "exit 1" {
					interruptFormat(t, c.script, v.stage) // and the second time too
				}
				must(t, v.stage())
				v.checkStaged(t)
			})
		}
	}
	for i, fsType := range volume.Filesystems {
		other := volume.Filesystems[(i+1)%len(volume.Filesystems)]
		t.Run("a "+fsType+" that was cut off becomes "+other+" when that is asked for now",
			func(t *testing.T) {
				g := newGuest(t)
				v := g.volume(g.Attach(guesttest.Serial, max(smallest(fsType), smallest(other))), fsType)
				script := `"$real" "$@" && exit 1`
				if fsType == volume.Btrfs {
					script = "exit 1" // when it is finished it stays what it is
				}
				interruptFormat(t, script, v.stage)
				v.FSType = other
				must(t, v.stage())
				v.checkStaged(t)
			})
	}
	t.Run("whichever of the marks had been written or erased", func(t *testing.T) {
		for _, make := range []func(v testVolume){
			func(testVolume) {},
			func(v testVolume) { guesttest.Run(t, "mke2fs", "-q", "-t", "ext4", v.disk.Loop) },
		} {
			for which := 1; which < 8; which++ {
				g := newGuest(t)
				v := g.volume(g.Attach(guesttest.Serial, 64*guesttest.MiB), volume.Ext4)
				make(v)
				for i, slot := range filesystem.RecordOffsets(v.disk.SizeBytes) {
					if which&(1<<i) != 0 {
						v.disk.WriteAt(t, slot, v.formatRecord(t))
					}
				}
				must(t, v.stage())
				v.checkStaged(t)
			}
		}
	})
}

func TestABtrfsOfWhichAPowerCutLeftTheSuperblockIsMadeAgain(t *testing.T) {
	g := newGuest(t)
	v := g.volume(g.Attach(guesttest.Serial, 256*guesttest.MiB), volume.Btrfs)
	interruptFormat(t, `"$real" "$@" && exit 1`, v.stage)
	// mkfs wrote everything, but only the superblocks and the records reached the disk.
	file, err := os.ReadFile(v.disk.File)
	must(t, err)
	keep := append(filesystem.RecordOffsets(v.disk.SizeBytes), 64<<10, 64*guesttest.MiB)
	zeroes := make([]byte, blockdev.AlignBytes)
	for at := int64(0); at < int64(len(file)); at += blockdev.AlignBytes {
		if !slices.Contains(keep, at) && !bytes.Equal(file[at:at+blockdev.AlignBytes], zeroes) {
			v.disk.WriteAt(t, at, zeroes)
		}
	}
	must(t, v.stage())
	v.checkStaged(t)
	if n := recordsOn(t, v.disk); n != 0 {
		t.Errorf("%d marks are left on the disk", n)
	}
}

func TestABtrfsWhoseSuperblockAPowerCutToreIsMadeAgain(t *testing.T) {
	for name, lost := range map[string][2]int64{"of its first sector": {0, 512},
		"of the others": {512, 4096}} {
		t.Run(name, func(t *testing.T) {
			g := newGuest(t)
			v := g.volume(g.Attach(guesttest.Serial, smallest(volume.Btrfs)), volume.Btrfs)
			interruptFormat(t, `"$real" "$@" && exit 1`, v.stage)
			v.disk.WriteAt(t, 64<<10+lost[0], make([]byte, lost[1]-lost[0]))
			must(t, v.stage())
			v.checkStaged(t)
		})
	}
}

func TestABtrfsOfWhichOnlyTheRecordsAreLeftIsKeptWhateverALaterCheckFinds(t *testing.T) {
	g := newGuest(t)
	v := g.volume(g.Attach(guesttest.Serial, smallest(volume.Btrfs)), volume.Btrfs)
	interruptFormat(t, `"$real" "$@" && exit 1`, v.stage)
	path := os.Getenv("PATH")
	tools(t, map[string]string{"mkfs.btrfs": "exit 1"})
	unmountable := v
	unmountable.Flags = []string{"unknown"} // so the kernel leaves no trace of a mount
	if unmountable.stage() == nil {
		t.Fatal("it was mounted with an unknown flag")
	}
	if n := recordsOn(t, v.disk); n != 0 {
		t.Fatalf("%d marks are left on the disk", n)
	}
	found := v.filesystems(t)
	if len(found) != 1 || !found[0].MaybeFresh {
		t.Fatalf("the disk has %+v, want a btrfs that was never mounted", found)
	}
	tools(t, map[string]string{"btrfs": "exit 1"})
	must(t, v.stage())
	must(t, os.Setenv("PATH", path))
	v.checkStaged(t)
}

// checkStaged checks that the volume is staged as it should be, has no record, and keeps its data.
func (v testVolume) checkStaged(t *testing.T) {
	t.Helper()
	if n := recordsOn(t, v.disk); n != 0 {
		t.Fatalf("%d marks are left on the disk", n)
	}
	file := filepath.Join(v.staging(), "hello")
	must(t, os.WriteFile(file, []byte("rack"), 0o600))
	must(t, v.unstage())
	id := uuidOf(t, v.disk)
	if !strings.Contains(id, `TYPE="`+v.FSType+`"`) {
		t.Fatalf("the disk is %s, not %s", id, v.FSType)
	}
	must(t, v.stage())
	if b, err := os.ReadFile(file); err != nil || string(b) != "rack" {
		t.Fatalf("the file holds %q, %v", b, err)
	}
	must(t, v.unstage())
	if again := uuidOf(t, v.disk); again != id {
		t.Fatalf("%s became %s", id, again)
	}
	v.check(t)
}

// check lets the filesystem's own tool look at it.
func (v testVolume) check(t *testing.T) {
	t.Helper()
	switch v.FSType {
	case volume.Ext3, volume.Ext4:
		guesttest.Run(t, "e2fsck", "-fn", v.disk.Loop)
	case volume.XFS:
		guesttest.Run(t, "xfs_repair", "-n", v.disk.Loop)
	case volume.Btrfs:
		guesttest.Run(t, "btrfs", "check", "--readonly", v.disk.Loop)
	}
}

func TestOnlyTheOwnMarkMakesAFormatBeDoneAgain(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(m *filesystem.Record, b []byte)
		says   string
	}{
		{"of another volume", func(m *filesystem.Record, _ []byte) { m.Volume = "another" },
			`of volume "another"`},
		{"of another disk", func(m *filesystem.Record, _ []byte) { m.Disk = "another" },
			`on disk "another"`},
		{"for another size", func(m *filesystem.Record, _ []byte) { m.SizeBytes++ }, "of 67108865 bytes"},
		{"with a wrong checksum", func(_ *filesystem.Record, b []byte) { b[511] ^= 1 }, "not blank"},
		{"of another version", func(_ *filesystem.Record, b []byte) {
			b[16] = 9
		}, "not blank"},
	} {
		t.Run("a mark "+c.name+" is refused, the bytes untouched", func(t *testing.T) {
			g := newGuest(t)
			v := g.volume(g.Attach(guesttest.Serial, 64*guesttest.MiB), volume.Ext4)
			guesttest.Run(t, "mke2fs", "-q", "-t", "ext4", v.disk.Loop)
			v.disk.WriteAt(t, 0, make([]byte, 8<<10)) // what is left is no filesystem
			m, err := filesystem.ParseRecord(v.formatRecord(t))
			must(t, err)
			c.change(&m, make([]byte, 512))
			b, err := m.Encode()
			must(t, err)
			c.change(&m, b)
			for _, slot := range filesystem.RecordOffsets(v.disk.SizeBytes) {
				v.disk.WriteAt(t, slot, b)
			}
			before := v.disk.Digest(t)
			err = v.stage()
			csitest.Want(t, err, codes.FailedPrecondition, csierr.DiskNotBlank)
			if !strings.Contains(err.Error(), c.says) {
				t.Errorf("the message does not say %q: %v", c.says, err)
			}
			if v.disk.Digest(t) != before {
				t.Error("the disk was written")
			}
		})
	}
	t.Run("a mark of ours beside one of another volume is refused", func(t *testing.T) {
		g := newGuest(t)
		v := g.volume(g.Attach(guesttest.Serial, 64*guesttest.MiB), volume.Ext4)
		other := v
		other.ID = "another"
		v.disk.WriteAt(t, filesystem.RecordOffsets(v.disk.SizeBytes)[0], v.formatRecord(t))
		v.disk.WriteAt(t, filesystem.RecordOffsets(v.disk.SizeBytes)[2], other.formatRecord(t))
		csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DiskNotBlank)
	})
	for _, c := range []struct {
		name   string
		offset int64
		magic  string
	}{
		{"LUKS", 0, "LUKS\xba\xbe\x00\x02"}, {"LVM", 512, "LABELONE"}, {"a GPT", 512, "EFI PART"},
		{"the end of a GPT", -512, "EFI PART"}, {"a DOS partition table", 0, string(mbr(0x83))},
		{"md 1.0", -8192, mdBytes},
	} {
		t.Run("what has come after the format, "+c.name+", is not overwritten", func(t *testing.T) {
			g := newGuest(t)
			v := g.volume(g.Attach(guesttest.Serial, 64*guesttest.MiB), volume.Ext4)
			interruptFormat(t, "exit 1", v.stage)
			offset := c.offset
			if offset < 0 {
				offset += v.disk.SizeBytes
			}
			v.disk.WriteAt(t, offset, []byte(c.magic))
			before := v.disk.Digest(t)
			csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DiskNotBlank)
			if v.disk.Digest(t) != before {
				t.Error("the disk was written")
			}
		})
	}
	t.Run("a restored snapshot of a disk whose format was cut off is refused", func(t *testing.T) {
		g := newGuest(t)
		origin := g.volume(g.Attach(guesttest.Serial, 64*guesttest.MiB), volume.Ext4)
		interruptFormat(t, `"$real" "$@" && exit 1`, origin.stage)
		v := g.volume(g.AttachFile("csi-restored00000000", copyDisk(t, origin.disk.File)), volume.Ext4)
		csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DiskNotBlank)
		must(t, origin.stage())
	})
}

func TestAFilesystemInUseIsNeverFormattedWhateverTheMarksSay(t *testing.T) {
	for _, fsType := range volume.Filesystems {
		t.Run("a "+fsType+" whose files hold marks at their places keeps them", func(t *testing.T) {
			g := newGuest(t)
			v := g.volume(g.Attach(guesttest.Serial, smallest(fsType)), fsType)
			if fsType != volume.Btrfs {
				// The size of a record's sector.
				v.Context = map[string]string{volume.CtxMkfsOptions: "fsBlockSize=4096"}
			}
			must(t, v.stage())
			fill(t, filepath.Join(v.staging(), "marks"), v.formatRecord(t))
			must(t, v.unstage())
			if n := recordsOn(t, v.disk); n == 0 {
				t.Fatal("the file reached no place of a mark")
			}
			id, before := uuidOf(t, v.disk), recordsOn(t, v.disk)
			must(t, v.stage())
			must(t, v.unstage())
			if again := uuidOf(t, v.disk); again != id || recordsOn(t, v.disk) != before {
				t.Fatalf("%s became %s, %d marks %d", id, again, before, recordsOn(t, v.disk))
			}
		})
		for _, state := range []string{"mounted and nothing more", "written and synced"} {
			t.Run("a "+fsType+" that was only just "+state+" when its machine died",
				func(t *testing.T) {
					g := newGuest(t)
					v := g.volume(g.Attach(guesttest.Serial, smallest(fsType)), fsType)
					must(t, v.stage())
					file := filepath.Join(v.staging(), "hello")
					if state != "mounted and nothing more" {
						f, err := os.Create(file)
						must(t, err)
						_, err = f.WriteString("rack")
						must(t, err)
						must(t, f.Sync())
						must(t, f.Close())
					}
					copied := copyDisk(t, v.disk.File)
					must(t, v.unstage())
					g.Unplug(v.disk)
					after := g.volume(g.AttachFile(guesttest.Serial, copied), fsType)
					after.ID = v.ID
					for _, slot := range filesystem.RecordOffsets(after.disk.SizeBytes) {
						after.disk.WriteAt(t, slot, after.formatRecord(t))
					}
					id := uuidOf(t, after.disk)
					must(t, after.stage())
					if again := uuidOf(t, after.disk); again != id && state != "mounted and nothing more" {
						t.Fatalf("%s became %s", id, again)
					}
					b, err := os.ReadFile(filepath.Join(after.staging(), "hello"))
					if state != "mounted and nothing more" && string(b) != "rack" {
						t.Fatalf("the file holds %q, %v", b, err)
					}
					must(t, after.unstage())
				})
		}
	}
}

// fill writes the sector over and over until the filesystem is full.
func fill(t *testing.T, path string, spot []byte) {
	t.Helper()
	f, err := os.Create(path)
	must(t, err)
	chunk := slices.Repeat(spot, 256)
	for err == nil {
		_, err = f.Write(chunk)
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	_ = f.Sync()
	must(t, f.Close())
}

func TestTheDeviceIsTheSameFromTheCheckToTheMount(t *testing.T) {
	t.Run("a device that is swapped while it is checked is refused", func(t *testing.T) {
		g := newGuest(t)
		v := g.volume(g.Attach(guesttest.Serial, 64*guesttest.MiB), volume.Ext4)
		other := g.Attach("csi-other00000000000", 64*guesttest.MiB)
		before := v.disk.Digest(t) + other.Digest(t)
		// The other disk takes the name of the first and its serial.
		sys, dev := filepath.Join(g.Dir, "sys/block"), filepath.Join(g.Dir, "dev")
		tools(t, map[string]string{"blkid": fmt.Sprintf(`
			cd '%s' && cp '%s/device/serial' '%s/device/serial' && rm -r '%s' && mv '%s' '%s'
			cd '%s' && mv '%s' '%s'
			exit 2`, sys, v.disk.Name, other.Name, v.disk.Name, other.Name, v.disk.Name,
			dev, other.Name, v.disk.Name)})
		csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DeviceChanged)
		if v.disk.Digest(t)+other.Digest(t) != before {
			t.Fatal("a disk was written")
		}
	})
	t.Run("a second device with the serial that comes while it is checked is noticed",
		func(t *testing.T) {
			g := newGuest(t)
			v := g.volume(g.Attach(guesttest.Serial, 64*guesttest.MiB), volume.Ext4)
			other := g.Attach("csi-other00000000000", 64*guesttest.MiB)
			before := v.disk.Digest(t) + other.Digest(t)
			tools(t, map[string]string{"blkid": fmt.Sprintf(`cp '%s' '%s'; exit 2`,
				filepath.Join(g.Dir, "sys/block", v.disk.Name, "device/serial"),
				filepath.Join(g.Dir, "sys/block", other.Name, "device/serial"))})
			csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DeviceNotUnique)
			if v.disk.Digest(t)+other.Digest(t) != before {
				t.Fatal("a disk was written")
			}
		})
	t.Run("mkfs is not alone responsible that nobody holds the disk", func(t *testing.T) {
		g := newGuest(t)
		v := g.volume(g.Attach(guesttest.Serial, 64*guesttest.MiB), volume.Ext4)
		holder, err := os.OpenFile(v.disk.Loop, os.O_RDWR|unix.O_EXCL, 0)
		must(t, err)
		defer func() { _ = holder.Close() }()
		before := v.disk.Digest(t)
		csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DeviceHeld)
		if v.disk.Digest(t) != before {
			t.Fatal("the disk was written")
		}
	})
}
