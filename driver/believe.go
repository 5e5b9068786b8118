package driver

import (
	"context"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// What the driver decides from has to be in an answer, and about the object that was asked for. A
// disk is looked at in believable, a snapshot in believableSnapshot.

// projectByConfig reads the driver's project.
func (c *rackClient) projectByConfig(ctx context.Context) (*oxide.Project, error) {
	project, err := c.ProjectView(ctx, oxide.ProjectViewParams{Project: c.project()})
	if err != nil {
		return nil, err
	}
	if !volume.IsID(project.Id) ||
		project.Id != strings.ToLower(c.Project) && string(project.Name) != c.Project {
		return nil, wrongAnswer("read project", "asked for the project in OXIDE_PROJECT and got "+
			"%.80q (%.80q)", project.Name, project.Id)
	}
	return project, nil
}

func believableInstance(id oxide.NameOrId, i *oxide.Instance) error {
	const doing = "read instance"
	switch {
	case i.Id != string(id):
		return wrongAnswer(doing, "asked for the instance %s and got %.80q", id, i.Id)
	case !volume.IsID(i.ProjectId):
		return wrongAnswer(doing, "the instance %s is in no project", id)
	case i.RunState == "":
		return wrongAnswer(doing, "the instance %s has no state", id)
	}
	return nil
}

func believableImage(id oxide.NameOrId, i *oxide.Image) error {
	const doing = "read image"
	switch {
	case i.Id != string(id):
		return wrongAnswer(doing, "asked for the image %s and got %.80q", id, i.Id)
	case i.Size == 0 || i.Size > 1<<62:
		return wrongAnswer(doing, "the image %s has %d bytes", id, i.Size)
	}
	return nil
}

// believableUtilization tells no capacity from none in the answer: a rack always counts CPUs, too.
func believableUtilization(u *oxide.Utilization) error {
	if u.Capacity.Cpus == nil || u.Provisioned.Cpus == nil {
		return wrongAnswer("read utilization", "it counts nothing")
	}
	return nil
}
