package simulator

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// matchFaults finds the faults that fire for the request, and logs them.
func (s *Server) matchFaults(r *apiRequest) error {
	if s.Faults.empty() {
		return nil
	}
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
		r.entry.Faults = append(r.entry.Faults, f.id)
		s.log.Warn("a fault fires", slog.String("fault", f.id),
			slog.String("operation", r.entry.Operation), slog.String("phase", string(f.Phase)),
			slog.String("object", r.entry.Object), slog.String("request_id", r.id))
	}
	return nil
}

// resolve adds the names of a request's IDs and the IDs of its names to the subjects, so that a
// fault may use either.
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

// amongFaults serves or refuses a request that was read, and applies the faults that fire in their
// phases.
func (s *Server) amongFaults(r *apiRequest, refusal error) response {
	if a, ended := s.applyFaults(r, adminapi.Before); ended {
		return a
	}
	if refusal != nil {
		return newResponse(r.id, 0, nil, refusal)
	}
	if a, ended := s.applyFaults(r, adminapi.Instead); ended {
		return a
	}
	if f := r.firing(adminapi.Deferred); f != nil {
		s.deferRequest(r, time.Duration(f.Delay))
		a, _ := s.applyFaults(r, adminapi.Deferred)
		return a
	}
	a := r.dropFields(s.serve(r))
	if r.firing(adminapi.Twice) != nil {
		a = r.dropFields(s.serve(r))
	}
	for _, phase := range []adminapi.Phase{adminapi.Unwind, adminapi.Reread, adminapi.Twice,
		adminapi.After} {
		if other, ended := s.applyFaults(r, phase); ended {
			return other
		}
	}
	return a
}

// applyFaults applies the faults of a phase. It reports whether a fault ended the request, and
// returns the response in that case.
func (s *Server) applyFaults(r *apiRequest, phase adminapi.Phase) (response, bool) {
	for _, f := range r.faults {
		if f.Phase != phase {
			continue
		}
		if phase != adminapi.Deferred {
			// A delayed request is carried out even if its caller has given up.
			s.rack.Pause(context.Background(), time.Duration(f.Delay))
		}
		switch {
		case f.Hang > 0:
			s.waitWithCaller(r, time.Duration(f.Hang))
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
	contentType := a.ContentType
	if contentType == "" {
		contentType = jsonType
	}
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
	return response{a.Status, header, contentType, body}
}

// dropFields removes the fields that a fault drops from a response, because a rack of another
// release lacks them.
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

// waitWithCaller waits for d, but ends when the caller gives up.
func (s *Server) waitWithCaller(r *apiRequest, d time.Duration) bool {
	return s.rack.Pause(r.Context(), d)
}

// writeFaulty writes the body slowly or truncated if a fault demands it. It reports whether it
// has written the body.
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
	pieces = max(1, pieces)
	size := max(1, (len(body)+pieces-1)/pieces)
	for len(body) > 0 && s.waitWithCaller(r, pause) {
		n := min(size, len(body))
		writePiece(w, body[:n])
		body = body[n:]
	}
}

func writePiece(w http.ResponseWriter, piece []byte) {
	if _, err := w.Write(piece); err != nil {
		panic(http.ErrAbortHandler)
	}
	if err := http.NewResponseController(w).Flush(); err != nil {
		panic(http.ErrAbortHandler)
	}
}

// firing returns the first fault of a phase that fires for the request, or nil.
func (r *apiRequest) firing(phase adminapi.Phase) *firing {
	for _, f := range r.faults {
		if f.Phase == phase {
			return f
		}
	}
	return nil
}

// deferRequest carries out a request after a delay, which begins when the caller has the response
// or is gone.
func (s *Server) deferRequest(r *apiRequest, delay time.Duration) {
	// The request is copied, because the response in progress writes into it.
	effect := *r
	effect.entry.Deferred = true
	s.rack.DeferWork(r.Context(), delay, func() {
		effect.started = time.Now()
		s.record(&effect, s.serve(&effect))
	})
}
