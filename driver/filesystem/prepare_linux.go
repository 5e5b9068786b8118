package filesystem

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/flight"
)

// disk is an open device that holds a filesystem, or is to hold one.
type disk struct{ *blockdev.OpenDevice }

// Preparation makes the filesystem of one volume ready to be mounted.
type Preparation struct {
	Device *blockdev.OpenDevice // stays open from the scan to the mount
	Volume Volume
	Scans  *ZeroScans
	Log    *slog.Logger
	// Begin is called after every check, right before the first write to the disk or the mount.
	Begin func() error
}

// Run formats the device if it is blank, and otherwise checks and grows its filesystem. It reports
// whether the filesystem is to grow once it is mounted. It runs to its end even if the caller gives
// up, except that it stops waiting for a read of the whole disk.
func (p *Preparation) Run(ctx context.Context) (grow bool, err error) {
	d, v := disk{p.Device}, p.Volume
	found, err := d.inspect(v)
	if err != nil {
		return false, err
	}
	if found.NeedsCheck && !v.ReadOnly {
		if found.Unfinished, err = d.btrfsBroken(); err != nil {
			return false, err
		}
	}
	sb := found.Filesystem
	switch {
	case (found.Blank || found.Unfinished) && v.ReadOnly:
		return false, csierr.New(csierr.DeviceReadOnly, "%s holds no filesystem yet and is read-only, "+
			"so it cannot be formatted", d.Path)
	case found.Blank, found.Unfinished:
		if err := p.proveBlank(ctx, found.Unfinished); err != nil {
			return false, err
		}
		if err := p.Begin(); err != nil {
			return false, err
		}
		if found.Filesystem, err = p.format(ctx, found.Unfinished); err != nil {
			return false, err
		}
		p.Scans.Drop(v.ID) // the disk is no longer blank
	case !sb.isOf(v) && (!found.NeedsCheck || v.ReadOnly):
		return false, d.wrongFilesystem(sb, v.FilesystemUUID)
	case sb.Type != v.FSType:
		return false, csierr.New(csierr.DiskNotBlank, "%s holds an %s filesystem, but the request is "+
			"for %s; the driver does not format it", d.Path, sb.Type, v.FSType)
	default:
		if err := p.proveMountable(ctx, &found); err != nil {
			return false, err
		}
	}
	if !v.ReadOnly {
		if err := d.prepare(ctx, v, found); err != nil {
			return false, err
		}
	}
	p.confirm(ctx, found)
	return found.Grow, nil
}

// format formats the device, which is proven blank or an unfinished format of this volume.
func (p *Preparation) format(ctx context.Context, unfinished bool) (Superblock, error) {
	d, v := disk{p.Device}, p.Volume
	flight.Note(ctx, flight.ProvenBlank, flight.Fields{Detail: p.proof()})
	if unfinished {
		flight.Note(ctx, flight.FormatResumed, flight.Fields{Filesystem: v.FSType})
	}
	name, args, err := mkfsCommand(v)
	if err != nil {
		return Superblock{}, err
	}
	change := flight.Begin(ctx, flight.Formatted, flight.Fields{Filesystem: v.FSType,
		Detail: strings.Join(append([]string{name}, args...), " ")})
	made, err := d.format(v, unfinished)
	change.End(err, flight.Fields{})
	return made, err
}

// proof says what was read to prove that the disk is blank.
func (p *Preparation) proof() string {
	size := p.Device.SizeBytes
	if !p.Volume.madeBlank() {
		return fmt.Sprintf("all %d bytes read", size)
	}
	regions, bytes := markerRegions(size), int64(0)
	for _, r := range regions {
		bytes += r.Bytes
	}
	return fmt.Sprintf("%d bytes read in %d regions, of a disk that was created blank", bytes,
		len(regions))
}

