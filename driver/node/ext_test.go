//go:build linux

package node

import (
	"encoding/binary"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

func TestAnExtThatMeetsAnErrorTurnsReadOnly(t *testing.T) {
	for _, fsType := range []string{volume.Ext3, volume.Ext4} {
		t.Run(fsType, func(t *testing.T) {
			g := newGuest(t)
			v := g.volume(g.Attach(guesttest.Serial, 64*guesttest.MiB), fsType)
			must(t, v.stage())
			const behaviour, remountReadOnly = 0x3C, 2
			b := v.disk.ReadAt(t, 1024, 1024)
			if got := binary.LittleEndian.Uint16(b[behaviour:]); got != remountReadOnly {
				t.Fatalf("the behaviour at errors is %d, want %d", got, remountReadOnly)
			}
		})
	}
}

func TestABigallocIsMountedAsItIs(t *testing.T) {
	bigalloc := func(t *testing.T) testVolume {
		g := newGuest(t)
		v := g.volume(g.Attach(guesttest.Serial, 6*guesttest.GiB), volume.Ext4)
		guesttest.Run(t, "mke2fs", "-q", "-t", "ext4", "-b", "4096", "-O", "bigalloc", v.disk.Loop, "1G")
		return v
	}
	t.Run("a bigalloc on a larger disk is not grown", func(t *testing.T) {
		v := bigalloc(t)
		for range 2 {
			must(t, v.stage())
			must(t, v.unstage())
		}
		v.check(t)
		for _, slot := range filesystem.GrowthOffsets(v.disk.SizeBytes) {
			if hasRecord(t, v.disk, slot) {
				t.Fatalf("a mark is left at %d", slot)
			}
		}
	})
	t.Run("a growth that an older driver has begun is given up", func(t *testing.T) {
		v := bigalloc(t)
		nv, err := parseVolume(v.ID, v.capability(), v.published(), v.Context)
		must(t, err)
		m := filesystem.RecordOf(nv.Volume)
		m.GrowFrom, m.Checked = guesttest.GiB, true
		b, err := m.Encode()
		must(t, err)
		for _, slot := range filesystem.GrowthOffsets(v.disk.SizeBytes) {
			v.disk.WriteAt(t, slot, b)
		}
		must(t, v.stage())
		must(t, v.unstage())
		v.check(t)
		if hasRecord(t, v.disk, filesystem.GrowthOffsets(v.disk.SizeBytes)[0]) {
			t.Fatal("a mark is left")
		}
	})
}
