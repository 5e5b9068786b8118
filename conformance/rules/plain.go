package rules

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// expected is a plain request and the answer of a rack. A refusal has a code and a message; a
// success has neither.
type expected struct {
	what    string
	request Plain
	answer  Refused
}

func (c *Check) expect(cases []expected) {
	for _, e := range cases {
		equal(c, e.what, c.Send(e.request).Refused(), e.answer)
	}
}

func get(path string) Plain { return Plain{Method: "GET", Path: path} }

var ok = Refused{Status: 200}

func bad(message string) Refused { return Refused{400, "", message} }

func badQuery(message string) Refused { return bad("unable to parse query string: " + message) }

func badBody(message string) Refused { return bad("unable to parse JSON body: " + message) }

func (c *Check) inProject() string { return "project=" + url.QueryEscape(c.Project) }

// place matches the position of a mistake that serde appends to its message.
var place = regexp.MustCompile(` at line \d+ column \d+$`)

func unplaced(r Refused) Refused {
	r.Message = place.ReplaceAllString(r.Message, "")
	return r
}

func (c *Check) post(collection, body string) Plain {
	return Plain{Method: "POST", Path: "/v1/" + collection + "?" + c.inProject(), Body: body}
}

// sendDisk sends a request for a disk with a body of diskBody, and removes the disk at the end if
// it was created.
func (c *Check) sendDisk(body string) Answer {
	name := c.name()
	plain := c.post("disks", c.named(name, body))
	a, err := c.send(plain)
	if err != nil || leavesOpen(a.Status) {
		c.removeIfMade(name)
	}
	c.must(plain.Method+" "+plain.Path, err)
	var disk struct {
		ID string `json:"id"`
	}
	if a.Status < 300 && json.Unmarshal(a.Body, &disk) == nil && disk.ID != "" {
		c.cleanup(func(ctx context.Context) error { return c.removeDisk(ctx, disk.ID) })
	}
	return a
}

func (c *Check) object(what string, a Answer) map[string]json.RawMessage {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(a.Body, &fields); err != nil || a.Status >= 300 {
		c.fatalf("%s: expected an object; found HTTP %d %s", what, a.Status, a.Body)
	}
	return fields
}

// Plain is a request that Oxide's client cannot send, or whose answer it hides.
type Plain struct {
	Method string
	// Path is the encoded path and query, beginning with the slash.
	Path string
	Body string
	// Header is added to the headers of every request of the client: the bearer, the content type
	// and the version of the API. An empty header here removes one of those.
	Header map[string]string
}

// Send sends a plain request. It ends the check if there is no answer.
func (c *Check) Send(p Plain) Answer {
	return asked(c.send(p))(c, p.Method+" "+p.Path).must()
}

