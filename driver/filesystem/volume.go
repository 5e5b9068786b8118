// Package filesystem decides what a disk holds and makes a volume's filesystem ready to be mounted.
//
// Preparation.Run is the entry for the node. It scans the regions of the open device where
// filesystems, partition tables, RAIDs and volume managers keep their signatures, asks blkid, and
// judges the scan: blank, one filesystem, an unfinished format of this volume, or an error that
// names the evidence. Only then does it write: it formats a disk that is proven blank, repeats its
// own unfinished format, or checks and grows the filesystem that is there.
//
// A disk that was not created blank for filesystems is read whole before it is formatted. ZeroScans
// keeps these reads going when the caller gives up; the repeated call joins them.
//
// While a format or a growth is under way, a Record on the disk itself names the volume and the
// step. It is durable before the first other write and erased after the last one, so a process that
// dies at any instruction leaves either an untouched disk or one that the next call can finish.
//
// The package attaches no mount to a path: it uses detached mounts only to thaw. It imports no CSI
// types, so the proof that only blank disks are formatted can be reviewed alone. Reading and
// judging a disk needs Linux; the layouts (regions, superblocks, records) do not.
package filesystem

import (
	"os/exec"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// Volume is what Preparation needs to know about a volume.
type Volume struct {
	ID        string
	DiskName  string
	SizeBytes int64 // of the disk, from the controller; 0 if unknown
	ReadOnly  bool  // the disk itself is read-only
	FSType    string
	Mkfs      volume.MkfsOptions
	// Origin and the following come from the disk's ownership tag and are zero for a disk without one.
	Origin, Use    string
	SourceBytes    int64
	FilesystemUUID string // the only filesystem to mount; empty for any
}

// neverRaw reports whether the controller vouches that no workload ever had the disk as a raw
// device.
func (v Volume) neverRaw() bool { return v.Use == volume.UseFilesystem }

// madeBlank reports whether the disk was created blank and never published as a raw device. Then a
// sample of its bytes can prove that it is still blank. Any other disk is read whole.
func (v Volume) madeBlank() bool { return v.Origin == volume.OriginBlank && v.neverRaw() }

// slots returns the offsets of the volume's records: those on a disk of that size and, if the disk
// was restored from the snapshot of a smaller one, those on the smaller one.
func (v Volume) slots(offsets func(int64) []int64, sizeBytes int64) []int64 {
	slots := offsets(sizeBytes)
	if v.Origin == volume.OriginSnapshot && v.SourceBytes > 0 && v.SourceBytes < sizeBytes {
		slots = append(slots, offsets(v.SourceBytes)...)
	}
	return slots
}

// makeUUID returns the UUID for a new filesystem of the volume: the expected one, else the volume's
// id. It is empty if the id is not a UUID, as for a static volume with a name of its own.
func (v Volume) makeUUID() string {
	if v.FilesystemUUID != "" {
		return v.FilesystemUUID
	}
	if id, ok := volume.ParseID(v.ID); ok {
		return id
	}
	return ""
}

// Tools are the programs the node runs. Mounting needs none: the driver calls the kernel, which
// also keeps mount flags out of the process list.
var Tools = []string{
	"blkid", "mke2fs", "e2fsck", "resize2fs", "mkfs.xfs", "mkfs.btrfs", "btrfs",
}

// MissingTools returns the programs that the node needs and that are not in its PATH.
func MissingTools() []string {
	var missing []string
	for _, tool := range Tools {
		if _, err := exec.LookPath(tool); err != nil {
			missing = append(missing, tool)
		}
	}
	return missing
}
