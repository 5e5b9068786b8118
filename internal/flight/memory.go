package flight

import "sync"

// openLimit is how many changes with an unknown outcome are remembered.
const openLimit = 1000

// memory remembers the open changes of one process. It is for a controller, which keeps nothing.
type memory struct {
	mu sync.Mutex
	// guarded by mu
	open map[string]int
}

func (m *memory) add(e Entry, always bool) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	known := m.open[e.key] > 0
	switch {
	case e.Outcome == Failed && m.open[e.key] > 1:
		m.open[e.key]-- // the outcome of an earlier one is still unknown
		return true, nil
	case e.Outcome != Begun:
		delete(m.open, e.key)
		return known || always, nil
	case m.open == nil:
		m.open = map[string]int{}
	}
	if len(m.open) >= openLimit {
		for key := range m.open { // any: nobody asked for a thousand of them again
			delete(m.open, key)
			break
		}
	}
	m.open[e.key]++
	return true, nil
}
