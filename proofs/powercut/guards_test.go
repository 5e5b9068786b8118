//go:build linux

package powercut_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
)

// flush is a flush of the driver. The trial must fail if the Guard's edits have removed the flush.
type flush struct {
	proof.Guard
	try    trial
	stream uint64 // of random numbers
}

// scenario makes a recording with the driver of b, the driver of whole, or both. The driver of
// whole is unmodified.
type scenario func(ctx context.Context, b, whole *bench, v volume, r *rand.Rand) *recording

// trial returns what the driver of b does wrong. The driver of whole is unmodified.
type trial func(ctx context.Context, b, whole *bench, r *rand.Rand) (wrong, err error)

// imagesOf returns a trial that records a scenario, and then checks images of the recording.
func imagesOf(access string, record scenario) trial {
	return func(ctx context.Context, b, whole *bench, r *rand.Rand) (wrong, err error) {
		defer harness.Catch(&err)
		return whole.firstWrong(ctx, record(ctx, b, whole, newVolume(access), r), r, false)
	}
}

// directly returns a trial that calls fails() with the bench b. It is for a flush whose removal
// makes no image wrong, because another program flushes, too.
func directly(access string, fails func(context.Context, *bench, string, *rand.Rand) (wrong,
	err error)) trial {
	return func(ctx context.Context, b, _ *bench, r *rand.Rand) (wrong, err error) {
		return fails(ctx, b, access, r)
	}
}

// flushes returns the driver's flushes of disks, except the one after a growth record. As resize2fs
// flushes before it writes, no test fails without this flush.
func flushes() []flush {
	one := func(name, place, text, with string, try trial) flush {
		return flush{Guard: proof.Guard{Name: name,
			Edits: []proof.Edit{{Place: place, Text: text, With: with}}}, try: try}
	}
	const last, skip = "return d.unwritable(w.Sync())", "if REMOVED {\nreturn nil\n}\nTEXT"
	return []flush{
		one("the record of a format is durable before mkfs", "filesystem.disk.writeRecords", last,
			"if REMOVED && slices.Equal(slots, RecordOffsets(d.SizeBytes)) {\nreturn nil\n}\nTEXT",
			imagesOf(xfs, aLife)),
		one("records are erased before the disk is used", "filesystem.disk.eraseRecords", last, skip,
			imagesOf(ext4, aLife)),
		one("the UUID of a btrfs is durable before its records are erased",
			"filesystem.disk.setBtrfsUUID", "errors.Join(blockdev.WriteAt(w, b, at), w.Sync())",
			"errors.Join(blockdev.WriteAt(w, b, at), unless(REMOVED, w.Sync))", imagesOf(btrfs, aLife)),
		one("a record is erased before a workload gets the raw disk", "filesystem.disk.eraseRecords",
			last, skip, imagesOf(ext4, aRelease)),
		one("what was written is durable when the volume is unstaged", "node.heldVolume.flush",
			"device.Flush()", proof.NotCalled, imagesOf(raw, aLife)),
		// On an ext4 the journal reports the failure even without this flush, so use an xfs.
		one("an unstage reports what could not be written", "node.heldVolume.unmount",
			"mount.Sync(path)", proof.NotCalled, directly(xfs, flushFails)),
		one("an unstage reports a journal that has failed", "node.heldVolume.release",
			"checkJournal(v.node.log(), device)", proof.NotCalled, directly(ext4, journalFails)),
		one("the remains of a format are wiped before mkfs", "filesystem.disk.clearSectors", last, skip,
			imagesOf(btrfs, aResumption)),
		one("a format that had ended is durable before its records are erased",
			"filesystem.disk.finishFormat", "w.Sync()", proof.NotCalled, imagesOf(btrfs, aFinish)),
	}
}

func aLife(ctx context.Context, b, _ *bench, v volume, r *rand.Rand) *recording {
	return recorded(ctx, b, lifeOf(v), r, liveOnce)
}

// after returns a scenario that calls next() with a recording of the unmodified driver.
func after(next func(context.Context, *bench, *recording, *rand.Rand) *recording) scenario {
	return func(ctx context.Context, b, whole *bench, v volume, r *rand.Rand) *recording {
		return next(ctx, b, aLife(ctx, whole, nil, v, r), r)
	}
}

var (
	aResumption = after(resumeBtrfs)
	aFinish     = after(finish)
	aRelease    = after(releaseRaw)
)

const shortGuards = 3

const guardImages = 100

