package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// NodeUnstageVolume unmounts the volume. After an OK the disk can be detached: it is not mounted on
// this node, nobody uses its device, and its data are written. The call succeeds if the volume is
// not staged. It keeps the staging directory, which is the orchestrator's.
func (n *Service) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (
	*csi.NodeUnstageVolumeResponse, error) {
	err := checkIDAndPath(req.GetVolumeId(), "staging_target_path", req.GetStagingTargetPath())
	var v heldVolume
	if err == nil {
		v, err = n.hold(ctx, req.GetVolumeId())
	}
	if err == nil {
		defer v.unlock()
		err = v.unstage(ctx, req.GetStagingTargetPath())
	}
	if err != nil {
		return nil, undoError(err)
	}
	v.flight.Confirm(flight.Unmounted, flight.Fields{}, flight.Fields{})
	v.record.delete()
	return &csi.NodeUnstageVolumeResponse{}, nil
}

type stagedDisk struct {
	blockdev.Device                 // the zero device if the disk is gone
	layer           *mountinfo.Info // its mount at the staging path; nil if only a record names it
	raw             bool            // published as a raw device, which workloads may have open
	journal         bool            // a healthy, writable ext filesystem, whose journal release checks
}

func (v heldVolume) unstage(ctx context.Context, path string) error {
	v.node.scans.Drop(v.id)
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
	own, err := v.ownMounts(layers, csierr.StagedDifferently)
	if err != nil {
		return err
	}
	if len(own) == 0 {
		layers = nil // the path shows another volume
	}
	disks, err := v.stagedDisks(own)
	if err != nil || len(disks) == 0 {
		return err
	}
	// Search for other mounts before the first unmount, so that a call that finds one has changed
	// nothing. Other users of the device can be found only when nothing is mounted.
	unread, err := v.awaitNone(ctx, func(vs mount.Views) []mount.Found {
		return vs.Elsewhere(mountsOf(vs, disks), layers)
	})
	if err != nil {
		return err
	}
	unwritten, err := v.takeDown(ctx, path, layers, disks)
	if unread != "" && csierr.Has(err, csierr.StillMounted) {
		err = fmt.Errorf("%w; it may be mounted in the namespace of process %s, whose mounts are too "+
			"many or too slow to read", err, unread)
	}
	switch {
	case err == nil:
		return unwritten
	case unwritten == nil:
		return err
	}
	return fmt.Errorf("%w; %w", err, unwritten) // no later call can report the lost data
}

func (v heldVolume) takeDown(ctx context.Context, path string, layers []*mountinfo.Info,
	disks []stagedDisk) (unwritten, err error) {
	if len(layers) > 0 {
		if unwritten, err = v.unmount(ctx, path, layers, disks); err != nil {
			return unwritten, err
		}
	}
	for _, d := range disks {
		gone, err := v.release(ctx, d)
		if err != nil {
			return unwritten, err
		}
		if gone {
			unwritten = nil // a failed write to a disk that was detached is not an error
		}
	}
	return unwritten, nil
}

// stagedDisks returns the disks that are mounted at the staging path, and the disk in the volume's
// record. It returns none if the volume is not staged, or if it has no mounts and its disk is gone.
func (v heldVolume) stagedDisks(own []stagedDisk) ([]stagedDisk, error) {
	var disks []stagedDisk
	for _, d := range own {
		if !slices.ContainsFunc(disks, func(s stagedDisk) bool {
			return mount.SameFilesystem(d.layer, s.layer)
		}) {
			disks = append(disks, d)
		}
	}
	known, ok := v.record.load()
	if !ok {
		return disks, nil
	}
	serial := volume.Serial(known.Disk)
	if i := slices.IndexFunc(disks, func(s stagedDisk) bool { return s.Serial == serial }); i >= 0 {
		disks[i].raw = known.Block
		return disks, nil
	}
	d, err := v.node.host().Lookup(serial)
	if csierr.Has(err, csierr.DeviceNotFound) {
		return disks, nil
	}
	if err != nil {
		return nil, err
	}
	return append(disks, stagedDisk{Device: d, raw: known.Block}), nil
}

