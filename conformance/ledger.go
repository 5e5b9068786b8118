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
type inventory struct {
	disks     []oxide.Disk
	snapshots []oxide.Snapshot
	images    []oxide.Image
	instances []oxide.Instance
}

// inventory reads the objects of the project.
func (o *operator) inventory(ctx context.Context) (inventory, error) {
	var all inventory
	client, project := o.client, o.projectName
	for _, list := range []struct {
		what string
		ask  func() error
	}{
		{"disks", func() (err error) {
			all.disks, err = client.DiskListAllPages(ctx, oxide.DiskListParams{Project: project})
			return err
		}},
		{"snapshots", func() (err error) {
			all.snapshots, err = client.SnapshotListAllPages(ctx,
				oxide.SnapshotListParams{Project: project})
			return err
		}},
		{"images", func() (err error) {
			all.images, err = client.ImageListAllPages(ctx, oxide.ImageListParams{Project: project})
			return err
		}},
		{"instances", func() (err error) {
			all.instances, err = client.InstanceListAllPages(ctx,
				oxide.InstanceListParams{Project: project})
			return err
		}},
	} {
		// Each list of a rack that is away takes long, so the first error ends the inventory.
		if err := list.ask(); err != nil {
			return all, fmt.Errorf("list the project's %s: %s", list.what, rules.Brief(err))
		}
	}
	return all, nil
}

// count returns the numbers of the objects for the report's ledger.
func (i inventory) count() map[string]int {
	attached := 0
	for _, disk := range i.disks {
		if _, is := disk.State.AsAttached(); is {
			attached++
		}
	}
	return map[string]int{"disks": len(i.disks), "snapshots": len(i.snapshots),
		"instances": len(i.instances), "attachments": attached}
}

// only returns the objects whose description is one of those.
func only[T any](all []T, description func(T) string, is func(string) bool) []T {
	return slices.DeleteFunc(slices.Clone(all), func(one T) bool { return !is(description(one)) })
}

// These return the descriptions of objects.
func ofDisk(d oxide.Disk) string         { return d.Description }
func ofSnapshot(s oxide.Snapshot) string { return s.Description }
func ofImage(m oxide.Image) string       { return m.Description }

// ofInstance returns "" unless it is a mark: only a run itself creates an instance, never its
// driver.
func ofInstance(n oxide.Instance) string {
	if _, is := parseMark(n.Description); is {
		return n.Description
	}
	return ""
}

// of returns the objects that carry the mark of one of the runs.
func (i inventory) of(is func(run string) bool) inventory {
	ours := func(description string) bool {
		run, ok := runOf(description)
		return ok && is(run)
	}
	return inventory{only(i.disks, ofDisk, ours), only(i.snapshots, ofSnapshot, ours),
		only(i.images, ofImage, ours), only(i.instances, ofInstance, ours)}
}

// ofDriver returns the objects that a run's driver created, without those of the run itself.
func (i inventory) ofDriver() inventory {
	others := func(description string) bool {
		_, is := parseMark(description)
		return !is
	}
	return inventory{disks: only(i.disks, ofDisk, others),
		snapshots: only(i.snapshots, ofSnapshot, others)}
}

func (i inventory) empty() bool {
	return len(i.disks) == 0 && len(i.snapshots) == 0 && len(i.images) == 0 && len(i.instances) == 0
}

// names returns the names of the objects, for people.
func (i inventory) names() []string {
	var names []string
	for _, n := range i.instances {
		names = append(names, fmt.Sprintf("instance %s (%s)", n.Name, n.RunState))
	}
	for _, d := range i.disks {
		names = append(names, fmt.Sprintf("disk %s (%s, %s)", d.Name, gibibytes(d.Size),
			d.State.State()))
	}
	for _, s := range i.snapshots {
		names = append(names, fmt.Sprintf("snapshot %s (%s)", s.Name, gibibytes(s.Size)))
	}
	for _, m := range i.images {
		names = append(names, fmt.Sprintf("image %s (%s)", m.Name, gibibytes(m.Size)))
	}
	return names
}

func gibibytes(size oxide.ByteCount) string {
	return fmt.Sprintf("%d GiB", int64(size)/harness.GiB)
}

func isUUID(s string) bool {
	_, err := uuid.Parse(s)
	return err == nil && len(s) == 36
}
