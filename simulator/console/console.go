// Package console serves the web page of a simulated rack. The page shows the instances with their
// disks, the faults, and the requests and flight records as they arrive, and has buttons to change
// the rack. The package also protects the API and the admin listener from pages of other origins
// and from slow clients.
//
// html/template renders the page. The page's script requests the page repeatedly, and replaces the
// parts that have changed; without scripts, the page reloads itself. An ETag identifies the page's
// content, so an unchanged page is not sent again. All forms are posted to actionPath.
package console

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/flightlog"
)

// Console serves the pages of one rack. [New] sets Token and BodyTime, and the caller sets the
// other exported fields before the console serves.
type Console struct {
	// State reads all records, and returns them with their version. Version reads only the version.
	State    func() (adminapi.State, int, error)
	Version  func() (int, error)
	Machines func() []adminapi.Machine
	Switches func() adminapi.Switches
	Faults   func() []adminapi.ActiveFault
	// Requests returns up to limit requests of the last hour that keep() accepts, the newest first.
	Requests func(limit int, keep func(*adminapi.Request) bool) []adminapi.Request
	// Flights returns up to limit entries of flight records, as Requests does with requests.
	Flights func(limit int, keep func(*flightlog.Entry) bool) []flightlog.Entry
	Disk    func(id string) (Disk, error)
	Admin   http.Handler // handles the requests to the admin listener (package adminapi)
	// Run carries out a request without a body on the rack's API.
	Run        func(ctx context.Context, method, path string) (status int, answer []byte)
	Operations []string
	// Token is a secret in every HTML form. Pages of other origins cannot read it, so cannot send it.
	Token string
	// Hosts are the host names, besides localhost, under which clients may reach the admin listener.
	Hosts []string
	// BodyTime limits how long a client may take to send the body of a request.
	BodyTime time.Duration

	mu sync.Mutex
	// mu guards records and version, the last result of State. version is 0 before the first call.
	records adminapi.State
	version int
}

// Disk has what the rack's records lack about a disk: allocated bytes, faults and activity.
type Disk struct {
	AllocatedBytes int64
	// CanFail reports whether the disk can have faults. If it cannot, Faults and Activity are empty.
	CanFail bool
	Faults  []adminapi.DiskFault
	// Activity has one item for each of the last seconds, the oldest first.
	Activity []Activity
}

// Activity is the number of operations of a disk in one second.
type Activity struct{ Reads, Writes, Flushes int }

// New returns a console with a new random token.
func New() *Console {
	return &Console{Token: rand.Text(), BodyTime: time.Minute}
}

// actionPath receives every form. No path of package adminapi begins with /console.
const actionPath = "/console/do"

//go:embed page
var files embed.FS

// Handler serves the pages: the rack at /, a disk at /console/disks/ID, and the routes at /routes.
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
// The pages' icon is an empty data URL, so that browsers do not request /favicon.ico.
const policy = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; " +
	"img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

type page struct {
	Title, Token, Path string
	// If Live is true, the page's script updates the page. Paused suspends the updates.
	Live, Paused bool
	// Said tells the user the result of the form that the browser has sent last.
	Said string
	Body any
}

// state returns the records and their version. It reads the records only if they have changed since
// the last call, because the script asks for a page five times a second.
func (c *Console) state() (adminapi.State, int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	version, err := c.Version()
	if err == nil && version != c.version {
		c.records, c.version, err = c.State()
	}
	return c.records, c.version, err
}

