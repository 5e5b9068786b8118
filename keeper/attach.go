package keeper

import (
	"context"
	"errors"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// Anybody may start a stopped instance at any time; the controller of Cluster API's provider does
// it within ten seconds. So the keeper wakes the attacher the moment the instance is stopped,
// before it records anything. It attaches and detaches nothing itself: only the driver checks whose
// disk it is.

// glance is how often the keeper looks at an instance that is stopping. glances is how long it goes
// on looking in one round.
const (
	glance  = 100 * time.Millisecond
	glances = 4 * time.Second
)

// awaitStopped waits while an instance is stopping, and returns its state.
func (k *Keeper) awaitStopped(ctx context.Context, instance string) (oxide.InstanceState, error) {
	for end := time.Now().Add(glances); ; {
		state, err := k.instanceState(ctx, instance)
		if err != nil || state != oxide.InstanceStateStopping || time.Now().After(end) {
			return state, err
		}
		pause(ctx, glance)
	}
}

// wakeAll makes the attacher try these attachments now instead of at the end of its backoff: it
// tries again when an annotation has changed.
func (k *Keeper) wakeAll(ctx context.Context, r *operation, all []*attachment) error {
	var errs []error
	for _, a := range all {
		if value := a.wakeup(r); a.Annotations[WokenAnnotation] != value {
			errs = append(errs, k.annotate(ctx, a, WokenAnnotation, value))
		}
	}
	return errors.Join(errs...)
}
