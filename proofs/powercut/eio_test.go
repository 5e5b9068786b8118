//go:build linux

package powercut_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
)

// By default, sampledSectors sectors of each scenario fail. With -short, shortSectors fail.
const (
	sampledSectors = 4
	shortSectors   = 1
)

// failing is a sector that fails while the driver stages a volume.
type failing struct {
	of     *recording
	op     flakydisk.Op
	sector int64
	// proving is set if the driver reads the sector to prove that the disk is blank.
	proving bool
	// times is how often the sector fails; 0 means always.
	times int
}

func (f failing) String() string {
	return fmt.Sprintf("%s, the sector at %d fails, op %d, %d times (0 is always)", f.of.name,
		f.sector, f.op, f.times)
}

func TestAStageOnAFailingSectorKeepsDataAndCanBeRepeated(t *testing.T) {
	c := &failures{trials: newTrials(t, "eio")}
	peak := c.rounds(c.round)
	if c.p.Short() {
		short.Left(t, c.sectors*(sampledSectors/shortSectors-1))
	}
	if c.sectors == 0 {
		t.Error("no sector failed")
	}
	if !c.p.Short() && !c.p.Long() && c.notGrown == 0 {
		t.Error("every filesystem was grown, so no health report of another one was checked")
	}
	c.p.Figure("sectors", c.sectors, "of", c.of, "right", c.right, "wrong", c.wrong, "not_grown",
		c.notGrown, "peak_mib", peak)
	c.p.Bystanders.Report()
}

// failures runs trials in which a sector fails, and counts their results.
type failures struct {
	*trials
	sectors, of, right int
	// notGrown counts filesystems that the driver mounted without growing them.
	notGrown int
}

func (c *failures) round(ctx context.Context, seed uint64) {
	recorded, err := recordAll(ctx, c.run, seed)
	if err != nil {
		c.t.Errorf("record (seed %d): %v", seed, err)
		return
	}
	r := rand.New(rand.NewPCG(seed, 3))
	var found [][]failing
	most := 0
	for _, of := range recorded {
		sectors := c.sectorsOf(of, r)
		if c.p.Long() {
			c.p.Say("%s: %d sectors of %d requests", of.name, len(sectors), len(of.stage))
		}
		found, most = append(found, sectors), max(most, len(sectors))
	}
	// The jobs alternate between scenarios, so each scenario has results even if the time ends early.
	var jobs []job
	for i := range most {
		for _, sectors := range found {
			if i >= len(sectors) {
				continue
			}
			f := sectors[i]
			jobs = append(jobs, job{f.of.volume.access, func(b *bench) {
				notGrown, err := b.fail(ctx, f)
				c.note(f, notGrown, err, seed)
			}})
		}
	}
	c.p.Say("%d sectors of %d scenarios", len(jobs), len(recorded))
	c.of += len(jobs)
	c.work(ctx, jobs)
}

func (c *failures) note(f failing, notGrown bool, err error, seed uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sectors++
	if notGrown {
		c.notGrown++
	}
	if err == nil {
		c.right++
	} else {
		c.wrong++
		c.t.Errorf("%v (seed %d): %v", f, seed, err)
	}
	c.p.SayOften("%d sectors; the last one: %v", c.sectors, f)
}

