//go:build linux

package powercut_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
)

// onNewDisk stages and publishes a volume on a new disk, and writes a file, which fsync
// acknowledges. Then it calls do, and removes what do has left.
func onNewDisk(ctx context.Context, b *bench, access string, r *rand.Rand,
	do func(*recorder)) (err error) {
	life := lifeOf(newVolume(access))
	disk := flakydisk.NewDisk(life.base.Fork())
	place, err := b.show(ctx, life.volume, disk)
	defer func() { err = errors.Join(err, place.hide()) }()
	defer harness.Catch(&err)
	harness.Must(err)
	rec := &recorder{recording: life, place: place, disk: disk, rand: r,
		loose: map[string]promise{}}
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

// writeUntilItFails writes until the filesystem has become read-only because its disk fails. No
// write may succeed.
func (r *recorder) writeUntilItFails() error {
	for n := range 50 {
		name := fmt.Sprint("during-", n)
		if err := r.write(name, r.content(), os.O_CREATE); err == nil {
			return fmt.Errorf("%s was written and synced to a disk that fails", name)
		}
		if !r.writable() {
			return nil
		}
		_ = r.syncDir() // fails, because it writes the journal
	}
	return errors.New("the filesystem is not read-only after 50 failed writes")
}

// writable reports whether new files can be made in the filesystem.
func (r *recorder) writable() bool {
	f, err := os.Create(filepath.Join(r.place.Target, "new"))
	return err == nil && f.Close() == nil
}

// reportsFailure returns an error unless statistics and health report that the filesystem has
// failed.
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

// unstageTwice unstages a volume from a disk that fails. The first call may report the failure.
func (p *placement) unstageTwice(ctx context.Context) error {
	first := p.unstage(ctx)
	if first == nil {
		return nil
	}
	return p.unstage(ctx)
}

func TestAFlushThatFailsWhileAVolumeIsUnstagedIsReported(t *testing.T) {
	checkReported(t, "failing-flush", 300, append([]string{raw}, filesystems...), flushFails)
}

// checkReported calls fails for volumes of several access types. fails causes a failure, and
// returns an error unless a call reports it.
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

// flushFails makes one flush fail while a volume is removed. It returns an error unless a call
// reports this and the repeated calls succeed.
func flushFails(ctx context.Context, b *bench, access string, r *rand.Rand) (wrong, err error) {
	err = onNewDisk(ctx, b, access, r, func(rec *recorder) {
		rec.writeLoose()
		if access == ext4 { // the kernel would ignore that a flush of this work fails
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

func TestAJournalThatFailsBeforeAVolumeIsUnstagedIsReported(t *testing.T) {
	checkReported(t, "failing-journal", 400, []string{ext3, ext4}, journalFails)
}

// journalFails makes the commit of a journal fail in another program than the driver. It returns an
// error unless a call or the volume's health reports this.
func journalFails(ctx context.Context, b *bench, access string, r *rand.Rand) (wrong, err error) {
	err = onNewDisk(ctx, b, access, r, func(rec *recorder) {
		rec.writeLoose()
		target := harness.Got(os.Open(rec.place.Target))
		// After this, the failing commit contains only a new name. If it contained data, or the kernel
		// still wrote inode tables, a thread of the kernel would notice the failure before any call.
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