// answered() sends the error err, or 304 if the browser already has the page. It reports whether it
// has sent an answer. The ETag is a hash of all that the page shows (more has the page's own data)
// and of the token. Because of the token, a restart of the simulator changes the ETag.
func (c *Console) answered(w http.ResponseWriter, r *http.Request, err error, version int,
	more any) bool {
	var request, entry int
	c.Requests(1, func(r *adminapi.Request) bool { request = r.Seq; return true })
	c.Flights(1, func(e *flightlog.Entry) bool { entry = e.Seq; return true })
	shown, unshown := json.Marshal([]any{c.Token, version, c.Switches(), c.Faults(), c.Machines(),
		request, entry, more})
	if err = cmp.Or(err, unshown); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return true
	}
	tag := fmt.Sprintf(`"%x"`, sha256.Sum256(shown))
	w.Header().Set("ETag", tag)
	if r.Header.Get("If-None-Match") != tag {
		return false
	}
	w.WriteHeader(http.StatusNotModified)
	return true
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
	// Without a referrer, a browser sends a form with the Origin "null", which Guard refuses.
	header.Set("Referrer-Policy", "same-origin")
	header.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(text)) // fails only if the caller has gone
}

var templates = template.Must(template.New("").Funcs(template.FuncMap{
	"bytes": bytesText, "plot": plot, "rule": rule, "diskRule": diskRule,
	"ms": func(seconds float64) string { return fmt.Sprintf("%.1f", 1000*seconds) },
}).ParseFS(files, "page/*.tmpl"))

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

func bytesText(n int64) string {
	value, units := float64(n), []string{"B", "KiB", "MiB", "GiB", "TiB"}
	for value >= 1024 && len(units) > 1 {
		value, units = value/1024, units[1:]
	}
	text := strings.TrimSuffix(fmt.Sprintf("%.1f", value), ".0")
	return text + " " + units[0]
}

const tokenHeader = "X-Console-Token"

// Guard refuses the requests that CheckPage refuses. It also refuses a change that a browser
// requests without the token of the console's pages. Other clients, such as curl, send no Origin
// and need no token. Guard reads the whole body of a request first.
func (c *Console) Guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header := w.Header()
		header.Set("X-Content-Type-Options", "nosniff")
		header.Set("Cross-Origin-Resource-Policy", "same-origin")
		err := CheckPage(r, c.Hosts, "--admin-host")
		var body []byte
		if err == nil {
			body, err = ReadBody(w, r, maxForm, c.BodyTime)
			r.Body = io.NopCloser(bytes.NewReader(body))
		}
		if err == nil {
			err = c.check(r)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

const maxForm = 1 << 20

// ReadBody reads at most limit+1 bytes of a request's body within the given time. After a body of
// at most limit bytes, it clears the deadline, so that the next request has none.
func ReadBody(w http.ResponseWriter, r *http.Request, limit int64, within time.Duration) ([]byte,
	error) {
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Now().Add(within)) // a test's recorder has no deadlines
	body, err := io.ReadAll(io.LimitReader(r.Body, limit+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the body, for which there are %s: %w", within, err)
	case int64(len(body)) <= limit:
		_ = control.SetReadDeadline(time.Time{})
	}
	return body, nil
}

// CheckPage refuses requests that web pages of other origins send. A browser on the same machine
// can reach the listener, and anyone can make a name resolve to the listener's address (DNS
// rebinding). So a name in Host must be localhost or in the list "hosts", which the user extends
// with the given command-line flag. An Origin must be the listener's own. A request that the
// browser marks as cross-site may only open a page.
func CheckPage(r *http.Request, hosts []string, flag string) error {
	if !ownHost(r.Host, hosts) {
		return fmt.Errorf("the request's Host is %q, and any name can be made to resolve to this "+
			"address: use localhost or the IP address of the listener, or start the simulator with "+
			"%s and the name", r.Host, flag)
	}
	scheme := "http://"
	if r.TLS != nil {
		scheme = "https://"
	}
	for _, o := range r.Header.Values("Origin") {
		if !strings.EqualFold(o, scheme+r.Host) {
			return fmt.Errorf("the request comes from a page of %q, expected one of %s%s", o, scheme,
				r.Host)
		}
	}
	site := r.Header.Get("Sec-Fetch-Site")
	opens := r.Method == http.MethodGet && r.Header.Get("Sec-Fetch-Dest") == "document"
	if !slices.Contains([]string{"", "none", "same-origin"}, site) && !opens {
		return fmt.Errorf("the request comes from a page of another site (Sec-Fetch-Site is %q), "+
			"expected one of %s%s", site, scheme, r.Host)
	}
	return nil
}

// check refuses a change that a browser requests without the token.
func (c *Console) check(r *http.Request) error {
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions:
		return nil
	}
	ours := r.URL.Path == actionPath
	if r.Header.Get("Origin") == "" && r.Header.Get("Sec-Fetch-Site") == "" && !ours {
		return nil // the client is not a browser
	}
	token := r.Header.Get(tokenHeader)
	if token == "" && ours {
		token = r.PostFormValue("token")
	}
	if subtle.ConstantTimeCompare([]byte(token), []byte(c.Token)) != 1 {
		return fmt.Errorf("the request lacks the token of the console's pages: load the page again, " +
			"because the token is a new one each time that the simulator starts")
	}
	return nil
}

