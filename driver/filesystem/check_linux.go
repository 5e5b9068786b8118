package filesystem

import (
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
)

// allow returns an error if the filesystem must not be mounted. It precedes everything that mounts,
// checks, grows or writes to a filesystem, for each of these can write to the other devices, too.
func (d disk) allow(sb Superblock) error {
	if sb.Refused == "" {
		return nil
	}
	return csierr.New(csierr.FilesystemFeature, "the %s filesystem on %s with serial %q has %s; the "+
		"driver mounts only a filesystem that is whole on its disk and whose features it knows",
		sb.Type, d.Path, d.Serial, sb.Refused)
}

// allowCopy is allow for the copy that a check takes in place of a damaged superblock. The copy may
// have the larger size, because a growth writes it first.
func (d disk) allowCopy(sb Superblock) error {
	at := sb.CopyBlock * sb.BlockBytes
	b, err := d.Read(at&^(sectorBytes-1), sectorBytes)
	if err != nil {
		return unreadable(err)
	}
	whole, ok := extSuperblock(slices.Concat(make([]byte, extOffset), b[at%sectorBytes:]))
	if !ok || whole.Damaged || whole.UUID != sb.UUID || whole.SizeBytes < sb.SizeBytes {
		return csierr.New(csierr.FilesystemDamaged, "the superblock of the %s filesystem on %s is "+
			"damaged, and so is its first copy, at offset %d", sb.Type,
			d.Path, at)
	}
	return d.allow(whole)
}

// checkDescriptors returns an error if a group descriptor cannot be right. With -p e2fsck does not
// turn to the copies then: it deletes the journal that it cannot find, writes the bad descriptors
// over the copies, and asks for a person, who can find no file any more. Without -p it takes a
// copy.
func (d disk) checkDescriptors() error {
	head, err := d.Read(0, sectorBytes)
	if err != nil {
		return unreadable(err)
	}
	t := extTableOf(head[extOffset:])
	from := t.Offset &^ (sectorBytes - 1)
	to := (t.Offset + t.Bytes + sectorBytes - 1) &^ (sectorBytes - 1)
	if t.Bytes == 0 || to > d.SizeBytes {
		return nil // nothing is known
	}
	b, err := d.Read(from, to-from)
	if err != nil {
		return unreadable(err)
	}
	group := t.firstBad(b[t.Offset-from:])
	if group < 0 {
		// A wrong block inside of the filesystem is as bad: e2fsck deletes a journal that is not there.
		at, n := t.inodesAt(b[t.Offset-from:])
		from, to := at&^(sectorBytes-1), (at+n+sectorBytes-1)&^(sectorBytes-1)
		if at > d.SizeBytes-n || to > d.SizeBytes {
			return nil // the filesystem is larger than the disk
		}
		inodes, err := d.Read(from, to-from)
		if err != nil {
			return unreadable(err)
		}
		if !t.areInodes(inodes[at-from:]) {
			group = 0
		}
	}
	if group >= 0 {
		return csierr.New(csierr.FilesystemDamaged, "the descriptor of the block group %d on %s is "+
			"damaged; e2fsck has to take a copy, which needs a decision", group, d.Path)
	}
	return nil
}

// The bits of e2fsck's exit code (e2fsck(8)).
const (
	fsckCorrected       = 1
	fsckCorrectedReboot = 2 // asks for a reboot only if the filesystem is mounted; it is not
	fsckUncorrected     = 4
)

// checkExt runs e2fsck. With -p it repairs what needs no decision; with -f it also checks a
// filesystem that is marked clean.
func (p *Preparation) checkExt(args ...string) (err error) {
	d := disk{p.Device}
	if slices.Contains(args, "-p") && !slices.Contains(args, "-b") {
		if err := d.checkDescriptors(); err != nil {
			return err
		}
	}
	change := p.Flight.Begin(flight.FilesystemChecked,
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
			p.Flight.Note(flight.FilesystemRepaired, flight.Fields{})
		}
		return nil
	case result.Exit&fsckUncorrected != 0:
		return csierr.New(csierr.FilesystemDamaged, "the filesystem on %s needs a repair that may lose "+
			"data: %s", d.Path,
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
