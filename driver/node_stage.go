//go:build linux

package driver

import (
	"context"
	"fmt"
	"os"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// NodeStageVolume makes the volume's filesystem ready at the staging path, formatting a blank disk
// once. For a raw block volume it only proves that the device is there.
func (n *Node) NodeStageVolume(ctx context.Context, req *csi.NodeStageVolumeRequest) (
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
	_, known := n.recall(ctx, v.ID)
	if err := n.stage(ctx, v, req.GetStagingTargetPath()); err != nil {
		if !known {
			// A stage that failed has left nothing here, and a CO need not undo it.
			n.forget(ctx, v.ID)
		}
		return nil, csierr.Convert(err, csierr.NodeToolFailed)
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

// stage finds the device, and either sees that the work is done or does it. From here to the end
// the device stays open, so its number cannot become another disk's.
func (n *Node) stage(ctx context.Context, v nodeVolume, path string) error {
	ds := n.devices()
	found, err := ds.find(ctx, v.serial(), n.deviceTimeout())
	if err != nil {
		return err
	}
	held, err := ds.openVolume(ctx, found, v)
	if err != nil {
		return err
	}
	defer func() { _ = held.Close() }()
	top, table, err := ds.stagedAt(path)
	if err != nil {
		return err
	}
	if top != nil {
		if err := checkStaged(top, held.device, v); err != nil {
			return err
		}
		return n.remember(ctx, v)
	}
	if v.Block {
		if err := n.remember(ctx, v); err != nil {
			return err
		}
		return held.endUnfinished(v, table)
	}
	if mounts := table.of(held.device); len(mounts) > 0 {
		return csierr.New(csierr.DeviceHeld, "%s is already mounted at %s; unmount it there first",
			held.Path, mounts.paths())
	}
	// The CO creates the directory. One that is missing is made: that is kinder than to fail.
	if err := os.MkdirAll(path, 0o750); err != nil {
		return csierr.New(csierr.PathInvalid, "staging_target_path has to be a directory: %w", err)
	}
	if path, err = canonical(path); err != nil {
		return fmt.Errorf("resolve staging_target_path: %w", err)
	}
	return n.mountVolume(ctx, held, v, path)
}

// stagedAt is what is mounted at the staging path, nil if nothing is. A filesystem that failed, or
// whose disk is gone, and that no workload has any more is taken down, so that the volume can be
// staged again without anybody's help.
func (ds devices) stagedAt(path string) (*mountinfo.Info, mountTable, error) {
	table, err := readMountTable()
	if err != nil {
		return nil, nil, err
	}
	path, err = canonical(path)
	if missing(err) {
		return nil, table, nil
	}
	if err != nil {
		return nil, nil, csierr.New(csierr.PathInvalid, "resolve staging_target_path: %w", err)
	}
	top := table.top(path)
	if top == nil || !isVolumeType(top.FSType) {
		return top, table, nil
	}
	state := conditionOf(top)
	if major, minor, ok := mountedDevice(top); !ok {
		state = dead // a btrfs whose device has no node any more
	} else if _, err := ds.withNumber(major, minor); csierr.Has(err, csierr.DeviceNotFound) {
		state = dead
	} else if err != nil {
		return nil, nil, err
	}
	if state == wellMounted {
		return top, table, nil
	}
	if err := table.onlyAt(path, top, device{}); err != nil {
		return nil, nil, csierr.New(csierr.FilesystemFailed, "the filesystem at the staging path is %s; "+
			"look at the kernel's log; %w", state, err)
	}
	// A freeze that cannot be ended shows later: the device is in use.
	_ = thawMount(top)
	if err := unmountAll(path, len(table.at(path))); err != nil {
		return nil, nil, err
	}
	table, err = readMountTable()
	return nil, table, err
}

// checkStaged compares what is mounted at the staging path with what the request wants there.
func checkStaged(top *mountinfo.Info, d device, v nodeVolume) error {
	at := top.Mountpoint
	if v.Block {
		return csierr.New(csierr.StagedDifferently, "%q has a %s filesystem mounted, but the request "+
			"is for a block volume", at, top.FSType)
	}
	major, minor, ok := mountedDevice(top)
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
	if !slices.Equal(wanted.Shown(), comparableFlags(top)) {
		return csierr.New(csierr.StagedDifferently, "%q is staged with other mount flags than the "+
			"request's",
			at)
	}
	return nil
}

// mountVolume brings a filesystem onto the device if it is blank, checks and grows what is there,
// and mounts it at path. It does not stop when the caller does: what it began it ends.
func (n *Node) mountVolume(ctx context.Context, h *heldDevice, v nodeVolume, path string) error {
	found, err := h.inspect(v)
	if err != nil {
		return err
	}
	if found.Doubtful && !v.ReadOnly {
		if found.Unfinished, err = h.btrfsBroken(); err != nil {
			return err
		}
	}
	sb := found.Filesystem
	switch {
	case (found.Blank || found.Unfinished) && v.ReadOnly:
		return csierr.New(csierr.DeviceReadOnly, "%s holds no filesystem yet and is read-only, so it "+
			"cannot get one", h.Path)
	case found.Blank, found.Unfinished:
		if err := n.proveBlank(ctx, h, v, found.Unfinished); err != nil {
			return err
		}
		if err := n.begin(ctx, h, v); err != nil {
			return err
		}
		if found.Filesystem, err = h.format(v, found.Unfinished); err != nil {
			return err
		}
		n.zero.drop(v.ID) // it is not blank any more
	case !sb.isOf(v) && (!found.Doubtful || v.ReadOnly):
		return h.wrongFilesystem(sb, v.FilesystemUUID)
	case sb.Type != v.FSType:
		return csierr.New(csierr.DiskNotBlank, "%s holds an %s filesystem, but the request is for %s; "+
			"the driver does not format it", h.Path, sb.Type, v.FSType)
	default:
		if err := n.proveMountable(ctx, h, v, &found); err != nil {
			return err
		}
	}
	if !v.ReadOnly {
		if err := h.prepare(v, found); err != nil {
			return err
		}
	}
	return h.mountAt(path, v, mountOptionsOf(v), found.Grow)
}

// proveMountable makes the same proofs for a filesystem as are made before a format: nobody has the
// disk, and it is still the same one. It finds out whether the filesystem may grow.
func (n *Node) proveMountable(ctx context.Context, h *heldDevice, v nodeVolume, c *content) error {
	if err := h.claimThawed(); err != nil {
		return err
	}
	if err := h.awaitNoWriters(); err != nil {
		return err
	}
	if err := h.unchanged(); err != nil {
		return err
	}
	if !v.ReadOnly {
		var err error
		if c.Grow, err = n.mayGrow(ctx, h, v, *c); err != nil {
			return err
		}
	}
	return n.begin(ctx, h, v)
}

// begin comes after every proof, right before the first thing is done to the volume's disk. The
// driver makes a device read-only only for publications as a raw device, so only of a disk that may
// have had one a read-only switch is its own to take back.
func (n *Node) begin(ctx context.Context, h *heldDevice, v nodeVolume) error {
	known, _ := n.recall(ctx, v.ID)
	if err := n.remember(ctx, v); err != nil || v.ReadOnly {
		return err
	}
	return h.makeWritable(known.Block || v.Use != volume.UseFilesystem)
}

// mountAt mounts the filesystem, grows it if it may and does that mounted, and puts it in its
// place.
func (h *heldDevice) mountAt(path string, v nodeVolume, options volume.MountOptions,
	grow bool) error {
	m, err := h.mountLoose(v.FSType, options)
	if err != nil {
		return err
	}
	defer func() { _ = m.Close() }()
	if grow && !options.ReadOnly() {
		if err := m.grow(h.device); err != nil {
			return err
		}
	}
	return m.place(path)
}

// mountOptionsOf are the request's mount flags and what each filesystem needs besides.
func mountOptionsOf(v nodeVolume) volume.MountOptions {
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

// makeWritable takes back a read-only switch that a read-only block publication left on the device
// when the driver died, if it may be ours. The caller knows that nobody uses the device. A disk
// that the rack made read-only stays so, and is refused.
func (h *heldDevice) makeWritable(ours bool) error {
	for range 2 {
		readOnly, err := h.readOnly()
		if err != nil {
			return fmt.Errorf("ask whether %s is read-only: %w", h.Path, err)
		}
		if !readOnly {
			return nil
		}
		if !ours {
			break
		}
		if err := h.setReadOnly(false); err != nil {
			return fmt.Errorf("make %s writable: %w", h.Path, err)
		}
	}
	return csierr.New(csierr.DeviceReadOnly, "%s with serial %q is read-only, so it can only be "+
		"staged from a disk that the rack calls read-only; if somebody has switched it on this node, "+
		"blockdev --setrw takes that back", h.Path, h.Serial)
}
