package conformance

import (
	"context"
	"fmt"
	"slices"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// inventory lists the objects of a project.
type inventory []item

// item is an instance, a disk, a snapshot or an image, which its kind says.
type item struct {
	kind, id           string
	name               oxide.Name
	description, state string
	size               oxide.ByteCount
	// disk is nil unless the item is a disk.
	disk *oxide.Disk
}

// inventory reads the objects of the project.
func (o *operator) inventory(ctx context.Context) (all inventory, err error) {
	// Each list of a rack that is away takes long, so the first error ends the inventory.
	list := func(kind string, read func() error) {
		if err != nil {
			return
		}
		if err = read(); err != nil {
			err = fmt.Errorf("list the project's %ss: %s", kind, rules.Brief(err))
		}
	}
	client, project := o.client, o.projectName
	list("instance", func() error {
		instances, err := client.InstanceListAllPages(ctx, oxide.InstanceListParams{Project: project})
		for _, n := range instances {
			all = append(all, item{"instance", n.Id, n.Name, n.Description, string(n.RunState), 0, nil})
		}
		return err
	})
	list("disk", func() error {
		disks, err := client.DiskListAllPages(ctx, oxide.DiskListParams{Project: project})
		for _, d := range disks {
			all = append(all, item{"disk", d.Id, d.Name, d.Description, string(d.State.State()), d.Size, &d})
		}
		return err
	})
	list("snapshot", func() error {
		snapshots, err := client.SnapshotListAllPages(ctx, oxide.SnapshotListParams{Project: project})
		for _, s := range snapshots {
			all = append(all, item{"snapshot", s.Id, s.Name, s.Description, string(s.State), s.Size, nil})
		}
		return err
	})
	list("image", func() error {
		images, err := client.ImageListAllPages(ctx, oxide.ImageListParams{Project: project})
		for _, m := range images {
			all = append(all, item{"image", m.Id, m.Name, m.Description, "", m.Size, nil})
		}
		return err
	})
	return all, err
}

// count returns the numbers of the objects for the report's ledger.
func (i inventory) count() map[string]int {
	count := map[string]int{"disks": 0, "snapshots": 0, "instances": 0, "attachments": 0}
	for _, one := range i {
		if one.kind != "image" {
			count[one.kind+"s"]++
		}
		if one.attachedTo() != "" {
			count["attachments"]++
		}
	}
	return count
}

// attachedTo returns the ID of the instance to which a disk is attached, or "".
func (i item) attachedTo() string {
	if i.disk != nil {
		if attached, is := i.disk.State.AsAttached(); is {
			return attached.Instance
		}
	}
	return ""
}

// run returns the run that created an object. Only a run itself creates an instance, never its
// driver.
func (i item) run() (run string, ok bool) {
	if i.kind == "instance" && !isMark(i.description) {
		return "", false
	}
	return runOf(i.description)
}

// of returns the objects of the runs that is accepts.
func (i inventory) of(is func(run string) bool) inventory {
	return slices.DeleteFunc(slices.Clone(i), func(one item) bool {
		run, ok := one.run()
		return !ok || !is(run)
	})
}

// ofDriver returns the objects that a run's driver created, without those of the run itself.
func (i inventory) ofDriver() inventory {
	return slices.DeleteFunc(slices.Clone(i), func(one item) bool { return isMark(one.description) })
}

// names returns the names of the objects, for people.
func (i inventory) names() (names []string) {
	for _, one := range i {
		about := fmt.Sprintf("%d GiB", int64(one.size)/harness.GiB)
		switch one.kind {
		case "instance":
			about = one.state
		case "disk":
			about += ", " + one.state
		}
		names = append(names, fmt.Sprintf("%s %s (%s)", one.kind, one.name, about))
	}
	return names
}

func isUUID(s string) bool {
	_, err := uuid.Parse(s)
	return err == nil && len(s) == 36
}
