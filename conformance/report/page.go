package report

import (
	"bytes"
	"cmp"
	"embed"
	"encoding/xml"
	"fmt"
	"html/template"
	"maps"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

//go:embed page/*.tmpl page/style.css
var pageFiles embed.FS

var pageTemplate = template.Must(template.New("page").Funcs(template.FuncMap{
	"words":        Status.words,
	"outcome":      LoggedCall.outcome,
	"bad":          LoggedCall.bad,
	"milliseconds": inMilliseconds,
	"seconds":      inSeconds,
	"moment":       moment,
	"plural":       plural,
	"join":         strings.Join,
}).ParseFS(pageFiles, "page/*.tmpl"))

type pageView struct {
	*Report
	Style    template.CSS
	Tone     Status // the CSS class with the verdict's colour
	Took     string // the duration of the run; "" if it is unknown
	Shares   []share
	Groups   []groupOnPage
	Troubles []resultOnPage // the failed and the interrupted results
	Untested []untested
	Plots    []latencies
	Counted  []counted
}

type share struct {
	Status   Status
	Count    int
	X, Width float64
}

type groupOnPage struct {
	Group
	Title, Anchor string
	Shares        []share
	Rows          []resultOnPage
}

type resultOnPage struct {
	Result
	Anchor string
}

type untested struct {
	Status  Status
	Reason  string
	Results []resultOnPage
}

type counted struct {
	Kind          string
	Before, After int
	Change        string // in words
}

func renderPage(r *Report) ([]byte, error) {
	style, err := pageFiles.ReadFile("page/style.css")
	if err != nil {
		return nil, err
	}
	p := pageView{
		Report: r, Style: template.CSS(style), Tone: verdictStatus(r.Verdict),
		Shares: shares(r.Results), Plots: plots(r.Calls), Counted: count(r.Ledger),
	}
	if !r.Run.Began.IsZero() && !r.Run.Ended.IsZero() {
		p.Took = inSeconds(r.Run.Ended.Sub(r.Run.Began).Seconds())
	}
	p.addResults()
	var text bytes.Buffer
	err = pageTemplate.ExecuteTemplate(&text, "page.html.tmpl", p)
	return text.Bytes(), err
}

func (p *pageView) addResults() {
	n := 0
	for i, group := range p.Report.Groups() {
		g := groupOnPage{Group: group, Title: cmp.Or(groupTitles[group.Name], group.Name),
			Anchor: fmt.Sprintf("group-%d", i+1), Shares: shares(group.Results)}
		for _, result := range group.Results {
			n++
			row := resultOnPage{Result: result, Anchor: fmt.Sprintf("result-%d", n)}
			g.Rows = append(g.Rows, row)
			switch result.Status {
			case Failed, Interrupted:
				p.Troubles = append(p.Troubles, row)
			case Blocked, NotTested, NotApplicable:
				i := slices.IndexFunc(p.Untested, func(u untested) bool {
					return u.Status == row.Status && u.Reason == row.Reason
				})
				if i < 0 {
					i = len(p.Untested)
					p.Untested = append(p.Untested, untested{Status: row.Status, Reason: row.Reason})
				}
				p.Untested[i].Results = append(p.Untested[i].Results, row)
			}
		}
		p.Groups = append(p.Groups, g)
	}
	slices.SortStableFunc(p.Untested, func(a, b untested) int {
		return cmp.Compare(slices.Index(Statuses(), a.Status), slices.Index(Statuses(), b.Status))
	})
}

var groupTitles = map[string]string{"rules": "Rules of the API", "ext4": "csi-sanity on ext4",
	"xfs": "csi-sanity on xfs", "btrfs": "csi-sanity on btrfs",
	"block": "csi-sanity on raw block volumes", "data": "Data"}

func shares(results []Result) (all []share) {
	order := Statuses()
	slices.Reverse(order)
	x := 0.0
	for _, status := range order {
		n := Group{Results: results}.Count(status)
		if n == 0 {
			continue
		}
		width := 100 * float64(n) / float64(len(results))
		all = append(all, share{status, n, x, width})
		x += width
	}
	return all
}

func count(l Ledger) (rows []counted) {
	kinds := maps.Clone(l.Before)
	maps.Copy(kinds, l.After)
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		row := counted{Kind: kind, Before: l.Before[kind], After: l.After[kind], Change: "the same"}
		if change := row.After - row.Before; change > 0 {
			row.Change = fmt.Sprintf("%d more", change)
		} else if change < 0 {
			row.Change = fmt.Sprintf("%d fewer", -change)
		}
		rows = append(rows, row)
	}
	return rows
}

