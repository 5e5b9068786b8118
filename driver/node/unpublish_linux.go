package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

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

// NodeUnpublishVolume takes the volume away from the target path and removes the path. A volume
// that is not published is a success.
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
	// Removing the target would detach, lazily, what other namespaces have mounted on it.
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

// unmountTarget unmounts what is at the target. A raw device is written out first, because its
// workload may have written through the cache and ended.
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

// undoReadOnly makes the device of a block volume writable again if a driver died after it had
// unmounted the target. A device that cannot be opened stays as it is until a call needs it
// writable.
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

// endReadOnly makes the device writable again when its last read-only publication is gone.
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

// removeTarget removes the directory or file that NodePublishVolume made, if it is empty. It never
// removes a tree: if something is mounted at the path after all, the tree is a user's data.
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

// NodeUnpublishVolume and NodeUnstageVolume get an id and a path, and the path may show something
// other than the volume. If it shows another volume, the call leaves that alone and succeeds: CSI
// wants OK if the volume is not at the path. It is an error if the mount cannot be a volume's,
// because no orchestrator makes such a mount and the volume may be below it; if a record
// contradicts the mount; and if nothing proves that it is the volume's.

// ownMounts returns the mounts at an orchestrator's path that are the volume's. It returns none if
// the path shows another volume.
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

// claimPath locks a path for one call, of any process of the driver, that mounts something there:
// two volumes at one path could not be told apart later. It locks the directory or file that the
// mount will hide, until the descriptor is closed. If the kernel cannot lock that, nothing is
// locked.
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

// ofVolume reports whether a mount of the disk may be treated as the volume's, because a record
// names the disk or the driver made the mount. The disk is the zero device if it is gone. A btrfs
// may lose its source when its device is scanned.
func ofVolume(m *mountinfo.Info, d blockdev.Device, recorded bool) bool {
	node, _ := mount.NodeRoot(m)
	isDisk := node || d.Path != "" || mount.IsDiskPath(m.Source)
	return isDisk && (recorded || mount.Made(m) ||
		m.FSType == volume.Btrfs && (d.Path == "" || volume.IsOwnName(d.Serial)))
}

// undoError converts the error of a call that takes a volume away. CSI does not allow
// ALREADY_EXISTS for these calls. The obstacle may disappear, and the call is repeated until then.
func undoError(err error) error {
	err = csierr.Convert(err, csierr.NodeToolFailed)
	if csierr.IsAlreadyExists(err) {
		err = csierr.Coded(codes.Internal, csierr.ReasonOf(err), "%w", err)
	}
	return err
}

// goneToo returns text for an error that names a volume whose recorded disk is gone, because the
// mount may be that volume's.
func goneToo(host blockdev.Host, records []volumeRecord) string {
	for _, r := range records {
		if _, err := host.Lookup(volume.Serial(r.Disk)); csierr.Has(err, csierr.DeviceNotFound) {
			return fmt.Sprintf("whose disk is gone, as is that of volume %s", csierr.Plain(r.Volume))
		}
	}
	return ""
}

// mountedDisk returns the disk of this instance that a mount shows, or the zero device if it is no
// longer there.
func (v heldVolume) mountedDisk(m *mountinfo.Info, reason csierr.Reason) (blockdev.Device, error) {
	node, deleted := mount.NodeRoot(m)
	if !node && !volume.IsFilesystem(m.FSType) {
		return blockdev.Device{}, csierr.New(reason, "%q has a mount of type %s, which no volume has; "+
			"it is left alone", m.Mountpoint, m.FSType)
	}
	if deleted {
		return blockdev.Device{}, nil // the number of a node that is gone may be another disk's by now
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
