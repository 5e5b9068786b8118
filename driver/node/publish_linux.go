package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// NodePublishVolume mounts a staged volume at the target path, for a workload. It copies the
// staging mount of a filesystem, and bind-mounts the device node of a raw block volume.
func (n *Service) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (
	*csi.NodePublishVolumeResponse, error) {
	v, err := parsePublish(req)
	if err == nil {
		n.told.Delete(v.ID)
		v.heldVolume, err = n.hold(ctx, v.ID)
	}
	if err == nil {
		defer v.unlock()
		err = v.publish(ctx)
	}
	if err != nil {
		return nil, csierr.Convert(err, csierr.NodeToolFailed)
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

// publish does not wait for the device, because a staged volume has one.
func (v *nodeVolume) publish(ctx context.Context) error {
	v.node.scans.Drop(v.ID)
	found, err := v.node.host().Lookup(v.serial())
	if err != nil {
		return err
	}
	if err := v.open(ctx, found); err != nil {
		return err
	}
	defer v.close()
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	if v.Target, err = mount.Canonical(v.Target); err != nil {
		return csierr.New(csierr.PathInvalid, "the directory of target_path, which the CO creates, is "+
			"not there: %w", err)
	}
	if v.ReadOnly && !v.PublishReadOnly {
		return csierr.New(csierr.DeviceReadOnly, "disk %s is read-only; publish the volume with readonly",
			v.DiskName)
	}
	var staged *mountinfo.Info // nil for a block volume
	if !v.Block {
		if staged, err = v.findStaged(table); err != nil {
			return err
		}
	}
	top := table.Top(v.Target)
	if err := v.checkTarget(staged, top, table); err != nil {
		return err
	}
	if err := v.record.save(v.DiskName, v.Block, asKnown); err != nil {
		return err
	}
	switch {
	case top != nil:
		v.flight.Confirm(flight.Published, flight.Fields{}, flight.Fields{})
		return nil
	case v.Block:
		if err = v.publishBlock(table); err == nil {
			return nil
		}
		// If the disk was detached meanwhile, report that, and not the error that it caused.
		if gone := v.device.Reverify(); csierr.Has(gone, csierr.DeviceNotFound) {
			return gone
		}
		return err
	}
	return v.publishMount(staged)
}

func (v *nodeVolume) findStaged(table mount.Table) (*mountinfo.Info, error) {
	path, err := mount.Canonical(v.Staging)
	if err != nil && !mount.IsMissing(err) {
		return nil, fmt.Errorf("resolve staging_target_path: %w", err)
	}
	top := table.Top(path)
	switch {
	case top == nil:
		return nil, csierr.New(csierr.NotStaged, "nothing is mounted at the staging path %q; stage the "+
			"volume again", v.Staging)
	case !mount.Shows(top, v.device.Device):
		return nil, csierr.New(csierr.NotStaged, "the staging path %q has %s mounted, not %s with "+
			"serial %q; unstage and stage the volume again", v.Staging, top.Source, v.device.Path,
			v.device.Serial)
	case top.FSType != v.FSType:
		return nil, csierr.New(csierr.NotStaged, "the volume is staged as %s, but the request is for %s",
			top.FSType, v.FSType)
	}
	state := mount.ConditionOf(top)
	if state == mount.Dead || state == mount.ReadOnlyAfterErrors && !v.PublishReadOnly {
		return nil, csierr.New(csierr.FilesystemFailed, "the filesystem on %s is %s; look at the "+
			"kernel's log, then stage the volume again", v.device.Path, state)
	}
	return top, nil
}

// checkTarget compares the request with the mount at the target. Without such a mount, it compares
// the request with the volume's publications at other targets.
func (v *nodeVolume) checkTarget(staged, top *mountinfo.Info, table mount.Table) error {
	var wanted []string // mount flags
	if !v.Block {
		wanted = volume.PublishedFlags(mount.Flags(staged), v.MountFlags, v.PublishReadOnly)
	}
	if top != nil {
		return v.checkPublished(top, wanted)
	}
	others, err := v.publications(staged, table)
	if err != nil || len(others) == 0 {
		return err
	}
	// Only SINGLE_NODE_MULTI_WRITER allows several publications, all with the same capability.
	if v.Mode != csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER {
		return csierr.New(csierr.PublishedElsewhere, "the volume is already published at %s, and its "+
			"access mode %s allows one target path", others.Paths(), v.Mode)
	}
	for _, m := range others {
		if !v.Block && !slices.Equal(withoutReadOnly(mount.Flags(m)), withoutReadOnly(wanted)) {
			return csierr.New(csierr.PublishedElsewhere, "the volume is already published at %q with "+
				"other mount flags", m.Mountpoint)
		}
	}
	return nil
}

func (v *nodeVolume) checkPublished(top *mountinfo.Info, wanted []string) error {
	readOnlyDiffers := v.Block && mount.ReadOnly(top) != v.PublishReadOnly
	switch {
	case !mount.Shows(top, v.device.Device):
		return csierr.New(csierr.PublishedDifferently, "%q has %s mounted, not this volume", v.Target,
			top.Source)
	case mount.IsNode(top) != v.Block, !v.Block && top.FSType != v.FSType:
		return csierr.New(csierr.PublishedDifferently, "the volume is published at %q with another "+
			"access type or filesystem", v.Target)
	case readOnlyDiffers, !v.Block && !slices.Equal(mount.Flags(top), wanted):
		return csierr.New(csierr.PublishedDifferently, "the volume is published at %q with another "+
			"readonly or other mount flags", v.Target)
	}
	return nil
}

// publications lists the volume's mounts at other targets. It omits mounts of the volume's
// subdirectories, because the orchestrator or a workload makes those.
func (v *nodeVolume) publications(staged *mountinfo.Info, table mount.Table) (mount.Table, error) {
	var found mount.Table
	for _, m := range table.Of(v.device.Device) {
		switch {
		case v.Block && !mount.IsNode(m):
			return nil, csierr.New(csierr.DeviceHeld, "%s is mounted as a filesystem at %q, so it cannot "+
				"be a block volume", v.device.Path, m.Mountpoint)
		case m.Mountpoint == v.Target:
		case v.Block && mount.ReadOnly(m) != v.PublishReadOnly:
			return nil, csierr.New(csierr.PublishedElsewhere, "the volume is published at %q with another "+
				"readonly, and the switch is the device's", m.Mountpoint)
		case v.Block, m.Root == staged.Root && m.Mountpoint != staged.Mountpoint:
			found = append(found, m)
		}
	}
	return found, nil
}

func withoutReadOnly(words []string) []string {
	return slices.DeleteFunc(slices.Clone(words), func(w string) bool { return w == "ro" })
}

func (v *nodeVolume) publishMount(staged *mountinfo.Info) error {
	set, unset := v.MountFlags.Attr, uint64(0)
	if v.PublishReadOnly {
		set |= volume.AttrReadOnly
	}
	if v.MountFlags.AtimeChosen {
		unset = volume.AttrAtimeMask
	}
	return v.attachCopy(staged.Mountpoint, staged.FSType, set, unset, os.ModeDir)
}

// publishBlock bind-mounts the device node at the target path.
//
// A read-only mount of a device node does not stop writes, so publishBlock makes the device itself
// read-only for a read-only publication. That applies to every user of the device, so read-only and
// writable publications of one volume exclude each other.
func (v *nodeVolume) publishBlock(table mount.Table) error {
	mounted := len(table.Of(v.device.Device)) > 0
	if err := v.preparation().DropRecord(mounted); err != nil {
		return err
	}
	set := uint64(mount.NodeMark)
	if v.PublishReadOnly {
		set |= volume.AttrReadOnly
		if err := v.device.SetReadOnly(true); err != nil {
			return fmt.Errorf("make %s read-only: %w", v.device.Path, err)
		}
	} else if err := v.device.MakeWritable(true); err != nil {
		return err
	}
	return v.attachCopy(v.device.Path, "", set, 0, 0)
}

// attachCopy bind-mounts source at the target. First it verifies that source is a directory on the
// volume's device, or the device's node. It creates a missing target.
func (v *nodeVolume) attachCopy(source, fsType string, set, unset uint64, kind fs.FileMode) error {
	m, err := mount.Clone(source, fsType)
	if err != nil {
		return err
	}
	defer func() { _ = m.Close() }()
	if err := m.Verify(v.device.Device); err != nil {
		return err
	}
	if set|unset != 0 {
		if err := m.SetAttributes(set, unset); err != nil {
			return err
		}
	}
	created, err := createTarget(v.Target, kind)
	if err != nil {
		return err
	}
	claim, err := claimPath(v.Target, csierr.PublishedDifferently)
	if err != nil {
		return err
	}
	defer func() { _ = claim.Close() }()
	change := v.flight.Begin(flight.Published, flight.Fields{Filesystem: fsType})
	err = m.Attach(v.Target)
	change.End(err, flight.Fields{})
	if err != nil {
		if created {
			err = errors.Join(err, os.Remove(v.Target))
		}
		return err
	}
	return nil
}

// createTarget creates the target. It accepts an existing one, perhaps of an interrupted call.
func createTarget(target string, kind fs.FileMode) (created bool, err error) {
	if kind.IsDir() {
		err = os.Mkdir(target, 0o750)
	} else {
		var f *os.File
		if f, err = os.OpenFile(target, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o640); err == nil {
			err = f.Close()
		}
	}
	if err == nil {
		return true, nil
	}
	if !errors.Is(err, fs.ErrExist) {
		return false, csierr.New(csierr.PathInvalid, "create target_path: %w", err)
	}
	info, err := os.Lstat(target)
	if err != nil {
		return false, csierr.New(csierr.PathInvalid, "look at target_path: %w", err)
	}
	if info.Mode().Type() != kind {
		return false, csierr.New(csierr.PathInvalid, "target_path %q is a %s; the volume needs a %s",
			target, kindName(info.Mode().Type()), kindName(kind))
	}
	return false, nil
}

func kindName(t fs.FileMode) string {
	switch t {
	case 0:
		return "file"
	case os.ModeDir:
		return "directory"
	case os.ModeSymlink:
		return "symbolic link"
	}
	return "special file"
}

// NodeUnpublishVolume unmounts the volume at the target path and removes the path. It succeeds if
// the volume is not published there.
func (n *Service) NodeUnpublishVolume(ctx context.Context, req *csi.NodeUnpublishVolumeRequest) (
	*csi.NodeUnpublishVolumeResponse, error) {
	err := checkIDAndPath(req.GetVolumeId(), "target_path", req.GetTargetPath())
	var v heldVolume
	if err == nil {
		v, err = n.hold(ctx, req.GetVolumeId())
	}
	if err == nil {
		defer v.unlock()
		err = v.unpublish(ctx, req.GetTargetPath())
	}
	if err != nil {
		return nil, undoError(err)
	}
	v.flight.Confirm(flight.Unpublished, flight.Fields{}, flight.Fields{})
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

func (v heldVolume) unpublish(ctx context.Context, target string) error {
	target, err := mount.Canonical(target)
	if mount.IsMissing(err) {
		return v.undoReadOnly(ctx)
	}
	if err != nil {
		return fmt.Errorf("resolve target_path: %w", err)
	}
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	layers := table.At(target)
	own, err := v.ownMounts(layers, csierr.PublishedDifferently)
	if err != nil {
		return err
	}
	if len(layers) > 0 && len(own) == 0 {
		return v.undoReadOnly(ctx) // the path shows another volume
	}
	// The target's removal would lazily detach mounts on it in other namespaces. Wait for their end.
	if _, err := v.awaitNone(ctx, func(vs mount.Views) []mount.Found {
		return vs.Elsewhere(vs.CopiesAt(target), layers)
	}); err != nil {
		return err
	}
	if len(layers) == 0 {
		err = v.undoReadOnly(ctx)
	} else {
		err = v.unmountTarget(ctx, target, own)
	}
	if err != nil {
		return err
	}
	return removeTarget(target)
}

// unmountTarget first flushes a raw device, because its last writes may be in the kernel's cache.
func (v heldVolume) unmountTarget(ctx context.Context, target string, layers []stagedDisk) (
	err error) {
	top := layers[len(layers)-1]
	var raw *blockdev.OpenDevice // nil for a filesystem and for a device that is gone
	if top.Path != "" && mount.IsNode(top.layer) {
		if raw, err = v.openFlushed(ctx, top.Device); err != nil {
			return err
		}
	}
	if raw != nil {
		defer func() { _ = raw.Close() }()
	}
	change := v.flight.Begin(flight.Unpublished, flight.Fields{})
	err = mount.UnmountAll(target, len(layers))
	change.End(err, flight.Fields{})
	if err != nil {
		if raw != nil && csierr.Has(err, csierr.StillMounted) {
			err = fmt.Errorf("%w; the device is in use %s", err, raw.DescribeHolders())
		}
		return err
	}
	if raw == nil || !mount.ReadOnly(top.layer) {
		return nil
	}
	return endReadOnly(raw)
}

// undoReadOnly makes the device of a block volume writable again, in case a driver has died between
// the unmount of the target and this step. If the device cannot be opened, it stays read-only until
// a call needs it writable.
func (v heldVolume) undoReadOnly(ctx context.Context) error {
	known, ok := v.record.load()
	if !ok || !known.Block {
		return nil
	}
	d, err := v.node.host().Lookup(volume.Serial(known.Disk))
	if err != nil {
		return nil
	}
	device, err := v.node.host().OpenLocked(ctx, d, false)
	switch {
	case csierr.Has(err, csierr.DeviceLocked):
		return err
	case err != nil:
		return nil
	}
	defer func() { _ = device.Close() }()
	return endReadOnly(device)
}

func endReadOnly(device *blockdev.OpenDevice) error {
	readOnly, err := device.ReadOnly()
	if err != nil || !readOnly {
		return err
	}
	table, err := mount.ReadTable()
	if err != nil || len(table.Of(device.Device)) > 0 {
		return err
	}
	if err := device.SetReadOnly(false); err != nil {
		return fmt.Errorf("make %s writable again: %w", device.Path, err)
	}
	return nil
}

// removeTarget does not remove files in target: if it is still mounted, they are a user's data.
func removeTarget(target string) error {
	info, err := os.Lstat(target)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case blockdev.Lost(err):
		return csierr.New(csierr.StillMounted, "%q does not answer after it was unmounted: %w", target,
			err)
	case err != nil:
		return fmt.Errorf("look at target_path: %w", err)
	case !info.IsDir() && (!info.Mode().IsRegular() || info.Size() != 0):
		return csierr.New(csierr.TargetNotEmpty, "target_path %q is a %s that the driver did not make; "+
			"remove it by hand", target, kindName(info.Mode().Type()))
	}
	err = os.Remove(target)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EEXIST):
		return csierr.New(csierr.TargetNotEmpty, "target_path %q is not mounted but not empty; save "+
			"what is in it and remove it by hand", target)
	case errors.Is(err, unix.EBUSY):
		return csierr.New(csierr.StillMounted, "target_path %q is mounted in another mount namespace: %w",
			target, err)
	case err != nil:
		return csierr.New(csierr.NodeToolFailed, "remove target_path: %w", err)
	}
	return nil
}

