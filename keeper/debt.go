package keeper

import (
	"context"
	"errors"
	"maps"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
)

// patience is how long the API server may take to answer. outage is how long it must have answered
// nothing before a keeper continues without it.
const (
	patience = 2 * time.Second
	outage   = 10 * time.Second
)

// owe notes that this process has asked for the stop of an instance, and has to start it again.
func (k *Keeper) owe(r *operation) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.debts == nil {
		k.debts = map[string]time.Time{}
	}
	if _, has := k.debts[r.Instance]; !has {
		k.debts[r.Instance] = k.now()
	}
}

func (k *Keeper) owesNothing(instance string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.debts, instance)
}

// Repay starts the instances that this process has stopped if the API server does not answer:
// without it no attacher works either. If it answers, the leading keeper continues the operation.
func (k *Keeper) Repay(ctx context.Context) error {
	k.mu.Lock()
	debts := maps.Clone(k.debts)
	k.mu.Unlock()
	if len(debts) == 0 || !k.gone(k.clusterAnswers(ctx, debts)) {
		return nil
	}
	var errs []error
	for instance, asked := range debts {
		errs = append(errs, k.repay(ctx, instance, asked))
	}
	return errors.Join(errs...)
}

// gone reports whether the API server has been silent for long. answers reports whether it has
// answered now.
func (k *Keeper) gone(answers bool) bool {
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

// clusterAnswers reports whether the API server answers. If so, it drops the debts that are no
// longer on record: another keeper has started the instance.
func (k *Keeper) clusterAnswers(ctx context.Context, debts map[string]time.Time) bool {
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
	for instance := range debts {
		if !recorded[instance] {
			k.owesNothing(instance)
		}
	}
	return true
}

func (k *Keeper) repay(ctx context.Context, instance string, asked time.Time) error {
	look := rack.Looking()
	state, err := k.instanceState(ctx, instance)
	switch {
	case err != nil:
		return err
	case state == oxide.InstanceStateRunning && passed(k.now(), asked, k.Config.AttachTimeout):
		k.owesNothing(instance) // not earlier: the stop may still be on its way
		return nil
	case state != oxide.InstanceStateStopped && state != oxide.InstanceStateFailed:
		return nil
	}
	k.Log.WarnContext(ctx, "the API server does not answer; the instance is started without it",
		"instance", instance)
	return k.startInstance(ctx, look, instance)
}
