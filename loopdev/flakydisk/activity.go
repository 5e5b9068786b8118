package flakydisk

import "time"

// ActivitySeconds is the number of seconds for which a disk knows its activity.
const ActivitySeconds = 60

// Activity is the number of operations that a disk was asked for in one second, those that failed
// or still hang included.
type Activity struct{ Reads, Writes, Flushes int }

// second is the activity of the second that began at that Unix time.
type second struct {
	at int64
	Activity
}

// count counts an operation. The caller holds mu.
func (d *Disk) count(op Op, at time.Time) {
	s := &d.recent[at.Unix()%ActivitySeconds]
	if s.at != at.Unix() {
		*s = second{at: at.Unix()}
	}
	switch op {
	case OnRead:
		s.Reads++
	case OnWrite:
		s.Writes++
	case OnFlush:
		s.Flushes++
	}
}

// Activity returns the activity of the last ActivitySeconds up to the given time, the oldest
// second first.
func (d *Disk) Activity(now time.Time) []Activity {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := make([]Activity, ActivitySeconds)
	for i := range all {
		at := now.Unix() - ActivitySeconds + 1 + int64(i)
		if s := d.recent[at%ActivitySeconds]; s.at == at {
			all[i] = s.Activity
		}
	}
	return all
}