func (c *Check) send(p Plain) (Answer, error) {
	req, err := http.NewRequestWithContext(c.ctx, p.Method,
		strings.TrimSuffix(c.Client.Host(), "/")+"/", strings.NewReader(p.Body))
	if err != nil {
		return Answer{}, fmt.Errorf("make the request: %w", err)
	}
	// The path is sent unchanged, although a client would normalize it.
	route, query, _ := strings.Cut(p.Path, "?")
	req.URL.Opaque = route
	req.URL.RawQuery = query
	header := map[string]string{"Authorization": "Bearer " + c.Token,
		"Content-Type": "application/json", "Api-Version": APIVersion}
	for name, value := range p.Header {
		header[name] = value
	}
	for name, value := range header {
		if value != "" {
			req.Header.Set(name, value)
		}
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return Answer{}, fmt.Errorf("expected an answer; found %w", err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return Answer{}, fmt.Errorf("read the answer: %w", err)
	}
	return Answer{resp.StatusCode, resp.Header, body}, nil
}

// APIVersion is the API version that the pinned client requests.
const APIVersion = "2026060800.0.0"

func invalidRequest(format string, args ...any) Refused {
	return Refused{400, "InvalidRequest", fmt.Sprintf(format, args...)}
}

func invalidValue(label, problem string) Refused {
	return Refused{400, "InvalidValue", fmt.Sprintf("unsupported value for %q: %s", label, problem)}
}

func inConflict(message string) Refused { return Refused{409, "Conflict", message} }

// notFound is the refusal of an "id" or a "name" that no object of this kind has.
func notFound(kind, by, what string) Refused {
	return Refused{404, "ObjectNotFound", fmt.Sprintf("not found: %s with %s %q", kind, by, what)}
}

func unknownID(kind, id string) Refused { return notFound(kind, "id", id) }

func unknownName(kind string, name oxide.Name) Refused {
	return notFound(kind, "name", string(name))
}

func nameTaken(kind string, name oxide.Name) Refused {
	return Refused{400, "ObjectAlreadyExists", fmt.Sprintf("already exists: %s %q", kind, name)}
}

var (
	internalError = Refused{500, "Internal", "Internal Server Error"}
	unavailable   = Refused{503, "ServiceNotAvailable", "Service Unavailable"}
	quotaExceeded = Refused{507, "InsufficientCapacity", "Insufficient capacity: Storage Limit " +
		"Exceeded: Not enough storage to complete request. Either remove unneeded disks and " +
		"snapshots to free up resources or contact the rack operator to request a capacity increase."}
)

// fields has the fields of an object that the client knows, by their JSON names.
type fields map[string]json.RawMessage

// fieldsOf splits an object into [fields], or a list into []fields.
func fieldsOf[T any](c *Check, object any) (parts T) {
	text, err := json.Marshal(object)
	if err == nil {
		err = json.Unmarshal(text, &parts)
	}
	c.must("take an answer of the rack apart", err)
	return parts
}

// same demands that two answers show the same object: every field is equal, except those in but.
func (c *Check) same(what string, got, want any, but ...string) {
	g, w := fieldsOf[fields](c, got), fieldsOf[fields](c, want)
	all := maps.Clone(w)
	maps.Copy(all, g)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if !slices.Contains(but, name) {
			equal(c, what+": its "+name, string(g[name]), string(w[name]))
		}
	}
}

// listed demands that a list contains an object once, and shows it as another answer does.
func (c *Check) listed(what string, list, want any) {
	id := string(fieldsOf[fields](c, want)["id"])
	items := fieldsOf[[]fields](c, list)
	items = slices.DeleteFunc(items, func(f fields) bool { return string(f["id"]) != id })
	equal(c, what+": how often it has "+id, len(items), 1)
	for _, item := range items {
		c.same(what, item, want)
	}
}

func checkAlike(c *Check) {
	taken := c.snapshot(c.disk().Id).must()
	snapshot := c.viewSnapshot(taken.Id).must()
	c.same("the answer to the creation of a snapshot", taken, snapshot, "time_modified")
	c.same("the snapshot that is read by name", c.viewSnapshot(string(taken.Name)).must(), snapshot)
	c.listed("the list of snapshots", asked(c.Client.SnapshotListAllPages(c.ctx,
		oxide.SnapshotListParams{Project: c.project()}))(c, "list the snapshots").must(), snapshot)

	made := c.instance()
	instance := c.see(made.Id)
	c.same("the answer to the creation of an instance", made, instance, "run_state", "time_modified",
		"time_run_state_updated")
	c.same("the instance that is read by name", c.viewInstance(string(made.Name)).must(), instance)
	c.listed("the list of instances", asked(c.Client.InstanceListAllPages(c.ctx,
		oxide.InstanceListParams{Project: c.project()}))(c, "list the instances").must(), instance)

	restored := c.createDisk(c.fromSnapshot(taken.Id, false)).must()
	c.same("the answer to the creation of a disk", restored, c.look(restored.Id), "state",
		"time_modified")
	c.attach(restored.Id, instance.Id).must()
	disk := c.look(restored.Id)
	c.same("the disk when it is attached", disk, restored, "state", "time_modified")
	c.same("the disk that is read by name", c.viewDisk(string(disk.Name)).must(), disk)
	c.listed("the list of disks", asked(c.Client.DiskListAllPages(c.ctx,
		oxide.DiskListParams{Project: c.project()}))(c, "list the disks").must(), disk)
	c.listed("the list of the instance's disks", c.disksOf(instance.Id), disk)
}
