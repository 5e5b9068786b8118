package filesystem

import (
	"context"
	"log/slog"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
)

// disk is an open device that holds a filesystem, or is to hold one.
type disk struct{ *blockdev.OpenDevice }

// Preparation makes the filesystem of one volume ready to be mounted.
type Preparation struct {
	Device *blockdev.OpenDevice // stays open from the scan to the mount
	Volume Volume
	Scans  *ZeroScans
	Log    *slog.Logger
	// Begin is called after every check, right before the first write to the disk or the mount, with
	// the size of a filesystem that will leave a part of its disk unused, and otherwise with 0.
	Begin func(coversBytes int64) error
}

// Run formats the device if it is blank, and otherwise checks and grows its filesystem. It reports
// whether the filesystem is to grow once it is mounted. It runs to its end even if the caller gives
// up, except that it stops waiting for a read of the whole disk.
func (p *Preparation) Run(ctx context.Context) (grow bool, err error) {
	d, v := disk{p.Device}, p.Volume
	found, err := d.inspect(v)
	if err == nil {
		err = d.allow(found.Filesystem)
	}
	if err == nil && found.Filesystem.Damaged { // of a growth that was cut off
		err = d.allowCopy(found.Filesystem)
	}
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
		left, err := p.proveBlank(ctx, found.Unfinished)
		if err != nil {
			return false, err
		}
		if err := p.Begin(0); err != nil {
			return false, err
		}
		if found.Filesystem, err = p.format(ctx, found.Unfinished, left); err != nil {
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
func (p *Preparation) format(ctx context.Context, unfinished bool, left []int64) (Superblock,
	error) {
	d, v := disk{p.Device}, p.Volume
	proof := "read whole"
	if v.madeBlank() && !unfinished {
		proof = "a sample read, of a disk that was created blank"
	}
	flight.Note(ctx, flight.ProvenBlank, flight.Fields{Detail: proof})
	if unfinished {
		flight.Note(ctx, flight.FormatResumed, flight.Fields{Filesystem: v.FSType})
	}
	name, args, err := mkfsCommand(v)
	if err != nil {
		return Superblock{}, err
	}
	change := flight.Begin(ctx, flight.Formatted, flight.Fields{Filesystem: v.FSType,
		Detail: strings.Join(append([]string{name}, args...), " ")})
	made, err := d.format(v, left, name, args)
	change.End(err, flight.Fields{})
	return made, err
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
	covers := int64(0)
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
		if sb := found.Filesystem; !found.Grow && sb.leavesRoom(p.Device.SizeBytes) {
			covers = sb.SizeBytes
		}
	}
	// The last check, because it thaws a frozen filesystem, which a call that is refused must not do.
	if err := TryExclusive(ctx, p.Log, p.Device); err != nil {
		return err
	}
	return p.Begin(covers)
}

// mayGrow decides whether the filesystem grows to its device. It does so only if the rest of the
// device is proven to hold nothing, or nothing but what a growth that was cut off has written.
// Otherwise the filesystem is used as it is, because the rest may hold data. If a growth was cut
// off and the rest cannot be read, the call fails: after a mount the records of the growth would
// say nothing any more.
func (p *Preparation) mayGrow(ctx context.Context, found state) (bool, error) {
	if !found.Filesystem.canGrow(p.Device.SizeBytes) && !found.Growing {
		return false, nil
	}
	err := p.proveTail(ctx, found.Filesystem.SizeBytes, found.behind())
	notProven := csierr.Has(err, csierr.DiskNotBlank) ||
		csierr.Has(err, csierr.DeviceUnreadable) && !found.Growing
	if notProven && !found.Filesystem.Damaged {
		p.Log.WarnContext(ctx, "the filesystem is smaller than its disk and is not grown",
			"volume", p.Volume.ID, "device", p.Device.Path,
			"filesystem_bytes", found.Filesystem.SizeBytes, "disk_bytes", p.Device.SizeBytes, "error", err)
		return false, nil
	}
	return err == nil, err
}

// proveTail proves that the device holds only zeroes, and what is expected, from an offset on. It
// reads all of it, also where the rack created the disk blank behind a snapshot: the rack's word is
// no proof, and a growth is made once.
func (p *Preparation) proveTail(ctx context.Context, from int64, e expected) error {
	_, err := p.proveRange(ctx, from, p.Device.SizeBytes, e)
	return err
}

// prepare makes a filesystem fit to be mounted. ext3 and ext4 are checked if they ask for it and
// grown to the device before the mount, which needs no privilege beyond the device; xfs and btrfs
// can only grow when mounted (see GrowMounted).
func (d disk) prepare(ctx context.Context, v Volume, found state) error {
	sb := found.Filesystem
	if found.NeedsCheck {
		if err := d.finishFormat(v, sb); err != nil {
			return err
		}
	}
	switch {
	case sb.SizeBytes > d.SizeBytes:
		return csierr.New(csierr.FilesystemTooLarge, "%s has %d bytes, but its %s filesystem has %d; "+
			"was the disk truncated, or is it another disk?", d.Path, d.SizeBytes, sb.Type, sb.SizeBytes)
	case sb.isExt() && found.Grow:
		return d.growExt(ctx, v, found)
	case sb.isExt() && sb.Unclean:
		return d.checkExt(ctx, "-p")
	}
	return nil
}
