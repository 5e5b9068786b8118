package audit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
)

// Run compares what the driver made on the rack for a cluster with the wanted volumes and
// snapshots, and writes a report to out. It deletes orphans only if the options ask for it, and
// logs each deletion at once. It reports whether orphans or missing volumes are left.
//
// The order makes it safe: the rack is listed before and after the wanted volumes are read, so an
// orphan existed before that list was made and still exists after it. A list that cannot be read
// completely is an error, never a shorter list.
func Run(ctx context.Context, client *rack.Client, clusterID string, o Options, out,
	log io.Writer) (found bool, err error) {
	a := &audit{
		options: o,
		rack:    &ownedRack{client, clusterID},
		source:  o.wantedSource(),
		log:     log,
	}
	if err := a.compare(ctx); err != nil {
		return false, plainError(err)
	}
	if o.Delete {
		err = plainError(a.deleteOrphans(ctx))
	}
	// Report what was done even if the rest failed.
	return a.report.found(), errors.Join(err, a.report.write(o.JSON, out, log))
}

// plainError removes the gRPC status from an error's text.
func plainError(err error) error {
	if s, ok := status.FromError(err); ok && err != nil {
		return errors.New(s.Message())
	}
	return err
}

// audit is one run.
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

// compare lists the rack and the wanted volumes, fills the report, and saves the orphans for the
// next audit.
func (a *audit) compare(ctx context.Context) error {
	world, err := a.rack.World(ctx)
	if err != nil {
		return err
	}
	earlier, err := readState(a.options.StateFile, a.rack.ClusterID, world.Project)
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
		Cluster: a.rack.ClusterID, Project: world.Project, ListedAt: a.wanted.listedAt.UTC(),
		Owned: len(now.owned), Wanted: len(a.wanted.Handles),
		Orphans: []*orphan{}, Missing: []missingObject{}, Static: []staticObject{},
	}
	if err := a.findMissing(ctx, now); err != nil {
		return err
	}
	a.trust = a.wanted.trust(now, a.options.AssumeNone)
	orphans, tooYoung := orphansOf(before, now, &a.wanted, a.options.MinAge)
	a.report.TooYoung = tooYoung
	a.state = earlier.next(orphans, a.wanted.readAt, a.trust)
	for _, o := range orphans {
		a.report.Orphans = append(a.report.Orphans, &orphan{object: o})
	}
	return a.state.write(a.options.StateFile)
}

// findMissing finds wanted objects that are not in the inventory: they are missing or static.
func (a *audit) findMissing(ctx context.Context, now inventory) error {
	for _, h := range a.wanted.Handles {
		if _, own := now.owned[h.ID]; own && h.mayBe(now.owned[h.ID].Kind) {
			continue
		}
		other, err := a.rack.find(ctx, h, now)
		switch {
		case err != nil:
			return err
		case other == nil:
			a.report.Missing = append(a.report.Missing, missingObject{h.Kind, h.ID, h.By})
		case other.Foreign != "":
			a.report.Static = append(a.report.Static, staticObject{object: *other, WantedBy: h.By})
		}
	}
	return nil
}

// deleteOrphans deletes the orphans without a skip reason, and stops at the first failure.
func (a *audit) deleteOrphans(ctx context.Context) error {
	for _, o := range a.deletable() {
		if err := a.reread(ctx); err != nil {
			return err
		}
		if a.wanted.wants(o.object) {
			o.SkipReason = "it is wanted now"
			continue
		}
		skipped, err := a.rack.deleteOrphan(ctx, o.object)
		if err != nil {
			return err
		}
		if o.SkipReason = skipped; skipped == "" {
			o.Deleted = true
			a.report.Deleted++
			_, _ = fmt.Fprintf(a.log, "deleted the %s %s (%s)\n", o.Kind, o.ID, o.Name)
		}
		delete(a.state.Objects, o.ID)
	}
	return a.state.write(a.options.StateFile)
}

// deletable returns the orphans without a skip reason, or none if there are more than one audit may
// delete. It sets the skip reason of each of the others.
func (a *audit) deletable() []*orphan {
	policy := deletePolicy{OlderThan: a.options.OlderThan, MinInterval: a.options.MinInterval}
	var free []*orphan
	for _, o := range a.report.Orphans {
		if o.SkipReason = a.trust[o.Kind]; o.SkipReason == "" {
			o.SkipReason = policy.skipReason(o.object, a.state.Objects[o.ID].FirstSeen, a.wanted.at())
		}
		if o.SkipReason == "" {
			free = append(free, o)
		}
	}
	if len(free) <= a.options.AtMost {
		return free
	}
	for _, o := range free {
		o.SkipReason = fmt.Sprintf("%d orphans would be deleted at once, more than --at-most %d: check "+
			"that the list of volumes is complete", len(free), a.options.AtMost)
	}
	return nil
}

// maxListAge is how old the list of wanted volumes may be when an orphan is deleted.
const maxListAge = 5 * time.Second

// reread reads the wanted volumes again before a deletion, because an object may be wanted by now.
// A list that has become empty ends the audit.
func (a *audit) reread(ctx context.Context) error {
	if time.Since(a.wanted.readAt) < maxListAge {
		return nil
	}
	again, err := a.source.read(ctx)
	if err != nil {
		return err
	}
	if len(again.Handles) == 0 && len(a.wanted.Handles) > 0 {
		return fmt.Errorf("the list of volumes had %d entries and is now empty", len(a.wanted.Handles))
	}
	// An object in either list is not deleted. Ages count from the first list.
	a.wanted.merge(again)
	return nil
}
