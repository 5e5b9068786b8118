package simulator

import "sync"

// locks serialises the work on the data plane, object by object. The records need none: their
// transactions are serial.
type locks struct {
	mu sync.Mutex
	// mu guards held.
	held map[string]*heldLock
}

type heldLock struct {
	sync.Mutex
	users int
}

// lock takes the locks of the given IDs, in that order; always an instance before a disk before
// a snapshot, so that nobody waits in a circle.
func (l *locks) lock(ids ...string) (unlock func()) {
	var taken []*heldLock
	for _, id := range ids {
		l.mu.Lock()
		if l.held == nil {
			l.held = map[string]*heldLock{}
		}
		h := l.held[id]
		if h == nil {
			h = &heldLock{}
			l.held[id] = h
		}
		h.users++
		l.mu.Unlock()
		h.Lock()
		taken = append(taken, h)
	}
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		for i, h := range taken {
			h.Unlock()
			if h.users--; h.users == 0 {
				delete(l.held, ids[i])
			}
		}
	}
}

// pending are the objects whose creation is still under way.
type pending struct {
	mu sync.Mutex
	// mu guards done.
	done map[string]chan struct{}
}

// begin notes that an object is being created, until end is called.
func (p *pending) begin(id string) (end func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.done == nil {
		p.done = map[string]chan struct{}{}
	}
	done := make(chan struct{})
	p.done[id] = done
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.done, id)
		close(done)
	}
}

// wait returns when the object's creation has ended, at once when none is under way.
func (p *pending) wait(id string) {
	p.mu.Lock()
	done := p.done[id]
	p.mu.Unlock()
	if done != nil {
		<-done
	}
}
