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

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/history"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// cell is a cell of the matrix: a scenario in which an operation gets a wrong answer.
type cell struct {
	operation string
	phase     phase
	answer    answer
	scenario  scenario
	// hotplug is the rack's mode of hot-plug; "" means full hot-plug.
	hotplug adminapi.Hotplug
}

func (c cell) String() string {
	parts := []string{c.operation, string(c.phase), c.answer.name, c.scenario.name}
	if c.hotplug != "" {
		parts = append(parts, string(c.hotplug))
	}
	return strings.Join(parts, "/")
}

// otherRacks are the racks on which the cells of attach and detach run, too.
var otherRacks = []adminapi.Hotplug{adminapi.HotplugAttachOnly,
	adminapi.HotplugFull.With(adminapi.RecordFirst, adminapi.RefusalsAs500)}

// on returns the cell on another rack, with the code that its call has there without a fault.
func (c cell) on(rack adminapi.Hotplug) cell {
	c.hotplug = rack
	switch {
	case !rack.Detaches() && (c.scenario.name == "unpublish-from-a-running-node" ||
		c.scenario.name == "unpublish-without-a-device"):
		c.scenario.want = codes.FailedPrecondition // CU-7
	case rack.Has(adminapi.RefusalsAs500) && c.scenario.name == "publish-to-a-full-node":
		c.scenario.want = codes.Unavailable // OX-8
	}
	return c
}

// The deadlines of a call whose answer is slow, and of any other call.
const (
	shortLimit = 250 * time.Millisecond
	longLimit  = 20 * time.Second
)

// errNotFired means that the call ended before it made the request that the fault affects.
var errNotFired = errors.New("the fault did not apply")

// run runs a cell. If the deadline passes before the faulty request is made, run repeats the cell
// with twice the deadline.
func (c cell) run(ctx context.Context, env *environment) error {
	limit := longLimit
	if c.answer.slow {
		limit = shortLimit
	}
	for {
		env.Rack.History.Begin()
		err := c.runOnce(ctx, env, limit)
		ended := time.Now()
		if err != nil {
			// No fault of this cell may affect the next one.
			err = errors.Join(err, env.Rack.Admin.ClearFaults(ctx), env.Rack.Admin.RunDeferred(ctx))
		}
		err = errors.Join(err, env.cleanUp(ctx))
		if !errors.Is(err, errNotFired) || limit >= longLimit {
			if err != nil {
				env.page = c.draw(ctx, env, err, ended)
			}
			return err
		}
		limit *= 2
	}
}

// cellRun is a run of a cell, with the states of the rack before it and as it must be after it.
type cellRun struct {
	cell
	*setup
	effect effect
	start  rackState
	want   rackState
	answer proto.Message
	err    error
}

func (c cell) runOnce(ctx context.Context, env *environment, limit time.Duration) (err error) {
	defer harness.Catch(&err)
	admin, r := env.Rack.Admin, &cellRun{cell: c, setup: &setup{env, ctx}}
	r.prepare()
	if c.hotplug != "" {
		r.setup.hotplug(c.hotplug)
		defer r.setup.hotplug(adminapi.HotplugFull)
	}
	r.callWithFault(limit)
	r.checkResult()
	if c.phase == deferred {
		harness.Must(admin.RunDeferred(ctx))
	}
	if err := r.repeat(); err != nil {
		return fmt.Errorf("the repeated call, after %s: %w", outcome(r.err), err)
	}
	if c.phase != later {
		return nil
	}
	harness.Must(admin.RunDeferred(ctx))
	if err := r.checkState(); err != nil {
		return fmt.Errorf("after the late effect: %w", err)
	}
	if err := r.repeat(); err != nil {
		return fmt.Errorf("the call repeated once more: %w", err)
	}
	return nil
}

func (r *cellRun) prepare() {
	r.effect = r.scenario.prepare(r.setup)
	if r.scenario.want != codes.OK {
		r.effect.apply = nil
	}
	r.start = r.state()
	r.want = r.start.changed(r.effect.apply)
}

func (state rackState) changed(change func(*rackState)) rackState {
	changed := state.clone()
	if change != nil {
		change(&changed)
	}
	return changed
}

func (r *cellRun) callWithFault(limit time.Duration) {
	admin := r.Rack.Admin
	var rules []string
	for _, fault := range r.faults() {
		r.Rack.History.Mark(history.Rack, "fault: "+r.cell.answer.name+" "+string(r.phase))
		rules = append(rules, harness.Got(admin.AddFault(r.ctx, fault)))
	}
	r.answer, r.err = r.callOnce(r.ctx, limit)
	last := len(rules) - 1
	fired := harness.Got(admin.Fired(r.ctx, rules[0]))
	ended := harness.Got(admin.Fired(r.ctx, rules[last]))
	harness.Must(admin.ClearFaults(r.ctx))
	switch {
	case fired == 0:
		harness.Must(fmt.Errorf("%w; the call %s", errNotFired, outcome(r.err)))
	case last > 0 && ended > 0:
		harness.Must(fmt.Errorf("the driver requested %d pages of an endless list; the call %s",
			mostPages, outcome(r.err)))
	}
}

