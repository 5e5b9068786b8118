//go:build linux

package powercut_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
)

// verdict is the result of the check of an image.
type verdict struct {
	converged, refused bool
	lost, formatted    bool
	// damaged is set if the kernel refused an xfs with a torn block.
	damaged bool
	// wrong describes the fault, or is nil if there is none.
	wrong error
}

// check stages an image, and checks what must hold after every power cut. The error means that the
// check could not be made.
//
// The kernel's recovery of an xfs skips a torn block of metadata if its first sector is new. If an
// image is refused for this reason, the same image with whole records must be accepted.
func (b *bench) check(ctx context.Context, m image) (verdict, error) {
	v, err := b.checkOnce(ctx, m)
	if err != nil || !v.damaged {
		return v, err
	}
	whole, err := b.checkOnce(ctx, m.whole())
	if !whole.converged || whole.wrong != nil {
		v.wrong = errors.Join(v.wrong, fmt.Errorf("the image is refused with whole records, too: %w",
			whole.wrong))
	}
	return v, err
}

func (b *bench) checkOnce(ctx context.Context, m image) (v verdict, err error) {
	b.cut(m)
	found := m.content()
	content := found.Fork()
	disk := flakydisk.NewDisk(content)
	defer harness.Catch(&err)
	before := harness.Got(b.formats.Count())
	place, err := b.show(ctx, m.of.volume, disk)
	defer func() { err = errors.Join(err, place.hide()) }()
	harness.Must(err)
	answer := place.stage(ctx)
	after := harness.Got(b.formats.Count())
	promises, staged := m.of.ledger.at(m.events)
	if after != before && (m.at > m.of.used || staged) {
		v.formatted = true
		v.wrong = errors.New("a filesystem that had been in use was formatted")
	}
	if left := marks(found); staged && m.of.volume.raw() && len(left) > 0 {
		v.wrong = fmt.Errorf("a workload got a raw disk with records of a format at %d", left)
	}
	if size := m.btrfsBytes(found); staged && m.of.grows && size != 0 && size <= m.of.volume.size {
		v.wrong = fmt.Errorf("a workload got a btrfs that had grown, and it has %d bytes again", size)
	}
	if answer != nil {
		v.damaged = m.torn && m.of.volume.access == xfs &&
			strings.Contains(answer.Error(), "FilesystemDamaged")
		if v.refused = v.damaged || m.refusedRightly(found, answer); !v.refused {
			v.wrong = errors.Join(v.wrong, fmt.Errorf("the call does not converge: %w", answer))
		}
		if v.refused && place.mountable() {
			v.wrong = errors.Join(v.wrong, fmt.Errorf("the kernel mounts what was refused: %w", answer))
		}
		return v, nil
	}
	v.converged = true
	if err := place.staged(); err != nil {
		v.wrong = errors.Join(v.wrong, err)
		return v, nil
	}
	if err := place.checkData(ctx, promises); err != nil {
		v.lost = true
		v.wrong = errors.Join(v.wrong, fmt.Errorf("acknowledged data are lost: %w", err))
	}
	v.wrong = errors.Join(v.wrong, place.usable(m.of), place.unstage(ctx))
	disk.WithStore(func(flakydisk.Store) {
		if left := marks(content); len(left) > 0 {
			v.wrong = errors.Join(v.wrong, fmt.Errorf("records of the driver are left at %d", left))
		}
	})
	return v, nil
}

// superblocks contains the offset and the size of superblocks with more than one sector. If a power
// cut tears one, its checksum is wrong, and the kernel does not mount the filesystem.
var superblocks = map[string][2]int64{ext4: {1024, 1024}, btrfs: {64 << 10, 4096}}

