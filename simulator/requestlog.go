package simulator

import (
	"slices"
	"sync"
	"time"
)

// Request is an entry of the request log: one call of the API, in the order in which the calls
// ended. A caller who has the answer finds the entry. Status 0 is a connection that was cut.
type Request struct {
	Seq        int       `json:"seq"`
	Time       time.Time `json:"time"`
	Operation  string    `json:"operation"`
	Method     string    `json:"method"`
	Path       string    `json:"path"`
	Object     string    `json:"object"`
	ObjectID   string    `json:"object_id"`
	Status     int       `json:"status"`
	DurationMS float64   `json:"duration_ms"`
	// Faults are the IDs of the fault rules that fired.
	Faults []string `json:"faults"`
	// Late says that this is the effect of a request that was answered before, by a fault.
	Late bool `json:"late,omitempty"`
}

// keptRequests bounds the log's memory.
const keptRequests = 100_000

type requestLog struct {
	mu sync.Mutex
	// mu guards entries and seq.
	entries []Request
	seq     int
}

func (l *requestLog) add(entry Request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seq++
	entry.Seq = l.seq
	if len(l.entries) >= 2*keptRequests {
		l.entries = slices.Clone(l.entries[keptRequests:])
	}
	l.entries = append(l.entries, entry)
}

// since lists the entries after one of them.
func (l *requestLog) since(seq int) []Request {
	l.mu.Lock()
	defer l.mu.Unlock()
	i, _ := slices.BinarySearchFunc(l.entries, seq+1, func(r Request, seq int) int {
		return r.Seq - seq
	})
	return append([]Request{}, l.entries[i:]...)
}

// clear forgets the entries; the numbers go on.
func (l *requestLog) clear() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entries = nil
}
