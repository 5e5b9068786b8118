//go:build linux

package driver

import (
	"fmt"
	"slices"
)

// mkfsCommand is the program that makes the filesystem, without any flag that would make it
// overwrite: mkfs.xfs and mkfs.btrfs then refuse a disk that holds something, a second guard behind
// ours. (mke2fs asks only on a terminal, so with it ours is the only one.)
//
// None of them discards: the disk is blank, and the rest of a disk is not touched by mistake
// either. reservedPercent is 0 unless chosen, as Kubernetes has always formatted: no root daemon
// lives on a volume.
func mkfsCommand(fsType string, o mkfsOptions) (name string, args []string, err error) {
	switch fsType {
	case fsExt3, fsExt4:
		name, args = "mke2fs", []string{"-q", "-t", fsType, "-E", "nodiscard"}
		if o.value("reservedPercent") == "" {
			args = append(args, "-m", "0")
		}
	case fsXFS:
		name, args = "mkfs.xfs", []string{"-q", "-K"}
	case fsBtrfs:
		name, args = "mkfs.btrfs", []string{"-q", "-K"}
	default:
		return "", nil, fmt.Errorf("no mkfs for filesystem %q", fsType)
	}
	return name, slices.Concat(args, o.args(fsType)), nil
}

// format makes a filesystem on a device that inspect found blank, and looks at what came out. The
// caller keeps the device open from inspect to the end, so its number stays its own.
func (h *heldDevice) format(fsType string, o mkfsOptions) (superblock, error) {
	name, args, err := mkfsCommand(fsType, o)
	if err != nil {
		return superblock{}, err
	}
	if err := h.unchanged(); err != nil {
		return superblock{}, err
	}
	if err := h.claim(); err != nil {
		return superblock{}, err
	}
	result, err := runTool(nil, name, append(args, h.Path)...)
	if err != nil {
		return superblock{}, err
	}
	if result.Exit != 0 {
		return superblock{}, result.failure(name, h.Path)
	}
	if err := h.unchanged(); err != nil {
		return superblock{}, err
	}
	head, err := h.readAt(0, min(h.SizeBytes, edgeBytes))
	if err != nil {
		return superblock{}, refuse(ReasonDeviceUnreadable, "the new filesystem cannot be read: %w", err)
	}
	made := findSuperblocks(head)
	if len(made) != 1 || made[0].Type != fsType || made[0].Unfinished {
		return superblock{}, refuse(ReasonNodeToolFailed, "%s ended well, but %s holds no %s", name,
			h.Path, fsType)
	}
	return made[0], nil
}
