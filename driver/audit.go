package driver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/rack"

	"google.golang.org/grpc/status"
)

// Run compares what the driver made on the rack for a cluster with the volumes and snapshots that it
// is told of, and writes a report to out. It deletes an orphan only when it is told to, and then
// says each on log at once. found says whether orphans or missing volumes are left.
//
// The order of things is what makes it safe. The rack is listed before and after the told are read:
// an orphan was there before anybody told of it could have been left out, and is still there after.
// A list that cannot be read whole is an error, never a shorter list.
func runAudit(ctx context.Context, client *rack.Client, clusterID string, o Options, out,
	log io.Writer) (found bool, err error) {
	a := &audit{
		options: o,
		rack:    &auditedRack{client, clusterID},
		source:  o.toldSource(),
		log:     log,
	}
	if err := a.look(ctx); err != nil {
		return false, forPeople(err)
	}
	if o.Delete {
		err = forPeople(a.deleteOrphans(ctx))
	}
	// What was done is told also when the rest failed.
	return a.report.found(), errors.Join(err, a.report.write(o.JSON, out, log))
}

// forPeople leaves away what gRPC says of an error.
func forPeople(err error) error {
	if s, ok := status.FromError(err); ok && err != nil {
		return errors.New(s.Message())
	}
	return err
}

// audit is one audit under way.
type audit struct {
	options Options
	rack    *auditedRack
	source  toldSource
	log     io.Writer

	told      told
	trust     trust
	sightings sightings
	report    report
}

// look finds what there is to find, and keeps it for the next audit.
func (a *audit) look(ctx context.Context) error {
	project, err := a.rack.ReadProject(ctx)
	if err != nil {
		return rack.ProjectError(ctx, err)
	}
	earlier, err := readSightings(a.options.Sightings, a.rack.ClusterID, project.Id)
	if err != nil {
		return fmt.Errorf("--sightings: %w", err)
	}
	before, err := a.rack.takeStock(ctx)
	if err != nil {
		return err
	}
	if a.told, err = a.source.ask(ctx); err != nil {
		return err
	}
	now, err := a.rack.takeStock(ctx)
	if err != nil {
		return err
	}
	a.report = report{
		Cluster: a.rack.ClusterID, Project: project.Id, ToldAt: a.told.At.UTC(),
		Owned: len(now.owned), Told: len(a.told.Handles),
		Orphans: []*orphan{}, Missing: []missingObject{}, Static: []staticObject{},
	}
	if err := a.lookForTold(ctx, now); err != nil {
		return err
	}
	a.trust = a.told.trust(now, a.options.NoneTold)
	orphans := orphansOf(before, now, &a.told)
	a.sightings = earlier.next(orphans, a.told.At, a.trust)
	for _, o := range orphans {
		a.report.Orphans = append(a.report.Orphans, &orphan{object: o})
	}
	return a.sightings.write(a.options.Sightings)
}

// lookForTold finds what is told of and is not the driver's: missing, or static.
func (a *audit) lookForTold(ctx context.Context, now stock) error {
	for _, h := range a.told.Handles {
		if _, own := now.owned[h.ID]; own && h.could(now.owned[h.ID].Kind) {
			continue
		}
		other, err := a.rack.anywhere(ctx, h, now)
		switch {
		case err != nil:
			return err
		case other == nil:
			a.report.Missing = append(a.report.Missing, missingObject{h.Kind, h.ID, h.By})
		case other.Why != "":
			a.report.Static = append(a.report.Static, staticObject{object: *other, ToldBy: h.By})
		}
	}
	return nil
}

// deleteOrphans deletes those to which nothing can be objected, and stops at the first failure.
func (a *audit) deleteOrphans(ctx context.Context) error {
	for _, o := range a.deletable() {
		if err := a.askAgain(ctx); err != nil {
			return err
		}
		if a.told.tells(o.object) {
			o.Kept = "it is told of by now"
			continue
		}
		kept, err := a.rack.deleteOrphan(ctx, o.object)
		if err != nil {
			return err
		}
		if o.Kept = kept; kept == "" {
			o.Deleted = true
			a.report.Deleted++
			_, _ = fmt.Fprintf(a.log, "deleted the %s %s (%s)\n", o.Kind, o.ID, o.Name)
		}
		delete(a.sightings.Objects, o.ID)
	}
	return a.sightings.write(a.options.Sightings)
}

// deletable are the orphans to which nothing can be objected, and none when they are more than may
// go at once. The others are told why they stay.
func (a *audit) deletable() []*orphan {
	policy := deletePolicy{OlderThan: a.options.OlderThan, Between: a.options.Between}
	var free []*orphan
	for _, o := range a.report.Orphans {
		if o.Kept = a.trust[o.Kind]; o.Kept == "" {
			o.Kept = policy.objection(o.object, a.sightings.Objects[o.ID].First, a.told.At)
		}
		if o.Kept == "" {
			free = append(free, o)
		}
	}
	if len(free) <= a.options.AtMost {
		return free
	}
	for _, o := range free {
		o.Kept = fmt.Sprintf("%d would go at once, more than --at-most %d: look whether the list of "+
			"volumes is whole", len(free), a.options.AtMost)
	}
	return nil
}

// freshTold is how old the told may be when an orphan is deleted.
const freshTold = 5 * time.Second

// askAgain reads the told anew right before a deletion: what was nobody's a moment ago may have
// become somebody's. A list that is not to be trusted any more ends the audit.
func (a *audit) askAgain(ctx context.Context) error {
	if time.Since(a.told.Read) < freshTold {
		return nil
	}
	again, err := a.source.ask(ctx)
	if err != nil {
		return err
	}
	if len(again.Handles) == 0 && len(a.told.Handles) > 0 {
		return fmt.Errorf("the list of volumes had %d entries and is empty now", len(a.told.Handles))
	}
	// Whatever either told of is not deleted; and the first reading is the one that ages count from.
	a.told.also(again)
	return nil
}
