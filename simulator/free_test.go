package simulator

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

func (r *rackServer) provisioned() int64 {
	r.t.Helper()
	u := must[*oxide.Utilization](r.t)(r.UtilizationView(r.t.Context()))
	return int64(u.Provisioned.Storage)
}

// kept returns the files of a disk and its snapshot that still exist.
func (r *rackServer) kept(diskID, snapshotID string) (kept []string) {
	for _, path := range []string{r.rack.Plane().DiskPath(diskID),
		r.rack.Plane().SnapshotPath(snapshotID)} {
		if _, err := os.Stat(path); err == nil {
			kept = append(kept, path)
		}
	}
	return kept
}

// deleteBoth deletes disk d and its snapshot s, and returns their IDs.
func (r *rackServer) deleteBoth() (diskID, snapshotID string) {
	r.t.Helper()
	d := r.disk("d")
	sn := must[*oxide.Snapshot](r.t)(r.doSnapshot("s", "d"))
	for _, err := range []error{
		r.doDelete("d"), r.SnapshotDelete(r.t.Context(),
			oxide.SnapshotDeleteParams{Snapshot: "s", Project: "default"}),
	} {
		simtest.NoError(r.t, err)
	}
	return d.Id, sn.Id
}

func TestA68DeletedObjectsDisappearAtOnceAndAreFreedLater(t *testing.T) {
	r := serveRack(t, engine.Config{FreeDelay: time.Hour, QuotaBytes: 2 << 30})
	diskID, snapshotID := r.deleteBoth()

	gone("disk", "d").check(t, r.doDelete("d"))
	if got := r.snapshotState("s"); got != "none" {
		t.Errorf("the snapshot is %q", got)
	}
	if got := r.disks(); len(got) != 0 {
		t.Errorf("the rack lists %v", got)
	}
	if got := r.kept(diskID, snapshotID); len(got) != 2 {
		t.Errorf("of the files there are %v, want both", got)
	}
	if got := r.provisioned(); got != 2<<30 {
		t.Errorf("storage is %d, want 2 GiB until it is freed", got)
	}
	// The rack checks the quota before the name.
	if _, err := r.DiskCreate(t.Context(), r.blank("d", 1)); !errors.Is(err, oxide.ErrHTTP507) {
		t.Errorf("got %v, want 507", err)
	}

	simtest.NoError(t, r.RunDeferred(t.Context()))
	if got := r.kept(diskID, snapshotID); len(got) != 0 {
		t.Errorf("the files %v are still there", got)
	}
	if got := r.provisioned(); got != 0 {
		t.Errorf("storage is %d, want none", got)
	}
	if again := r.disk("d"); again.Id == diskID {
		t.Error("a new disk has the ID of the one that is gone")
	}
}

func TestA68TheDelayEndsByItselfAndAtARestart(t *testing.T) {
	for _, delay := range []time.Duration{time.Millisecond, time.Hour} {
		r := serveRack(t, engine.Config{FreeDelay: delay})
		diskID, snapshotID := r.deleteBoth()
		if delay == time.Hour {
			r = r.again()
		}
		simtest.Eventually(t, "everything to be freed", func() bool {
			return r.provisioned() == 0 && len(r.kept(diskID, snapshotID)) == 0
		})
	}
}

func TestA68WithQuotaFirstTheQuotaIsFreeAtOnceAndTheSpaceLater(t *testing.T) {
	r := serveRack(t, engine.Config{FreeDelay: time.Hour, QuotaFirst: true, QuotaBytes: 2 << 30})
	diskID, snapshotID := r.deleteBoth()
	if got := r.provisioned(); got != 0 {
		t.Errorf("storage is %d, want none", got)
	}
	_, err := r.DiskCreate(t.Context(), r.blank("d", 1))
	refusedAs(507, "InsufficientCapacity", "Insufficient capacity: Not enough storage").check(t, err)
	simtest.NoError(t, r.RunDeferred(t.Context()))
	if got := r.kept(diskID, snapshotID); len(got) != 0 {
		t.Errorf("the files %v are still there", got)
	}
	r.disk("d")
	if got := r.provisioned(); got != 1<<30 {
		t.Errorf("storage is %d, want that of one disk", got)
	}
}
