//go:build linux

package driver

import "os"

// prepare makes a filesystem that was found fit to be mounted: checked if it asks for it, and, for
// ext3 and ext4, grown to its device. They grow before the mount, for which the kernel asks no
// privilege beyond the device; xfs and btrfs can only grow when mounted, and are (see grow).
func (h *heldDevice) prepare(sb superblock) error {
	if sb.SizeBytes > h.SizeBytes {
		return refuse(ReasonFilesystemTooLarge, "%s has %d bytes, but its %s filesystem claims "+
			"%d; was the disk cut, or is it another disk?", h.Path, h.SizeBytes, sb.Type, sb.SizeBytes)
	}
	if sb.Type != fsExt3 && sb.Type != fsExt4 {
		return nil
	}
	grow := h.SizeBytes-sb.SizeBytes >= sb.UnitBytes
	if sb.Unclean == "" && !grow {
		return nil
	}
	if err := h.checkExt(grow); err != nil {
		return err
	}
	if !grow {
		return nil
	}
	result, err := runRepair([]*os.File{h.file}, "resize2fs", inherited)
	if err != nil {
		return err
	}
	if result.Exit != 0 {
		return result.failure("resize2fs", h.Path)
	}
	return nil
}

// The bits of e2fsck's exit status (e2fsck(8)).
const (
	fsckCorrected       = 1
	fsckCorrectedReboot = 2 // asks for a reboot only when the filesystem is mounted; it is not
	fsckUncorrected     = 4
)

// checkExt repairs what can be repaired without a question. whole checks a clean filesystem too,
// which resize2fs insists on.
func (h *heldDevice) checkExt(whole bool) error {
	args := []string{"-p"}
	if whole {
		args = append(args, "-f")
	}
	result, err := runRepair([]*os.File{h.file}, "e2fsck", append(args, inherited)...)
	switch {
	case err != nil:
		return err
	case result.Exit&^(fsckCorrected|fsckCorrectedReboot) == 0:
		return nil
	case result.Exit&fsckUncorrected != 0:
		return refuse(ReasonFilesystemDamaged, "the filesystem on %s needs a repair that may lose "+
			"data; run e2fsck on a snapshot first: %s", h.Path, lastWords(result.Stdout+result.Stderr))
	}
	return result.failure("e2fsck", h.Path)
}
