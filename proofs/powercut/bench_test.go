//go:build linux

package powercut_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"runtime/metrics"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/history"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
)

// bench is a guest with a driver in it, to which one disk after the other is attached.
type bench struct {
	*proof.Bench
	disks   *flakydisk.Server
	formats proof.Formats
	shown   int
}

// newBench starts a driver: the given program, or the run's driver.
func newBench(ctx context.Context, run *harness.Run, program string, env map[string]string) (
	b *bench, err error) {
	defer harness.Catch(&err)
	b = &bench{Bench: harness.Got(proof.StartBench(ctx, run, program, env))}
	b.formats = harness.Got(proof.CountFormats(b.Bin))
	disks := filepath.Join(b.Dir, "disks")
	harness.Must(os.Mkdir(disks, 0o755))
	b.disks = harness.Got(flakydisk.Mount(disks))
	return b, nil
}

// close ends the driver and its disks. It returns an error if the driver fails.
func (b *bench) close() error { return errors.Join(b.Close(), b.disks.Close()) }

// placement is a volume whose disk is attached to the guest.
type placement struct {
	harness.Placement
	volume volume
	bench  *bench
	disk   *flakydisk.Disk
	loop   loopdev.Device
	file   string
	dir    string
}

var (
	// inUse is read-locked while a disk is attached.
	inUse sync.RWMutex
	// collected is the number of bytes that had been allocated at the last garbage collection.
	collected atomic.Uint64
)

// collect collects garbage if much memory was allocated since the last collection. It waits until
// no disk is attached: a collection would stop the threads that serve disks, and wait for threads
// that wait for a disk in the kernel.
func collect() {
	const much = 128 * mib
	allocated := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(allocated)
	last, now := collected.Load(), allocated[0].Value.Uint64()
	if now > last+much && collected.CompareAndSwap(last, now) {
		inUse.Lock()
		defer inUse.Unlock()
		runtime.GC()
	}
}

// peakMiB returns the most memory that this process has had.
func peakMiB() (int64, error) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	_, peak, _ := strings.Cut(string(status), "\nVmHWM:")
	var kib int64
	_, err = fmt.Sscan(peak, &kib)
	return kib / 1024, err
}

// shownEntries is the number of entries of a disk's log that a page shows before the power cut.
const shownEntries = 12

// cut begins the history of an image with the last entries of the disk's log before the power cut.
func (b *bench) cut(m image) {
	b.Plugin.History.Begin()
	for _, e := range m.of.log[max(0, m.at-shownEntries):m.at] {
		what := []string{"write", "discard", "flush", "read", "note"}[e.Kind]
		b.Plugin.History.Mark(history.Disk, fmt.Sprintf("%s %d bytes at %d %s", what, e.Bytes, e.Offset,
			e.Text))
	}
	b.Plugin.History.Mark(history.Disk, "power cut: "+m.name)
}

// draw draws the page of the last image, and returns its path.
func (b *bench) draw(ctx context.Context, p *proof.Proof, dir string, seed uint64,
	broken error) string {
	return p.Draw(ctx, proof.Failure{Name: fmt.Sprintf("seed %d, volume %d of %s", seed, b.shown,
		filepath.Base(b.Dir)), Seed: seed, Broken: broken, Dir: dir,
		Repeat:  fmt.Sprintf("make powercut SEED=%d", seed),
		Plugins: []*harness.Plugin{b.Plugin}, History: b.Plugin.History})
}

