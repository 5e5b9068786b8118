package simulatortest_test

import (
	"errors"
	"net/http"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simulatortest"
)

func TestResetRemovesFaultsAndDisksAndRestoresSwitches(t *testing.T) {
	rack := simulatortest.Start(t, func(c *simulator.Config) {
		c.Disks = []simulator.DiskSpec{{Name: "seeded", SizeBytes: 1 << 30, Instance: "b"}}
	})
	create := func() error {
		_, err := rack.DiskCreate(t.Context(), oxide.DiskCreateParams{
			Project: oxide.NameOrId(rack.Project), Body: &oxide.DiskCreate{Name: "made", Size: 1 << 30,
				DiskBackend: oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{
					DiskSource: oxide.DiskSource{Value: &oxide.DiskSourceBlank{BlockSize: 4096}}}}}})
		return err
	}
	fired := rack.Fault(adminapi.Fault{Operation: "disk_create", Phase: adminapi.Instead, Times: 1,
		Response: &adminapi.Response{Status: 503, ErrorCode: "ServiceNotAvailable", Message: "busy"}})
	var refused *oxide.HTTPError
	if err := create(); !errors.As(err, &refused) ||
		refused.HTTPResponse.StatusCode != http.StatusServiceUnavailable || fired() != 1 {
		t.Errorf("the fault made %v, and fired %d times", err, fired())
	}
	if err := errors.Join(create(), rack.Admin.Switch(t.Context(),
		map[string]any{"disk_limit": 1})); err != nil {
		t.Fatal(err)
	}
	rack.Fault(adminapi.Fault{Operation: "disk_create", Hang: adminapi.Duration(1 << 40)})
	for _, reset := range []func() error{
		func() error { rack.Reset(); return nil },
		func() error { return rack.Admin.Reset(t.Context()) },
	} {
		err := reset()
		state, unread := rack.Admin.State(t.Context())
		if err := errors.Join(err, unread); err != nil || len(state.Disks) != 1 ||
			state.Disks[0].Name != "seeded" ||
			state.Disks[0].State.Instance != rack.Server.Instances()[1].ID {
			t.Errorf("after a reset there are the disks %+v (%v)", state.Disks, err)
		}
		switches, err := rack.Admin.Switches(t.Context())
		if log := rack.Server.Requests(); err != nil || switches.DiskLimit != 12 || len(log) > 0 {
			t.Errorf("a reset leaves the switches %+v (%v) and the log %v", switches, err, log)
		}
		if err := create(); err != nil {
			t.Error(err)
		}
	}
}