// confirm closes the changes that an earlier process began, and that the filesystem shows.
func (p *Preparation) confirm(ctx context.Context, found state) {
	about := flight.Fields{Filesystem: p.Volume.FSType}
	flight.Confirm(ctx, flight.Formatted, flight.Fields{}, about)
	flight.Confirm(ctx, flight.FilesystemChecked, flight.Fields{}, about)
	if !found.Grow {
		flight.Confirm(ctx, flight.FilesystemGrown, flight.Fields{}, about)
	}
}

// proveMountable makes the same checks for an existing filesystem as are made before a format: the
// device is not in use, and it is still the same one. It also decides whether the filesystem may
// grow.
func (p *Preparation) proveMountable(ctx context.Context, found *state) error {
	if err := TryExclusive(p.Device); err != nil {
		return err
	}
	if err := p.Device.AwaitNoWriters(); err != nil {
		return err
	}
	if err := p.Device.Reverify(); err != nil {
		return err
	}
	if !p.Volume.ReadOnly {
		var err error
		if found.Grow, err = p.mayGrow(ctx, *found); err != nil {
			return err
		}
	}
	return p.Begin()
}

// mayGrow decides whether the filesystem grows to its device. It does so only if the rest of the
// device is proven to hold nothing. Otherwise the filesystem is used as it is, because the rest may
// hold data.
func (p *Preparation) mayGrow(ctx context.Context, found state) (bool, error) {
	if found.GrowthBegun {
		return true, nil // the rest was proven before the growth records were written
	}
	if !found.Filesystem.canGrow(p.Device.SizeBytes) {
		return false, nil
	}
	err := p.proveTail(ctx, found.Filesystem.SizeBytes)
	if csierr.Has(err, csierr.DiskNotBlank) || csierr.Has(err, csierr.DeviceUnreadable) {
		p.Log.WarnContext(ctx, "the filesystem is smaller than its disk and is not grown",
			"volume", p.Volume.ID, "device", p.Device.Path,
			"filesystem_bytes", found.Filesystem.SizeBytes, "disk_bytes", p.Device.SizeBytes, "error", err)
		return false, nil
	}
	return err == nil, err
}

// proveTail proves that the device holds only zeroes from an offset on. It reads this range whole,
// except for the part that the rack created blank when the driver restored the disk: a sample is
// enough there.
func (p *Preparation) proveTail(ctx context.Context, from int64) error {
	blank := max(from, p.Volume.blankFrom(p.Device.SizeBytes))
	if from < blank {
		if err := p.proveZero(ctx, from, blank); err != nil {
			return err
		}
	}
	s, err := disk{p.Device}.read(tailRegions(p.Device.SizeBytes, blank), nil)
	if err != nil {
		return err
	}
	if offset, owner, dirty := s.firstNonZero(); dirty {
		return csierr.New(csierr.DiskNotBlank, "%s is not blank behind its filesystem: the first byte "+
			"that is not zero is at offset %d (%s)", p.Device.Path, offset, owner)
	}
	return nil
}

// prepare makes a filesystem fit to be mounted. ext3 and ext4 are checked if they ask for it and
// grown to the device before the mount, which needs no privilege beyond the device; xfs and btrfs
// can only grow when mounted (see GrowMounted). A growth record is written for these too: if the
// node dies while they grow, the next call could not distinguish what they had begun to write
// behind their old end from foreign data.
func (d disk) prepare(ctx context.Context, v Volume, found state) error {
	sb := found.Filesystem
	if found.NeedsCheck {
		if err := d.finishFormat(v, sb); err != nil {
			return err
		}
	}
	switch {
	case found.Growing:
		return d.growExt(ctx, v, found)
	case sb.SizeBytes > d.SizeBytes:
		return csierr.New(csierr.FilesystemTooLarge, "%s has %d bytes, but its %s filesystem has %d; "+
			"was the disk truncated, or is it another disk?", d.Path, d.SizeBytes, sb.Type, sb.SizeBytes)
	case found.Grow && sb.isExt():
		return d.growExt(ctx, v, found)
	case found.Grow:
		return d.writeGrowthRecords(d.growthRecord(v, sb))
	case sb.isExt() && sb.Unclean != "":
		return d.checkExt(ctx, "-p")
	}
	return nil
}
