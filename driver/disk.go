package driver

import (
	"context"
	"slices"
	"strconv"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// holder is the instance that a disk is attached to, or on its way to or from; empty when none.
func holder(d *oxide.Disk) string {
	if s, ok := d.State.AsAttached(); ok {
		return s.Instance
	}
	if s, ok := d.State.AsAttaching(); ok {
		return s.Instance
	}
	if s, ok := d.State.AsDetaching(); ok {
		return s.Instance
	}
	return ""
}

// statesAtInstance are those in which an instance has the disk.
var statesAtInstance = []oxide.DiskStateState{
	oxide.DiskStateStateAttaching, oxide.DiskStateStateAttached, oxide.DiskStateStateDetaching,
}

func readOnly(d *oxide.Disk) bool { return d.ReadOnly != nil && *d.ReadOnly }

// believable checks a disk in an answer: what the driver passes on, and decides from, has to be
// there.
func believable(doing string, d *oxide.Disk) error {
	switch {
	case !volume.IsID(d.Id):
		return wrongAnswer(doing, "the disk's id %.80q is no UUID", d.Id)
	case d.Name == "":
		return wrongAnswer(doing, "the disk %s has no name", d.Id)
	case d.Size == 0 || d.Size > 1<<62:
		return wrongAnswer(doing, "the disk %s has %d bytes", d.Id, d.Size)
	case !slices.Contains(volume.BlockSizes, int(d.BlockSize)):
		return wrongAnswer(doing, "the disk %s has blocks of %d bytes", d.Id, d.BlockSize)
	case d.DiskType == "":
		// One of another release: what is not said would pass for a difference from what was asked.
		return wrongAnswer(doing, "the disk %s has no type", d.Id)
	case d.State.State() == "":
		return wrongAnswer(doing, "the disk %s has no state", d.Id)
	case slices.Contains(statesAtInstance, d.State.State()) && !volume.IsID(holder(d)):
		// Taken for a disk that nobody has, it would be unpublished by doing nothing.
		return wrongAnswer(doing, "the disk %s is %s at no instance", d.Id, d.State.State())
	}
	return nil
}

// diskByID reads a disk. An unknown one is NOT_FOUND.
func (c *Controller) diskByID(ctx context.Context, id oxide.NameOrId) (*oxide.Disk, error) {
	const doing = "read disk"
	disk, err := c.Client.DiskView(ctx, oxide.DiskViewParams{Disk: id})
	switch {
	case unknown(err):
		return nil, volumeNotFound(string(id))
	case err != nil:
		return nil, statusError(ctx, doing, err)
	}
	switch err := believable(doing, disk); {
	case err != nil:
		return nil, err
	case disk.Id != string(id):
		return nil, wrongAnswer(doing, "asked for the disk %s and got %s", id, disk.Id)
	case disk.State.State() == oxide.DiskStateStateDestroyed:
		return nil, volumeNotFound(string(id))
	}
	return disk, nil
}

func volumeNotFound(id string) error {
	return csierr.New(csierr.VolumeNotFound, "the rack has no disk %.80q, or shows this "+
		"token none; volume_id is a disk's UUID", id)
}

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
func (c *Controller) await(ctx context.Context, disk *oxide.Disk,
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
			return nil, statusError(ctx, "wait for disk", err)
		}
		var err error
		if disk, err = c.diskByID(ctx, oxide.NameOrId(disk.Id)); err != nil {
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
func (c *Controller) volume(d *oxide.Disk) *csi.Volume {
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
func (c *Controller) publishContext(d *oxide.Disk) map[string]string {
	values := map[string]string{
		volume.CtxDiskName:  string(d.Name),
		volume.CtxDiskID:    d.Id,
		volume.CtxBlockSize: strconv.Itoa(int(d.BlockSize)),
		volume.CtxSizeBytes: strconv.FormatInt(int64(d.Size), 10),
		volume.CtxReadOnly:  strconv.FormatBool(readOnly(d)),
	}
	if foreignDisk(d, c.ClusterID) != "" {
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
