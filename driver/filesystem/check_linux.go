package filesystem

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
)

// growExt checks the filesystem, which resize2fs requires, and grows it. resize2fs cannot be killed
// without damage, and e2fsck does not write the superblock atomically. So growth records stand on
// the disk meanwhile and show which step was reached.
func (d disk) growExt(ctx context.Context, v Volume, found state) (err error) {
	change := flight.Begin(ctx, flight.FilesystemGrown, flight.Fields{Filesystem: v.FSType})
	defer func() { change.End(err, flight.Fields{}) }()
	sb := found.Filesystem
	record := Record{Volume: v.ID, Disk: v.DiskName, SizeBytes: d.SizeBytes, Filesystem: sb.Type,
		UUID: sb.UUID.String(), GrowFrom: sb.SizeBytes, Mounted: sb.Mounted, Checked: found.Checked}
	if err := d.writeRecords(record, growthSlots(d.SizeBytes, record.GrowFrom)); err != nil {
		return err
	}
	if found.Checked && v.neverRaw() {
		if err := d.tryRead(); err != nil {
			return err
		}
	}
	if err := d.checkExt(ctx, growCheck(found, v)...); err != nil {
		return err
	}
	// The check may have replaced a truncated superblock with a copy.
	sbs, err := Find(d.OpenDevice)
	if err != nil {
		return err
	}
	if len(sbs) != 1 {
		return csierr.New(csierr.FilesystemDamaged, "%s holds %d filesystems after a check", d.Path,
			len(sbs))
	}
	if sb = sbs[0]; sb.canGrow(d.SizeBytes) {
		record.GrowFrom, record.Mounted, record.Checked = sb.SizeBytes, sb.Mounted, true
		if err := d.writeRecords(record, growthSlots(d.SizeBytes, record.GrowFrom)); err != nil {
			return err
		}
		result, err := runRepair(d.Inherited, "resize2fs", inherited,
			fmt.Sprintf("%dK", sb.largest(d.SizeBytes)>>10))
		if err != nil {
			return err
		}
		if result.Exit != 0 {
			return result.failure("resize2fs", d.Path)
		}
	}
	return d.WithExclusive(func(w *os.File) error {
		return d.eraseRecords(w, growthSlots(d.SizeBytes, sb.SizeBytes),
			func(r Record) bool { return r.GrowFrom != 0 })
	})
}

// growCheck returns the arguments of the e2fsck before a growth.
func growCheck(found state, v Volume) []string {
	sb := found.Filesystem
	switch {
	case found.Checked && v.neverRaw():
		// Any error was left by a resize2fs that was killed: the filesystem had been checked right
		// before, and it has not been mounted since. No workload can have written the record that says
		// so, for it lies behind the filesystem, on a disk that no workload ever had as a raw device.
		return []string{"-f", "-y"}
	case found.Growing && sb.Damaged:
		// An e2fsck was killed while it wrote the superblock. The copy is whole (see allowCopy).
		return []string{"-f", "-p", "-b", fmt.Sprint(sb.copyBlock()), "-B", fmt.Sprint(sb.BlockBytes)}
	}
	return []string{"-f", "-p"}
}

// copyBlock returns the block of the first copy of an ext's superblock.
func (sb Superblock) copyBlock() int64 {
	block := sb.UnitBytes / sb.BlockBytes
	if sb.BlockBytes == 1<<10 {
		block++ // the boot block comes first
	}
	return block
}

// allowCopy is allow for the copy that a check takes in place of a damaged superblock. The copy may
// have the larger size, because a growth writes it first.
func (d disk) allowCopy(sb Superblock) error {
	at := sb.copyBlock() * sb.BlockBytes
	b, err := d.Read(at&^(sectorBytes-1), sectorBytes)
	if err != nil {
		return unreadable(err)
	}
	whole, ok := extSuperblock(slices.Concat(make([]byte, extOffset), b[at%sectorBytes:]))
	if !ok || whole.Damaged || whole.UUID != sb.UUID || whole.SizeBytes < sb.SizeBytes {
		return csierr.New(csierr.FilesystemDamaged, "the superblock of the %s filesystem on %s is "+
			"damaged, and so is its first copy, at offset %d; run e2fsck on a snapshot first", sb.Type,
			d.Path, at)
	}
	return d.allow(whole)
}

// The bits of e2fsck's exit code (e2fsck(8)).
const (
	fsckCorrected       = 1
	fsckCorrectedReboot = 2 // asks for a reboot only if the filesystem is mounted; it is not
	fsckUncorrected     = 4
)

// checkExt runs e2fsck. With -p it repairs what needs no decision; with -f it also checks a
// filesystem that is marked clean.
func (d disk) checkExt(ctx context.Context, args ...string) (err error) {
	change := flight.Begin(ctx, flight.FilesystemChecked,
		flight.Fields{Detail: "e2fsck " + strings.Join(args, " ")})
	defer func() { change.End(err, flight.Fields{}) }()
	result, err := runRepair(d.Inherited, "e2fsck", append(args, inherited)...)
	switch {
	case err != nil:
		return err
	case diskFailed(result):
		return result.failure("e2fsck", d.Path)
	case result.Exit&^(fsckCorrected|fsckCorrectedReboot) == 0:
		if result.Exit != 0 {
			flight.Note(ctx, flight.FilesystemRepaired, flight.Fields{})
		}
		return nil
	case result.Exit&fsckUncorrected != 0:
		return csierr.New(csierr.FilesystemDamaged, "the filesystem on %s needs a repair that may lose "+
			"data; run e2fsck on a snapshot first: %s", d.Path,
			csierr.OutputTail(result.Stdout+result.Stderr))
	}
	return result.failure("e2fsck", d.Path)
}

// tryRead lets e2fsck read what a repair reads, and returns an error if it cannot read some of it.
// With -y it would overwrite that with zeroes and go on (e2fsck_handle_read_error).
func (d disk) tryRead() error {
	result, err := runTool(d.Inherited, "e2fsck", "-f", "-n", inherited)
	if err == nil && diskFailed(result) {
		return result.failure("e2fsck", d.Path)
	}
	return err
}

// diskFailed reports whether e2fsck could not read or write the disk. It then ends as it does for
// errors of the filesystem, of which it knows nothing in that case, or with -y as if they were
// corrected; only its messages differ (e2fsck/ehandler.c and problem.c).
func diskFailed(e2fsck toolResult) bool {
	return slices.ContainsFunc([]string{"Error reading block ", "Error writing block ",
		"Error writing file system info", "Error flushing writes ",
		"Input/output error"}, func(message string) bool {
		return strings.Contains(e2fsck.Stdout+e2fsck.Stderr, message)
	})
}

// btrfsBroken reports whether btrfs check finds errors. The check only reads; it exits with 0 or 1.
func (d disk) btrfsBroken() (bool, error) {
	if err := d.TryExclusive(); err != nil {
		return false, err
	}
	result, err := runTool(d.Inherited, "btrfs", "check", "--readonly", inherited)
	switch {
	case err != nil:
		return false, err
	case result.Exit > 1:
		return false, result.failure("btrfs check", d.Path)
	}
	return result.Exit == 1, nil
}
