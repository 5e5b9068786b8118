//go:build linux

package model

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// History runs the steps of an orchestrator, and compares the results with the model.
type History struct {
	// If Patient is set, the orchestrator repeats each call until the answer is OK.
	Patient bool
	// ReadOnlyAt is the node whose pods get the volumes read-only, or "".
	ReadOnlyAt string

	env          *Environment
	world        *world
	orchestrator *orchestrator
	transcript   *transcript
	// manipulation falsifies answers or states to test the model itself. It may be nil.
	manipulation *manipulation

	doubtSince int
	faultNames map[string]string
	count      *counts
	// ended contains the calls of the last step.
	ended []ended
	// preparing keeps Doubt from changing world while the request of a node call is built.
	preparing sync.Mutex
}

type counts struct {
	steps, faults, restarts int
	// bare is the number of volumes that were attached without a device.
	bare int
	// holders counts devices that the proof kept open. released counts unstages answered OK meanwhile.
	holders, released int
	// bytes is the number of acknowledged bytes, and lost is how many of them were lost.
	bytes, lost int64
	// copies is the number of restored volumes that were compared with their snapshot.
	copies int
	// calls is the number of calls, with repetitions. aborted counts the calls that were sent again.
	calls, aborted atomic.Int64
	// ops counts concurrent calls (crowd_test.go) by op. The next two lines count their results.
	ops                                  map[op]int
	abandoned, volumes, wrong            int
	names, disks, ids, mounts, formatted int
	// formats is the number of runs of mkfs, and formatted is their expected number.
	formats int
}

// NewHistory returns a history without steps.
func NewHistory(env *Environment) *History {
	o := &orchestrator{world: newWorld(), transcript: &transcript{}, volumes: map[int]*csi.Volume{},
		taken: map[int]string{}, given: map[field]bool{}, goals: map[int]string{}}
	return &History{env: env, count: &counts{}, world: o.world, transcript: o.transcript,
		orchestrator: o, faultNames: map[string]string{}}
}

// Do runs a step, and compares all results with the model.
func (h *History) Do(ctx context.Context, s Step) error {
	if len(h.world.doubts) > 0 && s.Driver == nil && (s.op.byPerson() || h.doubtSince >= 3) {
		// Pods and administrators need a known state. Others wait after two steps without new doubts.
		if err := h.Wait(ctx); err != nil {
			return err
		}
	}
	return h.step(ctx, s)
}

func (h *History) step(ctx context.Context, s Step) (err error) {
	h.count.steps++
	done := h.env.Rack.History.Step(s.String())
	defer func() {
		if err != nil {
			err = fmt.Errorf("after %q: %w", cmp.Or(h.transcript.last(), s.String()), err)
		}
		done(err)
	}()
	defer harness.Catch(&err)
	if s.op.isCall() {
		if h.ended, err = h.make(ctx, s); err == nil && h.ended != nil {
			h.observeAndCheck(ctx, h.ended)
		}
		return err // nil if the orchestrator cannot make the call now
	}
	var said string
	var acted error
	how, failed := s.around(ctx, func(ctx context.Context) { said, acted = h.act(ctx, s) })
	if said == impossible && failed == nil {
		return nil
	}
	if how == Killed {
		said, acted = " = killed", nil // the caller repeats the act
	}
	h.transcript.add("%s%s", s, said)
	harness.Must(errors.Join(acted, failed))
	h.observeAndCheck(ctx, nil)
	return nil
}

// fail ends the step with an error.
func fail(format string, args ...any) { harness.Must(fmt.Errorf(format, args...)) }

func (s Step) around(ctx context.Context, do func(context.Context)) (Mishap, error) {
	if s.Around == nil {
		do(ctx)
		return None, nil
	}
	return s.Around(ctx, do)
}

// Succeeded reports whether all calls of the last step answered OK.
func (h *History) Succeeded() bool {
	return !slices.ContainsFunc(h.ended, func(c ended) bool { return c.how != succeeded })
}

// Deviceless returns how many volumes were attached although the node got no device.
func (h *History) Deviceless() int { return h.count.bare }

// Doubt makes the model expect that a call in progress may still make its changes. So other steps
// may run meanwhile.
func (h *History) Doubt(s Step) {
	h.preparing.Lock()
	defer h.preparing.Unlock()
	h.world.doubts = append(h.world.doubts, s.intends()...)
}

// Wait waits until no process works on a call. Then the state is known, unless the rack is down.
func (h *History) Wait(ctx context.Context) error { return h.step(ctx, Step{op: wait}) }

// Transcript returns the text of the steps and their answers. ParseHistory can parse it.
func (h *History) Transcript() string { return "  " + strings.Join(h.transcript.lines, "\n  ") }

func (h *History) run(ctx context.Context, steps ...Step) {
	for _, s := range steps {
		harness.Must(h.Do(ctx, s))
	}
}

