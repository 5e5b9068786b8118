package node

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// NodeStageVolume mounts the volume's filesystem at the staging path. If the disk is blank, the
// call formats it first. For a raw block volume it only verifies that the device is there.
func (n *Service) NodeStageVolume(ctx context.Context, req *csi.NodeStageVolumeRequest) (
	*csi.NodeStageVolumeResponse, error) {
	v, err := parseStage(req)
	if err != nil {
		return nil, err
	}
	n.told.Delete(v.ID)
	if v.heldVolume, err = n.hold(ctx, v.ID); err != nil {
		return nil, csierr.Convert(err, csierr.NodeToolFailed)
	}
	defer v.unlock()
	_, known := v.record.load()
	if err := v.stage(ctx); err != nil {
		if !known {
			// A failed stage leaves no record, because an orchestrator need not unstage after it.
			v.record.delete()
		}
		return nil, csierr.Convert(err, csierr.NodeToolFailed)
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

// stage keeps the device open until the mount, so that no other disk can get the device's number.
func (v *nodeVolume) stage(ctx context.Context) error {
	found, err := v.node.host().Await(ctx, v.serial(),
		cmp.Or(v.node.DeviceTimeout, defaultDeviceTimeout))
	if err != nil {
		return err
	}
	if err := v.open(ctx, found); err != nil {
		return err
	}
	defer v.close()
	v.device.Keep(v.lock)
	top, table, err := v.stagedAt(v.Staging)
	if err != nil {
		return err
	}
	if top != nil {
		if err := v.checkStaged(top); err != nil {
			return err
		}
		v.flight.Confirm(flight.Mounted, flight.Fields{}, flight.Fields{Filesystem: v.FSType})
		return v.record.save(v.DiskName, v.Block, asKnown)
	}
	mounts := table.Of(v.device.Device)
	if v.Block {
		if err := v.record.save(v.DiskName, v.Block, 0); err != nil {
			return err
		}
		return v.preparation().DropRecord(len(mounts) > 0)
	}
	if len(mounts) > 0 {
		return csierr.New(csierr.DeviceHeld, "%s is already mounted at %s; unmount it there first",
			v.device.Path, mounts.Paths())
	}
	if err := os.MkdirAll(v.Staging, 0o750); err != nil {
		return csierr.New(csierr.PathInvalid, "staging_target_path has to be a directory: %w", err)
	}
	path, err := mount.Canonical(v.Staging)
	if err != nil {
		return fmt.Errorf("resolve staging_target_path: %w", err)
	}
	// Claim the path before the format, so that no disk is formatted for a path with another mount.
	claim, err := claimPath(path, csierr.StagedDifferently)
	if err != nil {
		return err
	}
	defer func() { _ = claim.Close() }()
	grow, err := v.preparation().Run(ctx)
	if err != nil {
		// If the disk was detached meanwhile, report that, and not the error that it caused.
		if gone := v.device.Reverify(); csierr.Has(gone, csierr.DeviceNotFound) {
			return gone
		}
		return v.recall(err)
	}
	return v.mountAt(path, grow)
}

func (v *nodeVolume) preparation() *filesystem.Preparation {
	return &filesystem.Preparation{Device: v.device, Volume: v.Volume, Scans: &v.node.scans,
		Flight: v.flight, Log: v.node.log(), Begin: v.begin}
}

// open opens and locks the device d, and compares its size and block size with the disk's. It does
// not compare the read-only state: the device of a read-only disk may look writable, and if only
// the device is read-only, begin() fails before the first write.
func (v *nodeVolume) open(ctx context.Context, d blockdev.Device) error {
	if v.SizeBytes != 0 && v.SizeBytes != d.SizeBytes {
		return csierr.New(csierr.DeviceWrongSize, "%s with serial %q has %s, but the disk has %s",
			d.Path, d.Serial, volume.SizeText(d.SizeBytes), volume.SizeText(v.SizeBytes))
	}
	device, err := v.node.host().OpenLocked(ctx, d, v.Use == volume.UseFilesystem)
	if err != nil {
		return err
	}
	if err := device.CheckBlockSize(v.BlockBytes); err != nil {
		_ = device.Close()
		return err
	}
	v.device = device
	v.flight = v.flight.About(flight.Fields{Disk: v.DiskName, Device: device.Path,
		DiskSeq: device.DiskSeq})
	return nil
}

func (v *nodeVolume) close() { _ = v.device.Close() }

// recall adds advice to the error that a disk is not blank, if the flight recorder shows that this
// node has mounted the volume's filesystem. No decision depends on the flight recorder.
func (v *nodeVolume) recall(err error) error {
	stateDir := v.node.StateDir
	if stateDir == "" || !csierr.Has(err, csierr.DiskNotBlank) {
		return err
	}
	entries, _ := flight.Read(filepath.Join(stateDir, flight.DirName), v.ID)
	if !slices.ContainsFunc(entries, func(e flight.Entry) bool {
		return e.Event == flight.Mounted && e.Outcome == flight.Done && e.Disk == v.DiskName &&
			e.Filesystem == v.FSType
	}) {
		return err
	}
	return fmt.Errorf("%w; this node has mounted the volume's %s filesystem from that disk before, "+
		"and something has destroyed it since: take a snapshot, and do not delete the volume", err,
		v.FSType)
}

// stagedAt returns the mount at the staging path, or nil, and the mount table. If the filesystem
// there has failed or lost its disk, and no workload uses it any more, stagedAt unmounts it, so
// that the volume can be staged again.
func (v heldVolume) stagedAt(path string) (*mountinfo.Info, mount.Table, error) {
	table, err := mount.ReadTable()
	if err != nil {
		return nil, nil, err
	}
	path, err = mount.Canonical(path)
	if mount.IsMissing(err) {
		return nil, table, nil
	}
	if err != nil {
		return nil, nil, csierr.New(csierr.PathInvalid, "resolve staging_target_path: %w", err)
	}
	top := table.Top(path)
	if top == nil || !volume.IsFilesystem(top.FSType) {
		return top, table, nil
	}
	state := mount.ConditionOf(top)
	if d, err := v.mountedDisk(top, csierr.StagedDifferently); err != nil {
		return nil, nil, err
	} else if d.Path == "" {
		state = mount.Dead
	}
	if state == mount.Healthy {
		return top, table, nil
	}
	if own, err := v.ownMounts(table.At(path), csierr.StagedDifferently); err != nil {
		return nil, nil, err
	} else if len(own) == 0 {
		return top, table, nil // another volume's
	}
	if err := table.OnlyAt(path, top); err != nil {
		return nil, nil, csierr.New(csierr.FilesystemFailed, "the filesystem at the staging path is %s; "+
			"look at the kernel's log; %w", state, err)
	}
	// If the thaw fails, the device stays in use, and a later check finds that.
	_ = mount.ThawAt(top)
	change := v.flight.Begin(flight.Unmounted, flight.Fields{Detail: "the filesystem was " +
		fmt.Sprint(state)})
	err = mount.UnmountAll(path, len(table.At(path)))
	change.End(err, flight.Fields{})
	if err != nil {
		return nil, nil, err
	}
	table, err = mount.ReadTable()
	return nil, table, err
}

func (v *nodeVolume) checkStaged(top *mountinfo.Info) error {
	d, at, wanted := v.device.Device, top.Mountpoint, v.MountFlags
	if v.ReadOnly {
		wanted.SetReadOnly()
	}
	switch {
	case v.Block:
		return csierr.New(csierr.StagedDifferently, "%q has a %s filesystem mounted, but the request "+
			"is for a block volume", at, top.FSType)
	case !mount.Shows(top, d):
		return csierr.New(csierr.StagedDifferently, "%q has %s mounted, not %s with serial %q", at,
			top.Source, d.Path, d.Serial)
	case top.FSType != v.FSType:
		return csierr.New(csierr.StagedDifferently, "%q is staged as %s, but the request is for %s", at,
			top.FSType, v.FSType)
	case !slices.Equal(wanted.Shown(), mount.Flags(top)):
		return csierr.New(csierr.StagedDifferently, "%q is staged with other mount flags than the "+
			"request's", at)
	}
	return nil
}

// begin runs after all checks, right before the stage first writes to the disk or, if it does not,
// before the mount. For a read-only disk it sets the device's read-only switch, because the device
// may look writable. The kernel then writes nothing, and refuses a filesystem with a log to replay.
// For a writable disk it clears the switch only if an earlier publication of the disk as a
// read-only raw device may have set it.
func (v *nodeVolume) begin(covers int64) error {
	known, _ := v.record.load()
	if err := v.record.save(v.DiskName, v.Block, covers); err != nil {
		return err
	}
	if v.ReadOnly {
		return v.device.SetReadOnly(true)
	}
	return v.device.MakeWritable(known.Block || v.Use != volume.UseFilesystem)
}

func (v *nodeVolume) mountAt(path string, grow bool) error {
	options := v.mountOptions()
	m, err := filesystem.Mount(v.device, v.FSType, options)
	if err != nil {
		return err
	}
	defer func() { _ = m.Close() }()
	if grow && !options.ReadOnly() {
		if err := filesystem.GrowMounted(v.flight, m, v.device.Device); err != nil {
			return err
		}
	}
	if known, ok := v.record.load(); ok && known.Covers > 0 && v.FSType == volume.XFS {
		covers, err := filesystem.Uncovered(m, v.device.Device)
		if err == nil {
			err = v.record.save(v.DiskName, v.Block, covers)
		}
		if err != nil {
			return err
		}
	}
	change := v.flight.Begin(flight.Mounted, flight.Fields{Filesystem: v.FSType})
	err = m.Attach(path)
	change.End(err, flight.Fields{})
	return err
}

func (v *nodeVolume) mountOptions() volume.MountOptions {
	o := v.MountFlags
	o.Super, o.Data = slices.Clone(o.Super), slices.Clone(o.Data)
	if v.FSType == volume.XFS {
		// A restored snapshot has its origin's UUID. With nouuid both can be mounted on one node.
		o.AddData("nouuid")
	}
	if v.ReadOnly {
		o.SetReadOnly()
	}
	return o
}

type nodeVolume struct {
	filesystem.Volume
	BlockBytes int64 // of the disk, from the controller; 0 if unknown
	Block      bool
	Mode       csi.VolumeCapability_AccessMode_Mode
	MountFlags volume.MountOptions
	Staging    string

	// Only a request of NodePublishVolume has these fields.
	Target          string
	PublishReadOnly bool // for the workload; the disk itself may be writable

	heldVolume
	device *blockdev.OpenDevice // opened after the volume is locked
}

func (v nodeVolume) serial() string { return volume.Serial(v.DiskName) }

func checkIDAndPath(volumeID, field, path string) error {
	if volumeID == "" {
		return csierr.New(csierr.VolumeIDMissing, "volume_id is missing")
	}
	return checkPath(field, path)
}

func parseStage(req *csi.NodeStageVolumeRequest) (nodeVolume, error) {
	err := checkIDAndPath(req.GetVolumeId(), "staging_target_path", req.GetStagingTargetPath())
	if err != nil {
		return nodeVolume{}, err
	}
	if err := checkCapability(req.GetVolumeCapability()); err != nil {
		return nodeVolume{}, err
	}
	v, err := parseVolume(req.GetVolumeId(), req.GetVolumeCapability(), req.GetPublishContext(),
		req.GetVolumeContext())
	v.Staging = req.GetStagingTargetPath()
	return v, err
}

func parsePublish(req *csi.NodePublishVolumeRequest) (nodeVolume, error) {
	err := checkIDAndPath(req.GetVolumeId(), "target_path", req.GetTargetPath())
	if err != nil {
		return nodeVolume{}, err
	}
	if err := checkCapability(req.GetVolumeCapability()); err != nil {
		return nodeVolume{}, err
	}
	if req.GetStagingTargetPath() == "" {
		return nodeVolume{}, csierr.New(csierr.NotStaged, "staging_target_path is missing: the volume "+
			"has to be staged first")
	}
	if err := checkPath("staging_target_path", req.GetStagingTargetPath()); err != nil {
		return nodeVolume{}, err
	}
	v, err := parseVolume(req.GetVolumeId(), req.GetVolumeCapability(), req.GetPublishContext(),
		req.GetVolumeContext())
	v.Staging, v.Target = req.GetStagingTargetPath(), req.GetTargetPath()
	v.PublishReadOnly = req.GetReadonly() || v.MountFlags.ReadOnly()
	return v, err
}

func checkCapability(c *csi.VolumeCapability) error {
	problem := volume.CapabilityProblem(c)
	switch {
	case problem.Malformed:
		return csierr.New(csierr.CapabilityInvalid, "%s", problem.Message)
	case problem.Unsupported:
		// For an unsupported capability CSI wants FAILED_PRECONDITION from a node, and INVALID_ARGUMENT
		// from a controller.
		return csierr.Coded(codes.FailedPrecondition, csierr.CapabilityUnsupported, "%s", problem.Message)
	}
	return nil
}

func checkPath(field, path string) error {
	switch {
	case path == "":
		return csierr.New(csierr.PathInvalid, "%s is missing", field)
	case !filepath.IsAbs(path):
		return csierr.New(csierr.PathInvalid, "%s has to be an absolute path", field)
	case filepath.Clean(path) == "/":
		return csierr.New(csierr.PathInvalid, "%s cannot be the root directory", field)
	}
	return checkPathText(field, path)
}

func checkPathText(field, path string) error {
	switch {
	case len(path) >= unix.PathMax:
		return csierr.New(csierr.PathInvalid, "%s has %d bytes; Linux takes less than %d",
			field, len(path), unix.PathMax)
	case strings.ContainsRune(path, 0):
		return csierr.New(csierr.PathInvalid, "%s contains a NUL", field)
	}
	return nil
}

// parseVolume reads a volume from the parts of a request. A value in publish_context wins over one
// in volume_context, because the controller has just read it from the rack.
func parseVolume(id string, c *csi.VolumeCapability, published, vol map[string]string) (nodeVolume,
	error) {
	v := nodeVolume{Mode: c.GetAccessMode().GetMode()}
	v.ID, v.DiskName = id, cmp.Or(published[volume.CtxDiskName], vol[volume.CtxDiskName])
	if v.DiskName == "" {
		return v, csierr.New(csierr.DiskNameMissing, "neither publish_context nor volume_context holds "+
			"%s, the name of the disk; a static volume that no controller publishes needs it in "+
			"its volume attributes", volume.CtxDiskName)
	}
	err := checkContexts(id, published, vol)
	if err != nil {
		return v, err
	}
	if v.SizeBytes, err = positive("publish_context: "+volume.CtxSizeBytes,
		published[volume.CtxSizeBytes]); err != nil {
		return v, err
	}
	if v.BlockBytes, err = positive(volume.CtxBlockSize,
		cmp.Or(published[volume.CtxBlockSize], vol[volume.CtxBlockSize])); err != nil {
		return v, err
	}
	v.ReadOnly = published[volume.CtxReadOnly] == "true"
	v.Origin, v.Use = published[volume.CtxOrigin], published[volume.CtxUse]
	v.SourceBytes, _ = strconv.ParseInt(published[volume.CtxSourceBytes], 10, 64)
	if want := published[volume.CtxFilesystemUUID]; want != "" {
		uuid, ok := volume.ParseID(want)
		if !ok {
			return v, csierr.New(csierr.FieldInvalid,
				"publish_context: %s has to be a UUID", volume.CtxFilesystemUUID)
		}
		v.FilesystemUUID = uuid
	}
	if v.Block = c.GetBlock() != nil; v.Block {
		return v, v.checkUse()
	}
	v.FSType = cmp.Or(c.GetMount().GetFsType(), volume.Ext4)
	v.MountFlags, err = volume.ParseMountFlags(v.FSType, c.GetMount().GetMountFlags())
	if err != nil {
		return v, err
	}
	if v.Mkfs, err = volume.ParseMkfsOptions(vol[volume.CtxMkfsOptions]); err != nil {
		return v, err
	}
	if err := v.Mkfs.Check(v.FSType, 0); err != nil { // mke2fs itself refuses options that do not fit
		return v, err
	}
	return v, v.checkUse()
}

// positive parses a positive number. For an empty text it returns 0, which means unknown.
func positive(field, text string) (int64, error) {
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n <= 0 {
		return 0, csierr.New(csierr.FieldInvalid, "%s has to be a positive number, not %.40q", field,
			text)
	}
	return n, nil
}

// checkContexts fails if publish_context and volume_context are those of two different volumes.
func checkContexts(id string, published, vol map[string]string) error {
	for _, key := range []string{volume.CtxDiskName, volume.CtxDiskID, volume.CtxBlockSize} {
		if a, b := published[key], vol[key]; a != "" && b != "" && !strings.EqualFold(a, b) {
			return csierr.New(csierr.FieldInvalid, "publish_context and volume_context "+
				"are not of one volume: %s is %.80q in the first and %.80q in the second", key, a, b)
		}
	}
	disk := cmp.Or(published[volume.CtxDiskID], vol[volume.CtxDiskID])
	if disk != "" && !strings.EqualFold(disk, id) {
		return csierr.New(csierr.FieldInvalid, "the contexts are of the disk %.80q, but the volume is "+
			"%.80q", disk, id)
	}
	return nil
}

// checkUse refuses a raw device for a volume that was created for filesystems, and the reverse.
// Otherwise a stage might overwrite a workload's raw data: a check that reads only samples may
// mistake such data for a blank disk, or for one of the driver's filesystems.
func (v nodeVolume) checkUse() error {
	switch {
	case v.Use == volume.UseFilesystem && v.Block:
		return csierr.New(csierr.UseDiffers, "the volume was created for filesystems, but the request "+
			"is for a raw block device; create a volume for that")
	case v.Use == volume.UseBlock && !v.Block:
		return csierr.New(csierr.UseDiffers, "the volume was created as a raw block device, but the "+
			"request is for a filesystem; create a volume for that")
	case v.Block && v.Use != volume.UseBlock && v.Use != volume.UseBoth:
		return csierr.New(csierr.UseUnknown, "publish_context does not allow raw use (%s), so the disk "+
			"may be one for filesystems; let a controller of this release publish the volume", volume.CtxUse)
	}
	return nil
}
