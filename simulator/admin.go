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

// Admin returns the handler of the admin listener (package adminapi), which a real rack lacks.
func (s *Server) Admin() http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	done := func(do func()) adminAnswer {
		return func(*http.Request) (any, error) { do(); return nil, nil }
	}
	mux := http.NewServeMux()
	for pattern, answer := range map[string]adminAnswer{
		"GET /requests":               s.requests.adminList,
		"DELETE /requests":            done(s.requests.clear),
		"GET /faults":                 func(*http.Request) (any, error) { return s.Faults.List(), nil },
		"POST /faults":                s.Faults.adminAdd,
		"DELETE /faults":              done(s.Faults.Clear),
		"DELETE /faults/{id}":         s.Faults.adminRemove,
		"GET /disks/{disk}/faults":    s.adminDiskFaults,
		"POST /disks/{disk}/faults":   s.adminFailDisk,
		"DELETE /disks/{disk}/faults": s.adminHealDisk,
		"POST /deferred": func(r *http.Request) (any, error) {
			return nil, s.RunDeferred(r.Context())
		},
		"POST /reset":           func(r *http.Request) (any, error) { return nil, s.Reset(r.Context()) },
		"GET /mutations":        func(*http.Request) (any, error) { return s.mutation.List(), nil },
		"PUT /mutations/{name}": s.adminMutate,
		"DELETE /mutations":     s.adminMutate,
		"GET /switches":         func(*http.Request) (any, error) { return s.rack.Switches(), nil },
		"PATCH /switches":       s.adminSwitch,
		"GET /state":            func(*http.Request) (any, error) { return s.rack.State() },
	} {
		mux.Handle(pattern, answer)
	}
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.Handle("GET /debug/pprof/goroutine", pprof.Handler("goroutine"))
	return s.addConsole(mux)
}

// adminAnswer returns the body of the answer to a request, or an error. Two nils mean status 204.
type adminAnswer func(*http.Request) (body any, err error)

// adminError is an error with the status of its response. For other errors the status is 500.
type adminError struct {
	error
	status int
}

func badAdminRequest(err error) error {
	if err == nil {
		return nil
	}
	return adminError{err, http.StatusBadRequest}
}

func (answer adminAnswer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := answer(r)
	switch known := (adminError{status: http.StatusInternalServerError}); {
	case err != nil:
		errors.As(err, &known)
		http.Error(w, err.Error(), known.status)
	case body == nil:
		w.WriteHeader(http.StatusNoContent)
	default:
		w.Header().Set("Content-Type", jsonType)
		_, _ = w.Write(encode(body, "  ")) // fails only if the caller has gone
	}
}

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
	return badAdminRequest(fmt.Errorf("read the body of %s %s: %w", r.Method, r.URL.Path, err))
}

// jsonFields returns the JSON names of a struct's fields, such as response.status for a nested one.
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

func (l *requestLog) adminList(r *http.Request) (any, error) {
	since := 0
	if text := r.URL.Query().Get("since"); text != "" {
		var err error
		if since, err = strconv.Atoi(text); err != nil {
			return nil, badAdminRequest(fmt.Errorf("since=%q is not a number", text))
		}
	}
	return l.since(since), nil
}

func (f *Faults) adminAdd(r *http.Request) (any, error) {
	var fault adminapi.Fault
	if err := adminRead(r, &fault); err != nil {
		return nil, err
	}
	id, err := f.Add(fault)
	return struct {
		ID string `json:"id"`
	}{id}, badAdminRequest(err)
}

func (f *Faults) adminRemove(r *http.Request) (any, error) {
	if id := r.PathValue("id"); !f.Remove(id) {
		return nil, adminError{fmt.Errorf("there is no fault %q", id), http.StatusNotFound}
	}
	return nil, nil
}

// adminMutate activates the mutation that the path names. Without a name, it ends the active one.
func (s *Server) adminMutate(r *http.Request) (any, error) {
	if err := s.Mutate(r.PathValue("name")); err != nil {
		return nil, adminError{err, http.StatusNotFound}
	}
	return nil, nil
}

