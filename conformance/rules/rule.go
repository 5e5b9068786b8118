package rules

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// Rule is one thing that the driver or the simulator believes of a rack.
type Rule struct {
	// ID is "A" and two digits. IDs are never used again.
	ID string
	// Says is what a rack does, in a sentence or a few, as Markdown.
	Says string
	// Why is who relies on it and for what. It does not say what the driver calls before: see Look.
	Why string
	// Look is the operation by which the driver looks at the object right before the first of Calls,
	// or "". The specs compare it with the calls that the driver makes.
	Look string
	// Source is where it is known from: read in the source of the rack, tested by the rack's own
	// tests, or inferred.
	Source string
	// Calls are the operations that the check is about. A check that did not make them has shown
	// nothing, whatever it returns.
	Calls []string
	// Check demands it of a rack.
	Check func(*Check)
}

// All lists the rules in the order of their IDs.
func All() []Rule {
	all := slices.Concat(wireRules, diskRules, attachRules, snapshotRules, instanceRules, guestRules)
	slices.SortFunc(all, func(a, b Rule) int { return strings.Compare(a.ID, b.ID) })
	return all
}

// Status is how a check ended.
type Status string

// The ways in which a check ends.
const (
	// Passed is a check that was carried out, and the rack does what the rule says.
	Passed Status = "passed"
	// Failed is a check that found something else, or could not be carried out.
	Failed Status = "failed"
	// Blocked is a check that a rack without hot-plug does not let anybody make.
	Blocked Status = "blocked"
	// NotTested is a check whose situation could not be brought about.
	NotTested Status = "not tested"
)

// Result is how a rule's check ended on a rack.
type Result struct {
	Status Status
	// Reason is what was expected and what was found, or why the rule was not tested.
	Reason string
	// Undecided means that the rule was not tested because something came between the check and the
	// rack, such as a limit of requests; another run may decide it.
	Undecided bool
	// Tries is how often the check was made. It is made again when it failed and an answer was
	// missing, or said that the rack was busy (429, 502, 503, 504) or has failed (500).
	Tries int
	// Exchanges are all that the check asked of the rack, with the answers.
	Exchanges []Exchange
	Took      time.Duration
}

// triesOf returns how often a check is made that had these answers.
func triesOf(exchanges []Exchange) int {
	const disturbed, lasting = 8, 2
	most := 1
	for _, e := range exchanges {
		switch {
		case e.disturbed() && mayRepeat(e):
			return lasting // the request was repeated, for long
		case e.disturbed():
			most = disturbed
		// What a rack in order undoes when it fails, it does the next time (A19).
		case e.Status == http.StatusInternalServerError:
			most = max(most, lasting)
		}
	}
	return most
}

// Run checks a rule.
func (r *Rack) Run(ctx context.Context, rule Rule) Result {
	began := time.Now()
	var result Result
	pause := harness.Backoff{Next: 200 * time.Millisecond, Max: 2 * time.Second}
	for {
		r.recorder.take()
		c := &Check{Rack: r, ctx: ctx, rule: rule}
		c.run()
		now := r.recorder.take()
		result.Tries++
		result.Exchanges = append(result.Exchanges, now...)
		result.Status, result.Reason = c.verdict(now)
		if result.Status != Failed || ctx.Err() != nil {
			break
		}
		if result.Tries < triesOf(now) && !c.unclean && pause.Wait(ctx) == nil && r.answers(ctx) {
			continue
		}
		if why := c.undecided(now); why != "" && ctx.Err() == nil {
			result.Status, result.Undecided = NotTested, true
			result.Reason = fmt.Sprintf("%s; what the check found in try %d therefore says nothing: %s",
				why, result.Tries, result.Reason)
		}
		break
	}
	result.Exchanges = append(result.Exchanges, r.recorder.take()...)
	result.Took = time.Since(began)
	return result
}

// answers reports whether the rack answers, as soon as it does, and has time to.
func (r *Rack) answers(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, r.recorder.patience)
	defer cancel()
	_, err := r.Client.Ping(ctx)
	return !IsUnanswered(err) && !IsBusy(err)
}

// disturbed reports whether the answer that counts is missing, or says that the rack is busy.
func (e Exchange) disturbed() bool {
	return !e.repeated && (e.unanswered() || MeansBusy(e.Status))
}

