package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

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

// undoReadOnly takes back the read-only switch of a block volume that was left on by a driver that
// died after it unmounted the target. A device that cannot be opened is left to the call that needs
// it writable.
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
// removes a tree: if the path is mounted after all, the tree is somebody's data.
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
