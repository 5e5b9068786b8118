package driver

import (
	"context"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

func (c *rackClient) snapshotByID(ctx context.Context, id oxide.NameOrId) (*oxide.Snapshot, error) {
	const doing = "read snapshot"
	snapshot, err := c.SnapshotView(ctx, oxide.SnapshotViewParams{Snapshot: id})
	switch {
	case unknown(err):
		return nil, snapshotNotFound(string(id))
	case err != nil:
		return nil, statusError(ctx, doing, err)
	}
	switch err := believableSnapshot(doing, snapshot); {
	case err != nil:
		return nil, err
	case snapshot.Id != string(id):
		return nil, wrongAnswer(doing, "asked for the snapshot %s and got %s", id, snapshot.Id)
	case snapshot.State == oxide.SnapshotStateDestroyed:
		return nil, snapshotNotFound(string(id))
	}
	return snapshot, nil
}

// believableSnapshot checks what the driver passes on.
func believableSnapshot(doing string, s *oxide.Snapshot) error {
	switch {
	case !volume.IsID(s.Id):
		return wrongAnswer(doing, "the snapshot's id %.80q is no UUID", s.Id)
	case s.Size == 0 || s.Size > 1<<62:
		return wrongAnswer(doing, "the snapshot %s has %d bytes", s.Id, s.Size)
	case s.TimeCreated == nil:
		return wrongAnswer(doing, "the snapshot %s has no time", s.Id)
	}
	return nil
}

func snapshotNotFound(id string) error {
	return csierr.New(csierr.SnapshotNotFound, "the rack has no snapshot %.80q, or shows "+
		"this token none; snapshot_id is a snapshot's UUID", id)
}
