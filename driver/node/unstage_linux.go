package node

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// NodeUnstageVolume undoes NodeStageVolume. OK means that the device can be taken away: nothing of
// it is mounted here, nobody holds it, and its data are written. A volume that is not staged is a
// success. The staging directory is the CO's and stays.
func (n *Service) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (
	*csi.NodeUnstageVolumeResponse, error) {
	if req.GetVolumeId() == "" {
		return nil, csierr.New(csierr.VolumeIDMissing, "volume_id is missing")
	}
	if err := checkPath("staging_target_path", req.GetStagingTargetPath()); err != nil {
		return nil, err
	}
	if err := n.unstage(ctx, req.GetVolumeId(), req.GetStagingTargetPath()); err != nil {
		return nil, csierr.Convert(err, csierr.NodeToolFailed)
	}
	n.deleteRecord(ctx, req.GetVolumeId())
	return &csi.NodeUnstageVolumeResponse{}, nil
}

// stagedDisk is a disk that a volume on its way off is on.
type stagedDisk struct {
	blockdev.Device                 // the zero device where it is no longer there
	layer           *mountinfo.Info // its mount at the staging path; nil for one that is known from before
	raw             bool            // workloads have its node
}

func (n *Service) unstage(ctx context.Context, volumeID, path string) error {
	n.scans.Drop(volumeID)
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	path, err = mount.Canonical(path)
	if err != nil && !mount.IsMissing(err) {
		return fmt.Errorf("resolve staging_target_path: %w", err)
	}
	var layers []*mountinfo.Info
	if err == nil {
		layers = table.At(path)
	}
	own, err := n.ownMounts(ctx, volumeID, layers, csierr.StagedDifferently)
	if err != nil {
		return err
	}
	if len(own) == 0 {
		layers = nil // what is there is another volume's
	}
	disks, err := n.stagedDisks(ctx, volumeID, own)
	if err != nil || len(disks) == 0 {
		return err
	}
	// Look at everything before anything is taken down, so that a refusal changes nothing.
	if err := n.awaitNone(ctx, func(vs mount.Views) []mount.Found {
		return vs.Elsewhere(mountsOf(vs, disks), layers)
	}); err != nil {
		return err
	}
	if len(layers) > 0 {
		if err := n.takeDown(ctx, volumeID, path, layers, disks); err != nil {
			return err
		}
	}
	for _, d := range disks {
		if err := n.release(ctx, d); err != nil {
			return err
		}
	}
	return nil
}

// stagedDisks are the disks of the volume's mounts at the staging path and the one that it is known
// to be. None means that the volume is not staged, or is one of which nothing is left to see.
func (n *Service) stagedDisks(ctx context.Context, volumeID string, own []stagedDisk) (
	[]stagedDisk, error) {
	var disks []stagedDisk
	for _, d := range own {
		if !slices.ContainsFunc(disks, func(s stagedDisk) bool {
			return mount.SameFilesystem(d.layer, s.layer)
		}) {
			disks = append(disks, d)
		}
	}
	known, ok := n.loadRecord(ctx, volumeID)
	if !ok && len(disks) == 0 {
		return n.namedDisks(ctx, volumeID)
	}
	if !ok {
		return disks, nil
	}
	serial := volume.Serial(known.Disk)
	if i := slices.IndexFunc(disks, func(s stagedDisk) bool { return s.Serial == serial }); i >= 0 {
		disks[i].raw = known.Block
		return disks, nil
	}
	d, err := n.devices().Lookup(serial)
	if csierr.Has(err, csierr.DeviceNotFound) {
		return disks, nil
	}
	if err != nil {
		return nil, err
	}
	return append(disks, stagedDisk{Device: d, raw: known.Block}), nil
}

// mountsOf lists the mounts of several disks in all namespaces.
func mountsOf(vs mount.Views, disks []stagedDisk) []mount.Found {
	var found []mount.Found
	for _, d := range disks {
		found = append(found, vs.Of(d.Device, d.layer)...)
	}
	return found
}

// mount.AwaitNone waits until look finds no mounts, as long as a release may take.
func (n *Service) awaitNone(ctx context.Context, look func(mount.Views) []mount.Found) error {
	return mount.AwaitNone(ctx, n.log(), n.releaseTimeout(), look)
}

// takeDown writes out and unmounts what is at the staging path, and looks that nothing is left of
// it in any namespace.
func (n *Service) takeDown(ctx context.Context, volumeID, path string, layers []*mountinfo.Info,
	disks []stagedDisk) error {
	for _, d := range disks {
		// When the device is not let go in time, the repeated call finds nothing mounted, and must
		// still know what to ask about.
		if d.Path != "" {
			n.saveDisk(ctx, volumeID, d.Serial)
		}
	}
	// What is written to a frozen filesystem waits for its thaw.
	if err := mount.ThawAt(layers[len(layers)-1]); err != nil {
		n.log().WarnContext(ctx, "a filesystem could not be thawed before its unmount",
			"path", path, "error", err)
	}
	// What cannot be written is lost whether or not the filesystem is unmounted.
	if err := mount.Sync(path); err != nil {
		n.log().ErrorContext(ctx, "a filesystem could not be written out before its unmount",
			"path", path, "error", err)
	}
	if err := mount.UnmountAll(path, len(layers)); err != nil {
		return err
	}
	return n.awaitNone(ctx, func(vs mount.Views) []mount.Found { return mountsOf(vs, disks) })
}

// release flushes a disk and waits until nobody holds its device: no mount of it in any namespace
// and no other user in the kernel. A device that is gone has nothing to flush.
func (n *Service) release(ctx context.Context, d stagedDisk) error {
	if d.Path == "" {
		return nil
	}
	held, err := n.devices().OpenLocked(ctx, d.Device)
	if mount.IsMissing(err) || blockdev.Vanished(err) || csierr.Has(err, csierr.DeviceChanged) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = held.Close() }()
	if err := held.Flush(); err != nil && !blockdev.Lost(err) {
		return csierr.New(csierr.NodeToolFailed, "flush %s: %w", d.Path, err)
	}
	// Without its mount to look at, a driver that died since may have left this undone.
	if d.layer == nil || d.layer.FSType == volume.Btrfs {
		filesystem.ForgetBtrfs(d.Path)
	}
	if err := awaitFree(ctx, held, d.raw, n.releaseTimeout()); err != nil || !d.raw {
		return err
	}
	return endReadOnly(held)
}

// awaitFree waits until nobody holds the device any more, or it is gone. What cannot be asked is
// not taken for free.
func awaitFree(ctx context.Context, h *blockdev.OpenDevice, raw bool, wait time.Duration) error {
	deadline := time.Now().Add(wait)
	for claim := func() error { return filesystem.TryExclusive(h) }; ; claim = h.TryExclusive {
		err := claim()
		if err == nil && raw {
			err = h.CheckWriters()
		}
		switch {
		case err == nil, mount.IsMissing(err), blockdev.Vanished(err), blockdev.Lost(err),
			csierr.Has(err, csierr.DeviceChanged):
			return nil
		case !csierr.Has(err, csierr.DeviceHeld):
			return csierr.New(csierr.NodeToolFailed, "ask whether %s is still in use: %w", h.Path, err)
		case time.Now().After(deadline):
			return csierr.New(csierr.StillMounted, "%s is unmounted here but still in use on this "+
				"node, %s: %w", h.Path, h.DescribeHolders(), err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until nobody holds %s: %w", h.Path, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}