func mountsOf(vs mount.Views, disks []stagedDisk) []mount.Found {
	var found []mount.Found
	for _, d := range disks {
		found = append(found, vs.Of(d.Device, d.layer)...)
	}
	return found
}

func (v heldVolume) releaseTimeout() time.Duration {
	return cmp.Or(v.node.ReleaseTimeout, defaultReleaseTimeout)
}

func (v heldVolume) awaitNone(ctx context.Context, look func(mount.Views) []mount.Found) (
	unread string, err error) {
	return mount.AwaitNone(ctx, v.node.log(), v.releaseTimeout(), look)
}

// unmount syncs and unmounts the filesystems at the staging path, and waits until no namespace has
// the disks mounted. A failed sync does not stop the unmount, because the data are lost in any
// case. unwritten is the error of the sync, or nil if the filesystem had failed before, because
// NodeGetVolumeHealth reports such a failure.
func (v heldVolume) unmount(ctx context.Context, path string, layers []*mountinfo.Info,
	disks []stagedDisk) (unwritten, err error) {
	for _, d := range disks {
		// If the device is not released in time, the orchestrator repeats the call. By that time nothing
		// is mounted, and only the record tells which disk to release.
		if d.Path != "" {
			v.record.saveDisk(d.Serial)
		}
	}
	// Thaw the filesystem first, because writes to it block while it is frozen.
	if err := mount.ThawAt(layers[len(layers)-1]); err != nil {
		v.node.log().Warn("a filesystem could not be thawed before its unmount",
			"path", path, "error", err)
	}
	healthy := mount.ConditionOf(layers[len(layers)-1]) == mount.Healthy
	for i, d := range disks {
		disks[i].journal = healthy && d.layer != nil && !mount.FilesystemReadOnly(d.layer) &&
			(d.layer.FSType == volume.Ext3 || d.layer.FSType == volume.Ext4)
	}
	if err := mount.Sync(path); err != nil {
		v.node.log().Error("a filesystem could not be written out before its unmount",
			"path", path, "error", err)
		if healthy {
			unwritten = csierr.New(csierr.NodeToolFailed, "the filesystem at %q could not be written "+
				"out, so what its workload wrote last may be lost: %w", path, err)
		}
	}
	change := v.flight.Begin(flight.Unmounted, flight.Fields{})
	err = mount.UnmountAll(path, len(layers))
	change.End(err, flight.Fields{})
	if err != nil {
		return unwritten, err
	}
	_, err = v.awaitNone(ctx, func(vs mount.Views) []mount.Found { return mountsOf(vs, disks) })
	return unwritten, err
}

// release flushes a disk and waits until no namespace has it mounted, nothing else in the kernel
// uses it, and no process has it open for writing. gone is true if the disk was detached.
func (v heldVolume) release(ctx context.Context, d stagedDisk) (gone bool, err error) {
	if d.Path == "" {
		return true, nil
	}
	device, err := v.openFlushed(ctx, d.Device)
	if device == nil {
		return true, err
	}
	defer func() { _ = device.Close() }()
	// If nothing was mounted, an earlier call may have unmounted a btrfs and not reached ForgetBtrfs.
	if d.layer == nil || d.layer.FSType == volume.Btrfs {
		filesystem.ForgetBtrfs(device)
	}
	err = v.awaitFree(ctx, device, d.raw)
	switch {
	case err != nil:
	case d.raw:
		err = endReadOnly(device)
	case d.journal:
		err = checkJournal(v.node.log(), device)
	}
	return false, err
}

// checkJournal fails if the unmounted ext filesystem on the device could not write its journal.
// Nothing else reports that.
func checkJournal(log *slog.Logger, device *blockdev.OpenDevice) error {
	failed, err := filesystem.JournalFailed(device)
	switch {
	case err != nil:
		log.Warn("an unmounted filesystem could not be looked at", "device", device.Path, "error", err)
	case failed:
		return csierr.New(csierr.NodeToolFailed, "the journal of the filesystem on %s could not be "+
			"written, so what its workload wrote last may be lost", device.Path)
	}
	return nil
}

