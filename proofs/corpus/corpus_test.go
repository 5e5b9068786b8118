//go:build linux

package corpus_test

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

func TestMain(m *testing.M) { namespace.Main(m) }

func TestTheDriverFormatsOnlyBlankDisksAndDisksWithItsUnfinishedFormat(t *testing.T) { // E-1, NS-6
	l := newLab(t, "blank-corpus")
	p := l.p
	program, err := proof.BuildMutant(t.Context(), l.run.Dir, mutable(guards()))
	p.Fatal(err)
	c := &tally{lab: l, outcomes: map[outcome]int{}}
	m := &mutation{lab: l, program: program, all: corpus(), unnoticed: map[string]bool{}}
	l.noticesHarm(t.Context())
	tried, removed := chosen(t, m.all), guards()
	if p.Short() {
		tried, removed = some(t, tried, p.Seed), short.Some(t, shortGuards, removed)
	}
	for seed := range p.Rounds() {
		c.round(t.Context(), tried, seed)
		p.Say("%d disks; now without each of %d guards in turn", c.disks, len(removed))
		m.check(t.Context(), removed, seed)
	}
	p.Figure("disks", c.disks, "formatted_blank", c.outcomes[formatted]-c.overwritten,
		"mounted", c.outcomes[mounted], "refused", c.outcomes[refused],
		"formatted_nonblank", c.overwritten, "guards", len(removed),
		"noticed", len(removed)-len(m.unnoticed))
	p.Bystanders.Report()
	if os.Getenv("PROOF_ONLY") != "" {
		return // the chosen disks need not have forged files, or all outcomes
	}
	p.Forged.Report()
	for _, outcome := range []outcome{formatted, mounted, refused} {
		if c.outcomes[outcome] == 0 {
			t.Errorf("no disk was %s", outcome)
		}
	}
}

// shortKinds is the number of disks of each kind (see the function some) that the short form tries.
var shortKinds = map[string]int{string(formatted): 4, string(mounted): 8, string(refused): 32,
	"forged records": 1}

const shortGuards = 10

func some(t *testing.T, all []generator, seed uint64) (chosen []generator) {
	kinds := map[string][]generator{}
	for _, g := range all {
		kind := string(g.trial(seed).Want.Outcome)
		if strings.Contains(g.name, "forged records") {
			kind = "forged records"
		}
		kinds[kind] = append(kinds[kind], g)
	}
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		chosen = append(chosen, short.Some(t, shortKinds[kind], kinds[kind])...)
	}
	return chosen
}

func chosen(t *testing.T, all []generator) []generator {
	t.Helper()
	only, err := regexp.Compile(os.Getenv("PROOF_ONLY"))
	if err != nil {
		t.Fatalf("PROOF_ONLY has to be a regular expression: %v", err)
	}
	return slices.DeleteFunc(slices.Clone(all), func(g generator) bool {
		return !only.MatchString(g.name)
	})
}

// lab contains the data that all benches of a test share.
type lab struct {
	p     *proof.Proof
	t     *testing.T
	run   *harness.Run
	bases *bases
}

func newLab(t *testing.T, name string) *lab {
	t.Helper()
	l := &lab{p: proof.New(t, name), t: t, run: harness.RunFor(t)}
	var err error
	l.bases, err = newBases(l.run.Dir, l.p.Rand())
	l.p.Fatal(err)
	return l
}

func (l *lab) logAnswer(format string, args ...any) {
	if os.Getenv("PROOF_ANSWERS") != "" {
		l.p.Say(format, args...)
	}
}

// tally runs the trials in rounds, and counts their results.
type tally struct {
	*lab
	// features is set for filesystems with unusual features. Their btrfs images share one UUID, and
	// the kernel mounts only one btrfs of a UUID at a time, so their trials lock the mutex btrfs.
	features bool
	btrfs    sync.Mutex

	// mu guards the fields below.
	mu                 sync.Mutex
	disks, overwritten int
	outcomes           map[outcome]int
	// notMade counts images that mkfs refused to make. internal counts answers with INTERNAL.
	notMade, internal int
}

