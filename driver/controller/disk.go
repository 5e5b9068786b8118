package controller

import (
	"context"
	"slices"
	"strconv"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/rack"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
)

// The pace at which a passing state is looked at.
const (
	firstLook = 100 * time.Millisecond
	lastLook  = 2 * time.Second
	// answerMargin is kept of the caller's time for the answer.
	answerMargin = 500 * time.Millisecond
	longestWait  = 30 * time.Second
)

// await reads a disk again while it is in a passing state, until the caller's time is nearly up,
// and returns what it saw last.
func (c *Service) await(ctx context.Context, disk *oxide.Disk,
	passing ...oxide.DiskStateState) (*oxide.Disk, error) {
	end := time.Now().Add(longestWait)
	if deadline, ok := ctx.Deadline(); ok && deadline.Add(-answerMargin).Before(end) {
		end = deadline.Add(-answerMargin)
	}
	pause := firstLook
	for ; slices.Contains(passing, disk.State.State()); pause = min(2*pause, lastLook) {
		if time.Now().Add(pause).After(end) {
			return disk, nil
		}
		if err := sleep(ctx, pause); err != nil {
			return nil, rack.Error(ctx, "wait for disk", err)
		}
		var err error
		if disk, err = c.Rack.Disk(ctx, oxide.NameOrId(disk.Id)); err != nil {
			return nil, err
		}
	}
	return disk, nil
}

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

// volume is a disk in CSI's words. Everything in it comes from the disk, so that every call says
// the same of a volume.
func (c *Service) volume(d *oxide.Disk) *csi.Volume {
	v := &csi.Volume{
		VolumeId:           d.Id,
		CapacityBytes:      int64(d.Size),
		VolumeContext:      volumeContext(d),
		AccessibleTopology: volume.AccessibleTopologies(c.Topology, nil),
	}
	if d.SnapshotId != "" {
		v.ContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: d.SnapshotId},
		}}
	}
	return v
}

// volumeContext holds the id too: it ties the name to the volume, so that a publish needs no look
// whether the two belong together. Attributes that were copied to another volume betray themselves.
func volumeContext(d *oxide.Disk) map[string]string {
	values := map[string]string{
		volume.CtxDiskName:  string(d.Name),
		volume.CtxDiskID:    d.Id,
		volume.CtxBlockSize: strconv.Itoa(int(d.BlockSize)),
	}
	if m, ok := volume.ParseTag(d.Description); ok && m.MkfsOptions != "" {
		values[volume.CtxMkfsOptions] = m.MkfsOptions
	}
	return values
}

// publishContext tells the node what the rack shows of the disk, and what the ownership tag says of
// its history. The tag counts only on a disk that this driver made for this cluster.
func (c *Service) publishContext(d *oxide.Disk) map[string]string {
	values := map[string]string{
		volume.CtxDiskName:  string(d.Name),
		volume.CtxDiskID:    d.Id,
		volume.CtxBlockSize: strconv.Itoa(int(d.BlockSize)),
		volume.CtxSizeBytes: strconv.FormatInt(int64(d.Size), 10),
		volume.CtxReadOnly:  strconv.FormatBool(rack.ReadOnly(d)),
	}
	if rack.ForeignDisk(d, c.ClusterID) != "" {
		return values
	}
	m, _ := volume.ParseTag(d.Description)
	for key, value := range map[string]string{
		volume.CtxOrigin: m.Origin, volume.CtxUse: m.Use, volume.CtxFilesystemUUID: expectedUUID(d, m),
	} {
		if value != "" {
			values[key] = value
		}
	}
	if m.SourceBytes > 0 {
		values[volume.CtxSourceBytes] = strconv.FormatInt(m.SourceBytes, 10)
	}
	return values
}

// expectedUUID is the UUID of the filesystem on a disk that this driver made, empty if it cannot be
// known: a disk from an image, from a foreign snapshot, or one that workloads write as a device.
func expectedUUID(d *oxide.Disk, m volume.Tag) string {
	switch {
	case m.Use != volume.UseFilesystem:
		return ""
	case m.Origin == volume.OriginBlank:
		return d.Id
	}
	return m.FilesystemUUID
}
