package rack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// InstanceOf returns the instance of a disk that is attached, being attached or being detached, and
// "" for any other disk.
func InstanceOf(d *oxide.Disk) string {
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

var statesAtInstance = []oxide.DiskStateState{
	oxide.DiskStateStateAttaching, oxide.DiskStateStateAttached, oxide.DiskStateStateDetaching,
}

// ImportProblem returns why a disk whose import is not finalized cannot be used, or "" for any
// other disk. Only a person can finalize an import.
func ImportProblem(name string, state oxide.DiskStateState) string {
	first := ""
	switch state {
	case oxide.DiskStateStateImportingFromBulkWrites, oxide.DiskStateStateImportingFromUrl:
		first = "'oxide disk import stop' and then "
	case oxide.DiskStateStateImportReady:
	default:
		return ""
	}
	return fmt.Sprintf("the disk %s is %s: the import of its content has not been finalized; when "+
		"everything is written, run %s'oxide disk import finalize'", name, state, first)
}

// ReadOnly reports whether the rack marks the disk as read-only.
func ReadOnly(d *oxide.Disk) bool { return d.ReadOnly != nil && *d.ReadOnly }

// ValidateDisk checks that a disk in a response has all fields that the driver uses.
func ValidateDisk(doing string, d *oxide.Disk) error {
	switch {
	case !volume.IsID(d.Id):
		return InvalidResponse(doing, "the disk's id %.80q is not a UUID", d.Id)
	case d.Name == "":
		return InvalidResponse(doing, "the disk %s has no name", d.Id)
	case d.Size == 0 || d.Size > 1<<62:
		return InvalidResponse(doing, "the disk %s has %d bytes", d.Id, d.Size)
	case !slices.Contains(volume.BlockSizes, int(d.BlockSize)):
		return InvalidResponse(doing, "the disk %s has blocks of %d bytes", d.Id, d.BlockSize)
	case d.DiskType == "":
		// Without this check, the disk would seem to have another type than the requested one.
		return InvalidResponse(doing, "the disk %s has no type", d.Id)
	case d.State.State() == "":
		return InvalidResponse(doing, "the disk %s has no state", d.Id)
	case slices.Contains(statesAtInstance, d.State.State()) && !volume.IsID(InstanceOf(d)):
		// Without this check, the disk would count as detached, and an unpublish would not detach it.
		return InvalidResponse(doing, "the disk %s is %s, but names no instance", d.Id, d.State.State())
	}
	return nil
}

// VolumeNotFound returns the error for a volume without a disk on the rack.
func VolumeNotFound(id string) error {
	return csierr.New(csierr.VolumeNotFound, "the rack has no disk %.80q, or this token may not see "+
		"it; volume_id is a disk's UUID", id)
}

// NotFound reports whether the rack does not know the object. The 404 of another server, such as a
// proxy, proves nothing.
func NotFound(err error) bool { return Definite(err) && errors.Is(err, oxide.ErrObjectNotFound) }

// Refused reports whether the rack understood the request and refused it. The caller finds the
// reason in the states of the objects, never in the error's text.
func Refused(err error) bool {
	return Definite(err) && (errors.Is(err, oxide.ErrInvalidRequest) ||
		errors.Is(err, oxide.ErrConflict))
}

// DiskText returns a disk's name and id for messages.
func DiskText(d *oxide.Disk) string { return volume.NameAndID(string(d.Name), d.Id) }

// InstanceText returns an instance's name and id for messages.
func InstanceText(i *oxide.Instance) string { return volume.NameAndID(string(i.Name), i.Id) }

// SnapshotText returns a snapshot's name and id for messages.
func SnapshotText(s *oxide.Snapshot) string { return volume.NameAndID(string(s.Name), s.Id) }

// DiskTag returns a disk's ownership tag, of any cluster. ok is false if the disk has no tag, or
// one that belongs to a disk with another name.
func DiskTag(d *oxide.Disk) (tag volume.Tag, ok bool) {
	tag, ok = volume.ParseTag(d.Description)
	// If a deletion fails, the rack renames the disk to "deleted-<id>", so its name is not the tag's.
	return tag, ok && (tag.Names(string(d.Name)) || HalfDeleted(d))
}

// SnapshotTag is like DiskTag, for a snapshot.
func SnapshotTag(s *oxide.Snapshot) (tag volume.Tag, ok bool) {
	tag, ok = volume.ParseTag(s.Description)
	return tag, ok && tag.Names(string(s.Name))
}

// ForeignDisk returns why the disk is not one that this driver made for this cluster, or "". The
// text follows "the disk" in an error.
func ForeignDisk(d *oxide.Disk, cluster string) string {
	tag, ok := DiskTag(d)
	return foreign(tag, ok, cluster)
}

// HalfDeleted reports whether the rack began to delete the disk and failed.
func HalfDeleted(d *oxide.Disk) bool {
	return string(d.Name) == "deleted-"+d.Id &&
		d.State.State() == oxide.DiskStateStateFaulted
}

// ForeignSnapshot is like ForeignDisk, for a snapshot.
func ForeignSnapshot(s *oxide.Snapshot, cluster string) string {
	tag, ok := SnapshotTag(s)
	return foreign(tag, ok, cluster)
}

// foreign returns why an object with this tag is not the cluster's, or "". The parameter valid
// reports whether the object's name belongs to the tag.
func foreign(tag volume.Tag, valid bool, cluster string) string {
	switch {
	case tag.Name == "":
		return "has no ownership tag of this driver"
	case tag.Cluster != cluster:
		return fmt.Sprintf("has the ownership tag of the cluster %.80q, and OXIDE_CLUSTER_ID is %q "+
			"here: if it was changed, set it back", tag.Cluster, cluster)
	case !valid:
		return fmt.Sprintf("has the ownership tag of %.80q, but another name", tag.Name)
	}
	return ""
}

// Disk reads a disk. For an unknown disk, the error has the code NOT_FOUND.
func (c *Client) Disk(ctx context.Context, id oxide.NameOrId) (*oxide.Disk, error) {
	return c.readDisk(ctx, oxide.DiskViewParams{Disk: id})
}

// DiskNamed reads the project's disk with this name.
func (c *Client) DiskNamed(ctx context.Context, name string) (*oxide.Disk, error) {
	return c.readDisk(ctx, oxide.DiskViewParams{Disk: oxide.NameOrId(name), Project: c.ProjectParam()})
}

func (c *Client) readDisk(ctx context.Context, p oxide.DiskViewParams) (*oxide.Disk, error) {
	return read(ctx, c, "disk", p.Disk, p.Project != "", func() (*oxide.Disk, error) {
		return c.DiskView(ctx, p)
	}, ValidateDisk, VolumeNotFound)
}

// Snapshot reads a snapshot. For an unknown snapshot, the error has the code NOT_FOUND.
func (c *Client) Snapshot(ctx context.Context, id oxide.NameOrId) (*oxide.Snapshot, error) {
	return c.readSnapshot(ctx, oxide.SnapshotViewParams{Snapshot: id})
}

// SnapshotNamed reads the project's snapshot with this name.
func (c *Client) SnapshotNamed(ctx context.Context, name string) (*oxide.Snapshot, error) {
	return c.readSnapshot(ctx, oxide.SnapshotViewParams{Snapshot: oxide.NameOrId(name),
		Project: c.ProjectParam()})
}

func (c *Client) readSnapshot(ctx context.Context, p oxide.SnapshotViewParams) (*oxide.Snapshot,
	error) {
	return read(ctx, c, "snapshot", p.Snapshot, p.Project != "", func() (*oxide.Snapshot, error) {
		return c.SnapshotView(ctx, p)
	}, ValidateSnapshot, SnapshotNotFound)
}

func read[T any](ctx context.Context, c *Client, kind string, wanted oxide.NameOrId, byName bool,
	view func() (*T, error), validate func(doing string, found *T) error,
	notFound func(id string) error) (*T, error) {
	doing := "read " + kind
	world, err := c.World(ctx)
	if err != nil {
		return nil, err
	}
	found, err := view()
	switch {
	case NotFound(err):
		return nil, notFound(string(wanted))
	case err != nil:
		return nil, Error(ctx, doing, err)
	}
	o := identify(found)
	switch err := cmp.Or(validate(doing, found),
		world.has(kind, volume.NameAndID(o.name, o.id), o.project)); {
	case err != nil:
		return nil, err
	case byName && o.name != string(wanted), !byName && o.id != string(wanted):
		return nil, InvalidResponse(doing, "asked for the %s %s and got %.80q, %s", kind, wanted, o.name,
			o.id)
	case o.state == string(oxide.DiskStateStateDestroyed): // snapshots use the same word
		return nil, notFound(string(wanted))
	}
	return found, nil
}

// InstanceDisks lists the disks of an instance.
func (c *Client) InstanceDisks(ctx context.Context, instance oxide.NameOrId) ([]oxide.Disk,
	error) {
	world, err := c.World(ctx)
	if err != nil {
		return nil, err
	}
	return c.disksOf(ctx, world, instance)
}

func (c *Client) disksOf(ctx context.Context, world World, instance oxide.NameOrId) ([]oxide.Disk,
	error) {
	const doing = "list the instance's disks"
	var disks []oxide.Disk
	err := eachObject(ctx, doing, func(token string) (*page[oxide.Disk], error) {
		p, err := c.InstanceDiskList(ctx, oxide.InstanceDiskListParams{
			Instance: instance, Limit: oxide.NewPointer(pageSize), PageToken: token,
		})
		switch {
		case NotFound(err):
			return nil, InstanceNotFound(string(instance))
		case err != nil:
			return nil, err
		}
		return &page[oxide.Disk]{p.Items, wholeInOne(len(p.Items), p.NextPage)}, nil
	}, func(disk *oxide.Disk) (enough bool, err error) {
		disks = append(disks, *disk)
		return false, cmp.Or(ValidateDisk(doing, disk),
			world.has("instance", string(instance), disk.ProjectId))
	})
	if err != nil {
		return nil, err
	}
	return disks, nil
}

func validateInstance(id oxide.NameOrId, i *oxide.Instance) error {
	const doing = "read instance"
	switch {
	case i.Id != string(id):
		return InvalidResponse(doing, "asked for the instance %s and got %.80q", id, i.Id)
	case !volume.IsID(i.ProjectId):
		return InvalidResponse(doing, "the instance %s is in no project", id)
	case i.RunState == "":
		return InvalidResponse(doing, "the instance %s has no state", id)
	}
	return nil
}

// ValidateImage checks an image in a response.
func ValidateImage(id oxide.NameOrId, i *oxide.Image) error {
	const doing = "read image"
	switch {
	case i.Id != string(id):
		return InvalidResponse(doing, "asked for the image %s and got %.80q", id, i.Id)
	case i.Size == 0 || i.Size > 1<<62:
		return InvalidResponse(doing, "the image %s has %d bytes", id, i.Size)
	}
	return nil
}

// ValidateUtilization rejects a response without capacity, which looks like that of a full rack. A
// rack's response always has a number of CPUs.
func ValidateUtilization(u *oxide.Utilization) error {
	if u.Capacity.Cpus == nil || u.Provisioned.Cpus == nil {
		return InvalidResponse("read utilization", "it has no capacity")
	}
	return nil
}

// ValidateSnapshot checks that a snapshot in a response has all fields that the driver uses.
func ValidateSnapshot(doing string, s *oxide.Snapshot) error {
	switch {
	case !volume.IsID(s.Id):
		return InvalidResponse(doing, "the snapshot's id %.80q is not a UUID", s.Id)
	case s.Size == 0 || s.Size > 1<<62:
		return InvalidResponse(doing, "the snapshot %s has %d bytes", s.Id, s.Size)
	case s.TimeCreated == nil:
		return InvalidResponse(doing, "the snapshot %s has no time", s.Id)
	}
	return nil
}

// SnapshotNotFound returns the error for a snapshot that is not on the rack.
func SnapshotNotFound(id string) error {
	return csierr.New(csierr.SnapshotNotFound, "the rack has no snapshot %.80q, or this token may "+
		"not see it; snapshot_id is a snapshot's UUID", id)
}

// Instance reads an instance. For an unknown instance, the error has the code NOT_FOUND.
func (c *Client) Instance(ctx context.Context, id oxide.NameOrId) (*oxide.Instance, error) {
	instance, err := c.InstanceView(ctx, oxide.InstanceViewParams{Instance: id})
	switch {
	case NotFound(err):
		return nil, InstanceNotFound(string(id))
	case err != nil:
		return nil, Error(ctx, "read instance", err)
	}
	switch err := validateInstance(id, instance); {
	case err != nil:
		return nil, err
	case instance.RunState == oxide.InstanceStateDestroyed:
		return nil, InstanceNotFound(string(id))
	}
	return instance, nil
}

// InstanceNotFound returns the error for a node without an instance on the rack.
func InstanceNotFound(id string) error {
	return csierr.New(csierr.InstanceNotFound, "the rack has no instance %.80q, or this token may "+
		"not see it; node_id is an instance's UUID", id)
}
