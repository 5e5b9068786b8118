package simulator

import (
	"context"
	"errors"
	"io/fs"
	"net/http"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/console"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
)

// addConsole adds the console's pages to the admin listener and guards the whole. GET / and
// GET /routes are pages for a browser, and the list of routes as JSON for every other client.
func (s *Server) addConsole(admin *http.ServeMux) http.Handler {
	c := console.New()
	c.State, c.Version, c.Switches = s.rack.RecordedState, s.rack.Version, s.rack.Switches
	c.Machines = s.rack.Machines
	c.Faults, c.Requests, c.Flights = s.Faults.List, s.requests.newest, s.Flights.Newest
	c.Disk, c.Run, c.Admin, c.Hosts = s.consoleDisk, s.run, admin, s.adminHosts
	c.Closing, c.BodyTime = s.rack.Closing(), s.bodyTime
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

// consoleDisk returns what the records do not have of a disk. A disk may be removed meanwhile.
func (s *Server) consoleDisk(id string) (d console.Disk, err error) {
	plane := s.rack.Plane()
	d.AllocatedBytes, err = plane.Allocated(id)
	if err == nil {
		var faults []flakydisk.Fault
		faults, err = plane.DiskFaults(id)
		d.Faults = shownFaults(faults)
	}
	if err == nil {
		var activity []flakydisk.Activity
		activity, err = plane.DiskActivity(id)
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

// run carries out a request of the API that has no body, for the console. It needs no token, and
// no fault acts on it; the log has it.
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
