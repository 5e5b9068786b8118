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

// rack collects the objects of the rack.
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
	project, err := g.Rack.ReadProject(ctx)
	if err != nil {
		err = rack.ProjectError(ctx, err)
		r.Unseen, r.Reason = csierr.Message(err), string(csierr.From(err, csierr.RackError).Reason)
		return
	}
	r.Project = project.Id
	if g.options.Question.Kind == AskRack {
		g.rackItself(ctx)
		return
	}
	for _, c := range resolve(&g.e) {
		if c.handle != "" {
			r.Disks[c.handle] = g.disk(ctx, c.handle)
		}
	}
	// Only now is the instance known of a disk that no node has an entry for.
	for _, c := range resolve(&g.e) {
		if _, asked := r.Instances[c.instance]; asked || c.instance == "" {
			continue
		}
		r.Instances[c.instance] = g.instance(ctx, c.instance)
		r.Neighbours[c.instance] = g.neighbours(ctx, c.instance)
	}
}

func (g *gatherer) disk(ctx context.Context, handle string) Found[Disk] {
	id, ok := rack.ID(handle)
	if !ok {
		return Found[Disk]{} // the rack's ids are UUIDs
	}
	disk, err := g.Rack.Disk(ctx, id)
	if err != nil {
		return failed[Disk](err, csierr.VolumeNotFound)
	}
	found := g.diskOf(disk)
	return Found[Disk]{Object: &found}
}

// failed is the result of a look that failed, or that found nothing.
func failed[T any](err error, notFound csierr.Reason) Found[T] {
	if csierr.Has(err, notFound) {
		return Found[T]{}
	}
	return Found[T]{Unseen: csierr.Message(err)}
}

func (g *gatherer) diskOf(d *oxide.Disk) Disk {
	tag, _ := volume.ParseTag(d.Description)
	found := Disk{ID: d.Id, Name: string(d.Name), State: string(d.State.State()),
		Instance: rack.InstanceOf(d), SizeBytes: int64(d.Size), BlockBytes: int64(d.BlockSize),
		Type: string(d.DiskType), CSIName: tag.Name, Foreign: rack.ForeignDisk(d, g.ClusterID)}
	switch {
	case tag.Use != volume.UseFilesystem:
	case tag.Origin == volume.OriginBlank:
		found.FilesystemUUID = d.Id
	default:
		found.FilesystemUUID = strings.ToLower(tag.FilesystemUUID)
	}
	return found
}

func (g *gatherer) instance(ctx context.Context, id string) Found[Machine] {
	param, ok := rack.ID(id)
	if !ok {
		return Found[Machine]{}
	}
	i, err := g.Rack.Instance(ctx, param)
	if err != nil {
		return failed[Machine](err, csierr.InstanceNotFound)
	}
	return Found[Machine]{Object: &Machine{ID: i.Id, Name: string(i.Name), State: string(i.RunState)}}
}

func (g *gatherer) neighbours(ctx context.Context, instance string) Found[[]Disk] {
	param, ok := rack.ID(instance)
	if !ok {
		return Found[[]Disk]{}
	}
	all, err := g.Rack.InstanceDisks(ctx, param)
	if err != nil {
		return failed[[]Disk](err, csierr.InstanceNotFound)
	}
	found := []Disk{}
	for i := range all {
		found = append(found, g.diskOf(&all[i]))
	}
	return Found[[]Disk]{Object: &found}
}

// rackItself collects the cluster's disks and what is left of the quota.
func (g *gatherer) rackItself(ctx context.Context) {
	owned := []Disk{}
	var inside error
	err := g.Rack.EachDisk(ctx, &rack.Pager{}, func(d *oxide.Disk) (enough bool) {
		inside = rack.ValidateDisk("list disks", d)
		if tag, ok := volume.ParseTag(d.Description); ok && tag.Cluster == g.ClusterID {
			owned = append(owned, g.diskOf(d))
		}
		return inside != nil
	})
	g.e.Rack.Owned = &Found[[]Disk]{Object: &owned}
	if err = cmp.Or(inside, err); err != nil {
		g.e.Rack.Owned = &Found[[]Disk]{Unseen: csierr.Message(err)}
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
