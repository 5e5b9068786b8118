package simulator

import (
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
)

func (r *rackServer) snapshotState(name string) string {
	sn, err := r.SnapshotView(r.t.Context(),
		oxide.SnapshotViewParams{Snapshot: oxide.NameOrId(name), Project: "default"})
	if err != nil {
		return "none"
	}
	return string(sn.State)
}

func TestASnapshotThatUnwindsLeavesNothing(t *testing.T) {
	r := serveRack(t, engine.Config{QuotaBytes: 2 << 30})
	r.disk("d")
	r.fault(adminapi.Fault{Operation: "snapshot_create", Phase: adminapi.Unwind, Times: 1})
	_, err := r.doSnapshot("s", "d")
	refusedAs(500, "Internal", "Internal Server Error").check(t, err)
	if disk, sn := r.state("d"), r.snapshotState("s"); disk != "detached" || sn != "none" {
		t.Errorf("it left the disk %q and the snapshot %q", disk, sn)
	}
	must[*oxide.Snapshot](t)(r.doSnapshot("s", "d"))
}