// observeAndCheck observes and checks the state, and adds unfinished calls to world.doubts.
func (h *History) observeAndCheck(ctx context.Context, calls []ended) {
	h.manipulation.apply(h)
	h.check(ctx, calls)
	for _, c := range calls {
		if c.how == openCall || c.how == unclear && h.world.rackDown {
			h.world.doubts = append(h.world.doubts, c.intends()...)
			h.doubtSince = 0
		}
	}
	h.doubtSince++
	if h.world.rackDown {
		return
	}
	var left []string
	for _, r := range harness.Got(h.env.Rack.Admin.Faults(ctx)) {
		if r.Fired == 0 {
			left = append(left, h.faultNames[r.ID])
		}
	}
	h.count.faults += len(h.world.faults) - len(left)
	h.world.faults = left
}

// transcript contains the steps that were done, with their answers.
type transcript struct {
	lines []string
	mu    sync.Mutex // guards lines during concurrent calls
}

func (t *transcript) add(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lines = append(t.lines, fmt.Sprintf(format, args...))
}

func (t *transcript) addOnce(line string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.last() != line {
		t.lines = append(t.lines, line)
	}
}

// last returns the last line, or "" if no step was done.
func (t *transcript) last() string {
	if len(t.lines) == 0 {
		return ""
	}
	return t.lines[len(t.lines)-1]
}

// make sends the calls of a step, and returns their results. It returns nil if the orchestrator
// cannot make the calls in this state.
func (h *History) make(ctx context.Context, s Step) ([]ended, error) {
	steps := s.calls()
	if !h.orchestrator.prepare(steps) {
		return nil, nil
	}
	before := h.world.seen
	var answers []answer
	how, err := s.around(ctx, func(ctx context.Context) { answers = h.send(ctx, steps) })
	if answers == nil { // the calls were not made
		h.transcript.add("%s", s)
		return nil, err
	}
	var calls []ended
	errs := []error{err}
	if s.mishap == Killed && s.Around == nil {
		h.count.restarts++
		errs = append(errs, h.env.driver(s).Start(ctx))
	}
	if how != None {
		s.mishap, steps[0].mishap = how, how
	}
	words := make([]string, len(steps))
	for i, one := range steps {
		a := answers[i]
		words[i] = fmt.Sprintf("%s = %s", one, shown(a.err))
		effects, allowed := h.world.expect(before, steps, i, a.err)
		if one.mishap == None && s.mishap == None {
			errs = append(errs, h.world.judge(*one, a.err, allowed))
		}
		if a.err != nil && h.Patient &&
			(one.mishap == None || one.mishap == Abandoned && !repeatable(a.err)) {
			errs = append(errs, fmt.Errorf("%s does not converge: %s", one.brief(), shown(a.err)))
		}
		h.orchestrator.learn(one, a)
		calls = append(calls, ended{*one, h.world.outcome(*one, a), effects})
	}
	h.transcript.add("%s", strings.Join(words, " || "))
	return calls, errors.Join(errs...)
}

// expect returns the effects that calls[i] may have had, and the codes that its answer may have.
// The parameter err is this answer's error, whose reason may allow a further code.
func (w *world) expect(before facts, calls []*Step, i int, err error) (effects []assign,
	allowed []codes.Code) {
	s, others := calls[i], slices.Delete(slices.Clone(calls), i, i+1)
	for _, state := range reachable(before, *s, others) {
		effects = append(effects, s.effects(state)...)
		allowed = append(allowed, w.codes(*s, state)...)
	}
	if len(others) == 1 || len(w.doubts) > 0 {
		allowed = append(allowed, codes.Aborted)
	}
	if time.Now().Before(w.open[s.target()]) && !s.op.onNode() &&
		harness.ReasonOf(status.Convert(err)) == "EffectUnknown" {
		allowed = append(allowed, codes.Unavailable)
	}
	if len(others) == 1 && others[0].op == createSnapshot && s.op.onNode() &&
		snapOf[others[0].snap] == s.vol {
		allowed = append(allowed, codes.Internal) // the snapshot reads the same device
	}
	return effects, allowed
}

// reachable returns the states in which a call may run while others work on the same objects: any
// of the others may have made their changes, in any order.
func reachable(before facts, s Step, others []*Step) []facts {
	different := map[string]*Step{}
	for _, other := range others {
		if slices.ContainsFunc(other.intends(), func(a assign) bool { return about(a.field, s) }) {
			different[other.brief()+other.id] = other
		}
	}
	states, known := []facts{before}, map[string]bool{fmt.Sprint(before): true}
	for i := 0; i < len(states); i++ {
		for _, other := range different {
			next := other.then(states[i])
			if text := fmt.Sprint(next); !known[text] {
				states, known[text] = append(states, next), true
			}
		}
	}
	return states
}

