//go:build linux

package dataplane

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

// TestNextNonZeroFindsTheBlocksThatWereWritten tests the search for systems that report no holes.
func TestNextNonZeroFindsTheBlocksThatWereWritten(t *testing.T) {
	f := must(os.Create(filepath.Join(t.TempDir(), "disk")))(t)
	defer f.Close()
	const block = 64 << 10
	for _, at := range []int64{block, 2*block + 5, 9*block - 1} {
		must(f.WriteAt([]byte{1}, at))(t)
	}
	for _, c := range []struct {
		size int64
		want [][2]int64
	}{{10*block + 7, [][2]int64{{block, 2 * block}, {2 * block, 3 * block}, {8 * block, 9 * block}}},
		{9 * block, [][2]int64{{block, 2 * block}, {2 * block, 3 * block}, {8 * block, 9 * block}}},
		{2*block + 10, [][2]int64{{block, 2 * block}, {2 * block, 2*block + 10}}}, {block, nil},
		{0, nil}} {
		simtest.NoError(t, f.Truncate(c.size))
		var got [][2]int64
		for at := int64(0); ; at = got[len(got)-1][1] {
			start, end, err := nextNonZero(f, at)
			if errors.Is(err, errNoData) {
				break
			}
			simtest.NoError(t, err)
			got = append(got, [2]int64{start, end})
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("in a file of %d bytes the data are %v, want %v", c.size, got, c.want)
		}
	}
}

func TestACloneHasTheBytesAndHolesOfItsSourceAndItsOwnSize(t *testing.T) {
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			p, id := newPlaneOn(t, fsType), newID()
			source := filepath.Join(t.TempDir(), "image.raw") // the source is on another filesystem
			f := must(os.Create(source))(t)
			defer f.Close()
			want := bytes.Repeat([]byte("oxide"), 50_000)
			for _, at := range []int64{0, 40 << 20, 200<<20 - int64(len(want))} {
				must(f.WriteAt(want, at))(t)
			}
			const size = 200 << 20
			simtest.NoError(t, p.ImportImage(t.Context(), id, source, size))
			simtest.NoError(t, p.CloneDisk(t.Context(), id, p.ImagePath(id), 2*size))
			clone := must(os.ReadFile(p.DiskPath(id)))(t)
			original := must(os.ReadFile(source))(t)
			if !bytes.Equal(clone[:size], original) || len(clone) != 2*size {
				t.Errorf("the clone of %d bytes differs from its source", len(clone))
			}
			if n := must(p.Allocated(id))(t); n > 4<<20 {
				t.Errorf("the clone takes %d bytes: its holes were filled", n)
			}
		})
	}
}

func TestImagesFromAPipeOrLargerThanTheirDiskAreRefused(t *testing.T) {
	p, id := newPlane(t), newID()
	simtest.NoError(t, p.ImportImage(t.Context(), id, "", 1<<20))
	if err := p.CloneDisk(t.Context(), id, p.ImagePath(id), 1<<19); err == nil {
		t.Error("a clone smaller than its source was made")
	}
	pipe := filepath.Join(t.TempDir(), "pipe")
	simtest.NoError(t, unix.Mkfifo(pipe, 0o600))
	if err := p.ImportImage(t.Context(), newID(), pipe, 1<<20); err == nil {
		t.Error("an image was made of a pipe")
	}
}

// TestASnapshotOfADiskInUseIsAPointInTime has a writer that writes each number to the first block
// of a disk and then to the last one, durably. In a snapshot the last block must not be ahead of
// the first one, and neither may be older than the last number that was written before the
// snapshot. The disks are on two filesystems with reflinks and one without.
func TestASnapshotOfADiskInUseIsAPointInTime(t *testing.T) {
	places := []int64{0, testDiskSize - 4096}
	for _, host := range []string{"xfs", "btrfs", "ext4"} {
		t.Run(host, func(t *testing.T) {
			p := newPlaneOn(t, host)
			spec := plugDisk(t, p, newGuest(t, p), "busy")
			disk := must(os.OpenFile(nodeOf(t, p, spec.InstanceID), os.O_WRONLY|unix.O_DSYNC, 0))(t)
			defer disk.Close()
			// The bytes between the blocks make a copy take longer, so that the writer writes during it.
			must(disk.WriteAt(bytes.Repeat([]byte("x"), testDiskSize/2), 4096))(t)
			ctx, cancel := context.WithCancel(t.Context())
			var synced atomic.Uint64
			var writer sync.WaitGroup
			writer.Go(func() {
				for n := uint64(1); ctx.Err() == nil; n++ {
					if host == "ext4" && n%20 == 0 {
						_ = pause(ctx, time.Second) // a copy needs a pause of the writer
					}
					for _, at := range places {
						if _, err := disk.WriteAt(binary.LittleEndian.AppendUint64(nil, n), at); err != nil {
							t.Error(err)
							return
						}
					}
					synced.Store(n)
				}
			})
			defer writer.Wait()
			defer cancel()
			for range 3 {
				snapshot, before := newID(), synced.Load()
				simtest.NoError(t, p.SnapshotDisk(t.Context(), snapshot, spec.DiskID))
				content := must(os.ReadFile(p.SnapshotPath(snapshot)))(t)
				first := binary.LittleEndian.Uint64(content[places[0]:])
				last := binary.LittleEndian.Uint64(content[places[1]:])
				if first != last && first != last+1 || last < before {
					t.Errorf("the snapshot holds %d and %d, after %d was synced: no point in time", first,
						last, before)
				}
			}
		})
	}
}

func TestASnapshotNeedsTheCountersOfTheDevice(t *testing.T) {
	p := newPlaneOn(t, "ext4")
	id := newGuest(t, p)
	spec, snapshot := newDisk(t, p, id, "uncounted"), newID()
	simtest.NoError(t, p.Plug(spec, Fault{}))
	loop := p.guests.disk(spec.DiskID).loop
	counters := fmt.Sprintf("/sys/block/loop%d/queue/iostats", loop.Number)
	simtest.NoError(t, os.WriteFile(counters, []byte("0"), 0))
	// Later users of the device need the counters.
	defer func() { simtest.NoError(t, os.WriteFile(counters, []byte("1"), 0)) }()
	err := p.SnapshotDisk(t.Context(), snapshot, spec.DiskID)
	if !errors.Is(err, ErrWrittenMeanwhile) || exists(p.SnapshotPath(snapshot)) {
		t.Errorf("snapshotDisk = %v, want ErrWrittenMeanwhile and no snapshot", err)
	}
}
