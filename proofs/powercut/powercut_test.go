//go:build linux

package powercut_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/history"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

func TestMain(m *testing.M) {
	debug.SetGCPercent(-1) // see collect
	namespace.Main(m)
}

// size limits a round's images. images is the wanted total. For a scenario, flushes is the maximum
// of images that end at a flush, and sampled the minimum of images with a random choice of writes.
type size struct{ images, flushes, sampled int }

var (
	shortRound = size{images: 60, flushes: 1, sampled: 1}
	wholeRound = size{images: 500, flushes: 12, sampled: 10}
	longRound  = size{images: 2000, flushes: math.MaxInt, sampled: 10}
)

func (c *count) size() size {
	switch {
	case c.p.Long():
		return longRound
	case c.p.Short():
		return shortRound
	}
	return wholeRound
}

func TestAStageConvergesAfterAPowerCutAtAnyPoint(t *testing.T) {
	c := &count{trials: newTrials(t, "powercut")}
	peak := c.rounds(c.round)
	c.p.Figure("records", c.records, "writes", c.writes, "flushes", c.flushes, "images", c.images,
		"equal", c.equal, "converged", c.converged, "refused_rightly", c.refused, "lost", c.lost,
		"formatted_used", c.formatted, "peak_mib", peak)
	c.p.Bystanders.Report()
	c.p.Forged.Report()
	if c.p.Short() {
		short.Left(t, wholeRound.images-c.images)
	}
	if want := c.size().images; !c.p.Long() && c.images < want {
		t.Errorf("%d images were checked, want at least %d", c.images, want)
	}
}

type count struct {
	*trials
	records, writes, flushes, images int
	equal, converged, refused        int
	lost, formatted                  int
}

func (c *count) round(ctx context.Context, seed uint64) {
	recorded, err := recordAll(ctx, c.run, seed)
	if err != nil {
		c.t.Errorf("record (seed %d): %v", seed, err)
		return
	}
	recorded = slices.DeleteFunc(slices.Clone(recorded), func(r *recording) bool {
		return r.readWhole
	})
	for _, rec := range recorded {
		c.records += len(rec.log)
		for _, r := range rec.log {
			switch {
			case r.Changes():
				c.writes++
			case r.Kind == flakydisk.Flush:
				c.flushes++
			}
		}
	}
	r := rand.New(rand.NewPCG(seed, 2))
	var images []image
	var samplers []*sampler
	for _, rec := range recorded {
		s, err := newSampler(rec, r)
		if err != nil {
			c.t.Errorf("%s (seed %d): %v", rec.name, seed, err)
			return
		}
		samplers = append(samplers, s)
		flushes := s.flushes()
		r.Shuffle(len(flushes), func(i, j int) { flushes[i], flushes[j] = flushes[j], flushes[i] })
		images = append(images, flushes[:min(c.size().flushes, len(flushes))]...)
	}
	c.p.Say("%d scenarios, an image for each of %d flushes of %d", len(recorded), len(images),
		c.flushes)
	for i, s := range samplers {
		images = append(images, s.sample(max(c.size().sampled,
			(c.size().images-len(images)+len(samplers)-i-1)/(len(samplers)-i)))...)
		c.equal += s.equal
		if s.err != nil {
			c.t.Errorf("%s (seed %d): %v", s.of.name, seed, s.err)
		}
	}
	r.Shuffle(len(images), func(i, j int) { images[i], images[j] = images[j], images[i] })
	c.check(ctx, images, seed)
}

// latest contains the recordings of the last seed, because several tests use them.
var latest struct {
	seed uint64
	all  []*recording
}

func recordAll(ctx context.Context, run *harness.Run, seed uint64) (all []*recording, err error) {
	if latest.all != nil && latest.seed == seed {
		return latest.all, nil
	}
	accesses := append(slices.Clone(filesystems), raw)
	found, errs := make([][]*recording, len(accesses)), make([]error, len(accesses))
	harness.AtOnce(len(accesses), func(i int) {
		b, err := newBench(ctx, run, "", nil)
		if err == nil {
			found[i], err = recordings(ctx, b, accesses[i], rand.New(rand.NewPCG(seed, uint64(i))))
			err = errors.Join(err, b.close())
		}
		errs[i] = err
	})
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	latest.seed, latest.all = seed, slices.Concat(found...)
	return latest.all, nil
}

func (c *count) check(ctx context.Context, images []image, seed uint64) {
	var jobs []job
	for _, m := range images {
		jobs = append(jobs, job{m.of.volume.access, func(b *bench) {
			v, failed := b.check(ctx, m)
			c.note(ctx, b, m, v, failed, seed)
		}})
	}
	c.work(ctx, jobs)
}

func (c *count) note(ctx context.Context, b *bench, m image, v verdict, failed error, seed uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.images++
	for n, happened := range map[*int]bool{&c.converged: v.converged, &c.refused: v.refused,
		&c.lost: v.lost, &c.formatted: v.formatted} {
		if happened {
			*n++
		}
	}
	if err := errors.Join(failed, v.wrong); err != nil {
		c.wrong++
		b.draw(ctx, c.p, c.run.Dir, seed, fmt.Errorf("%s: %w", m.name, err))
		path := filepath.Join(c.run.Dir, fmt.Sprintf("image-%d", c.images))
		c.t.Errorf("%s (seed %d): %v; the image is %s", m.name, seed, err, path)
		c.p.Error(m.content().Save(path))
	}
	c.p.SayOften("%d images; the last one: %s", c.images, m.name)
}

const workers = 5

// job is a trial that do() makes on a bench. access is the access type of the trial's volume.
type job struct {
	access string
	do     func(*bench)
}