// show attaches a disk to the guest. As on another instance, the driver has no record of the
// volume.
func (b *bench) show(ctx context.Context, v volume, disk *flakydisk.Disk) (p *placement,
	err error) {
	collect()
	inUse.RLock()
	b.shown++
	p = &placement{volume: v, bench: b, disk: disk,
		file: fmt.Sprint(loopdev.Process(), ".disk-", b.shown),
		dir:  filepath.Join(b.Dir, fmt.Sprint("volume-", b.shown))}
	p.Placement = harness.Placement{Volume: &csi.Volume{VolumeId: v.id},
		Capability: harness.Access(v.access), PublishContext: v.context(disk.Size()),
		Staging: filepath.Join(p.dir, "staging"), Target: filepath.Join(p.dir, "pod", "target")}
	defer harness.Catch(&err)
	known := harness.Got(filepath.Glob(filepath.Join(b.Plugin.Dir, "volumes", "*"+v.id+"*")))
	if len(known) > 0 {
		return p, fmt.Errorf("the driver has records of the volume: %q", known)
	}
	harness.Must(p.MakeDirs())
	p.loop = harness.Got(loopdev.Attach(ctx, loopdev.Config{Path: b.disks.Put(p.file, disk),
		Serial: fmt.Sprintf("powercut-%016x", rand.Uint64()), Owner: loopdev.Process()}))
	return p, errors.Join(b.Guest.Plug("nvme1n1", v.disk, p.loop), b.Bystanders.Show())
}

// hide removes the mounts that a failed call has left, and detaches the disk.
func (p *placement) hide() error {
	defer inUse.RUnlock()
	p.disk.Heal()
	errs := []error{proof.UnmountBelow(p.dir), p.bench.Guest.Unplug()}
	if p.loop.Path != "" {
		errs = append(errs, p.loop.Detach(context.Background()))
	}
	p.bench.disks.Remove(p.file)
	return errors.Join(append(errs, os.RemoveAll(p.dir))...)
}

func (p *placement) stage(ctx context.Context) error {
	return p.bench.Do(ctx, "stage", p.Stage)
}

func (p *placement) publish(ctx context.Context) error {
	return p.bench.Do(ctx, "publish", p.Publish)
}

func (p *placement) unpublish(ctx context.Context) error {
	return p.bench.Do(ctx, "unpublish", p.Unpublish)
}

func (p *placement) unstage(ctx context.Context) error {
	return p.bench.Do(ctx, "unstage", p.Unstage)
}

// staged returns an error unless the volume's filesystem is mounted at the staging path. For a
// raw volume, nothing may be mounted there.
func (p *placement) staged() error {
	mounts, err := harness.MountsAt(p.Staging)
	switch {
	case err != nil:
		return err
	case p.volume.raw() && len(mounts) == 0:
		return nil
	case len(mounts) != 1 || mounts[0].FSType != p.volume.access:
		return fmt.Errorf("%d mounts at the staging path, want one of %s", len(mounts), p.volume.access)
	}
	return nil
}

const (
	ext3  = "ext3"
	ext4  = "ext4"
	xfs   = "xfs"
	btrfs = "btrfs"
	raw   = "block"
)

// filesystems are the filesystems of volumes.
var filesystems = []string{ext3, ext4, xfs, btrfs}

const mib = 1 << 20

// sizes contains the sizes of disks before they grow. They are small because the driver reads many
// disks whole. mkfs.xfs needs 300 MiB, and a btrfs can only grow to 256 MiB or more.
var sizes = map[string]int64{ext3: 128 * mib, ext4: 128 * mib, xfs: 320 * mib, btrfs: 192 * mib,
	raw: 128 * mib}

// volume contains the values of a volume in requests.
type volume struct {
	id, disk, access string
	// size is the size of the disk before it grows.
	size    int64
	history map[string]string
}

// newVolume returns a volume with a UUID of its own, by which the kernel identifies a btrfs.
func newVolume(access string) volume {
	v := volume{access: access, id: uuid.NewString(), disk: fmt.Sprintf("csi-%016x", rand.Uint64()),
		size: sizes[access], history: map[string]string{"origin": "blank", "use": "filesystem"}}
	if v.raw() {
		v.history["use"] = "block"
	}
	v.history["filesystemUUID"] = v.id
	return v
}

func (v volume) raw() bool { return v.access == raw }

func (v volume) grownTo() int64 { return v.size / 2 * 3 }

// grownAtLeast returns the minimum size of a filesystem that has grown. The size of an xfs does not
// include its log of 64 MiB.
func (v volume) grownAtLeast() int64 { return (v.size + v.grownTo()) / 2 }

// context returns the publish context with which the controller describes the disk.
func (v volume) context(size int64) map[string]string {
	c := map[string]string{"diskName": v.disk, "sizeBytes": fmt.Sprint(size)}
	maps.Copy(c, v.history)
	return c
}
