//go:build linux

package data_test

import (
	"slices"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/data"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

func TestARackInOrderPassesEveryCheck(t *testing.T) { // D-12
	t.Parallel()
	b := benchOf(t, harness.RunFor(t), harness.RackOptions{})
	b.Accesses = chosenAccesses(t, len(data.Checks()))
	for _, check := range data.Checks() {
		t.Run(check.ID+" "+check.Says, func(t *testing.T) { runHealthy(t, b, check) })
	}
}

// chosenAccesses returns the accesses with which a test runs some checks: ext4 and block in the
// short form, and otherwise nil, all of them.
func chosenAccesses(t *testing.T, checks int) []string {
	t.Helper()
	if !testing.Short() {
		return nil
	}
	short.Left(t, 2*checks)
	return []string{"ext4", "block"}
}

// runHealthy runs a check that must succeed, make the calls that it promises, and leave nothing.
func runHealthy(t *testing.T, b *bench, check data.Check) {
	if blocked := check.Blocked(b.Bench); blocked != "" {
		t.Fatal(blocked)
	}
	ctx := t.Context()
	csitest.Must(t, b.env.Rack.Admin.ClearRequests(ctx))
	start := time.Now()
	b.Log = &data.Log{}
	csitest.Must(t, check.Run(ctx, b.Bench))
	if len(b.Log.Extent()) == 0 {
		t.Error("the check does not state how far it looked")
	}
	t.Logf("%.1fs: %s", time.Since(start).Seconds(), b.Log.Extent())
	requests, err := b.env.Rack.Admin.Requests(ctx, 0)
	csitest.Must(t, err)
	var made []string
	for _, r := range requests {
		made = append(made, r.Operation)
	}
	for _, call := range check.Calls {
		// The names of the rack's operations begin with a lower-case letter, those of CSI's RPCs with a
		// capital.
		if call[0] >= 'a' && !slices.Contains(made, call) {
			t.Errorf("the check promises the call %s and did not make it", call)
		}
	}
	if err := b.env.Balance(ctx); err != nil {
		t.Error(err)
	}
}
