//go:build linux

package powercut_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
)

// sampledSectors is the number of sectors of a scenario that fail, each in another request. In the
// short form it is shortSectors. In the long form all requests fail.
const (
	sampledSectors = 4
	shortSectors   = 1
)

// failing is a sector that fails while a volume is staged.
type failing struct {
	of     *recording
	op     flakydisk.Op
	sector int64
	// proving is set if the driver reads the sector to prove that the disk is blank.
	proving bool
	// times is the number of failures; 0 means that the sector always fails.
	times int
}

func (f failing) String() string {
	return fmt.Sprintf("%s, the sector at %d fails, op %d, %d times (0 is always)", f.of.name,
		f.sector, f.op, f.times)
}

func TestAStageOnAFailingSectorNeverFormatsOrMountsOnAGuess(t *testing.T) {
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

// failures counts the results of the failing sectors.
type failures struct {
	*trials
	sectors, of, right int
	// notGrown counts the filesystems that were used without growing, and whose health reports
	// this.
	notGrown int
}

// round records every scenario with a seed, and makes its sectors fail.
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
	// The scenarios take turns, so that each has results if the time is too short for all sectors.
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

// note counts the result for a sector.
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

// sectorsOf returns failing sectors of a stage, in random order: one sector for each of some
// requests, which fails once or always. In the long form it returns sectors of all requests, and
// each sector twice: failing once, and always.
func (c *failures) sectorsOf(of *recording, r *rand.Rand) (all []failing) {
	found := requests(of, r)
	r.Shuffle(len(found), func(i, j int) { found[i], found[j] = found[j], found[i] })
	if !c.p.Long() {
		n := sampledSectors
		if c.p.Short() {
			n = shortSectors
		}
		if of.readWhole {
			n /= 2 // because such a stage takes long
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

// requests returns, for each request of a stage, the sectors that can fail: all sectors of a small
// request, and the first, the last and one in between of a large one. It omits sectors that were in
// an earlier request of the same kind.
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

// fail stages a volume on a disk with a failing sector, and again when the disk works. It reports
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

// stageFailing stages and unstages a volume while a sector fails, and returns the driver's message.
// The error describes a fault of the driver.
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
	// Read after Heal: until then the kernel's own writes to the mounted filesystem may fail, too.
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
	// The kernel writes the inode tables of a mounted ext gradually. If such a write has failed, the
	// first unstage reports it.
	undo := p.unstage
	if f.op == flakydisk.OnWrite && struck > 0 {
		undo = p.unstageTwice
	}
	return notGrown, said, errors.Join(err, undo(ctx))
}

// stageInOrder stages a volume on a disk that works again.
func (p *placement) stageInOrder(ctx context.Context, f failing) error {
	if err := p.stage(ctx); err != nil {
		return fmt.Errorf("the disk is in order, and the call does not converge: %w", err)
	}
	promises, _ := f.of.ledger.at(0)
	return errors.Join(p.staged(), p.checkData(ctx, promises), p.usable(f.of), p.unstage(ctx))
}

// reportsNotGrown reports whether a staged filesystem was not grown to its disk. It returns an
// error unless the volume's health reports the same.
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

// wrongReason returns an error unless the answer to a stage has the right reason.
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