// faults returns the fault rules of a cell: one, or one for each page of a list.
func (r *cellRun) faults() []adminapi.Fault {
	fault := r.phase.rule(r.operation)
	a := r.cell.answer
	if a.pages == nil {
		a.set(&fault, r.environment, r.phase)
		return []adminapi.Fault{fault}
	}
	var faults []adminapi.Fault
	for n := range mostPages {
		page := fault
		page.Skip, page.Times = n, 1
		page.Response = &adminapi.Response{Status: http.StatusOK,
			Body: a.pages(r.environment, r.operation, n)}
		faults = append(faults, page)
	}
	return faults
}

func (r *cellRun) callOnce(ctx context.Context, limit time.Duration) (proto.Message, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	done := r.Rack.History.Step(r.scenario.name)
	answer, err := csitest.Answer(ctx, r.ctl, r.effect.request)
	done(err)
	return answer, err
}

// checkResult checks that the call's code is an allowed one, and that the rack's state agrees with
// the code.
func (r *cellRun) checkResult() {
	code := status.Code(r.err)
	if allowed := r.allowed(); !slices.Contains(allowed, code) {
		harness.Must(fmt.Errorf("the call %s; want one of %v", outcome(r.err), allowed))
	}
	if r.deniesObject() {
		return
	}
	now := r.now()
	undone := now.differs(r.want)
	switch {
	case undone == "":
	case code == r.scenario.want:
		harness.Must(fmt.Errorf("the call %s, and the rack has (+) where it should have (-):\n%s",
			outcome(r.err), undone))
	case now.differs(r.start) != "":
		harness.Must(fmt.Errorf("the call %s and had a part of its effect; the rack before (-) and "+
			"after it (+):\n%s", outcome(r.err), now.differs(r.start)))
	}
}

func (r *cellRun) now() rackState { return r.state().since(r.start) }

// repeat makes the call again, as an orchestrator does, until the driver knows the effect of the
// first one. It returns an error unless the call has its effect and, if the first call succeeded,
// the same answer.
func (r *cellRun) repeat() error {
	var again proto.Message
	var err error
	for end := time.Now().Add(patience); ; {
		again, err = r.callOnce(r.ctx, longLimit)
		open := strings.HasPrefix(status.Convert(err).Message(), "EffectUnknown: ")
		if status.Code(err) != codes.Aborted && !open || time.Now().After(end) {
			break
		}
		select {
		case <-r.ctx.Done():
			return r.ctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
	if status.Code(err) != r.scenario.want {
		return fmt.Errorf("it %s; want %s", outcome(err), r.scenario.want)
	}
	if r.err == nil && !r.deniesObject() && !proto.Equal(r.answer, again) {
		return fmt.Errorf("the answer is %v; with the fault it was %v", again, r.answer)
	}
	return r.checkState()
}

// checkState returns an error unless the rack has the state that the call must have as its
// effect.
func (r *cellRun) checkState() error {
	if difference := r.now().differs(r.want); difference != "" {
		return fmt.Errorf("the rack has (+) where it should have (-):\n%s", difference)
	}
	return nil
}

func outcome(err error) string {
	if err == nil {
		return "answered OK"
	}
	return fmt.Sprintf("failed with %s (%s)", status.Code(err), status.Convert(err).Message())
}

// operations makes a scenario's call without a fault, and returns the operations that it uses.
func (s scenario) operations(ctx context.Context, env *environment) (operations []string,
	err error) {
	defer harness.Catch(&err)
	r := &cellRun{cell: cell{scenario: s}, setup: &setup{env, ctx}}
	r.prepare()
	harness.Must(env.Rack.Admin.ClearRequests(ctx))
	if r.answer, r.err = r.callOnce(ctx, longLimit); status.Code(r.err) != s.want {
		return nil, fmt.Errorf("%s %s; want %s", s.name, outcome(r.err), s.want)
	}
	requests := harness.Got(env.Rack.Admin.Requests(ctx, 0))
	if err = errors.Join(r.checkState(), env.cleanUp(ctx)); err != nil {
		return nil, fmt.Errorf("%s without a fault: %w", s.name, err)
	}
	for _, request := range requests {
		if !slices.Contains(operations, request.Operation) {
			operations = append(operations, request.Operation)
		}
	}
	return operations, nil
}
