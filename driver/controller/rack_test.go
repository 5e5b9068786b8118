package controller

import (
	"log/slog"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

var must = csitest.Must

// script lists what a rack is asked, and its responses.
type script = []racktest.Exchange

// shown reads the volume's disk in a state.
func shown(state string, edit ...func(map[string]any)) racktest.Exchange {
	return racktest.OK(racktest.ViewDisk, racktest.DiskOf(state, edit...))
}

var (
	// free reads the volume's disk detached, held attached to the instance.
	free, held = shown("detached"), shown(racktest.AttachedHere)
	// noDisk does not find it. That is believed if the project is found, and then again no disk.
	noDisk     = racktest.NotFound.To(racktest.ViewDisk)
	ownProject = racktest.OK(racktest.ViewProject, racktest.ProjectOf())
	ownUser    = racktest.OK(racktest.ViewUser, racktest.UserOf(racktest.Silo))
	noProject  = racktest.NotFound.To(racktest.ViewProject)
	// noName finds no disk by its name, and so on.
	noName     = racktest.NotFound.To(viewName)
	noSnap     = racktest.NotFound.To(viewSnap)
	noSnapName = racktest.NotFound.To(viewSnapName)
	noInstance = racktest.NotFound.To(beside)
	// noInstances and oneInstance list the project's instances.
	noInstances = racktest.OK("GET /v1/instances", racktest.PageOf(""))
	oneInstance = racktest.OK("GET /v1/instances", racktest.PageOf("",
		racktest.InstanceOf("running")))
)

// rackThat serves a script and returns a controller for it.
func rackThat(t *testing.T, lines ...racktest.Exchange) *Service {
	t.Helper()
	return controllerFor(t, racktest.Serve(t, lines...))
}

func controllerFor(t *testing.T, url string) *Service {
	t.Helper()
	client, closeIdle, err := rack.New(rack.Options{Host: url, Project: racktest.Project,
		UserAgent: "test"}, &rack.Transport{Tokens: &rack.TokenSource{Fixed: racktest.Token}})
	must(t, err)
	t.Cleanup(closeIdle)
	return &Service{Rack: client, ClusterID: "blue", Log: slog.New(slog.DiscardHandler)}
}

// instanceAt is the topology of racktest.Instance at a location such as "rack=a,".
func instanceAt(location string) []*csi.Topology {
	return csitest.Topologies(location + "instance=" + racktest.Instance)
}

// rackA is the topology of a driver that was started with rack=a.
var rackA = []volume.Segments{{volume.TopologyPrefix + "rack": "a"}}
