package report

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"unicode"
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

// Diff compares two reports, A (the earlier one) and B. The text is for a terminal: the verdict,
// the facts, the results (the worsened first), the latencies, and whether B is worse.
//
// B is worse if the verdict, a result, its extent, the number of left objects or the findings of
// the witness got worse. A new result that failed counts, too, and so does a result that passed
// and is gone although its group was to run. A latency does not count, because it depends on the
// other users of the rack.
func Diff(a, b *Report) (text string, worse bool) {
	results, worse := diffResults(a, b)
	worse = worse || badness(b.Verdict) > badness(a.Verdict) ||
		len(b.Ledger.Left) > len(a.Ledger.Left) ||
		len(b.Witness.Findings) > len(a.Witness.Findings)
	not := "not "
	if worse {
		not = ""
	}
	return diffFacts(a, b) + "\n" + results + "\n" + diffCalls(a, b) + "\nB is " + not +
		"worse than A.\n", worse
}

// badness returns a number that orders the verdicts, the best first.
func badness(v Verdict) int {
	return slices.Index(
		[]Verdict{Conforms, BlockedByRack, Incomplete, InterruptedRun, DoesNotConform}, v)
}

// diffFacts compares verdict, rack, versions and run, except names and times.
func diffFacts(a, b *Report) string {
	var text strings.Builder
	if a.Verdict == b.Verdict {
		fmt.Fprintf(&text, "Verdict: %s in both\n", a.Verdict)
	} else {
		fmt.Fprintf(&text, "Verdict: %s in A, %s in B\n", a.Verdict, b.Verdict)
	}
	tools := map[string]string{}
	maps.Copy(tools, a.Versions.Tools)
	maps.Copy(tools, b.Versions.Tools)
	names := slices.Sorted(maps.Keys(tools))
	of := b.facts(names)
	for i, fact := range a.facts(names) {
		if fact != of[i] {
			fmt.Fprintf(&text, "  %-24s %s -> %s\n", oneLine(fact.Name),
				cmp.Or(oneLine(fact.Value), "none"), cmp.Or(oneLine(of[i].Value), "none"))
		}
	}
	return text.String()
}

type fact struct{ Name, Value string }

func (r *Report) facts(tools []string) []fact {
	all := []fact{{"host", r.Rack.Host}, {"project", r.Rack.Project},
		{"API version", r.Rack.APIVersion}, {"release", r.Rack.Release},
		{"hot-plug", string(r.Rack.HotPlug)}, {"simulated", fmt.Sprint(r.Rack.Simulated)},
		{"suite", r.Versions.Suite}, {"driver", r.Versions.Driver}, {"SDK", r.Versions.SDK},
		{"Go", r.Versions.Go}, {"kernel", r.Versions.Kernel},
		{"system", r.Versions.OS + " " + r.Versions.Arch}}
	for _, tool := range tools {
		all = append(all, fact{tool, r.Versions.Tools[tool]})
	}
	return append(all, fact{"machine", r.Run.Machine}, fact{"second instance", r.Run.Second},
		fact{"helper instance", r.Run.Helper}, fact{"groups", strings.Join(r.Run.Selected, ", ")},
		fact{"budget", r.Run.Budget}, fact{"objects left", fmt.Sprint(len(r.Ledger.Left))},
		fact{"findings of the witness", fmt.Sprint(len(r.Witness.Findings))})
}

// oneLine replaces unprintable characters, which could change the terminal's state, and joins the
// lines.
func oneLine(s string) string {
	clean := strings.Map(func(c rune) rune {
		if unicode.IsPrint(c) {
			return c
		}
		return ' '
	}, s)
	return strings.Join(strings.Fields(clean), " ")
}

