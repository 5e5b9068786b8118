package simulator

import (
	"net/http"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/broken"
)

// respond carries out a request, with the active mutation if there is one.
func (s *Server) respond(r *apiRequest) response {
	m := s.mutation.Active()
	if m == nil {
		return s.handle(r)
	}
	x := s.exchange(r)
	if m.Before != nil {
		m.Before(x)
	}
	if x.Answer == nil {
		x.Answer = x.Carry()
	}
	if m.After != nil {
		m.After(x)
	}
	a := response{status: x.Answer.Status, header: x.Answer.Header, body: x.Answer.Body}
	if len(a.body) > 0 {
		a.contentType = jsonType
	}
	return a
}

// exchange returns the request in the form that a mutation changes.
func (s *Server) exchange(r *apiRequest) *broken.Interception {
	x := &broken.Interception{Rack: s.rack, RequestID: r.id, Request: r.Request, Body: r.raw}
	if op, path, err := route(r.Method, r.URL.EscapedPath()); err == nil {
		x.Operation, x.Path = op.name, path
		r.entry.Operation = op.name
	}
	x.Carry = func() *broken.Answer {
		r.raw = x.Body
		r.query, r.path, r.entry.Path = r.URL.Query(), nil, clip(r.URL.RequestURI())
		a := s.handle(r)
		if a.header == nil {
			a.header = http.Header{}
		}
		return &broken.Answer{Status: a.status, Header: a.header, Body: a.body}
	}
	return x
}
