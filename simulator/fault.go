package simulator

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// Faults contains the active faults of a rack. Its zero value has none.
type Faults struct {
	mu sync.Mutex
	// mu guards the fields below and the faults' counters. The field last is the newest fault's ID.
	active []*activeFault
	last   int
}

type activeFault struct {
	adminapi.ActiveFault
	random *rand.Rand
}

func (f *activeFault) spent() bool { return f.Times > 0 && f.Fired >= f.Times }

// Add activates a fault and returns its ID. Faults of one phase fire in the order of their IDs.
func (f *Faults) Add(r adminapi.Fault) (id string, err error) {
	if err := checkFault(r); err != nil {
		return "", err
	}
	if r.Phase == "" {
		r.Phase = adminapi.Before
		if r.Response != nil || r.Cut || r.Hang > 0 {
			r.Phase = adminapi.Instead
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	live := slices.DeleteFunc(slices.Clone(f.active), (*activeFault).spent)
	if err := checkCount(len(live), "/faults"); err != nil {
		return "", err
	}
	if len(f.active) >= 2*maxFaults {
		f.active = live
	}
	f.last++
	id = strconv.Itoa(f.last)
	f.active = append(f.active, &activeFault{adminapi.ActiveFault{ID: id, Fault: r},
		rand.New(rand.NewPCG(r.Seed, r.Seed))})
	return id, nil
}

// Clear removes every fault.
func (f *Faults) Clear() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.active = nil
}

// Remove removes a fault and reports whether it existed.
func (f *Faults) Remove(id string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.active)
	f.active = slices.DeleteFunc(f.active, func(r *activeFault) bool { return r.ID == id })
	return len(f.active) < n
}

// List returns the active faults.
func (f *Faults) List() []adminapi.ActiveFault {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := make([]adminapi.ActiveFault, len(f.active))
	for i, r := range f.active {
		list[i] = r.ActiveFault
	}
	return list
}

func (f *Faults) empty() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.active) == 0
}

// match returns the faults that fire for a request, ordered by phase and, in a phase, by ID. If a
// fault prevents the operation, later faults do not fire.
func (f *Faults) match(r *apiRequest) (fired []adminapi.ActiveFault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, phase := range phases {
		for _, fault := range f.active {
			if fault.Phase != phase || !fault.matches(r) || !fault.fires() {
				continue
			}
			fired = append(fired, fault.ActiveFault)
			early := phase == adminapi.Before || phase == adminapi.Instead
			if early && ends(fault.Fault) {
				return fired
			}
		}
	}
	return fired
}

func (r *activeFault) matches(req *apiRequest) bool {
	return (r.Operation == "" || r.Operation == req.entry.Operation) &&
		(r.Object == "" || slices.Contains(req.subjects, r.Object)) &&
		(r.Bearer == "" || bearerOf(req.Request) == r.Bearer)
}

func (r *activeFault) fires() bool {
	r.Matched++
	if r.Matched <= r.Skip || r.spent() ||
		r.Probability > 0 && r.random.Float64() >= r.Probability {
		return false
	}
	r.Fired++
	return true
}

// phases lists all phases. The first two, Before and Instead, precede the effect of a request.
var phases = []adminapi.Phase{adminapi.Before, adminapi.Instead, adminapi.After, adminapi.Twice,
	adminapi.Deferred, adminapi.Unwind, adminapi.Reread}

// Faults of the phases Unwind and Reread, and faults with a Device, fit only these operations.
var (
	unwinding = []string{"disk_create", "disk_delete", "disk_finalize_import", "image_create",
		"instance_create", "snapshot_create"}
	rereading = []string{"instance_disk_attach", "instance_disk_detach"}
	attaching = []string{
		"instance_create", "instance_disk_attach", "instance_reboot", "instance_start",
	}
)

// errorCodes are the codes of a rack's errors (common/src/api/external/error.rs).
var errorCodes = []string{"Conflict", "Forbidden", "Gone", "InsufficientCapacity", "Internal",
	"InvalidRequest", "InvalidValue", "Not Found", "ObjectAlreadyExists", "ObjectNotFound",
	"ServiceNotAvailable", "Unauthorized"}

const maxPadding = 1 << 30

const maxFaults = 256

func checkCount(active int, path string) error {
	if active < maxFaults {
		return nil
	}
	return fmt.Errorf("fault: there are %d, and no more are kept: remove them with DELETE %s", active,
		path)
}