// The test also checks that acknowledged data are lost on disks that ignore all flushes.
func TestATrialFailsIfOneFlushOfTheDriverIsRemoved(t *testing.T) {
	p := proof.New(t, "flush-guards")
	g := guardTrials{t: t, p: p, run: harness.RunFor(t)}
	all := flushes()
	var guards []proof.Guard
	for i := range all {
		all[i].stream = uint64(i)
		guards = append(guards, all[i].Guard)
	}
	var err error
	g.program, err = proof.BuildMutant(t.Context(), g.run.Dir, guards)
	p.Fatal(err)
	var lies []flush
	for i, access := range append([]string{raw}, filesystems...) {
		lies = append(lies, flush{proof.Guard{Name: "the flushes of a disk of " + access}, g.lie(access),
			uint64(100 + i)})
	}
	some := slices.Concat(short.Some(t, shortGuards, all), short.Some(t, 1, lies))
	if only := os.Getenv("PROOF_ONLY"); only != "" {
		some = slices.DeleteFunc(slices.Concat(all, lies), func(f flush) bool {
			return f.Name != only
		})
		if len(some) == 0 {
			t.Fatalf("PROOF_ONLY=%q is the name of no flush", only)
		}
	}
	// Three trials run at the same time, because a trial mostly waits.
	p.Error(harness.Share(3, some, func(_ int, jobs <-chan flush) (err error) {
		defer harness.Catch(&err)
		whole := harness.Got(newBench(t.Context(), g.run, "", nil))
		for f := range jobs {
			g.remove(whole, f)
		}
		return whole.close()
	}))
	p.Figure("tried", len(some), "noticed", g.noticed.Load())
}

type guardTrials struct {
	t       *testing.T
	p       *proof.Proof
	run     *harness.Run
	program string
	// noticed counts the flushes whose removal made a trial fail.
	noticed atomic.Int64
}

func (g *guardTrials) remove(whole *bench, f flush) {
	b, err := newBench(g.t.Context(), g.run, g.program, map[string]string{proof.RemovedGuard: f.Name})
	if err != nil {
		g.t.Error(err)
		return
	}
	wrong, err := f.try(g.t.Context(), b, whole, rand.New(rand.NewPCG(g.p.Seed, f.stream)))
	switch {
	case err != nil:
		g.t.Errorf("without %q: %v", f.Name, err)
	case wrong == nil:
		g.t.Errorf("no test fails without %q (seed %d)", f.Name, g.p.Seed)
	default:
		g.noticed.Add(1)
		g.p.Say("without %q: %v", f.Name, wrong)
	}
	g.p.Error(b.close())
}

// firstWrong checks images of a recording, and returns what is wrong with the first wrong image. If
// loss is set, it checks only images of a staged volume, and only for lost data.
func (b *bench) firstWrong(ctx context.Context, rec *recording, r *rand.Rand, loss bool) (
	wrong, err error) {
	defer harness.Catch(&err)
	s := harness.Got(newSampler(rec, r))
	var early []image
	if !loss {
		early = fromBothEnds(s.early())
	}
	for _, m := range slices.Concat(early, s.flushes(), s.sample(guardImages)) {
		if _, staged := rec.ledger.at(m.events); loss && !staged {
			continue
		}
		v := harness.Got(b.check(ctx, m))
		if loss && (v.lost || v.formatted) || !loss && v.wrong != nil {
			return fmt.Errorf("%s: %w", m.name, v.wrong), nil
		}
	}
	return nil, s.err
}

// fromBothEnds takes images alternately from both ends. The driver's own flushes come before and
// after the many writes of mkfs, so the images in the middle are less likely to be wrong.
func fromBothEnds(images []image) (all []image) {
	for i, j := 0, len(images)-1; i <= j; i, j = i+1, j-1 {
		all = append(all, images[i])
		if i < j {
			all = append(all, images[j])
		}
	}
	return all
}

// lie returns a trial with a disk that ignores every flush, and so must lose acknowledged data.
func (g *guardTrials) lie(access string) trial {
	return func(ctx context.Context, _, whole *bench, r *rand.Rand) (lost, err error) {
		defer harness.Catch(&err)
		life := lifeOf(newVolume(access))
		harness.Must(record(ctx, whole, life, r, liveOnce,
			flakydisk.Fault{On: flakydisk.OnFlush, Lie: true}))
		life.used = 0 // the disk counts as used from the start of the log
		if lost, err = whole.firstWrong(ctx, life, r, true); lost != nil {
			page := whole.draw(ctx, g.p, g.run.Dir, g.p.Seed, lost)
			harness.Must(g.p.CheckPage(page, lost.Error(), "power cut: ", "NodeStageVolume",
				"make powercut SEED="))
		}
		return lost, err
	}
}

