//go:build linux

package driver

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"google.golang.org/grpc/codes"
)

// NodeUnstageVolume undoes NodeStageVolume. OK means that the device can be taken away: nothing of
// it is mounted here, nobody holds it, and its data are written. A volume that is not staged is a
// success. The staging directory is the CO's and stays.
func (n *Node) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (
	*csi.NodeUnstageVolumeResponse, error) {
	if req.GetVolumeId() == "" {
		return nil, fail(codes.InvalidArgument, ReasonVolumeIDMissing, "volume_id is missing")
	}
	if err := checkPath("staging_target_path", req.GetStagingTargetPath()); err != nil {
		return nil, err
	}
	if err := n.unstage(ctx, req.GetVolumeId(), req.GetStagingTargetPath()); err != nil {
		return nil, nodeError(err)
	}
	n.forget(ctx, req.GetVolumeId())
	return &csi.NodeUnstageVolumeResponse{}, nil
}

func (n *Node) unstage(ctx context.Context, volumeID, path string) error {
	table, err := readMountTable()
	if err != nil {
		return err
	}
	path, err = canonical(path)
	if err != nil && !missing(err) {
		return fmt.Errorf("resolve staging_target_path: %w", err)
	}
	layers := mountTable(nil)
	if err == nil {
		layers = table.at(path)
	}
	if len(layers) == 0 {
		return n.checkBlockReleased(ctx, table, volumeID)
	}
	// Look at everything before anything is taken down, so that a refusal changes nothing.
	var disks []device
	for _, layer := range layers {
		d, err := n.stagedDevice(layer)
		if err != nil {
			return err
		}
		if err := table.onlyAt(path, layer, d); err != nil {
			return err
		}
		disks = append(disks, d)
		if d.Path != "" {
			// When the device is not let go in time, the repeated call finds nothing mounted, and
			// must still know what to ask about.
			n.rememberDevice(ctx, volumeID, d)
		}
	}
	if err := unmountAll(path, len(layers)); err != nil {
		return err
	}
	for i, d := range disks {
		if err := n.devices().release(ctx, d, layers[i].FSType, n.releaseTimeout()); err != nil {
			return err
		}
	}
	return nil
}

// stagedDevice is the device of a staged mount; the zero device if it is no longer there. What the
// driver does not mount it does not take down either.
func (n *Node) stagedDevice(layer *mountinfo.Info) (device, error) {
	if !isVolumeType(layer.FSType) {
		return device{}, refuse(ReasonStagedDifferently, "%q has a mount of type %s, which no volume "+
			"has; it is left alone", layer.Mountpoint, layer.FSType)
	}
	major, minor, ok := mountedDevice(layer)
	if !ok {
		return device{}, nil
	}
	d, err := n.devices().withNumber(major, minor)
	if refusedFor(err, ReasonDeviceNotFound) {
		return device{}, nil
	}
	return d, err
}

// onlyAt refuses when the layer's filesystem or its device is mounted anywhere but at path.
func (t mountTable) onlyAt(path string, layer *mountinfo.Info, d device) error {
	var others mountTable
	mounts := t.sameFilesystem(layer)
	if d.Path != "" {
		mounts = append(mounts, t.of(d)...)
	}
	listed := map[int]bool{}
	for _, m := range mounts {
		if m.Mountpoint != path && !listed[m.ID] {
			listed[m.ID] = true
			others = append(others, m)
		}
	}
	if len(others) > 0 {
		return refuse(ReasonStillMounted, "the volume is still mounted at %s; unpublish it there first",
			others.paths())
	}
	return nil
}

// checkBlockReleased answers for a volume without a staging mount: a block volume, or one that is
// not staged. Its device, if it can be told, must not be published or mounted anywhere.
func (n *Node) checkBlockReleased(ctx context.Context, table mountTable, volumeID string) error {
	known, ok := n.recall(ctx, volumeID)
	if !ok {
		return nil
	}
	d, err := n.devices().lookup(diskSerial(known.Disk))
	if refusedFor(err, ReasonDeviceNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if mounts := table.of(d); len(mounts) > 0 {
		return refuse(ReasonStillMounted, "the volume is still mounted at %s; unpublish it there first",
			mounts.paths())
	}
	return n.devices().release(ctx, d, "", n.releaseTimeout())
}

// unmountAll takes down every layer at path and looks again. layers bounds the work.
func unmountAll(path string, layers int) error {
	for range layers {
		if err := unmountTop(path); errors.Is(err, errNotMounted) {
			break
		} else if err != nil {
			return err
		}
	}
	table, err := readMountTable()
	if err != nil {
		return err
	}
	if left := table.at(path); len(left) > 0 {
		return refuse(ReasonStillMounted, "%q is mounted again after it was unmounted; who does that?",
			path)
	}
	return nil
}

// release flushes a device and waits until nobody holds it: no mount of it in any mount namespace
// and no other user in the kernel. A device that is gone has nothing to flush.
func (ds devices) release(ctx context.Context, d device, fsType string, wait time.Duration) error {
	if d.Path == "" {
		return nil
	}
	held, err := ds.open(d)
	if missing(err) || vanished(err) || refusedFor(err, ReasonDeviceChanged) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = held.Close() }()
	if err := held.flush(); err != nil && !lostDevice(err) {
		return refuse(ReasonNodeToolFailed, "flush %s: %w", d.Path, err)
	}
	if fsType == fsBtrfs {
		forgetBtrfs(d.Path)
	}
	return held.awaitFree(ctx, wait)
}

// awaitFree waits until nobody holds the device any more, or it is gone. What cannot be asked is
// not taken for free.
func (h *heldDevice) awaitFree(ctx context.Context, wait time.Duration) error {
	deadline := time.Now().Add(wait)
	for {
		err := h.claim()
		switch {
		case err == nil, missing(err), vanished(err), lostDevice(err),
			refusedFor(err, ReasonDeviceChanged):
			return nil
		case !refusedFor(err, ReasonDeviceHeld):
			return refuse(ReasonNodeToolFailed, "ask whether %s is still in use: %w", h.Path, err)
		case time.Now().After(deadline):
			return refuse(ReasonStillMounted, "%s is unmounted here but still in use on this "+
				"node, in another mount namespace or by another driver: %w", h.Path, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until nobody holds %s: %w", h.Path, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}
