//go:build linux

package filesystem

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// firstUnexplained returns the offset of the first byte in a disk's file, from an offset on, that
// is not expected, or -1.
func firstUnexplained(t *testing.T, d *guesttest.Disk, from int64, e expected) int64 {
	t.Helper()
	guesttest.Run(t, "blockdev", "--flushbufs", d.Loop)
	f, err := os.Open(d.File)
	csitest.Must(t, err)
	defer func() { _ = f.Close() }()
	m := traces{expected: e, sizeBytes: d.SizeBytes, read: func(offset, n int64) ([]byte, error) {
		b := make([]byte, n)
		_, err := f.ReadAt(b, offset)
		return b, err
	}}
	for at := from; ; {
		from, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return -1
		}
		csitest.Must(t, err)
		b := make([]byte, min(chunkBytes, d.SizeBytes-from))
		_, err = f.ReadAt(b, from)
		csitest.Must(t, err)
		i, err := m.check(b, from)
		csitest.Must(t, err)
		if i >= 0 {
			return from + int64(i)
		}
		at = from + int64(len(b))
	}
}

func TestMkfsTracesDoNotExplainOtherData(t *testing.T) {
	random := make([]byte, sectorBytes)
	for i := range random {
		random[i] = byte(rand.New(rand.NewPCG(1, uint64(i))).Uint32())
	}
	text := []byte(strings.Repeat("All that a workload has written stays. ", 128))[:sectorBytes]
	one := make([]byte, sectorBytes)
	copy(one[700:], text[:100])
	boot := make([]byte, sectorBytes)
	boot[5] = 1
	for _, c := range []struct {
		name   string
		sector []byte
		at     int64
	}{
		{"random bytes", random, 8 << 20},
		{"one value", bytes.Repeat([]byte{0xAA}, sectorBytes), 8 << 20},
		{"a text", text, 8 << 20},
		{"a hundred bytes of text", one, 8 << 20},
		{"a single byte at the start of the disk", boot, 0},
		{"a torn text where btrfs has its superblock", slices.Concat(make([]byte, 512), text[512:]),
			btrfsOffset},
		{"a superblock with something before it", slices.Concat(text[:extOffset],
			make([]byte, sectorBytes-extOffset)), 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := traces{expected: expected{Mkfs: true}, sizeBytes: guesttest.GiB,
				read: func(_, n int64) ([]byte, error) { return make([]byte, n), nil }}
			i, err := m.check(slices.Concat(make([]byte, sectorBytes), c.sector), c.at-sectorBytes)
			if c.at == 0 {
				i, err = m.check(c.sector, 0)
				i += sectorBytes
			}
			if csitest.Must(t, err); i < sectorBytes {
				t.Fatalf("it is recognized as written by mkfs: %d", i)
			}
		})
	}
}

// TestTracesExplainTheGrowthOfExt checks what a growth that was cut off relies on: that all that
// resize2fs writes behind the old end of the filesystem is recognized, and nothing else is.
func TestTracesExplainTheGrowthOfExt(t *testing.T) {
	type growth struct {
		fsType, options string
		from, to        int64
	}
	var cases []growth
	for _, fsType := range []string{volume.Ext3, volume.Ext4} {
		for i, options := range slotOptions(fsType, 64*guesttest.MiB) {
			cases = append(cases, growth{fsType, options, 64 * guesttest.MiB, 300 * guesttest.MiB})
			if i <= 1 || os.Getenv("PROOF_DURATION") != "" { // the long form tries them all
				cases = append(cases, growth{fsType, options, guesttest.GiB, 10 * guesttest.GiB})
			}
		}
	}
	for _, c := range short.Some(t, 4, cases) {
		t.Run(fmt.Sprintf("%s with %q from %d to %d MiB", c.fsType, c.options, c.from/guesttest.MiB,
			c.to/guesttest.MiB), func(t *testing.T) {
			d := guesttest.New(t).Attach(guesttest.Serial, c.to)
			v := Volume{ID: zeroVolume, FSType: c.fsType}
			var err error
			v.Mkfs, err = volume.ParseMkfsOptions(c.options)
			csitest.Must(t, err)
			name, args, err := mkfsCommand(v)
			csitest.Must(t, err)
			made, err := runTool(nil, name, append(args, d.Loop, fmt.Sprint(c.from>>10, "k"))...)
			if err != nil || made.Exit != 0 {
				t.Fatal(made, err)
			}
			guesttest.Run(t, "e2fsck", "-f", "-p", d.Loop)
			end := Superblock{Type: c.fsType}.largest(d.SizeBytes)
			guesttest.Run(t, "resize2fs", d.Loop, fmt.Sprint(end>>10, "K"))
			own := expected{Growth: c.fsType, UUID: uuid.MustParse(zeroVolume)}
			if at := firstUnexplained(t, d, c.from, own); at >= 0 {
				t.Errorf("the byte at %d is not recognized: %x", at,
					d.ReadAt(t, at&^(extBytes-1), extBytes))
			}
			if at := firstUnexplained(t, d, end, expected{}); at >= 0 {
				t.Errorf("resize2fs wrote at %d, where the records are", at)
			}
			if at := firstUnexplained(t, d, c.from, expected{}); at < 0 {
				t.Error("resize2fs wrote nothing behind the old end")
			}
			other := own
			other.UUID[0]++
			if at := firstUnexplained(t, d, c.from, other); at < 0 {
				t.Error("the copies of another filesystem's superblock are recognized, too")
			}
		})
	}
}
