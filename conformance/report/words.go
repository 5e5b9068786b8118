package report

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
)

func (s Status) words() string { return strings.ReplaceAll(string(s), "_", " ") }

var headlines = map[Verdict]string{Conforms: "Conforms", BlockedByRack: "Blocked by the rack",
	Incomplete: "Incomplete", InterruptedRun: "Interrupted", DoesNotConform: "Does not conform"}

// groups are the groups of a whole run.
var groups = []string{"rules", "ext4", "xfs", "btrfs", "block", "data"}

// Headline returns the verdict as a heading. It names the groups if only some were selected.
func (r *Report) Headline() string {
	headline, selected := cmp.Or(headlines[r.Verdict], string(r.Verdict)), r.Run.Selected
	if len(selected) == 0 || !slices.ContainsFunc(groups, func(group string) bool {
		return !slices.Contains(selected, group)
	}) {
		return headline
	}
	return fmt.Sprintf("%s (only %s)", headline, strings.Join(selected, ", "))
}

// request describes the request: "disk_create POST /v1/disks", or the name of the RPC.
func (e LoggedCall) request() string {
	return strings.Join(strings.Fields(e.Operation+" "+e.Method+" "+e.Path), " ")
}

// outcome describes the answer: "400 Bad Request ObjectAlreadyExists", "NotFound".
func (e LoggedCall) outcome() string {
	var parts []string
	if e.Status != 0 {
		parts = append(parts, strconv.Itoa(e.Status), http.StatusText(e.Status))
	}
	parts = append(parts, e.Code, e.ErrorCode)
	if text := strings.Join(strings.Fields(strings.Join(parts, " ")), " "); text != "" {
		return text
	}
	return "no answer"
}

func (e LoggedCall) bad() bool {
	return e.Status >= 400 || e.ErrorCode != "" || (e.Code != "" && e.Code != "OK") ||
		(e.Status == 0 && e.Code == "")
}

// inMilliseconds returns a latency with its unit and three digits: "0.42 ms", "13 ms", "1.5 s".
func inMilliseconds(ms float64) string {
	switch {
	case ms == 0:
		return "0 ms"
	case ms < 9.95:
		return fmt.Sprintf("%.2g ms", ms)
	case ms < 999.5:
		return fmt.Sprintf("%.0f ms", ms)
	}
	return inSeconds(ms / 1000)
}

// inSeconds returns a duration with its unit: "0.8 s", "12 s", "3 min 20 s", "1 h 2 min".
func inSeconds(seconds float64) string {
	switch {
	case seconds == 0:
		return "0 s"
	case seconds < 0.01:
		return "< 10 ms"
	case seconds < 0.9995:
		return fmt.Sprintf("%.0f ms", seconds*1000)
	case seconds < 9.95:
		return fmt.Sprintf("%.1f s", seconds)
	case seconds < 59.5:
		return fmt.Sprintf("%.0f s", seconds)
	case seconds < 3599.5:
		whole := int(math.Round(seconds))
		return strings.TrimSuffix(fmt.Sprintf("%d min %d s", whole/60, whole%60), " 0 s")
	}
	minutes := math.Round(seconds / 60)
	return fmt.Sprintf("%.0f h %.0f min", math.Floor(minutes/60), math.Mod(minutes, 60))
}

func moment(t time.Time) string {
	if t.IsZero() {
		return "unknown"
	}
	return t.UTC().Format("2 January 2006, 15:04:05 UTC")
}

// plural returns a number with its noun: "1 call", "2 calls".
func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return strconv.Itoa(n) + " " + noun + "s"
}

// Measure states how much of something a test looked at.
type Measure struct {
	// What names the thing: "disk_list", "a blank disk of 17 GiB, when it is new".
	What string `json:"what"`
	// Looked is how much of the thing the test looked at. Of is the size of the thing, or of the part
	// on which the driver relies; 0 means that the size is unknown.
	Looked int64  `json:"looked"`
	Of     int64  `json:"of"`
	Unit   string `json:"unit"`
	// Words explains the numbers, or why nothing was read.
	Words string `json:"words"`
}

// Extent lists what a test looked at and how much of it, in the order of the test.
type Extent []Measure

// Look adds a measure. If the extent has one of the same thing, Look adds up their numbers.
func (e *Extent) Look(m Measure) {
	if i := e.index(m); i >= 0 {
		(*e)[i].Looked += m.Looked
		(*e)[i].Of += m.Of
		return
	}
	*e = append(*e, m)
}

// Answer records an answer of an operation or an RPC. It counts each kind of answer once.
func (e *Extent) Answer(operation, kind string) {
	m := Measure{What: operation, Unit: "kinds of answers", Looked: 1, Words: kind}
	i := e.index(m)
	switch {
	case i < 0:
		*e = append(*e, m)
	case !slices.Contains(strings.Split((*e)[i].Words, "; "), kind):
		(*e)[i].Looked++
		(*e)[i].Words += "; " + kind
	}
}

func (e *Extent) index(m Measure) int {
	return slices.IndexFunc(*e, func(other Measure) bool {
		return other.What == m.What && other.Unit == m.Unit
	})
}

// Partly returns the measures of things at which the test looked only in part.
func (e Extent) Partly() Extent {
	return slices.DeleteFunc(slices.Clone(e), func(m Measure) bool { return m.Looked >= m.Of })
}

