package controller

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
)

// DefaultLateLimit is how long a rack may take to carry out a change that it has not answered.
// Until then the change is open: no call returns OK if the change could undo it.
//
// A rack has no documented limit, and continues a request whose caller is gone. A change is one
// transaction, or one short saga, and ends within seconds; the latest that was observed came 25 s
// late. A minute is also how long common proxies wait for an answer (nginx: proxy_read_timeout).
//
// A process that has just started assumes that no change is open, because only its predecessor knew
// the changes that it sent. If such a change is made later, or if the rack needs longer than the
// limit, a disk may be attached without any CO knowing it. Then ListVolumes shows the instance, and
// the next publish to another node names it (DiskAttachedElsewhere). An audit finds a disk or a
// snapshot that no CO knows.
const DefaultLateLimit = time.Minute

// change is a change of the rack. id is empty until the id of the disk or snapshot is known, and
// name is set only where the name matters.
type change struct {
	event    flight.Event
	id, name string
	instance string        // of an attach or a detach
	noted    flight.Fields // what the flight recorder notes of the change
}

// text continues "the rack was asked to …".
func (c change) text() string {
	return fmt.Sprintf(map[flight.Event]string{
		flight.DiskAttached:    "attach the disk %[1]s to the instance %[3]s",
		flight.DiskDetached:    "detach the disk %[1]s from the instance %[3]s",
		flight.DiskCreated:     "make the disk %[2]s",
		flight.SnapshotCreated: "take the snapshot %[2]s",
		flight.DiskDeleted:     "delete the disk %[1]s",
		flight.SnapshotDeleted: "delete the snapshot %[1]s",
	}[c.event], c.id, c.name, c.instance)
}

func diskDeleted(id oxide.NameOrId) change {
	return change{event: flight.DiskDeleted, id: string(id), noted: flight.Fields{Volume: string(id)}}
}

func snapshotDeleted(id oxide.NameOrId) change {
	return change{event: flight.SnapshotDeleted, id: string(id)}
}

// confirm closes the change in the flight recorder, because it has turned out to be made. more
// contains fields that are known only now.
func (c change) confirm(ctx context.Context, more flight.Fields) {
	flight.Of(ctx).Confirm(c.event, c.noted, more)
}

// confirmed records that an object is gone if gone is nil, and returns gone.
func (c change) confirmed(ctx context.Context, gone error) error {
	if gone == nil {
		c.confirm(ctx, flight.Fields{})
	}
	return gone
}

// blocks reports whether the change is of the same kind as like and of the same object, by name or
// id, and of the same instance unless like names none.
func (c change) blocks(like change) bool {
	return c.event == like.event && (c.id != "" && c.id == like.id ||
		c.name != "" && c.name == like.name) &&
		(c.instance == like.instance || like.instance == "")
}

// changes are the changes that the rack may still make although it has not answered them. Each
// stays open until its time has passed: no state of an object shows which request has made a
// change.
type changes struct {
	mu sync.Mutex
	// guarded by mu: until when each may be made
	open map[change]time.Time
	// held contains the objects that calls now create or delete, each as the change that creates it.
	held sync.Map
}

// request requests a change of the rack, which the look allows, and remembers the change if it
// stays open. The error is the client's only if the rack itself has refused the change.
func (c *Service) request(ctx context.Context, doing string, look rack.Look, ch change,
	do func(context.Context) error) (*flight.Change, error) {
	record := flight.Of(ctx).Begin(ch.event, ch.noted)
	open := true // also after a panic
	defer func() {
		if open {
			c.changes.mu.Lock()
			defer c.changes.mu.Unlock()
			if c.changes.open == nil {
				c.changes.open = map[change]time.Time{}
			}
			c.changes.open[ch] = time.Now().Add(cmp.Or(c.LateLimit, DefaultLateLimit))
		}
	}()
	var err error
	if open, err = c.Rack.Request(ctx, doing, look, do); err != nil && !open {
		record.End(err, flight.Fields{})
	}
	return record, err
}

// latest returns, of the open changes that like matches, the one that the rack may make last.
func (l *changes) latest(like change) (latest change, until time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c, end := range l.open {
		switch {
		case !time.Now().Before(end):
			delete(l.open, c)
		case c.blocks(like) && end.After(until):
			latest, until = c, end
		}
	}
	return latest, until
}

// await waits until no such change can be made any more, or returns an error if the caller's
// time ends before. waited reports whether there was one.
func (l *changes) await(ctx context.Context, like change) (waited bool, err error) {
	for {
		late, until := l.latest(like)
		if until.IsZero() {
			return waited, nil
		}
		waited = true
		if deadline, ok := ctx.Deadline(); ok && !until.Before(deadline.Add(-answerMargin)) {
			return waited, mayCome(late)
		}
		select {
		case <-time.After(time.Until(until)):
		case <-ctx.Done():
			return waited, mayCome(late)
		}
	}
}

func mayCome(c change) error {
	return csierr.New(csierr.EffectUnknown, "the rack has not answered when it was asked to %s, and "+
		"may still do so; repeat the call", c.text())
}

// learn adds the id of a created object to what is open under its name.
func (l *changes) learn(created change) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c, until := range l.open {
		if c.event == created.event && c.name == created.name && c.id == "" {
			delete(l.open, c)
			l.open[created] = until
		}
	}
}

// hold keeps other calls from creating or deleting the object of that name. The interceptor locks a
// create by the CO's name and a delete by the id, so it does not see that both are for one object.
func (l *changes) hold(create flight.Event, name string) (release func(), err error) {
	key := change{event: create, name: name}
	if _, held := l.held.LoadOrStore(key, true); held {
		return nil, csierr.New(csierr.OperationPending, "another call creates or deletes %s; repeat "+
			"this one later", name)
	}
	return func() { l.held.Delete(key) }, nil
}

// remove deletes an object: read looks at it, and gone confirms that it is deleted. While its
// creation is open, it waits and looks again: the object could come back, and no CO would know it.
func remove[T any](ctx context.Context, l *changes, created change,
	read func(context.Context, oxide.NameOrId) (*T, error), name func(*T) oxide.Name,
	gone func() error, remove func(context.Context, rack.Look, *T) error) error {
	once := func() (again bool, err error) {
		look := rack.Looking()
		object, err := read(ctx, oxide.NameOrId(created.id))
		if err == nil {
			created.name = string(name(object))
			release, err := l.hold(created.event, created.name)
			if err != nil {
				return false, err
			}
			defer release()
		}
		waited, late := l.await(ctx, created)
		switch {
		case waited:
			return late == nil, late
		case csierr.IsNotFound(err):
			return false, gone()
		case err != nil:
			return false, err
		}
		return false, remove(ctx, look, object)
	}
	for {
		if again, err := once(); !again {
			return err
		}
	}
}

// unlessOpen returns the error of a call for a change. As long as the change is open, the code must
// not be final: after a final code the CO would forget the object of a create, for example, and
// nobody would delete it.
func (l *changes) unlessOpen(ch change, err error) error {
	if err == nil || csierr.Retryable(err) {
		return err
	}
	if _, until := l.latest(ch); until.IsZero() {
		return err
	}
	return retryLater(err)
}

func retryLater(err error) error {
	if err == nil || csierr.Retryable(err) {
		return err
	}
	return csierr.New(csierr.EffectUnknown, "the rack may or may not have made the change; repeat "+
		"the call: %s", csierr.Message(err))
}
