// Package report writes, reads and compares the reports of oxide-conformance's runs.
//
// [Write] writes report.json for programs (its JSON Schema is report.schema.json in this package),
// junit.xml for CI, and index.html for people, one page that loads nothing and runs no script. No
// file contains a secret that the caller has passed to Write.
package report

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// SchemaVersion is the version of report.json. It changes when a property changes.
const SchemaVersion = 2

// Report has the results of one run. The file report.schema.json describes the properties. A nil
// slice or map is empty in report.json.
type Report struct {
	Schema    int       `json:"schema"` // SchemaVersion
	Verdict   Verdict   `json:"verdict"`
	Why       string    `json:"why"`
	Run       Run       `json:"run"`
	Rack      RackFacts `json:"rack"`
	Versions  Versions  `json:"versions"`
	Preflight []Line    `json:"preflight"`
	Results   []Result  `json:"results"`
	Calls     []Calls   `json:"calls"`
	Ledger    Ledger    `json:"ledger"`
	Witness   Witness   `json:"witness"`
	CleanUp   string    `json:"clean_up"`
}

// Verdict is the result of a run. A single failed result makes it DoesNotConform.
type Verdict string

// These are the verdicts, from the best to the worst.
const (
	// Conforms means that everything that was tested passed.
	Conforms Verdict = "conforms"
	// BlockedByRack means that nothing failed, but the rack lacks a feature that a part needs.
	BlockedByRack Verdict = "blocked"
	// Incomplete means that nothing failed, but the run could not be completed.
	Incomplete Verdict = "incomplete"
	// InterruptedRun means that nothing failed, but somebody stopped the run.
	InterruptedRun Verdict = "interrupted"
	// DoesNotConform means that at least one result failed, that the driver left objects, or that a
	// second record of the run contradicted the results ([Witness]).
	DoesNotConform Verdict = "does not conform"
)

// Run describes the run. Instance, Second and Helper are the names of its instances, or "".
type Run struct {
	ID       string    `json:"id"`
	Mark     string    `json:"mark"`
	Began    time.Time `json:"began"`
	Ended    time.Time `json:"ended"`
	Machine  string    `json:"machine"`
	Instance string    `json:"instance"`
	Second   string    `json:"second"`
	Helper   string    `json:"helper"`
	Command  []string  `json:"command"` // without the values of flags
	Selected []string  `json:"selected"`
	Budget   string    `json:"budget"`
}

// RackFacts describes the rack of the run.
type RackFacts struct {
	Host       string  `json:"host"`
	APIVersion string  `json:"api_version"`
	Project    string  `json:"project"`
	HotPlug    HotPlug `json:"hot_plug"`
	Release    string  `json:"release"`   // in the operator's words: the API does not report one
	Simulated  bool    `json:"simulated"` // then the results prove nothing about a real rack
}

// HotPlug states whether a rack attaches disks to running instances.
type HotPlug string

// With HotPlugAttachOnly, a rack attaches disks to running instances and does not detach them.
const (
	HotPlugYes        HotPlug = "yes"
	HotPlugNo         HotPlug = "no"
	HotPlugAttachOnly HotPlug = "attach only"
	HotPlugUnknown    HotPlug = "unknown"
)

// Versions are the versions of the run's programs and systems.
type Versions struct {
	Suite  string            `json:"suite"`
	Driver string            `json:"driver"`
	SDK    string            `json:"sdk"`
	Go     string            `json:"go"`
	Kernel string            `json:"kernel"`
	OS     string            `json:"os"`
	Arch   string            `json:"arch"`
	Tools  map[string]string `json:"tools"` // the programs that the driver runs
}

// Line is one check of the preflight.
type Line struct {
	Name   string     `json:"name"`
	Status LineStatus `json:"status"`
	Found  string     `json:"found"`
	Advice string     `json:"advice"`
}

// LineStatus is the result of a Line.
type LineStatus string

// These are the results of lines.
const (
	Pass LineStatus = "pass"
	Warn LineStatus = "warn"
	Fail LineStatus = "fail"
	Skip LineStatus = "skip"
)

// Result is the result of one rule or spec. ID is unique in the group; a spec without an ID has
// only a name. A result that passed has an extent, and every other one has a reason.
type Result struct {
	Group    string       `json:"group"`
	ID       string       `json:"id"`
	Name     string       `json:"name"`
	Status   Status       `json:"status"`
	Seconds  float64      `json:"seconds"`
	Reason   string       `json:"reason"`
	Tries    int          `json:"tries"`
	Source   string       `json:"source"`
	Extent   Extent       `json:"extent"`
	Evidence []LoggedCall `json:"evidence"`
}

// Status is the status of a result.
type Status string