// undecided returns what came between a check that failed and the rack, or "".
func (c *Check) undecided(exchanges []Exchange) string {
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
		// A rack's own 503 is its word, if it repeats it.
		case e.disturbed() && (e.Status != http.StatusServiceUnavailable || e.ErrorCode == ""):
			return fmt.Sprintf("%s was answered HTTP %d: the rack is busy", what, e.Status)
		case e.Status == http.StatusInsufficientStorage && !c.Simulated():
			if left := c.storageLeft(); left < quotaNeeded {
				return fmt.Sprintf("%s was answered HTTP 507: the silo's quota has %d GiB left, and a check "+
					"needs up to %d", what, left/GiB, quotaNeeded/GiB)
			}
		}
	}
	return ""
}

// quotaNeeded is how much of the silo's quota the checks have at one time, at most.
const quotaNeeded = 16 * GiB

// storageLeft is how much of the silo's quota is left; 0 if the rack does not tell.
func (c *Check) storageLeft() int64 {
	use, err := c.Client.UtilizationView(c.ctx)
	if err != nil {
		return 0
	}
	return int64(use.Capacity.Storage) - int64(use.Provisioned.Storage)
}

// verdict is how the check ended, and why.
func (c *Check) verdict(exchanges []Exchange) (Status, string) {
	switch {
	case len(c.problems) > 0:
		return Failed, strings.Join(c.problems, "\n")
	case c.status != "":
		return c.status, c.reason
	}
	for _, operation := range c.rule.Calls {
		if !slices.ContainsFunc(exchanges, func(e Exchange) bool {
			return e.Operation == operation && e.Status != 0
		}) {
			return Failed, fmt.Sprintf("the check of %s has had no answer to %s, which it is about",
				c.rule.ID, operation)
		}
	}
	return Passed, ""
}

// MeansBusy reports whether an HTTP status says that the rack, or a proxy in front of it, is busy.
func MeansBusy(status int) bool {
	return slices.Contains([]int{429, 502, 503, 504}, status)
}

// Check is one check that is under way.
type Check struct {
	*Rack
	ctx  context.Context
	rule Rule
	// problems are what was found to be otherwise.
	problems []string
	// status and reason are set when the check cannot be made.
	status Status
	reason string
	// withoutID means that an answer had no x-request-id.
	withoutID bool
	// unclean means that something is left that the check has made.
	unclean bool
	// undo are the steps that remove what the check made, the last first.
	undo []func(context.Context) error
}

// over ends a check from within.
type over struct{}

// run makes the check and removes what it made, also when the run is interrupted.
func (c *Check) run() {
	defer c.clean()
	defer func() {
		ended := recover()
		if _, ok := ended.(over); !ok && ended != nil {
			// A field that a rack always has, and this one has not.
			c.Errorf("the check could not go on: %v\n%s", ended, debug.Stack())
		}
	}()
	c.rule.Check(c)
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
			return // the rack is away
		}
	}
}

// cleanTimeout is for what a check has to remove.
const cleanTimeout = 2 * time.Minute

// Context ends when the run is interrupted.
func (c *Check) Context() context.Context { return c.ctx }

// Errorf notes that the rack does something else. The check goes on.
func (c *Check) Errorf(format string, args ...any) {
	c.problems = append(c.problems, fmt.Sprintf(format, args...))
}

// Fatalf notes that the rack does something else, and ends the check.
func (c *Check) Fatalf(format string, args ...any) {
	c.Errorf(format, args...)
	panic(over{})
}

// NotTested ends the check of a rule whose situation cannot be brought about here.
func (c *Check) NotTested(format string, args ...any) {
	c.status, c.reason = NotTested, fmt.Sprintf(format, args...)
	panic(over{})
}

// Blocked ends the check of a rule that needs hot-plug on a rack without it.
func (c *Check) Blocked(format string, args ...any) {
	c.status, c.reason = Blocked, fmt.Sprintf(format, args...)
	panic(over{})
}

// Cleanup adds a step that removes something when the check is over. Not finding it is no mistake.
func (c *Check) Cleanup(step func(context.Context) error) { c.undo = append(c.undo, step) }

// Must returns the value, or ends the check with what the step was and the rack's refusal.
func Must[T any](c *Check, step string) func(T, error) T {
	return func(value T, err error) T {
		c.must(step, err)
		return value
	}
}

func (c *Check) must(step string, err error) {
	if err != nil {
		c.Fatalf("%s: %s", step, Brief(err))
	}
}

// Patiently repeats a step that may be repeated while the rack says that it is busy, and for a
// while when it does not answer, or fails.
func Patiently(ctx context.Context, step func(context.Context) error) error {
	away := time.Now().Add(requestPatience)
	backoff := harness.Backoff{Next: 200 * time.Millisecond, Max: 2 * time.Second}
	for {
		err := step(ctx)
		again := IsBusy(err) || mayBeDone(err) && time.Now().Before(away)
		if !again || backoff.Wait(ctx) != nil {
			return err
		}
	}
}
