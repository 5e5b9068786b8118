package simulator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/pprof"
	"reflect"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// Admin returns the handler of the admin listener, which package adminapi describes, for tests
// and operators of the simulator. It has a listener of its own, because a rack has no such
// interface.
func (s *Server) Admin() http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	nothing := func(do func()) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			do()
			w.WriteHeader(http.StatusNoContent)
		}
	}
	handlers := map[string]http.Handler{
		"GET /requests":               http.HandlerFunc(s.adminRequests),
		"DELETE /requests":            nothing(s.requests.clear),
		"GET /faults":                 adminView(func() (any, error) { return s.Faults.List(), nil }),
		"POST /faults":                http.HandlerFunc(s.adminAddFault),
		"DELETE /faults":              nothing(s.Faults.Clear),
		"DELETE /faults/{id}":         http.HandlerFunc(s.adminRemoveFault),
		"GET /disks/{disk}/faults":    http.HandlerFunc(s.adminDiskFaults),
		"POST /disks/{disk}/faults":   http.HandlerFunc(s.adminFailDisk),
		"DELETE /disks/{disk}/faults": http.HandlerFunc(s.adminHealDisk),
		"POST /deferred":              adminDo(s.RunDeferred),
		"POST /reset":                 adminDo(s.Reset),
		"GET /mutations":              adminView(func() (any, error) { return s.mutation.List(), nil }),
		"PUT /mutations/{name}": http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			s.adminMutate(w, r.PathValue("name"))
		}),
		"DELETE /mutations": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			s.adminMutate(w, "")
		}),
		"GET /switches":              adminView(func() (any, error) { return s.rack.Switches(), nil }),
		"PATCH /switches":            http.HandlerFunc(s.adminSwitch),
		"GET /state":                 adminView(func() (any, error) { return s.rack.State() }),
		"GET /metrics":               promhttp.HandlerFor(registry, promhttp.HandlerOpts{}),
		"GET /debug/pprof/goroutine": pprof.Handler("goroutine"),
	}
	mux := http.NewServeMux()
	for pattern, handler := range handlers {
		mux.Handle(pattern, handler)
	}
	return s.addConsole(mux)
}

// badAdminRequest is a mistake in a request to the admin listener.
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

// adminView answers with what show returns.
func adminView(show func() (any, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		body, err := show()
		adminRespond(w, body, err)
	})
}

// adminRead decodes a JSON body. If the body has an unknown field, it returns an error that lists
// the known ones.
func adminRead(r *http.Request, into any) error {
	d := json.NewDecoder(http.MaxBytesReader(nil, r.Body, maxBody))
	d.DisallowUnknownFields()
	err := d.Decode(into)
	if err == nil {
		return nil
	}
	if strings.HasPrefix(err.Error(), "json: unknown field") {
		err = fmt.Errorf("%w; known are %s", err, strings.Join(jsonFields(into), ", "))
	}
	return badAdminRequest{fmt.Errorf("read the body of %s %s: %w", r.Method, r.URL.Path, err)}
}

// jsonFields returns the JSON names of a struct's fields, and of the fields of nested structs.
func jsonFields(of any) (names []string) {
	var add func(t reflect.Type, prefix string)
	add = func(t reflect.Type, prefix string) {
		for t.Kind() == reflect.Pointer {
			t = t.Elem()
		}
		if t.Kind() != reflect.Struct {
			return
		}
		for _, f := range reflect.VisibleFields(t) {
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if name != "" && name != "-" {
				names = append(names, prefix+name)
				add(f.Type, prefix+name+".")
			}
		}
	}
	add(reflect.TypeOf(of), "")
	return names
}

// adminDo answers when do has ended.
func adminDo(do func(context.Context) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := do(r.Context()); err != nil {
			adminRespond(w, nil, err)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
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
	now, err := s.rack.ChangeSwitches(func(next *adminapi.Switches) error {
		return adminRead(r, next)
	})
	if err != nil {
		err = badAdminRequest{err}
	}
	adminRespond(w, now, err)
}
