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
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

// hosts are the filesystems under the simulator's directory: two with reflinks and one without.
var hosts = []string{"xfs", "btrfs", "ext4"}

// TestASnapshotOfAMountedDiskIsAPointInTime has a writer that writes each number to one file and
// then to another, and syncs both. In a snapshot the second file must not be ahead of the first
// one, and neither may be older than the last number that was synced before the snapshot.
func TestASnapshotOfAMountedDiskIsAPointInTime(t *testing.T) {
	for _, host := range hosts {
		guests := []string{"ext4"}
		if host == "ext4" {
			guests = []string{"ext4", "xfs", "btrfs"}
		}
		for _, guestFS := range guests {
			t.Run(guestFS+" on "+host, func(t *testing.T) {
				p := newPlaneOn(t, host)
				spec := mountedDisk(t, p, guestFS)
				rest := time.Duration(0)
				if host == "ext4" {
					rest = time.Second // a copy needs a pause of the writer, which does not wait for it
				}
				synced, stop := numberInTurn(t, spec.dir, rest)
				snapshots := map[string]uint64{}
				for range 3 {
					snapshot, before := newID(), synced.Load()
					simtest.NoError(t, p.SnapshotDisk(t.Context(), snapshot, spec.DiskID))
					snapshots[snapshot] = before
				}
				stop()
				simtest.Command(t, "umount", spec.dir)
				simtest.NoError(t, p.Unplug(spec.InstanceID, spec.DiskID))
				for snapshot, before := range snapshots {
					checkNumbers(t, p, snapshot, spec.SizeBytes, before)
				}
			})
		}
	}
}

type mountedSpec struct {
	Device
	dir string
}

func mountedDisk(t *testing.T, p *Plane, fsType string) mountedSpec {
	t.Helper()
	id := newGuest(t, p)
	spec := Device{InstanceID: id, DiskID: newID(), DiskName: "d" + newID()[:18],
		SizeBytes: 320 << 20, BlockSize: 512}
	simtest.NoError(t, p.CreateDisk(spec.DiskID, spec.SizeBytes))
	simtest.NoError(t, p.Plug(spec, Fault{}))
	node, dir := nodeOf(t, p, id), t.TempDir()
	simtest.Command(t, "mkfs."+fsType, "-q", node)
	simtest.Mount(t, node, dir)
	return mountedSpec{spec, dir}
}

// numberInTurn writes numbers to two files alternately, and syncs each number before the next. It
// rests after every twentieth. synced is the last number in both files.
func numberInTurn(t *testing.T, dir string, rest time.Duration) (synced *atomic.Uint64,
	stop func()) {
	t.Helper()
	var files [2]*os.File
	for i, name := range []string{"first", "second"} {
		f, err := os.Create(filepath.Join(dir, name))
		simtest.NoError(t, err)
		_, err = f.WriteAt(make([]byte, 8), 0)
		simtest.NoError(t, err)
		simtest.NoError(t, f.Sync())
		files[i] = f
		// The ballast between the two files makes the copy take longer, so that the writer can write
		// during it.
		ballast := bytes.Repeat([]byte("x"), 32<<20)
		simtest.NoError(t, os.WriteFile(filepath.Join(dir, name+".ballast"), ballast, 0o600))
	}
	simtest.Command(t, "sync", "-f", dir)
	ctx, cancel := context.WithCancel(t.Context())
	synced = new(atomic.Uint64)
	var writer sync.WaitGroup
	writer.Go(func() {
		for n := uint64(1); ctx.Err() == nil; n++ {
			if n%20 == 0 {
				_ = pause(ctx, rest)
			}
			for _, f := range files {
				_, err := f.WriteAt(binary.LittleEndian.AppendUint64(nil, n), 0)
				if err := errors.Join(err, f.Sync()); err != nil {
					t.Error(err)
					return
				}
			}
			synced.Store(n)
		}
	})
	return synced, func() {
		cancel()
		writer.Wait()
		files[0].Close()
		files[1].Close()
	}
}

// checkNumbers restores the snapshot and checks the writer's numbers in it.
func checkNumbers(t *testing.T, p *Plane, snapshot string, size int64, synced uint64) {
	t.Helper()
	id := newGuest(t, p)
	spec := Device{InstanceID: id, DiskID: newID(), DiskName: "restored",
		SizeBytes: size, BlockSize: 512}
	simtest.NoError(t, p.CloneDisk(t.Context(), spec.DiskID, p.SnapshotPath(snapshot), size))
	simtest.NoError(t, p.Plug(spec, Fault{}))
	node, dir := nodeOf(t, p, id), t.TempDir()
	simtest.Mount(t, node, dir)
	var numbers [2]uint64
	for i, name := range []string{"first", "second"} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		simtest.NoError(t, err)
		numbers[i] = binary.LittleEndian.Uint64(b)
	}
	if a, b := numbers[0], numbers[1]; a != b && a != b+1 || b < synced {
		t.Errorf("the snapshot holds %d and %d, after %d was synced: no point in time", a, b, synced)
	}
	simtest.Command(t, "umount", dir)
	simtest.NoError(t, p.Unplug(id, spec.DiskID))
	simtest.NoError(t, p.RemoveDisk(spec.DiskID))
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