// checkFault refuses a fault that can never fire or has no effect, because a test that adds such a
// fault has a mistake.
func checkFault(r adminapi.Fault) error {
	known := r.Operation == "" || slices.ContainsFunc(routes, func(op *operation) bool {
		return op.name == r.Operation
	})
	switch {
	case !known:
		return fmt.Errorf("fault: the rack has no operation %q; name one as the API's "+
			"operationId does, such as disk_create", r.Operation)
	case r.Phase != "" && !slices.Contains(phases, r.Phase):
		return fmt.Errorf("fault: unknown phase %q; use one of %q", r.Phase, phases)
	case !effective(r):
		return errors.New("fault: it does nothing; give it a response, cut, hang, delay, " +
			"slow_body, slow_byte, truncate_body, drop_fields or device")
	case r.Probability < 0 || r.Probability > 1:
		return fmt.Errorf("fault: the probability is %g; give one from 0 to 1",
			r.Probability)
	case r.Skip < 0 || r.Times < 0 || r.TruncateBody < 0:
		return errors.New("fault: skip, times and truncate_body cannot be negative")
	}
	if err := checkResponse(r); err != nil {
		return err
	}
	return checkOperation(r)
}

func effective(r adminapi.Fault) bool {
	return ends(r) || r.Delay > 0 || r.SlowBody > 0 || r.SlowByte > 0 || r.TruncateBody > 0 ||
		len(r.DropFields) > 0 || r.Device != nil ||
		slices.Contains([]adminapi.Phase{adminapi.Twice, adminapi.Unwind, adminapi.Reread}, r.Phase)
}

func ends(r adminapi.Fault) bool { return r.Response != nil || r.Cut || r.Hang > 0 }

func checkResponse(r adminapi.Fault) error {
	switch a := r.Response; {
	case a == nil:
		return nil
	case a.Status < 200 || a.Status > 599:
		return fmt.Errorf("fault: the response's status is %d; give one from 200 to 599",
			a.Status)
	case a.ErrorCode != "" && !slices.Contains(errorCodes, a.ErrorCode) &&
		a.Status != http.StatusTeapot: // no rack answers 418, so the code is wrong on purpose
		return fmt.Errorf("fault: no rack has the error code %q; use one of %q, status 418 for a code "+
			"of no rack, or give the body of another server's answer", a.ErrorCode, errorCodes)
	case a.PadBytes < 0 || a.PadBytes > maxPadding:
		return fmt.Errorf("fault: pad_bytes is %d; give at most %d", a.PadBytes, maxPadding)
	}
	return nil
}

func checkOperation(r adminapi.Fault) error {
	notFor := func(operations []string) bool {
		return r.Operation != "" && !slices.Contains(operations, r.Operation)
	}
	switch {
	case r.Phase == adminapi.Unwind && notFor(unwinding):
		return fmt.Errorf("fault: %s cannot fail halfway; unwind is for %q",
			r.Operation, unwinding)
	case r.Phase == adminapi.Reread && notFor(rereading):
		return fmt.Errorf("fault: %s does not read a disk again; reread is for %q",
			r.Operation, rereading)
	case r.Device != nil && notFor(attaching):
		return fmt.Errorf("fault: %s shows no device to a guest; device is for %q",
			r.Operation, attaching)
	case r.Phase == adminapi.Deferred && !ends(r):
		return errors.New("fault: deferred needs what the caller gets before the effect: a " +
			"response, cut or hang")
	}
	return nil
}

func (s *Server) matchFaults(r *apiRequest) error {
	if err := s.resolve(r); err != nil {
		return err
	}
	r.faults = s.Faults.match(r)
	for _, f := range r.faults {
		r.call.Unwind = r.call.Unwind || f.Phase == adminapi.Unwind
		r.call.Reread = r.call.Reread || f.Phase == adminapi.Reread
		if f.Device != nil {
			r.call.Device = f.Device
		}
		r.entry.Faults = append(r.entry.Faults, f.ID)
		s.log.Warn("a fault fires", slog.String("fault", f.ID),
			slog.String("operation", r.entry.Operation), slog.String("phase", string(f.Phase)),
			slog.String("object", r.entry.Object), slog.String("request_id", r.id))
	}
	return nil
}

// resolve adds to r.subjects a name for each ID and an ID for each name in the request, because
// Fault.Object can be a name or an ID.
func (s *Server) resolve(r *apiRequest) error {
	return s.rack.Records().View(func(tx *store.Tx) {
		sel, _ := store.ParseSelector(r.path.Get("instance"))
		i, _ := store.Instances.Get(tx, sel.ID)
		parent := i.ProjectID
		if sel, _ := store.ParseSelector(r.query.Get("project")); sel.Given() {
			if p, ok := store.Projects.Find(tx, "", sel); ok {
				parent = p.ID
			}
		}
		for _, subject := range slices.Clone(r.subjects) {
			r.subjects = append(r.subjects, tx.OtherNames(parent, subject)...)
		}
	})
}

