package filesystem

import (
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

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
	sb, alone, whole := s.filesystem(v)
	switch growth := s.growth(v); {
	case alone && len(growth) > 0:
		return state{Filesystem: s.Found[0], Growing: true,
			Checked: slices.ContainsFunc(growth, func(r foundRecord) bool { return r.Checked })}, nil
	case whole && !sb.Fresh:
		return state{Filesystem: sb, NeedsCheck: s.needsCheck(v)}, nil
	case len(s.Records) > 0:
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
	return len(s.Found) == 1 && s.Found[0].MaybeFresh && len(s.Records) > 0 &&
		!slices.ContainsFunc(s.Records, func(r foundRecord) bool { return !r.of(v, s.SizeBytes) })
}

// filesystem returns the disk's one filesystem, whether the disk holds it and nothing else, and
// whether it is whole besides.
//
// A signature of another owner may be a file's data: a RAID that was created around a filesystem
// has its signature at the disk's end, and so has a file that holds an image of a RAID member. A
// filesystem with the UUID that the driver gave it is the volume's, and a workload must not lose
// its volume by writing such bytes. For any other filesystem, and if something precedes the
// superblock, blkid decides.
func (s scan) filesystem(v Volume) (sb Superblock, alone, whole bool) {
	if len(s.Found) != 1 {
		return Superblock{}, false, false
	}
	sb = s.Found[0]
	own := v.FilesystemUUID != "" && sb.isOf(v) && nonZero(s.at(0, sb.Offset)) < 0
	alone = own || s.Blkid == sb.Type || sb.Damaged && s.Blkid == ""
	return sb, alone, alone && !sb.Unfinished && !sb.Damaged
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
	if dirty || s.Blkid != "" {
		return csierr.New(csierr.DiskNotBlank, "%s is not blank: %s; %w", s.Path, s.evidence(),
			errNotBlank)
	}
	return nil
}

// checkUnfinished returns an error unless all that was found on the disk is of an unfinished format
// of this volume. Then the format may be repeated if the whole disk holds nothing else, which
// Preparation.proveBlank proves.
func (s scan) checkUnfinished(v Volume) error {
	for _, r := range s.Records {
		if !r.of(v, s.SizeBytes) {
			return s.notOurs(r, "not of this one")
		}
	}
	for _, sb := range s.Found {
		// A power failure may have torn the superblock that mkfs.btrfs wrote last.
		torn := sb.Damaged && sb.MaybeFresh
		if !sb.Unfinished && !sb.Fresh && !torn {
			return s.notOurs(s.Records[0], "but the "+sb.Type+" filesystem there has been used since")
		}
	}
	return nil
}

func (s scan) notOurs(r foundRecord, why string) error {
	return csierr.New(csierr.DiskNotBlank, "%s has at offset %d the record of an unfinished format "+
		"of volume %q on disk %q of %d bytes, %s; %w", s.Path, r.Offset, r.Volume, r.Disk, r.SizeBytes,
		why, errNotBlank)
}
