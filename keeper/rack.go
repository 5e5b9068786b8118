package keeper

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
)

// This file contains the keeper's requests to the rack. A stop halts the guest without a shutdown.
// The rack answers a stop and a start with 202 before they are done (see ASSUMPTIONS.md in
// conformance/rules).

// instance reads an instance of the project. For an unknown instance it returns NOT_FOUND. It reads
// the ids of the rack and the project first, so that instanceGone can compare them.
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

// patience is how long the API server may take to answer. If it has not answered for the time
// outage, a keeper starts its stopped instances without it.
const (
	patience = 2 * time.Second
	outage   = 10 * time.Second
)

// noteStop notes that this process has asked for an instance's stop, and has to start it again.
func (k *Keeper) noteStop(r *operation) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.stops == nil {
		k.stops = map[string]time.Time{}
	}
	if _, has := k.stops[r.Instance]; !has {
		k.stops[r.Instance] = k.now()
	}
}

func (k *Keeper) forgetStop(instance string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.stops, instance)
}

// StartStopped starts the instances that this process has stopped if the API server does not
// answer: without it no attacher works either. If it answers, the leading keeper continues.
func (k *Keeper) StartStopped(ctx context.Context) error {
	k.mu.Lock()
	stops := maps.Clone(k.stops)
	k.mu.Unlock()
	if len(stops) == 0 || !k.isOutage(k.clusterAnswers(ctx, stops)) {
		return nil
	}
	var errs []error
	for instance, asked := range stops {
		errs = append(errs, k.startStopped(ctx, instance, asked))
	}
	return errors.Join(errs...)
}

// isOutage reports whether the API server has not answered for longer than outage. answers reports
// whether it has answered now.
func (k *Keeper) isOutage(answers bool) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case answers:
		k.silent = time.Time{}
		return false
	case k.silent.IsZero():
		k.silent = k.now()
	}
	return passed(k.now(), k.silent, outage)
}

// clusterAnswers reports whether the API server answers. If so, it drops the stops that are no
// longer on record: another keeper has started the instance.
func (k *Keeper) clusterAnswers(ctx context.Context, stops map[string]time.Time) bool {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	found, records, err := k.records(ctx)
	if err != nil {
		return found != nil
	}
	recorded := map[string]bool{}
	for _, r := range records {
		if r.Record != nil {
			recorded[r.Record.Instance] = true
		}
	}
	for instance := range stops {
		if !recorded[instance] {
			k.forgetStop(instance)
		}
	}
	return true
}

func (k *Keeper) startStopped(ctx context.Context, instance string, asked time.Time) error {
	look := rack.Looking()
	state, err := k.instanceState(ctx, instance)
	switch {
	case err != nil:
		return err
	case state == oxide.InstanceStateRunning && passed(k.now(), asked, k.Config.AttachTimeout):
		k.forgetStop(instance) // by now no stop can be on its way
		return nil
	case state != oxide.InstanceStateStopped && state != oxide.InstanceStateFailed:
		return nil
	}
	k.Log.WarnContext(ctx, "the API server does not answer; the instance is started without it",
		"instance", instance)
	return k.startInstance(ctx, look, instance)
}
