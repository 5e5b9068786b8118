// Package console has the web page of a simulated rack. It shows the instances with their disks,
// the faults, and the requests and flight records as they arrive, and has buttons to change the
// rack. The package also guards the listeners against pages of other origins and slow clients.
//
// The page is rendered by html/template. Without its script it reloads itself. The script asks for
// the page again and again, and replaces its changed parts; the page's ETag shows that nothing has
// changed. Every form posts to one path (action.go), which turns the form into a request to the
// admin listener or the rack's API.
package console

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"embed"
	"encoding/json"
	"fmt"
	"html/template"
	"net/http"
	"strings"
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
	// Token is in every form of the pages.
	Token string
	// Hosts are names by which requests reach the admin listener, besides localhost.
	Hosts []string
	// BodyTime is the time in which a client has to send the body of a request.
	BodyTime time.Duration
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
	return &Console{Token: rand.Text(), BodyTime: time.Minute}
}

// actionPath is the path of every form. The paths of package adminapi do not begin with /console.
const actionPath = "/console/do"

//go:embed page
var files embed.FS

// Handler serves the console's pages: the rack at /, a disk below /console/disks.
func (c *Console) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", c.rackPage)
	mux.HandleFunc("GET /console/disks/{disk}", c.diskPage)
	mux.HandleFunc("GET /routes", c.routesPage)
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
	// Live pages are updated, unless they are paused.
	Live, Paused bool
	// Said is the outcome of the last form.
	Said string
	Body any
}

// unchanged reports whether the script that asks has the page already, and has answered it then. A
// page shows the rack, the feed, and more. It is another page when the simulator has started again.
func (c *Console) unchanged(w http.ResponseWriter, r *http.Request, more any) (bool, error) {
	version, err := c.Version()
	if err != nil {
		return false, err
	}
	var request, entry int
	c.Requests(0, 1, func(r *adminapi.Request) bool { request = r.Seq; return true })
	c.Flights(0, 1, func(e *flightlog.Entry) bool { entry = e.Seq; return true })
	shown, err := json.Marshal([]any{c.Token, version, c.Switches(), c.Faults(), c.Machines(),
		request, entry, more})
	if err != nil {
		return false, err
	}
	tag := fmt.Sprintf(`"%x"`, sha256.Sum256(shown))
	w.Header().Set("ETag", tag)
	if r.Header.Get("If-None-Match") != tag {
		return false, nil
	}
	w.WriteHeader(http.StatusNotModified)
	return true, nil
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
