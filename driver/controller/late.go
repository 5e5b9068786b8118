package controller

import (
	"context"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// DefaultLateLimit is how long a rack may take to carry out a change whose answer was an error, or
// was lost. So long ControllerUnpublish does not return OK after an attach that this process sent,
// nor ControllerPublish after a detach.
//
// No rack names a limit: it goes on with a request when its
// caller is gone. An attach or detach is one transaction, or one short saga, and ends within
// seconds; those that were seen to come late came up to 25 s late. A minute is also how long common
// proxies wait for an answer (nginx: proxy_read_timeout).
//
// Only this process knows which changes it sent. If it ends within the limit, or the rack needs
// longer, a disk may stay attached that no CO knows of. ListVolumes shows the instance, and the
// next publish to another node names it (DiskAttachedElsewhere).
const DefaultLateLimit = time.Minute

// change is an attach or a detach.
type change struct {
	disk, instance oxide.NameOrId
	attach         bool
}

// lateChanges are the changes that may still be carried out although nobody waits for their answer.
type lateChanges struct {
	mu sync.Mutex
	// guarded by mu
	open map[change]lateChange
}

type lateChange struct {
	until time.Time
	// repeated is set if the change was requested again. Then the state of the disk does not show
	// that all requests were carried out.
	repeated bool
}

// sent records that a change is requested.
func (l *lateChanges) sent(c change) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if late, ok := l.open[c]; ok {
		late.repeated = true
		l.open[c] = late
	}
}

// lost records that it is unknown whether a requested change will be made. repeated is set if an
// earlier request may make the disk look as this one does.
func (l *lateChanges) lost(c change, limit time.Duration, repeated bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open == nil {
		l.open = map[change]lateChange{}
	}
	late := l.open[c]
	late.until = time.Now().Add(limit)
	late.repeated = late.repeated || repeated
	l.open[c] = late
}

// seen records that the disk is as the change makes it.
func (l *lateChanges) seen(c change) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.open[c].repeated {
		delete(l.open, c)
	}
}

// gone forgets the changes of a deleted disk.
func (l *lateChanges) gone(disk oxide.NameOrId) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.open {
		if c.disk == disk {
			delete(l.open, c)
		}
	}
}

// latest returns the change that may be made until the latest time, of those to the same disk, and
// to the same instance unless that is empty.
func (l *lateChanges) latest(like change) (latest change, until time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c, late := range l.open {
		switch {
		case !time.Now().Before(late.until):
			delete(l.open, c)
		case c.disk == like.disk && c.attach == like.attach &&
			(c.instance == like.instance || like.instance == "") && late.until.After(until):
			latest, until = c, late.until
		}
	}
	return latest, until
}

// await waits until no such change can be made any more, or returns an error if the caller's
// time ends before. waited reports whether there was one.
func (l *lateChanges) await(ctx context.Context, like change) (waited bool, err error) {
	for {
		late, until := l.latest(like)
		if until.IsZero() {
			return waited, nil
		}
		waited = true
		deadline, limited := ctx.Deadline()
		timer := time.NewTimer(time.Until(until))
		inTime := !limited || until.Before(deadline.Add(-answerMargin))
		if inTime {
			select {
			case <-timer.C:
			case <-ctx.Done():
				inTime = false
			}
		}
		timer.Stop()
		if !inTime {
			verb := map[bool]string{true: "attach the disk %s to", false: "detach the disk %s from"}
			return waited, csierr.New(csierr.EffectUnknown, "the rack did not answer when it was asked to "+
				verb[late.attach]+" the instance %s, and may still do so; repeat the call", late.disk,
				late.instance)
		}
	}
}

// retryLater converts an error to one after which the CO repeats the call. A call that may have had
// its effect must not end with a final code: the CO would forget the object, and nobody would ever
// delete it.
func retryLater(err error) error {
	if err == nil || csierr.Retryable(err) {
		return err
	}
	return csierr.New(csierr.EffectUnknown, "the rack may or may not have made the change; repeat "+
		"the call: %s", csierr.Message(err))
}
