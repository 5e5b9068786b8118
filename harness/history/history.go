// Package history records the events of a run and draws them as one HTML page, in lanes for steps
// of the orchestrator, calls of each driver, requests to the rack, and changes of disks and mounts.
// Marks show kills and faults. The page also shows which promise the driver broke, and when.
package history

import (
	"cmp"
	_ "embed"
	"errors"
	"fmt"
	"html/template"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"
)

// These are the names of the lanes. Each driver has a further lane.
const (
	Orchestrator = "orchestrator"
	Rack         = "rack"
	Disk         = "disk"
)

// Event is a call, which has a duration, or a mark, which has only a time.
type Event struct {
	Lane, Name string
	Start      time.Time
	// End is zero until the call is answered.
	End     time.Time
	Outcome string
	Failed  bool
	// Mark means that the event is a kill, a start, a fault or a power cut.
	Mark bool
}

// limit is the maximum number of events in a Recorder, so that a long run does not fill the memory.
const limit = 2000

// Recorder keeps the latest events of a history. Several goroutines may use it at once.
type Recorder struct {
	mu sync.Mutex
	// mu guards these fields.
	events  []*Event
	since   time.Time
	dropped int
}

// Begin drops all events and starts a new history.
func (r *Recorder) Begin() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events, r.since, r.dropped = nil, time.Now(), 0
}

// Call records a call that begins now. When the call ends, invoke answered().
func (r *Recorder) Call(lane, name string) (answered func(outcome string, failed bool)) {
	e := &Event{Lane: lane, Name: name, Start: time.Now()}
	r.add(e)
	return func(outcome string, failed bool) {
		r.mu.Lock()
		defer r.mu.Unlock()
		e.End, e.Outcome, e.Failed = time.Now(), outcome, failed
	}
}

// Step records a step of the orchestrator that begins now. When the step ends, invoke done().
func (r *Recorder) Step(name string) (done func(err error)) {
	answered := r.Call(Orchestrator, name)
	return func(err error) {
		outcome := "OK"
		if err != nil {
			outcome = err.Error()
		}
		answered(outcome, err != nil)
	}
}

// Mark records a mark at the current time.
func (r *Recorder) Mark(lane, name string) {
	now := time.Now()
	r.add(&Event{Lane: lane, Name: name, Start: now, End: now, Mark: true})
}

func (r *Recorder) add(e *Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.events) == limit {
		r.events = append(r.events[:0], r.events[limit/2:]...)
		r.dropped += limit / 2
	}
	r.events = append(r.events, e)
}

// Events returns the recorded events, the time of the last Begin, and the number of dropped events.
func (r *Recorder) Events() (events []Event, since time.Time, dropped int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.events {
		events = append(events, *e)
	}
	return events, r.since, r.dropped
}

// Page is a history that Write draws. Texts in it may come from a rack or a disk, so Write shows
// each text literally: a browser does not interpret it.
type Page struct {
	Title string
	// Seed and Command tell how to repeat the run. The page omits them if they are empty.
	Seed, Command string
	// Broken describes the promise that was broken at the time At, or is "" if none was.
	Broken string
	At     time.Time
	// Evidence is the directory with the logs.
	Evidence string
	Events   []Event
	// Dropped is the number of earlier events that the page lacks.
	Dropped int
}

const maxTextRunes = 40

//go:embed page.html
var source string

var page = template.Must(template.New("page").Parse(source))

// Write writes the page as HTML without scripts and without links to other files.
func (p Page) Write(w io.Writer) error {
	if err := page.Execute(w, layout(p)); err != nil {
		return fmt.Errorf("draw a history: %w", err)
	}
	return nil
}

// WriteFile writes the page to a file, and replaces an existing one.
func (p Page) WriteFile(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(p.Write(f), f.Close())
}

// drawing is a page in a CSS grid. Each event has its own row, so texts do not overlap. A lane has
// enough columns for bars that overlap in time, and one more column for texts.
type drawing struct {
	Page
	Lanes []*lane
	Rows  []*row
	End   int // the grid's line below the last row
}