// A plot has these sizes in units of its viewBox, which are pixels on a large screen.
const (
	plotWidth  = 320.0
	plotHeight = 26.0
	plotMargin = 6.0
	barWidth   = 3.0
	barStep    = 4.0
)

type latencies struct {
	Kind  Kind
	Title string
	Axis  axis
	Rows  []latencyRow
}

type latencyRow struct {
	Calls
	P50, P95, Max quantile
	Text          string // the plot in words
	Bars          string // a path with a bar for each interval of time in which calls ended
}

type quantile struct{ Text, X string }

// axis is a logarithmic axis from 10^low to 10^high milliseconds. low and high are whole numbers.
type axis struct {
	low, high float64
	Ticks     []tick
}

type tick struct{ X, Label string }

// newAxis returns an axis for all latencies. It treats less than 0.1 ms as 0.1 ms.
func newAxis(all []Calls) axis {
	a := axis{low: math.Inf(1), high: math.Inf(-1)}
	for _, calls := range all {
		if n := len(calls.Milliseconds); n > 0 {
			a.low = min(a.low, math.Floor(decade(calls.Milliseconds[0])))
			a.high = max(a.high, math.Ceil(decade(calls.Milliseconds[n-1])))
		}
	}
	if a.low > a.high {
		a.low, a.high = 0, 1
	}
	a.high = max(a.high, a.low+1)
	step := math.Ceil((a.high - a.low) / 6)
	for power := a.low; power <= a.high; power += step {
		label := fmt.Sprintf("%g ms", math.Pow(10, power))
		if power >= 3 {
			label = fmt.Sprintf("%g s", math.Pow(10, power-3))
		}
		a.Ticks = append(a.Ticks, tick{X: pixels(a.at(power)), Label: label})
	}
	return a
}

func decade(ms float64) float64 { return math.Log10(max(ms, 0.1)) }

// at returns the position of a latency of 10^power milliseconds.
func (a axis) at(power float64) float64 {
	return plotMargin + (power-a.low)/(a.high-a.low)*(plotWidth-2*plotMargin)
}

func pixels(x float64) string { return fmt.Sprintf("%.1f", x) }

// plots uses one axis for the API's calls and the RPCs. A kind without calls is left out.
func plots(all []Calls) []latencies {
	a := newAxis(all)
	var found []latencies
	for _, l := range []latencies{{Kind: API, Title: "Calls of the API", Axis: a},
		{Kind: RPC, Title: "RPCs of the driver", Axis: a}} {
		for _, calls := range all {
			if calls.Kind == l.Kind {
				l.Rows = append(l.Rows, a.row(calls))
			}
		}
		slices.SortStableFunc(l.Rows, func(x, y latencyRow) int {
			return strings.Compare(x.Operation, y.Operation)
		})
		if len(l.Rows) > 0 {
			found = append(found, l)
		}
	}
	return found
}

func (a axis) row(calls Calls) latencyRow {
	if len(calls.Milliseconds) == 0 {
		none := quantile{Text: "–"}
		return latencyRow{calls, none, none, none, calls.Operation + ": no call", ""}
	}
	of := func(share float64) quantile {
		ms := calls.Quantile(share)
		return quantile{inMilliseconds(ms), pixels(a.at(decade(ms)))}
	}
	row := latencyRow{Calls: calls, P50: of(0.5), P95: of(0.95), Max: of(1)}
	row.Text = fmt.Sprintf("%s: of %s half took at most %s, 95 of 100 at most %s, the slowest %s",
		calls.Operation, plural(calls.Count, "call"), row.P50.Text, row.P95.Text, row.Max.Text)
	// A bar's height grows with the square root of its number of calls, so that one call is visible.
	heights := make([]float64, int(plotWidth/barStep))
	for _, ms := range calls.Milliseconds {
		heights[int((a.at(decade(ms))-plotMargin)/barStep)]++
	}
	highest := slices.Max(heights)
	var path strings.Builder
	for bin, n := range heights {
		if n > 0 {
			height := max(3, math.Sqrt(n/highest)*(plotHeight-6))
			fmt.Fprintf(&path, "M%.0f %.1fh%.0fv%.1fh-%.0fz", plotMargin+float64(bin)*barStep,
				(plotHeight-height)/2, barWidth, height, barWidth)
		}
	}
	row.Bars = path.String()
	return row
}

