//go:build linux

package filesystem

import (
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// acceptedFlags returns the mount flags of a filesystem, with the values at the ends of their
// ranges.
func acceptedFlags(t *testing.T, fsType string) []string {
	t.Helper()
	candidates := strings.Fields("journal ordered writeback abort ignore remount-ro v2 sync async " +
		"zlib zlib:1 zlib:9 lzo zstd zstd:1 zstd:15 no none 16k 64K 256k 1m 1g")
	var numbers []int
	for n := range 1025 {
		numbers = append(numbers, n)
	}
	for n := range 32 {
		numbers = append(numbers, 1<<n-1, 1<<n)
	}
	numbers = append(numbers, 1000000)
	slices.Sort(numbers)
	set := volume.FilesystemFlags[fsType]
	flags := slices.Concat(set.Words, strings.Fields("ro noatime sync dirsync lazytime nosymfollow"))
	for name, values := range set.Values {
		before := len(flags)
		for _, value := range candidates {
			if values.Contains(value) {
				flags = append(flags, name+"="+value)
			}
		}
		takesNumber := func(n int) bool { return values.Contains(strconv.Itoa(n)) }
		if least := slices.IndexFunc(numbers, takesNumber); least >= 0 {
			flags = append(flags, fmt.Sprint(name, "=", numbers[least]))
			slices.Reverse(numbers)
			most := numbers[slices.IndexFunc(numbers, takesNumber)]
			flags = append(flags, fmt.Sprint(name, "=", most))
			slices.Reverse(numbers)
		}
		if len(flags) == before {
			t.Fatalf("no value of %s is tried", name)
		}
	}
	slices.Sort(flags)
	return slices.Compact(flags)
}

// TestAFreshFilesystemMountsWithTheAcceptedFlags mounts with each accepted flag and pair of flags,
// also with the options for a read-only disk.
func TestAFreshFilesystemMountsWithTheAcceptedFlags(t *testing.T) {
	for _, fsType := range volume.Filesystems {
		t.Run(fsType, func(t *testing.T) {
			d := openDisk(t, 512*guesttest.MiB)
			name, args, err := mkfsCommand(Volume{FSType: fsType})
			csitest.Must(t, err)
			guesttest.Run(t, name, append(args, d.Path)...)
			flags := acceptedFlags(t, fsType)
			var pairs [][]string
			for _, first := range flags {
				for _, second := range flags {
					if first != second {
						pairs = append(pairs, []string{first, second})
					}
				}
			}
			tried := slices.Collect(slices.Chunk(flags, 1))
			for _, flags := range append(tried, short.Some(t, 100, pairs)...) {
				o, err := volume.ParseMountFlags(fsType, flags)
				if err != nil && len(flags) == 2 {
					continue // they contradict each other
				}
				csitest.Must(t, err)
				m, err := Mount(d, fsType, o)
				if err != nil {
					t.Errorf("with %q: %v", flags, err)
					continue
				}
				csitest.Must(t, m.Close())
				o.SetReadOnly()
				csitest.Must(t, d.SetReadOnly(true))
				m, err = Mount(d, fsType, o)
				csitest.Must(t, d.SetReadOnly(false))
				if err != nil {
					t.Errorf("read-only, with %q: %v", flags, err)
					continue
				}
				csitest.Must(t, m.Close())
			}
		})
	}
}

// The user that kept the device busy may end while the driver looks for a frozen filesystem. The
// driver must not replay a log then, because the disk may belong to a workload with a raw device.
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
			guesttest.Run(t, "dd", "if="+d.File+".cut", "of="+d.Loop, "bs=1M", "conv=fsync", "status=none")
			same := d.Same(t)
			device := openLocked(t.Context(), t, g)
			csitest.Must(t, thawUnmounted(slog.Default(), device))
			csitest.Must(t, device.Close())
			same()
		})
	}
}