// These are the statuses of results.
const (
	Passed Status = "passed"
	Failed Status = "failed"
	// Blocked means that the rack lacks a feature that the spec needs.
	Blocked Status = "blocked"
	// NotTested means that the run left the spec out, for the reason in the result.
	NotTested Status = "not_tested"
	// NotApplicable means that the spec tests a feature that the driver does not offer.
	NotApplicable Status = "not_applicable"
	// Interrupted means that the run was stopped, or lost its rack, before the spec ended.
	Interrupted Status = "interrupted"
)

// Statuses returns all statuses. Those that need a reader's attention come first.
func Statuses() []Status {
	return []Status{Failed, Interrupted, Blocked, NotTested, NotApplicable, Passed}
}

// LoggedCall is one call of the API or one RPC, and its answer.
type LoggedCall struct {
	Kind         Kind    `json:"kind"`
	Operation    string  `json:"operation"`
	Method       string  `json:"method,omitempty"`
	Path         string  `json:"path,omitempty"`
	Status       int     `json:"status,omitempty"`     // of HTTP
	Code         string  `json:"code,omitempty"`       // of gRPC
	ErrorCode    string  `json:"error_code,omitempty"` // the API's, or the driver's reason
	RequestID    string  `json:"request_id,omitempty"`
	Milliseconds float64 `json:"milliseconds"`
	// Answer is an excerpt of the answer. Remove secrets from an answer before you shorten it, because
	// Write does not recognize a shortened secret.
	Answer string `json:"answer,omitempty"`
}

// Kind is the kind of a call.
type Kind string

// These are the kinds of calls.
const (
	API Kind = "api"
	RPC Kind = "rpc"
)

// Ledger counts the objects of each kind before and after the run. Left names the objects that the
// driver should have deleted and has not.
type Ledger struct {
	Before map[string]int `json:"before"`
	After  map[string]int `json:"after"`
	Left   []string       `json:"left"`
}

// Witness compares the results with a second record of the run, which Source names. Findings are
// the contradictions. A run with a finding does not conform.
type Witness struct {
	Source   string   `json:"source"`
	Findings []string `json:"findings"`
}

const maxSamples = 1000

// Calls has the sorted latencies of one operation. If there were more than 1000 calls, it has 1000
// evenly spaced latencies, including the shortest and the longest.
type Calls struct {
	Kind         Kind      `json:"kind"`
	Operation    string    `json:"operation"`
	Count        int       `json:"count"`
	Failed       int       `json:"failed"`
	Milliseconds []float64 `json:"milliseconds"`
}

// NewCalls returns the latencies of an operation. The samples, in milliseconds, may have any order
// and number.
func NewCalls(kind Kind, operation string, failed int, milliseconds []float64) Calls {
	sorted := slices.Sorted(slices.Values(milliseconds))
	calls := Calls{Kind: kind, Operation: operation, Count: len(sorted), Failed: failed,
		Milliseconds: sorted}
	if len(sorted) > maxSamples {
		calls.Milliseconds = make([]float64, maxSamples)
		for i := range maxSamples {
			calls.Milliseconds[i] = sorted[i*(len(sorted)-1)/(maxSamples-1)]
		}
	}
	return calls
}

// Quantile returns the latency in milliseconds that the share q (0 to 1) of the calls did not
// exceed, by nearest rank. It returns 0 if there was no call.
func (c Calls) Quantile(q float64) float64 {
	if len(c.Milliseconds) == 0 {
		return 0
	}
	rank := int(math.Ceil(q * float64(len(c.Milliseconds))))
	return c.Milliseconds[min(max(rank, 1), len(c.Milliseconds))-1]
}

// Group has the results of one group, in the report's order.
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

// Check returns an error if the report is inconsistent: every result must occur once, every result
// that did not pass must have a reason, the latencies must agree with their counts, and the verdict
// must follow from the results. The error names at most ten faults, one on each line. Check leaves
// the limits of single values to the schema.
func (r *Report) Check() error {
	var all []error
	wrong := func(format string, args ...any) { all = append(all, fmt.Errorf(format, args...)) }
	passed, failed, interrupted, blocked := r.Count(Passed), r.Count(Failed), r.Count(Interrupted),
		r.Count(Blocked)
	faults := failed + len(r.Ledger.Left) + len(r.Witness.Findings)
	follows := map[Verdict]bool{
		Conforms:       faults+interrupted+blocked == 0 && passed > 0,
		BlockedByRack:  faults+interrupted == 0 && blocked > 0,
		Incomplete:     failed == 0,
		InterruptedRun: failed == 0,
		DoesNotConform: faults > 0,
	}
	if !follows[r.Verdict] {
		wrong("the verdict is %q, but %d results passed, %d failed, %d were interrupted, %d blocked; "+
			"%d objects were left and the witness has %d findings", r.Verdict, passed, failed, interrupted,
			blocked, len(r.Ledger.Left), len(r.Witness.Findings))
	}
	if !r.Run.Ended.IsZero() && r.Run.Ended.Before(r.Run.Began) {
		wrong("the run ended (%s) before it began (%s)", r.Run.Ended, r.Run.Began)
	}
	seen := map[[2]string]bool{}
	for _, result := range r.Results {
		title, key, passed := result.title(), result.key(), result.Status == Passed
		switch {
		case key[1] == "":
			wrong("%s: a result needs an id or a name", title)
		case seen[key]:
			wrong("%s is there twice", title)
		}
		seen[key] = true
		switch {
		case passed && result.Reason != "":
			wrong("%s passed, but has a reason", title)
		case !passed && result.Reason == "":
			wrong("%s did not pass, but has no reason", title)
		case passed && len(result.Extent) == 0:
			wrong("%s passed, but does not state how far it looked", title)
		}
		for _, m := range result.Extent {
			if m.Of > 0 && m.Looked > m.Of {
				wrong("%s looked at %d of %d of %q", title, m.Looked, m.Of, m.What)
			}
		}
	}
	r.checkCalls(wrong)
	if more := len(all) - 10; more > 0 {
		all = append(all[:10], fmt.Errorf("and %d more", more))
	}
	return errors.Join(all...)
}

