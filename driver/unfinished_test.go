//go:build linux

package driver

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
)

// strangeBytes looks through all of a disk's file for what no mkfs writes; -1 is nothing.
func strangeBytes(t *testing.T, d *guesttest.Disk) int64 {
	t.Helper()
	guesttest.Run(t, "blockdev", "--flushbufs", d.Loop)
	f, err := os.Open(d.File)
	must(t, err)
	defer func() { _ = f.Close() }()
	m := mkfsTraces{d.SizeBytes, func(offset, n int64) ([]byte, error) {
		b := make([]byte, n)
		_, err := f.ReadAt(b, offset)
		return b, err
	}}
	for at := int64(0); ; {
		from, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return -1
		}
		must(t, err)
		b := make([]byte, min(zeroChunk, d.SizeBytes-from))
		_, err = f.ReadAt(b, from)
		must(t, err)
		i, err := m.foreign(b, from)
		must(t, err)
		if i >= 0 {
			return from + int64(i)
		}
		at = from + int64(len(b))
	}
}

// TestAllThatAMkfsWritesIsKnownAsItsOwn holds what the repetition of a format relies on: a disk
// that is refused although nothing but our mkfs has written there would stay refused. The long
// form, with PROOF_DURATION set, tries every size.
func TestAllThatAMkfsWritesIsKnownAsItsOwn(t *testing.T) {
	sizes := []int64{64 * guesttest.MiB, 300 * guesttest.MiB, guesttest.GiB, 10 * guesttest.GiB}
	if os.Getenv("PROOF_DURATION") != "" {
		sizes = append(sizes, 128*guesttest.MiB, 3*guesttest.GiB, 100*guesttest.GiB, 1023*guesttest.GiB)
	}
	made := 0
	for _, size := range sizes {
		for _, fsType := range volume.Filesystems {
			for _, options := range slotOptions(fsType, size) {
				for _, block := range volume.BlockSizes {
					name := fmt.Sprintf("%s of %d MiB with %q and blocks of %d", fsType, size/guesttest.MiB, options,
						block)
					t.Run(name, func(t *testing.T) {
						if mkfsIsKnown(t, fsType, options, size, block) {
							made++
						}
					})
				}
			}
		}
	}
	if made < 20 {
		t.Fatalf("only %d filesystems could be made", made)
	}
}

// mkfsIsKnown makes a filesystem and fails the test for a byte that is not known as mkfs's. It
// returns false if mkfs takes no such disk.
func mkfsIsKnown(t *testing.T, fsType, options string, size int64, block int) (made bool) {
	t.Helper()
	g := newGuest(t)
	d := g.Attach(testSerial, size, "--sector-size", strconv.Itoa(block))
	var err error
	v := fsVolume{ID: g.volume(d, fsType).ID, FSType: fsType}
	v.Mkfs, err = volume.ParseMkfsOptions(options)
	must(t, err)
	name, args, err := mkfsCommand(v)
	must(t, err)
	result, err := runTool(nil, name, append(args, d.Loop)...)
	if must(t, err); result.Exit != 0 {
		return false
	}
	if at := strangeBytes(t, d); at >= 0 {
		spot := d.ReadAt(t, at&^(spotBytes-1), spotBytes)
		for unit := range slices.Chunk(spot, extBytes) {
			if nonZero(unit) >= 0 && !extUnit(unit, uint64(size)/extBytes) {
				t.Fatalf("at %d: %x", at, unit)
			}
		}
		t.Fatalf("at %d: %x", at, spot)
	}
	return true
}

func TestWhatAMkfsDoesNotWriteIsKnownAsForeign(t *testing.T) {
	random := make([]byte, spotBytes)
	for i := range random {
		random[i] = byte(rand.New(rand.NewPCG(1, uint64(i))).Uint32())
	}
	text := []byte(strings.Repeat("All that a workload has written stays. ", 128))[:spotBytes]
	one := make([]byte, spotBytes)
	copy(one[700:], text[:100])
	boot := make([]byte, spotBytes)
	boot[5] = 1
	for _, c := range []struct {
		name string
		spot []byte
		at   int64
	}{
		{"random bytes", random, 8 << 20},
		{"one value", bytes.Repeat([]byte{0xAA}, spotBytes), 8 << 20},
		{"a text", text, 8 << 20},
		{"a hundred bytes of text", one, 8 << 20},
		{"a single byte at the start of the disk", boot, 0},
		{"a superblock with something before it", slices.Concat(text[:extOffset],
			make([]byte, spotBytes-extOffset)), 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := mkfsTraces{guesttest.GiB, func(_, n int64) ([]byte, error) { return make([]byte, n), nil }}
			i, err := m.foreign(slices.Concat(make([]byte, spotBytes), c.spot), c.at-spotBytes)
			if c.at == 0 {
				i, err = m.foreign(c.spot, 0)
				i += spotBytes
			}
			if must(t, err); i < spotBytes {
				t.Fatalf("it was taken for a mkfs's: %d", i)
			}
		})
	}
}

