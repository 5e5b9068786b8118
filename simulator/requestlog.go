package simulator

import (
	"slices"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// keptRequests limits the number of entries in the log.
const keptRequests = 100_000

type requestLog struct {
	mu sync.Mutex
	// mu guards entries and seq.
	entries []adminapi.Request
	seq     int
}

func (l *requestLog) add(entry adminapi.Request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seq++
	entry.Seq = l.seq
	if len(l.entries) >= 2*keptRequests {
		l.entries = slices.Clone(l.entries[keptRequests:])
	}
	l.entries = append(l.entries, entry)
}

// since returns the entries after the given one.
func (l *requestLog) since(seq int) []adminapi.Request {
	l.mu.Lock()
	defer l.mu.Unlock()
	i, _ := slices.BinarySearchFunc(l.entries, seq+1, func(r adminapi.Request, seq int) int {
		return r.Seq - seq
	})
	return append([]adminapi.Request{}, l.entries[i:]...)
}

// newest returns up to limit entries after the entry since that are to be kept, the newest first,
// and none of before an hour ago.
func (l *requestLog) newest(since, limit int, keep func(*adminapi.Request) bool) (
	found []adminapi.Request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	oldest := time.Now().Add(-time.Hour)
	for i := len(l.entries) - 1; i >= 0 && len(found) < limit; i-- {
		if r := &l.entries[i]; r.Seq <= since || r.Time.Before(oldest) {
			break
		} else if keep(r) {
			found = append(found, *r)
		}
	}
	return found
}

// clear removes the entries. The numbering continues.
func (l *requestLog) clear() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entries = nil
}
