package history

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// element is an element of a page. To parse it, the page must be well-formed.
type element struct {
	XMLName  xml.Name
	ID       string     `xml:"id,attr"`
	Class    string     `xml:"class,attr"`
	Style    string     `xml:"style,attr"`
	Title    string     `xml:"title,attr"`
	Text     string     `xml:",chardata"`
	Children []*element `xml:",any"`
}

// all returns the element, and those in it, that the filter accepts.
func (e *element) all(accept func(*element) bool) (found []*element) {
	if accept(e) {
		found = append(found, e)
	}
	for _, c := range e.Children {
		found = append(found, c.all(accept)...)
	}
	return found
}

func parsePage(t *testing.T, p Page) (*element, string) {
	t.Helper()
	var b bytes.Buffer
	if err := p.Write(&b); err != nil {
		t.Fatal(err)
	}
	var e element
	if err := xml.Unmarshal(b.Bytes(), &e); err != nil {
		t.Fatalf("the page is not well-formed: %v\n%s", err, &b)
	}
	return &e, b.String()
}

// area is the place of an element in the grid: between two lines each.
type area struct{ top, left, bottom, right int }

// areas returns the places of the elements with these classes.
func areas(t *testing.T, e *element, classes ...string) (all []area) {
	for _, e := range e.all(func(e *element) bool { return slices.Contains(classes, e.Class) }) {
		var a area
		n, err := fmt.Sscanf(e.Style, "grid-area:%d/%d/%d/%d", &a.top, &a.left, &a.bottom, &a.right)
		if n == 3 {
			a.right = a.left + 1
		} else if err != nil {
			t.Fatalf("an element is at %q: %v", e.Style, err)
		}
		all = append(all, a)
	}
	return all
}

func example() Page {
	start := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	return Page{Title: "a history", Seed: "4711", Command: "PROOF_SEED=4711 make model",
		Broken: "bytes were lost\nwant 1, got 0", At: at(55), Evidence: "/tmp/run",
		Events: []Event{
			{Lane: Disk, Name: "Formatted", Start: at(25), End: at(30)},
			{Lane: Orchestrator, Name: "stage <script>alert(1)</script>", Start: at(10), End: at(50)},
			{Lane: "driver 1", Name: "NodeStage \x1b[31m\u202eevil", Start: at(11), End: at(49),
				Outcome: "Internal: no", Failed: true},
			{Lane: "driver 1", Name: "NodeGetVolumeStats", Start: at(12), End: at(13), Outcome: "OK"},
			{Lane: "driver 1", Name: "NodePublish", Start: at(14), End: at(20)},
			{Lane: Rack, Name: "killed", Start: at(52), End: at(52), Mark: true},
			{Lane: Rack, Name: "disk_view", Start: at(60)},
		}}
}

func TestAPageShowsTheBrokenPromise(t *testing.T) {
	root, source := parsePage(t, example())
	for _, never := range []string{"<script", "\x1b", "\u202e", "http://", "src=", "@import"} {
		if strings.Contains(source, never) {
			t.Errorf("the page contains %q", never)
		}
	}
	texts := map[string]string{}
	for _, e := range root.all(func(e *element) bool { return e.ID != "" }) {
		for _, c := range e.all(func(*element) bool { return true }) {
			texts[e.ID] += c.Text
		}
	}
	for id, want := range map[string]string{"seed": "4711", "command": "PROOF_SEED=4711 make model",
		"promise": "want 1, got 0", "broken": "bytes were lost"} {
		if !strings.Contains(texts[id], want) {
			t.Errorf("%s is %q, want %q in it", id, texts[id], want)
		}
	}
	var order []string
	for _, r := range root.all(func(e *element) bool { return strings.HasPrefix(e.Class, "row") }) {
		order = append(order, r.Title)
	}
	for i, want := range []string{"stage <script>alert(1)</script>",
		"NodeStage �[31m�evil\nInternal: no", "NodeGetVolumeStats", "NodePublish", "Formatted",
		"killed", "bytes were lost", "disk_view"} {
		if i >= len(order) || !strings.Contains(order[i], want) {
			t.Fatalf("the rows are %q, want %q as number %d", order, want, i+1)
		}
	}
	for _, bar := range root.all(func(e *element) bool { return e.XMLName.Local == "i" }) {
		if !slices.Contains(order, bar.Title) {
			t.Errorf("a bar's title is %q, want that of its row", bar.Title)
		}
	}
}

func TestBarsAreInTimeOrderInsideTheirLanesAndNeverOverlap(t *testing.T) {
	root, _ := parsePage(t, example())
	lanes := areas(t, root, "lane")
	bars := areas(t, root, "good", "failed", "open")
	if len(lanes) != 4 || len(bars) != 6 {
		t.Fatalf("%d lanes and %d bars, want 4 and 6", len(lanes), len(bars))
	}
	for i, b := range bars {
		if !slices.ContainsFunc(lanes, func(l area) bool {
			return b.left >= l.left && b.right < l.right && b.top > l.top && b.bottom <= l.bottom
		}) || b.bottom <= b.top {
			t.Errorf("bar %d is in no lane: %+v", i, b)
		}
		if i > 0 && b.top <= bars[i-1].top {
			t.Errorf("bar %d is not below the one before it", i)
		}
		for _, o := range bars[:i] {
			if b.left == o.left && b.top < o.bottom && o.top < b.bottom {
				t.Errorf("two bars overlap: %+v and %+v", o, b)
			}
		}
	}
	// The driver's second call runs beside its first one, and its third one after the second.
	if bars[1].left == bars[2].left || bars[2].left != bars[3].left {
		t.Errorf("the driver's bars are at %d, %d and %d", bars[1].left, bars[2].left, bars[3].left)
	}
}

func TestARecorderKeepsOpenCallsAndTheLatestEvents(t *testing.T) {
	var none *Recorder
	none.Call("a", "b")("OK", false)
	none.Mark("a", "b")
	var r Recorder
	r.Mark(Rack, "of an earlier history")
	r.Begin()
	r.Call(Orchestrator, "open")
	r.Call(Orchestrator, "answered")("no", true)
	events, since, _ := r.Events()
	if len(events) != 2 || !events[0].End.IsZero() || events[1].End.IsZero() || !events[1].Failed ||
		since.IsZero() {
		t.Fatalf("the events are %+v since %s", events, since)
	}
	for range limit {
		r.Mark(Rack, "x")
	}
	if events, _, dropped := r.Events(); len(events) > limit || dropped+len(events) != limit+2 {
		t.Errorf("%d events and %d dropped, want %d together", len(events), dropped, limit+2)
	}
}