// NodeUnpublishVolume and NodeUnstageVolume get a volume's id and a path, at which something else
// may be mounted. If another volume is mounted there, the call leaves the mount alone and succeeds,
// because CSI wants OK if the requested volume is not at the path. The call fails if the mount
// cannot be a volume's, because the volume may be hidden below it. It also fails if a record
// contradicts the mount, or if nothing proves that the mount is the volume's.

// ownMounts returns the volume's own mounts among layers, or none if another volume is mounted.
func (v heldVolume) ownMounts(layers []*mountinfo.Info, reason csierr.Reason) ([]stagedDisk,
	error) {
	var own []stagedDisk
	var others string
	for _, m := range layers {
		d, err := v.mountedDisk(m, reason)
		if err != nil {
			return nil, err
		}
		why, certain := v.record.otherVolume(d.Serial)
		if d.Path == "" && !certain {
			why = goneToo(v.node.host(), v.record.all())
		}
		switch {
		case why != "" && certain:
			others = why
		case why == "" && ofVolume(m, d, certain):
			own = append(own, stagedDisk{Device: d, layer: m})
		default:
			return nil, csierr.New(reason, "%q has %s mounted, %s; it is left alone", m.Mountpoint,
				m.Source, cmp.Or(why, "and nothing shows that it is the volume's"))
		}
	}
	if others == "" {
		return own, nil
	}
	path := layers[0].Mountpoint
	if len(own) > 0 {
		return nil, csierr.New(reason, "%q shows the volume, and mounted over or under it %s; unmount "+
			"what is not the volume's by hand", path, others)
	}
	v.node.log().Warn("what is mounted at the path is left alone, for it is not the volume's",
		"volume", v.id, "path", path, "shown", others)
	return nil, nil
}

