package driver

import (
	"context"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

func (c *rackClient) instanceByID(ctx context.Context, id oxide.NameOrId) (*oxide.Instance, error) {
	instance, err := c.InstanceView(ctx, oxide.InstanceViewParams{Instance: id})
	switch {
	case unknown(err):
		return nil, instanceNotFound(string(id))
	case err != nil:
		return nil, statusError(ctx, "read instance", err)
	}
	switch err := believableInstance(id, instance); {
	case err != nil:
		return nil, err
	case instance.RunState == oxide.InstanceStateDestroyed:
		return nil, instanceNotFound(string(id))
	}
	return instance, nil
}

func instanceNotFound(id string) error {
	return csierr.New(csierr.InstanceNotFound, "the rack has no instance %.80q, or shows "+
		"this token none; node_id is an instance's UUID", id)
}
