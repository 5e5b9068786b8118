// Package rules has the assumptions of the driver and the simulator about a rack's API, as numbered
// rules that can be checked on any rack.
//
// A [Rule] has an ID (A01, A02, …) and a check. It states what a rack does, why that matters, and a
// source. [All] lists the rules of ASSUMPTIONS.md. The simulator's code cites the ID of a rule
// where it implements the rule, and a test compares the two.
//
// A check uses Oxide's own client, or plain HTTP if that client hides the answer. It creates
// objects in one project, under the mark of its run, and removes them. [TestedRack.Run] runs a
// check and returns a [Result] with every request and answer:
//
//	rack, err := rules.Open(rules.Config{Host: …, Token: …, Project: …, Mark: "1a2b3c4d"})
//	for _, rule := range rules.All() {
//		result := rack.Run(ctx, rule)
//		…
//	}
//	err = rack.Close(ctx)
//
// Some situations cannot be caused from outside, such as a saga that fails halfway, or a rack
// without space. The rules about them are checked on the simulator, through its admin listener. On
// a real rack their result is "not tested".
//
// # Writing a check
//
// A check is a function that gets a [Check], in the table of its subject. Each request returns an
// outcome, from which the check demands a value or a refusal. A check ends at the first problem
// after which it cannot continue.
//
// If the driver reads an object right before it requests a rule's operation, the rule says "The
// driver looks first" and names the read. A test compares the rule with the driver's calls. A
// mutation in package simulator/broken makes the simulator break the rule. If that endangers the
// driver, the mutation's DriverSays is the reason of the error that the driver must return.
//
// The tests in faults_test.go test the checks. They alter the fields of the rack's answers, one at
// a time: a check must fail, or the table irrelevant states why nobody relies on the field. They
// also apply every fault to the requests of every operation. A fault that the network or a healthy
// rack may cause must fail no check. Every other fault must fail a check, or leave its rule
// untested.
//
// The package does not use Ginkgo, and uses the rack only through its API.
package rules

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net/http"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// Rule is one assumption about racks, a row of ASSUMPTIONS.md.
type Rule struct {
	// ID is "A" and two digits. It is never used for another rule.
	ID string
	// Says states what a rack does. Why names the code that relies on it, and the code's purpose.
	// Source names the evidence. All are Markdown.
	Says, Why, Source string
	// Calls are the operations that the check tests. Without an answer to each of them the check
	// fails, because it has proved nothing.
	Calls []string
	Check func(*Check)
}

// Status is the status of a result.
type Status = report.Status

const passed, failed, blocked, notTested = report.Passed, report.Failed, report.Blocked,
	report.NotTested

// Result is the result of a rule's check.
type Result struct {
	// Status is Passed, Failed, Blocked on a rack without hot-plug, or NotTested if the check could
	// not create the situation that it tests. Extent is only the extent of the last try.
	report.Result
	// Undecided means that something disturbed the check, such as a limit of requests, so that the
	// rule was not tested. Another run may be able to test it.
	Undecided bool
	Exchanges []RecordedCall
}

func triesOf(exchanges []RecordedCall) int {
	const disturbed, lasting = 8, 2
	most := 1
	for _, e := range exchanges {
		switch {
		case e.disturbed() && mayRepeat(e):
			return lasting // the recorder has already repeated the request
		case e.disturbed():
			most = disturbed
		// Try again: a healthy rack undoes a failed creation, and the next one may succeed (A19).
		case e.Status == http.StatusInternalServerError:
			most = max(most, lasting)
		}
	}
	return most
}

// Run runs the check of a rule, and repeats a failed check if the rack was busy (429, 502, 503,
// 504), failed (500) or did not answer.
func (r *TestedRack) Run(ctx context.Context, rule Rule) Result {
	began := time.Now()
	var result Result
	pause := harness.Backoff{Next: min(r.pause, 200*time.Millisecond), Max: r.pause}
	for {
		r.recorder.take()
		c := &Check{TestedRack: r, ctx: ctx, rule: rule}
		c.run()
		now := r.recorder.take()
		result.Tries++
		result.Exchanges = append(result.Exchanges, now...)
		result.Status, result.Reason = c.verdict(now)
		result.Extent = c.extentOf(now)
		if result.Status != failed || ctx.Err() != nil {
			break
		}
		if result.Tries < triesOf(now) && !c.unclean && pause.Wait(ctx) == nil && r.answers(ctx) {
			continue
		}
		if why := c.undecided(now); why != "" && ctx.Err() == nil {
			result.Status, result.Undecided = notTested, true
			result.Reason = fmt.Sprintf("%s; what the check found in try %d therefore says nothing: %s",
				why, result.Tries, result.Reason)
		}
		break
	}
	result.Exchanges = append(result.Exchanges, r.recorder.take()...)
	result.Seconds = time.Since(began).Seconds()
	return result
}

