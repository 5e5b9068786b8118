package audit

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/rack"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// Kind is what an object of the rack is.
type Kind string

// The kinds of objects; either is for a handle of which nobody said what it is.
const (
	Disk     Kind = "disk"
	Snapshot Kind = "snapshot"
	either   Kind = "disk or snapshot"
)

// object is a disk or a snapshot as an audit sees it.
type object struct {
	Kind       Kind      `json:"kind"`
	ID         string    `json:"id"`
	Name       string    `json:"name"`
	CSIName    string    `json:"csiName,omitempty"`
	SizeBytes  int64     `json:"sizeBytes"`
	Created    time.Time `json:"created,omitzero"`
	State      string    `json:"state"`
	AttachedTo string    `json:"attachedTo,omitempty"`
	// Why says why it is not this cluster's; for one with this cluster's mark, what is in doubt.
	Why string `json:"why,omitempty"`

	description string
	halfDeleted bool
}

// free says whether nothing and nobody is at the object, as far as the rack says.
func (o object) free() bool {
	if o.Kind == Disk {
		return o.State == string(oxide.DiskStateStateDetached) || o.halfDeleted
	}
	return o.State == string(oxide.SnapshotStateReady) ||
		o.State == string(oxide.SnapshotStateFaulted)
}

// markedFor says whether the object carries the mark of a cluster.
func (o object) markedFor(cluster string) bool {
	m, ok := volume.ParseTag(o.description)
	return ok && m.Cluster == cluster
}

// inventory is what the project has, by id.
type inventory struct {
	owned  map[string]object // with this cluster's mark
	others map[string]object
}

// ownedRack is the rack with the cluster whose objects are looked for.
type ownedRack struct {
	*rack.Client
	ClusterID string
}

// takeStock lists the project's disks and snapshots, all of them or none.
func (c *ownedRack) list(ctx context.Context) (inventory, error) {
	s := inventory{owned: map[string]object{}, others: map[string]object{}}
	var inside error
	add := func(o object, err error) (enough bool) {
		switch {
		case err != nil:
			inside = err
		case o.markedFor(c.ClusterID):
			s.owned[o.ID] = o
		default:
			s.others[o.ID] = o
		}
		return inside != nil
	}
	err := c.EachDisk(ctx, &rack.Pager{}, func(d *oxide.Disk) bool {
		return add(c.diskObject(d), rack.ValidateDisk("list disks", d))
	})
	if err = cmp.Or(inside, err); err != nil {
		return inventory{}, err
	}
	err = c.EachSnapshot(ctx, &rack.Pager{}, func(snapshot *oxide.Snapshot) bool {
		return add(c.snapshotObject(snapshot), rack.ValidateSnapshot("list snapshots", snapshot))
	})
	return s, cmp.Or(inside, err)
}

func (c *ownedRack) diskObject(d *oxide.Disk) object {
	m, _ := volume.ParseTag(d.Description)
	return object{
		Kind: Disk, ID: d.Id, Name: string(d.Name), CSIName: m.Name,
		SizeBytes: int64(d.Size), Created: createdAt(d.TimeCreated),
		State: string(d.State.State()), AttachedTo: rack.Holder(d), Why: rack.ForeignDisk(d, c.ClusterID),
		description: d.Description, halfDeleted: rack.HalfDeleted(d),
	}
}

func (c *ownedRack) snapshotObject(s *oxide.Snapshot) object {
	m, _ := volume.ParseTag(s.Description)
	return object{
		Kind: Snapshot, ID: s.Id, Name: string(s.Name), CSIName: m.Name,
		SizeBytes: int64(s.Size), Created: createdAt(s.TimeCreated), State: string(s.State),
		Why: rack.ForeignSnapshot(s, c.ClusterID), description: s.Description,
	}
}

func createdAt(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return *t
}

// anywhere finds what a handle names, also in another project, or nil.
func (c *ownedRack) find(ctx context.Context, h handle, s inventory) (*object, error) {
	for _, listed := range []map[string]object{s.owned, s.others} {
		if o, ok := listed[h.ID]; ok && h.could(o.Kind) {
			return &o, nil
		}
	}
	id, ok := rack.ID(h.ID)
	if !ok {
		return nil, nil
	}
	for _, kind := range []Kind{Disk, Snapshot} {
		if !h.could(kind) {
			continue
		}
		o, err := c.read(ctx, kind, id)
		if o != nil || err != nil {
			return o, err
		}
	}
	return nil, nil
}

// read reads an object, nil when the rack does not know it.
func (c *ownedRack) read(ctx context.Context, kind Kind, id oxide.NameOrId) (*object,
	error) {
	var o object
	if kind == Disk {
		disk, err := c.Disk(ctx, id)
		if csierr.IsNotFound(err) {
			return nil, c.CheckProject(ctx)
		} else if err != nil {
			return nil, err
		}
		o = c.diskObject(disk)
		return &o, nil
	}
	snapshot, err := c.Snapshot(ctx, id)
	if csierr.IsNotFound(err) {
		return nil, c.CheckProject(ctx)
	} else if err != nil {
		return nil, err
	}
	o = c.snapshotObject(snapshot)
	return &o, nil
}

// deleteOrphan reads the object once more and deletes it if it is what was seen. kept says why it
// stays; an object that is gone by itself counts as kept from deletion.
func (c *ownedRack) deleteOrphan(ctx context.Context, seen object) (kept string, err error) {
	id := oxide.NameOrId(seen.ID)
	now, err := c.read(ctx, seen.Kind, id)
	switch {
	case err != nil:
		return "", err
	case now == nil:
		return "it is gone by now", nil
	case now.Why != "":
		return "it " + now.Why, nil
	case now.Name != seen.Name, now.description != seen.description,
		!now.Created.Equal(seen.Created):
		return "it is not what was listed", nil
	case !now.free():
		return "it is " + strings.TrimSpace(now.State+" "+now.AttachedTo), nil
	}
	if seen.Kind == Disk {
		err = c.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: id})
	} else {
		err = c.SnapshotDelete(ctx, oxide.SnapshotDeleteParams{Snapshot: id})
	}
	switch {
	case err == nil:
		return "", nil
	case rack.Unknown(err):
		if now, err := c.read(ctx, seen.Kind, id); now != nil || err != nil {
			return "the rack shows it, and does not know it when it is to delete it", err
		}
		return "it is gone by now", nil
	case rack.Refused(err):
		return "the rack refuses: " + csierr.Message(rack.Error(ctx, "delete", err)), nil
	}
	return "", rack.Error(ctx, "delete the "+string(seen.Kind)+" "+seen.ID, err)
}

// sorted lists objects, disks first, by name and id.
func sorted(objects []object) []object {
	slices.SortFunc(objects, func(a, b object) int {
		return strings.Compare(string(a.Kind)+a.Name+a.ID, string(b.Kind)+b.Name+b.ID)
	})
	return objects
}