// sectorsOf selects some requests and returns one sector of each, in random order. If
// PROOF_DURATION is set, it returns the sectors of all requests twice: with times = 0, and with 1.
func (c *failures) sectorsOf(of *recording, r *rand.Rand) (all []failing) {
	found := requests(of, r)
	r.Shuffle(len(found), func(i, j int) { found[i], found[j] = found[j], found[i] })
	if !c.p.Long() {
		n := sampledSectors
		if c.p.Short() {
			n = shortSectors
		}
		if of.readWhole {
			n /= 2 // because each stage reads the whole disk, which takes long
		}
		for i, sectors := range found[:min(n, len(found))] {
			f := sectors[r.IntN(len(sectors))]
			f.times = (i + len(of.stage)) % 2
			all = append(all, f)
		}
		return all
	}
	for _, f := range slices.Concat(found...) {
		again := f
		again.times = 1
		all = append(all, f, again)
	}
	r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// requests returns the sectors of each request in a stage, but only the first, the last and a
// random one of a large request. It omits sectors that an earlier request of the same kind has.
func requests(of *recording, r *rand.Rand) (all [][]failing) {
	const small = 8
	seen := map[failing]bool{}
	proving := of.blank
	for _, record := range of.stage {
		op := flakydisk.OnRead
		switch {
		case record.Changes():
			op, proving = flakydisk.OnWrite, false
		case record.Kind != flakydisk.Read:
			continue
		}
		n := record.Sectors()
		places := []int64{0, r.Int64N(n), n - 1}
		if n <= small {
			places = places[:0]
			for place := range n {
				places = append(places, place)
			}
		}
		var sectors []failing
		for _, place := range places {
			f := failing{of: of, op: op, sector: record.Offset + place*flakydisk.SectorBytes}
			if !seen[f] {
				seen[f] = true
				f.proving = proving && op == flakydisk.OnRead
				sectors = append(sectors, f)
			}
		}
		if len(sectors) > 0 {
			all = append(all, sectors)
		}
	}
	return all
}

// fail stages a volume on a disk with a failing sector, and again after the disk works. It reports
// whether the first stage mounted a filesystem without growing it.
func (b *bench) fail(ctx context.Context, f failing) (notGrown bool, err error) {
	content := f.of.base.Fork()
	disk := flakydisk.NewDisk(content)
	place, err := b.show(ctx, f.of.volume, disk)
	defer func() { err = errors.Join(err, place.hide()) }()
	defer harness.Catch(&err)
	harness.Must(err)
	notGrown, said, err := place.stageFailing(ctx, f)
	harness.Must(err)
	if err := place.stageInOrder(ctx, f); err != nil {
		return notGrown, fmt.Errorf("after the answer %s: %w", said, err)
	}
	var left []int64
	disk.WithStore(func(flakydisk.Store) { left = marks(content) })
	if len(left) > 0 {
		err = fmt.Errorf("after the answer %s: records of the driver are left at %d", said, left)
	}
	return notGrown, err
}

// stageFailing stages on a failing disk. said is the driver's answer, and err what it did wrong.
func (p *placement) stageFailing(ctx context.Context, f failing) (notGrown bool, said string,
	err error) {
	fired := p.disk.AddFault(flakydisk.Fault{On: f.op, From: f.sector,
		To: f.sector + flakydisk.SectorBytes, Times: f.times})
	before := harness.Got(p.bench.formats.Count())
	answer := p.stage(ctx)
	if answer != nil && f.times == 0 {
		harness.Must(wrongReason(f, answer))
		answer = p.stage(ctx)
	}
	p.disk.Heal()
	// The kernel's own writes can fail, too, until Heal(). So count the failures after Heal().
	struck, said := fired(), fmt.Sprint(answer)
	after := harness.Got(p.bench.formats.Count())
	switch {
	case after != before && !f.of.blank:
		return false, said, fmt.Errorf("a disk that was in use was formatted; the answer is %s", said)
	case after != before && f.proving && f.times == 0 && struck > 0:
		return false, said, fmt.Errorf("a disk that could not be read was formatted; the answer is %s",
			said)
	case answer != nil:
		return false, said, wrongReason(f, answer)
	case f.of.grows:
		notGrown, err = p.reportsNotGrown(ctx)
	}
	// The kernel writes the inode tables of a mounted ext gradually. If one of these writes fails, the
	// first unstage reports it, and a second one must succeed.
	undo := p.unstage
	if f.op == flakydisk.OnWrite && struck > 0 {
		undo = p.unstageTwice
	}
	return notGrown, said, errors.Join(err, undo(ctx))
}

func (p *placement) stageInOrder(ctx context.Context, f failing) error {
	if err := p.stage(ctx); err != nil {
		return fmt.Errorf("the disk is in order, and the call does not converge: %w", err)
	}
	promises, _ := f.of.ledger.at(0)
	return errors.Join(p.staged(), p.checkData(ctx, promises), p.usable(f.of), p.unstage(ctx))
}

// reportsNotGrown tells if the filesystem did not grow, and fails if the volume's health disagrees.
func (p *placement) reportsNotGrown(ctx context.Context) (notGrown bool, err error) {
	size := harness.Got(p.filesystemBytes())
	health := harness.Got(p.bench.Plugin.Node().NodeGetVolumeHealth(ctx,
		&csi.NodeGetVolumeHealthRequest{VolumeId: p.volume.id, StagingTargetPath: p.Staging}))
	notGrown = size < p.volume.grownAtLeast()
	if told := strings.Contains(health.String(), "FilesystemNotGrown"); told != notGrown {
		return notGrown, fmt.Errorf("the filesystem has %d bytes of a disk of %d, and its health is %v",
			size, p.volume.grownTo(), health)
	}
	return notGrown, nil
}

func wrongReason(f failing, answer error) error {
	reasons := []string{"NodeToolFailed"}
	if f.op == flakydisk.OnRead {
		reasons = append(reasons, "DeviceUnreadable")
	}
	if slices.ContainsFunc(reasons, func(reason string) bool {
		return strings.Contains(answer.Error(), "desc = "+reason+": ")
	}) {
		return nil
	}
	return fmt.Errorf("the reason is none of %q: %w", reasons, answer)
}

// onNewDisk stages and publishes a volume on a new disk, writes and syncs a file, and calls do().
func onNewDisk(ctx context.Context, b *bench, access string, r *rand.Rand,
	do func(*recorder)) (err error) {
	life := lifeOf(newVolume(access))
	disk := flakydisk.NewDisk(life.base.Fork())
	place, err := b.show(ctx, life.volume, disk)
	defer func() { err = errors.Join(err, place.hide()) }()
	defer harness.Catch(&err)
	harness.Must(err)
	rec := &recorder{recording: life, place: place, disk: disk, rand: r, loose: map[string]promise{}}
	rec.stage(ctx)
	if access != raw {
		rec.writeNew("before")
	}
	do(rec)
	return nil
}

func TestAVolumeOnAFailingDiskIsReportedAndCanBeUnstaged(t *testing.T) {
	checkReported(t, "failing-disk", 200, filesystems,
		func(ctx context.Context, b *bench, access string, r *rand.Rand) (wrong, err error) {
			return nil, onNewDisk(ctx, b, access, r, func(rec *recorder) { rec.failUnderWorkload(ctx) })
		})
}

func (r *recorder) failUnderWorkload(ctx context.Context) {
	r.disk.AddFault(flakydisk.Fault{On: flakydisk.OnWrite | flakydisk.OnFlush})
	harness.Must(errors.Join(r.writeUntilItFails(), r.place.reportsFailure(ctx),
		r.place.unpublish(ctx)))
	harness.Must(r.place.unstageTwice(ctx))
	r.disk.Heal()
	harness.Must(r.place.stage(ctx))
	promises, _ := r.ledger.at(len(r.ledger.events))
	harness.Must(errors.Join(r.place.checkData(ctx, promises), r.place.usable(r.recording),
		r.place.unstage(ctx)))
}

// writeUntilItFails writes to a failing disk until the kernel makes the filesystem read-only.
func (r *recorder) writeUntilItFails() error {
	for n := range 50 {
		name := fmt.Sprint("during-", n)
		if err := r.write(name, r.content(), os.O_CREATE); err == nil {
			return fmt.Errorf("%s was written and synced to a disk that fails", name)
		}
		if !r.writable() {
			return nil
		}
		_ = proof.SyncDir(r.place.Target) // fails, because it writes the journal
	}
	return errors.New("the filesystem is not read-only after 50 failed writes")
}

func (r *recorder) writable() bool {
	f, err := os.Create(filepath.Join(r.place.Target, "new"))
	return err == nil && f.Close() == nil
}

func (p *placement) reportsFailure(ctx context.Context) error {
	health, err := p.bench.Plugin.Node().NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{
		VolumeId: p.volume.id, VolumePublishPath: p.Target, StagingTargetPath: p.Staging})
	if err != nil {
		return err
	}
	if !strings.Contains(health.String(), "FilesystemFailed") {
		return fmt.Errorf("the health of a failed filesystem is %v", health)
	}
	stats, err := p.Stats(ctx, p.bench.Plugin.Node())
	if err != nil && !strings.Contains(err.Error(), "FilesystemFailed") {
		return fmt.Errorf("the statistics of a failed filesystem are %v, %w", stats, err)
	}
	return nil
}

