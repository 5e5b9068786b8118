package simulator

import (
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

func (r *rackServer) change(verb, instance string) (*oxide.Instance, error) {
	ctx, name := r.t.Context(), oxide.NameOrId(instance)
	switch verb {
	case "start":
		return r.InstanceStart(ctx,
			oxide.InstanceStartParams{Instance: name, Project: "default"})
	case "stop":
		return r.InstanceStop(ctx,
			oxide.InstanceStopParams{Instance: name, Project: "default"})
	}
	return r.InstanceReboot(ctx,
		oxide.InstanceRebootParams{Instance: name, Project: "default"})
}

func (r *rackServer) instanceBody(name string) *oxide.InstanceCreate {
	return &oxide.InstanceCreate{Name: oxide.Name(name), Hostname: oxide.Hostname(name), Ncpus: 2,
		Memory: 4 << 30}
}

func (r *rackServer) doCreate(body *oxide.InstanceCreate) (*oxide.Instance, error) {
	return r.InstanceCreate(r.t.Context(),
		oxide.InstanceCreateParams{Project: "default", Body: body})
}

func createdDisk(name string) oxide.InstanceDiskAttachment {
	return oxide.InstanceDiskAttachment{Value: &oxide.InstanceDiskAttachmentCreate{
		Name: oxide.Name(name), Size: 1 << 30,
		DiskBackend: oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{
			DiskSource: oxide.DiskSource{Value: &oxide.DiskSourceBlank{BlockSize: 512}}}}}}
}

func TestTwoInstancesShareNoInterface(t *testing.T) {
	r := serveRack(t, engine.Config{})
	seen := map[string]bool{}
	for _, instance := range []string{"a", "b"} {
		for _, nic := range must[[]oxide.InstanceNetworkInterface](t)(
			r.InstanceNetworkInterfaceListAllPages(t.Context(), oxide.InstanceNetworkInterfaceListParams{
				Instance: oxide.NameOrId(instance), Project: "default"})) {
			seen[nic.Id], seen[string(nic.Mac)] = true, true
		}
	}
	if len(seen) != 4 {
		t.Errorf("the IDs and addresses are %v, want two of each", seen)
	}
}

func TestInstancesHaveTheSameIDsInEveryDirectory(t *testing.T) {
	given := "6A3E1F3A-0000-4000-8000-000000000001"
	c := engine.Config{Instances: []engine.InstanceSpec{{Name: "x"}, {Name: "y", ID: given}}}
	first := serveRack(t, c)
	second := serveRack(t, engine.Config{Instances: c.Instances})
	for _, name := range []string{"x", "y"} {
		if a, b := first.instance(name).Id, second.instance(name).Id; a != b {
			t.Errorf("%s is %s and %s", name, a, b)
		}
	}
	simtest.NoError(t, first.Close())
	again := serveRack(t, engine.Config{Dir: first.dir, Instances: []engine.InstanceSpec{{Name: "y"}}})
	if got := again.Server.Instances()[0].ID; got != "6a3e1f3a-0000-4000-8000-000000000001" {
		t.Errorf("got %s, want the one that was given", got)
	}
}