// trials runs jobs on several drivers at the same time.
type trials struct {
	p   *proof.Proof
	t   *testing.T
	run *harness.Run

	// mu also guards the counters of the embedding types.
	mu    sync.Mutex
	wrong int
}

func newTrials(t *testing.T, name string) *trials {
	return &trials{p: proof.New(t, name), t: t, run: harness.RunFor(t)}
}

func (c *trials) noteHarm(b *bench) {
	if err := b.Harm(); err != nil {
		c.t.Errorf("after volume %d of %s: %v", b.shown, b.Dir, err)
	}
}

// rounds calls round() with each seed, and returns the process's maximum memory in MiB.
func (c *trials) rounds(round func(ctx context.Context, seed uint64)) (peak int64) {
	for seed := range c.p.Rounds() {
		round(c.t.Context(), seed)
	}
	peak, err := peakMiB()
	c.p.Error(err)
	return peak
}

func (c *trials) over() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.p.Over() || c.wrong >= 20
}

// work runs the jobs until the time is over. One worker runs all jobs of btrfs, because the kernel
// cannot mount two images of a btrfs, which have the same UUID, at the same time.
func (c *trials) work(ctx context.Context, jobs []job) {
	work := func(i int, jobs <-chan job) (err error) {
		defer harness.Catch(&err)
		b := harness.Got(newBench(ctx, c.run, "", nil))
		b.Forged = c.p.Forged
		harness.Must(b.AddBystanders(ctx, proof.Members[i%len(proof.Members)], c.p.Bystanders))
		for j := range jobs {
			if c.over() {
				break
			}
			j.do(b)
			c.noteHarm(b)
		}
		return b.close()
	}
	ofBtrfs := func(j job) bool { return j.access == btrfs }
	others := slices.DeleteFunc(slices.Clone(jobs), ofBtrfs)
	jobs = slices.DeleteFunc(jobs, func(j job) bool { return !ofBtrfs(j) })
	var errs [2]error
	harness.AtOnce(2, func(i int) {
		if i == 0 {
			errs[i] = harness.Share(1, jobs, work)
		} else {
			errs[i] = harness.Share(workers-1, others, work)
		}
	})
	c.p.Error(errors.Join(errs[:]...))
}

// bench has a guest with a driver. It attaches one disk after the other to the guest.
type bench struct {
	*proof.Bench
	disks   *flakydisk.Server
	formats proof.Formats
	shown   int
}

// newBench starts a driver: the program or, if program is "", the unmodified driver.
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

func (b *bench) close() error { return errors.Join(b.Close(), b.disks.Close()) }

// placement is a volume whose disk is attached to the bench's guest.
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
	// inUse is locked for reading while a disk is attached.
	inUse sync.RWMutex
	// collected is the number of bytes allocated until the last garbage collection.
	collected atomic.Uint64
)

// collect runs the garbage collector if much memory was allocated since it last ran. It first waits
// until no disk is attached. A collection with an attached disk can deadlock: it stops the threads
// that serve disks, and waits for threads that wait for these disks in the kernel.
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

// A failure page shows the last shownEntries entries of the disk's log before the power cut.
const shownEntries = 12

// cut starts the history that a failure page shows: the log's last entries and the power cut.
func (b *bench) cut(m image) {
	b.Plugin.History.Begin()
	for _, e := range m.of.log[max(0, m.at-shownEntries):m.at] {
		what := []string{"write", "discard", "flush", "read", "note"}[e.Kind]
		b.Plugin.History.Mark(history.Disk, fmt.Sprintf("%s %d bytes at %d %s", what, e.Bytes, e.Offset,
			e.Text))
	}
	b.Plugin.History.Mark(history.Disk, "power cut: "+m.name)
}

// draw writes a failure page about the last image, and returns the path of the page.
func (b *bench) draw(ctx context.Context, p *proof.Proof, dir string, seed uint64,
	broken error) string {
	return p.Draw(ctx, proof.Failure{Name: fmt.Sprintf("seed %d, volume %d of %s", seed, b.shown,
		filepath.Base(b.Dir)), Seed: seed, Broken: broken, Dir: dir,
		Repeat:  fmt.Sprintf("make powercut SEED=%d", seed),
		Plugins: []*harness.Plugin{b.Plugin}, History: b.Plugin.History})
}

// show attaches a disk to the guest. It returns an error if the driver already has a record of the
// volume, because a driver on a new instance has none.
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
	return p, errors.Join(b.Guest.Plug("nvme1n1", v.disk, p.loop), b.Bystanders.Show(b.Guest))
}

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

var filesystems = []string{ext3, ext4, xfs, btrfs}

const mib = 1 << 20

// sizes contains the sizes of disks before they grow. The sizes are small, because the driver reads
// many disks completely. mkfs.xfs needs 300 MiB. A btrfs must grow to at least 256 MiB.
var sizes = map[string]int64{ext3: 128 * mib, ext4: 128 * mib, xfs: 320 * mib, btrfs: 192 * mib,
	raw: 128 * mib}

// volume contains the values that describe a volume in CSI requests.
type volume struct {
	id, disk, access string
	// size is the disk's size before it grows.
	size    int64
	history map[string]string
}

// newVolume returns a volume with a new UUID, because the kernel identifies a btrfs by its UUID.
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

// grownAtLeast returns the minimum size of a filesystem that has grown. It is less than the disk's
// size, because an xfs does not count its log of 64 MiB.
func (v volume) grownAtLeast() int64 { return (v.size + v.grownTo()) / 2 }

func (v volume) context(size int64) map[string]string {
	c := map[string]string{"diskName": v.disk, "sizeBytes": fmt.Sprint(size)}
	maps.Copy(c, v.history)
	return c
}
