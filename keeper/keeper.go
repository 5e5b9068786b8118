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
	// Namespace is the namespace of the keeper's records.
	Namespace string
	Log       *slog.Logger
	Metrics   *Metrics
	// Now is the clock; nil means time.Now.
	Now func() time.Time

	mu sync.Mutex
	// guarded by mu: debts contains when this process asked to stop instances that it has to start,
	// and silent the time since which the API server does not answer Repay, zero if it answers.
	debts  map[string]time.Time
	silent time.Time
}

// ErrStepAside reports that only the node on which this keeper runs is left to be stopped, so
// another replica has to lead.
var ErrStepAside = errors.New("the node to be stopped is the one this keeper runs on")

// Round looks at the cluster and the rack once, and does the next thing. It returns after which
// time at the latest to look again. An error is ErrStepAside, or one that the next round retries.
func (k *Keeper) Round(ctx context.Context) (time.Duration, error) {
	v, err := k.observe(ctx)
	if err != nil {
		return k.Config.Interval, err
	}
	// Cold attach comes first: an instance may be stopped for it, whatever else is to be done.
	again, err := k.coldAttach(ctx, v)
	errs := []error{err}
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