// benches is the number of drivers that run at the same time. Each mostly waits for the kernel.
const benches = 3

// round tries each generator once. All but the corpus's first round stop early if Over() is true.
func (c *tally) round(ctx context.Context, all []generator, seed uint64) {
	c.p.Error(harness.Share(benches, all, func(i int, jobs <-chan generator) error {
		b, err := c.newBench(ctx, "", "")
		if err == nil {
			b.Forged = c.p.Forged
			err = b.AddBystanders(ctx, proof.Members[i%len(proof.Members)], c.p.Bystanders)
		}
		if err != nil {
			return fmt.Errorf("start a driver: %w", err)
		}
		b.evidence = !c.features
		for g := range jobs {
			if (c.features || seed != c.p.Seed) && c.p.Over() {
				break
			}
			c.one(ctx, b, g, seed, len(all))
		}
		return b.close()
	}))
}

func (c *tally) one(ctx context.Context, b *bench, g generator, seed uint64, of int) {
	t := g.trial(seed)
	if c.features && t.FS == btrfs {
		c.btrfs.Lock()
		defer c.btrfs.Unlock()
	}
	start := time.Now()
	v, err := b.try(ctx, t)
	took := time.Since(start).Round(time.Millisecond)
	c.mu.Lock()
	defer c.mu.Unlock()
	if errors.Is(err, errNotMade) {
		c.notMade++
		return
	}
	c.disks++
	c.outcomes[v.Outcome]++
	if v.Overwritten {
		c.overwritten++
	}
	if status.Code(v.Answer) == codes.Internal {
		c.internal++
	}
	if err != nil {
		c.t.Errorf("%q (seed %d) cannot be tried: %v", g.name, seed, err)
	}
	if v.Wrong != nil {
		c.t.Errorf("%q (seed %d): %v", g.name, seed, v.Wrong)
	}
	c.logAnswer("%q: %v %s %v", g.name, took, v.Outcome, v.Answer)
	c.p.SayOften("%d disks, %d in a round; the last one: %s", c.disks, of, g.name)
}

func (g generator) trial(seed uint64) *trial {
	h := fnv.New64a()
	fmt.Fprint(h, g.name)
	t := defaults(g.name, rand.New(rand.NewPCG(seed, h.Sum64())))
	g.make(t)
	return t
}

// mutation runs the driver without one guard at a time.
type mutation struct {
	*lab
	program string
	all     []generator

	// mu guards unnoticed: the names of guards whose trials passed although the guard was removed.
	mu        sync.Mutex
	unnoticed map[string]bool
}

// check runs each guard's trials on a driver without the guard. The trials must fail. It also runs
// them on a driver that was built in the same way and has all guards. There they must pass.
func (m *mutation) check(ctx context.Context, guards []guard, seed uint64) {
	if !m.p.Long() {
		guards = withOneTrial(guards, seed)
	}
	guards = append([]guard{{trials: trialsOf(guards)}}, guards...)
	m.p.Error(harness.Share(benches, guards, func(_ int, jobs <-chan guard) error {
		var errs []error
		for g := range jobs {
			if g.name != "" && m.p.Over() {
				break
			}
			if err := m.runWithout(ctx, g, seed); err != nil {
				errs = append(errs, fmt.Errorf("guard %q (seed %d): %w", g.name, seed, err))
			}
		}
		return errors.Join(errs...)
	}))
}

func withOneTrial(all []guard, seed uint64) []guard {
	all = slices.Clone(all)
	for i, g := range all {
		n := (seed + uint64(i)) % uint64(len(g.trials))
		all[i].trials = g.trials[n : n+1]
	}
	return all
}

