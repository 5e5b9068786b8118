package audit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/rack"

	"google.golang.org/grpc/status"
)

// Run compares what the driver made on the rack for a cluster with the volumes and snapshots that
// somebody wants, and writes a report to out. It deletes an orphan only when the options say so,
// and then logs each one at once. It reports whether orphans or missing volumes are left.
//
// The order makes it safe. The rack is listed before and after the wanted volumes are read, so an
// orphan existed before the list could have left it out, and still exists after. A list that cannot
// be read whole is an error, never a shorter list.
func Run(ctx context.Context, client *rack.Client, clusterID string, o Options, out,
	log io.Writer) (found bool, err error) {
	a := &audit{
		options: o,
		rack:    &ownedRack{client, clusterID},
		source:  o.wantedSource(),
		log:     log,
	}
	if err := a.look(ctx); err != nil {
		return false, forPeople(err)
	}
	if o.Delete {
		err = forPeople(a.deleteOrphans(ctx))
	}
	// Report what was done even if the rest failed.
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
	rack    *ownedRack
	source  wantedSource
	log     io.Writer

	wanted wanted
	trust  trust
	state  state
	report report
}

// look finds what there is to find, and keeps it for the next audit.
func (a *audit) look(ctx context.Context) error {
	project, err := a.rack.ReadProject(ctx)
	if err != nil {
		return rack.ProjectError(ctx, err)
	}
	earlier, err := readState(a.options.StateFile, a.rack.ClusterID, project.Id)
	if err != nil {
		return fmt.Errorf("--state-file: %w", err)
	}
	before, err := a.rack.list(ctx)
	if err != nil {
		return err
	}
	if a.wanted, err = a.source.read(ctx); err != nil {
		return err
	}
	now, err := a.rack.list(ctx)
	if err != nil {
		return err
	}
	a.report = report{
		Cluster: a.rack.ClusterID, Project: project.Id, ListedAt: a.wanted.listedAt.UTC(),
		Owned: len(now.owned), Wanted: len(a.wanted.Handles),
		Orphans: []*orphan{}, Missing: []missingObject{}, Static: []staticObject{},
	}
	if err := a.findMissing(ctx, now); err != nil {
		return err
	}
	a.trust = a.wanted.trust(now, a.options.AssumeNone)
	orphans := orphansOf(before, now, &a.wanted)
	a.state = earlier.next(orphans, a.wanted.listedAt, a.trust)
	for _, o := range orphans {
		a.report.Orphans = append(a.report.Orphans, &orphan{object: o})
	}
	return a.state.write(a.options.StateFile)
}

// findMissing finds what is wanted and is not the driver's: missing, or static.
func (a *audit) findMissing(ctx context.Context, now inventory) error {
	for _, h := range a.wanted.Handles {
		if _, own := now.owned[h.ID]; own && h.could(now.owned[h.ID].Kind) {
			continue
		}
		other, err := a.rack.find(ctx, h, now)
		switch {
		case err != nil:
			return err
		case other == nil:
			a.report.Missing = append(a.report.Missing, missingObject{h.Kind, h.ID, h.By})
		case other.Why != "":
			a.report.Static = append(a.report.Static, staticObject{object: *other, WantedBy: h.By})
		}
	}
	return nil
}

// deleteOrphans deletes the orphans that no rule keeps, and stops at the first failure.
func (a *audit) deleteOrphans(ctx context.Context) error {
	for _, o := range a.deletable() {
		if err := a.readAgain(ctx); err != nil {
			return err
		}
		if a.wanted.wants(o.object) {
			o.SkipReason = "it is wanted by now"
			continue
		}
		kept, err := a.rack.deleteOrphan(ctx, o.object)
		if err != nil {
			return err
		}
		if o.SkipReason = kept; kept == "" {
			o.Deleted = true
			a.report.Deleted++
			_, _ = fmt.Fprintf(a.log, "deleted the %s %s (%s)\n", o.Kind, o.ID, o.Name)
		}
		delete(a.state.Objects, o.ID)
	}
	return a.state.write(a.options.StateFile)
}

// deletable are the orphans that no rule keeps, and none when they are more than may
// go at once. Each of the others gets the reason why it stays.
func (a *audit) deletable() []*orphan {
	policy := deletePolicy{OlderThan: a.options.OlderThan, MinInterval: a.options.MinInterval}
	var free []*orphan
	for _, o := range a.report.Orphans {
		if o.SkipReason = a.trust[o.Kind]; o.SkipReason == "" {
			o.SkipReason = policy.skipReason(o.object, a.state.Objects[o.ID].First, a.wanted.listedAt)
		}
		if o.SkipReason == "" {
			free = append(free, o)
		}
	}
	if len(free) <= a.options.AtMost {
		return free
	}
	for _, o := range free {
		o.SkipReason = fmt.Sprintf("%d would go at once, more than --at-most %d: look whether the list "+
			"of "+
			"volumes is whole", len(free), a.options.AtMost)
	}
	return nil
}

// maxListAge is how old the list of wanted volumes may be when an orphan is deleted.
const maxListAge = 5 * time.Second

// readAgain reads the wanted volumes again before a deletion: what was nobody's a moment ago may be
// somebody's now. A list that is not to be trusted any more ends the audit.
func (a *audit) readAgain(ctx context.Context) error {
	if time.Since(a.wanted.readAt) < maxListAge {
		return nil
	}
	again, err := a.source.read(ctx)
	if err != nil {
		return err
	}
	if len(again.Handles) == 0 && len(a.wanted.Handles) > 0 {
		return fmt.Errorf("the list of volumes had %d entries and is empty now", len(a.wanted.Handles))
	}
	// What either list names is not deleted. Ages count from the first one.
	a.wanted.also(again)
	return nil
}
