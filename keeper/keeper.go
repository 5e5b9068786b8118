package keeper

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
)

// Keeper looks after the nodes of one cluster.
type Keeper struct {
	Config     Config
	Kubernetes Cluster
	Rack       *rack.Client
	Log        *slog.Logger
	Metrics    *Metrics
	// Now is the clock; nil means time.Now.
	Now func() time.Time

	mu sync.Mutex
	// guarded by mu: the starts of instances that this process has stopped, by instance; and since
	// when the API server does not answer Repay, zero if it does
	debts  map[string]debt
	silent time.Time
}

// ErrStepAside reports that only nodes wait that this keeper runs on, so that another replica has
// to lead.
var ErrStepAside = errors.New("the node to be stopped is the one this keeper runs on")

// Round looks once and does what is next. It returns when it wants to look again, at the latest.
// An error is about something that the next round tries again, or ErrStepAside.
func (k *Keeper) Round(ctx context.Context) (time.Duration, error) {
	v, err := k.observe(ctx)
	if err != nil {
		return k.Config.Interval, err
	}
	var errs []error
	for _, n := range v.Nodes {
		errs = append(errs, n.Unreadable)
	}
	// First what an instance may be stopped for, whatever else there is to do.
	again, err := k.coldAttach(ctx, v)
	errs = append(errs, err)
	if k.Config.StartupTaint {
		errs = append(errs, k.removeStartupTaints(ctx, v))
	}
	errs = append(errs, k.fence(ctx, v))
	return min(again, k.Config.Interval), errors.Join(errs...)
}

func (k *Keeper) now() time.Time {
	if k.Now != nil {
		return k.Now()
	}
	return time.Now()
}
