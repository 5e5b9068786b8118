package node

import (
	"context"

	"github.com/moby/sys/mountinfo"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// NodeUnpublishVolume and NodeUnstageVolume get an id and a path, and the path may show something
// other than the volume. Another volume is left alone, and the call succeeds: CSI wants OK for a
// volume that is not at the path, and an orchestrator has to be able to go on. A mount that no
// volume has is an error: nobody knows what it hides, and no orchestrator puts one there.

// ownMounts returns those of the mounts at an orchestrator's path that are the volume's. It returns
// none when the path shows another volume.
func (n *Service) ownMounts(ctx context.Context, volumeID string, layers []*mountinfo.Info,
	reason csierr.Reason) ([]stagedDisk, error) {
	var own []stagedDisk
	var others string
	for _, m := range layers {
		d, err := n.mountedDisk(m, reason)
		if err != nil {
			return nil, err
		}
		why := ""
		if d.Path != "" {
			why = n.records().otherVolume(ctx, volumeID, d.Serial)
		}
		if why != "" {
			others = why
			continue
		}
		own = append(own, stagedDisk{Device: d, layer: m})
	}
	if others == "" {
		return own, nil
	}
	path := layers[0].Mountpoint
	if len(own) > 0 {
		return nil, csierr.New(reason, "%q shows the volume, and mounted over or under it %s; unmount "+
			"what is not the volume's by hand", path, others)
	}
	n.log().WarnContext(ctx, "what is mounted at the path is left alone, for it is not the volume's",
		"volume", volumeID, "path", path, "shown", others)
	return nil, nil
}

// mountedDisk returns the disk of this instance that a mount shows, or the zero device if it is no
// longer there. Nobody knows which volume that was, so its mount is taken for the one that the path
// should have.
func (n *Service) mountedDisk(m *mountinfo.Info, reason csierr.Reason) (blockdev.Device, error) {
	node, deleted := mount.NodeRoot(m)
	if !node && !volume.IsFilesystem(m.FSType) {
		return blockdev.Device{}, csierr.New(reason, "%q has a mount of type %s, which no volume has; "+
			"it is left alone", m.Mountpoint, m.FSType)
	}
	if deleted {
		return blockdev.Device{}, nil // the number of a node that is gone may be another disk's by now
	}
	if major, minor, ok := mount.Device(m); ok {
		d, err := n.host().WithNumber(major, minor)
		if !csierr.Has(err, csierr.DeviceNotFound) {
			return d, err
		}
	}
	if !node && !mount.IsDiskPath(m.Source) {
		return blockdev.Device{}, csierr.New(reason, "%q has %s mounted, which is no disk of this "+
			"instance; it is left alone", m.Mountpoint, m.Source)
	}
	return blockdev.Device{}, nil
}

// namedDisks returns the disks whose filesystem has the volume's id as its UUID, which the driver
// gives to every filesystem that it makes. It finds the disk of a volume whose record is lost,
// unless the volume is raw, static, restored or was formatted by others. A disk that was restored
// from this one has the same UUID, but a record of its own while it is in use.
func (n *Service) namedDisks(ctx context.Context, volumeID string) ([]stagedDisk, error) {
	id, ok := volume.ParseID(volumeID)
	if !ok {
		return nil, nil
	}
	all, err := n.host().List()
	if err != nil {
		return nil, err
	}
	var named []stagedDisk
	for _, d := range all {
		if n.records().otherVolume(ctx, volumeID, d.Serial) != "" {
			continue
		}
		found, err := n.filesystems(d)
		if err != nil {
			n.log().WarnContext(ctx, "a disk cannot be asked whether it is the volume's",
				"volume", volumeID, "serial", d.Serial, "error", err)
		}
		if len(found) == 1 && found[0].UUID.String() == id {
			named = append(named, stagedDisk{Device: d})
		}
	}
	return named, nil
}

// filesystems lists the filesystems on a disk that the driver could have made.
func (n *Service) filesystems(d blockdev.Device) ([]filesystem.Superblock, error) {
	device, err := n.host().Open(d)
	if err != nil {
		return nil, err
	}
	defer func() { _ = device.Close() }()
	return filesystem.Find(device)
}
