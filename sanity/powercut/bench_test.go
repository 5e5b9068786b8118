//go:build linux

package powercut_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/metrics"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/proof"
)

// bench is a guest with a driver in it, which sees one disk after the other.
type bench struct {
	dir    string
	guest  proof.Guest
	disks  *flakydisk.Server
	plugin *harness.Plugin
	// formats has a line for each mkfs that the driver ran.
	formats string
	shown   int
	// bystanders are other disks of the guest, which no call may change.
	bystanders *proof.GuestBystanders
	// forged counts comparisons of files with forged records.
	forged *proof.Invariant
}

// newBench starts a driver: the run's own, or the program.
func newBench(ctx context.Context, run *harness.Run, program string, env ...string) (*bench,
	error) {
	dir, err := os.MkdirTemp(run.Dir, "bench-")
	if err != nil {
		return nil, err
	}
	b := &bench{dir: dir, formats: filepath.Join(dir, "formats"),
		bystanders: &proof.GuestBystanders{}, forged: &proof.Invariant{}}
	bin, disks := filepath.Join(dir, "bin"), filepath.Join(dir, "disks")
	err = errors.Join(os.Mkdir(bin, 0o755), os.Mkdir(disks, 0o755),
		os.WriteFile(b.formats, nil, 0o600))
	for _, mkfs := range []string{"mke2fs", "mkfs.xfs", "mkfs.btrfs"} {
		real, missing := exec.LookPath(mkfs)
		script := fmt.Sprintf("#!/bin/sh\necho >>'%s'\nexec '%s' \"$@\"\n", b.formats, real)
		err = errors.Join(err, missing, os.WriteFile(filepath.Join(bin, mkfs), []byte(script), 0o755))
	}
	if err != nil {
		return nil, err
	}
	if b.guest, err = proof.NewGuest(filepath.Join(dir, "guest")); err != nil {
		return nil, fmt.Errorf("make a guest: %w", err)
	}
	if b.disks, err = flakydisk.Mount(disks); err != nil {
		return nil, err
	}
	all := map[string]string{
		"OXIDE_INSTANCE_ID": proof.InstanceID,
		"OXIDE_SYSFS_ROOT":  b.guest.Sys(""),
		"OXIDE_DEV_ROOT":    b.guest.Node(""),
		"PATH":              bin + ":" + os.Getenv("PATH"),
		// Nothing here appears later than it is asked for.
		"OXIDE_DEVICE_TIMEOUT": "20ms",
	}
	for i := 0; i+1 < len(env); i += 2 {
		all[env[i]] = env[i+1]
	}
	options := harness.PluginOptions{Mode: harness.ModeNode, Env: all}
	if program != "" {
		options.Command = []string{program}
	}
	b.plugin, err = run.StartPlugin(ctx, options)
	return b, err
}

// close ends the driver, which must end well.
func (b *bench) close() error {
	return errors.Join(b.plugin.Stop(), b.disks.Close(), b.bystanders.Close())
}

// addBystanders gives the guest bystanders.
func (b *bench) addBystanders(ctx context.Context, member proof.Member, count *proof.Invariant) (
	err error) {
	b.bystanders, err = proof.NewGuestBystanders(ctx, b.guest, filepath.Join(b.dir, "bystanders"),
		member, count)
	return err
}

// formatted returns how many times the driver has run a mkfs.
func (b *bench) formatted() (int, error) {
	text, err := os.ReadFile(b.formats)
	return bytes.Count(text, []byte("\n")), err
}

// placement is a volume whose disk the guest sees.
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
	// inUse is held for reading while a disk is shown.
	inUse sync.RWMutex
	// collected is how many bytes had been allocated at the last collection.
	collected atomic.Uint64
)

// collect collects garbage, if there may be much of it, while no disk is shown: a collection stops
// all threads that serve disks, and waits for those that the kernel may let wait for a disk.
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

// show lets the guest see a disk. It knows nothing of the volume: it is another instance than the
// one before.
func (b *bench) show(ctx context.Context, v volume, disk *flakydisk.Disk) (*placement, error) {
	collect()
	inUse.RLock()
	b.shown++
	p := &placement{volume: v, bench: b, disk: disk,
		file: fmt.Sprint(loopdev.Process(), ".disk-", b.shown),
		dir:  filepath.Join(b.dir, fmt.Sprint("volume-", b.shown))}
	p.Placement = harness.Placement{Volume: &csi.Volume{VolumeId: v.id},
		Capability: harness.Access(v.access), PublishContext: v.context(disk.Size()),
		Staging: filepath.Join(p.dir, "staging"), Target: filepath.Join(p.dir, "pod", "target")}
	known, err := filepath.Glob(filepath.Join(b.plugin.Dir, "volumes", "*"+v.id+"*"))
	if err != nil || len(known) > 0 {
		return p, errors.Join(err, fmt.Errorf("this instance remembers the volume in %q", known))
	}
	if err := p.MakeDirs(); err != nil {
		return p, err
	}
	p.loop, err = loopdev.Attach(ctx, loopdev.Config{Path: b.disks.Put(p.file, disk),
		Serial: "powercut-" + rand.Text()[:16], Owner: loopdev.Process()})
	if err != nil {
		return p, err
	}
	return p, errors.Join(b.guest.Plug("nvme1n1", v.disk, p.loop), b.bystanders.Show())
}

// hide takes the disk away, after everything that a failed call has left of it.
func (p *placement) hide() error {
	defer inUse.RUnlock()
	p.disk.Heal()
	errs := []error{proof.UnmountBelow(p.dir), p.bench.guest.Unplug()}
	if p.loop.Path != "" {
		errs = append(errs, p.loop.Detach(context.Background()))
	}
	p.bench.disks.Remove(p.file)
	return errors.Join(append(errs, os.RemoveAll(p.dir))...)
}

func (p *placement) stage(ctx context.Context) error {
	return p.bench.bystanders.Called(p.Stage(ctx, p.bench.plugin.Node()))
}

func (p *placement) publish(ctx context.Context) error {
	return p.bench.bystanders.Called(p.Publish(ctx, p.bench.plugin.Node()))
}

func (p *placement) unpublish(ctx context.Context) error {
	return p.bench.bystanders.Called(p.Unpublish(ctx, p.bench.plugin.Node()))
}

func (p *placement) unstage(ctx context.Context) error {
	return p.bench.bystanders.Called(p.Unstage(ctx, p.bench.plugin.Node()))
}

// staged demands that the volume's filesystem is mounted at the staging path, or nothing for a raw
// volume.
func (p *placement) staged() error {
	mounts, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(p.Staging))
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