func (p *placement) unstageTwice(ctx context.Context) error {
	first := p.unstage(ctx)
	if first == nil {
		return nil
	}
	return p.unstage(ctx)
}

func TestAFailedFlushDuringUnpublishOrUnstageIsReported(t *testing.T) {
	checkReported(t, "failing-flush", 300, append([]string{raw}, filesystems...), flushFails)
}

// checkReported calls fails() for a volume of each access type. fails() causes a failure. Its
// result wrong is an error if the driver does not report this failure.
func checkReported(t *testing.T, name string, stream uint64, accesses []string,
	fails func(context.Context, *bench, string, *rand.Rand) (wrong, err error)) {
	t.Helper()
	for i, access := range short.Some(t, 1, accesses) {
		t.Run(access, func(t *testing.T) {
			p := proof.New(t, name)
			b, err := newBench(t.Context(), harness.RunFor(t), "", nil)
			p.Fatal(err)
			t.Cleanup(func() { p.Error(b.close()) })
			r := rand.New(rand.NewPCG(p.Seed, stream+uint64(i)))
			wrong, err := fails(t.Context(), b, access, r)
			p.Error(errors.Join(wrong, err))
		})
	}
}

// flushFails makes one flush fail while the driver unpublishes and unstages a volume. wrong is an
// error if no call reports the failure.
func flushFails(ctx context.Context, b *bench, access string, r *rand.Rand) (wrong, err error) {
	err = onNewDisk(ctx, b, access, r, func(rec *recorder) {
		rec.writeLoose()
		if access == ext4 { // lazy initialization hides a failed flush
			harness.Must(harness.StopLazyInit(rec.place.Staging))
		}
		fired := rec.disk.AddFault(flakydisk.Fault{On: flakydisk.OnFlush, Times: 1})
		first, second := rec.place.unpublish(ctx), rec.place.unstage(ctx)
		if fired() != 1 {
			harness.Must(fmt.Errorf("%d flushes failed, want 1", fired()))
		}
		if first == nil && second == nil {
			wrong = errors.New("a flush failed, and every call answered OK")
		}
		harness.Must(errors.Join(rec.place.unpublish(ctx), rec.place.unstage(ctx)))
	})
	return wrong, err
}

