package controller

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

const (
	// longestWait is how long a call waits for a disk to leave a transitional state.
	longestWait = 30 * time.Second
	// answerMargin is the part of the caller's time that is reserved for the answer.
	answerMargin = 500 * time.Millisecond
)

// awaitDisk reads a disk again while it is in a transitional state, until the caller's time is
// nearly up, and returns the disk as it was read last.
func awaitDisk(ctx context.Context, client *rack.Client, disk *oxide.Disk,
	transitional ...oxide.DiskStateState) (*oxide.Disk, error) {
	end := time.Now().Add(longestWait)
	if deadline, ok := ctx.Deadline(); ok && deadline.Add(-answerMargin).Before(end) {
		end = deadline.Add(-answerMargin)
	}
	backoff := async.Backoff{Pause: 100 * time.Millisecond, Max: 2 * time.Second, End: end}
	for slices.Contains(transitional, disk.State.State()) {
		again, err := backoff.Wait(ctx)
		switch {
		case err != nil:
			return nil, rack.Error(ctx, "wait for disk", err)
		case !again:
			return disk, nil
		}
		if disk, err = client.Disk(ctx, oxide.NameOrId(disk.Id)); err != nil {
			return nil, err
		}
	}
	return disk, nil
}

// volume converts a disk to CSI. Everything comes from the disk, so that every call describes a
// volume alike. Only CreateVolume names an instance, because no disk shows its placement.
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

// volumeContext includes the id as well as the name, so that attributes that were copied to another
// volume are detected.
func volumeContext(d *oxide.Disk) map[string]string {
	values := map[string]string{
		volume.CtxDiskName:  string(d.Name),
		volume.CtxDiskID:    d.Id,
		volume.CtxBlockSize: strconv.Itoa(int(d.BlockSize)),
	}
	if d.SnapshotId != "" { // oxide-csi-plugin claim compares it before it lets an earlier disk go
		values[volume.CtxSnapshotID] = d.SnapshotId
	}
	if m, ok := volume.ParseTag(d.Description); ok && m.MkfsOptions != "" {
		values[volume.CtxMkfsOptions] = m.MkfsOptions
	}
	return values
}

// publishContext passes to the node what the rack shows of the disk, and the disk's history from
// the ownership tag, whichever cluster's it is. The context always contains a use, because without
// one the node publishes no raw device. A disk whose tag has no use may be used in both ways. It
// has no origin in the context either, so the node reads it whole before it formats it.
func publishContext(d *oxide.Disk) map[string]string {
	values := map[string]string{
		volume.CtxDiskName:  string(d.Name),
		volume.CtxDiskID:    d.Id,
		volume.CtxBlockSize: strconv.Itoa(int(d.BlockSize)),
		volume.CtxSizeBytes: strconv.FormatInt(int64(d.Size), 10),
		volume.CtxReadOnly:  strconv.FormatBool(rack.ReadOnly(d)),
		volume.CtxUse:       volume.UseBoth,
	}
	m, ok := rack.DiskTag(d)
	if !ok {
		return values
	}
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

// expectedUUID returns the UUID of the filesystem on a disk with that tag. It is empty if
// it is unknown: for a disk from an image or a foreign snapshot, or one that workloads write as a
// device.
func expectedUUID(d *oxide.Disk, m volume.Tag) string {
	switch {
	case m.Use != volume.UseFilesystem:
		return ""
	case m.Origin == volume.OriginBlank:
		return d.Id
	}
	return m.FilesystemUUID
}

// useProblem returns why a disk does not fit these capabilities, or "". A disk that workloads write
// as a raw device could later look blank, or like one of the driver's filesystems. So the use of a
// disk binds every cluster: the one that made the disk may format it after reading only a sample.
func useProblem(d *oxide.Disk, wanted ...*csi.VolumeCapability) string {
	m, ok := rack.DiskTag(d)
	if use := useOf(wanted); !ok || m.Use == "" || m.Use == volume.UseBoth || m.Use == use {
		return ""
	}
	words := map[string]string{volume.UseFilesystem: "filesystems (mount)", volume.UseBlock: "raw " +
		"access (block)"}
	return fmt.Sprintf("the volume of the disk %s was created for %s only; create one with the "+
		"access type that the workload needs, and copy the data", rack.DiskText(d), words[m.Use])
}

// notOurs refuses an object that this driver did not make, such as a boot disk that somebody wrote
// into a PersistentVolume. why is empty for the driver's own.
func notOurs(kind, text, why, policy string) error {
	if why == "" {
		return nil
	}
	return csierr.New(csierr.DiskNotOurs, "the %s %s %s; the driver deletes only what it made: give "+
		"the %s Retain, and delete the %s by hand on the rack", kind, text, why, policy, kind)
}
