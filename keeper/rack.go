package keeper

import (
	"context"
	"fmt"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
)

// This file contains the keeper's requests to the rack. A stop halts the guest without a shutdown.
// The rack answers a stop and a start with 202 before they are done (see ASSUMPTIONS.md in
// conformance/rules).

// instance reads an instance of the project. For an unknown instance it returns NOT_FOUND. The ids
// of the project are read before, so that instanceGone can compare them.
func (k *Keeper) instance(ctx context.Context, id string) (*oxide.Instance, error) {
	world, err := k.Rack.World(ctx)
	if err != nil {
		return nil, err
	}
	instance, err := k.Rack.Instance(ctx, oxide.NameOrId(id))
	if err == nil && instance.ProjectId != world.Project {
		return nil, fmt.Errorf("the instance %s is in the project %s, and OXIDE_PROJECT is %s; the "+
			"keeper leaves it alone", id, instance.ProjectId, world.Project)
	}
	return instance, err
}

func (k *Keeper) instanceState(ctx context.Context, id string) (oxide.InstanceState, error) {
	instance, err := k.instance(ctx, id)
	if err != nil {
		return "", err
	}
	return instance.RunState, nil
}

// instanceGone confirms that an instance that the rack did not find is gone.
func (k *Keeper) instanceGone(ctx context.Context, id string) error {
	return k.Rack.Gone(ctx, func() error {
		_, err := k.Rack.Instance(ctx, oxide.NameOrId(id))
		return err
	})
}

// stopInstance requests an instance's stop, unless the look that allows it is too old by now.
func (k *Keeper) stopInstance(ctx context.Context, look rack.Look, id string) error {
	return k.request(ctx, "stop instance", id, look, func(ctx context.Context) error {
		_, err := k.Rack.InstanceStop(ctx, oxide.InstanceStopParams{Instance: oxide.NameOrId(id)})
		return err
	})
}

// startInstance requests an instance's start, unless the look that allows it is too old by now.
func (k *Keeper) startInstance(ctx context.Context, look rack.Look, id string) error {
	return k.request(ctx, "start instance", id, look, func(ctx context.Context) error {
		_, err := k.Rack.InstanceStart(ctx, oxide.InstanceStartParams{Instance: oxide.NameOrId(id)})
		return err
	})
}

func (k *Keeper) request(ctx context.Context, doing, id string, look rack.Look,
	do func(context.Context) error) error {
	k.Log.InfoContext(ctx, doing, "instance", id)
	if _, err := k.Rack.Request(ctx, doing, look, do); err != nil {
		return rack.Error(ctx, doing, err)
	}
	return nil
}
