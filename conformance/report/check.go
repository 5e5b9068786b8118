package report

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
)

// Group is the results of one group of a report, in their order.
type Group struct {
	Name    string
	Results []Result
}

// Groups returns the groups, in the order of their first results.
func (r *Report) Groups() []Group {
	var groups []Group
	for _, result := range r.Results {
		i := slices.IndexFunc(groups, func(g Group) bool { return g.Name == result.Group })
		if i < 0 {
			i = len(groups)
			groups = append(groups, Group{Name: result.Group})
		}
		groups[i].Results = append(groups[i].Results, result)
	}
	return groups
}

// Count returns the number of results with the status.
func (r *Report) Count(status Status) int { return Group{Results: r.Results}.Count(status) }

// Count returns the number of the group's results with the status.
func (g Group) Count(status Status) (n int) {
	for _, result := range g.Results {
		if result.Status == status {
			n++
		}
	}
	return n
}

// Seconds returns the total duration of the group's results, in seconds.
func (g Group) Seconds() (sum float64) {
	for _, result := range g.Results {
		sum += result.Seconds
	}
	return sum
}

// Check returns nil if what the report says is consistent: every result occurs once, every result
// that did not pass has a reason, the latencies agree with their counts, and the verdict follows
// from the results. Otherwise the error names at most ten faults, one on each line. The schema has
// what each value may be.
func (r *Report) Check() error {
	var wrong []error
	if !r.Run.Ended.IsZero() && r.Run.Ended.Before(r.Run.Began) {
		wrong = append(wrong, fmt.Errorf("the run ended (%s) before it began (%s)",
			r.Run.Ended, r.Run.Began))
	}
	wrong = append(wrong, r.checkResults()...)
	wrong = append(wrong, r.checkCalls()...)
	if err := r.checkVerdict(); err != nil {
		wrong = append([]error{err}, wrong...)
	}
	if more := len(wrong) - 10; more > 0 {
		wrong = append(wrong[:10], fmt.Errorf("and %d more", more))
	}
	return errors.Join(wrong...)
}

func (r *Report) checkResults() (wrong []error) {
	seen := map[[2]string]bool{}
	for _, result := range r.Results {
		title := result.title()
		switch key := result.key(); {
		case key[1] == "":
			wrong = append(wrong, fmt.Errorf("%s: a result needs an id or a name", title))
		case seen[key]:
			wrong = append(wrong, fmt.Errorf("%s is there twice", title))
		default:
			seen[key] = true
		}
		switch {
		case result.Status == Passed && result.Reason != "":
			wrong = append(wrong, fmt.Errorf("%s passed, but has a reason", title))
		case result.Status != Passed && result.Reason == "":
			wrong = append(wrong, fmt.Errorf("%s did not pass, but has no reason", title))
		case result.Status == Passed && len(result.Extent) == 0:
			wrong = append(wrong, fmt.Errorf("%s passed, but does not state how far it looked", title))
		}
		for _, m := range result.Extent {
			if m.Of > 0 && m.Looked > m.Of {
				wrong = append(wrong, fmt.Errorf("%s looked at %d of %d of %q", title, m.Looked, m.Of, m.What))
			}
		}
	}
	return wrong
}

// key identifies a result in two reports.
func (r Result) key() [2]string { return [2]string{r.Group, cmp.Or(r.ID, r.Name)} }

func (r Result) title() string {
	switch {
	case r.ID == "":
		return r.Group + ": " + r.Name
	case r.Name == "":
		return r.Group + " " + r.ID
	}
	return r.Group + " " + r.ID + " " + r.Name
}

func (r *Report) checkCalls() (wrong []error) {
	seen := map[string]bool{}
	for _, calls := range r.Calls {
		name := string(calls.Kind) + " " + calls.Operation
		samples := calls.Milliseconds
		switch {
		case seen[name]:
			wrong = append(wrong, fmt.Errorf("calls of %s are there twice", name))
		case calls.Failed > calls.Count:
			wrong = append(wrong, fmt.Errorf("calls of %s: %d of %d failed",
				name, calls.Failed, calls.Count))
		case len(samples) != min(calls.Count, maxSamples):
			wrong = append(wrong, fmt.Errorf("calls of %s: %d latencies for %d calls, expected %d",
				name, len(samples), calls.Count, min(calls.Count, maxSamples)))
		case !slices.IsSorted(samples):
			wrong = append(wrong, fmt.Errorf("calls of %s: the latencies are not sorted", name))
		}
		seen[name] = true
	}
	return wrong
}

func (r *Report) checkVerdict() error {
	failed, interrupted, blocked := r.Count(Failed), r.Count(Interrupted), r.Count(Blocked)
	faults := failed + len(r.Ledger.Left) + len(r.Witness.Findings)
	says := fmt.Sprintf("the verdict is %q, but %d results passed, %d failed, %d were interrupted, "+
		"%d blocked; %d objects were left and the witness has %d findings", r.Verdict,
		r.Count(Passed), failed, interrupted, blocked, len(r.Ledger.Left), len(r.Witness.Findings))
	var follows bool
	switch r.Verdict {
	case Conforms:
		follows = faults+interrupted+blocked == 0 && r.Count(Passed) > 0
	case BlockedByRack:
		follows = faults+interrupted == 0 && blocked > 0
	case Incomplete, InterruptedRun:
		follows = failed == 0
	case DoesNotConform:
		follows = faults > 0
	}
	if !follows {
		return errors.New(says)
	}
	return nil
}
