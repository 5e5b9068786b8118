//go:build linux

package corpus_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// fixture is a running trial, with its disk in the guest and its request.
type fixture struct {
	*trial
	bench *bench
	image *image
	loop  loopdev.Device
	// decoy is a blank disk of the same size. Its serial differs from the disk's in the last byte. The
	// driver must not change it.
	decoy *image
	// Device is the name of the disk's device in the guest.
	Device   string
	DiskName string
	VolumeID string
	Publish  map[string]string
	Staging  string

	dir string
	// keep is set if end must not remove the files, because the trial has failed.
	keep bool
	// mark contains the driver's marks on the disk, as learnMark has read them.
	mark []piece
	// happened, if not nil, returns the error of the trial's hook, or an error if the hook never ran.
	happened func() error
	cleanup  []func() error
}

// diskDevice and decoyDevice are the device names of the disk and the decoy in the guest.
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
		b.Guest.Plug(f.Device, f.DiskName, f.loop), b.Bystanders.Show(b.Guest)))
	if t.Set != nil {
		t.Set(f)
	}
	return f, nil
}

// publishContext returns the publish context by which the controller describes the disk.
func (f *fixture) publishContext() map[string]string {
	all := map[string]string{"diskName": f.DiskName, "sizeBytes": fmt.Sprint(f.image.Size)}
	maps.Copy(all, f.History)
	return all
}

// attach attaches a loop device to an image until the end of the fixture.
func (f *fixture) attach(ctx context.Context, im *image, readOnly bool) loopdev.Device {
	loop := harness.Got(loopdev.Attach(ctx, loopdev.Config{
		// The serial is random, because btrfs takes two loop devices with the same serial for one.
		Path: im.Path, Serial: fmt.Sprintf("corpus-%016x", rand.Uint64()), Owner: loopdev.Process(),
		BlockSize: f.BlockSize, ReadOnly: readOnly,
	}))
	f.atEnd(func() error { return loop.Detach(context.Background()) })
	return loop
}

// atEnd registers a function that end calls. end calls the last registered function first.
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

// stage makes the NodeStageVolume call that the trial tests.
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

// bench runs one trial after the other in a guest with a driver.
type bench struct {
	*proof.Bench
	*lab
	// evidence is set if the bench keeps the disks of failed trials, and kept if it has kept one.
	evidence, kept bool
}

// newBench starts the run's driver or, if program is set, a mutant without the guard.
func (l *lab) newBench(ctx context.Context, program, guard string) (*bench, error) {
	started, err := proof.StartBench(ctx, l.run, program, map[string]string{proof.RemovedGuard: guard})
	return &bench{Bench: started, lab: l}, err
}

// close stops the driver, compares the bystanders, and removes the files if nothing has failed.
func (b *bench) close() error {
	err := b.Close()
	if b.kept || err != nil {
		return err
	}
	return os.RemoveAll(b.Dir)
}

// trial describes a disk, a request and the wanted outcome. A generator sets its fields.
type trial struct {
	Name string
	// Size is the size of the disk, and BlockSize the size of its logical blocks.
	Size      int64
	BlockSize int
	// FS is the filesystem that the request asks for.
	FS string
	// History is the controller's report of the origin and the use of the disk.
	History map[string]string
	// Rand is the trial's own source of random numbers. It depends only on the seed and the name.
	Rand *rand.Rand
	// Fill writes the content of the disk.
	Fill func(*image)
	// Until is the offset up to which a refused disk must keep its bytes; 0 means the whole disk.
	// Behind Until the kernel may write, or the driver may write its growth records.
	Until int64
	// Set, if not nil, changes the disk or the request after the disk was attached to the guest.
	Set func(*fixture)
	// Check, if not nil, checks the result of the call further.
	Check func(*fixture) error
	Want  want
}

// outcome is the effect of a call on a disk.
type outcome string

const (
	formatted outcome = "formatted"
	mounted   outcome = "mounted"
	refused   outcome = "refused"
	// either allows a mounted disk, and a refusal whose evidence contains one of want.Names.
	either outcome = "mounted or refused"
)

