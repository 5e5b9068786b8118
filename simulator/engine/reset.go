package engine

import (
	"context"
	"fmt"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// Reset puts the rack back to its start: it has the objects and the switches of the Config, with
// the same IDs, and nothing else. The guests lose their disks even if they use them; their views
// stay where they are. Calls that come in the meantime get ErrClosed.
func (r *Simulation) Reset(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx) // what is half reset is no rack
	r.life.Lock()
	defer r.life.Unlock()
	if !r.end() {
		return ErrClosed
	}
	// No call and no work is left, so nothing reads what changes here.
	r.ctx, r.cancel = context.WithCancel(context.WithoutCancel(r.ctx))
	r.unfreed.Store(0)
	err := r.plane.Empty()
	if err == nil {
		_, err = r.ChangeSwitches(func(now *adminapi.Switches) error {
			*now = r.config.switches()
			return nil
		})
	}
	if err == nil {
		err = r.restore(ctx, (*store.Tx).Clear)
	}
	r.mu.Lock()
	r.closed = false
	r.mu.Unlock()
	if err != nil {
		return fmt.Errorf("reset the rack in %s: %w", r.config.Dir, err)
	}
	return nil
}
