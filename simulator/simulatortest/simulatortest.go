// Package simulatortest serves a simulated Oxide rack to tests of programs that use a rack.
//
//	rack := simulatortest.Start(t)
//	disk, err := rack.DiskCreate(t.Context(), …) // Oxide's own client
//
// The rack runs in the test's process and ends with the test. It has the project "default" with the
// running instances "a" and "b". It runs on any system and for any user, because its disks are
// files: the API is complete, but no instance sees its disks. An [Option] adds devices.
//
// The rack attaches disks to running instances, which no rack of today does. Set Config.Hotplug to
// [adminapi.HotplugNone] to get a rack of today.
package simulatortest

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// Rack is a simulated rack that serves HTTP.
type Rack struct {
	// Client calls the rack with a valid token.
	*oxide.Client
	// URL, Token and Project are the values of OXIDE_HOST, OXIDE_TOKEN and OXIDE_PROJECT for the
	// program under test.
	URL, Token, Project string
	// Admin reads the rack's state and request log, and changes its switches and faults.
	Admin  adminapi.Client
	Server *simulator.Server

	t testing.TB
}

// Option changes the configuration of a rack before it starts.
type Option func(*simulator.Config)

// Start serves a rack until the test ends. It fails the test if the rack cannot start or close.
func Start(t testing.TB, options ...Option) *Rack {
	t.Helper()
	c := simulator.Config{
		Volatile: true, Devices: simulator.NoDevices, Token: "oxide-token-test",
		Projects:  []string{"default"},
		Instances: []simulator.InstanceSpec{{Name: "a"}, {Name: "b"}},
		Log:       slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
	for _, change := range options {
		change(&c)
	}
	server, err := simulator.Open(t.Context(), c)
	if err != nil {
		t.Fatalf("start a simulated rack: %v", err)
	}
	api, admin := httptest.NewServer(server), httptest.NewServer(server.Admin())
	t.Cleanup(func() {
		// Close the rack before the listener, because closing the rack ends hanging requests.
		err := server.Close()
		api.Close()
		admin.Close()
		if err != nil {
			t.Errorf("end the simulated rack: %v", err)
		}
	})
	r := &Rack{URL: api.URL, Token: c.Token, Project: c.Projects[0],
		Admin: adminapi.Client{URL: admin.URL}, Server: server, t: t}
	// The client keeps no connection open, because a test may count the program's connections.
	r.Client, err = oxide.NewClient(oxide.WithHost(r.URL), oxide.WithToken(r.Token),
		oxide.WithHTTPClient(&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}))
	if err != nil {
		t.Fatalf("make a client of the simulated rack: %v", err)
	}
	return r
}

// Fault adds a fault, and fired() returns how often it has fired. An invalid fault fails the test.
func (r *Rack) Fault(f adminapi.Fault) (fired func() int) {
	r.t.Helper()
	id, err := r.Server.Faults.Add(f)
	if err != nil {
		r.t.Fatalf("add a fault to the simulated rack: %v", err)
	}
	return func() int {
		r.t.Helper()
		n, err := r.Admin.Fired(context.WithoutCancel(r.t.Context()), id)
		if err != nil {
			r.t.Errorf("read the fault: %v", err)
		}
		return n
	}
}

// Reset returns the rack to its start, without faults and with an empty request log.
func (r *Rack) Reset() {
	r.t.Helper()
	if err := r.Server.Reset(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
}