// answers returns false if the rack does not answer in time, or answers that it is busy.
func (r *TestedRack) answers(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, r.recorder.patience)
	defer cancel()
	_, err := r.Client.Ping(ctx)
	return !IsUnanswered(err) && !IsBusy(err)
}

// disturbed reports whether the rack was busy or did not answer, and the request was not repeated.
func (e RecordedCall) disturbed() bool {
	return !e.repeated && (e.unanswered() || MeansBusy(e.Status))
}

func (c *Check) undecided(exchanges []RecordedCall) string {
	for _, e := range exchanges {
		what := e.Method + " " + e.Path
		switch {
		case errors.Is(e.failure, ErrNotSent):
			return fmt.Sprintf("%s: %s", what, e.failure)
		case e.location != "" && redirects(e.Status):
			return fmt.Sprintf("%s was redirected to %s: set OXIDE_HOST to where the rack is", what,
				e.location)
		case e.disturbed() && e.unanswered():
			return fmt.Sprintf("%s had no answer: %s", what, e.failure)
		// A 503 with an error code is the rack's own, and counts as its answer if it persists.
		case e.disturbed() && (e.Status != http.StatusServiceUnavailable || e.ErrorCode == ""):
			return fmt.Sprintf("%s was answered HTTP %d: the rack is busy", what, e.Status)
		// Only the check of A39 expects this lock.
		case e.Status == http.StatusConflict && c.rule.ID != "A39" &&
			strings.Contains(e.Answer, "volume repair lock"):
			return what + " was answered HTTP 409, volume repair lock: the rack seems to replace a region " +
				"of the disk, as after the loss of a drive; try again when that is done"
		case e.Status == http.StatusInsufficientStorage && !c.simulated():
			left := int64(0) // if the rack does not report it
			if use, err := c.Client.UtilizationView(c.ctx); err == nil {
				left = int64(use.Capacity.Storage) - int64(use.Provisioned.Storage)
			}
			if left < quotaNeeded {
				return fmt.Sprintf("%s was answered HTTP 507: the silo's quota has %d GiB left, and a check "+
					"needs up to %d", what, left/GiB, quotaNeeded/GiB)
			}
		}
	}
	return ""
}

// quotaNeeded is the most that the checks use of the silo's quota at one time.
const quotaNeeded = 16 * GiB

func (c *Check) verdict(exchanges []RecordedCall) (Status, string) {
	switch {
	case len(c.problems) > 0:
		return failed, strings.Join(c.problems, "\n")
	case c.status != "":
		return c.status, c.reason
	}
	for _, operation := range c.rule.Calls {
		if !slices.ContainsFunc(exchanges, func(e RecordedCall) bool {
			return e.Operation == operation && e.Status != 0
		}) {
			return failed, fmt.Sprintf("the check of %s has had no answer to %s, which it is about",
				c.rule.ID, operation)
		}
	}
	return passed, ""
}

// extentOf returns the kinds of answers to the operations that the check tests, followed by
// c.extent. Answers of a rack that is busy or fails count only if there are no others.
func (c *Check) extentOf(exchanges []RecordedCall) (all report.Extent) {
	for _, failures := range []bool{false, true} {
		for _, e := range exchanges {
			if slices.Contains(c.rule.Calls, e.Operation) && e.Status != 0 &&
				leavesOpen(e.Status) == failures {
				all.Answer(e.Operation, strings.TrimSpace(fmt.Sprint(e.Status, " ", e.ErrorCode)))
			}
		}
		if len(all) > 0 {
			break
		}
	}
	for _, m := range c.extent {
		all.Look(m)
	}
	return all
}

// MeansBusy reports whether an HTTP status means that the rack, or a proxy in front of it, is busy.
func MeansBusy(status int) bool {
	return slices.Contains([]int{429, 502, 503, 504}, status)
}

