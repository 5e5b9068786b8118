//go:build linux

package filesystem

import (
	"log/slog"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// Whoever had the device may have gone when the driver looks for a frozen filesystem. What is there
// then, perhaps a raw workload's, is not replayed.
func TestNoJournalIsReplayedToFindAFrozenFilesystem(t *testing.T) {
	sizes := map[string]int64{volume.Ext3: 64 * guesttest.MiB, volume.Ext4: 64 * guesttest.MiB,
		volume.XFS: 300 * guesttest.MiB, volume.Btrfs: 128 * guesttest.MiB}
	for _, fsType := range volume.Filesystems {
		t.Run(fsType, func(t *testing.T) {
			g := guesttest.New(t)
			d := g.Attach(guesttest.Serial, sizes[fsType])
			guesttest.Run(t, "mkfs."+fsType, "-q", d.Loop)
			dir := t.TempDir()
			guesttest.Run(t, "mount", "-o", "noatime", d.Loop, dir)
			guesttest.Run(t, "dd", "if=/dev/urandom", "of="+dir+"/file", "bs=64k", "count=4",
				"conv=fsync", "status=none")
			guesttest.Run(t, "cp", "--sparse=always", d.File, d.File+".cut")
			csitest.Must(t, unix.Unmount(dir, 0))
			guesttest.Run(t, "dd", "if="+d.File+".cut", "of="+d.Loop, "bs=1M", "conv=fsync",
				"status=none")
			before := d.Digest(t)
			host := blockdev.Host{Sysfs: g.Sys(""), Dev: g.Dev("")}
			found, err := host.Lookup(d.Serial)
			csitest.Must(t, err)
			device, err := host.OpenLocked(t.Context(), found, false)
			csitest.Must(t, err)
			csitest.Must(t, thawUnmounted(slog.Default(), device))
			csitest.Must(t, device.Close())
			if d.Digest(t) != before {
				t.Error("the disk was written")
			}
		})
	}
}
