package rack

import (
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

var (
	diskGone  = racktest.NotFound.To(racktest.ViewDisk)
	diskThere = racktest.OK(racktest.ViewDisk, diskOf("detached"))
	project   = racktest.OK(racktest.ViewProject, racktest.ProjectOf())
	user      = racktest.OK(racktest.ViewUser, racktest.UserOf(racktest.Silo))
	noProject = racktest.NotFound.To(racktest.ViewProject)
	// another project has got the name, and another rack has the same project.
	another = racktest.OK(racktest.ViewProject, racktest.JSON(map[string]any{"name": racktest.Project,
		"id": racktest.Numbered(9)}))
	anotherSilo = racktest.OK(racktest.ViewUser, racktest.UserOf(racktest.Numbered(8)))
)

func TestAnObjectIsGoneOnlyInTheKnownWorld(t *testing.T) { // DV-2, CU-4
	for _, test := range []struct {
		name   string
		lines  []exchange
		code   codes.Code
		reason csierr.Reason
	}{
		{"it is gone", []exchange{diskGone, project, user, diskGone}, codes.OK, ""},
		{"the token's role was away for a moment", []exchange{diskGone, project, user,
			diskThere}, codes.Aborted, csierr.OperationPending},
		{"the token's role is away", []exchange{diskGone, noProject}, codes.PermissionDenied,
			csierr.ProjectNotFound},
		{"another project has the name", []exchange{diskGone, another, user},
			codes.FailedPrecondition, csierr.ProjectChanged},
		{"another rack has the address", []exchange{diskGone, project, anotherSilo},
			codes.FailedPrecondition, csierr.ProjectChanged},
		{"the response is about another project", []exchange{diskGone,
			racktest.OK(racktest.ViewProject, `{"id":"`+racktest.Disk+`","name":"puppies"}`)},
			codes.Unavailable, csierr.RackResponseInvalid},
		{"the response has no project", []exchange{diskGone,
			racktest.OK(racktest.ViewProject, `{"id":null,"name":null}`)}, codes.Unavailable,
			csierr.RackResponseInvalid},
		{"a proxy's 404", []exchange{diskGone, project, user, {Want: racktest.ViewDisk,
			Status: 404, Body: diskGone.Body, Proxy: true}}, codes.Unavailable, csierr.RackUnknown},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := clientThat(t, test.lines...)
			_, err := c.Disk(t.Context(), racktest.Disk)
			csitest.Want(t, err, codes.NotFound, csierr.VolumeNotFound)
			if err = c.DiskGone(t.Context(), racktest.Disk); test.reason == "" {
				must(t, err)
				return
			}
			csitest.Want(t, err, test.code, test.reason)
		})
	}
}

// reads read a disk, a snapshot, an instance's disks, and the list of disks.
func reads(t *testing.T, c *Client) []func() error {
	return []func() error{
		func() error { _, err := c.Disk(t.Context(), racktest.Disk); return err },
		func() error { _, err := c.Snapshot(t.Context(), racktest.Snapshot); return err },
		func() error { _, err := c.InstanceDisks(t.Context(), racktest.Instance); return err },
		func() error {
			return c.EachDisk(t.Context(), &Pager{}, func(*oxide.Disk) bool { return false })
		},
	}
}

func TestAnotherWorldRefusesEveryCallUntilItIsTheKnownOneAgain(t *testing.T) {
	c := clientThat(t, diskThere, another, user, another, user, another, user, another, user, another,
		user, project, user, diskThere)
	_, err := c.Disk(t.Context(), racktest.Disk)
	must(t, err)
	if got := c.ProjectParam(); got != racktest.ProjectID {
		t.Errorf("the project is asked for as %q", got)
	}
	_, err = c.LookAtWorld(t.Context())
	csitest.Want(t, err, codes.FailedPrecondition, csierr.ProjectChanged)
	for _, read := range reads(t, c) {
		csitest.Want(t, read(), codes.FailedPrecondition, csierr.ProjectChanged)
	}
	_, err = c.Disk(t.Context(), racktest.Disk)
	must(t, err)
}

func TestAnObjectOfAnotherProjectIsLeftAlone(t *testing.T) {
	foreign := with("project_id", racktest.Numbered(9))
	c := clientThat(t, racktest.OK(racktest.ViewDisk, diskOf("detached", foreign)),
		racktest.OK("GET /v1/snapshots/"+racktest.Snapshot, snapshotOf("ready", foreign)),
		racktest.OK("GET /v1/instances/"+racktest.Instance+"/disks", pageOf("",
			diskOf(racktest.AttachedHere, foreign))))
	for _, read := range reads(t, c)[:3] {
		csitest.Want(t, read(), codes.InvalidArgument, csierr.OtherProject)
	}
}

func TestAListOfAnotherProjectIsNotShown(t *testing.T) {
	foreign := racktest.OK("GET /v1/disks", pageOf("", diskOf("detached",
		with("project_id", racktest.Numbered(9)))))
	c := clientThat(t, foreign, foreign)
	list := func(p *Pager) error {
		return c.EachDisk(t.Context(), p, func(*oxide.Disk) bool { return false })
	}
	csitest.Want(t, list(&Pager{}), codes.InvalidArgument, csierr.OtherProject)
	p, err := c.NewPager(t.Context(), packToken(racktest.ProjectID, racktest.Numbered(1),
		"Zm9yZ2Vk"), 0)
	must(t, err)
	csitest.Want(t, list(p), codes.Aborted, csierr.StartingTokenInvalid)
}