func recordings(ctx context.Context, b *bench, access string, r *rand.Rand) (all []*recording,
	err error) {
	defer harness.Catch(&err)
	life := recorded(ctx, b, lifeOf(newVolume(access)), r, liveOnce)
	if access == raw {
		return []*recording{life, recorded(ctx, b, wholeLife(newVolume(ext4)), r, liveOnce)}, nil
	}
	growth := grow(ctx, b, life, r)
	all = []*recording{life, growth, recoverFrom(ctx, b, life, r), resume(ctx, b, life, r)}
	switch access {
	case btrfs:
		all = append(all, finish(ctx, b, life, r))
	case ext3, ext4:
		all = append(all, repair(ctx, b, life, r))
	}
	return append(all, growAgain(ctx, b, growth, r), releaseRaw(ctx, b, life, r)), nil
}

func recorded(ctx context.Context, b *bench, made *recording, r *rand.Rand,
	do func(context.Context, *recorder)) *recording {
	if err := record(ctx, b, made, r, do); err != nil {
		harness.Must(fmt.Errorf("record %s: %w", made.name, err))
	}
	return made
}

// lifeOf returns an empty recording for a volume whose disk is blank.
func lifeOf(v volume) *recording {
	return &recording{name: "the life of " + v.access, volume: v, blank: true,
		base: flakydisk.NewImage(v.size)}
}

// wholeLife returns an empty recording for a volume that may also be used as a raw device. No
// images of it are made, because the driver reads the whole disk before a format, which takes long.
func wholeLife(v volume) *recording {
	life := lifeOf(v)
	life.name, life.readWhole = "the life of a disk that is read whole", true
	life.volume.history = maps.Clone(v.history)
	life.volume.history["use"] = "both"
	return life
}

func liveOnce(ctx context.Context, r *recorder) {
	r.stage(ctx)
	if r.volume.raw() {
		r.workRaw(8)
	} else {
		r.forge()
		r.work(8)
	}
	r.unstage(ctx)
}

func useAgain(ctx context.Context, r *recorder) {
	r.stage(ctx)
	r.work(2)
	r.unstage(ctx)
}

// grow records the use of a volume that was restored from a snapshot to a larger disk. Before the
// filesystem grows, the driver reads the disk from the filesystem's end to the disk's end.
func grow(ctx context.Context, b *bench, life *recording, r *rand.Rand) *recording {
	made := &recording{name: "the growth of " + life.volume.access, volume: life.volume,
		base: life.final.Fork(), ledger: ledger{first: life.kept}, grows: true}
	made.volume.history = map[string]string{"origin": "snapshot", "use": "filesystem",
		"sourceBytes": fmt.Sprint(life.volume.size), "filesystemUUID": life.volume.id}
	harness.Must(made.base.Resize(life.volume.grownTo()))
	return recorded(ctx, b, made, r, useAgain)
}

// growAgain records a repeated growth, after a power cut interrupted the first one. The power cut
// came after a write behind the old end of the filesystem. For a btrfs it came after any write,
// because a btrfs writes behind its old end only in a commit.
func growAgain(ctx context.Context, b *bench, growth *recording, r *rand.Rand) *recording {
	base := cutAt(ctx, b, growth, r, func(m image) bool {
		behind, content := false, m.content()
		content.EachPage(func(at int64, _ []byte) bool {
			behind = behind || at >= growth.volume.size
			return !behind
		})
		_, staged := growth.ledger.at(m.events)
		return !staged && (behind || growth.volume.access == btrfs)
	})
	made := &recording{name: "the growth of " + growth.volume.access + " again",
		volume: growth.volume, base: base.content(), grows: true}
	made.ledger.first, _ = growth.ledger.at(base.events)
	return recorded(ctx, b, made, r, useAgain)
}

// recoverFrom records a volume after a power cut interrupted its workload.
func recoverFrom(ctx context.Context, b *bench, life *recording, r *rand.Rand) *recording {
	base := cutAt(ctx, b, life, r, func(m image) bool {
		_, staged := life.ledger.at(m.events)
		return staged && m.at > life.used && m.events > 5
	})
	made := &recording{name: "the recovery of " + life.volume.access, volume: life.volume,
		base: base.content()}
	made.ledger.first, _ = life.ledger.at(base.events)
	return recorded(ctx, b, made, r, useAgain)
}

func resume(ctx context.Context, b *bench, life *recording, r *rand.Rand) *recording {
	return resumeFrom(ctx, b, life, unfinishedFormat(ctx, b, life, r), r)
}

// resumeBtrfs records a repeated format for btrfs. A power cut interrupted the first format after
// mkfs had written the unfinished superblock and a whole tree block.
func resumeBtrfs(ctx context.Context, b *bench, life *recording, r *rand.Rand) *recording {
	return resumeFrom(ctx, b, life, cutAt(ctx, b, life, r, func(m image) bool {
		content, magic, tree := m.content(), make([]byte, 8), make([]byte, 16<<10)
		_, err := content.ReadAt(magic, 64<<10+0x40)
		_, treeErr := content.ReadAt(tree, mib)
		return err == nil && treeErr == nil && string(magic) == "!BHRfS_M" &&
			!isZero(tree[:flakydisk.PageBytes]) && !isZero(tree[len(tree)-flakydisk.PageBytes:]) &&
			m.at <= life.used && len(marks(content)) > 0
	}), r)
}