// These are the elements of a JUnit report, as Jenkins, GitLab and GitHub's actions read them.
type (
	testSuites struct {
		XMLName xml.Name `xml:"testsuites"`
		Name    string   `xml:"name,attr"`
		junitCounts
		Suites []testSuite `xml:"testsuite"`
	}
	testSuite struct {
		Name string `xml:"name,attr"`
		junitCounts
		Timestamp string     `xml:"timestamp,attr"`
		Hostname  string     `xml:"hostname,attr"`
		Cases     []testCase `xml:"testcase"`
	}
	junitCounts struct {
		Tests    int    `xml:"tests,attr"`
		Failures int    `xml:"failures,attr"`
		Errors   int    `xml:"errors,attr"`
		Skipped  int    `xml:"skipped,attr"`
		Time     string `xml:"time,attr"`
	}
	testCase struct {
		Name      string        `xml:"name,attr"`
		Class     string        `xml:"classname,attr"`
		Time      string        `xml:"time,attr"`
		Failure   *junitMessage `xml:"failure"`
		Error     *junitMessage `xml:"error"`
		Skipped   *junitMessage `xml:"skipped"`
		SystemOut string        `xml:"system-out,omitempty"`
	}
	junitMessage struct {
		Message string `xml:"message,attr"`
		Text    string `xml:",chardata"`
	}
)

// junit renders a suite for each group, and one with the verdict, so that a run without any spec
// does not look like a success. Blocked and untested results are skipped, and interrupted ones are
// errors.
func junit(r *Report) ([]byte, error) {
	verdict := []Result{{Group: "verdict", Name: string(r.Verdict), Status: verdictStatus(r.Verdict),
		Reason: r.Why}}
	all := testSuites{Name: "oxide-conformance",
		junitCounts: junitCount(slices.Concat(r.Results, verdict))}
	for _, group := range append(r.Groups(), Group{Name: "verdict", Results: verdict}) {
		suite := testSuite{Name: group.Name, Hostname: r.Run.Machine,
			Timestamp: r.Run.Began.UTC().Format(time.RFC3339), junitCounts: junitCount(group.Results)}
		for _, result := range group.Results {
			c := testCase{Name: result.Name, Class: result.Group, Time: junitSeconds(result.Seconds)}
			if result.ID != "" {
				c.Name = result.ID + " " + result.Name
			}
			for _, m := range result.Extent {
				c.SystemOut += m.String() + "\n"
			}
			says := result.Status.words() + ": " + result.Reason
			switch result.Status {
			case Passed:
			case Blocked, NotTested, NotApplicable:
				c.Skipped = &junitMessage{Message: says}
			case Failed:
				c.Failure = &junitMessage{Message: result.Reason, Text: evidenceText(result.Evidence)}
			default:
				c.Error = &junitMessage{Message: says, Text: evidenceText(result.Evidence)}
			}
			suite.Cases = append(suite.Cases, c)
		}
		all.Suites = append(all.Suites, suite)
	}
	text, err := xml.MarshalIndent(all, "", "  ")
	return append([]byte(xml.Header), append(text, '\n')...), err
}

func junitCount(results []Result) junitCounts {
	g := Group{Results: results}
	c := junitCounts{Tests: len(results), Failures: g.Count(Failed), Time: junitSeconds(g.Seconds()),
		Skipped: g.Count(Blocked) + g.Count(NotTested) + g.Count(NotApplicable)}
	c.Errors = c.Tests - g.Count(Passed) - c.Failures - c.Skipped
	return c
}

func verdictStatus(v Verdict) Status {
	return cmp.Or(map[Verdict]Status{Conforms: Passed, BlockedByRack: Blocked,
		DoesNotConform: Failed}[v], Interrupted) // Interrupted also for Incomplete
}

func junitSeconds(seconds float64) string { return strconv.FormatFloat(seconds, 'f', 3, 64) }

func evidenceText(evidence []LoggedCall) string {
	var text strings.Builder
	for _, e := range evidence {
		fmt.Fprintf(&text, "%s: %s, %s\n", e.request(), e.outcome(), inMilliseconds(e.Milliseconds))
		if e.RequestID != "" {
			fmt.Fprintf(&text, "  request %s\n", e.RequestID)
		}
		if e.Answer != "" {
			fmt.Fprintf(&text, "  %s\n", strings.ReplaceAll(e.Answer, "\n", "\n  "))
		}
	}
	return text.String()
}

// request returns a text such as "disk_create POST /v1/disks", or the name of the RPC.
func (e LoggedCall) request() string {
	return strings.Join(strings.Fields(e.Operation+" "+e.Method+" "+e.Path), " ")
}

// outcome returns a text such as "400 Bad Request ObjectAlreadyExists" or "NotFound".
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

// inMilliseconds returns a text such as "0.42 ms", "13 ms" or "1.5 s".
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

// inSeconds returns a text such as "0.8 s", "3 min 20 s" or "1 h 2 min".
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

func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return strconv.Itoa(n) + " " + noun + "s"
}
