//go:build linux

package data_test

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/data"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

func TestARackWithoutHotplugPassesTheChecksThatUseTheHelper(t *testing.T) {
	t.Parallel()
	b := newBench(t, harness.RackOptions{Hotplug: "none"})
	b.Accesses = chosenAccesses(t, 1)
	for _, check := range data.Checks() {
		blocked := check.Blocked(b.Bench)
		if check.Needs.Helper {
			t.Run(check.ID+" "+check.Says, func(t *testing.T) { runHealthy(t, b, check) })
		} else if !strings.Contains(blocked, "of stopped instances only") {
			t.Errorf("%s is blocked by %q", check.ID, blocked)
		}
	}
	noticed := map[string]noticed{
		"lost:new:0":     {"D11", "block", "which is zero"},
		"serial-missing": {"D11", "ext4", "shows 0 devices with the serial"},
		"device-never":   {"D11", "xfs", "shows 0 devices with the serial"},
		"device-smaller": {"D11", "btrfs", "expected the size of the rack's disk"},
	}
	for _, tamper := range short.Some(t, 1, slices.Sorted(maps.Keys(noticed))) {
		t.Run(tamper+" by D11", func(t *testing.T) { b.notices(t, tamper, noticed[tamper]) })
	}
}

func TestABlockedCheckNamesWhatTheBenchLacks(t *testing.T) {
	for _, check := range data.Checks() {
		blocked := check.Blocked(&data.Bench{Hotplug: true})
		if got, want := blocked == "", !check.Needs.Second && !check.Needs.Helper; got != want {
			t.Errorf("%s, which needs %+v, is blocked by %q", check.ID, check.Needs, blocked)
		}
	}
}

func TestTheTableOfDataChecksIsComplete(t *testing.T) {
	ids := map[string]bool{}
	for _, c := range data.Checks() {
		if c.ID == "" || ids[c.ID] || c.Says == "" || c.Why == "" || c.Source == "" ||
			len(c.Calls) == 0 || c.Run == nil {
			t.Errorf("%s has a field that is empty, or an ID that another one has", c.ID)
		}
		ids[c.ID] = true
	}
}

func TestAnInstanceThatSomebodyElseUsesIsNotStopped(t *testing.T) {
	t.Parallel()
	b := newBench(t, harness.RackOptions{})
	b.Accesses = []string{"block"}
	b.MayStop = func(context.Context, string) error { return errors.New("it is in use") }
	// Somebody starts the helper after the preflight.
	rack := b.env.Rack
	errStart := rack.StartInstance(t.Context(), b.Helper.InstanceID)
	began, err := rack.Admin.Requests(t.Context(), 0)
	csitest.Must(t, errors.Join(errStart, err))
	for _, check := range data.Checks() {
		if check.ID != "D03" && check.ID != "D11" {
			continue
		}
		if err := check.Run(t.Context(), b.Bench); err == nil {
			t.Errorf("%s: expected that it fails", check.ID)
		}
	}
	since, err := rack.Admin.Requests(t.Context(), began[len(began)-1].Seq)
	csitest.Must(t, err)
	for _, r := range since {
		if r.Operation == "instance_stop" {
			t.Errorf("it was stopped: %+v", r)
		}
	}
}
