// Package broken makes a simulated rack break its rules. Each [Mutation] in [Table] breaks one
// rule: it changes requests before the rack reads them, answers before the caller gets them, guest
// views, or the bytes of disks. The conformance suite must detect every mutation, so that it also
// detects a real rack that breaks the rule.
//
// A mutation affects the whole rack. oxide-simulator serve --mutation NAME and PUT /mutations/NAME
// on the admin listener activate it. Only one mutation is active at a time. For an error that
// happens once, or for a chosen request, use an adminapi.Fault instead.
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
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// Mutation is a change that makes a rack break a rule.
type Mutation struct {
	// Name is the rule's ID and a few words, such as A33-refuses-again, or only words if Rule is Data.
	Name string
	// Rule is the ID of the broken rule, or Data if the mutation damages data (dataplane.Tamper).
	Rule string
	Says string // what the broken rack does, in a sentence
	// DriverSays is the reason (docs/reasons.md) of the error that the driver must return. It is "" if
	// the mutation does not endanger the driver, or if the driver cannot notice it.
	DriverSays string
	// Before is called with a request, and may change or answer it. After may change the answer.
	Before, After func(*Interception)
	// Guests changes the guest views when the mutation begins (broken is true), and restores them when
	// the mutation ends.
	Guests func(rack *engine.Simulation, broken bool) error
	tamper dataplane.Tamper // damages bytes or devices; the zero value does nothing
}

// Data is the Rule of a mutation that breaks a promise about data instead of a rule of the API.
const Data = "data"

// Table lists every mutation.
func Table() []Mutation {
	list := slices.Clone(table)
	for i := range list {
		list[i].Rule, _, _ = strings.Cut(list[i].Name, "-")
	}
	for _, t := range dataplane.Tampers() {
		list = append(list, Mutation{Name: t.Name, Rule: Data, Says: t.Says, tamper: t})
	}
	return list
}

// Interception is one request to a broken rack and its answer.
type Interception struct {
	// Rack is the simulated rack. Calls of its methods bypass the mutation.
	Rack      *engine.Simulation
	RequestID string
	// Operation is the API's operationId, or "" for an unknown path.
	Operation string
	// Request is the request. Before() may change its URL and its header.
	Request *http.Request
	// Path has the values of the parameters in the URL's path, such as instance.
	Path url.Values
	// Body is the request's body. Before() may change it.
	Body []byte
	// Answer is nil when Before() is called. If Before() sets it, the rack skips the operation.
	Answer *Answer
	// Carry carries out this request without the mutation. Before() may call it more than once.
	Carry func() *Answer
}

// Answer is the response that the caller gets.
type Answer struct {
	Status int
	Header http.Header
	Body   []byte
}

// Is reports whether the request is for one of these operations.
func (x *Interception) Is(operations ...string) bool {
	return slices.Contains(operations, x.Operation)
}

// Refuse sets Answer to an error in the rack's form, without an error_code if code is "".
func (x *Interception) Refuse(status int, code, format string, args ...any) {
	body := map[string]any{"message": fmt.Sprintf(format, args...), "request_id": x.RequestID}
	if code != "" {
		body["error_code"] = code
	}
	x.Answer = &Answer{Status: status, Header: http.Header{}, Body: errorText(body)}
}

// errorText encodes an error with its fields in the rack's order.
func errorText(body map[string]any) []byte {
	text, _ := json.MarshalIndent(struct {
		RequestID any `json:"request_id,omitempty"`
		Code      any `json:"error_code,omitempty"`
		Message   any `json:"message,omitempty"`
	}{body["request_id"], body["error_code"], body["message"]}, "", "  ") // texts always encode
	return text
}

// Refused reports whether the answer is an error with this status, whose message has the text.
func (x *Interception) Refused(status int, text string) bool {
	return x.Answer.Status == status && strings.Contains(string(x.Answer.Body), text)
}

// Sent returns the request's body as a JSON object, or nil for any other body.
func (x *Interception) Sent() map[string]any { return object(x.Body) }

// Send replaces the request's body.
func (x *Interception) Send(body map[string]any) { x.Body, _ = json.Marshal(body) }

// Edit calls change() for the JSON object in a successful answer, or for each item of a page.
func (x *Interception) Edit(change func(map[string]any)) {
	if x.Answer.Status >= 300 {
		return
	}
	x.EditBody(func(body map[string]any) {
		items, isPage := body["items"].([]any)
		for _, item := range items {
			if entry, is := item.(map[string]any); is {
				change(entry)
			}
		}
		if !isPage {
			change(body)
		}
	})
}

// EditBody calls change() for the whole JSON object in the answer, even of an error or a page.
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

