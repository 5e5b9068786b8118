package report

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// A change of latency is reported only if it reaches these limits.
const (
	// enoughCalls is the number of calls of an operation that each report needs.
	enoughCalls = 20
	// muchSlower is the least ratio of the larger to the smaller median, and muchLater the least
	// difference in milliseconds.
	muchSlower = 1.5
	muchLater  = 1.0
)

// Difference is the difference between two reports, A (the earlier one) and B.
type Difference struct {
	// VerdictA and VerdictB are equal if the verdict did not change.
	VerdictA, VerdictB Verdict
	// Facts are the differences of rack, versions and run, except names and times.
	Facts []FactChange
	// Same counts the results whose status is the same in both.
	Same int
	// Worsened are results that passed in A and not in B, or that failed in B and not in A. Improved
	// are results that passed in B and not in A. Other are results that changed between blocked, not
	// tested and interrupted, or from failed to one of them; nobody has seen that such a result is
	// better now.
	Worsened, Improved, Other []ResultChange
	// Shrunk are the results with the same status whose test looked at less in B, with what. They
	// count as worse unless one of the racks is simulated and the other is not (OtherKind).
	Shrunk    []Shrunk
	OtherKind bool
	// New are the results of B alone, and Gone those of A alone.
	New, Gone []Result
	// NewGroups and GoneGroups count the results of groups that the other report was not to run and
	// does not have. New has only the failed results of these groups.
	NewGroups, GoneGroups map[string]int
	// Latencies are the operations with a large change of the median.
	Latencies []LatencyChange
	// Compared counts the operations with enough calls in both reports, TooFew those with too few,
	// and OneSided those that only one report has.
	Compared, TooFew, OneSided int
	// LeftA, LeftB, FindingsA and FindingsB count the objects that were left and the findings of the
	// witness.
	LeftA, LeftB, FindingsA, FindingsB int
}

// FactChange is a fact that differs.
type FactChange struct{ Name, A, B string }

// ResultChange is a result with another status.
type ResultChange struct{ A, B Result }

// Shrunk is a result whose test looked at less than in the other report.
type Shrunk struct {
	Result
	// Less says what was looked at less, or not at all any more.
	Less []string
}

// LatencyChange is an operation with a large change of the median latency.
type LatencyChange struct {
	A, B Calls
	// Ratio is the median of B divided by that of A.
	Ratio float64
}

// Diff returns the difference between two reports.
func Diff(a, b *Report) *Difference {
	d := &Difference{
		VerdictA: a.Verdict, VerdictB: b.Verdict,
		LeftA: len(a.Ledger.Left), LeftB: len(b.Ledger.Left),
		FindingsA: len(a.Witness.Findings), FindingsB: len(b.Witness.Findings),
		NewGroups: map[string]int{}, GoneGroups: map[string]int{},
	}
	d.diffFacts(a, b)
	d.diffResults(a, b)
	d.diffCalls(a, b)
	return d
}

// Worse reports whether the verdict, a result, its extent, the number of left objects or the
// findings of the witness got worse. A new result that failed counts, too, and so does a result
// that passed and is gone although its group was to run. A latency does not count, because it
// depends on the other users of the rack.
func (d *Difference) Worse() bool {
	return badness(d.VerdictB) > badness(d.VerdictA) || len(d.Worsened) > 0 ||
		len(d.Shrunk) > 0 && !d.OtherKind || d.LeftB > d.LeftA || d.FindingsB > d.FindingsA ||
		slices.ContainsFunc(d.New, func(r Result) bool { return r.Status == Failed }) ||
		slices.ContainsFunc(d.Gone, func(r Result) bool { return r.Status == Passed })
}

// badness returns a number that orders the verdicts, the best first.
func badness(v Verdict) int {
	return slices.Index(
		[]Verdict{Conforms, BlockedByRack, Incomplete, InterruptedRun, DoesNotConform}, v)
}

