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
	// noDisk does not find it. That is believed where the project is found.
	noDisk     = racktest.NotFound.To(racktest.ViewDisk)
	ownProject = racktest.OK(racktest.ViewProject, racktest.ProjectOf())
	noProject  = racktest.NotFound.To(racktest.ViewProject)
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
