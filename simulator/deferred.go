package simulator

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// later are the requests whose callers had an answer, and whose effect, or the rest of it, is still
// to come.
type later struct {
	mu sync.Mutex
	// mu guards held.
	held []*heldBack
}

// heldBack is one of them: now is closed when it shall not wait any longer, done when it is over.
type heldBack struct{ now, done chan struct{} }

func (l *later) add() *heldBack {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held = slices.DeleteFunc(l.held, (*heldBack).over)
	h := &heldBack{now: make(chan struct{}), done: make(chan struct{})}
	l.held = append(l.held, h)
	return h
}

func (h *heldBack) over() bool {
	select {
	case <-h.done:
		return true
	default:
		return false
	}
}

// release ends the wait of all and returns them.
func (l *later) release() []*heldBack {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := l.held
	l.held = nil
	for _, h := range all {
		close(h.now)
	}
	return all
}

// late is the rule by which the request's effect comes late, or nil.
func (r *request) deferred() *firing {
	for _, f := range r.faults {
		if f.Phase == adminapi.Deferred {
			return f
		}
	}
	return nil
}

// carryOutLater carries a request out when its caller has had his answer, or is gone, and the delay
// is over.
func (s *Server) carryOutLater(r *request, delay time.Duration) {
	// The answer under way writes into the request.
	late := *r
	late.entry.Deferred = true
	s.holdBack(r.Context(), delay, func() {
		late.started = time.Now()
		s.record(&late, s.serve(&late))
	})
}

// holdBack does something when ctx and then the delay are over. A rack that closes meanwhile
// forgets it.
func (s *Server) holdBack(ctx context.Context, delay time.Duration, do func()) {
	h := s.later.add()
	forget := func() { close(h.done) }
	if !s.begin() {
		forget()
		return
	}
	go func() {
		defer s.work.Done()
		defer forget()
		select {
		case <-ctx.Done():
		case <-s.life.Done():
		}
		timer := time.NewTimer(delay)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-h.now:
		case <-s.life.Done():
		}
		if s.life.Err() == nil {
			do()
		}
	}()
}

// RunDeferred carries out now what faults of the phase Deferred and the switch FreeDelay hold back,
// and returns when all of it is done, including what was under way already.
func (s *Server) RunDeferred(ctx context.Context) error {
	for _, h := range s.later.release() {
		select {
		case <-h.done:
		case <-ctx.Done():
			return fmt.Errorf("carry out what comes late: %w", ctx.Err())
		}
	}
	return nil
}
