package controller

import (
	"log/slog"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

var (
	must = csitest.Must
	with = racktest.With
	// diskOf, snapshotOf and pageOf return what a rack responds.
	diskOf, snapshotOf, pageOf = racktest.DiskOf, racktest.SnapshotOf, racktest.PageOf
)

// script lists what a rack is asked, and its responses.
type script = []racktest.Exchange

// The states of a disk at the instance.
const (
	here      = racktest.AttachedHere
	attaching = "attaching " + racktest.Instance
	detaching = "detaching " + racktest.Instance
)

// edit changes a field of an object.
type edit = func(map[string]any)

// tagged gives an object an ownership tag.
func tagged(tag volume.Tag) edit { return with("description", tag.Description()) }

// shown reads the volume's disk in a state, and named reads it by its name. snap and snapNamed are
// like them for a snapshot, and instance reads the instance.
func shown(state string, edits ...edit) racktest.Exchange {
	return racktest.OK(racktest.ViewDisk, diskOf(state, edits...))
}

func named(state string, edits ...edit) racktest.Exchange {
	return racktest.OK(viewName, diskOf(state, edits...))
}

func snap(state string, edits ...edit) racktest.Exchange {
	return racktest.OK(viewSnap, snapshotOf(state, edits...))
}

func snapNamed(state string, edits ...edit) racktest.Exchange {
	return racktest.OK(viewSnapName, snapshotOf(state, edits...))
}

func instance(state string, edits ...edit) racktest.Exchange {
	return racktest.OK(viewInstance, racktest.InstanceOf(state, edits...))
}

// listing lists the instance's disks.
func listing(disks ...string) racktest.Exchange {
	return racktest.OK(beside, pageOf("", disks...))
}

var (
	// free reads the volume's disk detached, held attached to the instance.
	free, held = shown("detached"), shown(here)
	// noDisk does not find it. That is believed if the project is found, and then again no disk.
	gone       = script{noDisk, ownProject, ownUser, noDisk}
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
	noInstances = racktest.OK("GET /v1/instances", pageOf(""))
	oneInstance = racktest.OK("GET /v1/instances", pageOf("", racktest.InstanceOf("running")))
	// These are responses to a change.
	attachingNow = accepted(attach, diskOf(attaching))
	detachingNow = accepted(detach, diskOf(detaching))
	attachedNow  = accepted(attach, diskOf(here))
	detachedNow  = accepted(detach, diskOf("detached"))
	deleted      = racktest.Exchange{Want: racktest.DeleteDisk, Status: 204}
	lostAttach   = racktest.Exchange{Want: attach, Cut: true}
	lostDetach   = racktest.Exchange{Want: detach, Cut: true}
	lostCreate   = racktest.Exchange{Want: postDisk, Cut: true}
	lostSnap     = racktest.Exchange{Want: postSnap, Cut: true}
	lostDelete   = racktest.Exchange{Want: racktest.DeleteDisk, Cut: true}
	deletedSnap  = racktest.Exchange{Want: deleteSnap, Status: 204}
	noAttach     = racktest.Refused.To(attach)
	noDetach     = racktest.Refused.To(detach)
	noDelete     = racktest.Refused.To(racktest.DeleteDisk)
	noTaking     = racktest.Refused.To(postSnap)
	forbidden    = racktest.Error(403, "Forbidden", "Forbidden")
	later        = racktest.Error(503, "ServiceNotAvailable", "later")
)

// scriptedCall is a call of the controller with a script.
type scriptedCall struct {
	name   string
	lines  script
	code   codes.Code
	reason csierr.Reason
	words  string // that the message has to contain
}

func (s scriptedCall) verify(t *testing.T, err error) {
	t.Helper()
	if s.code == codes.OK {
		must(t, err)
		return
	}
	csitest.Want(t, err, s.code, s.reason, s.words)
}

type scriptedCalls []scriptedCall

// after puts lines in front of each script.
func (all scriptedCalls) after(lines ...racktest.Exchange) scriptedCalls {
	for i := range all {
		all[i].lines = slices.Concat(lines, all[i].lines)
	}
	return all
}

// try makes the calls with a request. What they return without an error is want, unless that is
// nil.
func (all scriptedCalls) try(t *testing.T, request, want proto.Message) {
	t.Helper()
	for _, s := range all {
		t.Run(s.name, func(t *testing.T) {
			answer, err := csitest.Answer(t.Context(), rackThat(t, s.lines...), request)
			if s.verify(t, err); err == nil && want != nil {
				csitest.SameMessage(t, answer, want)
			}
		})
	}
}

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
