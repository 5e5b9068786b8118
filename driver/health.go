package driver

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/rack"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/async"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// How often the controller looks whether the rack accepts it: seldom, and sooner when the last look
// found something to mend.
const (
	rackLookInterval  = time.Minute
	rackRetryInterval = 5 * time.Second
	rackLookTimeLimit = 10 * time.Second
)

// rackHealth knows whether the rack accepts the token and shows the project, from looks in the
// background, so that Probe never waits.
type rackHealth struct {
	Rack   *rack.Client
	Tokens *rack.TokenSource // nil: no file to look at
	Log    *slog.Logger

	// asked wakes run for a look out of turn.
	asked chan struct{}

	mu sync.Mutex
	// guarded by mu
	looked bool
	// guarded by mu
	fault error
	// guarded by mu
	told string
}

// lookSoon asks for a look now: a call has found the token refused. It does not wait.
func (h *rackHealth) lookSoon() {
	select {
	case h.asked <- struct{}{}:
	default:
	}
}

// run looks until ctx ends.
func (h *rackHealth) run(ctx context.Context) {
	for {
		wait := rackLookInterval
		if !h.guardedLook(ctx) {
			wait = rackRetryInterval
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		case <-h.soon():
			timer.Stop()
		}
	}
}

// soon is asked, but not for a look that has just failed: a hundred refused calls are one question.
func (h *rackHealth) soon() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.fault != nil {
		return nil
	}
	return h.asked
}

// guardedLook looks, and makes a fault of a panic.
func (h *rackHealth) guardedLook(ctx context.Context) (fine bool) {
	err := async.Guard(ctx, h.Log, "the look at the rack", func() error {
		fine = h.look(ctx)
		return nil
	})
	if err != nil {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.looked, h.fault = true, err
	}
	return fine
}

// look asks the rack for the project; false means that something is wrong.
func (h *rackHealth) look(ctx context.Context) bool {
	limited, cancel := context.WithTimeout(ctx, rackLookTimeLimit)
	defer cancel()
	_, err := h.Rack.ProjectView(limited, oxide.ProjectViewParams{Project: h.Rack.ProjectParam()})
	if ctx.Err() != nil {
		return true
	}
	fault, fileFault := healthFault(err), h.Tokens.Fault()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tell(limited, err, cmp.Or(fault, fileFault))
	if err != nil && fault == nil && h.looked {
		// The rack is away. What it said last holds (PR-5).
		return false
	}
	h.looked, h.fault = true, fault
	return err == nil && fileFault == nil
}

// tell writes one line when what a look found is another trouble than before, or none any more. It
// is called with mu held.
func (h *rackHealth) tell(ctx context.Context, err, fault error) {
	why := fault
	if why == nil && err != nil {
		why = rack.Error(ctx, lookAtProject, err)
	}
	trouble := csierr.Message(why)
	told := trouble
	if answer := new(oxide.HTTPError); errors.As(err, &answer) {
		// Such a text has the number of its request, and the reason is enough to tell it by.
		told = string(csierr.ReasonOf(why))
	}
	switch {
	case told == h.told:
	case fault != nil && err == nil:
		h.Log.ErrorContext(ctx, "the rack accepts this controller with a token that cannot be read "+
			"again", "error", trouble)
	case fault != nil:
		h.Log.ErrorContext(ctx, "the rack does not accept this controller", "error", trouble)
	case err != nil:
		h.Log.WarnContext(ctx, "the rack at OXIDE_HOST does not answer; calls fail until it does",
			"error", trouble)
	default:
		h.Log.InfoContext(ctx, "the rack accepts this controller again")
	}
	h.told = told
}

// lookAtProject names the look in errors.
const lookAtProject = "look at the project"

// healthFault is what a person has to mend, or nil: also for a rack that is away.
func healthFault(err error) error {
	switch {
	case errors.Is(err, oxide.ErrHTTP401), errors.Is(err, oxide.ErrHTTP403):
		why := rack.Error(context.Background(), lookAtProject, err)
		return csierr.Coded(codes.FailedPrecondition, csierr.ReasonOf(why), "%w", why)
	case errors.Is(err, oxide.ErrObjectNotFound):
		return csierr.New(csierr.ProjectNotFound, "the rack shows this token "+
			"no project of the name or id in OXIDE_PROJECT; create it, or give the token's user a "+
			"role on it")
	}
	return nil
}

// state is the answer for Probe.
func (h *rackHealth) state() (ready bool, err error) {
	fileFault := h.Tokens.Fault()
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.looked, cmp.Or(h.fault, fileFault)
}

// toolsHealth says what a node lacks.
func toolsHealth() error {
	if missing := filesystem.MissingTools(); len(missing) > 0 {
		return csierr.New(csierr.ToolsMissing, "the node service runs %s and "+
			"cannot find it; install e2fsprogs, xfsprogs, btrfs-progs and util-linux",
			strings.Join(missing, ", "))
	}
	return nil
}
