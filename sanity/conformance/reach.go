package conformance

import (
	"context"
	"errors"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/report"
)

// errLost is a rack that does not answer any more. What fails then says nothing of the rack's
// rules.
var errLost = errors.New("the rack does not answer any more")

// lostAfter is how long a rack may be away.
const lostAfter = 10 * time.Second

// lost reports whether the rack has gone away for longer than it may; an error of its is an answer.
func (w *session) lost(ctx context.Context) bool {
	if w.gone.Load() || ctx.Err() != nil {
		return w.gone.Load()
	}
	err := harness.Await(ctx, lostAfter, func() error {
		_, err := w.client.Ping(ctx)
		var answered *oxide.HTTPError
		if errors.As(err, &answered) {
			return nil
		}
		return err
	})
	if err != nil && ctx.Err() == nil {
		w.gone.Store(true)
	}
	return w.gone.Load()
}

// unlessLost turns a failure into an interruption if the rack has gone away. It asks only after a
// failure.
func (w *session) unlessLost(ctx context.Context, r report.Result) report.Result {
	if r.Status == report.Failed && w.lost(ctx) {
		r.Status, r.Reason = report.Interrupted, errLost.Error()
	}
	return r
}
