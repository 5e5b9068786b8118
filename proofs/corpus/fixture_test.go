//go:build linux

package corpus_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// fixture is a running trial: its disk in the guest, and its request.
type fixture struct {
	*trial
	bench *bench
	image *image
	loop  loopdev.Device
	// decoy is a blank disk of the same size, whose name differs in the last byte. The driver must
	// not change it.
	decoy *image
	// Device is the name of the disk's device in the guest.
	Device   string
	DiskName string
	VolumeID string
	Publish  map[string]string
	Staging  string

	dir string
	// keep is set if the disk's file has to be kept for a failed trial.
	keep bool
	// mark is the result of learnMark.
	mark []piece
	// happened, if it is set, returns an error unless the hook of the trial was called.
	happened func() error
	cleanup  []func() error
}

// The names of the devices of the disk and the decoy in the guest.
const (
	diskDevice  = "nvme2n1"
	decoyDevice = "nvme1n1"
)

func (b *bench) newFixture(ctx context.Context, t *trial) (f *fixture, err error) {
	defer harness.Catch(&err)
	dir := harness.Got(os.MkdirTemp(b.Dir, "trial-"))
	f = &fixture{trial: t, bench: b, Device: diskDevice, dir: dir,
		Staging: filepath.Join(dir, "staging")}
	f.atEnd(func() error {
		if f.keep {
			return nil
		}
		return os.RemoveAll(dir)
	})
	f.image = newImage(filepath.Join(dir, "disk"), t.Size)
	f.image.bases = b.bases
	t.Fill(f.image)
	name := fmt.Sprintf("csi-%016x", t.Rand.Uint64())
	f.DiskName, f.VolumeID = name, randomUUID(t)
	f.Publish = f.publishContext()
	f.loop = f.attach(ctx, f.image, false)
	f.decoy = newImage(filepath.Join(dir, "decoy"), f.image.Size)
	decoy := f.attach(ctx, f.decoy, false)
	f.atEnd(b.Guest.Unplug)
	harness.Must(errors.Join(b.Guest.Plug(decoyDevice, name[:proof.SerialBytes-1]+"z", decoy),
		b.Guest.Plug(f.Device, f.DiskName, f.loop), b.Bystanders.Show()))
	if t.Set != nil {
		t.Set(f)
	}
	return f, nil
}

// publishContext returns what the controller reports about the disk.
func (f *fixture) publishContext() map[string]string {
	all := map[string]string{"diskName": f.DiskName, "sizeBytes": fmt.Sprint(f.image.Size)}
	maps.Copy(all, f.History)
	return all
}

// attach attaches a loop device to an image until the end of the fixture.
func (f *fixture) attach(ctx context.Context, im *image, readOnly bool) loopdev.Device {
	loop := harness.Got(loopdev.Attach(ctx, loopdev.Config{
		// The serial is random, because btrfs takes two loop devices with the same serial for one.
		Path: im.Path, Serial: "corpus-" + rand.Text()[:16], Owner: loopdev.Process(),
		BlockSize: f.BlockSize, ReadOnly: readOnly,
	}))
	f.atEnd(func() error { return loop.Detach(context.Background()) })
	return loop
}

// atEnd registers a function that is called at the end, in reverse order.
func (f *fixture) atEnd(do func() error) { f.cleanup = append(f.cleanup, do) }

func (f *fixture) end() error {
	var errs []error
	if err := proof.UnmountBelow(f.dir); err != nil {
		errs = append(errs, err)
	}
	for _, do := range slices.Backward(f.cleanup) {
		errs = append(errs, do())
	}
	return errors.Join(errs...)
}

func (f *fixture) placement() *harness.Placement {
	return &harness.Placement{Volume: &csi.Volume{VolumeId: f.VolumeID}, Staging: f.Staging,
		PublishContext: f.Publish, Capability: harness.Mounted(f.FS)}
}

// stage makes the call that is tested.
func (f *fixture) stage(ctx context.Context) error {
	return f.bench.Do(ctx, "stage", f.placement().Stage)
}

func (f *fixture) unstage(ctx context.Context) error {
	return f.bench.Do(ctx, "unstage", f.placement().Unstage)
}

// staged returns the mount at the staging path, or nil if there is none.
func (f *fixture) staged() (*mountinfo.Info, error) {
	mounts, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(f.Staging))
	if err != nil || len(mounts) == 0 {
		return nil, err
	}
	return mounts[len(mounts)-1], nil
}

func randomUUID(t *trial) string {
	a, b := t.Rand.Uint64(), t.Rand.Uint64()
	return fmt.Sprintf("%08x-%04x-4%03x-8%03x-%012x", a>>32, a>>16&0xFFFF, a&0xFFF, b>>48&0xFFF,
		b&0xFFFFFFFFFFFF)
}

// bench is a guest with a driver in it, which runs one trial after the other.
type bench struct {
	*proof.Bench
	run   *harness.Run
	bases *bases
	// evidence makes the bench keep the disks of failed trials. kept reports whether there are
	// any.
	evidence, kept bool
}

// newBench starts a driver: the given program, or the run's driver.
func newBench(
	ctx context.Context, run *harness.Run, bases *bases, program string, env map[string]string,
) (*bench, error) {
	started, err := proof.StartBench(ctx, run, program, env)
	return &bench{Bench: started, run: run, bases: bases}, err
}

// close ends the driver and compares the bystanders. It returns an error if the driver fails.
func (b *bench) close() error {
	err := b.Close()
	if b.kept || err != nil {
		return err
	}
	return os.RemoveAll(b.Dir)
}