// ownHost reports whether a Host header has an IP address, localhost or one of hosts.
func ownHost(host string, hosts []string) bool {
	name := host
	if bare, _, err := net.SplitHostPort(host); err == nil {
		name = bare
	}
	if slices.ContainsFunc(append([]string{"localhost"}, hosts...), func(own string) bool {
		return strings.EqualFold(own, name)
	}) {
		return true
	}
	_, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(name, "["), "]"))
	return err == nil
}

// order is a form's request: to the rack's API if ofAPI is true, otherwise to the admin listener.
type order struct {
	method, path string
	ofAPI        bool
	body         any
	// done is the text for the user when the request has succeeded.
	done string
}

type preset struct {
	Name, Explanation string
	fault             adminapi.Fault
}

var presets = []preset{
	{"refuse", "the rack answers 503 and does nothing", adminapi.Fault{Phase: adminapi.Instead,
		Response: &adminapi.Response{Status: http.StatusServiceUnavailable,
			ErrorCode: "ServiceNotAvailable", Message: "armed on the console"}}},
	{"lose", "the rack does it, and the answer is lost", adminapi.Fault{Phase: adminapi.After,
		Cut: true}},
	{"slow", "the rack waits for five seconds, and then does it",
		adminapi.Fault{Phase: adminapi.Before, Delay: adminapi.Duration(5 * time.Second)}},
	{"hang", "the rack does nothing, and does not answer for a minute",
		adminapi.Fault{Phase: adminapi.Instead, Hang: adminapi.Duration(time.Minute)}},
	{"unwind", "the rack begins, fails, and undoes it", adminapi.Fault{Phase: adminapi.Unwind}},
	{"never", "the disk is attached, and its device never appears",
		adminapi.Fault{Device: &adminapi.DeviceFault{Never: true}}},
}

var everyOp = []string{"read", "write", "flush"}

var diskOrders = map[string]struct {
	fault adminapi.DiskFault
	done  string
}{
	"hang": {adminapi.DiskFault{On: everyOp, Hang: true}, "The disk hangs until it is healed."},
	"fail": {adminapi.DiskFault{On: everyOp}, "Every operation of the disk fails."},
	"slow": {adminapi.DiskFault{On: everyOp, Delay: adminapi.Duration(500 * time.Millisecond)},
		"Every operation of the disk takes half a second longer."},
}

// newOrder converts a form to a request. The form's field "do" is a verb, a space and an argument.
func newOrder(form url.Values) (order, error) {
	verb, object, _ := strings.Cut(form.Get("do"), " ")
	id := url.PathEscape(object)
	switch verb {
	case "start", "stop":
		return order{method: http.MethodPost, path: "/v1/instances/" + id + "/" + verb, ofAPI: true,
			done: "The instance was told to " + verb + "."}, nil
	case "hang", "fail", "slow":
		o := diskOrders[verb]
		return order{method: http.MethodPost, path: "/disks/" + id + "/faults", body: o.fault,
			done: o.done}, nil
	case "heal":
		return order{method: http.MethodDelete, path: "/disks/" + id + "/faults",
			done: "The disk is healed."}, nil
	case "switch":
		return order{method: http.MethodPatch, path: "/switches", body: json.RawMessage(object),
			done: "The switch is turned."}, nil
	case "set":
		body, err := changedSettings(form)
		return order{method: http.MethodPatch, path: "/switches", body: body,
			done: "The settings are changed."}, err
	case "arm":
		fault, err := newFault(form)
		return order{method: http.MethodPost, path: "/faults", body: fault,
			done: "The fault is armed."}, err
	case "disarm":
		return order{method: http.MethodDelete, path: "/faults/" + id,
			done: "The fault is removed."}, nil
	}
	return order{}, fmt.Errorf("the form asks for %q, which this console does not know", verb)
}