// Check is one running check.
type Check struct {
	*TestedRack
	ctx  context.Context
	rule Rule
	// problems has the differences found. status and reason are set if the check ends early.
	problems  []string
	status    Status
	reason    string
	extent    report.Extent
	withoutID bool // an answer had no x-request-id
	unclean   bool // an object of the check is left
	// The last step of undo runs first.
	undo []func(context.Context) error
}

type over struct{}

// run runs the check and removes its objects, even after an interrupt.
func (c *Check) run() {
	defer c.clean()
	defer func() {
		ended := recover()
		if _, ok := ended.(over); !ok && ended != nil {
			// A check panics if an answer lacks a field that every rack has.
			c.errorf("the check could not go on: %v\n%s", ended, debug.Stack())
		}
	}()
	c.rule.Check(c)
	for i := range c.extent {
		if m := &c.extent[i]; m.Unit == situations && c.simulated() {
			m.Looked, m.Words = m.Of, ""
		}
	}
}

func (c *Check) clean() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx), c.cleaning)
	defer cancel()
	for _, step := range slices.Backward(c.undo) {
		err := Patiently(ctx, step)
		if err != nil {
			c.unclean = true
			c.problems = append(c.problems, "remove what the check made: "+Brief(err))
		}
		if IsUnanswered(err) && !c.answers(ctx) {
			return // the rack does not answer any more
		}
	}
}

const cleanTimeout = 2 * time.Minute

func (c *Check) errorf(format string, args ...any) {
	c.problems = append(c.problems, fmt.Sprintf(format, args...))
}

func (c *Check) fatalf(format string, args ...any) {
	c.errorf(format, args...)
	panic(over{})
}

func (c *Check) notTested(format string, args ...any) {
	c.status, c.reason = notTested, fmt.Sprintf(format, args...)
	panic(over{})
}

// blocked ends a check that needs hot-plug, because the rack has none.
func (c *Check) blocked(format string, args ...any) {
	c.status, c.reason = blocked, fmt.Sprintf(format, args...)
	panic(over{})
}

// cleanup adds a step that runs after the check. It must succeed if its object does not exist.
func (c *Check) cleanup(step func(context.Context) error) { c.undo = append(c.undo, step) }

type outcome[T any] struct {
	c     *Check
	step  string // describes the request
	value T
	err   error
}

// asked makes an outcome of a call: asked(c.Client.DiskView(…))(c, "read disk %s", id).
func asked[T any](value T, err error) func(c *Check, step string, args ...any) outcome[T] {
	return func(c *Check, step string, args ...any) outcome[T] {
		return outcome[T]{c, fmt.Sprintf(step, args...), value, err}
	}
}

func (c *Check) done(err error, step string, args ...any) outcome[any] {
	return asked[any](nil, err)(c, step, args...)
}

func (o outcome[T]) as(what string) outcome[T] {
	o.step += ": " + what
	return o
}

func (o outcome[T]) must() T {
	o.c.must(o.step, o.err)
	return o.value
}

// refused demands exactly this refusal.
func (o outcome[T]) refused(want Refused) {
	switch found := refusedBy(o.err); {
	case o.err == nil:
		o.c.errorf("%s: expected %s; the rack has accepted it", o.step, want)
	case found == Refused{}:
		o.c.errorf("%s: expected %s; found %s", o.step, want, Brief(o.err))
	default:
		equal(o.c, o.step, found, want)
	}
}

func (c *Check) must(step string, err error) {
	if err != nil {
		c.fatalf("%s: %s", step, Brief(err))
	}
}

// Patiently repeats a step while the rack says that it is busy. After a 500 or no answer, it gives
// up once requestPatience has passed. A read that shows another object is not repeated.
func Patiently(ctx context.Context, step func(context.Context) error) error {
	away := time.Now().Add(requestPatience)
	backoff := harness.Backoff{Next: 200 * time.Millisecond, Max: 2 * time.Second}
	for {
		err := step(ctx)
		// The client's error has the text of errAnother, but does not wrap it, so errors.Is fails.
		shown := err != nil && strings.Contains(err.Error(), errAnother.Error())
		again := IsBusy(err) || mayBeDone(err) && !shown && time.Now().Before(away)
		if !again || backoff.Wait(ctx) != nil {
			return err
		}
	}
}