func (r *Report) checkCalls(wrong func(format string, args ...any)) {
	seen := map[string]bool{}
	for _, calls := range r.Calls {
		name, samples := string(calls.Kind)+" "+calls.Operation, len(calls.Milliseconds)
		want := min(calls.Count, maxSamples)
		switch {
		case seen[name]:
			wrong("calls of %s are there twice", name)
		case calls.Failed > calls.Count:
			wrong("calls of %s: %d of %d failed", name, calls.Failed, calls.Count)
		case samples != want:
			wrong("calls of %s: %d latencies for %d calls, expected %d", name, samples, calls.Count, want)
		case !slices.IsSorted(calls.Milliseconds):
			wrong("calls of %s: the latencies are not sorted", name)
		}
		seen[name] = true
	}
}

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

func (s Status) words() string { return strings.ReplaceAll(string(s), "_", " ") }

var headlines = map[Verdict]string{Conforms: "Conforms", BlockedByRack: "Blocked by the rack",
	Incomplete: "Incomplete", InterruptedRun: "Interrupted", DoesNotConform: "Does not conform"}

// groups are the groups of a whole run.
var groups = []string{"rules", "ext4", "xfs", "btrfs", "block", "data"}

// Headline returns the verdict as a heading, with the groups if only some were selected.
func (r *Report) Headline() string {
	headline, selected := cmp.Or(headlines[r.Verdict], string(r.Verdict)), r.Run.Selected
	if len(selected) == 0 || !slices.ContainsFunc(groups, func(group string) bool {
		return !slices.Contains(selected, group)
	}) {
		return headline
	}
	return fmt.Sprintf("%s (only %s)", headline, strings.Join(selected, ", "))
}

// Measure states how much of something a test looked at.
type Measure struct {
	// What names the thing: "disk_list", "a blank disk of 17 GiB, when it is new".
	What string `json:"what"`
	// Looked is how much of the thing the test looked at. Of is the size of the thing, or of the part
	// on which the driver relies; 0 means unknown.
	Looked int64  `json:"looked"`
	Of     int64  `json:"of"`
	Unit   string `json:"unit"`
	// Words explains the numbers, or why nothing was read.
	Words string `json:"words"`
}

// Extent lists what a test looked at, in the order of the test.
type Extent []Measure

// Look adds a measure to the extent. If the extent has a measure of that thing, Look sums the two.
func (e *Extent) Look(m Measure) {
	if i := e.index(m); i >= 0 {
		(*e)[i].Looked += m.Looked
		(*e)[i].Of += m.Of
		return
	}
	*e = append(*e, m)
}

// Answer records an answer. It counts each kind of answer of an operation or an RPC once.
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

// Partly returns the measures of things that the test looked at only in part.
func (e Extent) Partly() Extent {
	return slices.DeleteFunc(slices.Clone(e), func(m Measure) bool { return m.Looked >= m.Of })
}

// Shrunk describes each measure whose share (Looked of Of) has fallen by more than half since e.
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

// String returns a text such as "disk_list: 3 of 12 objects (in pages of 1)".
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

func inBytes(n int64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.3g GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.3g MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%.3g KiB", float64(n)/(1<<10))
}

// Promises returns a sentence that counts the promises (results) that were kept, broken and not
// tested. It names the broken promises, the untested ones, and those that were tested only in part.
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

// short returns the ID or, for a spec without an ID, a text such as "specs of ext4".
func (r Result) short() string { return cmp.Or(r.ID, "specs of "+r.Group) }

// together() joins equal names: three times "specs of ext4" is "3 specs of ext4".
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

// Kept returns the status in words: "passed", or "kept, as far as …".
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