func (s *Server) adminSwitch(r *http.Request) (any, error) {
	now, err := s.rack.ChangeSwitches(
		func(next *adminapi.Switches) error { return adminRead(r, next) })
	return now, badAdminRequest(err)
}

var diskOps = map[string]flakydisk.Op{
	"read": flakydisk.OnRead, "write": flakydisk.OnWrite, "flush": flakydisk.OnFlush,
}

func (s *Server) adminFailDisk(r *http.Request) (any, error) {
	var fault adminapi.DiskFault
	if err := adminRead(r, &fault); err != nil {
		return nil, err
	}
	f, err := diskFault(fault)
	if err != nil {
		return nil, badAdminRequest(err)
	}
	flaky, disk := &s.rack.Plane().Flaky, r.PathValue("disk")
	active, _ := flaky.Faults(disk) // an error makes Fail below fail, too
	if err := checkCount(len(active), r.URL.Path); err != nil {
		return nil, badAdminRequest(err)
	}
	return nil, ofDisk(flaky.Fail(disk, f))
}

func (s *Server) adminHealDisk(r *http.Request) (any, error) {
	return nil, ofDisk(s.rack.Plane().Flaky.Heal(r.PathValue("disk")))
}

func (s *Server) adminDiskFaults(r *http.Request) (any, error) {
	all, err := s.rack.Plane().Flaky.Faults(r.PathValue("disk"))
	return shownFaults(all), ofDisk(err)
}

func ofDisk(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return adminError{fmt.Errorf("%w; name a disk by its ID, which GET /state has", err),
			http.StatusNotFound}
	case errors.Is(err, dataplane.ErrCannotFail):
		return badAdminRequest(fmt.Errorf("%w: start it with --disks=fuse", err))
	}
	return err
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

func diskFault(fault adminapi.DiskFault) (f flakydisk.Fault, err error) {
	f = flakydisk.Fault{From: int64(fault.From), To: int64(fault.To), Times: fault.Times,
		Delay: time.Duration(fault.Delay), Hang: fault.Hang, Lie: fault.Lie}
	for _, name := range fault.On {
		op, known := diskOps[name]
		if !known {
			return f, fmt.Errorf("on has %q; use read, write or flush", name)
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
		err = fmt.Errorf("from %d to %d is not a range of bytes", f.From, f.To)
	case f.Times < 0:
		err = fmt.Errorf("times is %d; it cannot be negative", f.Times)
	case len(kinds) > 1:
		err = fmt.Errorf("%s exclude each other", strings.Join(kinds, " and "))
	case f.Lie && f.On&flakydisk.OnRead != 0:
		err = errors.New("a read cannot lie")
	case fault.Fired != 0:
		err = errors.New("fired cannot be set: it is the rack's count")
	}
	return f, err
}

// addConsole adds GET / and GET /routes. Browsers get pages, and other clients the routes as JSON.
// The returned handler refuses requests from foreign web pages ([console.Console.Guard]).
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
		adminAnswer(func(*http.Request) (any, error) { return adminapi.Routes, nil }).ServeHTTP(w, r)
	}
	admin.HandleFunc("GET /{$}", list)
	admin.HandleFunc("GET /routes", list)
	admin.Handle("/console/", pages)
	return c.Guard(admin)
}

// consoleDisk returns the details of a disk. It succeeds if the disk is gone or cannot have faults.
func (s *Server) consoleDisk(id string) (d console.Disk, err error) {
	plane := s.rack.Plane()
	d.AllocatedBytes, err = plane.Files.Allocated(id)
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

// run carries out a request of the console to the API, without a token and without faults.
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
	status, body, err := 0, any(nil), r.parse()
	if err == nil {
		status, body, err = s.serve(r)
	}
	a := r.response(status, body, err)
	s.record(r, a)
	return a.status, a.body
}