// refusedRightly reports whether the refusal of an image is right: for a torn superblock or, if a
// format for btrfs was interrupted, for a torn tree block.
func (m image) refusedRightly(found *flakydisk.Image, answer error) bool {
	if m.torn && m.of.blank && m.at <= m.of.used && m.of.volume.access == btrfs &&
		m.headless(found, answer) {
		return true
	}
	at, ok := superblocks[m.of.volume.access]
	if !ok || !strings.Contains(answer.Error(), "DiskNotBlank") ||
		!strings.Contains(answer.Error(), "superblock whose checksum is wrong") &&
			!strings.Contains(answer.Error(), "has been used since") { // the refusal of a forged record
		return false
	}
	superblock := func(of *flakydisk.Image) string {
		b := make([]byte, at[1])
		if _, err := of.ReadAt(b, at[0]); err != nil {
			return ""
		}
		return string(b)
	}
	got, now := superblock(found), m.of.base.Fork()
	if got == superblock(now) {
		return false
	}
	for _, r := range m.of.log {
		if err := flakydisk.Apply(now, flakydisk.Whole(r)); err != nil || got == superblock(now) {
			return false // this is a superblock as it was written once, so it is not torn
		}
	}
	return true
}

// headless reports whether a disk with an unfinished format for btrfs was refused because of a tree
// block of mkfs whose first sector is missing. Only that sector shows to which filesystem it
// belongs.
func (m image) headless(found *flakydisk.Image, answer error) bool {
	const treeBlock = 16 << 10
	_, offset, ok := strings.Cut(answer.Error(), "that is not expected is at offset ")
	var at int64
	if _, err := fmt.Sscanf(offset, "%d", &at); !ok || err != nil {
		return false
	}
	head := make([]byte, flakydisk.SectorBytes)
	if _, err := found.ReadAt(head, at&^(treeBlock-1)); err != nil || !isZero(head) {
		return false
	}
	return slices.ContainsFunc(m.of.log[:m.at], func(r flakydisk.LogEntry) bool {
		return r.Kind == flakydisk.Write && r.Offset <= at && at < r.Offset+r.Bytes &&
			!isZero(r.Data[at-r.Offset:])
	})
}

func isZero(b []byte) bool {
	return !slices.ContainsFunc(b, func(c byte) bool { return c != 0 })
}

func (p *placement) mountable() bool {
	err := unix.Mount(p.loop.Path, p.Staging, p.volume.access, 0, "")
	return err == nil && unix.Unmount(p.Staging, 0) == nil
}

// btrfsBytes returns the size of a btrfs from its superblock, or 0 for another volume. If a grown
// btrfs had its old size again, data behind that would be lost.
func (m image) btrfsBytes(found *flakydisk.Image) int64 {
	b := make([]byte, 8)
	if _, err := found.ReadAt(b, 64<<10+0x70); err != nil || m.of.volume.access != btrfs {
		return 0
	}
	return int64(binary.LittleEndian.Uint64(b))
}

// checkData returns an error unless the workload's data are as promised.
func (p *placement) checkData(ctx context.Context, promises map[string]promise) (err error) {
	defer harness.Catch(&err)
	if !p.volume.raw() {
		return checkFiles(p.Staging, promises, p.bench.Forged)
	}
	harness.Must(p.publish(ctx))
	device := harness.Got(os.Open(p.Target))
	return errors.Join(checkRanges(device, promises), device.Close(), p.unpublish(ctx))
}

// usable returns an error unless a workload can use the filesystem and its whole disk.
func (p *placement) usable(of *recording) error {
	if p.volume.raw() {
		return nil
	}
	path := filepath.Join(p.Staging, "after")
	f, err := os.Create(path)
	if err == nil {
		_, err = f.WriteString("after the power cut")
		err = errors.Join(err, f.Sync(), f.Close(), os.Remove(path))
	}
	if err != nil {
		return fmt.Errorf("the filesystem cannot be used: %w", err)
	}
	size, err := p.filesystemBytes()
	if err == nil && of.grows && size < p.volume.grownAtLeast() {
		err = fmt.Errorf("the filesystem has %d bytes and was not grown to its disk of %d", size,
			of.base.Size())
	}
	return err
}

func (p *placement) filesystemBytes() (int64, error) {
	var st unix.Statfs_t
	err := unix.Statfs(p.Staging, &st)
	return int64(st.Blocks) * st.Bsize, err
}