// judge returns an error if an answer is not allowed. If a stage finds no device after an attach,
// its answer has to contain the cause and both remedies.
func (w *world) judge(s Step, err error, allowed []codes.Code) error {
	code := status.Code(err)
	if !slices.Contains(allowed, code) {
		slices.Sort(allowed)
		return fmt.Errorf("%s answered %s, the model allows %v", s.brief(), shown(err),
			slices.Compact(allowed))
	}
	if s.op != stage || code != codes.NotFound || len(w.doubts) > 0 || !w.place(s).bare {
		return nil
	}
	for _, part := range []string{"DeviceNotFound: ", "recorded an attach and did not carry it out",
		"stop the instance and start it again", "detach the disk while the instance is stopped"} {
		if message := status.Convert(err).Message(); !strings.Contains(message, part) {
			return fmt.Errorf("%s answered %q, without %q", s.brief(), message, part)
		}
	}
	return nil
}

func (s Step) brief() string {
	s.mishap, s.with = None, nil
	return s.String()
}

func shown(err error) string {
	if err == nil {
		return "OK"
	}
	return fmt.Sprintf("%s (%.300s)", status.Code(err), status.Convert(err).Message())
}

func (w *world) outcome(s Step, a answer) outcome {
	switch {
	case s.mishap == Overtaken:
		return openCall
	case a.err == nil:
		return succeeded
	case s.mishap == Abandoned, s.mishap == Killed && !s.op.onNode():
		return openCall
	case s.mishap != None, !s.op.onNode() && (len(w.faults) > 0 || w.rackDown ||
		status.Code(a.err) == codes.Unavailable):
		return unclear
	}
	return refusedCall
}

type answer struct {
	reply any // a response of CSI
	err   error
}

// send makes the calls at the same time, and causes their mishaps.
func (h *History) send(ctx context.Context, steps []*Step) []answer {
	answers := make([]answer, len(steps))
	var calls sync.WaitGroup
	for i, s := range steps {
		calls.Go(func() {
			limit := patience
			if h.Patient {
				limit = 3 * time.Minute // as kubelet: a call that reads a whole disk may take long
			}
			ctx, cancel := context.WithTimeout(ctx, limit)
			defer cancel()
			if s.mishap == Abandoned {
				defer time.AfterFunc(s.after, cancel).Stop()
			}
			backoff := harness.Backoff{Max: 100 * time.Millisecond}
			for {
				reply, err := h.manipulation.call(ctx, h, *s)
				answers[i] = answer{reply, err}
				h.count.calls.Add(1)
				patient := h.Patient && s.Around == nil && s.mishap == None && repeatable(err)
				if !patient && (len(steps) <= 2 || !busy(*s, err)) || backoff.Wait(ctx) != nil {
					return
				}
				if h.Patient {
					h.transcript.addOnce(fmt.Sprintf("%s = %s", s, shown(err)))
				}
				h.count.aborted.Add(1)
			}
		})
	}
	if s := *steps[0]; s.mishap == Killed || s.mishap == rackDies {
		h.killLater(ctx, s)
	}
	calls.Wait()
	return answers
}

// busy reports whether a call was aborted because another call works on the same object. In a step
// of more than two calls, send repeats such a call.
func busy(s Step, err error) bool {
	reasons := []string{"OperationPending", "DiskBusy"}
	if s.op == deleteSnapshot {
		reasons = append(reasons, "SnapshotNotReady")
	}
	return status.Code(err) == codes.Aborted &&
		slices.Contains(reasons, harness.ReasonOf(status.Convert(err)))
}

func repeatable(err error) bool {
	return slices.Contains([]codes.Code{codes.Aborted, codes.Unavailable, codes.DeadlineExceeded,
		codes.Canceled, codes.Internal, codes.FailedPrecondition}, status.Code(err))
}

// driver returns the driver that serves the call, or that the step kills or stops.
func (env *Environment) driver(s Step) *harness.Plugin {
	if s.op.onNode() || s.op == killNode || s.op == endNode {
		return env.Nodes[s.node]
	}
	return env.Controllers[s.ctl-1]
}

func (h *History) killLater(ctx context.Context, s Step) {
	select {
	case <-ctx.Done():
	case <-time.After(s.after):
	}
	if s.mishap == rackDies {
		h.env.Rack.Kill()
		h.world.rackDown = true
		return
	}
	h.env.driver(s).Kill()
}

// manipulation falsifies answers, or the state of the rack or a node, without the orchestrator's
// knowledge. A nil *manipulation changes nothing.
type manipulation struct {
	// answer, if not nil, is called instead of the driver. Its parameter real makes the original call.
	answer func(h *History, s Step, real func() (any, error)) (any, error)
	// action, if not nil, runs after the step whose line begins with the field "when", but before
	// the state is observed.
	when   string
	action func(h *History) error
}

func (m *manipulation) call(ctx context.Context, h *History, s Step) (any, error) {
	real := func() (any, error) { return h.call(ctx, s) }
	if m == nil || m.answer == nil {
		return real()
	}
	return m.answer(h, s, real)
}

func (m *manipulation) apply(h *History) {
	if m != nil && m.action != nil && strings.HasPrefix(h.transcript.last(), m.when) {
		harness.Must(m.action(h))
	}
}
