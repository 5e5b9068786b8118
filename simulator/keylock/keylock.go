// Package keylock has mutexes that are identified by keys. The engine locks the objects that a
// request changes, and the data plane locks the disks whose bytes it handles.
package keylock

import "sync"

// Map has a mutex for each key that a goroutine holds or awaits. Its zero value is ready for use.
type Map struct {
	mu sync.Mutex
	// mu guards the map below.
	held map[string]*entry
}

type entry struct {
	sync.Mutex
	users int
}

// Lock locks the keys in the given order. All callers must use the same order, to avoid deadlocks.
func (m *Map) Lock(keys ...string) (unlock func()) {
	var taken []*entry
	for _, key := range keys {
		m.mu.Lock()
		if m.held == nil {
			m.held = map[string]*entry{}
		}
		e := m.held[key]
		if e == nil {
			e = &entry{}
			m.held[key] = e
		}
		e.users++
		m.mu.Unlock()
		e.Lock()
		taken = append(taken, e)
	}
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		for i, e := range taken {
			e.Unlock()
			if e.users--; e.users == 0 {
				delete(m.held, keys[i])
			}
		}
	}
}
