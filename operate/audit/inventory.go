package audit

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// Kind is the kind of an object of the rack.
type Kind string

// The kinds of objects; either is for a handle of unknown kind.
const (
	kindDisk     Kind = "disk"
	kindSnapshot Kind = "snapshot"
	either       Kind = "disk or snapshot"
)

// object is a disk or a snapshot of the inventory.
type object struct {
	Kind       Kind      `json:"kind"`
	ID         string    `json:"id"`
	Name       string    `json:"name"`
	CSIName    string    `json:"csiName,omitempty"`
	Claim      string    `json:"claim,omitempty"` // when it was made
	SizeBytes  int64     `json:"sizeBytes"`
	Created    time.Time `json:"created,omitzero"`
	State      string    `json:"state"`
	AttachedTo string    `json:"attachedTo,omitempty"`
	// Foreign is why the object is not this cluster's, or what contradicts its ownership tag.
	Foreign string `json:"foreign,omitempty"`

	description string
	halfDeleted bool
}

// free reports whether the object is not in use, as far as the rack shows.
func (o object) free() bool {
	if o.Kind == kindDisk {
		return o.State == string(oxide.DiskStateStateDetached) || o.halfDeleted
	}
	return o.State == string(oxide.SnapshotStateReady) ||
		o.State == string(oxide.SnapshotStateFaulted)
}

// taggedFor reports whether the object has the ownership tag of a cluster.
func (o object) taggedFor(cluster string) bool {
	m, ok := volume.ParseTag(o.description)
	return ok && m.Cluster == cluster
}

// inventory has the project's objects, by id.
type inventory struct {
	owned  map[string]object // with this cluster's ownership tag
	others map[string]object
}

// ownedRack is the rack's client and the cluster whose objects are owned.
type ownedRack struct {
	*rack.Client
	ClusterID string
}

// list lists all of the project's disks and snapshots, or returns an error.
func (c *ownedRack) list(ctx context.Context) (inventory, error) {
	s := inventory{owned: map[string]object{}, others: map[string]object{}}
	var inside error
	add := func(o object, err error) (enough bool) {
		switch {
		case err != nil:
			inside = err
		case o.taggedFor(c.ClusterID):
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
		Kind: kindDisk, ID: d.Id, Name: string(d.Name), CSIName: m.Name, Claim: m.Claim,
		SizeBytes: int64(d.Size), Created: createdAt(d.TimeCreated),
		State: string(d.State.State()), AttachedTo: rack.InstanceOf(d), Foreign: rack.ForeignDisk(d,
			c.ClusterID),
		description: d.Description, halfDeleted: rack.HalfDeleted(d),
	}
}

func (c *ownedRack) snapshotObject(s *oxide.Snapshot) object {
	m, _ := volume.ParseTag(s.Description)
	return object{
		Kind: kindSnapshot, ID: s.Id, Name: string(s.Name), CSIName: m.Name, Claim: m.Claim,
		SizeBytes: int64(s.Size), Created: createdAt(s.TimeCreated), State: string(s.State),
		Foreign: rack.ForeignSnapshot(s, c.ClusterID), description: s.Description,
	}
}

func createdAt(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return *t
}

// find returns the object that a handle names, even in another project, or nil.
func (c *ownedRack) find(ctx context.Context, h handle, s inventory) (*object, error) {
	for _, listed := range []map[string]object{s.owned, s.others} {
		if o, ok := listed[h.ID]; ok && h.mayBe(o.Kind) {
			return &o, nil
		}
	}
	id, ok := rack.ID(h.ID)
	if !ok {
		return nil, nil
	}
	for _, kind := range []Kind{kindDisk, kindSnapshot} {
		if !h.mayBe(kind) {
			continue
		}
		o, err := c.read(ctx, kind, id)
		if o != nil || err != nil {
			return o, err
		}
	}
	return nil, nil
}

// read reads an object. It returns nil if the rack does not know it.
func (c *ownedRack) read(ctx context.Context, kind Kind, id oxide.NameOrId) (*object,
	error) {
	var o object
	if kind == kindDisk {
		disk, err := c.Disk(ctx, id)
		if csierr.IsNotFound(err) {
			return nil, c.DiskGone(ctx, id)
		} else if err != nil {
			return nil, err
		}
		o = c.diskObject(disk)
		return &o, nil
	}
	snapshot, err := c.Snapshot(ctx, id)
	if csierr.IsNotFound(err) {
		return nil, c.SnapshotGone(ctx, id)
	} else if err != nil {
		return nil, err
	}
	o = c.snapshotObject(snapshot)
	return &o, nil
}

// deleteOrphan reads the object once more and deletes it if it is unchanged. skipReason is why it
// was not deleted, such as that it is already gone.
func (c *ownedRack) deleteOrphan(ctx context.Context, seen object) (skipReason string, err error) {
	id := oxide.NameOrId(seen.ID)
	now, err := c.read(ctx, seen.Kind, id)
	switch {
	case err != nil:
		return "", err
	case now == nil:
		return "it is already gone", nil
	case now.Foreign != "":
		return "it " + now.Foreign, nil
	case now.Name != seen.Name, now.description != seen.description,
		!now.Created.Equal(seen.Created):
		return "it has changed since it was listed", nil
	case !now.free():
		return "it is " + strings.TrimSpace(now.State+" "+now.AttachedTo), nil
	}
	if seen.Kind == kindDisk {
		err = c.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: id})
	} else {
		err = c.SnapshotDelete(ctx, oxide.SnapshotDeleteParams{Snapshot: id})
	}
	switch {
	case err == nil:
		return "", nil
	case rack.NotFound(err):
		if now, err := c.read(ctx, seen.Kind, id); now != nil || err != nil {
			return "the rack shows it, but does not find it for deletion", err
		}
		return "it is already gone", nil
	case rack.Refused(err):
		return "the rack refuses: " + csierr.Message(rack.Error(ctx, "delete", err)), nil
	}
	return "", rack.Error(ctx, "delete the "+string(seen.Kind)+" "+seen.ID, err)
}

// sorted sorts objects: disks first, by name and id.
func sorted(objects []object) []object {
	slices.SortFunc(objects, func(a, b object) int {
		return strings.Compare(string(a.Kind)+a.Name+a.ID, string(b.Kind)+b.Name+b.ID)
	})
	return objects
}