// cutOffDisk is a volume whose disk carries the marks of a format that was cut off, and all that
// mkfs makes; whole says that it was not made blank.
func cutOffDisk(t *testing.T, whole bool) testVolume {
	t.Helper()
	g := newGuest(t)
	v := g.volume(g.Attach(testSerial, 256*guesttest.MiB), volume.Ext4)
	v.Whole = whole
	cutOff(t, `"$real" "$@" && exit 1`, v.stage)
	return v
}

func TestAMarkMakesNobodyElsesBytesTheDriversOwn(t *testing.T) {
	foreign := bytes.Repeat([]byte("what a workload has written. "), 40000)
	for _, c := range []struct {
		name  string
		whole bool
		at    int64
		bytes []byte
	}{
		{"at the start, over all that mkfs made", false, 0, foreign},
		{"in the boot block", false, 0, []byte{1}},
		{"in the boot block of a disk that is read whole", true, 0, []byte{1}},
		{"behind the first MiB of a disk that is read whole", true, 5*guesttest.MiB + 512, foreign[:512]},
		{"in the midst of a disk that is read whole", true, 100 * guesttest.MiB, foreign[:512]},
		{"at the end of a disk that is read whole", true, 256*guesttest.MiB - 512, foreign[:512]},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := cutOffDisk(t, c.whole)
			v.disk.WriteAt(t, c.at, c.bytes)
			before := v.disk.Digest(t)
			csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DiskNotBlank)
			if v.disk.Digest(t) != before {
				t.Fatal("the disk was written")
			}
		})
	}
	for _, whole := range []bool{false, true} {
		t.Run(fmt.Sprint("without them the format is done again, read whole: ", whole),
			func(t *testing.T) {
				v := cutOffDisk(t, whole)
				must(t, v.stage())
				v.lives(t)
			})
	}
}

func TestTheMarksAreGoneBeforeADeviceIsShownAsOne(t *testing.T) {
	for name, show := range map[string]func(v testVolume) error{
		"staged":              func(v testVolume) error { return v.stage() },
		"published":           func(v testVolume) error { return v.publish("dev") },
		"published read-only": func(v testVolume) error { return v.publishReadOnly("dev") },
	} {
		for _, script := range []string{"exit 1", `"$real" "$@" && exit 1`} {
			t.Run(fmt.Sprintf("%s, after a mkfs of %q", name, script), func(t *testing.T) {
				g := newGuest(t)
				v := g.volume(g.Attach(testSerial, 256*guesttest.MiB), volume.Ext4)
				v.Whole = true
				cutOff(t, script, v.stage)
				if marksOn(t, v.disk) == 0 {
					t.Fatal("no mark is on the disk")
				}
				raw := v
				raw.FSType = "block"
				must(t, show(raw))
				if n := marksOn(t, v.disk); n != 0 {
					t.Fatalf("%d marks are left", n)
				}
			})
		}
	}
	t.Run("and what was written to it then is not formatted", func(t *testing.T) {
		v := cutOffDisk(t, true)
		raw := v
		raw.FSType = "block"
		must(t, raw.stage())
		must(t, raw.publish("dev"))
		v.disk.WriteAt(t, 0, bytes.Repeat([]byte("raw "), 16*guesttest.MiB))
		must(t, raw.unpublish("dev"))
		must(t, raw.unstage())
		before := v.disk.Digest(t)
		csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DiskNotBlank)
		if v.disk.Digest(t) != before {
			t.Fatal("the disk was written")
		}
	})
	t.Run("but a file that holds one keeps its bytes", func(t *testing.T) {
		g := newGuest(t)
		v := g.volume(g.Attach(testSerial, 64*guesttest.MiB), volume.Ext4)
		v.Whole = true
		v.Context = map[string]string{volume.CtxMkfsOptions: "fsBlockSize=4096"}
		must(t, v.stage())
		fill(t, filepath.Join(v.staging(), "marks"), v.mark(t))
		must(t, v.unstage())
		before := v.disk.Digest(t)
		raw := v
		raw.FSType = "block"
		must(t, raw.publish("dev"))
		must(t, raw.unpublish("dev"))
		if v.disk.Digest(t) != before {
			t.Fatal("the disk was written")
		}
	})
}
