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

// DefaultLateLimit is how long a rack may take to make a change that it has not answered. Until
// then the change is open: no call returns OK if the change could undo the call's result.
//
// The limit is an estimate: no document names one, and a rack finishes requests whose caller is
// gone. A change is one transaction or short saga, which ends within seconds; the latest observed
// came 25 s late. Common proxies also wait a minute for an answer (nginx: proxy_read_timeout).
//
// A new process does not know the open changes of its predecessor. If the rack makes one of these,
// or any change after the limit, a disk may be attached without any CO knowing it. In that case
// ListVolumes shows the disk's instance, and the next publish to another node returns an error with
// the instance (DiskAttachedElsewhere). "audit" finds disks and snapshots that no CO knows.
const DefaultLateLimit = time.Minute

// change describes a change that the driver requests from the rack. The field id is empty until the
// disk's or snapshot's id is known. The field name is only for creations.
type change struct {
	event    flight.Event
	id, name string
	instance string        // for an attach or a detach
	noted    flight.Fields // for the flight recorder
}

// text returns the end of a sentence that begins with "the rack was asked to".
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

// confirm records in the flight recorder that the rack's state shows the change as made. The
// parameter more contains fields that were unknown before.
func (c change) confirm(ctx context.Context, more flight.Fields) {
	flight.Of(ctx).Confirm(c.event, c.noted, more)
}

func (c change) confirmed(ctx context.Context, gone error) error {
	if gone == nil {
		c.confirm(ctx, flight.Fields{})
	}
	return gone
}

func (c change) blocks(like change) bool {
	return c.event == like.event && (c.id != "" && c.id == like.id ||
		c.name != "" && c.name == like.name) &&
		(c.instance == like.instance || like.instance == "")
}

// changes contains the changes that the rack has not answered and may still make. Each stays open
// for LateLimit, even if the object's state shows it as made: another request may have done that.
type changes struct {
	mu sync.Mutex
	// open maps each open change to the time until which the rack may make it. mu guards this map.
	open map[change]time.Time
	// The keys of this map name the objects that calls are creating or deleting, see hold().
	held sync.Map
}

// request calls do() to make the change, unless look, the time of the last read of the rack, is too
// old. It remembers a change that stays open. If the rack refuses, the error is the SDK's.
func (c *Service) request(ctx context.Context, doing string, look rack.Look, ch change,
	do func(context.Context) error) (*flight.Change, error) {
	record := flight.Of(ctx).Begin(ch.event, ch.noted)
	open := true // stays true after a panic
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

// latest returns the open change that matches the given one, and until when it is open. If several
// match, it returns the one that is open longest.
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

// await waits until no open change matches the given one. It fails if ctx would end before that.
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

// hold prevents other calls from creating or deleting the object with this name. The interceptor's
// locks do not prevent that: they use the CO's name for a create, and the id for a delete.
func (l *changes) hold(create flight.Event, name string) (release func(), err error) {
	key := change{event: create, name: name}
	if _, held := l.held.LoadOrStore(key, true); held {
		return nil, csierr.New(csierr.OperationPending, "another call creates or deletes %s; repeat "+
			"this one later", name)
	}
	return func() { l.held.Delete(key) }, nil
}

// remove reads an object. If the rack finds it, the parameter remove() deletes it. If not, gone()
// makes sure that it does not exist. While the object's creation is open, the rack may still create
// it, and no CO would know the object. In that case this function waits and reads again.
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

// unlessOpen returns err or, while the change is open, a retryable error. A final error of a create
// would make the CO forget the object, so that nobody deletes it.
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