// diffResults compares the results. A group that one run was not to run is counted as a whole,
// apart from new failures.
func diffResults(a, b *Report) (text string, worse bool) {
	const same, less, inA, inB = "same", "looked at less", "in A alone", "in B alone"
	sections, count := map[string][]string{}, map[string]int{}
	add := func(section string, r Result, words ...string) {
		count[section]++
		sections[section] = append(sections[section],
			fmt.Sprintf("    %s:%s\n", oneLine(r.title()), strings.Join(words, "")))
	}
	groups := map[string]map[string]int{inA: {}, inB: {}}
	before, groupsA, groupsB := map[[2]string]Result{}, map[string]bool{}, map[string]bool{}
	for _, result := range a.Results {
		before[result.key()] = result
		groupsA[result.Group] = true
	}
	for _, now := range b.Results {
		then, both := before[now.key()]
		delete(before, now.key())
		groupsB[now.Group] = true
		section := ""
		switch {
		case !both && !groupsA[now.Group] && now.Status != Failed:
			groups[inB][now.Group]++
		case !both:
			add(inB, now, " ", now.Status.words())
			worse = worse || now.Status == Failed
		case then.Status == now.Status:
			count[same]++
			if shrunk := then.Extent.Shrunk(now.Extent); len(shrunk) > 0 {
				add(less, now, "\n      ", oneLine(strings.Join(shrunk, "; ")))
				worse = worse || a.Rack.Simulated == b.Rack.Simulated // another kind of rack has less
			}
		case now.Status == Failed || then.Status == Passed:
			section, worse = "worse", true
		case now.Status == Passed:
			section = "better"
		default: // blocked, not tested or interrupted: nobody has seen that it is better now
			section = "otherwise changed"
		}
		if section == "" {
			continue
		}
		reason := oneLine(now.Reason)
		if reason != "" {
			reason = "\n      " + reason
		}
		add(section, now, " ", then.Status.words(), " -> ", now.Status.words(), reason)
	}
	for _, result := range a.Results {
		switch _, gone := before[result.key()]; {
		case gone && !groupsB[result.Group] && !slices.Contains(b.Run.Selected, result.Group):
			groups[inA][result.Group]++
		case gone:
			add(inA, result, " ", result.Status.words())
			worse = worse || result.Status == Passed
		}
	}
	both := count[same] + count["worse"] + count["better"] + count["otherwise changed"]
	text = fmt.Sprintf("Results: %d in A, %d in B\n  %d in both: %d the same, %d worse, %d better, "+
		"%d otherwise changed\n  %d in A alone, %d in B alone\n", len(a.Results), len(b.Results), both,
		count[same], count["worse"], count["better"], count["otherwise changed"],
		len(a.Results)-both, len(b.Results)-both)
	for _, section := range []string{"worse", "better", "otherwise changed", less, inB, inA} {
		if len(sections[section])+len(groups[section]) > 0 {
			text += "  " + section + ":\n"
		}
		for _, group := range slices.Sorted(maps.Keys(groups[section])) {
			text += fmt.Sprintf("    all of %s: %d\n", oneLine(group), groups[section][group])
		}
		text += strings.Join(sections[section], "")
	}
	return text, worse
}

// diffCalls compares the median latencies of the operations that both reports have.
func diffCalls(a, b *Report) string {
	type key struct {
		kind      Kind
		operation string
	}
	type change struct {
		ratio float64
		text  string
	}
	before := map[key]Calls{}
	for _, calls := range a.Calls {
		before[key{calls.Kind, calls.Operation}] = calls
	}
	var changes []change
	compared, tooFew, oneSided := 0, 0, 0
	for _, now := range b.Calls {
		k := key{now.Kind, now.Operation}
		then, both := before[k]
		delete(before, k)
		switch {
		case !both:
			oneSided++
			continue
		case min(then.Count, now.Count) < enoughCalls:
			tooFew++
			continue
		}
		p50, p50Now := then.Quantile(0.5), now.Quantile(0.5)
		compared++
		if max(p50, p50Now) < muchSlower*min(p50, p50Now) || math.Abs(p50Now-p50) < muchLater {
			continue
		}
		word := "slower"
		if p50Now < p50 {
			word = "faster"
		}
		changes = append(changes, change{p50Now / p50, fmt.Sprintf(
			"  %s %s: %s, p50 %s -> %s (ratio %.2f; %d and %d calls)\n", now.Kind,
			oneLine(now.Operation), word, inMilliseconds(p50), inMilliseconds(p50Now), p50Now/p50,
			then.Count, now.Count)})
	}
	slices.SortStableFunc(changes, func(x, y change) int {
		return cmp.Compare(y.ratio, x.ratio) // the largest slowdown first
	})
	text := fmt.Sprintf("Latencies: the p50 of %d of %s changed by a factor of %g or more\n"+
		"  not compared: %d with fewer than %d calls in a report, %d in one report alone\n",
		len(changes), plural(compared, "operation"), muchSlower, tooFew, enoughCalls,
		oneSided+len(before))
	for _, change := range changes {
		text += change.text
	}
	return text
}
