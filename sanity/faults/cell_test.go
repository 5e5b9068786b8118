package faults_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// cell is one of the matrix.
type cell struct {
	operation string
	phase     phase
	answer    answer
	scene     scene
}

func (c cell) String() string {
	return strings.Join([]string{c.operation, string(c.phase), c.answer.name, c.scene.name}, "/")
}

// The time limits of a call: of one that is to run into it, at first, and of any other.
const (
	shortLimit = 250 * time.Millisecond
	longLimit  = 20 * time.Second
)

// errNotStruck says that the call's time was up before it made the request that was to be struck.
var errNotStruck = errors.New("the fault did not strike")

// play runs a cell. A time limit that was too short for the machine is doubled: what the cell
// demands is not.
func (c cell) play(ctx context.Context, on *cast) error {
	limit := longLimit
	if c.answer.slow {
		limit = shortLimit
	}
	for {
		err := c.once(ctx, on, limit)
		if err != nil {
			// Nothing of this cell may strike the next one.
			err = errors.Join(err, on.rack.Admin.ClearFaults(ctx), on.rack.Admin.RunDeferred(ctx))
		}
		err = errors.Join(err, on.tidy(ctx))
		if !errors.Is(err, errNotStruck) || limit >= longLimit {
			return err
		}
		limit *= 2
	}
}

// performance is a cell under way.
type performance struct {
	cell
	on     *cast
	act    act
	start  world
	done   world
	answer proto.Message
	err    error
}

func (c cell) once(ctx context.Context, on *cast, limit time.Duration) error {
	p := &performance{cell: c, on: on}
	if err := p.prepare(ctx); err != nil {
		return fmt.Errorf("prepare: %w", err)
	}
	if err := p.struck(ctx, limit); err != nil {
		return err
	}
	if err := p.judge(ctx); err != nil {
		return err
	}
	if c.phase == deferred {
		if err := on.rack.Admin.RunDeferred(ctx); err != nil {
			return err
		}
	}
	if err := p.repeat(ctx); err != nil {
		return fmt.Errorf("the repeated call, after %s: %w", said(p.err), err)
	}
	if c.phase != later {
		return nil
	}
	if err := on.rack.Admin.RunDeferred(ctx); err != nil {
		return err
	}
	// What nobody waits for any more may be halfway there, until the CO comes again.
	if err := p.settled(ctx); err != nil && p.act.halfway == nil {
		return fmt.Errorf("when it was carried out at last: %w", err)
	}
	if err := p.repeat(ctx); err != nil {
		return fmt.Errorf("the call repeated once more: %w", err)
	}
	return nil
}

func (p *performance) prepare(ctx context.Context) error {
	s := &stage{cast: p.on, ctx: ctx}
	p.act = p.scene.set(s)
	if s.err != nil {
		return s.err
	}
	var err error
	if p.start, err = look(ctx, p.on.rack.Admin); err != nil {
		return err
	}
	p.done = p.start.changed(p.act.done)
	return nil
}

// changed is the world after a change.
func (w world) changed(change func(*world)) world {
	changed := w.clone()
	if change != nil {
		change(&changed)
	}
	return changed
}

// struck makes the call with the fault in force.
func (p *performance) struck(ctx context.Context, limit time.Duration) error {
	admin := p.on.rack.Admin
	var first, last string
	for _, fault := range p.faults() {
		id, err := admin.AddFault(ctx, fault)
		if err != nil {
			return err
		}
		if last = id; first == "" {
			first = id
		}
	}
	p.answer, p.err = p.called(ctx, limit)
	fired, err := admin.Fired(ctx, first)
	ended, endErr := admin.Fired(ctx, last)
	if err = errors.Join(err, endErr, admin.ClearFaults(ctx)); err != nil {
		return err
	}
	switch {
	case fired == 0:
		return fmt.Errorf("%w; the call %s", errNotStruck, said(p.err))
	case first != last && ended > 0:
		return fmt.Errorf("the driver asked for %d pages of a list without an end; the call %s",
			mostPages, said(p.err))
	}
	return nil
}

