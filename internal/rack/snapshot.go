package rack

import (
	"context"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// Snapshot reads a snapshot. An unknown snapshot is NOT_FOUND.
func (c *Client) Snapshot(ctx context.Context, id oxide.NameOrId) (*oxide.Snapshot, error) {
	const doing = "read snapshot"
	snapshot, err := c.SnapshotView(ctx, oxide.SnapshotViewParams{Snapshot: id})
	switch {
	case NotFound(err):
		return nil, SnapshotNotFound(string(id))
	case err != nil:
		return nil, Error(ctx, doing, err)
	}
	switch err := ValidateSnapshot(doing, snapshot); {
	case err != nil:
		return nil, err
	case snapshot.Id != string(id):
		return nil, InvalidResponse(doing, "asked for the snapshot %s and got %s", id, snapshot.Id)
	case snapshot.State == oxide.SnapshotStateDestroyed:
		return nil, SnapshotNotFound(string(id))
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
