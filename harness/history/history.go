// Package history records the events of a run in lanes and draws them as one page. The events are
// the steps of the orchestrator, the calls to each driver, the requests to the rack, the changes of
// disks and mounts, kills and faults. The page also shows the promise that was broken, and when.
package history

import (
	"sync"
	"time"
)

// The lanes that are not a driver's.
const (
	Orchestrator = "orchestrator"
	Rack         = "rack"
	Disk         = "disk"
)

// Event is a call, which takes time, or a mark, which is a moment.
type Event struct {
	Lane, Name string
	Start      time.Time
	// End is zero while a call has no answer.
	End time.Time
	// Outcome is the answer. Failed reports that it is an error.
	Outcome string
	Failed  bool
	// Mark is a kill, a start, a fault or a power cut.
	Mark bool
}

// limit is the number of events that are kept, so that a long run stays small.
const limit = 2000

// Recorder records events. The zero value is ready, and a nil Recorder records nothing.
type Recorder struct {
	mu sync.Mutex
	// events, since and dropped are guarded by mu.
	events  []*Event
	since   time.Time
	dropped int
}

// Begin begins a new history: it forgets all events.
func (r *Recorder) Begin() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events, r.since, r.dropped = nil, time.Now(), 0
}

// Call records a call that begins now. The caller must call answered at its end.
func (r *Recorder) Call(lane, name string) (answered func(outcome string, failed bool)) {
	e := &Event{Lane: lane, Name: name, Start: time.Now()}
	r.add(e)
	return func(outcome string, failed bool) {
		if r == nil {
			return
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		e.End, e.Outcome, e.Failed = time.Now(), outcome, failed
	}
}

// Step records a step of the orchestrator that begins now. The caller must call done at its end.
func (r *Recorder) Step(name string) (done func(err error)) {
	answered := r.Call(Orchestrator, name)
	return func(err error) {
		if err != nil {
			answered(err.Error(), true)
			return
		}
		answered("OK", false)
	}
}

// Mark records a moment.
func (r *Recorder) Mark(lane, name string) {
	now := time.Now()
	r.add(&Event{Lane: lane, Name: name, Start: now, End: now, Mark: true})
}

func (r *Recorder) add(e *Event) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.events) == limit {
		r.events = append(r.events[:0], r.events[limit/2:]...)
		r.dropped += limit / 2
	}
	r.events = append(r.events, e)
}

// Events returns the events, the time at which the history began, and how many earlier events
// were dropped.
func (r *Recorder) Events() (events []Event, since time.Time, dropped int) {
	if r == nil {
		return nil, since, 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.events {
		events = append(events, *e)
	}
	return events, r.since, r.dropped
}
