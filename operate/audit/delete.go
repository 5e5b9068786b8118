package audit

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// maxListAge is how old the comparison may be when an orphan is deleted.
const maxListAge = rack.Look(5 * time.Second)

// deleteNamed deletes the orphans that a person has named, and stops at the first failure.
func (a *audit) deleteNamed(ctx context.Context, c *comparison) error {
	named, err := readNamed(a.options.Delete, a.report)
	if err != nil {
		return fmt.Errorf("--delete: nothing was deleted: %w", err)
	}
	for _, n := range named {
		if rack.Looking()-c.wanted.readAt > maxListAge {
			if c, err = a.compare(ctx); err != nil {
				return err
			}
		}
		if c.report.noDeletion != "" {
			return fmt.Errorf("--delete: %d of %d were deleted: %s", a.report.Deleted, len(named),
				c.report.noDeletion)
		}
		reason := c.keeps(n)
		if reason == "" {
			if reason, err = a.rack.remove(ctx, n); err != nil {
				return err
			}
		}
		switch reason {
		case "":
			for _, o := range a.report.Orphans {
				o.Deleted = o.Deleted || o.ID == n.ID
			}
			a.report.Deleted++
			_, _ = fmt.Fprintf(a.log, "deleted the %s %s (%s)\n", n.Kind, n.ID, n.Name)
		case notThere: // deleted before, perhaps by an interrupted audit
		default:
			a.report.Kept = append(a.report.Kept, finding{Kind: n.Kind, ID: n.ID, Reason: reason})
		}
	}
	return nil
}

// readNamed reads the orphans that a person has left in a report of the same cluster and project.
func readNamed(path string, now *report) ([]object, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var r struct {
		Cluster, Project string
		Orphans          []object
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, fmt.Errorf("it is not a report of audit --output json: %w", err)
	}
	switch {
	case r.Cluster != now.Cluster || r.Project != now.Project:
		return nil, fmt.Errorf("it is a report of the cluster %q in the project %q, and this audit is "+
			"of %q in %q", r.Cluster, r.Project, now.Cluster, now.Project)
	case len(r.Orphans) == 0:
		return nil, errors.New("it has no orphans: leave those in it that are to be deleted")
	}
	return r.Orphans, nil
}

// keeps returns why a named object is not deleted, or "".
func (c *comparison) keeps(named object) string {
	o, there := c.now[named.ID]
	switch {
	case !there:
		return notThere
	case !o.owned:
		return "it " + o.Foreign
	case !o.same(named):
		return changed
	}
	return c.judge(o)
}

const (
	changed  = "it is not the same any more as in the report"
	notThere = "the rack does not have it"
)

// remove deletes an orphan on the rack, or returns the reason why it does not. It is the only
// function of the package that deletes. The last answer before the request shows that the object is
// the same, this cluster's, and free.
func (c *ownedRack) remove(ctx context.Context, named object) (reason string, err error) {
	id := oxide.NameOrId(named.ID)
	if named.Name == "deleted-"+named.ID {
		// The rack has deleted the disk only in part; then its state names no instance. Nobody can
		// attach such a disk, so the list of its holders cannot become outdated.
		if holders, err := c.Holders(ctx, named.ID); err != nil || len(holders) > 0 {
			return "it is attached to the instance " + strings.Join(holders, ", "), err
		}
	}
	look := rack.Looking()
	now, err := c.read(ctx, named.Kind, id)
	switch {
	case err != nil:
		return "", err
	case now == nil:
		return notThere, nil
	case now.Foreign != "":
		return "it " + now.Foreign, nil
	case !now.same(named):
		return changed, nil
	case !now.free():
		return "it is " + strings.TrimSpace(now.State+" "+now.AttachedTo), nil
	}
	doing := "delete the " + string(named.Kind) + " " + named.ID
	open, err := c.Request(ctx, doing, look, func(ctx context.Context) error {
		if named.Kind == kindDisk {
			return c.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: id})
		}
		return c.SnapshotDelete(ctx, oxide.SnapshotDeleteParams{Snapshot: id})
	})
	switch {
	case err == nil:
		return "", nil
	case open:
		return "", fmt.Errorf("%w; the rack may still delete it: repeat the audit in a minute", err)
	case rack.NotFound(err):
		if now, err := c.read(ctx, named.Kind, id); now != nil || err != nil {
			return "the rack shows it, but does not find it for deletion", err
		}
		return notThere, nil
	case rack.Refused(err):
		return "the rack refuses: " + csierr.Message(rack.Error(ctx, "delete", err)), nil
	}
	return "", rack.Error(ctx, doing, err)
}

// Kind is the kind of an object of the rack.
type Kind string

