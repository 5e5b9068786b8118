package rack

import (
	"context"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

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
