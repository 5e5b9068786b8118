//go:build linux

package corpus_test

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

// tails returns filesystems on larger disks with data behind them. The driver must mount them
// without growing them, and must not change a byte behind them.
func tails() []generator {
	var all []generator
	for _, fs := range ours {
		all = append(all, tail(fs+" with a byte somewhere behind it", fs, anywhere, nil),
			tail(fs+" with data behind it", fs, func(t *trial, im *image) {
				at := fsBytes + t.Rand.Int64N((im.Size-fsBytes)/2)
				im.write(at, randomBytes(t.Rand, 1+t.Rand.Int64N(4*mib))...)
			}, nil),
			tail(fs+" with a byte behind it that its snapshot had", fs, func(t *trial, im *image) {
				im.write(fsBytes+t.Rand.Int64N(fsBytes/2), 1)
			}, restoredFrom("snapshot", "filesystem", fsBytes+fsBytes/2)),
			tail(fs+" with a byte behind it that its snapshot had not", fs, anywhere,
				restoredFrom("snapshot", "filesystem", fsBytes)),
			nothingBehind(fs+" with nothing behind it", fs, nil),
			nothingBehind(fs+" with nothing behind it on a disk that was restored", fs,
				restoredFrom("snapshot", "filesystem", fsBytes)))
	}
	return append(all,
		tail("ext4 with a byte behind it on a disk from an image", ext4, anywhere,
			restoredFrom("image", "filesystem", fsBytes)),
		tail("xfs with a byte behind it on a disk that was restored for raw use, too", xfs, anywhere,
			restoredFrom("snapshot", "both", fsBytes)),
		tail("ext4 whose growth another volume had begun", ext4, func(*trial, *image) {},
			(*fixture).growthOfAnother))
}

// anywhere writes a byte at a random place behind the filesystem.
func anywhere(t *trial, im *image) {
	im.write(fsBytes+t.Rand.Int64N(im.Size-fsBytes), 1)
}

// restoredFrom makes the controller report such a history of the disk.
func restoredFrom(origin, use string, sourceBytes int64) func(f *fixture) error {
	return func(f *fixture) error {
		f.Publish["origin"], f.Publish["use"] = origin, use
		f.Publish["sourceBytes"] = fmt.Sprint(sourceBytes)
		return nil
	}
}

// tail returns a filesystem with data behind it.
func tail(name, fs string, fill func(*trial, *image), set func(*fixture) error) generator {
	return generator{name, func(t *trial) {
		var before string
		kindOf(fs).of(t)
		t.Size += fsBytes
		t.Fill = func(im *image) {
			im.filesystem(kindOf(fs))
			fill(t, im)
		}
		t.Set = func(f *fixture) error {
			var err error
			if set != nil {
				err = set(f)
			}
			before = f.image.behind(fsBytes)
			return errors.Join(err, f.image.err)
		}
		t.Want.Outcome = mounted
		t.Check = func(f *fixture) error {
			if err := f.loop.Sync(); err != nil {
				return err
			}
			if now := f.image.behind(fsBytes); now != before {
				return fmt.Errorf("what lies behind the filesystem was %s and is %s", before, now)
			}
			size, err := f.mountedBytes()
			if size > fsBytes {
				err = fmt.Errorf("the filesystem has grown from %d to %d bytes", fsBytes, size)
			}
			return errors.Join(err, f.image.err)
		}
	}}
}

// nothingBehind returns a filesystem that must grow. Without it a driver that grows no
// filesystem would pass.
func nothingBehind(name, fs string, set func(*fixture) error) generator {
	g := tail(name, fs, func(*trial, *image) {}, set)
	return generator{name, func(t *trial) {
		g.make(t)
		t.Check = func(f *fixture) error {
			size, err := f.mountedBytes()
			if err == nil && size <= fsBytes {
				err = fmt.Errorf("the filesystem has %d bytes and has not grown", size)
			}
			return err
		}
	}}
}

// mountedBytes returns the size of the staged filesystem, without the space that the
// filesystem uses itself.
func (f *fixture) mountedBytes() (int64, error) {
	var st unix.Statfs_t
	err := unix.Statfs(f.Staging, &st)
	return int64(st.Blocks) * st.Bsize, err
}

// growthOfAnother makes the driver begin to grow the filesystem for another volume, and then
// writes a byte behind the filesystem.
func (f *fixture) growthOfAnother() error {
	volume := f.VolumeID
	f.VolumeID = randomUUID(f.trial)
	unwrap, err := f.wrap("resize2fs", "exit 1")
	if err != nil {
		return err
	}
	if err := f.stage(context.Background()); err == nil {
		return setupViolation("the driver took a growth that failed for a good one")
	}
	f.VolumeID = volume
	return errors.Join(unwrap(), f.poke(fsBytes+f.Rand.Int64N(fsBytes/2), 1), f.loop.Sync())
}

// behind returns a hash of an image's bytes from an offset on.
func (im *image) behind(offset int64) string {
	if im.err != nil {
		return ""
	}
	sum := sha256.New()
	im.err = proof.EachPage(im.Path, func(at int64, page []byte) error {
		if at >= offset {
			sum.Write(binary.LittleEndian.AppendUint64(nil, uint64(at)))
			sum.Write(page)
		}
		return nil
	})
	return fmt.Sprintf(digestFormat, im.Size-offset, sum.Sum(nil)[:8])
}
