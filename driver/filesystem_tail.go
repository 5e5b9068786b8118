//go:build linux

package driver

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// mayGrow decides whether the filesystem grows to its device: only where that is proven to hold
// nothing. Otherwise it is used as it is, for what lies behind it may be somebody's data.
func (n *Node) mayGrow(ctx context.Context, h *heldDevice, v nodeVolume, c content) (bool, error) {
	if c.Begun {
		return true, nil // it was proven before the marks of the growth were written
	}
	if !c.Filesystem.grows(h.SizeBytes) {
		return false, nil
	}
	err := n.proveTail(ctx, h, v, c.Filesystem.SizeBytes)
	if csierr.Has(err, csierr.DiskNotBlank) || csierr.Has(err, csierr.DeviceUnreadable) {
		n.log().WarnContext(ctx, "the filesystem is smaller than its disk and is not grown",
			"volume", v.ID, "device", h.Path, "filesystem_bytes", c.Filesystem.SizeBytes,
			"disk_bytes", h.SizeBytes, "error", err)
		return false, nil
	}
	return err == nil, err
}

// proveTail proves that the device holds nothing but zeroes from an offset on: read whole, but for
// what the rack made blank when the driver restored the disk. There a sample tells.
func (n *Node) proveTail(ctx context.Context, h *heldDevice, v nodeVolume, from int64) error {
	blank := max(from, v.blankFrom(h.SizeBytes))
	if from < blank {
		if err := n.proveZero(ctx, h, from, blank); err != nil {
			return err
		}
	}
	s, err := h.read(tailAreas(h.SizeBytes, blank), nil)
	if err != nil {
		return err
	}
	if offset, owner, dirty := s.firstNonZero(); dirty {
		return csierr.New(csierr.DiskNotBlank, "%s is not blank behind its filesystem: the first byte "+
			"that is not zero is at offset %d (%s)", h.Path, offset, owner)
	}
	return nil
}

// blankFrom is where the part of the volume's disk begins that the rack made blank behind a smaller
// snapshot, and that nobody has been shown as a raw device. Without one it is the disk's end.
func (v nodeVolume) blankFrom(sizeBytes int64) int64 {
	if v.Origin != volume.OriginSnapshot || v.Use != volume.UseFilesystem || v.SourceBytes <= 0 ||
		v.SourceBytes%spotBytes != 0 {
		return sizeBytes
	}
	return min(v.SourceBytes, sizeBytes)
}

// filesystemSize asks a mounted filesystem how large it is, and what growing adds to it at least.
func filesystemSize(ds devices, m *mountinfo.Info, d device) (superblock, error) {
	if m.FSType == volume.Ext3 || m.FSType == volume.Ext4 {
		return extOn(ds, d)
	}
	fd, err := unix.Open(m.Mountpoint, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return superblock{}, fmt.Errorf("open the filesystem at %q: %w", m.Mountpoint, err)
	}
	mount := looseMount{fd: fd, fsType: m.FSType}
	defer func() { _ = mount.Close() }()
	if err := mount.prove(d); err != nil {
		return superblock{}, err
	}
	return mount.size()
}

// extOn reads the superblock of a mounted ext, which tells the size that it was mounted with.
func extOn(ds devices, d device) (superblock, error) {
	h, err := ds.open(d)
	if err != nil {
		return superblock{}, err
	}
	defer func() { _ = h.Close() }()
	found, err := h.superblocks()
	if err == nil && len(found) != 1 {
		err = fmt.Errorf("%s shows %d filesystems", d.Path, len(found))
	}
	if err != nil {
		return superblock{}, err
	}
	return found[0], nil
}

// ungrown says that a volume's filesystem leaves a part of its disk unused; nil when it does not,
// or when it cannot be asked. One that is read-only is not expected to grow.
func (n *Node) ungrown(m *mountinfo.Info, d device) healthEntries {
	if isNodeMount(m) || slices.Contains(strings.Split(m.VFSOptions, ","), "ro") {
		return nil
	}
	sb, err := filesystemSize(n.devices(), m, d)
	if err != nil || !sb.leavesRoom(d.SizeBytes) {
		return nil
	}
	return notGrown(m.Mountpoint, sb.SizeBytes, d.SizeBytes)
}
