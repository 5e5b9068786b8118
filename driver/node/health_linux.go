package node

import (
	"context"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

type healthEntries = []*csi.VolumeHealth_VolumeHealthEntry

// NodeGetVolumeHealth reports what this node can see of a volume: whether its device is there, and
// whether errors made its filesystem read-only. It reads neither the device nor what is on it.
func (n *Service) NodeGetVolumeHealth(_ context.Context, req *csi.NodeGetVolumeHealthRequest) (
	*csi.NodeGetVolumeHealthResponse, error) {
	if req.GetVolumeId() == "" {
		return nil, csierr.New(csierr.VolumeIDMissing, "volume_id is missing")
	}
	if err := checkPathText("volume_publish_path", req.GetVolumePublishPath()); err != nil {
		return nil, err
	}
	if err := checkPathText("staging_target_path", req.GetStagingTargetPath()); err != nil {
		return nil, err
	}
	entries, err := n.volumeHealth(req)
	if err != nil {
		return nil, csierr.Convert(err, csierr.NodeToolFailed)
	}
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: &csi.VolumeHealth{
		VolumeId: req.GetVolumeId(), HealthStatuses: entries,
	}}, nil
}

func (n *Service) volumeHealth(req *csi.NodeGetVolumeHealthRequest) (
	healthEntries, error) {
	known, ok := n.records().of(req.GetVolumeId()).load()
	if !ok {
		return n.healthAt(req)
	}
	if err := checkPaths(n.host(), req, volume.Serial(known.Disk)); err != nil {
		return nil, err
	}
	d, err := n.host().Lookup(volume.Serial(known.Disk))
	if csierr.Has(err, csierr.DeviceNotFound) {
		return unhealthy(csi.VolumeHealthErrorType_INACCESSIBLE, csierr.DeviceNotFound, err), nil
	}
	if err != nil {
		return nil, err
	}
	table, err := mount.ReadTable()
	if err != nil {
		return nil, err
	}
	mounts := table.Of(d)
	for _, m := range mounts {
		if entries := conditionHealth(mount.ConditionOf(m), m.Mountpoint); entries != nil &&
			!mount.IsNode(m) {
			return entries, nil
		}
	}
	if len(mounts) == 0 || known.Covers == 0 {
		return nil, nil
	}
	return unhealthy(csi.VolumeHealthErrorType_DEGRADED, csierr.FilesystemNotGrown, fmt.Errorf(
		"the filesystem at %q covers %s of its disk's %s; it was not grown because something lies "+
			"behind it, or because nothing grows it; see the log of the node's driver",
		mounts[0].Mountpoint, volume.SizeText(known.Covers), volume.SizeText(d.SizeBytes))), nil
}

// checkPaths refuses a path of the request that shows another volume. A path that shows nothing
// says nothing about the volume's health.
func checkPaths(host blockdev.Host, req *csi.NodeGetVolumeHealthRequest, serial string) error {
	for _, path := range []string{req.GetVolumePublishPath(), req.GetStagingTargetPath()} {
		if path == "" {
			continue
		}
		if shown, err := shownAt(host, path); err == nil && shown.Device.Serial != serial {
			return csierr.New(csierr.VolumeNotAtPath, "%q shows the disk with serial %q, but the volume's "+
				"is %q",
				path, shown.Device.Serial, serial)
		}
	}
	return nil
}

// healthAt judges by the paths of the request, for a volume without a record.
func (n *Service) healthAt(req *csi.NodeGetVolumeHealthRequest) (
	healthEntries, error) {
	for _, path := range []string{req.GetVolumePublishPath(), req.GetStagingTargetPath()} {
		if path == "" {
			continue
		}
		shown, err := n.volumeAt(req.GetVolumeId(), path)
		switch {
		case csierr.Has(err, csierr.VolumeNotAtPath):
			continue
		case csierr.Has(err, csierr.FilesystemFailed):
			return unhealthy(csi.VolumeHealthErrorType_INACCESSIBLE, csierr.FilesystemFailed, err), nil
		case err != nil:
			return nil, err
		}
		return conditionHealth(shown.Condition, path), nil
	}
	return nil, csierr.New(csierr.VolumeUnknownToNode, "this node knows nothing of the volume, "+
		"and the request names no path where it is")
}

func conditionHealth(c mount.Condition, path string) healthEntries {
	err := fmt.Errorf("the filesystem at %q is %s", path, c)
	switch c {
	case mount.ReadOnlyAfterErrors:
		return unhealthy(csi.VolumeHealthErrorType_DEGRADED, csierr.FilesystemFailed, err)
	case mount.Dead:
		return unhealthy(csi.VolumeHealthErrorType_INACCESSIBLE, csierr.FilesystemFailed, err)
	}
	return nil
}

func unhealthy(status csi.VolumeHealthErrorType, reason csierr.Reason, err error) healthEntries {
	return healthEntries{{
		Status: status, Reason: string(reason), Message: err.Error(),
	}}
}

// NodeGetStorageHealth reports nothing: a node sees its disks and not the rack behind them.
func (n *Service) NodeGetStorageHealth(context.Context, *csi.NodeGetStorageHealthRequest) (
	*csi.NodeGetStorageHealthResponse, error) {
	return &csi.NodeGetStorageHealthResponse{}, nil
}