func (d *Difference) diffFacts(a, b *Report) {
	fact := func(name, inA, inB string) {
		if inA != inB {
			d.Facts = append(d.Facts, FactChange{name, inA, inB})
		}
	}
	fact("host", a.Rack.Host, b.Rack.Host)
	fact("project", a.Rack.Project, b.Rack.Project)
	fact("API version", a.Rack.APIVersion, b.Rack.APIVersion)
	fact("release", a.Rack.Release, b.Rack.Release)
	fact("hot-plug", string(a.Rack.HotPlug), string(b.Rack.HotPlug))
	d.OtherKind = a.Rack.Simulated != b.Rack.Simulated
	fact("simulated", fmt.Sprint(a.Rack.Simulated), fmt.Sprint(b.Rack.Simulated))
	fact("suite", a.Versions.Suite, b.Versions.Suite)
	fact("driver", a.Versions.Driver, b.Versions.Driver)
	fact("SDK", a.Versions.SDK, b.Versions.SDK)
	fact("Go", a.Versions.Go, b.Versions.Go)
	fact("kernel", a.Versions.Kernel, b.Versions.Kernel)
	fact("system", a.Versions.OS+" "+a.Versions.Arch, b.Versions.OS+" "+b.Versions.Arch)
	tools := map[string]bool{}
	for tool := range a.Versions.Tools {
		tools[tool] = true
	}
	for tool := range b.Versions.Tools {
		tools[tool] = true
	}
	for _, tool := range slices.Sorted(maps.Keys(tools)) {
		fact(tool, a.Versions.Tools[tool], b.Versions.Tools[tool])
	}
	fact("machine", a.Run.Machine, b.Run.Machine)
	fact("second instance", a.Run.Second, b.Run.Second)
	fact("helper instance", a.Run.Helper, b.Run.Helper)
	fact("groups", strings.Join(a.Run.Selected, ", "), strings.Join(b.Run.Selected, ", "))
	fact("budget", a.Run.Budget, b.Run.Budget)
	fact("objects left", fmt.Sprint(d.LeftA), fmt.Sprint(d.LeftB))
	fact("findings of the witness", fmt.Sprint(d.FindingsA), fmt.Sprint(d.FindingsB))
}

func (d *Difference) diffResults(a, b *Report) {
	before := map[[2]string]Result{}
	groups := map[string]bool{}
	for _, result := range a.Results {
		before[result.key()] = result
		groups[result.Group] = true
	}
	groupsNow := map[string]bool{}
	for _, now := range b.Results {
		then, both := before[now.key()]
		delete(before, now.key())
		groupsNow[now.Group] = true
		change := ResultChange{then, now}
		switch {
		case !both && !groups[now.Group] && now.Status != Failed:
			d.NewGroups[now.Group]++
		case !both:
			d.New = append(d.New, now)
		case then.Status == now.Status:
			d.Same++
			if less := then.Extent.Shrunk(now.Extent); len(less) > 0 {
				d.Shrunk = append(d.Shrunk, Shrunk{now, less})
			}
		case now.Status == Failed || then.Status == Passed:
			d.Worsened = append(d.Worsened, change)
		case now.Status == Passed:
			d.Improved = append(d.Improved, change)
		default:
			d.Other = append(d.Other, change)
		}
	}
	for _, result := range a.Results {
		switch _, gone := before[result.key()]; {
		case gone && !groupsNow[result.Group] && !slices.Contains(b.Run.Selected, result.Group):
			d.GoneGroups[result.Group]++
		case gone:
			d.Gone = append(d.Gone, result)
		}
	}
}

func (d *Difference) diffCalls(a, b *Report) {
	type key struct {
		kind      Kind
		operation string
	}
	before := map[key]Calls{}
	for _, calls := range a.Calls {
		before[key{calls.Kind, calls.Operation}] = calls
	}
	for _, now := range b.Calls {
		k := key{now.Kind, now.Operation}
		then, both := before[k]
		delete(before, k)
		switch {
		case !both:
			d.OneSided++
		case min(then.Count, now.Count) < enoughCalls:
			d.TooFew++
		default:
			d.Compared++
			d.compare(then, now)
		}
	}
	d.OneSided += len(before)
	slices.SortStableFunc(d.Latencies, func(x, y LatencyChange) int {
		return cmp.Compare(y.Ratio, x.Ratio) // the largest slowdown first
	})
}

// compare records a latency with a large change.
func (d *Difference) compare(then, now Calls) {
	p50, p50Now := then.Quantile(0.5), now.Quantile(0.5)
	less, more := min(p50, p50Now), max(p50, p50Now)
	if more < muchSlower*less || more-less < muchLater {
		return
	}
	d.Latencies = append(d.Latencies, LatencyChange{then, now, p50Now / p50})
}
