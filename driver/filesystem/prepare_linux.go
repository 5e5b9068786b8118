package filesystem

import (
	"context"
	"errors"
	"log/slog"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// disk is an open device that holds a filesystem, or is to hold one.
type disk struct{ *blockdev.OpenDevice }

// Preparation makes the filesystem of one volume ready to be mounted.
type Preparation struct {
	Device *blockdev.OpenDevice // stays open from the scan to the mount
	Volume Volume
	Scans  *ZeroScans
	Flight flight.Call // records what is changed
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
		if found.Filesystem, err = p.format(found.Unfinished, left); err != nil {
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
		if err := p.finish(found); err != nil {
			return false, err
		}
	}
	p.confirm(found)
	return found.Grow, nil
}

// confirm closes the changes that an earlier process began, and that the filesystem shows.
func (p *Preparation) confirm(found state) {
	about := flight.Fields{Filesystem: p.Volume.FSType}
	p.Flight.Confirm(flight.Formatted, flight.Fields{}, about)
	p.Flight.Confirm(flight.FilesystemChecked, flight.Fields{}, about)
	if !found.Grow {
		p.Flight.Confirm(flight.FilesystemGrown, flight.Fields{}, about)
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
	if p.Volume.ReadOnly && found.Filesystem.Logged {
		return notReplayed(p.Device, errors.New("a btrfs has a tree of the last fsyncs"))
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
	if err := TryExclusive(p.Log, p.Device); err != nil {
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
		p.Log.Warn("the filesystem is smaller than its disk and is not grown",
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

// finish makes a filesystem fit to be mounted. ext3 and ext4 are checked if they ask for it and
// grown to the device before the mount, which needs no privilege beyond the device; xfs and btrfs
// can only grow when mounted (see GrowMounted).
func (p *Preparation) finish(found state) error {
	d, sb := disk{p.Device}, found.Filesystem
	// What is checked and mounted is what the disk has.
	if err := p.Device.DropCache(); err != nil {
		return err
	}
	if found.NeedsCheck {
		if err := d.finishFormat(p.Volume, sb); err != nil {
			return err
		}
	}
	switch {
	case sb.SizeBytes > d.SizeBytes:
		return csierr.New(csierr.FilesystemTooLarge, "%s has %s, but its %s filesystem has %s; "+
			"was the disk truncated, or is it another disk?", d.Path, volume.SizeText(d.SizeBytes),
			sb.Type, volume.SizeText(sb.SizeBytes))
	case sb.isExt() && found.Grow:
		return p.growExt(found)
	case sb.isExt() && sb.Unclean:
		return p.checkExt("-p")
	}
	return nil
}
