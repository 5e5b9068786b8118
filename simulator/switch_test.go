package simulator

import (
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

func (r *rack) switchTo(change func(*adminapi.Switches)) {
	r.t.Helper()
	must[adminapi.Switches](r.t)(r.rack.ChangeSwitches(func(s *adminapi.Switches) error {
		change(s)
		return nil
	}))
}

func TestAHoldThatIsSwitchedOffEndsForTheRequestsThatAreOpen(t *testing.T) {
	r := newRack(t, engine.Config{CreateHold: time.Hour})
	created := make(chan error)
	go func() {
		_, err := r.DiskCreate(t.Context(), r.blank("d", 1))
		created <- err
	}()
	simtest.Eventually(t, "the disk to be there", func() bool { return r.exists("d") })
	r.switchTo(func(s *adminapi.Switches) { s.CreateHold = adminapi.Duration(2 * time.Hour) })
	if got := r.state("d"); got != "creating" {
		t.Errorf("a longer hold leaves the disk %q, want creating", got)
	}
	r.switchTo(func(s *adminapi.Switches) { s.CreateHold = 0 })
	simtest.NoError(t, <-created)
}

func TestA27ARackWithoutSpaceMakesNothing(t *testing.T) {
	r := newRack(t, engine.Config{QuotaBytes: 3 << 30})
	r.disk("d")
	sn := must[*oxide.Snapshot](t)(r.doSnapshot("s", "d"))
	r.switchTo(func(s *adminapi.Switches) { s.Full = true })
	full := refusedAs(507, "InsufficientCapacity", "Insufficient capacity: Not enough storage")
	for range 2 { // the quota is free again
		_, err := r.DiskCreate(t.Context(), r.blank("e", 1))
		full.check(t, err)
		_, err = r.doSnapshot("s2", "d")
		full.check(t, err)
	}
	if r.exists("e") || r.snapshotState("s2") != "none" || r.state("d") != "detached" {
		t.Errorf("left are disk e: %v, snapshot s2: %s; disk d is %s", r.exists("e"),
			r.snapshotState("s2"), r.state("d"))
	}
	// A read-only disk needs no space of its own.
	must[*oxide.Disk](t)(r.DiskCreate(t.Context(), r.from(snapshotSource(sn.Id, true), "ro", 1)))
}