func trialsOf(guards []guard) []string {
	var names []string
	for _, g := range guards {
		names = append(names, g.trials...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// runWithout tries a guard's trials without the guard. A guard with no name removes nothing.
func (m *mutation) runWithout(ctx context.Context, g guard, seed uint64) error {
	b, err := m.newBench(ctx, m.program, g.name)
	if err != nil {
		return err
	}
	b.evidence = g.name == ""
	noticed := false
	for _, name := range g.trials {
		i := slices.IndexFunc(m.all, func(g generator) bool { return g.name == name })
		if i < 0 {
			return fmt.Errorf("the corpus has no %q", name)
		}
		v, err := b.try(ctx, m.all[i].trial(seed))
		switch {
		case err != nil:
			return fmt.Errorf("%q cannot be tried: %w", name, err)
		case v.Wrong != nil && g.name == "":
			return fmt.Errorf("the mutant with all guards, on %q: %w", name, v.Wrong)
		case v.Wrong != nil:
			noticed = true
			m.logAnswer("without %q, %q: %v", g.name, name, v.Wrong)
		case g.name != "":
			m.t.Errorf("without %q the trial %q does not fail (seed %d): %s, %v", g.name, name, seed,
				v.Outcome, v.Answer)
		}
	}
	if !noticed && g.name != "" {
		m.mu.Lock()
		m.unnoticed[g.name] = true
		m.mu.Unlock()
	}
	return b.close()
}

// fixture is a running trial with its disk, the disk's device in the guest, and the request.
type fixture struct {
	*trial
	bench *bench
	image *image
	loop  loopdev.Device
	// decoy is a blank disk of the same size, whose serial differs in the last byte.
	decoy *image
	// Device is the name under which the guest shows the disk.
	Device   string
	DiskName string
	VolumeID string
	Publish  map[string]string
	Staging  string

	dir string
	// keep is set after a failure, so that the trial's files are not removed.
	keep bool
	// mark contains the pages that the driver writes before mkfs, as learnMark has read them.
	mark []piece
	// happened is set by a trial with a hook. It returns an error if the hook failed or never ran.
	happened func() error
	cleanup  []func() error
}

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

func (f *fixture) publishContext() map[string]string {
	all := map[string]string{"diskName": f.DiskName, "sizeBytes": fmt.Sprint(f.image.Size)}
	maps.Copy(all, f.History)
	return all
}

func (f *fixture) attach(ctx context.Context, im *image, readOnly bool) loopdev.Device {
	loop := harness.Got(loopdev.Attach(ctx, loopdev.Config{
		// The serial is random, because btrfs treats two loop devices with one serial as one device.
		Path: im.Path, Serial: fmt.Sprintf("corpus-%016x", rand.Uint64()), Owner: loopdev.Process(),
		BlockSize: f.BlockSize, ReadOnly: readOnly,
	}))
	f.atEnd(func() error { return loop.Detach(context.Background()) })
	return loop
}

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

func (f *fixture) stage(ctx context.Context) error {
	return f.bench.Do(ctx, "stage", f.placement().Stage)
}

func (f *fixture) unstage(ctx context.Context) error {
	return f.bench.Do(ctx, "unstage", f.placement().Unstage)
}

func randomUUID(t *trial) string {
	a, b := t.Rand.Uint64(), t.Rand.Uint64()
	return fmt.Sprintf("%08x-%04x-4%03x-8%03x-%012x", a>>32, a>>16&0xFFFF, a&0xFFF, b>>48&0xFFF,
		b&0xFFFFFFFFFFFF)
}

// bench runs trials one after the other, with one driver in one guest.
type bench struct {
	*proof.Bench
	*lab
	// If evidence is set, the bench keeps the files of failed trials. kept is set if it has kept some.
	evidence, kept bool
}

// newBench starts the program without the guard or, if program is "", the unmodified driver.
func (l *lab) newBench(ctx context.Context, program, guard string) (*bench, error) {
	started, err := proof.StartBench(ctx, l.run, program, map[string]string{proof.RemovedGuard: guard})
	return &bench{Bench: started, lab: l}, err
}

func (b *bench) close() error {
	err := b.Close()
	if b.kept || err != nil {
		return err
	}
	return os.RemoveAll(b.Dir)
}

// trial describes a disk, a request for it, and the wanted outcome. A generator sets the fields.
type trial struct {
	Name string
	// Size and the logical BlockSize are in bytes.
	Size      int64
	BlockSize int
	// FS is the filesystem type in the request.
	FS string
	// History contains the disk's origin and use, as the controller reports them.
	History map[string]string
	// Rand depends only on the seed and the trial's name.
	Rand *rand.Rand
	Fill func(*image)
	// The first Until bytes of a refused disk must not change; 0 means the whole disk. The kernel or
	// the driver may write to the other bytes.
	Until int64
	// Set, if not nil, changes the disk or the request after the disk is attached to the guest.
	Set func(*fixture)
	// Check, if not nil, returns an error if the call's result is wrong.
	Check func(*fixture) error
	Want  want
}

type outcome string

const (
	formatted outcome = "formatted"
	mounted   outcome = "mounted"
	refused   outcome = "refused"
	// The driver may mount the disk, or refuse it with evidence that contains one of want.Names.
	either outcome = "mounted or refused"
)

type want struct {
	Outcome outcome
	// A refusal must have one of these reasons.
	Reasons []string
	// The evidence must contain one of these names, or an offset at which the disk is not zero.
	Names []string
	// The evidence must contain each of these texts.
	Says []string
	// Begun allows a refused disk to be changed, because the driver may have begun a format.
	Begun bool
	// Code is the wanted gRPC code; "" means FAILED_PRECONDITION.
	Code string
}

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

// foreign is the outcome for a disk that the driver must refuse because it is not blank.
func foreign(names ...string) want {
	return want{Outcome: refused, Reasons: []string{notBlank}, Names: names}
}

var (
	isFormatted = want{Outcome: formatted}
	isMounted   = want{Outcome: mounted}
)

// A generator changes the default trial: a small blank disk, and a request for ext4.
type generator struct {
	name string
	make func(t *trial)
}

func blank(name, fs string, w want, set func(*fixture)) generator {
	return generator{name, func(t *trial) { t.FS, t.Want, t.Set = fs, w, set }}
}

// with() returns a generator of a disk with a filesystem. change(), if not nil, changes the image.
func with(name, kind string, w want, change func(*image), set func(*fixture)) generator {
	return generator{name, func(t *trial) {
		k := kindOf(kind)
		k.setUp(t)
		if change != nil {
			t.Fill = func(im *image) {
				im.filesystem(k)
				change(im)
			}
		}
		t.Want, t.Set = w, set
	}}
}

func (g generator) and(more func(*trial)) generator {
	return generator{g.name, func(t *trial) {
		g.make(t)
		more(t)
	}}
}

// larger adds fsBytes to the size of the disk, but not to its filesystem.
func (g generator) larger() generator { return g.and(func(t *trial) { t.Size += fsBytes }) }

func corpus() []generator {
	return slices.Concat(blanks(), filesystems(), tables(), headers(), noise(), situations(), races(),
		formats(), regions(), owners(), oddities(), identities(), grown(), tails(), descriptors(),
		foreignParts(), forged(), forgedRecords())
}

// smallest is the minimum size of a default trial's disk: below it, mke2fs has other defaults. Most
// disks are not much larger, because the driver reads many of them completely.
const smallest = 512 * mib

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

// ours contains the filesystem types that volumes can have.
var ours = []string{ext3, ext4, xfs, btrfs}

// repeated returns n generators whose trials differ only in their random numbers.
func repeated(n int, name string, make func(t *trial)) []generator {
	if n == 1 {
		return []generator{{name, make}}
	}
	var all []generator
	for i := range n {
		all = append(all, generator{fmt.Sprintf("%s %d", name, i+1), make})
	}
	return all
}
