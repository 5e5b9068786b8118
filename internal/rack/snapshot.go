package rack

import (
	"cmp"
	"context"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// Snapshot reads a snapshot. An unknown snapshot is NOT_FOUND, and one of another project is
// refused.
func (c *Client) Snapshot(ctx context.Context, id oxide.NameOrId) (*oxide.Snapshot, error) {
	return c.readSnapshot(ctx, oxide.SnapshotViewParams{Snapshot: id},
		func(s *oxide.Snapshot) bool { return s.Id == string(id) })
}

// SnapshotNamed reads the snapshot of the project that has the name.
func (c *Client) SnapshotNamed(ctx context.Context, name string) (*oxide.Snapshot, error) {
	return c.readSnapshot(ctx, oxide.SnapshotViewParams{Snapshot: oxide.NameOrId(name),
		Project: c.ProjectParam()}, func(s *oxide.Snapshot) bool { return string(s.Name) == name })
}

func (c *Client) readSnapshot(ctx context.Context, params oxide.SnapshotViewParams,
	requested func(*oxide.Snapshot) bool) (*oxide.Snapshot, error) {
	const doing = "read snapshot"
	world, err := c.World(ctx)
	if err != nil {
		return nil, err
	}
	snapshot, err := c.SnapshotView(ctx, params)
	switch {
	case NotFound(err):
		return nil, SnapshotNotFound(string(params.Snapshot))
	case err != nil:
		return nil, Error(ctx, doing, err)
	}
	switch err := cmp.Or(ValidateSnapshot(doing, snapshot),
		world.has("snapshot", SnapshotText(snapshot), snapshot.ProjectId)); {
	case err != nil:
		return nil, err
	case !requested(snapshot):
		return nil, InvalidResponse(doing, "asked for the snapshot %s and got %.80q, %s",
			params.Snapshot, snapshot.Name, snapshot.Id)
	case snapshot.State == oxide.SnapshotStateDestroyed:
		return nil, SnapshotNotFound(string(params.Snapshot))
	}
	return snapshot, nil
}

// ValidateSnapshot checks that a snapshot in a response has everything that the driver passes on.
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

// SnapshotNotFound returns the error for a snapshot that the rack does not show.
func SnapshotNotFound(id string) error {
	return csierr.New(csierr.SnapshotNotFound, "the rack has no snapshot %.80q, or this token may "+
		"not see it; snapshot_id is a snapshot's UUID", id)
}

// Instance reads an instance. An unknown instance is NOT_FOUND.
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

// InstanceNotFound returns the error for a node whose instance the rack does not show.
func InstanceNotFound(id string) error {
	return csierr.New(csierr.InstanceNotFound, "the rack has no instance %.80q, or this token may "+
		"not see it; node_id is an instance's UUID", id)
}
