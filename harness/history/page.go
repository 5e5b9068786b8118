package history

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"os"
	"slices"
	"strings"
	"time"
	"unicode"
)

// Page is the content of a page. A text may come from a rack or a disk, so the page shows every
// text literally and never interprets it.
type Page struct {
	Title string
	// Seed and Command repeat the run. They are left out if they are empty.
	Seed, Command string
	// Broken describes the promise that was broken at the time At; the zero time is the end. Without
	// it the page shows a history in which every promise was kept.
	Broken string
	At     time.Time
	// Evidence is the directory with the logs.
	Evidence string
	Events   []Event
	// Dropped is the number of earlier events that are missing.
	Dropped int
}

// The dimensions of the drawing, in pixels. Each event has a row, so no two texts overlap.
const (
	rowHeight  = 18
	headHeight = 28
	timeWidth  = 84
	barWidth   = 9
	textWidth  = 300
	// letters is the number of letters that fit into textWidth.
	letters = 40
)

//go:embed page.html
var source string

var page = template.Must(template.New("page").Parse(source))

// Write writes the page. It needs no script and no other file.
func (p Page) Write(w io.Writer) error {
	if err := page.Execute(w, layout(p)); err != nil {
		return fmt.Errorf("draw a history: %w", err)
	}
	return nil
}

// WriteFile writes the page to a file, which replaces the file if it exists.
func (p Page) WriteFile(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	if err := p.Write(f); err != nil {
		_ = f.Close()
		return err
	}
	return f.Close()
}

// drawing is a page with the positions of all its parts.
type drawing struct {
	Title, Seed, Command, Broken, Evidence string
	Dropped, Width, Height                 int
	Lanes                                  []lane
	Rows                                   []row
}

type lane struct {
	Name     string
	X, Width int
	bars     int // the number of bars side by side
}

// row is an event, or the broken promise, which is in no lane.
type row struct {
	Time, Text, Full, Class                string
	Y, X, TextX, TextY, Top, Width, Height int
	Broken, Mark                           bool
}

func layout(p Page) drawing {
	d := drawing{Title: plain(p.Title), Seed: plain(p.Seed), Command: plain(p.Command),
		Broken: plain(p.Broken), Evidence: plain(p.Evidence), Dropped: p.Dropped}
	events := slices.Clone(p.Events)
	slices.SortStableFunc(events, func(a, b Event) int { return a.Start.Compare(b.Start) })
	broken := len(events) + 1
	if !p.At.IsZero() {
		broken, _ = slices.BinarySearchFunc(events, p.At, func(e Event, at time.Time) int {
			if e.Start.After(at) {
				return 1
			}
			return -1
		})
	}
	broken = min(broken, len(events))
	// rowOf returns the row of an event. The row of the broken promise shifts the rows after it.
	rowOf := func(i int) int {
		if d.Broken != "" && i >= broken {
			return i + 1
		}
		return i
	}
	rows := len(events)
	if d.Broken != "" {
		rows++
	}
	lanes, slots, ends := map[string]*lane{}, make([]int, len(events)), make([]int, len(events))
	free := map[string][]int{} // by lane, the row at which each slot for a bar is free again
	for i, e := range events {
		ends[i] = rows
		if e.Mark {
			ends[i] = rowOf(i) + 1
		} else if !e.End.IsZero() {
			next := i + 1
			for next < len(events) && events[next].Start.Before(e.End) {
				next++
			}
			ends[i] = rowOf(next-1) + 1
		}
		if lanes[e.Lane] == nil {
			lanes[e.Lane] = &lane{Name: e.Lane}
		}
		places := free[e.Lane]
		slot := slices.IndexFunc(places, func(end int) bool { return end <= rowOf(i) })
		if slot < 0 {
			slot = len(places)
			places = append(places, 0)
		}
		places[slot] = ends[i]
		free[e.Lane], slots[i] = places, slot
		lanes[e.Lane].bars = len(places)
	}
	x := timeWidth
	for _, name := range laneNames(lanes) {
		l := lanes[name]
		l.X, l.Width = x, l.bars*(barWidth+2)+textWidth
		x += l.Width
		d.Lanes = append(d.Lanes, lane{Name: plain(l.Name), X: l.X, Width: l.Width})
	}
	d.Width, d.Height = max(x, timeWidth+textWidth), headHeight+rows*rowHeight+4
	for i, e := range events {
		l, y := lanes[e.Lane], headHeight+rowOf(i)*rowHeight
		r := row{Y: y, TextY: y + 13, Time: elapsed(events[0].Start, e.Start), Mark: e.Mark,
			X: l.X + 4 + slots[i]*(barWidth+2), TextX: l.X + 8 + l.bars*(barWidth+2), Width: barWidth,
			Top: y + 2, Height: (ends[i]-rowOf(i))*rowHeight - 4, Class: class(e)}
		r.Text = e.Name
		if e.Failed {
			r.Text += " – " + e.Outcome
		}
		r.Full = strings.Join([]string{e.Lane + ": " + e.Name, e.Outcome, took(e)}, "\n")
		r.Text, r.Full = shorten(plain(strings.Join(strings.Fields(r.Text), " "))), plain(r.Full)
		d.Rows = append(d.Rows, r)
	}
	if d.Broken != "" {
		y := headHeight + broken*rowHeight
		first, _, _ := strings.Cut(d.Broken, "\n")
		d.Rows = slices.Insert(d.Rows, broken, row{Broken: true, Y: y, TextY: y + 13,
			Width: d.Width, TextX: 4, Text: first, Full: d.Broken})
	}
	return d
}

// Diamond returns the SVG path of a mark.
func (r row) Diamond() string {
	return fmt.Sprintf("M%d %d l5 6 l-5 6 l-5 -6 z", r.X+barWidth/2, r.Y+3)
}

func class(e Event) string {
	switch {
	case e.Mark:
		return "mark"
	case e.End.IsZero():
		return "open"
	case e.Failed:
		return "failed"
	}
	return "good"
}

func took(e Event) string {
	switch {
	case e.Mark:
		return "at " + e.Start.Format("15:04:05.000")
	case e.End.IsZero():
		return "without an answer"
	}
	return e.End.Sub(e.Start).Round(10 * time.Microsecond).String()
}

func elapsed(from, to time.Time) string {
	return fmt.Sprintf("%.3f s", to.Sub(from).Seconds())
}

// laneNames sorts lanes from the orchestrator to the disk.
func laneNames(lanes map[string]*lane) []string {
	var names []string
	for name := range lanes {
		names = append(names, name)
	}
	rank := func(name string) string {
		switch name {
		case Orchestrator:
			return "0"
		case Rack:
			return "2"
		case Disk:
			return "3"
		}
		return "1 " + name
	}
	slices.SortFunc(names, func(a, b string) int { return strings.Compare(rank(a), rank(b)) })
	return names
}

func shorten(text string) string {
	if letter := []rune(text); len(letter) > letters {
		return string(letter[:letters-1]) + "…"
	}
	return text
}

// plain replaces everything that a browser or a terminal would interpret instead of showing it:
// control characters but line feeds, and invisible marks, which may change the direction.
func plain(text string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && (unicode.IsControl(r) || unicode.In(r, unicode.Cf, unicode.Zl, unicode.Zp)) {
			return unicode.ReplacementChar
		}
		return r
	}, strings.ToValidUTF8(text, string(unicode.ReplacementChar)))
}
