package simulator

import (
	"os"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

// TestA68DeletedObjectsAreFreedLater has what the rule A68 cannot see: the files, and each of what
// ends the delay.
func TestA68DeletedObjectsAreFreedLater(t *testing.T) {
	later := func(r *rackServer) *rackServer {
		simtest.NoError(t, r.RunDeferred(t.Context()))
		return r
	}
	for name, test := range map[string]struct {
		config           engine.Config
		meanwhile, files int
		free             func(*rackServer) *rackServer
	}{
		"on demand":       {engine.Config{FreeDelay: time.Hour}, 2, 2, later},
		"by a restart":    {engine.Config{FreeDelay: time.Hour}, 2, 2, (*rackServer).again},
		"by itself":       {engine.Config{FreeDelay: time.Millisecond}, -1, -1, nil},
		"the quota first": {engine.Config{FreeDelay: time.Hour, QuotaFirst: true}, 0, 2, later},
	} {
		t.Run(name, func(t *testing.T) {
			test.config.QuotaBytes = 2 << 30
			r := serveRack(t, test.config)
			disk := r.rack.Plane().DiskPath(r.disk("d").Id)
			sn := must[*oxide.Snapshot](t)(r.doSnapshot("s", "d"))
			simtest.NoError(t, r.doDelete("d"))
			simtest.NoError(t, r.SnapshotDelete(t.Context(), oxide.SnapshotDeleteParams{
				Snapshot: oxide.NameOrId(sn.Id)}))
			left := func() (gib, files int) {
				for _, path := range []string{disk, r.rack.Plane().SnapshotPath(sn.Id)} {
					if _, err := os.Stat(path); err == nil {
						files++
					}
				}
				u := must[*oxide.Utilization](t)(r.UtilizationView(t.Context()))
				return int(u.Provisioned.Storage >> 30), files
			}
			if test.free != nil {
				if gib, files := left(); gib != test.meanwhile || files != test.files {
					t.Errorf("%d GiB and %d files are left at first", gib, files)
				}
				if _, err := r.DiskCreate(t.Context(), r.blank("d", 1)); err == nil {
					t.Error("a disk finds room meanwhile")
				}
				r = test.free(r)
			}
			simtest.Eventually(t, "everything to be freed", func() bool {
				gib, files := left()
				return gib+files == 0
			})
			r.disk("d")
		})
	}
}
