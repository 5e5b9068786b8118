package simulator

import (
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

func (r *rack) change(verb, instance string) (*oxide.Instance, error) {
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

func TestSituationsOfStartStopAndReboot(t *testing.T) {
	const hour = time.Hour // transitions are watched, not awaited
	for _, test := range []struct {
		verb, from, to string
		want           refused
	}{
		{"start", store.RunStopped, store.RunStarting, refused{}},
		{"start", store.RunFailed, store.RunStarting, refused{}},
		{"start", store.RunStarting, store.RunStarting, refused{}},
		{"start", store.RunRunning, store.RunRunning, refused{}},
		{"start", store.RunRebooting, store.RunRebooting, refused{}},
		{"start", store.RunStopping, "", refusedAs(409, "Conflict",
			"instance must finish stopping before it can be started")},
		{"start", store.StateCreating, "", refusedAs(409, "Conflict",
			"instance is in state creating but it must be stopped to be started")},
		{"stop", store.StateCreating, "", refusedAs(400, "InvalidRequest",
			"cannot change instance state while it is still being created")},
		{"stop", store.RunRunning, store.RunStopping, refused{}},
		{"stop", store.RunStarting, store.RunStopping, refused{}},
		{"stop", store.RunStopping, store.RunStopping, refused{}},
		{"stop", store.RunStopped, store.RunStopped, refused{}},
		{"stop", store.RunFailed, store.RunStopped, refused{}},
		{"reboot", store.RunRunning, store.RunRebooting, refused{}},
		{"reboot", store.RunStopped, "", refusedAs(400, "InvalidRequest",
			"cannot reboot an instance in state stopped with no VMM")},
		{"reboot", store.RunFailed, "", refusedAs(400, "InvalidRequest",
			"instance state cannot be changed from failed")},
	} {
		t.Run(test.verb+" of "+test.from, func(t *testing.T) {
			r := newRack(t, engine.Config{InstanceDelay: hour})
			r.forceRun("a", test.from)
			i, err := r.change(test.verb, "a")
			test.want.check(t, err)
			if err == nil && string(i.RunState) != test.to {
				t.Errorf("got %s, want %s", i.RunState, test.to)
			}
		})
	}
}

func TestA46AStopEndsLater(t *testing.T) {
	r := newRack(t, engine.Config{InstanceDelay: 100 * time.Millisecond})
	i := must[*oxide.Instance](t)(r.change("stop", "a"))
	if i.RunState != "stopping" {
		t.Errorf("got %s", i.RunState)
	}
	r.awaitState("a", "stopped")
	i = must[*oxide.Instance](t)(r.change("start", "a"))
	if i.RunState != "starting" {
		t.Errorf("got %s", i.RunState)
	}
	r.awaitState("a", "running")
	must[*oxide.Instance](t)(r.change("reboot", "a"))
	r.awaitState("a", "running")
}

func TestA48DeletingAnInstanceDetachesItsDisks(t *testing.T) {
	r := newRack(t, engine.Config{})
	r.disk("d")
	must[*oxide.Disk](t)(r.doAttach("a", "d"))
	remove := func() error {
		return r.InstanceDelete(t.Context(),
			oxide.InstanceDeleteParams{Instance: "a", Project: "default"})
	}
	refusedAs(400, "InvalidRequest",
		"cannot delete instance: instance is running or has not yet fully stopped").check(t, remove())
	r.doStop("a")
	if err := remove(); err != nil {
		t.Fatal(err)
	}
	gone("instance", "a").check(t, remove())
	if got := r.state("d"); got != "detached" {
		t.Errorf("got %q", got)
	}
}

func (r *rack) instanceBody(name string) *oxide.InstanceCreate {
	return &oxide.InstanceCreate{Name: oxide.Name(name), Hostname: oxide.Hostname(name), Ncpus: 2,
		Memory: 4 << 30}
}

func (r *rack) doCreate(body *oxide.InstanceCreate) (*oxide.Instance, error) {
	return r.InstanceCreate(r.t.Context(),
		oxide.InstanceCreateParams{Project: "default", Body: body})
}

func createdDisk(name string) oxide.InstanceDiskAttachment {
	return oxide.InstanceDiskAttachment{Value: &oxide.InstanceDiskAttachmentCreate{
		Name: oxide.Name(name), Size: 1 << 30,
		DiskBackend: oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{
			DiskSource: oxide.DiskSource{Value: &oxide.DiskSourceBlank{BlockSize: 512}}}}}}
}

func attachedDisk(name string) oxide.InstanceDiskAttachment {
	return oxide.InstanceDiskAttachment{
		Value: &oxide.InstanceDiskAttachmentAttach{Name: oxide.Name(name)}}
}

func TestA51AnInstanceIsCreatedWithItsDisks(t *testing.T) {
	r := newRack(t, engine.Config{})
	r.disk("data")
	body := r.instanceBody("new")
	boot := createdDisk("boot")
	body.BootDisk = boot
	body.Disks = []oxide.InstanceDiskAttachment{attachedDisk("data"), createdDisk("more")}
	i := must[*oxide.Instance](t)(r.doCreate(body))
	if i.RunState != "starting" || i.Hostname != "new" || i.Ncpus != 2 {
		t.Errorf("got %+v", i)
	}
	r.awaitState("new", "running")
	var names []string
	for _, d := range must[[]oxide.Disk](t)(r.InstanceDiskListAllPages(t.Context(),
		oxide.InstanceDiskListParams{Instance: oxide.NameOrId(i.Id)})) {
		names = append(names, string(d.Name))
		if d.Name == "boot" && d.Id != i.BootDiskId {
			t.Errorf("the boot disk is %s, want %s", i.BootDiskId, d.Id)
		}
	}
	if want := []string{"boot", "data", "more"}; !slices.Equal(names, want) {
		t.Errorf("got disks %v, want %v", names, want)
	}
	_, err := r.doDetach("new", "boot")
	refusedAs(409, "Conflict", "boot disk cannot be detached").check(t, err)
	_, err = r.doCreate(body)
	refusedAs(400, "ObjectAlreadyExists", `already exists: instance "new"`).check(t, err)
}

func TestA51AnInstanceThatCannotBeCreatedLeavesNothing(t *testing.T) {
	r := newRack(t, engine.Config{QuotaBytes: 3 << 30})
	r.disk("data")
	full := r.disk("elsewhere")
	must[*oxide.Disk](t)(r.doAttach("b", "elsewhere"))
	body := r.instanceBody("new")
	body.Disks = []oxide.InstanceDiskAttachment{createdDisk("made"), attachedDisk("data"),
		attachedDisk("elsewhere")}
	_, err := r.doCreate(body)
	refusedAs(400, "InvalidRequest",
		`cannot attach disk "elsewhere": disk is attached to another instance`).check(t, err)
	if r.exists("made") || r.state("data") != "detached" || full.Id == "" {
		t.Error("something is left")
	}
	_, err = r.InstanceView(t.Context(),
		oxide.InstanceViewParams{Instance: "new", Project: "default"})
	gone("instance", "new").check(t, err)
	r.disk("fits") // the quota is free again
}

func TestA58AnInstanceThatCannotBeStartedIsCreatedAndStaysStopped(t *testing.T) {
	r := newRack(t, engine.Config{})
	lost := r.disk("lost")
	r.disk("data")
	simtest.NoError(t, os.Remove(r.rack.Plane().DiskPath(lost.Id)))
	body := r.instanceBody("new")
	body.Disks = []oxide.InstanceDiskAttachment{attachedDisk("data"), attachedDisk("lost")}
	i := must[*oxide.Instance](t)(r.doCreate(body))
	if i.RunState != "stopped" || r.instance("new").RunState != "stopped" {
		t.Errorf("the answer says %s, the record %s", i.RunState, r.instance("new").RunState)
	}
	if got := r.ownDevices(); len(got) != 0 {
		t.Errorf("it has the devices %v", got)
	}
}

func TestA49UpdatesOfAnInstance(t *testing.T) {
	r := newRack(t, engine.Config{})
	d := r.disk("boot")
	update := func(instance string, change func(*oxide.InstanceUpdate)) (*oxide.Instance, error) {
		i := r.instance(instance)
		body := &oxide.InstanceUpdate{Ncpus: i.Ncpus, Memory: i.Memory}
		if i.BootDiskId != "" {
			body.BootDisk = oxide.NewPointer(oxide.NameOrId(i.BootDiskId))
		}
		body.EnableJumboFrames = oxide.NewPointer(false)
		change(body)
		return r.InstanceUpdate(t.Context(), oxide.InstanceUpdateParams{
			Instance: oxide.NameOrId(instance), Project: "default", Body: body})
	}
	setBoot := func(u *oxide.InstanceUpdate) { u.BootDisk = oxide.NewPointer(oxide.NameOrId("boot")) }
	_, err := update("idle", setBoot)
	refusedAs(409, "Conflict", "boot disk must be attached").check(t, err)
	must[*oxide.Disk](t)(r.doAttach("idle", "boot"))
	i := must[*oxide.Instance](t)(update("idle", setBoot))
	if i.BootDiskId != d.Id {
		t.Errorf("boot disk %q, want %q", i.BootDiskId, d.Id)
	}
	_, err = r.doDetach("idle", "boot")
	refusedAs(409, "Conflict", "boot disk cannot be detached").check(t, err)
	i = must[*oxide.Instance](t)(update("idle", func(u *oxide.InstanceUpdate) {
		u.BootDisk, u.Ncpus, u.Memory = nil, 8, 16<<30
		u.AutoRestartPolicy = oxide.NewPointer(oxide.InstanceAutoRestartPolicy("never"))
	}))
	if i.BootDiskId != "" || i.Ncpus != 8 || i.Memory != 16<<30 || *i.AutoRestartEnabled {
		t.Errorf("got %+v", i)
	}
	must[*oxide.Disk](t)(r.doDetach("idle", "boot"))

	must[*oxide.Disk](t)(r.doAttach("a", "boot"))
	_, err = update("a", setBoot)
	refusedAs(409, "Conflict", "instance must be stopped to set boot disk").check(t, err)
	_, err = update("a", func(u *oxide.InstanceUpdate) { u.Ncpus = 8 })
	refusedAs(409, "Conflict", "instance must be stopped to change CPU or memory").check(t, err)
	must[*oxide.Instance](t)(update("a", func(*oxide.InstanceUpdate) {}))
	if i := r.instance("idle"); !i.TimeModified.Equal(*i.TimeCreated) {
		t.Errorf("the updates made it modified at %s, want %s", i.TimeModified, i.TimeCreated)
	}
	_, err = update("idle", func(u *oxide.InstanceUpdate) {
		u.EnableJumboFrames = oxide.NewPointer(true)
	})
	refusedAs(400, "InvalidRequest", "enable_jumbo_frames may only be set to true when the "+
		"fleet-wide jumbo-frames opt-in is enabled by a fleet administrator").check(t, err)
}

// The lists that Oxide's own clients read of every instance.
func TestNeighboursReadPaths(t *testing.T) {
	r := newRack(t, engine.Config{})
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

func TestInstancesKeepTheirIDsOverDirectories(t *testing.T) {
	given := "6A3E1F3A-0000-4000-8000-000000000001"
	c := engine.Config{Instances: []engine.InstanceSpec{{Name: "x"}, {Name: "y", ID: given}}}
	first := newRack(t, c)
	second := newRack(t, engine.Config{Instances: c.Instances})
	for _, name := range []string{"x", "y"} {
		if a, b := first.instance(name).Id, second.instance(name).Id; a != b {
			t.Errorf("%s is %s and %s", name, a, b)
		}
	}
	if got := first.instance("y").Id; got != "6a3e1f3a-0000-4000-8000-000000000001" {
		t.Errorf("got %s, want the one that was given", got)
	}
}
