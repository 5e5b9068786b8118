// Package broken makes a simulated rack break its rules. Each [Mutation] of its table breaks one
// rule: it changes requests before the rack reads them, answers before the caller gets them, or the
// bytes of disks. The conformance suite has to notice every mutation, and so would notice a rack
// that does the same.
//
// A mutation applies to the whole rack. It is activated with oxide-simulator serve --mutation NAME
// or with PUT /mutations/NAME on the admin listener. Only one mutation is active at a time. For an
// error that happens once, or for a chosen request, use an adminapi.Fault instead.
package broken

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
)

// Mutation is one way in which a rack breaks a rule.
type Mutation struct {
	// Name is the rule's ID and a few words that describe the mutation, such as A33-refuses-again.
	Name string
	// Rule is the ID of the rule, which is also the beginning of Name, or Data.
	Rule string
	// Says describes in a sentence what the broken rack does.
	Says string
	// DriverSays is the reason (docs/reasons.md) with which the driver must refuse to continue. It
	// is "" if the mutation does not endanger the driver, or if the driver cannot notice it.
	DriverSays string
	// Before may change a request or answer it. After may change the answer.
	Before, After func(*Interception)
	// Guests changes the views of the guests when the mutation begins (broken is true), and restores
	// them when the mutation ends.
	Guests func(rack *engine.Simulation, broken bool) error
	// tamper damages bytes or devices; the zero value does nothing.
	tamper dataplane.Tamper
}

// Data is the Rule of a mutation that breaks a promise about data instead of a rule of the API.
const Data = "data"

// Table lists every mutation.
func Table() []Mutation {
	table := slices.Concat(wire, disks, attachments, snapshots, instances, guests)
	for i := range table {
		table[i].Rule, _, _ = strings.Cut(table[i].Name, "-")
	}
	for _, t := range dataplane.Tampers() {
		table = append(table, Mutation{Name: t.Name, Rule: Data, Says: t.Says, tamper: t})
	}
	return table
}

// Interception is one request to a broken rack and its answer.
type Interception struct {
	// Rack is the rack without the mutation.
	Rack *engine.Simulation
	// RequestID is the ID in the answer.
	RequestID string
	// Operation is the API's operationId, or "" for an unknown path.
	Operation string
	// Request is the request. Before may change its URL and its header.
	Request *http.Request
	// Path has the parameters in the path.
	Path url.Values
	// Body is the request's body, which Before may change.
	Body []byte
	// Answer is nil until there is an answer. If Before sets it, the rack does not see the request.
	Answer *Answer
	// Carry carries out this request on the rack without the mutation, and returns the answer.
	// Before may call it more than once.
	Carry func() *Answer
}

// Answer is the answer that the caller gets.
type Answer struct {
	Status int
	Header http.Header
	Body   []byte
}

// Is reports whether the request is for one of these operations.
func (x *Interception) Is(operations ...string) bool {
	return slices.Contains(operations, x.Operation)
}

// Refuse answers with an error in the rack's form. An empty code is left out.
func (x *Interception) Refuse(status int, code, format string, args ...any) {
	body := map[string]any{"message": fmt.Sprintf(format, args...), "request_id": x.RequestID}
	if code != "" {
		body["error_code"] = code
	}
	x.Answer = &Answer{Status: status, Header: http.Header{}, Body: errorText(body)}
}

// errorText encodes an error with its fields in the rack's order, and leaves out fields that are
// nil.
func errorText(body map[string]any) []byte {
	text, _ := json.MarshalIndent(struct {
		RequestID any `json:"request_id,omitempty"`
		Code      any `json:"error_code,omitempty"`
		Message   any `json:"message,omitempty"`
	}{body["request_id"], body["error_code"], body["message"]}, "", "  ") // texts always encode
	return text
}

// Refused reports whether the answer is an error with this status and a message that contains the
// text.
func (x *Interception) Refused(status int, text string) bool {
	return x.Answer.Status == status && strings.Contains(string(x.Answer.Body), text)
}

// Sent returns the request's body as a JSON object, or nil if it is not one.
func (x *Interception) Sent() map[string]any { return object(x.Body) }

// Send replaces the request's body.
func (x *Interception) Send(body map[string]any) { x.Body, _ = json.Marshal(body) }

// Edit changes the JSON object of the answer, or each object of a page.
func (x *Interception) Edit(change func(map[string]any)) {
	body := object(x.Answer.Body)
	if body == nil || x.Answer.Status >= 300 {
		return
	}
	if items, is := body["items"].([]any); is {
		for _, item := range items {
			if entry, is := item.(map[string]any); is {
				change(entry)
			}
		}
	} else {
		change(body)
	}
	x.Answer.Body, _ = json.Marshal(body)
}

// EditBody changes the JSON object of the answer, even if it is an error or a page.
func (x *Interception) EditBody(change func(map[string]any)) {
	if body := object(x.Answer.Body); body != nil {
		change(body)
		if x.Answer.Status >= 400 {
			x.Answer.Body = errorText(body)
		} else {
			x.Answer.Body, _ = json.Marshal(body)
		}
	}
}

func object(text []byte) map[string]any {
	var body map[string]any
	if json.Unmarshal(text, &body) != nil {
		return nil
	}
	return body
}

// Switch holds the active mutation. The zero value means that none is active.
type Switch struct{ active atomic.Pointer[Mutation] }

// Active returns the active mutation, or nil.
func (s *Switch) Active() *Mutation { return s.active.Load() }

// Set activates a mutation on a rack, which replaces the active one; "" only ends the active one.
func (s *Switch) Set(rack *engine.Simulation, name string) error {
	var next Mutation
	if name != "" {
		table := Table()
		i := slices.IndexFunc(table, func(m Mutation) bool { return m.Name == name })
		tamper, is := dataplane.TamperOf(name)
		switch {
		case i >= 0:
			next = table[i]
		case is:
			next = Mutation{Name: name, Rule: Data, Says: tamper.Says, tamper: tamper}
		default:
			return fmt.Errorf("there is no mutation %q; the admin listener's GET /mutations lists them",
				name)
		}
	}
	var active *Mutation
	if name != "" {
		active = &next
	}
	var err error
	if last := s.active.Swap(active); last != nil && last.Guests != nil {
		err = last.Guests(rack, false)
	}
	if next.Guests != nil {
		err = errors.Join(err, next.Guests(rack, true))
	}
	return errors.Join(err, rack.Plane().Tamper(next.tamper))
}

// List returns descriptions of all mutations.
func (s *Switch) List() []adminapi.Mutation {
	var list []adminapi.Mutation
	active := s.Active()
	for _, m := range Table() {
		list = append(list, adminapi.Mutation{Name: m.Name, Rule: m.Rule, Says: m.Says,
			DriverSays: m.DriverSays, Active: active != nil && active.Name == m.Name})
	}
	return list
}
