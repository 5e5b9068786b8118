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

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
)

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

// lifeOf returns the recording of a volume that begins with its blank disk.
func lifeOf(v volume) *recording {
	return &recording{name: "the life of " + v.access, volume: v, blank: true,
		base: flakydisk.NewImage(v.size)}
}

// wholeLife returns the recording of the life of a volume that may also be used as a raw device.
// The driver reads its whole disk before it formats it, which takes long, so it has no power cuts.
func wholeLife(v volume) *recording {
	life := lifeOf(v)
	life.name, life.readWhole = "the life of a disk that is read whole", true
	life.volume.history = maps.Clone(v.history)
	life.volume.history["use"] = "both"
	return life
}

// liveOnce stages a volume, makes a workload use it, and unstages it.
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

// useAgain is liveOnce for an existing filesystem.
func useAgain(ctx context.Context, r *recorder) {
	r.stage(ctx)
	r.work(2)
	r.unstage(ctx)
}

// grow records a volume whose disk has become larger. The controller reports that the disk was
// restored from a snapshot, so that the driver reads only samples behind the filesystem.
func grow(ctx context.Context, b *bench, life *recording, r *rand.Rand) *recording {
	made := &recording{name: "the growth of " + life.volume.access, volume: life.volume,
		base: life.final.Fork(), ledger: ledger{first: life.kept}, grows: true}
	made.volume.history = map[string]string{"origin": "snapshot", "use": "filesystem",
		"sourceBytes": fmt.Sprint(life.volume.size), "filesystemUUID": life.volume.id}
	harness.Must(made.base.Resize(life.volume.grownTo()))
	return recorded(ctx, b, made, r, useAgain)
}

// growAgain records the repetition of a growth that was interrupted after a write behind the old
// end of the filesystem. A btrfs writes nothing there before its commit.
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

// recoverFrom records the recovery of a volume whose workload was interrupted.
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

// resumeBtrfs records the repetition of a format for btrfs that was interrupted after mkfs had
// written the unfinished superblock and a whole tree block.
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

// resumeFrom records the repetition of a format whose interruption has left the image.
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

// finish records the repetition of a format for btrfs that was interrupted between the last write
// of a superblock and the flush of that write. The log begins with this write.
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

// write writes the data of a record to the disk, without a flush.
func (p *placement) write(r flakydisk.LogEntry) error {
	device, err := os.OpenFile(p.loop.Path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = device.WriteAt(r.Data, r.Offset)
	return errors.Join(err, unix.SyncFileRange(int(device.Fd()), r.Offset, r.Bytes,
		unix.SYNC_FILE_RANGE_WRITE|unix.SYNC_FILE_RANGE_WAIT_AFTER), device.Close())
}

// releaseRaw records a disk with an unfinished format, which a workload then gets as a raw device.
func releaseRaw(ctx context.Context, b *bench, life *recording, r *rand.Rand) *recording {
	made := &recording{name: "raw use after a format of " + life.volume.access, volume: life.volume,
		base: unfinishedFormat(ctx, b, life, r).content()}
	made.volume.access, made.volume.history = raw, map[string]string{"origin": "blank", "use": "both"}
	return recorded(ctx, b, made, r, liveOnce)
}

// repair records an ext that is marked as having errors, and has wrong counts, which e2fsck -p
// repairs.
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

// cutAt returns an image of a recording that fits and that the driver accepts: some images are
// rightly refused. It saves an image with a fault.
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
