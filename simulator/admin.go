package simulator

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/pprof"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// Admin serves what package adminapi describes, for tests and operators of the simulator. It is a
// handler of its own, for a listener of its own, because a rack has nothing of the kind.
func (s *Server) Admin() http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.HandleFunc("GET /requests", s.adminRequests)
	mux.HandleFunc("DELETE /requests", func(w http.ResponseWriter, _ *http.Request) {
		s.requests.clear()
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("GET /faults", func(w http.ResponseWriter, _ *http.Request) {
		adminRespond(w, s.Faults.List(), nil)
	})
	mux.HandleFunc("POST /faults", s.adminAddFault)
	mux.HandleFunc("DELETE /faults", func(w http.ResponseWriter, _ *http.Request) {
		s.Faults.Clear()
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("DELETE /faults/{id}", s.adminRemoveFault)
	mux.HandleFunc("POST /deferred", func(w http.ResponseWriter, r *http.Request) {
		if err := s.RunDeferred(r.Context()); err != nil {
			adminRespond(w, nil, err)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("GET /mutations", func(w http.ResponseWriter, _ *http.Request) {
		adminRespond(w, s.mutation.List(), nil)
	})
	mux.HandleFunc("PUT /mutations/{name}", func(w http.ResponseWriter, r *http.Request) {
		s.adminMutate(w, r.PathValue("name"))
	})
	mux.HandleFunc("DELETE /mutations", func(w http.ResponseWriter, _ *http.Request) {
		s.adminMutate(w, "")
	})
	mux.HandleFunc("GET /switches", func(w http.ResponseWriter, _ *http.Request) {
		adminRespond(w, s.rack.Switches(), nil)
	})
	mux.HandleFunc("PATCH /switches", s.adminSwitch)
	mux.HandleFunc("GET /state", func(w http.ResponseWriter, _ *http.Request) {
		state, err := s.rack.State()
		adminRespond(w, state, err)
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.Handle("GET /debug/pprof/goroutine", pprof.Handler("goroutine"))
	return mux
}

// badAdminRequest is an error of the caller's.
type badAdminRequest struct{ error }

func adminRespond(w http.ResponseWriter, body any, err error) {
	if err != nil {
		status := http.StatusInternalServerError
		if errors.As(err, &badAdminRequest{}) {
			status = http.StatusBadRequest
		}
		http.Error(w, err.Error(), status)
		return
	}
	w.Header().Set("Content-Type", jsonType)
	// The caller may be gone.
	_, _ = w.Write(encode(body, "  "))
}

// adminRead decodes a JSON body. It refuses an unknown field.
func adminRead(r *http.Request, into any) error {
	d := json.NewDecoder(http.MaxBytesReader(nil, r.Body, maxBody))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return badAdminRequest{fmt.Errorf("read the body of %s %s: %w", r.Method, r.URL.Path, err)}
	}
	return nil
}

func (s *Server) adminRequests(w http.ResponseWriter, r *http.Request) {
	since := 0
	if text := r.URL.Query().Get("since"); text != "" {
		var err error
		if since, err = strconv.Atoi(text); err != nil {
			adminRespond(w, nil, badAdminRequest{fmt.Errorf("since=%q is not a number", text)})
			return
		}
	}
	adminRespond(w, s.requests.since(since), nil)
}

func (s *Server) adminAddFault(w http.ResponseWriter, r *http.Request) {
	var fault adminapi.Fault
	if err := adminRead(r, &fault); err != nil {
		adminRespond(w, nil, err)
		return
	}
	id, err := s.Faults.Add(fault)
	if err != nil {
		err = badAdminRequest{err}
	}
	adminRespond(w, struct {
		ID string `json:"id"`
	}{id}, err)
}

func (s *Server) adminRemoveFault(w http.ResponseWriter, r *http.Request) {
	if !s.Faults.Remove(r.PathValue("id")) {
		http.Error(w, fmt.Sprintf("there is no fault %q", r.PathValue("id")),
			http.StatusNotFound)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

func (s *Server) adminMutate(w http.ResponseWriter, name string) {
	if err := s.Mutate(name); err != nil {
		http.Error(w, err.Error(), http.StatusNotFound)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

func (s *Server) adminSwitch(w http.ResponseWriter, r *http.Request) {
	// Read the whole body first, so that a slow caller does not hold the switches.
	body, err := io.ReadAll(r.Body)
	if err != nil {
		adminRespond(w, nil, badAdminRequest{fmt.Errorf("read the body: %w", err)})
		return
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	now, err := s.rack.ChangeSwitches(func(next *adminapi.Switches) error {
		return adminRead(r,
			next)
	})
	if err != nil {
		err = badAdminRequest{err}
	}
	adminRespond(w, now, err)
}
