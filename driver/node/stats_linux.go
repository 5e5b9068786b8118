package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// NodeGetCapabilities lists what the node service can do.
func (n *Service) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (
	*csi.NodeGetCapabilitiesResponse, error) {
	var list []*csi.NodeServiceCapability
	for _, t := range []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
		csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH,
	} {
		list = append(list, &csi.NodeServiceCapability{Type: &csi.NodeServiceCapability_Rpc{
			Rpc: &csi.NodeServiceCapability_RPC{Type: t},
		}})
	}
	return &csi.NodeGetCapabilitiesResponse{Capabilities: list}, nil
}

// NodeGetInfo returns the id of this instance and how many volumes it can have.
func (n *Service) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse,
	error) {
	if n.InstanceID == "" {
		return nil, csierr.New(csierr.InstanceUnknown, "the driver does not "+
			"know which instance it runs on; set OXIDE_INSTANCE_ID")
	}
	all, err := n.host().List()
	if err != nil {
		return nil, csierr.Convert(fmt.Errorf("count the disks of this instance: %w", err),
			csierr.NodeToolFailed)
	}
	limit := cmp.Or(n.MaxDisks, volume.DefaultMaxDisks)
	foreign := foreignDisks(all, n.records().all())
	room := limit - foreign
	if room < 1 {
		// To the orchestrator, 0 means "no limit". 1 is safe, because the rack refuses a further disk.
		n.log().Error("no room for volumes on this instance; NodeGetInfo reports 1, because 0 means no "+
			"limit", "max_disks", limit, "foreign_disks", foreign)
		room = 1
	}
	info := &csi.NodeGetInfoResponse{NodeId: n.InstanceID, MaxVolumesPerNode: int64(room)}
	if len(n.Topology) > 0 {
		info.AccessibleTopology = &csi.Topology{Segments: n.Topology}
	}
	return info, nil
}

// Use counts the volumes and disks of this node.
func (n *Service) Use() (Use, error) {
	disks, err := n.host().List()
	if err != nil {
		return Use{}, fmt.Errorf("count the disks of this instance: %w", err)
	}
	volumes := map[string]bool{}
	for _, r := range n.records().all() {
		volumes[r.Volume] = true
	}
	return Use{Volumes: len(volumes), Disks: len(disks),
		Limit: cmp.Or(n.MaxDisks, volume.DefaultMaxDisks)}, nil
}

// foreignDisks counts the disks that are no volumes: the boot disk and disks attached by hand. They
// take slots from the rack's limit per instance. A disk that has a record is a volume, even if it
// was made by hand (a static volume). Without a record, as after a reboot, a static volume counts
// as foreign until it is staged. This is safe: one slot too few makes a pod wait, but one too many
// makes a pod fail on a full node. The cloud-init volume is no NVMe disk and does not count.
func foreignDisks(all []blockdev.Device, volumes []volumeRecord) int {
	return len(slices.DeleteFunc(all, func(d blockdev.Device) bool {
		return volume.IsOwnName(d.Serial) || slices.ContainsFunc(volumes, func(r volumeRecord) bool {
			return volume.Serial(r.Disk) == d.Serial
		})
	}))
}

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
	// csi-sanity expects NOT_FOUND for a relative path, not INVALID_ARGUMENT.
	if !filepath.IsAbs(req.GetVolumePath()) {
		return nil, csierr.New(csierr.VolumeNotAtPath, "volume_path has to be an absolute path")
	}
	usage, err := n.usage(req.GetVolumeId(), req.GetVolumePath(), req.GetStagingTargetPath())
	if err != nil {
		return nil, csierr.Convert(err, csierr.NodeToolFailed)
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: usage}, nil
}

func (n *Service) usage(volumeID, path, staging string) ([]*csi.VolumeUsage, error) {
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
				path, shown.Device.Name, staged.Device.Name, staging)
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
			// btrfs creates inodes as it needs them, so these numbers are 0.
			Unit:      csi.VolumeUsage_INODES,
			Total:     int64(st.Files),
			Available: int64(st.Ffree),
			Used:      int64(st.Files - st.Ffree),
		},
	}, nil
}

type shownVolume struct {
	Device    blockdev.Device
	Block     bool
	FSType    string
	Condition mount.Condition // of the filesystem
}