// openFlushed opens, locks and flushes a device. It returns nil if the device is gone. If the flush
// fails, the first call returns the error, because data may be lost. A repeated call ignores it,
// because otherwise a volume could never be unpublished or unstaged after its disk has failed.
func (v heldVolume) openFlushed(ctx context.Context, d blockdev.Device) (*blockdev.OpenDevice,
	error) {
	device, err := v.node.host().OpenLocked(ctx, d, false)
	if mount.IsMissing(err) || blockdev.Vanished(err) || csierr.Has(err, csierr.DeviceChanged) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if err := v.flush(device); err != nil {
		_ = device.Close()
		return nil, err
	}
	return device, nil
}

func (v heldVolume) flush(device *blockdev.OpenDevice) error {
	err := device.Flush()
	if err == nil || blockdev.Lost(err) && !errors.Is(err, unix.EIO) {
		return nil
	}
	if _, told := v.node.told.LoadOrStore(v.id, true); told {
		v.node.log().Error("a device is released although it cannot be flushed",
			"volume", v.id, "device", device.Path, "error", err)
		return nil
	}
	return csierr.New(csierr.NodeToolFailed, "flush %s: %w", device.Path, err)
}

// awaitFree waits until nobody uses the device any more, and then flushes what others have written
// meanwhile. If the device is gone, it returns nil.
func (v heldVolume) awaitFree(ctx context.Context, device *blockdev.OpenDevice, raw bool) error {
	device.Shared = raw
	backoff := async.Backoff{Pause: 20 * time.Millisecond, Max: 20 * time.Millisecond,
		End: time.Now().Add(v.releaseTimeout())}
	thaw := func() error { return filesystem.TryExclusive(v.node.log(), device) }
	for try := thaw; ; try = device.TryExclusive {
		err := try()
		if err == nil {
			err = device.CheckLoops()
		}
		if err == nil {
			err = device.CheckWriters()
		}
		switch {
		case err == nil: // a writer may have ended since the first flush
			return v.flush(device)
		case csierr.Has(err, csierr.DeviceHeld): // even if it wraps an error of the next case
		case mount.IsMissing(err), blockdev.Vanished(err), blockdev.Lost(err),
			csierr.Has(err, csierr.DeviceChanged):
			return nil
		default:
			return csierr.New(csierr.NodeToolFailed, "ask whether %s is still in use: %w", device.Path, err)
		}
		switch again, ended := backoff.Wait(ctx); {
		case ended != nil:
			return fmt.Errorf("wait until nobody holds %s: %w", device.Path, ended)
		case !again:
			holders := "" // the users that the error does not name
			if errors.Is(err, unix.EBUSY) {
				holders = ", " + device.DescribeHolders()
			}
			return csierr.New(csierr.StillMounted, "%s is unmounted here but still in use on this "+
				"node%s: %w", device.Path, holders, err)
		}
	}
}

// heldVolume is a volume that a call has locked on this node, to change it.
type heldVolume struct {
	node   *Service
	id     string
	lock   *os.File // against the other processes of the driver
	record storedRecord
	flight flight.Call
}

// hold locks the volume against other processes of the driver until the caller unlocks the returned
// value. Every call that changes a volume on this node holds the lock from its beginning to its
// end, so that no call returns OK while another process is in the middle of a change.
func (n *Service) hold(ctx context.Context, volumeID string) (heldVolume, error) {
	lock, err := n.host().Lock(ctx, "the volume "+recordKey(volumeID))
	return heldVolume{node: n, id: volumeID, lock: lock, record: n.records().of(volumeID),
		flight: flight.Of(ctx)}, err
}

func (v heldVolume) unlock() { _ = v.lock.Close() }

func (n *Service) host() blockdev.Host {
	h := blockdev.Host{Sysfs: cmp.Or(n.SysfsRoot, DefaultSysfsRoot),
		Dev: cmp.Or(n.DevRoot, DefaultDevRoot), Mounted: func(d blockdev.Device) string {
			views, err := mount.ReadViews(n.log())
			if err != nil {
				return ""
			}
			return mount.Describe(views.Of(d, nil))
		}}
	if n.StateDir != "" {
		h.Locks = filepath.Join(n.StateDir, lockName)
	}
	return h
}
