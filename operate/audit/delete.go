package audit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
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
		case notThere: // as it should be, perhaps by an interrupted audit
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

// remove deletes an orphan on the rack. It is the only function of the package that deletes. The
// last answer before the request shows that the object is the same, this cluster's, and free.
// reason is why it was not deleted.
func (c *ownedRack) remove(ctx context.Context, named object) (reason string, err error) {
	id := oxide.NameOrId(named.ID)
	if named.Name == "deleted-"+named.ID {
		// The rack has half deleted the disk, whose state then names no instance. The rack attaches no
		// such disk, so the list of holders cannot become outdated.
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
		return "", fmt.Errorf("%w; the rack may still delete it: audit again in a minute", err)
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
