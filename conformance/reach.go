package conformance

import (
	"context"
	"errors"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// These are the reasons why a run loses its rack. Later failures then prove nothing about the
// rack.
var (
	errAway  = errors.New("the rack does not answer any more")
	errToken = errors.New("the rack does not know the token any more: it has expired, or somebody " +
		"has deleted it; create another one with oxide auth login")
)

// lostAfter is the time after which a rack that is away, or refuses the token, counts as lost.
const lostAfter = 10 * time.Second

// lost returns the reason why the rack was lost, or nil.
func (w *job) lost() error {
	if err := w.loss.Load(); err != nil {
		return *err
	}
	return nil
}

// askRack asks the rack for an answer, and reports whether the rack is lost. An error of the rack
// is an answer, unless it refuses the token.
func (w *job) askRack(ctx context.Context) error {
	if w.lost() != nil || ctx.Err() != nil {
		return w.lost()
	}
	loss := errAway
	asking, cancel := context.WithTimeout(ctx, lostAfter)
	defer cancel()
	err := harness.Await(asking, lostAfter, func() error {
		_, err := w.client.CurrentUserView(asking)
		var answered *oxide.HTTPError
		switch {
		case errors.Is(err, oxide.ErrHTTP401):
			loss = errToken
			return err
		case !errors.As(err, &answered):
			if asking.Err() == nil { // otherwise it had no time to answer
				loss = errAway
			}
			return err
		}
		return nil
	})
	if err != nil && ctx.Err() == nil {
		w.loss.Store(&loss)
	}
	return w.lost()
}

// unlessLost turns a failure into an interruption if the rack is lost. It asks the rack only
// after a failure.
func (w *job) unlessLost(ctx context.Context, r report.Result) report.Result {
	if r.Status == report.Failed {
		if err := w.askRack(ctx); err != nil {
			r.Status, r.Reason = report.Interrupted, err.Error()
		}
	}
	return r
}
