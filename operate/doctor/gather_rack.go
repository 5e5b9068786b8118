package doctor

import (
	"cmp"
	"context"
	"strings"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func (g *gatherer) rack(ctx context.Context) {
	r := &g.e.Rack
	r.Cluster = g.ClusterID
	r.Disks, r.Instances = map[string]Found[Disk]{}, map[string]Found[Machine]{}
	r.Neighbours = map[string]Found[[]Disk]{}
	if g.Rack == nil {
		r.Unseen = g.NoRack
		return
	}
	ctx, cancel := g.limit(ctx)
	defer cancel()
	world, err := g.Rack.World(ctx)
	if err != nil {
		r.Unseen, r.Reason = csierr.Message(err), string(csierr.From(err, csierr.RackError).Reason)
		return
	}
	r.Project = world.Project
	if g.options.Question.Kind == AskRack {
		g.rackItself(ctx)
		return
	}
	if g.options.Question.Kind == AskCluster {
		g.wholeProject(ctx)
		return
	}
	for _, c := range resolve(&g.e) {
		if c.handle != "" {
			r.Disks[c.handle] = found(c.handle, csierr.VolumeNotFound,
				func(id oxide.NameOrId) (*oxide.Disk, error) { return g.Rack.Disk(ctx, id) }, g.diskOf)
		}
	}
	// The disks show the instances of volumes whose node has no entry of the driver.
	for _, c := range resolve(&g.e) {
		if _, asked := r.Instances[c.instance]; asked || c.instance == "" {
			continue
		}
		r.Instances[c.instance] = found(c.instance, csierr.InstanceNotFound,
			func(id oxide.NameOrId) (*oxide.Instance, error) { return g.Rack.Instance(ctx, id) }, machineOf)
		r.Neighbours[c.instance] = found(c.instance, csierr.InstanceNotFound,
			func(id oxide.NameOrId) ([]oxide.Disk, error) { return g.Rack.InstanceDisks(ctx, id) },
			g.disksOf)
	}
}

// wholeProject collects the disks and instances of the cluster with two lists, however many volumes
// there are. If a list fails, nothing of its kind is seen.
func (g *gatherer) wholeProject(ctx context.Context) {
	r, listed := &g.e.Rack, map[string]Disk{}
	failed := g.eachDisk(ctx, func(d *oxide.Disk) { listed[d.Id] = g.diskOf(d) })
	nodes := map[string]bool{}
	for _, c := range resolve(&g.e) {
		nodes[c.instance] = true
		if c.handle != "" {
			r.Disks[c.handle] = Found[Disk]{Unseen: failed}
		}
	}
	neighbours := map[string][]Disk{}
	for _, id := range sortedKeys(listed) {
		d := listed[id]
		if _, asked := r.Disks[id]; asked || d.Foreign == "" {
			r.Disks[id] = Found[Disk]{Object: &d}
			nodes[d.Instance] = true
		}
		neighbours[d.Instance] = append(neighbours[d.Instance], d)
	}
	delete(nodes, "")
	machines := map[string]Machine{}
	r.Boot = map[string]bool{}
	err := g.Rack.EachInstance(ctx, func(i *oxide.Instance) {
		machines[i.Id] = machineOf(i)
		r.Boot[strings.ToLower(i.BootDiskId)] = true
	})
	for id := range nodes {
		found, beside := Found[Machine]{}, neighbours[id]
		r.Neighbours[id] = Found[[]Disk]{Object: &beside}
		if failed != "" {
			r.Neighbours[id] = Found[[]Disk]{Unseen: failed}
		}
		if machine, ok := machines[id]; ok {
			found.Object = &machine
		} else if err != nil {
			found.Unseen = csierr.Message(err)
		}
		r.Instances[id] = found
	}
}

// eachDisk visits the project's disks, and returns why they could not be seen, or "".
func (g *gatherer) eachDisk(ctx context.Context, visit func(*oxide.Disk)) (unseen string) {
	var inside error
	err := g.Rack.EachDisk(ctx, &rack.Pager{}, func(d *oxide.Disk) (enough bool) {
		if inside = rack.ValidateDisk("list disks", d); inside == nil {
			visit(d)
		}
		return inside != nil
	})
	if err = cmp.Or(inside, err); err != nil {
		return csierr.Message(err)
	}
	return ""
}

// found requests what belongs to an id from the rack, and converts the answer.
func found[O, T any](id string, notFound csierr.Reason, ask func(oxide.NameOrId) (O, error),
	convert func(O) T) Found[T] {
	param, ok := rack.ID(id)
	if !ok {
		return Found[T]{} // the rack's ids are UUIDs
	}
	answer, err := ask(param)
	switch {
	case csierr.Has(err, notFound):
		return Found[T]{}
	case err != nil:
		return Found[T]{Unseen: csierr.Message(err)}
	}
	object := convert(answer)
	return Found[T]{Object: &object}
}

func (g *gatherer) diskOf(d *oxide.Disk) Disk {
	tag, _ := volume.ParseTag(d.Description)
	disk := Disk{ID: d.Id, Name: string(d.Name), State: string(d.State.State()),
		Instance: rack.InstanceOf(d), SizeBytes: int64(d.Size), BlockBytes: int64(d.BlockSize),
		Type: string(d.DiskType), CSIName: tag.Name, Claim: tag.Claim,
		Foreign: rack.ForeignDisk(d, g.ClusterID)}
	switch {
	case tag.Use != volume.UseFilesystem:
	case tag.Origin == volume.OriginBlank:
		disk.FilesystemUUID = d.Id
	default:
		disk.FilesystemUUID = strings.ToLower(tag.FilesystemUUID)
	}
	return disk
}

func machineOf(i *oxide.Instance) Machine {
	return Machine{ID: i.Id, Name: string(i.Name), State: string(i.RunState)}
}

func (g *gatherer) disksOf(all []oxide.Disk) []Disk {
	disks := []Disk{}
	for i := range all {
		disks = append(disks, g.diskOf(&all[i]))
	}
	return disks
}

// rackItself collects the cluster's disks and what is left of the quota.
func (g *gatherer) rackItself(ctx context.Context) {
	owned := []Disk{}
	failed := g.eachDisk(ctx, func(d *oxide.Disk) {
		if tag, ok := volume.ParseTag(d.Description); ok && tag.Cluster == g.ClusterID {
			owned = append(owned, g.diskOf(d))
		}
	})
	g.e.Rack.Owned = &Found[[]Disk]{Object: &owned}
	if failed != "" {
		g.e.Rack.Owned = &Found[[]Disk]{Unseen: failed}
	}
	use, err := g.Rack.UtilizationView(ctx)
	if err != nil {
		err = rack.Error(ctx, "read utilization", err)
	} else {
		err = rack.ValidateUtilization(use)
	}
	if err != nil {
		g.e.Rack.LeftBytes = &Found[int64]{Unseen: csierr.Message(err)}
		return
	}
	left := int64(0)
	if use.Capacity.Storage > use.Provisioned.Storage {
		left = int64(use.Capacity.Storage - use.Provisioned.Storage)
	}
	g.e.Rack.LeftBytes = &Found[int64]{Object: &left}
}
