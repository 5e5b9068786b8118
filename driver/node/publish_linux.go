package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// NodePublishVolume shows a staged volume to a workload at the target path: a filesystem as a copy
// of the staging mount, a block volume as the device's node.
func (n *Service) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (
	*csi.NodePublishVolumeResponse, error) {
	v, err := parsePublish(req)
	if err == nil {
		n.told.Delete(v.ID)
		v.lock, err = n.lock(ctx, v.ID)
	}
	if err == nil {
		defer func() { _ = v.lock.Close() }()
		err = n.publish(ctx, v)
	}
	if err != nil {
		return nil, csierr.Convert(err, csierr.NodeToolFailed)
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

// publish verifies once more which device it is, and then shows it. It waits for no device, because
// a staged volume has one.
func (n *Service) publish(ctx context.Context, v nodeVolume) error {
	n.scans.Drop(v.ID)
	found, err := n.host().Lookup(v.serial())
	if err != nil {
		return err
	}
	device, err := n.openVolume(ctx, found, v)
	if err != nil {
		return err
	}
	defer func() { _ = device.Close() }()
	ctx = flight.About(ctx, about(device, v))
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
		if staged, err = findStaged(device, v, table); err != nil {
			return err
		}
	}
	top := table.Top(v.Target)
	if err := checkTarget(device.Device, v, staged, top, table); err != nil {
		return err
	}
	if err := n.records().of(v.ID).save(ctx, v.DiskName, v.Block, asKnown); err != nil {
		return err
	}
	switch {
	case top != nil:
		flight.Confirm(ctx, flight.Published, flight.Fields{}, flight.Fields{})
		return nil
	case v.Block:
		return publishBlock(ctx, device, v, table)
	}
	return publishMount(ctx, device, v, staged)
}

// findStaged returns the volume's mount at the staging path, verified by the number of its device.
func findStaged(device *blockdev.OpenDevice, v nodeVolume, table mount.Table) (*mountinfo.Info,
	error) {
	path, err := mount.Canonical(v.Staging)
	if err != nil && !mount.IsMissing(err) {
		return nil, fmt.Errorf("resolve staging_target_path: %w", err)
	}
	top := table.Top(path)
	switch {
	case top == nil:
		return nil, csierr.New(csierr.NotStaged, "nothing is mounted at the staging path %q; stage the "+
			"volume again", v.Staging)
	case !mount.Shows(top, device.Device):
		return nil, csierr.New(csierr.NotStaged, "the staging path %q has %s mounted, not %s with "+
			"serial %q; unstage and stage the volume again", v.Staging, top.Source, device.Path,
			device.Serial)
	case top.FSType != v.FSType:
		return nil, csierr.New(csierr.NotStaged, "the volume is staged as %s, but the request is for %s",
			top.FSType, v.FSType)
	}
	state := mount.ConditionOf(top)
	if state == mount.Dead || state == mount.ReadOnlyAfterErrors && !v.PublishReadOnly {
		return nil, csierr.New(csierr.FilesystemFailed, "the filesystem on %s is %s; look at the "+
			"kernel's log, then stage the volume again", device.Path, state)
	}
	return top, nil
}

// checkTarget compares what the request wants with what is at the target path, or else with the
// volume's other publications.
func checkTarget(d blockdev.Device, v nodeVolume, staged, top *mountinfo.Info,
	table mount.Table) error {
	var wanted []string // mount flags
	if !v.Block {
		wanted = volume.PublishedFlags(mount.Flags(staged), v.MountFlags, v.PublishReadOnly)
	}
	if top != nil {
		return checkPublished(top, d, v, wanted)
	}
	others, err := publications(d, v, staged, table)
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

// checkPublished compares what is at the target path with what the request wants there.
func checkPublished(top *mountinfo.Info, d blockdev.Device, v nodeVolume, wanted []string) error {
	readOnlyDiffers := v.Block && mount.ReadOnly(top) != v.PublishReadOnly
	switch {
	case !mount.Shows(top, d):
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

// publications lists the other targets that show the volume. Mounts of directories inside it are
// the orchestrator's or a workload's own.
func publications(d blockdev.Device, v nodeVolume, staged *mountinfo.Info, table mount.Table) (
	mount.Table, error) {
	var found mount.Table
	for _, m := range table.Of(d) {
		switch {
		case v.Block && !mount.IsNode(m):
			return nil, csierr.New(csierr.DeviceHeld, "%s is mounted as a filesystem at %q, so it cannot "+
				"be a block volume", d.Path, m.Mountpoint)
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

// publishMount shows the staging mount at the target path.
func publishMount(ctx context.Context, device *blockdev.OpenDevice, v nodeVolume,
	staged *mountinfo.Info) error {
	set, unset := v.MountFlags.Attr, uint64(0)
	if v.PublishReadOnly {
		set |= volume.AttrReadOnly
	}
	if v.MountFlags.AtimeChosen {
		unset = volume.AttrAtimeMask
	}
	return attachCopy(ctx, device, staged.Mountpoint, staged.FSType, set, unset, v.Target, os.ModeDir)
}

// publishBlock shows the device's node at the target path.
//
// A read-only mount of a node does not stop writes, so a read-only block volume makes the device
// itself read-only. That applies to every user of the device, so read-only and writable
// publications of one volume exclude each other.
func publishBlock(ctx context.Context, device *blockdev.OpenDevice, v nodeVolume,
	table mount.Table) error {
	mounted := len(table.Of(device.Device)) > 0
	if err := filesystem.DropRecord(ctx, device, v.Volume, mounted); err != nil {
		return err
	}
	set := uint64(0)
	if v.PublishReadOnly {
		set = volume.AttrReadOnly
		if err := device.SetReadOnly(true); err != nil {
			return fmt.Errorf("make %s read-only: %w", device.Path, err)
		}
	} else if err := device.MakeWritable(true); err != nil {
		return err
	}
	return attachCopy(ctx, device, device.Path, "", set, 0, v.Target, 0)
}

// attachCopy attaches a copy of what is mounted at source, a directory or a device node, at a
// target of that kind, once it is verified to show the device.
func attachCopy(ctx context.Context, device *blockdev.OpenDevice, source, fsType string, set,
	unset uint64, target string, kind fs.FileMode) error {
	m, err := mount.Clone(source, fsType)
	if err != nil {
		return err
	}
	defer func() { _ = m.Close() }()
	if err := m.Verify(device.Device); err != nil {
		return err
	}
	if set|unset != 0 {
		if err := m.SetAttributes(set, unset); err != nil {
			return err
		}
	}
	created, err := createTarget(target, kind)
	if err != nil {
		return err
	}
	claim, err := claimPath(target, csierr.PublishedDifferently)
	if err != nil {
		return err
	}
	defer func() { _ = claim.Close() }()
	change := flight.Begin(ctx, flight.Published, flight.Fields{Filesystem: fsType})
	err = m.Attach(target)
	change.End(err, flight.Fields{})
	if err != nil {
		if created {
			err = errors.Join(err, os.Remove(target))
		}
		return err
	}
	return nil
}

// createTarget creates the target, a directory or a file. It uses one that exists already, left by
// a publication that was interrupted.
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
