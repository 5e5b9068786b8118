package filesystem

import (
	"fmt"
	"os"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// prepare makes a filesystem that was found fit to be mounted: checked if it asks for it, and, for
// ext3 and ext4, grown to its device. They grow before the mount, for which the kernel asks no
// privilege beyond the device; xfs and btrfs can only grow when mounted, and are (see grow). Their
// growth is marked too: a node that dies in it may leave behind the filesystem what it had begun to
// add, which the next call could not tell from foreign data.
func (h disk) prepare(v Volume, c state) error {
	sb := c.Filesystem
	switch {
	case c.Growing:
		return h.growExt(v, c)
	case sb.SizeBytes > h.SizeBytes:
		return csierr.New(csierr.FilesystemTooLarge, "%s has %d bytes, but its %s filesystem claims "+
			"%d; was the disk cut, or is it another disk?", h.Path, h.SizeBytes, sb.Type, sb.SizeBytes)
	case c.Grow && sb.isExt():
		return h.growExt(v, c)
	case c.NeedsCheck && !sb.isOf(v):
		// A format that was cut off right before its last step (see identify). A check has found the
		// btrfs whole, and the marks of this volume's format stand beside it.
		_, err := h.nameBtrfs(sb, v.FilesystemUUID)
		return err
	case c.Grow:
		return h.writeGrowthRecords(h.growthRecord(v, sb))
	case sb.isExt() && sb.Unclean != "":
		return h.checkExt("-p")
	}
	return nil
}

func (h disk) growthRecord(v Volume, sb Superblock) Record {
	return Record{Volume: v.ID, Disk: v.DiskName, SizeBytes: h.SizeBytes, Filesystem: sb.Type,
		GrowFrom: sb.SizeBytes, Mounted: sb.Mounted}
}

// growExt checks the filesystem, as resize2fs insists, and grows it. resize2fs cannot be killed
// without harm, and e2fsck writes a superblock in pieces. So for that time a mark stands on the
// disk, behind what has been the filesystem's, and says how far the driver had come.
func (h disk) growExt(v Volume, c state) error {
	mark := h.growthRecord(v, c.Filesystem)
	if !c.Growing {
		if err := h.writeGrowthRecords(mark); err != nil {
			return err
		}
	}
	if err := h.checkExt(growCheck(c)...); err != nil {
		return err
	}
	// The check may have put another superblock in the place of a torn one.
	found, err := Find(h.OpenDevice)
	if err != nil {
		return err
	}
	if len(found) == 1 && found[0].grows(h.SizeBytes) {
		mark.GrowFrom, mark.Checked = found[0].SizeBytes, true
		if err := h.writeGrowthRecords(mark); err != nil {
			return err
		}
		if err := h.resizeExt(); err != nil {
			return err
		}
	}
	return h.WithExclusive(h.eraseGrowthRecords)
}

// growCheck says how e2fsck is run before a growth.
func growCheck(c state) []string {
	sb := c.Filesystem
	switch {
	case c.Checked:
		// All that can be wrong is what a resize2fs that was killed has left: the filesystem had been
		// found in order right before, and nobody has mounted it since.
		return []string{"-f", "-y"}
	case c.Growing && sb.Damaged:
		// An e2fsck was killed while it wrote the superblock; the copy in the first group is whole.
		copyAt := sb.UnitBytes / sb.BlockBytes
		if sb.BlockBytes == 1<<10 {
			copyAt++ // the boot block comes first
		}
		return []string{"-f", "-p", "-b", fmt.Sprint(copyAt), "-B", fmt.Sprint(sb.BlockBytes)}
	}
	return []string{"-f", "-p"}
}

// btrfsBroken says that a btrfs is not whole. The check only reads; it ends with 0 or with 1.
func (h disk) btrfsBroken() (bool, error) {
	if err := h.TryExclusive(); err != nil {
		return false, err
	}
	result, err := runTool([]*os.File{h.File}, "btrfs", "check", "--readonly", inherited)
	switch {
	case err != nil:
		return false, err
	case result.Exit > 1:
		return false, result.failure("btrfs check", h.Path)
	}
	return result.Exit == 1, nil
}

func (h disk) resizeExt() error {
	result, err := runRepair([]*os.File{h.File}, "resize2fs", inherited)
	if err != nil {
		return err
	}
	if result.Exit != 0 {
		return result.failure("resize2fs", h.Path)
	}
	return nil
}

// writeGrowMarks says durably on the disk that the filesystem is about to grow.
func (h disk) writeGrowthRecords(m Record) error {
	mark, err := m.Encode()
	if err != nil {
		return err
	}
	return h.WithExclusive(func(w *os.File) error {
		for _, slot := range GrowthOffsets(h.SizeBytes) {
			if slot < m.GrowFrom {
				continue
			}
			if err := blockdev.WriteAt(w, mark, slot); err != nil {
				return h.unwritable(err)
			}
		}
		return h.unwritable(w.Sync())
	})
}

// eraseGrowMarks takes away what is left of them.
func (h disk) eraseGrowthRecords(w *os.File) error {
	if err := w.Sync(); err != nil {
		return h.unwritable(err)
	}
	for _, slot := range GrowthOffsets(h.SizeBytes) {
		b, err := h.Read(slot, sectorBytes)
		if err != nil {
			return unreadable(err)
		}
		if m, err := ParseRecord(b); err != nil || m.GrowFrom == 0 {
			continue
		}
		clear(b)
		if err := blockdev.WriteAt(w, b, slot); err != nil {
			return h.unwritable(err)
		}
	}
	return h.unwritable(w.Sync())
}

// The bits of e2fsck's exit status (e2fsck(8)).
const (
	fsckCorrected       = 1
	fsckCorrectedReboot = 2 // asks for a reboot only when the filesystem is mounted; it is not
	fsckUncorrected     = 4
)

// checkExt checks the filesystem. With -p it repairs what can be repaired without a question, with
// -f it also looks at one that says it is clean.
func (h disk) checkExt(args ...string) error {
	result, err := runRepair([]*os.File{h.File}, "e2fsck", append(args, inherited)...)
	switch {
	case err != nil:
		return err
	case result.Exit&^(fsckCorrected|fsckCorrectedReboot) == 0:
		return nil
	case result.Exit&fsckUncorrected != 0:
		return csierr.New(csierr.FilesystemDamaged, "the filesystem on %s needs a repair that may lose "+
			"data; run e2fsck on a snapshot first: %s", h.Path,
			csierr.LastWords(result.Stdout+result.Stderr))
	}
	return result.failure("e2fsck", h.Path)
}
