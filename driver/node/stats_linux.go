package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// NodeGetVolumeStats reports how full the volume at the path is.
func (n *Service) NodeGetVolumeStats(_ context.Context, req *csi.NodeGetVolumeStatsRequest) (
	*csi.NodeGetVolumeStatsResponse, error) {
	if req.GetVolumeId() == "" {
		return nil, csierr.New(csierr.VolumeIDMissing, "volume_id is missing")
	}
	if req.GetVolumePath() == "" {
		return nil, csierr.New(csierr.PathInvalid, "volume_path is missing")
	}
	if err := checkPathText("volume_path", req.GetVolumePath()); err != nil {
		return nil, err
	}
	if err := checkPathText("staging_target_path", req.GetStagingTargetPath()); err != nil {
		return nil, err
	}
	// csi-sanity expects that a volume is "not found" at a relative path, not that the path is
	// invalid.
	if !filepath.IsAbs(req.GetVolumePath()) {
		return nil, csierr.New(csierr.VolumeNotAtPath, "volume_path has to be an absolute path")
	}
	usage, err := n.usage(req.GetVolumeId(), req.GetVolumePath(), req.GetStagingTargetPath())
	if err != nil {
		return nil, csierr.Convert(err, csierr.NodeToolFailed)
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: usage}, nil
}

func (n *Service) usage(volumeID, path, staging string) (
	[]*csi.VolumeUsage, error) {
	shown, err := n.volumeAt(volumeID, path)
	if err != nil {
		return nil, err
	}
	if staging != "" && !shown.Block {
		staged, err := shownAt(n.host(), staging)
		if err != nil {
			return nil, err
		}
		if staged.Device.Number() != shown.Device.Number() {
			return nil, csierr.New(csierr.VolumeNotAtPath, "%q shows device %s, but %s is staged at %q",
				path,
				shown.Device.Name, staged.Device.Name, staging)
		}
	}
	if shown.Block {
		return []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: shown.Device.SizeBytes}}, nil
	}
	st, err := shown.statfs(path)
	if err != nil {
		return nil, err
	}
	return []*csi.VolumeUsage{
		{
			Unit:      csi.VolumeUsage_BYTES,
			Total:     int64(st.Blocks) * st.Bsize,
			Available: int64(st.Bavail) * st.Bsize,
			Used:      int64(st.Blocks-st.Bfree) * st.Bsize,
		},
		{
			// btrfs creates inodes as it needs them and counts none.
			Unit:      csi.VolumeUsage_INODES,
			Total:     int64(st.Files),
			Available: int64(st.Ffree),
			Used:      int64(st.Files - st.Ffree),
		},
	}, nil
}

// shownVolume is a disk of this instance as a path shows it.
type shownVolume struct {
	Device    blockdev.Device
	Block     bool
	FSType    string
	Condition mount.Condition // of the filesystem
}

// statfs asks the filesystem through a descriptor that is verified to be on the volume's device. If
// the volume was unmounted since it was found, the path leads to the filesystem below.
func (v shownVolume) statfs(path string) (st unix.Statfs_t, err error) {
	m, err := mount.Open(path, v.FSType)
	if mount.IsMissing(err) {
		return st, csierr.New(csierr.VolumeNotAtPath, "the volume is no longer at %q: %w", path, err)
	}
	if err != nil {
		return st, fmt.Errorf("open the filesystem at %q: %w", path, err)
	}
	defer func() { _ = m.Close() }()
	// A filesystem that is no btrfs after all does not know btrfs's ioctl.
	if err := m.Verify(v.Device); csierr.Has(err, csierr.DeviceChanged) || errors.Is(err,
		unix.ENOTTY) {
		return st, csierr.New(csierr.VolumeNotAtPath, "the volume is no longer at %q: %w", path, err)
	} else if err != nil {
		return st, err
	}
	if st, err = m.Statfs(); err != nil {
		return st, fmt.Errorf("statistics of the filesystem at %q: %w", path, err)
	}
	return st, nil
}

// volumeAt finds the disk that a path shows. It refuses one that a record says is not the volume's.
func (n *Service) volumeAt(volumeID, path string) (shownVolume, error) {
	shown, err := shownAt(n.host(), path)
	if err != nil {
		return shownVolume{}, err
	}
	if why, _ := n.records().of(volumeID).otherVolume(shown.Device.Serial); why != "" {
		return shownVolume{}, csierr.New(csierr.VolumeNotAtPath, "%q shows %s", path, why)
	}
	return shown, nil
}

// shownAt finds the disk of this instance that a path shows, as a mounted filesystem or as a node.
func shownAt(host blockdev.Host, path string) (shownVolume, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		err = &os.PathError{Op: "stat", Path: path, Err: err}
		if mount.IsMissing(err) {
			return shownVolume{}, csierr.New(csierr.VolumeNotAtPath, "no volume is at that path: %w", err)
		}
		if blockdev.Lost(err) {
			return shownVolume{}, csierr.New(csierr.FilesystemFailed, "the filesystem does not answer: %w",
				err)
		}
		return shownVolume{}, err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFBLK {
		d, err := host.WithNumber(unix.Major(st.Rdev), unix.Minor(st.Rdev))
		return shownVolume{Device: d, Block: true}, notAtPath(path, err)
	}
	resolved, err := filepath.EvalSymlinks(path)
	if err != nil {
		return shownVolume{}, fmt.Errorf("resolve volume_path: %w", err)
	}
	table, err := mount.ReadTable()
	if err != nil {
		return shownVolume{}, err
	}
	top := table.Top(resolved)
	if top == nil {
		return shownVolume{}, csierr.New(csierr.VolumeNotAtPath, "nothing is mounted at %q", path)
	}
	major, minor, err := mount.Device(top, blockdev.Device{})
	if err != nil {
		return shownVolume{}, csierr.New(csierr.VolumeNotAtPath, "%q shows a %s filesystem that is on "+
			"no disk: %w", path, top.FSType, err)
	}
	d, err := host.WithNumber(major, minor)
	shown := shownVolume{Device: d, FSType: top.FSType, Condition: mount.ConditionOf(top)}
	return shown, notAtPath(path, err)
}

func notAtPath(path string, err error) error {
	if csierr.Has(err, csierr.DeviceNotFound) {
		return csierr.New(csierr.VolumeNotAtPath, "%q shows no disk of this instance: %w", path, err)
	}
	return err
}
