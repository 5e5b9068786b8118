package filesystem

import (
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// The checks before mkfs or a mount, each in one place:
//
//   - exactly one device has the serial: blockdev.Host.Lookup; it has the disk's size and is not
//     mounted: package node, before Preparation.Run; the size is known: disk.format
//   - the device stays open and is the same one before and after: Host.Open, Reverify and
//     openExclusive of blockdev; mkfs opens it by the inherited descriptor: inherited
//   - it is not in use: TryExclusive, blockdev.OpenDevice.WithExclusive
//   - every region was read: disk.readRegions; all are zero, and blkid finds nothing:
//     scan.checkBlank
//   - a disk that was not created blank is read whole: Preparation.proveBlank
//   - no process writes to it: blockdev.OpenDevice.AwaitNoWriters
//   - no other process of the driver works on it: blockdev.OpenDevice.lock
//   - where the regions are: markerRegions, one line for each kind of owner
//   - a record is valid: ParseRecord; it is of this volume, its disk and size, and nothing else has
//     been written since: scan.checkUnfinished, traces
//   - a filesystem that has been used is not formatted: scan.judge, scan.checkUnfinished
//   - a filesystem is undamaged, and no other signatures are around it: scan.filesystem
//   - it is whole on this device, and every feature is known: disk.allow
//   - it is the volume's own, of the requested type: Preparation.Run; and not larger than its disk:
//     disk.prepare
//   - nothing is behind it where it is about to grow: Preparation.mayGrow

// state is what a disk holds: nothing, a filesystem that can be mounted, or an unfinished format of
// this volume. Anything else is an error.
type state struct {
	Blank      bool
	Unfinished bool
	Filesystem Superblock
	// Growing reports that a growth of the ext was cut off, and Checked that the check before it had
	// succeeded. Grow reports that the filesystem may grow now.
	Growing, Checked, Grow bool
	// NeedsCheck reports that a power failure may have cut off mkfs after it had written the
	// superblock and before the rest was durable. Only a check of the filesystem can tell.
	NeedsCheck bool
}

// judge decides what the disk holds from the scan. Only judge calls a disk blank.
func (s scan) judge(v Volume) (state, error) {
	sb, whole := s.filesystem(v)
	switch growth := s.growth(v); {
	case len(growth) > 0:
		return state{Filesystem: s.Found[0], Growing: true,
			Checked: slices.ContainsFunc(growth, func(r foundRecord) bool { return r.Checked })}, nil
	case whole && !sb.Fresh:
		return state{Filesystem: sb, NeedsCheck: s.needsCheck(v)}, nil
	case len(s.validRecords()) > 0:
		if err := s.checkUnfinished(v); err != nil {
			return state{}, err
		}
		return state{Unfinished: true}, nil
	case whole:
		return state{Filesystem: sb}, nil
	}
	if err := s.checkBlank(); err != nil {
		return state{}, err
	}
	return state{Blank: true}, nil
}

// needsCheck reports whether the disk's btrfs may be one that mkfs had written but not made
// durable: it has no trace of a mount, and records of its format by this volume are on the disk.
func (s scan) needsCheck(v Volume) bool {
	if len(s.Found) != 1 || !s.Found[0].MaybeFresh || len(s.validRecords()) == 0 {
		return false
	}
	sb := s.Found[0]
	sb.Fresh = true
	s.Found = []Superblock{sb}
	return s.checkUnfinished(v) == nil
}

// filesystem returns the disk's one filesystem, and whether the disk holds it and nothing else.
//
// A signature among the filesystem's data may be a file's or another owner's: a RAID that was
// created around a filesystem has its signature at the disk's end, and so has a file that holds an
// image of a RAID member. A filesystem with the UUID that the driver gave it is the volume's, and a
// workload must not lose its volume by writing such bytes. For any other filesystem, and if boot
// code precedes the superblock, blkid decides.
func (s scan) filesystem(v Volume) (sb Superblock, whole bool) {
	if len(s.Found) != 1 {
		return Superblock{}, false
	}
	sb = s.Found[0]
	own := v.FilesystemUUID != "" && sb.isOf(v) && nonZero(s.at(0, sb.Offset)) < 0
	return sb, (own || s.Blkid == blkidResult{Type: sb.Type}) && !sb.Unfinished && !sb.Damaged &&
		len(s.foreign(sb)) == 0
}

// growth returns the records of a growth of the disk's ext3 or ext4 for this volume that was cut
// off. Then signatures behind the filesystem are part of the growth. Once the filesystem has been
// mounted, the records say nothing.
func (s scan) growth(v Volume) []foundRecord {
	if len(s.Found) != 1 || !s.Found[0].isExt() {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(s.Growth), func(r foundRecord) bool {
		return !r.of(v, s.SizeBytes) || r.Mounted != s.Found[0].Mounted
	})
}

// checkBlank returns an error unless all that was read is zero and blkid found nothing.
func (s scan) checkBlank() error {
	_, _, dirty := s.firstNonZero()
	if dirty || s.Blkid.found() {
		return csierr.New(csierr.DiskNotBlank, "%s is not blank: %s; %w", s.Path, s.evidence(),
			errNotBlank)
	}
	return nil
}

// checkUnfinished returns an error unless all that was found on the disk is of an unfinished format
// of this volume. Then the format may be repeated if the whole disk holds nothing else, which
// Preparation.proveBlank proves.
func (s scan) checkUnfinished(v Volume) error {
	for _, r := range s.validRecords() {
		switch {
		case r.inherited(v):
		case r.Volume != v.ID:
			return s.notOurs(r, "of volume %q, not of %q", r.Volume, v.ID)
		case r.Disk != v.DiskName:
			return s.notOurs(r, "of disk %q, not of %q", r.Disk, v.DiskName)
		case r.SizeBytes != s.SizeBytes:
			return s.notOurs(r, "of a disk of %d bytes, this one has %d", r.SizeBytes, s.SizeBytes)
		}
	}
	r := s.validRecords()[0]
	for _, sb := range s.Found {
		// A power failure may have torn the superblock that mkfs.btrfs wrote last.
		torn := sb.Damaged && sb.MaybeFresh
		if !sb.Unfinished && !sb.Fresh && !torn {
			return s.notOurs(r, "but the %s filesystem there has been used since", sb.Type)
		}
	}
	if others := s.foreign(Superblock{}); len(others) > 0 {
		return s.notOurs(r, "but there is also %s", others[0])
	}
	if s.Blkid.Table != "" || s.Blkid.Ambiguous ||
		(s.Blkid.Type != "" && !slices.Contains(ours, s.Blkid.Type)) {
		return s.notOurs(r, "but blkid finds %s", s.Blkid)
	}
	return nil
}

func (s scan) notOurs(r foundRecord, format string, args ...any) error {
	return csierr.New(csierr.DiskNotBlank,
		"%s has at offset %d the record of an unfinished format "+format+"; %w",
		slices.Concat([]any{s.Path, r.Offset}, args, []any{errNotBlank})...)
}