// Set ends the rack's active mutation, and activates the one with this name; "" activates none.
func (s *Switch) Set(rack *engine.Simulation, name string) error {
	next, active := Mutation{}, (*Mutation)(nil)
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

var (
	shownDisks     = []string{"disk_create", "disk_view", "disk_list"}
	shownSnapshots = []string{"snapshot_create", "snapshot_view", "snapshot_list"}
)

// view reads the rack's records. It returns the zero value if reading fails.
func view[T any](x *Interception, read func(*store.Tx) T) (found T) {
	_ = x.Rack.Records().View(func(tx *store.Tx) { found = read(tx) })
	return found
}

func all[T store.Record](x *Interception, t store.Table[T]) []T {
	return view(x, func(tx *store.Tx) []T { return slices.Collect(t.All(tx)) })
}

func (x *Interception) instance() store.Instance {
	sel, _ := store.ParseSelector(x.Path.Get("instance"))
	return view(x, func(tx *store.Tx) store.Instance {
		i, _ := store.Instances.Get(tx, sel.ID)
		return i
	})
}

func (x *Interception) takeAway(disk store.Disk) store.Disk {
	_ = x.Rack.Plane().Unplug(disk.State.Instance, disk.ID)
	disk.State = store.DiskState{State: store.StateDetached}
	x.putDisk(disk)
	return disk
}

func (x *Interception) accept(object any) { x.Reply(202, object) }

// on returns an After function that edits the successful answers to these operations.
func on(change func(map[string]any), operations ...string) func(*Interception) {
	return func(x *Interception) {
		if x.Is(operations...) {
			x.Edit(change)
		}
	}
}

func set(field string, value any) func(map[string]any) {
	return func(object map[string]any) { object[field] = value }
}

// sends returns a Before function that changes one field in the bodies of these operations.
func sends[T any](field string, change func(T) T, operations ...string) func(*Interception) {
	return func(x *Interception) {
		body := x.Sent()
		if value, is := body[field].(T); is && x.Is(operations...) {
			body[field] = change(value)
			x.Send(body)
		}
	}
}

// acceptsIn returns a Before function that answers 202 if the instance is in this run state.
func acceptsIn(operation, state string) func(*Interception) {
	return func(x *Interception) {
		if i := x.instance(); x.Is(operation) && i.RunState == state {
			x.accept(i)
		}
	}
}

// ofDisk returns a Before function that refuses an operation on a disk in the given state.
func ofDisk(operation, state string, status int, code, message string) func(*Interception) {
	return func(x *Interception) {
		if x.Is(operation) && x.disk().State.State == state {
			x.Refuse(status, code, "%s", message)
		}
	}
}

// reword returns an After function that changes error answers with this status and text. The
// parameter want is the new status. The code and the message stay if the given ones are "".
func reword(status int, text string, want int, code, message string) func(*Interception) {
	return func(x *Interception) {
		if !x.Refused(status, text) {
			return
		}
		x.Answer.Status = want
		x.EditBody(func(body map[string]any) {
			if code != "" {
				body["error_code"] = code
			}
			if message != "" {
				body["message"] = message
			}
		})
	}
}

func (x *Interception) disks() []store.Disk {
	id := x.instance().ID
	return view(x, func(tx *store.Tx) []store.Disk { return tx.DisksOf(id) })
}

// Reply sets Answer to a success with this status and body.
func (x *Interception) Reply(status int, body any) {
	text, _ := json.Marshal(body) // this package's types always encode
	x.Answer = &Answer{Status: status, Header: http.Header{}, Body: text}
}

func (x *Interception) query(change func(map[string][]string)) {
	values := x.Request.URL.Query()
	change(values)
	x.Request.URL.RawQuery = values.Encode()
}

func (x *Interception) isList() bool {
	return x.Is("disk_list", "snapshot_list", "instance_list", "image_list", "project_list",
		"instance_disk_list")
}

func (x *Interception) projectID() string {
	return view(x, func(tx *store.Tx) string {
		sel, _ := store.ParseSelector(x.Request.URL.Query().Get("project"))
		p, _ := store.Projects.Find(tx, "", sel)
		return p.ID
	})
}

func (x *Interception) namesake() (found store.Disk) {
	name, project := x.Sent()["name"], x.projectID()
	for _, d := range all(x, store.Disks) {
		if d.Name == name && d.ProjectID == project {
			found = d
		}
	}
	return found
}

func (x *Interception) putDisk(d store.Disk) {
	_ = x.Rack.Records().Update(func(tx *store.Tx) { tx.PutDisk(d) })
}

func (x *Interception) disk() store.Disk {
	name, _ := x.Sent()["disk"].(string)
	if name == "" {
		name = x.Path.Get("disk")
	}
	project := x.instance().ProjectID
	return view(x, func(tx *store.Tx) store.Disk {
		sel, _ := store.ParseSelector(name)
		disk, _ := store.Disks.Find(tx, project, sel)
		return disk
	})
}