// Shrunk describes each thing whose tested share is less than half as large in the extent later.
// Measures without a known total do not count, because they depend on time or on other users.
func (e Extent) Shrunk(later Extent) (all []string) {
	for _, m := range e {
		if m.Of == 0 {
			continue
		}
		i := later.index(m)
		if i < 0 {
			all = append(all, "no more: "+m.String())
			continue
		}
		now := later[i]
		if now.Of == 0 || 2*float64(now.Looked)/float64(now.Of) < float64(m.Looked)/float64(m.Of) {
			all = append(all, fmt.Sprintf("less: %s -> %s", m, now))
		}
	}
	return all
}

// String returns the measure as text: "disk_list: 3 of 12 objects (in pages of 1)".
func (m Measure) String() string {
	number, unit := func(n int64) string { return fmt.Sprint(n) }, " "+m.Unit
	if m.Unit == "bytes" {
		number, unit = inBytes, ""
	}
	text := m.What + ": " + number(m.Looked) + unit
	switch {
	case m.Looked == 0 && m.Of > 0:
		text = m.What + ": not tested"
	case m.Of > 0:
		text = m.What + ": " + number(m.Looked) + " of " + number(m.Of) + unit
	}
	if m.Words != "" {
		text += " (" + m.Words + ")"
	}
	return text
}

// inBytes returns a size with its unit: "64 KiB", "3.5 MiB".
func inBytes(n int64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.3g GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.3g MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%.3g KiB", float64(n)/(1<<10))
}

// Promises returns a sentence that counts the promises that were kept, broken and not tested. It
// names the last two kinds, and the promises that were kept only as far as the test looked.
func (r *Report) Promises() string {
	var broken, partly, untested []string
	for _, result := range r.Results {
		switch {
		case result.Status == Failed:
			broken = append(broken, result.short())
		case result.Status == Passed && len(result.Extent.Partly()) > 0:
			partly = append(partly, result.short())
		case result.Status != Passed && result.Status != NotApplicable:
			untested = append(untested, result.short())
		}
	}
	named := func(names []string) string {
		if len(names) == 0 {
			return ""
		}
		return " (" + strings.Join(together(names), ", ") + ")"
	}
	limits := ""
	if n := len(partly); n > 0 {
		limits = fmt.Sprintf(", %d of them as far as the test looked%s", n, named(partly))
	}
	return fmt.Sprintf("%d promises kept%s; %d broken%s; %d not tested%s", r.Count(Passed), limits,
		len(broken), named(broken), len(untested), named(untested))
}

// short returns the ID of a result or, for a spec without an ID, a text such as "specs of ext4".
func (r Result) short() string { return cmp.Or(r.ID, "specs of "+r.Group) }

// together joins equal names: "specs of ext4" three times becomes "3 specs of ext4".
func together(names []string) (all []string) {
	count := map[string]int{}
	for _, name := range names {
		if count[name]++; count[name] == 1 {
			all = append(all, name)
		}
	}
	for i, name := range all {
		if strings.HasPrefix(name, "specs of ") {
			all[i] = fmt.Sprintf("%d %s", count[name], name)
		}
	}
	return all
}

// Kept returns the status as text for people: "passed", or "kept, as far as …".
func (r Result) Kept() string {
	if partly := r.Extent.Partly(); r.Status == Passed && len(partly) > 0 {
		words := make([]string, len(partly))
		for i, m := range partly {
			words[i] = m.String()
		}
		return "kept, as far as " + strings.Join(words, "; ")
	}
	return r.Status.words()
}

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
// the witness got worse. B is also worse if it has a new result that failed, or lacks a result that
// passed in A although B selected its group. Latencies do not count, because they depend on the
// other users of the rack.
func Diff(a, b *Report) (text string, worse bool) {
	results, worse := diffResults(a, b)
	fromBest := []Verdict{Conforms, BlockedByRack, Incomplete, InterruptedRun, DoesNotConform}
	worse = worse || slices.Index(fromBest, b.Verdict) > slices.Index(fromBest, a.Verdict) ||
		len(b.Ledger.Left) > len(a.Ledger.Left) || len(b.Witness.Findings) > len(a.Witness.Findings)
	not := "not "
	if worse {
		not = ""
	}
	return diffFacts(a, b) + "\n" + results + "\n" + diffCalls(a, b) + "\nB is " + not +
		"worse than A.\n", worse
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

// diffResults compares the results. If one report lacks a whole group, diffResults counts the
// group's results and lists only new failures.
func diffResults(a, b *Report) (text string, worse bool) {
	const less, inA, inB = "looked at less", "in A alone", "in B alone"
	same, sections := 0, map[string][]string{}
	add := func(section string, r Result, words ...string) {
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
			same++
			if shrunk := then.Extent.Shrunk(now.Extent); len(shrunk) > 0 {
				add(less, now, "\n      ", oneLine(strings.Join(shrunk, "; ")))
				worse = worse || a.Rack.Simulated == b.Rack.Simulated // a real rack is tested less
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
	changed, better := len(sections["otherwise changed"]), len(sections["better"])
	both := same + len(sections["worse"]) + better + changed
	text = fmt.Sprintf("Results: %d in A, %d in B\n  %d in both: %d the same, %d worse, %d better, "+
		"%d otherwise changed\n  %d in A alone, %d in B alone\n", len(a.Results), len(b.Results), both,
		same, len(sections["worse"]), better, changed, len(a.Results)-both, len(b.Results)-both)
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
	type change struct {
		ratio float64
		text  string
	}
	before := map[string]Calls{}
	for _, calls := range a.Calls {
		before[string(calls.Kind)+" "+calls.Operation] = calls
	}
	var changes []change
	compared, tooFew, oneSided := 0, 0, 0
	for _, now := range b.Calls {
		k := string(now.Kind) + " " + now.Operation
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
