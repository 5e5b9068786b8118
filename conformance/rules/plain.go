package rules

import (
	"context"
	"encoding/json"
	"net/url"
	"regexp"
)

// expected is a plain request and the answer of a rack. A refusal has a code and a message; a
// success has neither.
type expected struct {
	what    string
	request Plain
	answer  Refused
}

// Expect sends plain requests and demands exactly the given answer to each.
func (c *Check) Expect(cases ...expected) {
	for _, e := range cases {
		Equal(c, e.what, c.Send(e.request).Refused(), e.answer)
	}
}

// get returns a plain read.
func get(path string) Plain { return Plain{Method: "GET", Path: path} }

// ok is the answer to a read that succeeds.
var ok = Refused{Status: 200}

// bad is a refusal of the HTTP layer.
func bad(message string) Refused { return Refused{400, "", message} }

func badQuery(message string) Refused { return bad("unable to parse query string: " + message) }

func badBody(message string) Refused { return bad("unable to parse JSON body: " + message) }

// inProject returns the query that names the project.
func (c *Check) inProject() string { return "project=" + url.QueryEscape(c.Project) }

// place matches the position of a mistake that serde appends to its message.
var place = regexp.MustCompile(` at line \d+ column \d+$`)

// unplaced removes the position in the body from a refusal.
func unplaced(r Refused) Refused {
	r.Message = place.ReplaceAllString(r.Message, "")
	return r
}

// post returns a request with a body to a collection of the project.
func (c *Check) post(collection, body string) Plain {
	return Plain{Method: "POST", Path: "/v1/" + collection + "?" + c.inProject(), Body: body}
}

// SendDisk sends a request for a disk with a body of diskBody, and removes the disk at the end if
// it was created.
func (c *Check) SendDisk(body string) Answer {
	name := c.Name()
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
		c.Cleanup(func(ctx context.Context) error { return c.removeDisk(ctx, disk.ID) })
	}
	return a
}

// object parses an answer as a JSON object.
func (c *Check) object(what string, a Answer) map[string]json.RawMessage {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(a.Body, &fields); err != nil || a.Status >= 300 {
		c.Fatalf("%s: expected an object; found HTTP %d %s", what, a.Status, a.Body)
	}
	return fields
}
