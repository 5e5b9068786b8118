package simulator

import "sync"

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
