package simulator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/pprof"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/console"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
)

// Admin returns the handler of the admin listener, which package adminapi describes. It is separate
// from the API, because a rack has no such interface.
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

// diskOps are the operations of a disk, by their names in a fault.
var diskOps = map[string]flakydisk.Op{
	"read": flakydisk.OnRead, "write": flakydisk.OnWrite, "flush": flakydisk.OnFlush,
}

func (s *Server) adminFailDisk(w http.ResponseWriter, r *http.Request) {
	var fault adminapi.DiskFault
	err := adminRead(r, &fault)
	if err == nil {
		var f flakydisk.Fault
		active, _ := s.rack.Plane().Flaky.Faults(r.PathValue("disk")) // Fail has the same error
		if f, err = diskFault(fault); err == nil {
			err = checkCount(len(active), r.URL.Path)
		}
		if err == nil {
			err = s.rack.Plane().Flaky.Fail(r.PathValue("disk"), f)
		}
	}
	respondOfDisk(w, nil, err)
}

func (s *Server) adminHealDisk(w http.ResponseWriter, r *http.Request) {
	respondOfDisk(w, nil, s.rack.Plane().Flaky.Heal(r.PathValue("disk")))
}

func (s *Server) adminDiskFaults(w http.ResponseWriter, r *http.Request) {
	all, err := s.rack.Plane().Flaky.Faults(r.PathValue("disk"))
	respondOfDisk(w, shownFaults(all), err)
}

func shownFaults(all []flakydisk.Fault) []adminapi.DiskFault {
	shown := []adminapi.DiskFault{}
	for _, f := range all {
		one := adminapi.DiskFault{From: adminapi.Size(f.From), To: adminapi.Size(f.To), Times: f.Times,
			Delay: adminapi.Duration(f.Delay), Hang: f.Hang, Lie: f.Lie, Fired: f.Fired}
		for name, op := range diskOps {
			if f.On&op != 0 {
				one.On = append(one.On, name)
			}
		}
		slices.Sort(one.On)
		shown = append(shown, one)
	}
	return shown
}

func respondOfDisk(w http.ResponseWriter, body any, err error) {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		http.Error(w, fmt.Sprintf("%v; name a disk by its ID, which GET /state has", err),
			http.StatusNotFound)
	case errors.Is(err, dataplane.ErrCannotFail):
		adminRespond(w, nil, badAdminRequest{fmt.Errorf("%w: start it with --disks=fuse", err)})
	case err != nil || body != nil:
		adminRespond(w, body, err)
	default:
		w.WriteHeader(http.StatusNoContent)
	}
}

// diskFault converts a fault to the form that package flakydisk uses.
func diskFault(fault adminapi.DiskFault) (f flakydisk.Fault, err error) {
	f = flakydisk.Fault{From: int64(fault.From), To: int64(fault.To), Times: fault.Times,
		Delay: time.Duration(fault.Delay), Hang: fault.Hang, Lie: fault.Lie}
	for _, name := range fault.On {
		op, known := diskOps[name]
		if !known {
			return f, badAdminRequest{fmt.Errorf("on has %q; use read, write or flush", name)}
		}
		f.On |= op
	}
	var kinds []string
	for name, is := range map[string]bool{"delay": f.Delay > 0, "hang": f.Hang, "lie": f.Lie} {
		if is {
			kinds = append(kinds, name)
		}
	}
	slices.Sort(kinds)
	switch {
	case f.On == 0:
		err = errors.New(`on is missing: it lists "read", "write" or "flush"`)
	case f.From < 0 || f.To < f.From:
		err = fmt.Errorf("from %d to %d is no range of bytes", f.From, f.To)
	case f.Times < 0:
		err = fmt.Errorf("times is %d; it cannot be negative", f.Times)
	case len(kinds) > 1:
		err = fmt.Errorf("%s exclude each other", strings.Join(kinds, " and "))
	case f.Lie && f.On&flakydisk.OnRead != 0:
		err = errors.New("a read cannot lie")
	case fault.Fired != 0:
		err = errors.New("fired is the rack's to count")
	}
	if err != nil {
		err = badAdminRequest{err}
	}
	return f, err
}

// addConsole adds the console's pages to the admin listener, and returns the guarded listener. A
// browser gets pages for GET / and GET /routes, and every other client the list of routes as JSON.
func (s *Server) addConsole(admin *http.ServeMux) http.Handler {
	c := console.New()
	c.State, c.Version, c.Switches = s.rack.RecordedState, s.rack.Version, s.rack.Switches
	c.Machines = s.rack.Machines
	c.Faults, c.Requests, c.Flights = s.Faults.List, s.requests.newest, s.Flights.Newest
	c.Disk, c.Run, c.Admin, c.Hosts = s.consoleDisk, s.run, admin, s.adminHosts
	c.BodyTime = s.bodyTime
	for _, op := range routes {
		c.Operations = append(c.Operations, op.name)
	}
	slices.Sort(c.Operations)
	pages := c.Handler()
	list := func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Vary", "Accept")
		if strings.Contains(r.Header.Get("Accept"), "text/html") {
			pages.ServeHTTP(w, r)
			return
		}
		adminRespond(w, adminapi.Routes, nil)
	}
	admin.HandleFunc("GET /{$}", list)
	admin.HandleFunc("GET /routes", list)
	admin.Handle("/console/", pages)
	return c.Guard(admin)
}

// consoleDisk returns what the data plane knows of a disk, which may be removed meanwhile.
func (s *Server) consoleDisk(id string) (d console.Disk, err error) {
	plane := s.rack.Plane()
	d.AllocatedBytes, err = plane.Allocated(id)
	if err == nil {
		var faults []flakydisk.Fault
		faults, err = plane.Flaky.Faults(id)
		d.Faults = shownFaults(faults)
	}
	if err == nil {
		var activity []flakydisk.Activity
		activity, err = plane.Flaky.Activity(id)
		for _, a := range activity {
			d.Activity = append(d.Activity, console.Activity(a))
		}
	}
	d.CanFail = err == nil
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, dataplane.ErrCannotFail) {
		err = nil
	}
	return d, err
}

// run carries out a request of the API without a body for the console. The request needs no token
// and is logged, and faults do not apply to it.
func (s *Server) run(ctx context.Context, method, path string) (status int, answer []byte) {
	hr, err := http.NewRequestWithContext(ctx, method, path, nil)
	if err != nil {
		return http.StatusBadRequest, []byte(err.Error())
	}
	hr.Header.Set("User-Agent", "console")
	r := newRequest(hr)
	end, ok := s.rack.Begin()
	if !ok {
		return http.StatusServiceUnavailable, []byte(http.StatusText(http.StatusServiceUnavailable))
	}
	defer end()
	err = r.find()
	if err == nil {
		err = r.parse()
	}
	a := newResponse(r.id, 0, nil, err)
	if err == nil {
		a = s.serve(r)
	}
	s.record(r, a)
	return a.status, a.body
}
