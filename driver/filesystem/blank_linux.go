package filesystem

import (
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// What stands between a disk and mkfs, or a mount, each in one place:
//
//   - one device has the serial: devices.lookup; of the disk's size: openVolume; which has to be
//     told: format
//   - the device is open all the time, and the same one before and after: prove, unchanged,
//     openExclusive; mkfs opens it by the open descriptor: inherited
//   - it is mounted nowhere and held by nobody: stage, openExclusive
//   - every area was read: readAreas; is zero: checkBlank; and blkid knows nothing: checkBlank
//   - a disk that was not made blank is read whole: proveBlank
//   - nobody writes to it: awaitNoWriters
//   - no other process of the driver works on it: lock
//   - where the areas are: markerRegions, one line for each kind of owner
//   - a mark adds up: ParseRecord; is of this volume, its disk and size, and nobody else has put
//     anything there since: checkUnfinished, mkfsTraces
//   - a filesystem that has been used is not formatted: judge, checkUnfinished
//   - a filesystem is whole, and nobody else's marks are around it: alone, filesystem
//   - it is the volume's own: isOf; of the type that is asked for: mountVolume; and not larger than
//     its disk: prepare
//   - nothing is behind it where it is about to grow: mayGrow

// state is what a disk holds: nothing, a filesystem that can be mounted, or a format of this
// volume that was cut off. Everything else is refused.
type state struct {
	Blank      bool
	Unfinished bool
	Filesystem Superblock
	// Growing says that the filesystem was being grown when the driver was killed, and Checked that
	// it had been found in order before.
	Growing, Checked bool
	// Begun says that the growth of the filesystem had begun, of whatever type: nothing had been
	// behind it then. Grow says that it may grow now.
	Begun, Grow bool
	// Doubtful says that a power failure may have cut off mkfs after it had written the superblock
	// and before the rest was on the disk: only a check of the filesystem tells.
	NeedsCheck bool
}

// judge decides from what was read and from what blkid knows. Only it calls a disk blank.
func (s scan) judge(v Volume) (state, error) {
	fs, whole := s.filesystem(v)
	switch {
	case s.growing(v):
		return state{Filesystem: s.Found[0], Growing: true, Begun: true, Checked: s.checked(v)}, nil
	case whole && !fs.Fresh:
		// It has been in use. What a mark's place holds now is some file's: never a reason to format.
		return state{Filesystem: fs, Begun: len(s.growth(v)) > 0, NeedsCheck: s.needsCheck(v)}, nil
	case len(s.validRecords()) > 0:
		if err := s.checkUnfinished(v); err != nil {
			return state{}, err
		}
		return state{Unfinished: true}, nil
	case whole:
		return state{Filesystem: fs, Begun: len(s.growth(v)) > 0}, nil
	}
	if err := s.checkBlank(); err != nil {
		return state{}, err
	}
	return state{Blank: true}, nil
}

// doubtful says that the disk's btrfs may be one that mkfs had written but not made durable: it
// shows no mount, and the marks of its format by this volume stand beside it.
func (s scan) needsCheck(v Volume) bool {
	if len(s.Found) != 1 || !s.Found[0].Young || len(s.validRecords()) == 0 {
		return false
	}
	young := s.Found[0]
	young.Fresh = true
	s.Found = []Superblock{young}
	return s.checkUnfinished(v) == nil
}

// alone says that the disk's one filesystem is whole by its own account and that nothing of anybody
// else shows around it. Boot code before the superblock makes blkid decide.
//
// A mark in the filesystem's data may be a file's or another owner's: a RAID that was put around a
// filesystem shows at the disk's end, and so does the image of a RAID's member that a file holds.
// With the UUID that the driver gave it the filesystem is the volume's, and a workload that writes
// such bytes must not lose its volume by that. Of any other filesystem blkid decides.
func (s scan) soleFilesystem(v Volume) bool {
	if len(s.Found) != 1 || s.SizeBytes < headBytes+tailBytes {
		return false
	}
	sb := s.Found[0]
	own := v.FilesystemUUID != "" && sb.isOf(v)
	return (sb.Checked || (own && !sb.Damaged)) && !sb.Unfinished &&
		nonZero(s.at(0, sb.From)) < 0 && len(s.foreign(sb)) == 0 &&
		(own || len(s.foreign(Superblock{})) == 0)
}

// filesystem is the disk's one filesystem, if that is what the disk is.
func (s scan) filesystem(v Volume) (Superblock, bool) {
	if len(s.Found) != 1 {
		return Superblock{}, false
	}
	sb := s.Found[0]
	known := s.Known.Type == sb.Type && s.Known.Table == "" && !s.Known.Ambiguous
	return sb,
		s.soleFilesystem(v) || (known && !sb.Unfinished && !sb.Damaged && len(s.foreign(sb)) == 0)
}

// growing says that the driver was killed while it grew the disk's ext3 or ext4 for this volume,
// and nobody has mounted it since. Whatever else looks like a mark there is some file's.
func (s scan) growing(v Volume) bool { return len(s.growth(v)) > 0 && s.Found[0].isExt() }

// checked says that the check before the growth had come to its end.
func (s scan) checked(v Volume) bool {
	return slices.ContainsFunc(s.growth(v), func(m Record) bool { return m.Checked })
}

// growth are the marks of a growth of this volume's filesystem that has not ended. An ext grows
// before it is mounted; the others when they are, and then have another size at once.
func (s scan) growth(v Volume) []Record {
	if len(s.Growth) == 0 || len(s.Found) != 1 {
		return nil
	}
	sb := s.Found[0]
	return slices.DeleteFunc(slices.Clone(s.Growth), func(m Record) bool {
		begun := m.GrowFrom == sb.SizeBytes
		if sb.isExt() {
			begun = m.Mounted == sb.Mounted
		}
		return !begun || !m.of(v, s.SizeBytes)
	})
}

// checkBlank refuses a disk on which anything shows.
func (s scan) checkBlank() error {
	_, _, dirty := s.firstNonZero()
	switch {
	case dirty:
		return s.notBlank()
	case s.Known.any():
		return s.notBlank()
	}
	return nil
}

func (s scan) notBlank() error {
	return csierr.New(csierr.DiskNotBlank, "%s is not blank: %s; %w", s.Path, s.evidence(),
		errNotBlank)
}

// checkUnfinished refuses to do a format again unless all that the disk shows is from a format of
// this very volume.
func (s scan) checkUnfinished(v Volume) error {
	for _, m := range s.validRecords() {
		switch {
		case m.Volume != v.ID:
			return s.notOurs(m, "of volume %q, not of %q", m.Volume, v.ID)
		case m.Disk != v.DiskName:
			return s.notOurs(m, "of disk %q, not of %q", m.Disk, v.DiskName)
		case m.SizeBytes != s.SizeBytes:
			return s.notOurs(m, "of a disk of %d bytes, this one has %d", m.SizeBytes, s.SizeBytes)
		}
	}
	m := s.validRecords()[0]
	for _, sb := range s.Found {
		if !sb.Unfinished && !sb.Fresh {
			return s.notOurs(m, "but the %s filesystem there has been used since", sb.Type)
		}
	}
	if others := s.foreign(Superblock{}); len(others) > 0 {
		return s.notOurs(m, "but there is also %s", others[0])
	}
	if s.Known.Table != "" || s.Known.Ambiguous ||
		(s.Known.Type != "" && !slices.Contains(ours, s.Known.Type)) {
		return s.notOurs(m, "but blkid finds %s", s.Known)
	}
	if s.Strange >= 0 {
		return s.notOurs(m, "but what is at offset %d no mkfs of the driver has written", s.Strange)
	}
	return nil
}

func (s scan) notOurs(m foundRecord, format string, args ...any) error {
	return csierr.New(csierr.DiskNotBlank,
		"%s has at offset %d the mark of an unfinished format "+format+"; %w", slices.Concat([]any{s.Path,
			m.Offset}, args, []any{errNotBlank})...)
}
