package filesystem

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
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
	// the size of a filesystem that leaves a part of its disk unused, and otherwise with 0.
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

// confirm closes the changes in the flight recorder that an earlier process began, if the
// filesystem shows that they were made.
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
	// This check is the last one, because it thaws a frozen filesystem, which a refused call must not
	// do.
	if err := TryExclusive(p.Log, p.Device); err != nil {
		return err
	}
	return p.Begin(covers)
}

// mayGrow decides whether the filesystem grows to its device. It does so only if the rest of the
// device is proven to hold nothing, or nothing but what a growth that was cut off has written.
// Otherwise the filesystem is used as it is, because the rest may hold data. If a growth was cut
// off and the rest cannot be read, the call fails, because a mount would make the records of the
// growth invalid.
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
// reads all of it, even if the rack reports that it created this part blank: that is no proof, and
// a growth is made only once.
func (p *Preparation) proveTail(ctx context.Context, from int64, e expected) error {
	_, err := p.proveRange(ctx, from, p.Device.SizeBytes, e)
	return err
}

// finish makes a filesystem fit to be mounted. ext3 and ext4 are checked if they ask for it and
// grown to the device before the mount, which needs no privilege beyond the device; xfs and btrfs
// can only grow when mounted (see GrowMounted).
func (p *Preparation) finish(found state) error {
	d, sb := disk{p.Device}, found.Filesystem
	// Check and mount the bytes on the disk, not those in the kernel's cache.
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

// Mount calls mount.New and explains why the kernel refuses a filesystem. The kernel answers EROFS
// for an ext or xfs on a read-only device whose log has to be replayed; for btrfs see
// proveMountable.
func Mount(d *blockdev.OpenDevice, fsType string, o volume.MountOptions) (*mount.Mount, error) {
	m, err := mount.New(d, fsType, o)
	if errors.Is(err, unix.EROFS) {
		return nil, notReplayed(d, err)
	}
	if csierr.Has(err, csierr.FilesystemFeature) {
		if found, failed := Find(d); failed == nil && len(found) == 1 {
			err = csierr.New(csierr.FilesystemFeature, "%w; the filesystem is damaged, or this node's "+
				"kernel does not support a feature of it: the kernel's log says which; it has %s", err,
				found[0].Features)
		}
	}
	return m, err
}

func notReplayed(d *blockdev.OpenDevice, cause error) error {
	return csierr.New(csierr.LogNotReplayed, "%w: %s is read-only, and the log of its filesystem "+
		"holds changes to replay, without which synced files may be missing; restore the snapshot to a "+
		"writable volume, and take it again when a pod has used that and is gone", cause, d.Path)
}

// forgetWait is how long ForgetBtrfs waits for the kernel.
const forgetWait = time.Second

// forgetting is full while a call of mount.ForgetBtrfs runs.
var forgetting = make(chan struct{}, 1)

// ForgetBtrfs calls mount.ForgetBtrfs for an unmounted device if it holds a btrfs.
//
// For this the kernel visits every btrfs of the node, and waits for one whose disk hangs in a
// commit. So a device without a btrfs is left out, and the wait is limited. If it ends early, one
// thread of the process continues to wait, and no second one starts.
func ForgetBtrfs(d *blockdev.OpenDevice) {
	found, _ := Find(d)
	if !slices.ContainsFunc(found, func(sb Superblock) bool { return sb.Type == volume.Btrfs }) {
		return
	}
	limit := time.NewTimer(forgetWait)
	defer limit.Stop()
	select {
	case forgetting <- struct{}{}:
	case <-limit.C:
		return
	}
	forgotten := make(chan struct{})
	async.Detach(func() {
		mount.ForgetBtrfs("/dev/btrfs-control", d.Path)
		<-forgetting
		close(forgotten)
	})
	select {
	case <-forgotten:
	case <-limit.C:
	}
}

// TryExclusive calls OpenDevice.TryExclusive for a device that is mounted nowhere. A frozen
// filesystem that was unmounted keeps the device in use; TryExclusive thaws it, which releases the
// device.
func TryExclusive(log *slog.Logger, d *blockdev.OpenDevice) error {
	err := d.TryExclusive()
	if !csierr.Has(err, csierr.DeviceHeld) {
		return err
	}
	if failed := thawUnmounted(log, d); failed != nil {
		return csierr.New(csierr.DeviceHeld, "%w; %w", err, failed)
	}
	return d.TryExclusive()
}

// thawUnmounted thaws the filesystem that keeps the device in use, unless it is mounted: the user
// of a mount may rely on the freeze. It reaches the filesystem through a detached mount. If that
// mount fails, the device is in use by something else. The mount replays no log, in case the use
// has ended meanwhile.
func thawUnmounted(log *slog.Logger, d *blockdev.OpenDevice) error {
	views, err := mount.ReadViews(log)
	if err != nil {
		return err
	}
	if mounts := views.Of(d.Device, nil); len(mounts) > 0 {
		return fmt.Errorf("it is mounted at %s", mount.Describe(mounts))
	}
	found, err := Find(d)
	if err != nil || len(found) != 1 || found[0].Refused != "" {
		return err
	}
	// A filesystem that was mounted read-only accepts only another read-only mount, and most that
	// were mounted for writing accept only another such mount.
	readOnly := unreplayed(found[0].Type)
	m, err := mount.New(d, found[0].Type, readOnly)
	if err != nil {
		m, err = mount.New(d, found[0].Type, volume.MountOptions{})
	}
	if err != nil {
		return nil
	}
	defer func() { _ = m.Close() }()
	root, err := m.Root()
	if err != nil {
		return err
	}
	if err := errors.Join(mount.Thaw(root), root.Close()); err != nil {
		return fmt.Errorf("the filesystem that holds it could not be thawed: %w", err)
	}
	return nil
}

// unreplayed returns the options of a read-only mount that does not even replay a log.
func unreplayed(fsType string) (o volume.MountOptions) {
	o.SetReadOnly()
	switch fsType {
	case volume.Ext3, volume.Ext4:
		o.AddData("noload")
	case volume.XFS:
		o.AddData("norecovery")
	case volume.Btrfs:
		o.Data = append(o.Data, volume.MountOption{Key: "rescue", Value: "nologreplay", HasValue: true})
	}
	return o
}