func changedSettings(form url.Values) (map[string]any, error) {
	body := map[string]any{}
	for _, s := range settings(adminapi.Switches{}) {
		switch value := strings.TrimSpace(form.Get(s.Name)); s.Name {
		case "quota_bytes", "disk_limit":
			n, err := strconv.ParseInt(value, 10, 64)
			if err != nil {
				return nil, fmt.Errorf("%s is %q, expected a whole number", s.Name, value)
			}
			body[s.Name] = n
		default:
			body[s.Name] = value
		}
	}
	return body, nil
}

func newFault(form url.Values) (adminapi.Fault, error) {
	times, err := strconv.Atoi(form.Get("times"))
	if err != nil {
		return adminapi.Fault{}, fmt.Errorf("times is %q, expected a number; 0 means always",
			form.Get("times"))
	}
	for _, m := range presets {
		if m.Name == form.Get("what") {
			f := m.fault
			f.Operation, f.Object = form.Get("operation"), strings.TrimSpace(form.Get("object"))
			f.Times = times
			return f, nil
		}
	}
	return adminapi.Fault{}, errors.New("the form does not say what is to happen")
}

// act carries out a form. A browser that runs no scripts is redirected to the page with the form.
func (c *Console) act(w http.ResponseWriter, r *http.Request) {
	if err := r.ParseForm(); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	o, err := newOrder(r.PostForm)
	said := o.done
	if err == nil {
		err = c.carryOut(r, o)
	}
	status := http.StatusOK
	if err != nil {
		said, status = "Refused: "+err.Error(), http.StatusBadRequest
	}
	if !strings.Contains(r.Header.Get("Accept"), "text/html") {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(status)
		_, _ = w.Write([]byte(plain(said))) // fails only if the caller has gone
		return
	}
	back, err := url.Parse(r.PostForm.Get("back"))
	if err != nil || back.Path != "/" && !strings.HasPrefix(back.Path, "/console/disks/") {
		back = &url.URL{}
	}
	query := back.Query()
	query.Set("said", said)
	// The redirect takes only the path and the query from the form, so it stays on this host.
	http.Redirect(w, r, (&url.URL{Path: "/" + strings.TrimLeft(back.Path, "/"),
		RawQuery: query.Encode()}).String(), http.StatusSeeOther)
}

func (c *Console) carryOut(r *http.Request, o order) error {
	var answer recorder
	if o.ofAPI {
		status, text := c.Run(r.Context(), o.method, o.path)
		answer.status = status
		answer.Write(text)
	} else {
		var body []byte
		if o.body != nil {
			var err error
			if body, err = json.Marshal(o.body); err != nil {
				return fmt.Errorf("the form's value for %s is not JSON: %w", o.path, err)
			}
		}
		own, err := http.NewRequestWithContext(r.Context(), o.method, o.path, bytes.NewReader(body))
		if err != nil {
			return err
		}
		c.Admin.ServeHTTP(&answer, own)
	}
	if answer.status < http.StatusBadRequest {
		return nil
	}
	text := strings.TrimSpace(answer.String())
	var refused struct{ Message string }
	if json.Unmarshal(answer.Bytes(), &refused) == nil && refused.Message != "" {
		text = refused.Message
	}
	return errors.New(text)
}

type recorder struct {
	bytes.Buffer
	header http.Header
	status int
}

func (a *recorder) Header() http.Header {
	if a.header == nil {
		a.header = http.Header{}
	}
	return a.header
}

func (a *recorder) WriteHeader(status int) { a.status = status }
