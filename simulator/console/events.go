package console

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/flightlog"
)

// position identifies the state of a page: the process that rendered it, and the last change of the
// board, the last request and the last entry of a flight record that it shows.
type position struct {
	boot                   string
	change, request, entry int
}

func (p position) String() string {
	return fmt.Sprintf("%s.%d.%d.%d", p.boot, p.change, p.request, p.entry)
}

func parsePosition(text string) (p position) {
	words := strings.ReplaceAll(text, ".", " ")
	// A missing number stays zero, so that the page gets everything.
	_, _ = fmt.Sscan(words, &p.boot, &p.change, &p.request, &p.entry)
	return p
}

func (p position) address(name, value string) string {
	return eventsPath + "?" + url.Values{"at": {p.String()}, name: {value}}.Encode()
}

// often is the interval at which a page is updated.
const often = 100 * time.Millisecond

// events sends a page its changes, as server-sent events, until the page or the rack is closed.
func (c *Console) events(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	at := parsePosition(query.Get("at"))
	if last := r.Header.Get("Last-Event-ID"); last != "" {
		at = parsePosition(last)
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	if at.boot != c.boot {
		// The page is of an earlier simulator, and its token with it.
		fmt.Fprint(w, "event: restart\ndata:\n\n")
		return
	}
	changes := c.rackChanges
	disk := &watched{Console: c, name: query.Get("disk")}
	if name := query.Get("about"); name != "" {
		var own board
		// The board is a new one, so the page gets all of it.
		disk.name, at.change = name, 0
		changes = func(at *position) (update, error) { return disk.changes(&own, at) }
	}
	// A comment makes the browser report to its page that it is connected.
	text := ":\n\n"
	tick := time.NewTicker(often)
	defer tick.Stop()
	for {
		if text != "" {
			if _, err := w.Write([]byte(text)); err != nil {
				return
			}
			if err := http.NewResponseController(w).Flush(); err != nil {
				return
			}
		}
		select {
		case <-r.Context().Done():
			return
		case <-c.Closing:
			return
		case <-tick.C:
		}
		u, err := changes(&at)
		if err == nil {
			u.Rows, err = c.rows(&at, disk)
		}
		if err != nil {
			return // the browser connects again
		}
		if text, err = event(at, u); err != nil {
			return
		}
	}
}

// event returns the text of an event, or "" for an empty update.
func event(at position, u update) (string, error) {
	if len(u.Lists)+len(u.Items)+len(u.Rows) == 0 {
		return "", nil
	}
	var data bytes.Buffer
	encoder := json.NewEncoder(&data) // ends the data with a line feed
	encoder.SetEscapeHTML(false)
	err := encoder.Encode(u)
	return fmt.Sprintf("id: %s\ndata: %s\n", at, &data), err
}

func (c *Console) rackChanges(at *position) (update, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.refresh()
	u := c.board.since(at.change)
	at.change = c.board.last
	return u, err
}

// changes returns the changes of a disk's page, which has a board of its own.
func (w *watched) changes(own *board, at *position) (update, error) {
	lists, err := w.parts()
	if err == nil {
		err = own.put(lists)
	}
	u := own.since(at.change)
	at.change = own.last
	return u, err
}

type row struct {
	adminapi.Request
	Who, Disk string
	Bad       bool
}

func newRow(r adminapi.Request) row {
	// "terraform-provider-oxide/1.2 (…)" is shown as "terraform-provider-oxide".
	who, _, _ := strings.Cut(r.Caller, " ")
	who, _, _ = strings.Cut(who, "/")
	row := row{Request: r, Who: who, Bad: r.Status == 0 || r.Status >= 400}
	if strings.Contains(r.Path, "/disks") {
		row.Disk = r.ObjectID
	}
	return row
}

// ended returns the time at which the rack answered a request.
func ended(r adminapi.Request) time.Time {
	return r.Time.Add(time.Duration(r.DurationMS * float64(time.Millisecond)))
}

type flightRow struct {
	flightlog.Entry
	Who, Object, About string
	Bad                bool
}

// newFlightRow returns the row of an entry. names has the names of instances and disks by ID. For a
// deleted object the row shows the name in the entry, or the ID.
func newFlightRow(e flightlog.Entry, names map[string]string) flightRow {
	e.Time = e.Time.UTC()
	about := slices.DeleteFunc([]string{e.Device, e.Path, e.Detail},
		func(s string) bool { return s == "" })
	return flightRow{Entry: e, Who: cmp.Or(names[e.Instance], e.Instance),
		Object: cmp.Or(names[e.Volume], e.Disk, e.Volume), About: strings.Join(about, ", "),
		Bad: e.Outcome != flightlog.Begun && e.Outcome != flightlog.Done}
}

// rows returns the requests and the entries of flight records after a position that concern a disk,
// the newest first.
func (c *Console) rows(at *position, disk *watched) (rows []template.HTML, err error) {
	if err := disk.refresh(); err != nil {
		return nil, err
	}
	last := *at
	requests := c.Requests(at.request, shownRows, func(r *adminapi.Request) bool {
		last.request = max(last.request, r.Seq)
		return disk.wants(r)
	})
	entries := c.Flights(at.entry, shownRows, func(e *flightlog.Entry) bool {
		last.entry = max(last.entry, e.Seq)
		return disk.wantsEntry(e)
	})
	*at = last
	var names map[string]string
	if len(entries) > 0 {
		if names, err = c.currentNames(); err != nil {
			return nil, err
		}
	}
	for len(rows) < shownRows && len(requests)+len(entries) > 0 {
		var html template.HTML
		if len(requests) == 0 || len(entries) > 0 && entries[0].Time.After(ended(requests[0])) {
			html, err = render("flight", newFlightRow(entries[0], names))
			entries = entries[1:]
		} else {
			html, err = render("row", newRow(requests[0]))
			requests = requests[1:]
		}
		if err != nil {
			return nil, err
		}
		rows = append(rows, html)
	}
	return rows, nil
}

// currentNames returns the names of instances and disks by their IDs. The map is never changed.
func (c *Console) currentNames() (map[string]string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.refresh()
	return c.names, err
}
