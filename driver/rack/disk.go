package rack

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// Holder is the instance that a disk is attached to, or on its way to or from; empty when none.
func Holder(d *oxide.Disk) string {
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

// ReadOnly reports whether the rack calls the disk read-only.
func ReadOnly(d *oxide.Disk) bool { return d.ReadOnly != nil && *d.ReadOnly }

// ValidateDisk checks a disk in an answer: what the driver passes on, and decides from, has to be
// there.
func ValidateDisk(doing string, d *oxide.Disk) error {
	switch {
	case !volume.IsID(d.Id):
		return InvalidResponse(doing, "the disk's id %.80q is no UUID", d.Id)
	case d.Name == "":
		return InvalidResponse(doing, "the disk %s has no name", d.Id)
	case d.Size == 0 || d.Size > 1<<62:
		return InvalidResponse(doing, "the disk %s has %d bytes", d.Id, d.Size)
	case !slices.Contains(volume.BlockSizes, int(d.BlockSize)):
		return InvalidResponse(doing, "the disk %s has blocks of %d bytes", d.Id, d.BlockSize)
	case d.DiskType == "":
		// One of another release: what is not said would pass for a difference from what was asked.
		return InvalidResponse(doing, "the disk %s has no type", d.Id)
	case d.State.State() == "":
		return InvalidResponse(doing, "the disk %s has no state", d.Id)
	case slices.Contains(statesAtInstance, d.State.State()) && !volume.IsID(Holder(d)):
		// Taken for a disk that nobody has, it would be unpublished by doing nothing.
		return InvalidResponse(doing, "the disk %s is %s at no instance", d.Id, d.State.State())
	}
	return nil
}

// VolumeNotFound is the error for a volume whose disk the rack does not show.
func VolumeNotFound(id string) error {
	return csierr.New(csierr.VolumeNotFound, "the rack has no disk %.80q, or shows this "+
		"token none; volume_id is a disk's UUID", id)
}

// Unknown says whether the rack does not know an object of the call. A 404 without the rack's code
// is somebody else's and says nothing about objects.
func Unknown(err error) bool { return errors.Is(err, oxide.ErrObjectNotFound) }

// Refused says whether the rack understood the call and declined it. Why is read from the objects'
// state, never from the text.
func Refused(err error) bool {
	return errors.Is(err, oxide.ErrInvalidRequest) || errors.Is(err, oxide.ErrConflict)
}

// ProjectError is the error for a project that could not be read.
func ProjectError(ctx context.Context, err error) error {
	if Unknown(err) {
		return csierr.Coded(codes.PermissionDenied, csierr.ProjectNotFound, "the rack shows this token "+
			"no project of the name or id in OXIDE_PROJECT, so nothing can be said about what is in it; "+
			"give the token's user a role on it")
	}
	return Error(ctx, "read project", err)
}

// ForeignDisk says why a disk is none that this driver made for this cluster, or "". It reads as
// the end of "the disk …".
func ForeignDisk(d *oxide.Disk, cluster string) string {
	return foreign(d.Description, cluster, func(m volume.Tag) bool {
		// A delete that the rack gave up leaves the disk faulted and with the second name.
		return string(d.Name) == volume.DiskName(m.Cluster, m.Name) || HalfDeleted(d)
	})
}

// HalfDeleted says whether the rack began to delete the disk and gave up.
func HalfDeleted(d *oxide.Disk) bool {
	return string(d.Name) == "deleted-"+d.Id &&
		d.State.State() == oxide.DiskStateStateFaulted
}

// ForeignSnapshot is ForeignDisk for a snapshot.
func ForeignSnapshot(s *oxide.Snapshot, cluster string) string {
	return foreign(s.Description, cluster, func(m volume.Tag) bool {
		return string(s.Name) == volume.SnapshotName(m.Cluster, m.Name)
	})
}

// foreign holds an object to its mark. The name has to be the one that the mark stands for: a
// description can be copied, from a volume to the disk that somebody made of its data.
func foreign(description, cluster string, named func(volume.Tag) bool) string {
	m, marked := volume.ParseTag(description)
	switch {
	case !marked:
		return "carries no mark of this driver"
	case m.Cluster != cluster:
		return fmt.Sprintf("carries the mark of the cluster %.80q, and OXIDE_CLUSTER_ID is %q here",
			m.Cluster, cluster)
	case !named(m):
		return fmt.Sprintf("carries the mark of %.80q, and another name", m.Name)
	}
	return ""
}

// Disk reads a disk. An unknown one is NOT_FOUND.
func (c *Client) Disk(ctx context.Context, id oxide.NameOrId) (*oxide.Disk, error) {
	const doing = "read disk"
	disk, err := c.DiskView(ctx, oxide.DiskViewParams{Disk: id})
	switch {
	case Unknown(err):
		return nil, VolumeNotFound(string(id))
	case err != nil:
		return nil, Error(ctx, doing, err)
	}
	switch err := ValidateDisk(doing, disk); {
	case err != nil:
		return nil, err
	case disk.Id != string(id):
		return nil, InvalidResponse(doing, "asked for the disk %s and got %s", id, disk.Id)
	case disk.State.State() == oxide.DiskStateStateDestroyed:
		return nil, VolumeNotFound(string(id))
	}
	return disk, nil
}

// CheckProject answers for a token that may not see the project. Such a token sees none of its
// objects either, and then "not found" does not mean that they are gone.
func (c *Client) CheckProject(ctx context.Context) error {
	_, err := c.ReadProject(ctx)
	if err != nil {
		return ProjectError(ctx, err)
	}
	return nil
}

// InstanceDisks lists the disks that an instance has.
func (c *Client) InstanceDisks(ctx context.Context, instance oxide.NameOrId) ([]oxide.Disk,
	error) {
	const doing = "list the instance's disks"
	var disks []oxide.Disk
	var inside error
	err := eachObject(func(token string) ([]oxide.Disk, string, error) {
		page, err := c.InstanceDiskList(ctx, oxide.InstanceDiskListParams{
			Instance: instance, Limit: oxide.NewPointer(pageSize), PageToken: token,
		})
		switch {
		case Unknown(err):
			return nil, "", InstanceNotFound(string(instance))
		case err != nil:
			return nil, "", Error(ctx, doing, err)
		}
		return page.Items, page.NextPage, nil
	}, func(disk *oxide.Disk) (enough bool) {
		disks = append(disks, *disk)
		inside = ValidateDisk(doing, disk)
		return inside != nil
	})
	if inside != nil {
		return nil, inside
	}
	return disks, err
}