type lane struct {
	Name                    string
	Column, Bars, Text, End int
	ends                    []int // for each column of bars, the line where its last bar ends
}

// row shows an event or Page.Broken. Its bar is between the grid lines At and End.
type row struct {
	Event
	Time, Text, Full, Class     string
	At, End, Column, TextColumn int
	Broken                      bool
}

func layout(p Page) drawing {
	d := drawing{Page: p}
	for _, text := range []*string{&d.Title, &d.Seed, &d.Command, &d.Broken, &d.Evidence} {
		*text = plain(*text)
	}
	lanes := map[string]*lane{}
	for _, e := range p.Events {
		d.Rows = append(d.Rows, &row{Event: e})
		lanes[e.Lane] = &lane{Name: e.Lane}
	}
	if d.Broken != "" {
		first, _, _ := strings.Cut(d.Broken, "\n")
		d.Rows = append(d.Rows, &row{Broken: true, Text: first, Full: d.Broken,
			Event: Event{Start: p.At}})
	}
	slices.SortStableFunc(d.Rows, func(a, b *row) int { return a.Start.Compare(b.Start) })
	d.End = len(d.Rows) + 2 // the first row of the grid has the names of the lanes
	for i, r := range d.Rows {
		if r.At, r.End = i+2, d.End; r.Mark || r.Broken {
			r.End = r.At + 1
		} else if next := slices.IndexFunc(d.Rows[i+1:], func(later *row) bool {
			return !r.Event.End.IsZero() && !later.Start.Before(r.Event.End)
		}); next >= 0 {
			r.End = r.At + 1 + next
		}
		if r.Broken {
			continue
		}
		l := lanes[r.Lane]
		r.Column = slices.IndexFunc(l.ends, func(end int) bool { return end <= r.At })
		if r.Column < 0 {
			r.Column = len(l.ends)
			l.ends = append(l.ends, 0)
		}
		l.ends[r.Column] = r.End
	}
	column := 2
	for _, name := range slices.SortedFunc(maps.Keys(lanes), compareLanes) {
		l := lanes[name]
		l.Name, l.Column, l.Bars, l.Text = plain(name), column, len(l.ends), column+len(l.ends)
		l.End = l.Text + 1
		d.Lanes, column = append(d.Lanes, l), l.End
	}
	for _, r := range d.Rows {
		if l := lanes[r.Lane]; l != nil {
			r.describe(d.Rows[0].Start)
			r.Column, r.TextColumn = l.Column+r.Column, l.Text
		}
	}
	return d
}

func (r *row) describe(start time.Time) {
	r.Time, r.Text = fmt.Sprintf("%.3f s", r.Start.Sub(start).Seconds()), r.Name
	var took string
	switch {
	case r.Mark:
		r.Class, took = "mark", "at "+r.Start.Format("15:04:05.000")
	case r.Event.End.IsZero():
		r.Class, took = "open", "without an answer"
	default:
		took = r.Event.End.Sub(r.Start).Round(10 * time.Microsecond).String()
		if r.Class = "good"; r.Failed {
			r.Class = "failed"
		}
	}
	if r.Failed {
		r.Text += " – " + r.Outcome
	}
	r.Text = plain(strings.Join(strings.Fields(r.Text), " "))
	if text := []rune(r.Text); len(text) > maxTextRunes {
		r.Text = string(text[:maxTextRunes-1]) + "…"
	}
	r.Full = plain(strings.Join([]string{r.Lane + ": " + r.Name, r.Outcome, took}, "\n"))
}

func compareLanes(a, b string) int {
	rank := map[string]int{Orchestrator: -1, Rack: 1, Disk: 2} // a driver has 0
	return cmp.Or(rank[a]-rank[b], strings.Compare(a, b))
}

// plain replaces characters that a browser or terminal interprets and does not show: all control
// characters except line feeds, and invisible characters, which may change the text's direction.
func plain(text string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && (unicode.IsControl(r) || unicode.In(r, unicode.Cf, unicode.Zl, unicode.Zp)) {
			return unicode.ReplacementChar
		}
		return r
	}, strings.ToValidUTF8(text, string(unicode.ReplacementChar)))
}
