package engine

import "sync"

// pending are the objects that are being created.
type pending struct {
	mu sync.Mutex
	// mu guards done.
	done map[string]chan struct{}
}

// begin marks an object as being created until end is called.
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

// wait returns when the creation of the object has ended, or at once if there is none.
func (p *pending) wait(id string) {
	p.mu.Lock()
	done := p.done[id]
	p.mu.Unlock()
	if done != nil {
		<-done
	}
}

// repairs has the disks that hold the rack's "volume repair lock", which permits one snapshot at
// a time (A39).
type repairs struct {
	mu sync.Mutex
	// mu guards disks.
	disks map[string]bool
}

func (l *repairs) begin(diskID string) (ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.disks == nil {
		l.disks = map[string]bool{}
	}
	if l.disks[diskID] {
		return false
	}
	l.disks[diskID] = true
	return true
}

func (l *repairs) end(diskID string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.disks, diskID)
}
