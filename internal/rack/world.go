package rack

import (
	"context"
	"sync"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// World is the project of the driver's objects, and the silo of the project. A name may belong to
// another project later, or to one on another rack; these ids do not.
type World struct{ Project, Silo string }

// world is what a client has learnt.
type world struct {
	mu sync.Mutex
	// guarded by mu; zero until the rack has answered for the first time
	ids World
	// guarded by mu; set while the setting names another project than before
	moved error
}

// World returns the ids that the first successful call has read. If a later look found others, it
// looks again, and returns an error until it finds these. A client without a project has no world,
// and compares nothing.
func (c *Client) World(ctx context.Context) (World, error) {
	c.world.mu.Lock()
	ids, moved := c.world.ids, c.world.moved
	c.world.mu.Unlock()
	if moved == nil && (ids.Project != "" || c.Project == "") {
		return ids, nil
	}
	return c.LookAtWorld(ctx)
}

// LookAtWorld reads the ids from the rack, and compares them with those that are known.
func (c *Client) LookAtWorld(ctx context.Context) (World, error) {
	now, err := c.readWorld(ctx)
	if err != nil {
		return World{}, err
	}
	c.world.mu.Lock()
	defer c.world.mu.Unlock()
	w := &c.world
	if w.ids.Project == "" {
		w.ids = now
	}
	if w.moved = nil; now != w.ids {
		w.moved = csierr.New(csierr.ProjectChanged, "OXIDE_PROJECT was the project %s of the silo %s "+
			"when the driver started, and is now %s of %s: the volumes are not there; set OXIDE_PROJECT "+
			"to the project's id and check OXIDE_HOST", w.ids.Project, w.ids.Silo, now.Project, now.Silo)
	}
	return w.ids, w.moved
}

func (c *Client) readWorld(ctx context.Context) (World, error) {
	project, err := c.ProjectView(ctx, oxide.ProjectViewParams{Project: oxide.NameOrId(c.Project)})
	switch {
	case err != nil:
		return World{}, ProjectError(ctx, err)
	case !volume.IsID(project.Id), project.Id != c.Project && string(project.Name) != c.Project:
		return World{}, InvalidResponse("read project", "asked for the project in OXIDE_PROJECT and got "+
			"%.80q (%.80q)", project.Name, project.Id)
	}
	user, err := c.CurrentUserView(ctx)
	switch {
	case err != nil:
		return World{}, Error(ctx, "read user", err)
	case !volume.IsID(user.SiloId):
		return World{}, InvalidResponse("read user", "the silo's id is %.80q", user.SiloId)
	}
	return World{project.Id, user.SiloId}, nil
}

// ProjectParam returns the project as a parameter of the Oxide client: its id once that is known,
// because another project may get the name.
func (c *Client) ProjectParam() oxide.NameOrId {
	c.world.mu.Lock()
	defer c.world.mu.Unlock()
	if c.world.ids.Project != "" {
		return oxide.NameOrId(c.world.ids.Project)
	}
	return oxide.NameOrId(c.Project)
}

// has returns an error unless an object is in the driver's project, whatever its tag says.
func (w World) has(kind, text, project string) error {
	if w.Project == "" || project == w.Project {
		return nil
	}
	return csierr.New(csierr.OtherProject, "the %s %s is in the project %.80q, and OXIDE_PROJECT is "+
		"%s; the driver leaves it alone", kind, text, project, w.Project)
}

// Gone confirms that an object that the rack did not find is gone: the token sees the project, with
// the ids that are known, and after that again not the object. A token without a role, another
// project of the name and another rack show none of the objects either.
func (c *Client) Gone(ctx context.Context, again func() error) error {
	if _, err := c.LookAtWorld(ctx); err != nil {
		return err
	}
	err := again()
	switch {
	case csierr.IsNotFound(err):
		return nil
	case err == nil:
		return csierr.New(csierr.OperationPending, "the rack did not find an object, and then did; "+
			"repeat the call")
	}
	return err
}

// DiskGone is Gone for a disk.
func (c *Client) DiskGone(ctx context.Context, id oxide.NameOrId) error {
	return c.Gone(ctx, func() error {
		_, err := c.Disk(ctx, id)
		return err
	})
}

// SnapshotGone is Gone for a snapshot.
func (c *Client) SnapshotGone(ctx context.Context, id oxide.NameOrId) error {
	return c.Gone(ctx, func() error {
		_, err := c.Snapshot(ctx, id)
		return err
	})
}