// The kinds of objects. A handle that may name a disk or a snapshot has the kind "either".
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
	Claim      string    `json:"claim,omitempty"` // for which it was made
	SizeBytes  int64     `json:"sizeBytes"`
	Created    time.Time `json:"created,omitzero"`
	State      string    `json:"state"`
	AttachedTo string    `json:"attachedTo,omitempty"`
	// Foreign is why the object is not this cluster's, or what contradicts its ownership tag. It is
	// empty for an object of this cluster.
	Foreign string `json:"foreign,omitempty"`

	// Use is what the driver made the disk for, see volume.Tag.
	Use string `json:"-"`

	owned       bool // it has this cluster's ownership tag
	halfDeleted bool
}

// same reports whether two reads have returned the same object.
func (o object) same(as object) bool {
	return o.Kind == as.Kind && o.ID == as.ID && o.Name == as.Name && o.CSIName == as.CSIName &&
		o.SizeBytes == as.SizeBytes && o.Created.Equal(as.Created)
}

// free reports whether the object is not in use according to its state.
func (o object) free() bool {
	if o.Kind == kindDisk {
		return o.State == string(oxide.DiskStateStateDetached) || o.halfDeleted
	}
	return o.State == string(oxide.SnapshotStateReady) ||
		o.State == string(oxide.SnapshotStateFaulted)
}

// inventory contains the project's objects, by id.
type inventory map[string]object

// owns reports whether a handle names an object of this cluster.
func (s inventory) owns(h handle) bool { return s[h.ID].owned && h.mayBe(s[h.ID].Kind) }

// ownedRack is the rack's client and the cluster whose objects are owned.
type ownedRack struct {
	*rack.Client
	ClusterID string
}

// list lists all of the project's disks and snapshots, or returns an error.
func (c *ownedRack) list(ctx context.Context) (inventory, error) {
	s := inventory{}
	err := c.EachDisk(ctx, &rack.Pager{}, func(d *oxide.Disk) (enough bool, err error) {
		s[d.Id] = *c.diskObject(d)
		return false, rack.ValidateDisk("list disks", d)
	})
	if err != nil {
		return nil, err
	}
	return s, c.EachSnapshot(ctx, &rack.Pager{}, func(o *oxide.Snapshot) (enough bool, err error) {
		s[o.Id] = *c.snapshotObject(o)
		return false, rack.ValidateSnapshot("list snapshots", o)
	})
}

func (c *ownedRack) diskObject(d *oxide.Disk) *object {
	m, ok := volume.ParseTag(d.Description)
	return &object{Kind: kindDisk, ID: d.Id, Name: string(d.Name), CSIName: m.Name, Claim: m.Claim,
		SizeBytes: int64(d.Size), Created: *cmp.Or(d.TimeCreated, &time.Time{}),
		State: string(d.State.State()), AttachedTo: rack.InstanceOf(d),
		Foreign: rack.ForeignDisk(d, c.ClusterID), owned: ok && m.Cluster == c.ClusterID,
		Use: m.Use, halfDeleted: rack.HalfDeleted(d)}
}

func (c *ownedRack) snapshotObject(s *oxide.Snapshot) *object {
	m, ok := volume.ParseTag(s.Description)
	return &object{Kind: kindSnapshot, ID: s.Id, Name: string(s.Name), CSIName: m.Name,
		Claim: m.Claim, SizeBytes: int64(s.Size), Created: *cmp.Or(s.TimeCreated, &time.Time{}),
		State: string(s.State), Foreign: rack.ForeignSnapshot(s, c.ClusterID),
		owned: ok && m.Cluster == c.ClusterID}
}

// find returns the object that a handle names and this cluster does not own, or nil.
func (c *ownedRack) find(ctx context.Context, h handle, s inventory) (*object, error) {
	if o, ok := s[h.ID]; ok && h.mayBe(o.Kind) {
		return &o, nil
	}
	for _, kind := range []Kind{kindDisk, kindSnapshot} {
		if id, ok := rack.ID(h.ID); ok && h.mayBe(kind) {
			if o, err := c.read(ctx, kind, id); o != nil || err != nil {
				return o, err
			}
		}
	}
	return nil, nil
}

// read reads an object. It returns nil if the rack does not know it.
func (c *ownedRack) read(ctx context.Context, kind Kind, id oxide.NameOrId) (*object, error) {
	var disk *oxide.Disk
	var snapshot *oxide.Snapshot
	var err error
	gone := c.DiskGone
	if kind == kindDisk {
		disk, err = c.Disk(ctx, id)
	} else {
		snapshot, err = c.Snapshot(ctx, id)
		gone = c.SnapshotGone
	}
	switch {
	case csierr.IsNotFound(err):
		return nil, gone(ctx, id)
	case csierr.Has(err, csierr.OtherProject):
		return &object{Kind: kind, ID: string(id), Foreign: "is in another project"}, nil
	case err != nil:
		return nil, err
	case kind == kindDisk:
		return c.diskObject(disk), nil
	}
	return c.snapshotObject(snapshot), nil
}

// sorted returns the objects: disks first, by name and id.
func (s inventory) sorted() []object {
	return slices.SortedFunc(maps.Values(s), func(a, b object) int {
		return strings.Compare(string(a.Kind)+a.Name+a.ID, string(b.Kind)+b.Name+b.ID)
	})
}
