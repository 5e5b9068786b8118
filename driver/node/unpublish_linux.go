package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// NodeUnpublishVolume takes the volume away from the target path and removes the path. A volume
// that is not published is a success.
func (n *Service) NodeUnpublishVolume(ctx context.Context, req *csi.NodeUnpublishVolumeRequest) (
	*csi.NodeUnpublishVolumeResponse, error) {
	if req.GetVolumeId() == "" {
		return nil, csierr.New(csierr.VolumeIDMissing, "volume_id is missing")
	}
	if err := checkPath("target_path", req.GetTargetPath()); err != nil {
		return nil, err
	}
	if err := n.unpublish(ctx, req.GetVolumeId(), req.GetTargetPath()); err != nil {
		return nil, csierr.Convert(err, csierr.NodeToolFailed)
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

func (n *Service) unpublish(ctx context.Context, volumeID, target string) error {
	target, err := mount.Canonical(target)
	if mount.IsMissing(err) {
		return n.settleReadOnly(ctx, volumeID)
	}
	if err != nil {
		return fmt.Errorf("resolve target_path: %w", err)
	}
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	layers := table.At(target)
	own, err := n.ownMounts(ctx, volumeID, layers, csierr.PublishedDifferently)
	if err != nil {
		return err
	}
	if len(layers) > 0 && len(own) == 0 {
		return n.settleReadOnly(ctx, volumeID) // it is not published here, and the path is another's
	}
	// To remove the target would take away, lazily, what other namespaces have mounted on it.
	if err := n.awaitNone(ctx, func(vs mount.Views) []mount.Found {
		return vs.Elsewhere(vs.CopiesAt(target), layers)
	}); err != nil {
		return err
	}
	if len(layers) == 0 {
		if err := n.settleReadOnly(ctx, volumeID); err != nil {
			return err
		}
		return removeTarget(target)
	}
	if err := n.takeDownTarget(ctx, target, layers); err != nil {
		return err
	}
	return removeTarget(target)
}

// takeDownTarget writes out and unmounts what is at the target.
func (n *Service) takeDownTarget(ctx context.Context, target string,
	layers []*mountinfo.Info) error {
	top := layers[len(layers)-1]
	if !mount.IsNode(top) {
		return mount.UnmountAll(target, len(layers))
	}
	raw, err := n.flushRaw(ctx, top)
	if err != nil {
		return err
	}
	if raw == nil {
		return mount.UnmountAll(target, len(layers))
	}
	defer func() { _ = raw.Close() }()
	if err := mount.UnmountAll(target, len(layers)); err != nil || !mount.ReadOnly(top) {
		return err
	}
	return endReadOnly(raw)
}

// settleReadOnly takes back the read-only switch of a block volume that a driver left on which died
// after it unmounted the target. A device that does not let itself be asked is left to the call
// that needs it writable.
func (n *Service) settleReadOnly(ctx context.Context, volumeID string) error {
	known, ok := n.loadRecord(ctx, volumeID)
	if !ok || !known.Block {
		return nil
	}
	d, err := n.devices().Lookup(volume.Serial(known.Disk))
	if err != nil {
		return nil
	}
	held, err := n.devices().OpenLocked(ctx, d)
	if csierr.Has(err, csierr.DeviceLocked) {
		return err
	}
	if err != nil {
		return nil
	}
	defer func() { _ = held.Close() }()
	return endReadOnly(held)
}

// flushRaw writes out what the kernel holds of a block volume: its workload may have written
// through the cache and gone. A device that is lost has nothing to flush, and nil is returned.
func (n *Service) flushRaw(ctx context.Context, top *mountinfo.Info) (*blockdev.OpenDevice, error) {
	major, minor, err := blockdev.NumberAt(top.Mountpoint)
	if err != nil {
		return nil, err
	}
	d, err := n.devices().WithNumber(major, minor)
	if csierr.Has(err, csierr.DeviceNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	held, err := n.devices().OpenLocked(ctx, d)
	if mount.IsMissing(err) || blockdev.Vanished(err) || csierr.Has(err, csierr.DeviceChanged) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if err := held.Flush(); err != nil && !blockdev.Lost(err) {
		_ = held.Close()
		return nil, csierr.New(csierr.NodeToolFailed, "flush %s: %w", held.Path, err)
	}
	return held, nil
}

// endReadOnly makes the device writable again when its last read-only publication is gone.
func endReadOnly(h *blockdev.OpenDevice) error {
	readOnly, err := h.ReadOnly()
	if err != nil || !readOnly {
		return err
	}
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	if len(table.Of(h.Device)) > 0 {
		return nil
	}
	if err := h.SetReadOnly(false); err != nil {
		return fmt.Errorf("make %s writable again: %w", h.Path, err)
	}
	return nil
}

// removeTarget removes the directory or file that NodePublishVolume made, if nothing is in it. It
// never removes a tree: below a path that is mounted after all lie somebody's data.
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
