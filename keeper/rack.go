package keeper

import (
	"context"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
)

// What the keeper asks the rack and does there. A stop is a hard halt of the guest, and both stop
// and start answer 202 before they are done (A-rules of simulator/ASSUMPTIONS.md).

// instanceState reads an instance's state. An unknown instance is NOT_FOUND.
func (k *Keeper) instanceState(ctx context.Context, id string) (oxide.InstanceState, error) {
	instance, err := k.Rack.Instance(ctx, oxide.NameOrId(id))
	if err != nil {
		return "", err
	}
	return instance.RunState, nil
}

// stopInstance asks for an instance's stop.
func (k *Keeper) stopInstance(ctx context.Context, id string) error {
	k.Log.InfoContext(ctx, "stopping the instance", "instance", id)
	_, err := k.Rack.InstanceStop(ctx, oxide.InstanceStopParams{Instance: oxide.NameOrId(id)})
	if err != nil {
		return rack.Error(ctx, "stop instance", err)
	}
	return nil
}

// startInstance asks for an instance's start.
func (k *Keeper) startInstance(ctx context.Context, id string) error {
	k.Log.InfoContext(ctx, "starting the instance", "instance", id)
	_, err := k.Rack.InstanceStart(ctx, oxide.InstanceStartParams{Instance: oxide.NameOrId(id)})
	if err != nil {
		return rack.Error(ctx, "start instance", err)
	}
	return nil
}
