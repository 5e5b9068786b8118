package keeper

import (
	"context"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
)

// This file contains the keeper's requests to the rack. A stop halts the guest without a shutdown.
// The rack answers a stop and a start with 202 before they are done (see simulator/ASSUMPTIONS.md).

// instanceState reads an instance's state. For an unknown instance it returns NOT_FOUND.
func (k *Keeper) instanceState(ctx context.Context, id string) (oxide.InstanceState, error) {
	instance, err := k.Rack.Instance(ctx, oxide.NameOrId(id))
	if err != nil {
		return "", err
	}
	return instance.RunState, nil
}

// stopInstance requests an instance's stop.
func (k *Keeper) stopInstance(ctx context.Context, id string) error {
	k.Log.InfoContext(ctx, "stopping the instance", "instance", id)
	_, err := k.Rack.InstanceStop(ctx, oxide.InstanceStopParams{Instance: oxide.NameOrId(id)})
	if err != nil {
		return rack.Error(ctx, "stop instance", err)
	}
	return nil
}

// startInstance requests an instance's start.
func (k *Keeper) startInstance(ctx context.Context, id string) error {
	k.Log.InfoContext(ctx, "starting the instance", "instance", id)
	_, err := k.Rack.InstanceStart(ctx, oxide.InstanceStartParams{Instance: oxide.NameOrId(id)})
	if err != nil {
		return rack.Error(ctx, "start instance", err)
	}
	return nil
}