// faults are the rules of a cell: one, or one for each page of a list.
func (p *performance) faults() []adminapi.Fault {
	fault := p.phase.rule(p.operation)
	a := p.cell.answer
	if a.pages == nil {
		a.set(&fault, p.on, p.phase)
		return []adminapi.Fault{fault}
	}
	var faults []adminapi.Fault
	for n := range mostPages {
		page := fault
		page.Skip, page.Times = n, 1
		page.Response = &adminapi.Response{Status: http.StatusOK,
			Body: a.pages(p.on, p.operation, n)}
		faults = append(faults, page)
	}
	return faults
}

func (p *performance) called(ctx context.Context, limit time.Duration) (proto.Message, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return p.act.call(ctx)
}

// judge holds what the CO was told to the table, and to what the rack has.
func (p *performance) judge(ctx context.Context) error {
	code := status.Code(p.err)
	if allowed := p.allowed(); !slices.Contains(allowed, code) {
		return fmt.Errorf("the call %s; want one of %v", said(p.err), allowed)
	}
	if p.ownWord() {
		return nil
	}
	now, err := p.now(ctx)
	if err != nil {
		return err
	}
	undone := now.differs(p.done)
	if code == p.scene.want {
		if undone != "" {
			return fmt.Errorf("the call %s, and the rack has (+) where it should have (-):\n%s",
				said(p.err), undone)
		}
		return nil
	}
	halfway := p.start.changed(p.act.halfway)
	if undone == "" || now.differs(p.start) == "" || now.differs(halfway) == "" {
		return nil
	}
	return fmt.Errorf("the call %s and left the rack in a state that it has neither before nor "+
		"behind the call; (+) what it has, (-) what it had:\n%s", said(p.err),
		now.differs(p.start))
}

func (p *performance) now(ctx context.Context) (world, error) {
	now, err := look(ctx, p.on.rack.Admin)
	return now.since(p.start), err
}

// repeat makes the call again until nothing else is at work on the object, as a CO does, and
// demands what it was to bring about. What an OK said before it, it has to say again.
func (p *performance) repeat(ctx context.Context) error {
	var again proto.Message
	var err error
	for end := time.Now().Add(patience); ; {
		again, err = p.called(ctx, longLimit)
		if status.Code(err) != codes.Aborted || time.Now().After(end) {
			break
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
	if status.Code(err) != p.scene.want {
		return fmt.Errorf("it %s; want %s", said(err), p.scene.want)
	}
	if p.err == nil && !p.ownWord() && !proto.Equal(p.answer, again) {
		return fmt.Errorf("it says %v; with the fault it said %v", again, p.answer)
	}
	return p.settled(ctx)
}

// settled demands that the rack has what the call was to bring about.
func (p *performance) settled(ctx context.Context) error {
	now, err := p.now(ctx)
	if err != nil {
		return err
	}
	if difference := now.differs(p.done); difference != "" {
		return fmt.Errorf("the rack has (+) where it should have (-):\n%s", difference)
	}
	return nil
}

// said is how a call ended, in words.
func said(err error) string {
	if err == nil {
		return "said OK"
	}
	return fmt.Sprintf("failed with %s (%s)", status.Code(err), status.Convert(err).Message())
}

// operations observes which operations a scene's call needs, without a fault.
func (s scene) operations(ctx context.Context, on *cast) ([]string, error) {
	p := &performance{cell: cell{scene: s}, on: on}
	if err := p.prepare(ctx); err != nil {
		return nil, fmt.Errorf("prepare %s: %w", s.name, err)
	}
	if err := on.rack.Admin.ClearRequests(ctx); err != nil {
		return nil, err
	}
	if p.answer, p.err = p.called(ctx, longLimit); status.Code(p.err) != s.want {
		return nil, fmt.Errorf("%s %s; want %s", s.name, said(p.err), s.want)
	}
	requests, err := on.rack.Admin.Requests(ctx, 0)
	if err == nil {
		err = p.settled(ctx)
	}
	if err = errors.Join(err, on.tidy(ctx)); err != nil {
		return nil, fmt.Errorf("%s without a fault: %w", s.name, err)
	}
	var operations []string
	for _, r := range requests {
		if !slices.Contains(operations, r.Operation) {
			operations = append(operations, r.Operation)
		}
	}
	return operations, nil
}
