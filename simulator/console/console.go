// Package console has the web page of a simulated rack. It shows the instances with their disks,
// the faults, and the requests and flight records as they arrive, and has buttons to change the
// rack. The package also guards the listeners against pages of other origins and slow clients.
//
// The page is rendered by html/template. Without its script it reloads itself. The script replaces
// the changed parts of the page with those that the server sends (events.go). Every form posts to
// one path (action.go), which turns the form into a request to the admin listener or the rack's
// API.
package console

import (
	"bytes"
	"context"
	"crypto/rand"
	"embed"
	"fmt"
	"html/template"
	"net/http"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/flightlog"
)

// Console serves the page of one rack. [New] makes one; the fields are set before it serves.
type Console struct {
	// State returns the content of the records and their version. Version returns only the version.
	State   func() (adminapi.State, int, error)
	Version func() (int, error)
	// Machines returns the virtual machines of the instances.
	Machines func() []adminapi.Machine
	// Switches and Faults return the present switches and the active faults.
	Switches func() adminapi.Switches
	Faults   func() []adminapi.ActiveFault
	// Requests returns up to limit requests of the last hour after number since for which keep returns
	// true, the newest first.
	Requests func(since, limit int, keep func(*adminapi.Request) bool) []adminapi.Request
	// Flights returns entries of flight records in the same way.
	Flights func(since, limit int, keep func(*flightlog.Entry) bool) []flightlog.Entry
	// Disk returns what the data plane knows of a disk.
	Disk func(id string) (Disk, error)
	// Admin answers the requests of package adminapi.
	Admin http.Handler
	// Run carries out a request of the rack's API that has no body.
	Run func(ctx context.Context, method, path string) (status int, answer []byte)
	// Operations are the operations of the rack's API.
	Operations []string
	// Closing is closed when the rack begins to close.
	Closing <-chan struct{}
	// Token is in every form of the pages.
	Token string
	// Hosts are names by which requests reach the admin listener, besides localhost.
	Hosts []string
	// BodyTime is the time in which a client has to send the body of a request.
	BodyTime time.Duration

	// boot distinguishes the pages of this process from those of an earlier one.
	boot string
	mu   sync.Mutex
	// mu guards the fields below. stamp identifies the state that the board shows. names has the names
	// of instances and disks, by their IDs.
	board board
	stamp string
	names map[string]string
}

// Disk is what the data plane knows of a disk.
type Disk struct {
	AllocatedBytes int64
	// CanFail reports whether the disk can have faults; Faults and Activity need it.
	CanFail bool
	Faults  []adminapi.DiskFault
	// Activity has an item for each of the last seconds, the oldest first.
	Activity []Activity
}

// Activity is the number of operations of a disk in one second.
type Activity struct{ Reads, Writes, Flushes int }

// New returns a console with a new token.
func New() *Console {
	return &Console{Token: rand.Text(), boot: rand.Text(), BodyTime: time.Minute}
}

// The paths of the console. The paths of package adminapi do not begin with /console.
const (
	actionPath = "/console/do"
	eventsPath = "/console/events"
)

//go:embed page
var files embed.FS

// Handler serves the console's pages: the rack at /, a disk below /console/disks.
func (c *Console) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", c.rackPage)
	mux.HandleFunc("GET /console/disks/{disk}", c.diskPage)
	mux.HandleFunc("GET /routes", c.routesPage)
	mux.HandleFunc("GET "+eventsPath, c.events)
	mux.HandleFunc("POST "+actionPath, c.act)
	for _, name := range []string{"style.css", "script.js"} {
		mux.HandleFunc("GET /console/"+name, func(w http.ResponseWriter, r *http.Request) {
			http.ServeFileFS(w, r, files, "page/"+name)
		})
	}
	return mux
}

// policy lets the pages load the style sheet and the script from this listener, and nothing else.
// The icon is an empty data URL, so that no browser asks for one.
const policy = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; " +
	"img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

// page has the values that every page's template needs.
type page struct {
	Title, Token, Path string
	// Events is the address of the page's events, or "" if the page stays as it is.
	Events string
	// Paused pages do not change.
	Paused bool
	// Said is the outcome of the last form.
	Said string
	Body any
}

func (c *Console) show(w http.ResponseWriter, r *http.Request, status int, name string, p page) {
	p.Token, p.Path, p.Paused = c.Token, r.URL.RequestURI(), r.URL.Query().Has("pause")
	p.Said = r.URL.Query().Get("said")
	text, err := render(name, p)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	header := w.Header()
	header.Set("Content-Type", "text/html; charset=utf-8")
	header.Set("Content-Security-Policy", policy)
	// Without a referrer, a form's Origin would be "null".
	header.Set("Referrer-Policy", "same-origin")
	header.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	// The caller may be gone.
	_, _ = w.Write([]byte(text))
}

var templates = template.Must(template.New("").Funcs(template.FuncMap{
	"bytes": bytesText, "plot": plot,
	"ms": func(seconds float64) string { return fmt.Sprintf("%.1f", 1000*seconds) },
}).ParseFS(files, "page/*.tmpl"))

// render executes a template, and escapes control characters in the result.
func render(name string, data any) (template.HTML, error) {
	var b bytes.Buffer
	if err := templates.ExecuteTemplate(&b, name, data); err != nil {
		return "", fmt.Errorf("render %s: %w", name, err)
	}
	return template.HTML(plain(b.String())), nil
}

func plain(text string) string {
	var b strings.Builder
	for _, r := range text {
		if r == '\n' || r == '\t' || unicode.IsPrint(r) {
			b.WriteRune(r)
		} else {
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}

// bytesText returns a number of bytes in the largest fitting unit, such as "1.5 GiB".
func bytesText(n int64) string {
	value, units := float64(n), []string{"B", "KiB", "MiB", "GiB", "TiB"}
	for value >= 1024 && len(units) > 1 {
		value, units = value/1024, units[1:]
	}
	text := strings.TrimSuffix(fmt.Sprintf("%.1f", value), ".0")
	return text + " " + units[0]
}