func resumeFrom(ctx context.Context, b *bench, life *recording, base image,
	r *rand.Rand) *recording {
	return recorded(ctx, b, &recording{name: "the resumed format of " + life.volume.access,
		volume: life.volume, base: base.content(), blank: true}, r, liveOnce)
}

func unfinishedFormat(ctx context.Context, b *bench, life *recording, r *rand.Rand) image {
	return cutAt(ctx, b, life, r, func(m image) bool {
		pages, content := 0, m.content()
		content.EachPage(func(int64, []byte) bool { pages++; return true })
		return m.at <= life.used && len(marks(content)) > 0 && pages > 6
	})
}

// finish records a repeated format for btrfs. A power cut interrupted the first format between the
// last write of a superblock and the next flush. The recording's log begins with this write.
func finish(ctx context.Context, b *bench, life *recording, r *rand.Rand) *recording {
	last := -1
	for i, record := range life.log[:life.used] {
		if record.Kind == flakydisk.Write && record.Offset == superblocks[btrfs][0] {
			last = i
		}
	}
	epochs := harness.Got(flakydisk.Replay(life.base, life.log))
	of := slices.IndexFunc(epochs, func(e flakydisk.Epoch) bool {
		return e.First <= last && last < e.End
	})
	if of < 0 {
		harness.Must(fmt.Errorf("%s has no write of a superblock", life.name))
	}
	return recorded(ctx, b, &recording{name: "the end of the format of " + life.volume.access,
		volume: life.volume, base: epochs[of].Durable.Fork(), blank: true}, r,
		func(ctx context.Context, rec *recorder) {
			harness.Must(rec.place.write(life.log[last]))
			liveOnce(ctx, rec)
		})
}

// write writes the data of a log entry to the device. It does not flush the device.
func (p *placement) write(r flakydisk.LogEntry) error {
	device, err := os.OpenFile(p.loop.Path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = device.WriteAt(r.Data, r.Offset)
	return errors.Join(err, unix.SyncFileRange(int(device.Fd()), r.Offset, r.Bytes,
		unix.SYNC_FILE_RANGE_WRITE|unix.SYNC_FILE_RANGE_WAIT_AFTER), device.Close())
}

// releaseRaw records the use of a disk with an unfinished format as a workload's raw device.
func releaseRaw(ctx context.Context, b *bench, life *recording, r *rand.Rand) *recording {
	made := &recording{name: "raw use after a format of " + life.volume.access, volume: life.volume,
		base: unfinishedFormat(ctx, b, life, r).content()}
	made.volume.access, made.volume.history = raw, map[string]string{"origin": "blank", "use": "both"}
	return recorded(ctx, b, made, r, liveOnce)
}

// repair records how e2fsck -p repairs an ext filesystem with wrong counts and the state "errors".
func repair(ctx context.Context, b *bench, life *recording, r *rand.Rand) *recording {
	path := filepath.Join(b.Dir, "repair")
	harness.Must(life.final.Save(path))
	defer os.Remove(path)
	debugfs := exec.CommandContext(ctx, "debugfs", "-w", "-f", "-", path)
	debugfs.Stdin = strings.NewReader("ssv state 2\nssv free_blocks_count 7\n" +
		"ssv free_inodes_count 7\n")
	if out, err := debugfs.CombinedOutput(); err != nil {
		harness.Must(fmt.Errorf("damage a filesystem: %w\n%s", err, out))
	}
	return recorded(ctx, b, &recording{name: "the repair of " + life.volume.access,
		volume: life.volume, base: harness.Got(flakydisk.Load(path)),
		ledger: ledger{first: life.kept}}, r, useAgain)
}

// cutAt returns an image that fits() accepts and that the driver can stage. It skips images that
// the driver may refuse. If the driver does anything wrong, cutAt saves the image and fails.
func cutAt(ctx context.Context, b *bench, of *recording, r *rand.Rand,
	fits func(image) bool) image {
	s := harness.Got(newSampler(of, r))
	for range 50 {
		for _, m := range s.sample(20) {
			if !fits(m) {
				continue
			}
			v, err := b.check(ctx, m)
			if err := errors.Join(err, v.wrong); err != nil {
				path := filepath.Join(filepath.Dir(b.Dir), "image-of-"+filepath.Base(b.Dir))
				harness.Must(errors.Join(fmt.Errorf("%s: %w; the image is %s", m.name, err, path),
					m.content().Save(path)))
			}
			if v.converged {
				return m
			}
		}
	}
	harness.Must(fmt.Errorf("no image of %s fits", of.name))
	return image{}
}
