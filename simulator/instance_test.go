package simulator

import (
	"errors"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
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

// TestTheRackServesTheListsThatOtherClientsRead reads the lists that Oxide's own clients read for
// every instance.
func TestTheRackServesTheListsThatOtherClientsRead(t *testing.T) {
	r := serveRack(t, engine.Config{})
	ctx := t.Context()
	a := r.instance("a")
	nics := must[[]oxide.InstanceNetworkInterface](t)(r.InstanceNetworkInterfaceListAllPages(ctx,
		oxide.InstanceNetworkInterfaceListParams{Instance: oxide.NameOrId(a.Id)}))
	if len(nics) != 1 || nics[0].InstanceId != a.Id || !*nics[0].Primary {
		t.Errorf("interfaces %+v", nics)
	}
	huge := must[*oxide.InstanceNetworkInterfaceResultsPage](t)(r.InstanceNetworkInterfaceList(ctx,
		oxide.InstanceNetworkInterfaceListParams{Instance: oxide.NameOrId(a.Id),
			Limit: oxide.NewPointer(1000000000)}))
	if len(huge.Items) != 1 {
		t.Errorf("with the greatest of limits: %+v", huge)
	}
	other := must[[]oxide.InstanceNetworkInterface](t)(r.InstanceNetworkInterfaceListAllPages(ctx,
		oxide.InstanceNetworkInterfaceListParams{Instance: "b", Project: "default"}))
	if other[0].Mac == nics[0].Mac || other[0].Id == nics[0].Id {
		t.Errorf("two instances share an interface: %+v, %+v", nics[0], other[0])
	}
	keys := must[[]oxide.SshKey](t)(r.InstanceSshPublicKeyListAllPages(ctx,
		oxide.InstanceSshPublicKeyListParams{Instance: oxide.NameOrId(a.Id)}))
	groups := must[[]oxide.AntiAffinityGroup](t)(r.InstanceAntiAffinityGroupListAllPages(ctx,
		oxide.InstanceAntiAffinityGroupListParams{Instance: oxide.NameOrId(a.Id)}))
	subnets := must[*oxide.ExternalSubnetResultsPage](t)(r.InstanceExternalSubnetList(ctx,
		oxide.InstanceExternalSubnetListParams{Instance: oxide.NameOrId(a.Id)}))
	floating := must[[]oxide.FloatingIp](t)(r.FloatingIpListAllPages(ctx,
		oxide.FloatingIpListParams{Project: "default"}))
	if len(keys)+len(groups)+len(subnets.Items)+len(floating) != 0 {
		t.Errorf("there is more than nothing: %v %v %v %v", keys, groups, subnets, floating)
	}
	list := must[[]oxide.Instance](t)(r.InstanceListAllPages(ctx,
		oxide.InstanceListParams{Project: "default"}))
	if len(list) != 3 || list[0].Name != "a" {
		t.Errorf("instances %+v", list)
	}
	all := must[[]oxide.Project](t)(r.ProjectListAllPages(ctx, oxide.ProjectListParams{}))
	byID := must[*oxide.Project](t)(r.ProjectView(ctx,
		oxide.ProjectViewParams{Project: oxide.NameOrId(all[0].Id)}))
	if len(all) != 1 || byID.Name != "default" {
		t.Errorf("projects %+v", all)
	}
	_, err := r.InstanceExternalIpList(ctx,
		oxide.InstanceExternalIpListParams{Instance: "nobody", Project: "default"})
	if !errors.Is(err, oxide.ErrObjectNotFound) {
		t.Errorf("got %v", err)
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
	if got := first.instance("y").Id; got != "6a3e1f3a-0000-4000-8000-000000000001" {
		t.Errorf("got %s, want the one that was given", got)
	}
}