// statfs asks the filesystem through a descriptor, and verifies that the filesystem is on the
// volume's device: after an unmount, the path leads to the filesystem below.
func (v shownVolume) statfs(path string) (st unix.Statfs_t, err error) {
	m, err := mount.Open(path, v.FSType)
	if mount.IsMissing(err) {
		return st, csierr.New(csierr.VolumeNotAtPath, "the volume is no longer at %q: %w", path, err)
	}
	if err != nil {
		return st, fmt.Errorf("open the filesystem at %q: %w", path, err)
	}
	defer func() { _ = m.Close() }()
	// ENOTTY: by now the path leads to a filesystem that does not know the ioctls of btrfs.
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

// volumeAt is like shownAt, but fails if the records show that the disk is not the volume's.
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

type healthEntries = []*csi.VolumeHealth_VolumeHealthEntry

// NodeGetVolumeHealth reports what this node can see of a volume: whether its device is there, and
// whether errors made its filesystem read-only. It does not read from the device.
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

func (n *Service) volumeHealth(req *csi.NodeGetVolumeHealthRequest) (healthEntries, error) {
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

// checkPaths fails if another volume is mounted at a path of the request.
func checkPaths(host blockdev.Host, req *csi.NodeGetVolumeHealthRequest, serial string) error {
	for _, path := range []string{req.GetVolumePublishPath(), req.GetStagingTargetPath()} {
		if path == "" {
			continue
		}
		if shown, err := shownAt(host, path); err == nil && shown.Device.Serial != serial {
			return csierr.New(csierr.VolumeNotAtPath, "%q shows the disk with serial %q, but the volume's "+
				"is %q", path, shown.Device.Serial, serial)
		}
	}
	return nil
}

func (n *Service) healthAt(req *csi.NodeGetVolumeHealthRequest) (healthEntries, error) {
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
	return healthEntries{{Status: status, Reason: string(reason), Message: err.Error()}}
}

// NodeGetStorageHealth reports nothing: a node sees its disks and not the rack behind them.
func (n *Service) NodeGetStorageHealth(context.Context, *csi.NodeGetStorageHealthRequest) (
	*csi.NodeGetStorageHealthResponse, error) {
	return &csi.NodeGetStorageHealthResponse{}, nil
}

const (
	maxShownMounts  = 64
	maxShownChanges = 50
)

// Inspect reports what this node sees of the given volumes, or of each volume with a record if none
// is given. It can run in a process beside the driver, and affects no call: it takes no lock, waits
// for nothing, writes nothing, and opens devices only for reading.
func (n *Service) Inspect(asked []inspection.Asked) inspection.Report {
	r := inspection.Report{Format: inspection.Format, At: time.Now().UTC(), Instance: n.InstanceID,
		Devices: []inspection.Device{}, Volumes: []inspection.Volume{}}
	all, err := n.host().List()
	if err != nil {
		r.Unseen = append(r.Unseen, unseen(inspection.PartDevices, err))
	}
	for _, d := range all {
		r.Devices = append(r.Devices, inspectDevice(d))
	}
	views, err := mount.ReadViews(n.log())
	if err != nil {
		r.Unseen = append(r.Unseen, unseen(inspection.PartMounts, err))
	}
	if len(asked) == 0 {
		for _, known := range n.records().all() {
			asked = append(asked, inspection.Asked{ID: known.Volume})
		}
		slices.SortFunc(asked, func(a, b inspection.Asked) int { return cmp.Compare(a.ID, b.ID) })
	}
	in := inspector{host: n.host(), records: n.records(), stateDir: n.StateDir}
	for _, a := range asked {
		r.Volumes = append(r.Volumes, in.volume(a, all, views))
	}
	return r
}

func unseen(part string, err error) inspection.Unseen {
	return inspection.Unseen{Part: part, Why: csierr.Plain(err.Error())}
}

func inspectDevice(d blockdev.Device) inspection.Device {
	return inspection.Device{Name: d.Name, Number: d.Number(), Serial: csierr.Plain(d.Serial),
		SizeBytes: d.SizeBytes}
}

type inspector struct {
	host     blockdev.Host
	records  *recordStore
	stateDir string // empty if nothing is kept
}

func (in inspector) volume(a inspection.Asked, all []blockdev.Device,
	views mount.Views) inspection.Volume {
	v := inspection.Volume{ID: a.ID, Devices: []inspection.Device{},
		Filesystems: []inspection.Filesystem{}, Mounts: []inspection.Mount{},
		Flight: []flight.Entry{}, Open: []flight.Entry{}}
	in.state(&v)
	v.Serial, v.From = serialOf(a, v)
	if v.Serial == "" {
		return v
	}
	own := slices.DeleteFunc(slices.Clone(all), func(d blockdev.Device) bool {
		return d.Serial != v.Serial
	})
	for _, d := range own {
		v.Devices = append(v.Devices, inspectDevice(d))
	}
	if len(own) != 1 {
		return v // it is not known which device is the volume's
	}
	shown := inspectMounts(&v, own[0], views)
	if err := in.content(&v, own[0], shown); err != nil {
		v.Unseen = append(v.Unseen, unseen(inspection.PartFilesystem, err))
		if reason := csierr.ReasonOf(err); reason != "" {
			v.Problems = append(v.Problems, inspection.Problem{Reason: reason,
				Says: csierr.Plain(err.Error())})
		} else {
			v.Unseen = append(v.Unseen, unseen(inspection.PartDevice, err))
		}
	}
	return v
}

func (in inspector) state(v *inspection.Volume) {
	if in.stateDir == "" {
		err := errors.New("OXIDE_STATE_DIR is not set")
		v.Unseen = append(v.Unseen, unseen(inspection.PartRecord, err),
			unseen(inspection.PartFlight, err))
		return
	}
	known, err := readRecordFile(filepath.Join(in.stateDir, recordFile(v.ID)))
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		v.Unseen = append(v.Unseen, unseen(inspection.PartRecord, err))
	default:
		v.Record = &inspection.VolumeRecord{Disk: known.Disk, Instance: known.Instance,
			Block: known.Block}
	}
	entries, err := flight.Read(filepath.Join(in.stateDir, flight.DirName), v.ID)
	if err != nil {
		v.Unseen = append(v.Unseen, unseen(inspection.PartFlight, err))
	}
	v.Open = append(v.Open, flight.Open(entries)...)
	v.Flight = append(v.Flight, entries[max(0, len(entries)-maxShownChanges):]...)
}

func serialOf(a inspection.Asked, v inspection.Volume) (serial, from string) {
	if v.Record != nil {
		return volume.Serial(v.Record.Disk), "the volume's record"
	}
	if a.Disk != "" {
		return volume.Serial(a.Disk), "the request"
	}
	for _, e := range slices.Backward(v.Flight) {
		if e.Disk != "" {
			return volume.Serial(e.Disk), "the flight recorder"
		}
	}
	return "", ""
}

func inspectMounts(v *inspection.Volume, d blockdev.Device, views mount.Views) (own []mount.Found) {
	if views == nil {
		v.Unseen = append(v.Unseen, inspection.Unseen{Part: inspection.PartMounts,
			Why: "the mount tables could not be read"})
		return nil
	}
	known := map[string]bool{}
	for _, m := range views.Of(d, nil) {
		shown := inspection.Mount{Path: csierr.Plain(m.Mountpoint), Process: m.Process()}
		if shown.Process == "" {
			own = append(own, m)
			known[m.Mountpoint] = true
		} else if known[m.Mountpoint] {
			continue // a propagated copy of a mount in own
		}
		if !mount.IsNode(m.Info) {
			shown.FSType = m.FSType
		}
		if shown.Process == "" && shown.FSType != "" {
			if c := mount.ConditionOf(m.Info); c != mount.Healthy {
				shown.Failed = c.String()
			}
			shown.Writable = !mount.ReadOnly(m.Info) && !mount.FilesystemReadOnly(m.Info)
		}
		if len(v.Mounts) < maxShownMounts {
			v.Mounts = append(v.Mounts, shown)
		}
	}
	return own
}

func (in inspector) content(v *inspection.Volume, d blockdev.Device,
	own []mount.Found) (err error) {
	if _, err := in.host.Lookup(d.Serial); err != nil {
		return err
	}
	device, err := in.host.Open(d)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, device.Close()) }()
	if v.Devices[0].BlockBytes, err = device.BlockBytes(); err != nil {
		return err
	}
	if v.Devices[0].ReadOnly, err = device.ReadOnly(); err != nil {
		return err
	}
	found, err := filesystem.Find(device)
	if err != nil {
		return err
	}
	for _, sb := range found {
		v.Filesystems = append(v.Filesystems, inspection.Filesystem{Type: sb.Type, UUID: sb.UUID,
			SizeBytes: sb.SizeBytes, Damaged: sb.Damaged})
	}
	if len(found) == 1 && len(own) > 0 {
		known, err := in.records.of(v.ID).read()
		v.Filesystems[0].NotGrown = err == nil && known.Covers > 0
	}
	return nil
}
