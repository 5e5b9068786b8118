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

// publish verifies the device again and then shows it. It does not wait for a device, because a
// staged volume has one.
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

// findStaged returns the volume's mount at the staging path, verified by the number of its device.
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

// checkTarget compares the request with the mount at the target path or, without one, with the
// volume's other publications.
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

// publications lists the other targets that show the volume. Mounts of directories inside it are
// the orchestrator's or a workload's own.
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

// publishBlock shows the device's node at the target path.
//
// A read-only mount of a node does not stop writes, so a read-only block volume makes the device
// itself read-only. That applies to every user of the device, so read-only and writable
// publications of one volume exclude each other.
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

// attachCopy attaches a copy of the mount at source, a directory or a device node, at the target,
// which has to be of that kind. It verifies first that the copy shows the device.
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

// createTarget creates the target, a directory or a file. A target that exists is left from an
// interrupted publication and is used.
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
