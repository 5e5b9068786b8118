package node

import (
	"context"
	"fmt"
	"os"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// NodeStageVolume makes the volume's filesystem ready at the staging path, formatting a blank disk
// once. For a raw block volume it only proves that the device is there.
func (n *Service) NodeStageVolume(ctx context.Context, req *csi.NodeStageVolumeRequest) (
	*csi.NodeStageVolumeResponse, error) {
	if req.GetVolumeId() == "" {
		return nil, csierr.New(csierr.VolumeIDMissing, "volume_id is missing")
	}
	if err := checkPath("staging_target_path", req.GetStagingTargetPath()); err != nil {
		return nil, err
	}
	if err := checkNodeCapability(req.GetVolumeCapability()); err != nil {
		return nil, err
	}
	v, err := volumeOf(req.GetVolumeId(), req.GetVolumeCapability(), req.GetPublishContext(),
		req.GetVolumeContext())
	if err != nil {
		return nil, csierr.Convert(err, csierr.NodeToolFailed)
	}
	_, known := n.loadRecord(ctx, v.ID)
	if err := n.stage(ctx, v, req.GetStagingTargetPath()); err != nil {
		if !known {
			// A stage that failed has left nothing here, and a CO need not undo it.
			n.deleteRecord(ctx, v.ID)
		}
		return nil, csierr.Convert(err, csierr.NodeToolFailed)
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

// stage finds the device, and either sees that the work is done or does it. From here to the end
// the device stays open, so its number cannot become another disk's.
func (n *Service) stage(ctx context.Context, v request, path string) error {
	ds := n.devices()
	found, err := ds.Find(ctx, v.serial(), n.deviceTimeout())
	if err != nil {
		return err
	}
	held, err := openVolume(ctx, ds, found, v)
	if err != nil {
		return err
	}
	defer func() { _ = held.Close() }()
	top, table, err := stagedAt(ds, path)
	if err != nil {
		return err
	}
	if top != nil {
		if err := checkStaged(top, held.Device, v); err != nil {
			return err
		}
		return n.saveRecord(ctx, v.ID, v.DiskName, v.Block)
	}
	if v.Block {
		if err := n.saveRecord(ctx, v.ID, v.DiskName, v.Block); err != nil {
			return err
		}
		return filesystem.DropRecord(held, v.Volume, len(table.Of(held.Device)) > 0)
	}
	if mounts := table.Of(held.Device); len(mounts) > 0 {
		return csierr.New(csierr.DeviceHeld, "%s is already mounted at %s; unmount it there first",
			held.Path, mounts.Paths())
	}
	// The CO creates the directory. One that is missing is made: that is kinder than to fail.
	if err := os.MkdirAll(path, 0o750); err != nil {
		return csierr.New(csierr.PathInvalid, "staging_target_path has to be a directory: %w", err)
	}
	if path, err = mount.Canonical(path); err != nil {
		return fmt.Errorf("resolve staging_target_path: %w", err)
	}
	p := filesystem.Preparation{Device: held, Volume: v.Volume, Scans: &n.scans, Log: n.log(),
		Begin: func() error { return n.begin(ctx, held, v) }}
	grow, err := p.Run(ctx)
	if err != nil {
		return err
	}
	return mountAt(path, held, v, grow)
}

// stagedAt is what is mounted at the staging path, nil if nothing is. A filesystem that failed, or
// whose disk is gone, and that no workload has any more is taken down, so that the volume can be
// staged again without anybody's help.
func stagedAt(ds blockdev.Host, path string) (*mountinfo.Info, mount.Table, error) {
	table, err := mount.ReadTable()
	if err != nil {
		return nil, nil, err
	}
	path, err = mount.Canonical(path)
	if mount.IsMissing(err) {
		return nil, table, nil
	}
	if err != nil {
		return nil, nil, csierr.New(csierr.PathInvalid, "resolve staging_target_path: %w", err)
	}
	top := table.Top(path)
	if top == nil || !volume.IsFilesystem(top.FSType) {
		return top, table, nil
	}
	state := mount.ConditionOf(top)
	if major, minor, ok := mount.Device(top); !ok {
		state = mount.Dead // a btrfs whose device has no node any more
	} else if _, err := ds.WithNumber(major, minor); csierr.Has(err, csierr.DeviceNotFound) {
		state = mount.Dead
	} else if err != nil {
		return nil, nil, err
	}
	if state == mount.Healthy {
		return top, table, nil
	}
	if err := table.OnlyAt(path, top, blockdev.Device{}); err != nil {
		return nil, nil, csierr.New(csierr.FilesystemFailed, "the filesystem at the staging path is %s; "+
			"look at the kernel's log; %w", state, err)
	}
	// A freeze that cannot be ended shows later: the device is in use.
	_ = mount.ThawAt(top)
	if err := mount.UnmountAll(path, len(table.At(path))); err != nil {
		return nil, nil, err
	}
	table, err = mount.ReadTable()
	return nil, table, err
}

// checkStaged compares what is mounted at the staging path with what the request wants there.
func checkStaged(top *mountinfo.Info, d blockdev.Device, v request) error {
	at := top.Mountpoint
	if v.Block {
		return csierr.New(csierr.StagedDifferently, "%q has a %s filesystem mounted, but the request "+
			"is for a block volume", at, top.FSType)
	}
	major, minor, ok := mount.Device(top)
	if !ok || major != d.Major || minor != d.Minor {
		return csierr.New(csierr.StagedDifferently, "%q has %s mounted, not %s with serial %q", at,
			top.Source,
			d.Path, d.Serial)
	}
	if top.FSType != v.FSType {
		return csierr.New(csierr.StagedDifferently, "%q is staged as %s, but the request is for %s", at,
			top.FSType, v.FSType)
	}
	wanted := v.MountFlags
	if v.ReadOnly {
		wanted.SetReadOnly()
	}
	if !slices.Equal(wanted.Shown(), mount.Flags(top)) {
		return csierr.New(csierr.StagedDifferently, "%q is staged with other mount flags than the "+
			"request's",
			at)
	}
	return nil
}

// begin comes after every proof, right before the first thing is done to the volume's disk. The
// driver makes a device read-only only for publications as a raw device, so only of a disk that may
// have had one a read-only switch is its own to take back.
func (n *Service) begin(ctx context.Context, h *blockdev.OpenDevice, v request) error {
	known, _ := n.loadRecord(ctx, v.ID)
	if err := n.saveRecord(ctx, v.ID, v.DiskName, v.Block); err != nil || v.ReadOnly {
		return err
	}
	return h.MakeWritable(known.Block || v.Use != volume.UseFilesystem)
}

// mountAt mounts the filesystem, grows it if it may and does that mounted, and puts it in its
// place.
func mountAt(path string, h *blockdev.OpenDevice, v request, grow bool) error {
	options := mountOptionsOf(v)
	m, err := mount.New(h, v.FSType, options)
	if err != nil {
		return err
	}
	defer func() { _ = m.Close() }()
	if grow && !options.ReadOnly() {
		if err := filesystem.GrowMounted(m, h.Device); err != nil {
			return err
		}
	}
	return m.Attach(path)
}

// mountOptionsOf are the request's mount flags and what each filesystem needs besides.
func mountOptionsOf(v request) volume.MountOptions {
	o := v.MountFlags
	o.Super, o.Data = slices.Clone(o.Super), slices.Clone(o.Data)
	if v.FSType == volume.XFS {
		// A restored snapshot carries its origin's UUID, and both may be on one node.
		o.AddData("nouuid")
	}
	if !v.ReadOnly {
		return o
	}
	// The disk cannot be written, so nothing may try to replay a journal.
	o.SetReadOnly()
	switch v.FSType {
	case volume.Ext3, volume.Ext4:
		o.AddData("noload")
	case volume.XFS:
		o.AddData("norecovery")
	case volume.Btrfs:
		o.Data = append(o.Data, volume.MountOption{Key: "rescue", Value: "nologreplay", HasValue: true})
	}
	return o
}