// claimPath locks the path at which the caller is about to mount, so that no other call mounts at
// it, in this or another process of the driver. After two such mounts nobody can tell the two
// volumes apart. The lock is on the directory or file that the mount will hide, and ends when the
// returned file is closed. If the kernel cannot lock that directory or file, there is no lock.
func claimPath(path string, reason csierr.Reason) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, csierr.New(csierr.PathInvalid, "open the path of the mount: %w", err)
	}
	var table mount.Table
	if err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		err = csierr.New(csierr.DeviceLocked, "another call is about to mount at %q; repeat this one "+
			"later", path)
	} else if table, err = mount.ReadTable(); err == nil && table.Top(path) != nil {
		err = csierr.New(reason, "%q has %s mounted by now", path, table.Top(path).Source)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// ofVolume reports whether the driver may treat a mount of disk d as the volume's: a record names
// the disk, or the mount has the driver's mark. d is the zero device if the disk is gone. A device
// scan may replace the mark of a btrfs, so a btrfs needs none if d is gone or has a "csi-" serial.
func ofVolume(m *mountinfo.Info, d blockdev.Device, recorded bool) bool {
	node, _ := mount.NodeRoot(m)
	isDisk := node || d.Path != "" || mount.IsDiskPath(m.Source)
	return isDisk && (recorded || mount.Made(m) ||
		m.FSType == volume.Btrfs && (d.Path == "" || volume.IsOwnName(d.Serial)))
}

// undoError converts the error of an unpublish or unstage. CSI does not allow ALREADY_EXISTS for
// these calls, so it becomes INTERNAL. The orchestrator repeats the call until it succeeds.
func undoError(err error) error {
	err = csierr.Convert(err, csierr.NodeToolFailed)
	if csierr.IsAlreadyExists(err) {
		err = csierr.Coded(codes.Internal, csierr.ReasonOf(err), "%w", err)
	}
	return err
}

// goneToo returns text for the error about a mount whose disk is gone. If a volume's recorded disk
// is gone too, the mount may be that volume's, so the text names the volume. Otherwise it is "".
func goneToo(host blockdev.Host, records []volumeRecord) string {
	for _, r := range records {
		if _, err := host.Lookup(volume.Serial(r.Disk)); csierr.Has(err, csierr.DeviceNotFound) {
			return fmt.Sprintf("whose disk is gone, as is that of volume %s", csierr.Plain(r.Volume))
		}
	}
	return ""
}

// mountedDisk returns the mounted disk, or the zero device if the instance no longer has the disk.
func (v heldVolume) mountedDisk(m *mountinfo.Info, reason csierr.Reason) (blockdev.Device, error) {
	node, deleted := mount.NodeRoot(m)
	if !node && !volume.IsFilesystem(m.FSType) {
		return blockdev.Device{}, csierr.New(reason, "%q has a mount of type %s, which no volume has; "+
			"it is left alone", m.Mountpoint, m.FSType)
	}
	if deleted {
		return blockdev.Device{}, nil // by now another disk may have the removed node's number
	}
	host := v.node.host()
	known, _ := v.record.load()
	likely, _ := host.Lookup(volume.Serial(known.Disk))
	major, minor, err := mount.Device(m, likely)
	d, missing := host.WithNumber(major, minor)
	_, twins := errors.AsType[*mount.TwinsError](err)
	switch {
	case twins && mount.Shows(m, d):
	case twins, errors.Is(err, mount.ErrBtrfsDevices):
		return blockdev.Device{}, csierr.New(reason, "%q: %w", m.Mountpoint, err)
	case err != nil, csierr.Has(missing, csierr.DeviceNotFound):
		return blockdev.Device{}, nil //nolint:nilerr // such a mount has lost its device
	}
	return d, missing
}
