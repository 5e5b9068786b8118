package simulator

import (
	"slices"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// keptBytes limits the size of the log, and keptText the size of each text that a client has sent.
const (
	keptBytes = 64 << 20
	keptText  = 1 << 10
)

// clip cuts a client's text to keptText bytes.
func clip(text string) string { return strings.Clone(text[:min(len(text), keptText)]) }

func size(r *adminapi.Request) int {
	return int(unsafe.Sizeof(*r)) + len(r.Path) + len(r.Caller) + len(r.Object) + 64*len(r.Faults)
}

type requestLog struct {
	mu sync.Mutex
	// mu guards entries, their bytes, and seq.
	entries []adminapi.Request
	bytes   int
	seq     int
}

// add adds an entry. When the log is full, it loses its older half.
func (l *requestLog) add(entry adminapi.Request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seq++
	entry.Seq = l.seq
	if l.bytes += size(&entry); l.bytes > keptBytes {
		l.entries = slices.Clone(l.entries[len(l.entries)/2:])
		l.bytes = size(&entry)
		for i := range l.entries {
			l.bytes += size(&l.entries[i])
		}
	}
	l.entries = append(l.entries, entry)
}

func (l *requestLog) since(seq int) []adminapi.Request {
	l.mu.Lock()
	defer l.mu.Unlock()
	i, _ := slices.BinarySearchFunc(l.entries, seq+1, func(r adminapi.Request, seq int) int {
		return r.Seq - seq
	})
	return append([]adminapi.Request{}, l.entries[i:]...)
}

// newest returns up to limit entries of the last hour after the entry since for which keep returns
// true, the newest first.
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
	l.entries, l.bytes = nil, 0
}
