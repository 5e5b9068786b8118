package simulatortest_test

import (
	"errors"
	"net/http"
	"slices"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simulatortest"
)

func create(rack *simulatortest.Rack, t *testing.T, name string) error {
	_, err := rack.DiskCreate(t.Context(), oxide.DiskCreateParams{
		Project: oxide.NameOrId(rack.Project), Body: &oxide.DiskCreate{
			Name: oxide.Name(name), Size: 1 << 30,
			DiskBackend: oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{
				DiskSource: oxide.DiskSource{Value: &oxide.DiskSourceBlank{BlockSize: 4096}}}}}})
	return err
}

// disks returns the rack's disks as NAME or, if attached, as NAME@INSTANCE.
func disks(rack *simulatortest.Rack, t *testing.T) (all []string) {
	t.Helper()
	state, err := rack.Admin.State(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]string{"": ""}
	for _, i := range state.Instances {
		names[i.ID] = "@" + i.Name
	}
	for _, d := range state.Disks {
		all = append(all, d.Name+names[d.State.Instance])
	}
	slices.Sort(all)
	return all
}

func TestResetRemovesFaultsAndDisksAndRestoresSwitches(t *testing.T) {
	rack := simulatortest.Start(t, func(c *simulator.Config) {
		c.Disks = []simulator.DiskSpec{{Name: "seeded", SizeBytes: 1 << 30, Instance: "b"}}
	})
	fired := rack.Fault(adminapi.Fault{Operation: "disk_create", Phase: adminapi.Instead, Times: 1,
		Response: &adminapi.Response{Status: 503, ErrorCode: "ServiceNotAvailable", Message: "busy"}})
	var refused *oxide.HTTPError
	if err := create(rack, t, "made"); !errors.As(err, &refused) ||
		refused.HTTPResponse.StatusCode != http.StatusServiceUnavailable || fired() != 1 {
		t.Errorf("the fault made %v, and fired %d times", err, fired())
	}
	if err := create(rack, t, "made"); err != nil {
		t.Fatal(err)
	}
	if err := rack.Admin.Switch(t.Context(), map[string]any{"disk_limit": 1}); err != nil {
		t.Fatal(err)
	}
	rack.Fault(adminapi.Fault{Operation: "disk_create", Hang: adminapi.Duration(1 << 40)})
	for _, reset := range []func(){rack.Reset, func() {
		if err := rack.Admin.Reset(t.Context()); err != nil {
			t.Error(err)
		}
	}} {
		reset()
		if got := disks(rack, t); !slices.Equal(got, []string{"seeded@b"}) {
			t.Errorf("after a reset there are the disks %v", got)
		}
		switches, err := rack.Admin.Switches(t.Context())
		if log := rack.Server.Requests(); err != nil || switches.DiskLimit != 12 || len(log) > 0 {
			t.Errorf("a reset leaves the switches %+v (%v) and the log %v", switches, err, log)
		}
		if err := create(rack, t, "made"); err != nil {
			t.Error(err)
		}
	}
}