func TestAFailedJournalCommitBeforeUnstageIsReported(t *testing.T) {
	checkReported(t, "failing-journal", 400, []string{ext3, ext4}, journalFails)
}

// journalFails makes a journal commit fail. The test causes this commit, not the driver. wrong is
// an error if neither a call nor the volume's health reports the failure.
func journalFails(ctx context.Context, b *bench, access string, r *rand.Rand) (wrong, err error) {
	err = onNewDisk(ctx, b, access, r, func(rec *recorder) {
		rec.writeLoose()
		target := harness.Got(os.Open(rec.place.Target))
		// Sync all data, and stop the writing of inode tables. Otherwise a kernel thread would notice the
		// failure before any call. The failing commit then contains only a new name.
		harness.Must(unix.Syncfs(int(target.Fd())))
		if access == ext4 {
			harness.Must(harness.StopLazyInit(rec.place.Staging))
		}
		harness.Must(os.WriteFile(rec.path("last"), nil, 0o600))
		fired := rec.disk.AddFault(flakydisk.Fault{On: flakydisk.OnFlush, Times: 1})
		_ = unix.Syncfs(int(target.Fd())) // commits the journal, and may return its error
		if err := target.Close(); err != nil || fired() != 1 {
			harness.Must(errors.Join(err, fmt.Errorf("%d flushes failed, want 1", fired())))
		}
		told := rec.place.reportsFailure(ctx)
		first, second := rec.place.unpublish(ctx), rec.place.unstage(ctx)
		if told != nil && first == nil && second == nil {
			wrong = errors.New("a journal failed, and every call answered OK")
		}
		harness.Must(errors.Join(rec.place.unpublish(ctx), rec.place.unstage(ctx)))
	})
	return wrong, err
}