func (c *Check) fault(f adminapi.Fault) {
	f.Times = 1
	id, err := c.Admin.AddFault(c.ctx, f)
	c.must("let the simulated rack fail", err)
	c.cleanup(func(ctx context.Context) error {
		faults, err := c.Admin.Faults(ctx)
		for _, f := range faults {
			if f.ID == id { // a restart may have removed it
				err = c.Admin.RemoveFault(ctx, id)
			}
		}
		return err
	})
}

// Switch changes a switch of a simulated rack, by its JSON name, until the check ends.
func (c *Check) Switch(name string, value any) {
	now, err := c.Admin.Switches(c.ctx)
	c.must("read the simulated rack's switches", err)
	before := fieldsOf[map[string]any](c, now)
	c.cleanup(func(ctx context.Context) error {
		return c.Admin.Switch(ctx, map[string]any{name: before[name]})
	})
	c.must("change the simulated rack's "+name, c.Admin.Switch(c.ctx, map[string]any{name: value}))
}

type underway[T any] struct {
	c          *Check
	what, hold string
	done       chan struct{}
	answer     T
	err        error
	problems   int // the number of problems found before the request
	seen       T   // the object as a read shows it while the request is unanswered
	// carriedOut, if not nil, reports whether the rack has carried out the request.
	carriedOut func() bool
}

// begin sends a request that creates an object, and waits until a read shows the object. A
// simulated rack completes the request only after the check has called end(). When the check is
// over, the object is removed, whether its creation was confirmed or not.
func begin[T any](c *Check, k kind[T], name oxide.Name, what, hold string,
	send func() (T, error)) *underway[T] {
	u := &underway[T]{c: c, what: what, hold: hold, problems: len(c.problems)}
	k.removeNamed(c, name)
	c.cleanup(func(context.Context) error {
		if u.done != nil {
			<-u.done
		}
		return nil
	})
	if c.simulated() {
		c.Switch(hold, "1h")
	}
	u.done = make(chan struct{})
	go func() {
		defer close(u.done)
		u.answer, u.err = send()
	}()
	others := false
	err := harness.Await(c.ctx, patience, func() (err error) {
		if u.over() {
			return nil
		}
		u.seen, err = k.read(c.ctx, string(name))
		others = err == nil
		return err
	})
	switch {
	case u.over() && u.err != nil:
		c.must(what, u.err)
	case u.over() && !c.simulated():
		c.notTested("the rack ended it before anybody could look: %s", what)
	case err == nil && !others:
		c.fatalf("%s: expected that others see it being made; found it made before", what)
	}
	c.must(what+": expected that others see it being made", err)
	return u
}

func (u *underway[T]) over() bool {
	select {
	case <-u.done:
		return true
	default:
		return false
	}
}

// end makes a simulated rack complete the request, and returns its outcome. If a real rack has
// completed the request already, this may be the cause of the problems found since begin(). So end
// drops these problems, and ends the check as not tested.
func (u *underway[T]) end() outcome[T] {
	c := u.c
	if c.simulated() {
		c.must("end the hold of the simulated rack", c.Admin.Switch(c.ctx, map[string]any{u.hold: "0s"}))
	} else if len(c.problems) > u.problems && (u.over() || u.carriedOut != nil && u.carriedOut()) {
		c.problems = c.problems[:u.problems]
		c.notTested("the rack ended it before everything could be looked at: %s", u.what)
	}
	select {
	case <-u.done:
	case <-c.ctx.Done():
		c.must(u.what, c.ctx.Err())
	}
	return asked(u.answer, u.err)(c, u.what)
}

//go:embed ASSUMPTIONS.md
var assumptions string

type tested struct {
	id, calls string
	check     func(*Check)
}

var table = slices.Concat(ofDisks, ofGuests, ofInstances, ofLists, ofPlain, ofSnapshots)

// All lists the rules of ASSUMPTIONS.md in the order of their IDs.
func All() []Rule {
	var all []Rule
	for line := range strings.Lines(assumptions) {
		cells := strings.Split(strings.Trim(line, "| \n"), " | ")
		if len(cells) != 4 || cells[0][0] != 'A' {
			continue
		}
		rule := Rule{ID: cells[0], Says: cells[1], Why: cells[2], Source: cells[3]}
		for _, row := range table {
			if row.id == rule.ID {
				rule.Calls, rule.Check = strings.Fields(row.calls), row.check
			}
		}
		all = append(all, rule)
	}
	slices.SortFunc(all, func(a, b Rule) int { return strings.Compare(a.ID, b.ID) })
	return all
}
