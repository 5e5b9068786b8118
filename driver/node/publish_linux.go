package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
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

// NodePublishVolume shows a staged volume to a workload at the target path: a filesystem as a copy
// of the staging mount, a block volume as the device's node.
func (n *Service) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (
	*csi.NodePublishVolumeResponse, error) {
	if req.GetVolumeId() == "" {
		return nil, csierr.New(csierr.VolumeIDMissing, "volume_id is missing")
	}
	if err := checkPath("target_path", req.GetTargetPath()); err != nil {
		return nil, err
	}
	if problem := volume.CapabilityProblem(req.GetVolumeCapability()); problem.Malformed {
		return nil, csierr.New(csierr.CapabilityInvalid, "%s", problem.Message)
	}
	if req.GetStagingTargetPath() == "" {
		return nil, csierr.New(csierr.NotStaged, "staging_target_path is "+
			"missing: the volume has to be staged first")
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
	p := publication{request: v, Staging: req.GetStagingTargetPath(), Target: req.GetTargetPath(),
		ReadOnly: req.GetReadonly() || v.MountFlags.ReadOnly()}
	if err := n.publish(ctx, p); err != nil {
		return nil, csierr.Convert(err, csierr.NodeToolFailed)
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

// publication is a volume at a target path.
type publication struct {
	request
	Staging, Target string
	ReadOnly        bool            // for the workload
	staged          *mountinfo.Info // the staging mount; nil for a block volume
}

// publish proves once more which device it is, then shows it. It waits for no device: a volume that
// is staged has one.
func (n *Service) publish(ctx context.Context, p publication) error {
	n.scans.Drop(p.ID)
	ds := n.devices()
	found, err := ds.Lookup(p.serial())
	if err != nil {
		return err
	}
	held, err := openVolume(ctx, ds, found, p.request)
	if err != nil {
		return err
	}
	defer func() { _ = held.Close() }()
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	if p.Target, err = mount.Canonical(p.Target); err != nil {
		return csierr.New(csierr.PathInvalid, "the directory of target_path, which the CO creates, is "+
			"not there: %w", err)
	}
	if p.request.ReadOnly && !p.ReadOnly {
		return csierr.New(csierr.DeviceReadOnly, "disk %s is read-only; publish the volume with readonly",
			p.DiskName)
	}
	if !p.Block {
		if p.staged, err = findStaged(held, p, table); err != nil {
			return err
		}
	}
	top := table.Top(p.Target)
	if err := checkTarget(held, p, top, table); err != nil {
		return err
	}
	if err := n.saveRecord(ctx, p.ID, p.DiskName, p.Block); err != nil || top != nil {
		return err
	}
	if p.Block {
		return publishBlock(held, p, table)
	}
	return publishMount(held, p)
}

// checkTarget compares what is at the target path, if anything is, and else the other publications,
// with what the request wants.
func checkTarget(h *blockdev.OpenDevice, p publication, top *mountinfo.Info,
	table mount.Table) error {
	var wanted []string
	if !p.Block {
		wanted = volume.PublishedFlags(mount.Flags(p.staged), p.MountFlags, p.ReadOnly)
	}
	if top != nil {
		return checkPublished(h, top, p, wanted)
	}
	others, err := publications(h, p, table)
	if err != nil {
		return err
	}
	return checkOthers(p, others, wanted)
}

// publishMount shows the staging mount at the target path.
func publishMount(h *blockdev.OpenDevice, p publication) error {
	m, err := mount.Clone(p.staged.Mountpoint, p.staged.FSType)
	if err != nil {
		return err
	}
	defer func() { _ = m.Close() }()
	if err := m.Verify(h.Device); err != nil {
		return err
	}
	set, unset := p.MountFlags.Attr, uint64(0)
	if p.ReadOnly {
		set |= volume.AttrReadOnly
	}
	if p.MountFlags.AtimeChosen {
		unset = volume.AttrAtimeMask
	}
	if set|unset != 0 {
		if err := m.SetAttributes(set, unset); err != nil {
			return err
		}
	}
	return placeAtNew(m, p.Target, os.ModeDir)
}

// findStaged is the volume's mount at the staging path, proven by the number of its device.
func findStaged(h *blockdev.OpenDevice, p publication, table mount.Table) (*mountinfo.Info, error) {
	path, err := mount.Canonical(p.Staging)
	if err != nil && !mount.IsMissing(err) {
		return nil, fmt.Errorf("resolve staging_target_path: %w", err)
	}
	top := table.Top(path)
	if top == nil {
		return nil, csierr.New(csierr.NotStaged, "nothing is mounted at the staging path %q; stage the "+
			"volume again", p.Staging)
	}
	major, minor, ok := mount.Device(top)
	if !ok || major != h.Major || minor != h.Minor {
		return nil, csierr.New(csierr.NotStaged, "the staging path %q has %s mounted, not %s with "+
			"serial %q; unstage and stage the volume again", p.Staging, top.Source, h.Path, h.Serial)
	}
	if top.FSType != p.FSType {
		return nil, csierr.New(csierr.NotStaged, "the volume is staged as %s, but the request is for %s",
			top.FSType, p.FSType)
	}
	if state := mount.ConditionOf(top); state == mount.Dead || state == mount.ReadOnlyAfterErrors && !p.ReadOnly {
		return nil, csierr.New(csierr.FilesystemFailed, "the filesystem on %s is %s; look at the "+
			"kernel's log, then stage the volume again", h.Path, state)
	}
	return top, nil
}

// publications are the other targets where the volume is shown. Mounts of directories inside it are
// the CO's or a workload's own.
func publications(h *blockdev.OpenDevice, p publication, table mount.Table) (mount.Table, error) {
	var found mount.Table
	for _, m := range table.Of(h.Device) {
		switch {
		case p.Block && !mount.IsNode(m):
			return nil, csierr.New(csierr.DeviceHeld, "%s is mounted as a filesystem at %q, so it cannot "+
				"be a block volume", h.Path, m.Mountpoint)
		case m.Mountpoint == p.Target:
		case p.Block && mount.ReadOnly(m) != p.ReadOnly:
			return nil, csierr.New(csierr.PublishedElsewhere, "the volume is published at %q with another "+
				"readonly, and the switch is the device's", m.Mountpoint)
		case p.Block, m.Root == p.staged.Root && m.Mountpoint != p.staged.Mountpoint:
			found = append(found, m)
		}
	}
	return found, nil
}

// checkPublished compares what is at the target path with what the request wants there.
func checkPublished(h *blockdev.OpenDevice, top *mountinfo.Info, p publication,
	wanted []string) error {
	major, minor, ok := mount.Device(top)
	switch {
	case !ok || major != h.Major || minor != h.Minor:
		return csierr.New(csierr.PublishedDifferently, "%q has %s mounted, not this volume", p.Target,
			top.Source)
	case mount.IsNode(top) != p.Block, !p.Block && top.FSType != p.FSType:
		return csierr.New(csierr.PublishedDifferently, "the volume is published at %q with another "+
			"access type or filesystem", p.Target)
	case p.Block && mount.ReadOnly(top) != p.ReadOnly, !p.Block && !slices.Equal(mount.Flags(top),
		wanted):
		return csierr.New(csierr.PublishedDifferently, "the volume is published at %q with another "+
			"readonly or other mount flags", p.Target)
	}
	return nil
}

// checkOthers applies the table of second publications: only SINGLE_NODE_MULTI_WRITER has them, and
// all with the same capability.
func checkOthers(p publication, others mount.Table, wanted []string) error {
	if len(others) == 0 {
		return nil
	}
	if p.Mode != csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER {
		return csierr.New(csierr.PublishedElsewhere, "the volume is already published at %s, and its "+
			"access mode %s allows one target path", others.Paths(), p.Mode)
	}
	if p.Block {
		return nil
	}
	for _, m := range others {
		if !slices.Equal(withoutReadOnly(mount.Flags(m)), withoutReadOnly(wanted)) {
			return csierr.New(csierr.PublishedElsewhere, "the volume is already published at %q with "+
				"other mount flags", m.Mountpoint)
		}
	}
	return nil
}

func withoutReadOnly(words []string) []string {
	return slices.DeleteFunc(slices.Clone(words), func(w string) bool { return w == "ro" })
}

// publishBlock shows the device's node at the target path.
//
// A read-only mount of a node does not stop writes, so a read-only block volume makes the device
// itself read-only. That is the same for all: read-only and writable publications of one volume
// exclude each other.
func publishBlock(h *blockdev.OpenDevice, p publication, table mount.Table) error {
	if err := filesystem.DropRecord(h, p.Volume, len(table.Of(h.Device)) > 0); err != nil {
		return err
	}
	if err := switchReadOnly(h, p.ReadOnly); err != nil {
		return err
	}
	m, err := mount.Clone(h.Path, "")
	if err != nil {
		return err
	}
	defer func() { _ = m.Close() }()
	if err := m.Verify(h.Device); err != nil {
		return err
	}
	if p.ReadOnly {
		if err := m.SetAttributes(volume.AttrReadOnly, 0); err != nil {
			return err
		}
	}
	return placeAtNew(m, p.Target, 0)
}

// switchReadOnly makes the device what the publication wants it to be.
func switchReadOnly(h *blockdev.OpenDevice, readOnly bool) error {
	if !readOnly {
		return h.MakeWritable(true)
	}
	if err := h.SetReadOnly(true); err != nil {
		return fmt.Errorf("make %s read-only: %w", h.Path, err)
	}
	return nil
}

// placeAtNew creates the target, a directory or a file, and puts the mount there. A target that is
// there already, left by a publication that was cut off, is used.
func placeAtNew(m *mount.Mount, target string, kind fs.FileMode) error {
	created, err := createTarget(target, kind)
	if err != nil {
		return err
	}
	if err := m.Attach(target); err != nil {
		if created {
			err = errors.Join(err, os.Remove(target))
		}
		return err
	}
	return nil
}

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
			target,
			kindName(info.Mode().Type()), kindName(kind))
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