// withFaults checks and serves the request as handle does, and applies each matching fault in the
// fault's phase. If the rack refuses the request, only faults of the phase Before are applied.
func (s *Server) withFaults(r *apiRequest) response {
	if r.unfound != nil || s.Faults.empty() {
		return r.response(s.handle(r))
	}
	refusal := s.check(r)
	if err := s.matchFaults(r); err != nil {
		return r.response(0, nil, err)
	}
	if a, ended := s.applyFaults(r, adminapi.Before); ended {
		return a
	}
	if refusal != nil {
		return r.response(0, nil, refusal)
	}
	if a, ended := s.applyFaults(r, adminapi.Instead); ended {
		return a
	}
	if n := r.firing(adminapi.Deferred); n >= 0 {
		s.deferRequest(r, time.Duration(r.faults[n].Delay))
		a, _ := s.applyFaults(r, adminapi.Deferred)
		return a
	}
	a := r.dropFields(r.response(s.serve(r)))
	if r.firing(adminapi.Twice) >= 0 {
		a = r.dropFields(r.response(s.serve(r)))
	}
	for _, phase := range []adminapi.Phase{adminapi.Unwind, adminapi.Reread, adminapi.Twice,
		adminapi.After} {
		if other, ended := s.applyFaults(r, phase); ended {
			return other
		}
	}
	return a
}

// applyFaults applies the faults of one phase, and reports whether one of them ended the request.
func (s *Server) applyFaults(r *apiRequest, phase adminapi.Phase) (response, bool) {
	for _, f := range r.faults {
		if f.Phase != phase {
			continue
		}
		if phase != adminapi.Deferred {
			// Wait even if the caller gives up: the rack still carries out the delayed request.
			s.rack.Pause(context.Background(), time.Duration(f.Delay))
		}
		switch {
		case f.Hang > 0:
			s.rack.Pause(r.Context(), time.Duration(f.Hang)) // ends early if the caller gives up
			return response{}, true
		case f.Cut:
			return response{}, true
		case f.Response != nil:
			return encodeResponse(f.Response, r.id), true
		}
	}
	return response{}, false
}

func encodeResponse(a *adminapi.Response, requestID string) response {
	body := []byte(a.Body)
	if a.Body == "" && a.Status >= 300 {
		body = encode(errorBody{requestID, a.ErrorCode, a.Message}, "  ")
	}
	if a.PadBytes > 0 {
		body = append(bytes.Repeat([]byte(" "), a.PadBytes), body...)
	}
	header := http.Header{}
	for name, value := range a.Header {
		header.Set(name, value)
	}
	return response{a.Status, header, cmp.Or(a.ContentType, jsonType), body}
}

// dropFields removes the fields that faults drop, as if the rack's release lacked these fields.
func (r *apiRequest) dropFields(a response) response {
	var fields []string
	for _, f := range r.faults {
		fields = append(fields, f.DropFields...)
	}
	var object map[string]json.RawMessage
	if len(fields) == 0 || a.status >= 300 || json.Unmarshal(a.body, &object) != nil {
		return a
	}
	var items []map[string]json.RawMessage
	if json.Unmarshal(object["items"], &items) == nil && items != nil {
		for _, item := range items {
			drop(item, fields)
		}
		object["items"] = encode(items, "")
	}
	drop(object, fields)
	a.body = encode(object, "")
	return a
}

func drop(object map[string]json.RawMessage, fields []string) {
	for _, field := range fields {
		delete(object, field)
	}
}

// writeFaulty writes a slow or truncated body, or returns false if no fault asks for one.
func (s *Server) writeFaulty(w http.ResponseWriter, r *apiRequest, body []byte) bool {
	for _, f := range r.faults {
		switch {
		case f.TruncateBody > 0 && f.TruncateBody < len(body):
			writePiece(w, body[:f.TruncateBody])
			panic(http.ErrAbortHandler)
		case f.SlowByte > 0:
			s.writeSlowly(w, r, body, len(body), time.Duration(f.SlowByte))
			return true
		case f.SlowBody > 0:
			s.writeSlowly(w, r, body, 8, time.Duration(f.SlowBody))
			return true
		}
	}
	return false
}

func (s *Server) writeSlowly(w http.ResponseWriter, r *apiRequest, body []byte, pieces int,
	pause time.Duration) {
	for piece := range slices.Chunk(body, max(1, (len(body)+pieces-1)/max(1, pieces))) {
		if !s.rack.Pause(r.Context(), pause) {
			return // the caller has given up
		}
		writePiece(w, piece)
	}
}

func writePiece(w http.ResponseWriter, piece []byte) {
	_, err := w.Write(piece)
	if err != nil || http.NewResponseController(w).Flush() != nil {
		panic(http.ErrAbortHandler)
	}
}

func (r *apiRequest) firing(phase adminapi.Phase) int {
	return slices.IndexFunc(r.faults, func(f adminapi.ActiveFault) bool { return f.Phase == phase })
}

// deferRequest carries out the request after a delay that begins when the caller has the response
// or has gone.
func (s *Server) deferRequest(r *apiRequest, delay time.Duration) {
	// Copy the request, because the goroutine that answers the caller still writes into it.
	effect := *r
	effect.entry.Deferred, effect.err = true, nil
	s.rack.DeferWork(r.Context(), delay, func() {
		effect.started = time.Now()
		s.record(&effect, effect.response(s.serve(&effect)))
	})
}