type want struct {
	Outcome outcome
	// Reasons are the allowed reasons of a refusal.
	Reasons []string
	// Names contains words. The evidence must contain one of them, or an offset at which the disk is
	// not zero.
	Names []string
	// Says contains words, all of which the evidence must contain.
	Says []string
	// Begun is set if the disk was blank: the driver may begin a format before it refuses the disk.
	Begun bool
	// Code is the code of the answer. Empty means FAILED_PRECONDITION.
	Code string
}

// These are the reasons with which the driver refuses the disks of the trials.
const (
	notBlank    = "DiskNotBlank"
	unreadable  = "DeviceUnreadable"
	tooLarge    = "FilesystemTooLarge"
	wrongSize   = "DeviceWrongSize"
	held        = "DeviceHeld"
	readOnly    = "DeviceReadOnly"
	notUnique   = "DeviceNotUnique"
	changed     = "DeviceChanged"
	notFound    = "DeviceNotFound"
	sizeMissing = "DiskSizeUnknown"
	toolFailed  = "NodeToolFailed"

	wrongFilesystem = "WrongFilesystem"
	feature         = "FilesystemFeature"
)

func refuse(reasons ...string) want { return want{Outcome: refused, Reasons: reasons} }

// foreign wants a refusal because the disk is not blank. The evidence must contain one of the
// names, or an offset at which the disk is not zero.
func foreign(names ...string) want {
	return want{Outcome: refused, Reasons: []string{notBlank}, Names: names}
}

var (
	isFormatted = want{Outcome: formatted}
	isMounted   = want{Outcome: mounted}
)

// generator changes the fields of the default trial, a small blank disk and a request for ext4.
type generator struct {
	name string
	make func(t *trial)
}

// blank returns a trial of a blank disk, which set changes if it is not nil.
func blank(name, fs string, w want, set func(*fixture)) generator {
	return generator{name, func(t *trial) { t.FS, t.Want, t.Set = fs, w, set }}
}

// with returns a trial of a disk with a filesystem of the kind. change, if not nil, changes the
// disk before it is attached to the guest, and set, if not nil, afterwards.
func with(name, kind string, w want, change func(*image), set func(*fixture)) generator {
	return generator{name, func(t *trial) {
		k := kindOf(kind)
		k.of(t)
		if change != nil {
			t.Fill = func(im *image) {
				im.filesystem(k)
				change(im)
			}
		}
		t.Want, t.Set = w, set
	}}
}

// and returns a generator that calls more after g.
func (g generator) and(more func(*trial)) generator {
	return generator{g.name, func(t *trial) {
		g.make(t)
		more(t)
	}}
}

// larger returns a generator whose disk is larger than the filesystem on it.
func (g generator) larger() generator { return g.and(func(t *trial) { t.Size += fsBytes }) }

func corpus() []generator {
	return slices.Concat(blanks(), filesystems(), tables(), headers(), noise(), situations(), races(),
		formats(), regions(), owners(), oddities(), identities(), grown(), tails(), descriptors(),
		foreignParts(), forged(), forgedRecords())
}

// smallest is the smallest size at which mke2fs uses its default options. Most disks are not much
// larger, because the driver reads many of them whole.
const smallest = 512 * mib

// defaults returns a trial with the values that most generators keep.
func defaults(name string, r *rand.Rand) *trial {
	return &trial{
		Name: name, Rand: r, Size: smallest + 64*mib*r.Int64N(4), BlockSize: 512, FS: ext4,
		History: made, Fill: func(*image) {},
	}
}

const (
	ext3  = "ext3"
	ext4  = "ext4"
	xfs   = "xfs"
	btrfs = "btrfs"
)

// ours contains the filesystems that volumes can have.
var ours = []string{ext3, ext4, xfs, btrfs}

// each returns n generators that differ only in their random numbers, and in a number as suffix.
func each(n int, name string, make func(t *trial)) []generator {
	if n == 1 {
		return []generator{{name, make}}
	}
	var all []generator
	for i := range n {
		all = append(all, generator{fmt.Sprintf("%s %d", name, i+1), make})
	}
	return all
}
