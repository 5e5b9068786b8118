package faults_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	gocmp "github.com/google/go-cmp/cmp"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

const (
	gib       = harness.GiB
	quota     = 512 * gib
	diskLimit = 5
	// otherProject is a project for which the driver is not configured.
	otherProject = "other"
	// nobody is an ID that no object has.
	nobody = "5e1a9c0e-0c53-4a1c-8f0e-7a3e8f6f0a11"
)

// environment is a rack with a driver, and with objects that exist before every cell. It runs one
// cell at a time. A method that fails ends the cell (harness.Must).
type environment struct {
	*harness.Environment
	ctx   context.Context
	proof *proof.Proof
	run   *harness.Run
	ctl   csi.ControllerClient

	// These are the IDs of a running instance, of a stopped one, and of a stopped one that has the
	// maximum number of disks.
	up, down, full string
	// boot is the boot disk of the first stopped instance.
	boot *oxide.Disk
	// source is the volume of the snapshot snap. The volume of the snapshot orphan was deleted.
	source       *csi.Volume
	snap, orphan *csi.Snapshot
	// foreign and foreignDisk are in the project "other". local is a disk of the type "local".
	foreign     *oxide.Snapshot
	foreignDisk *oxide.Disk
	local       *oxide.Disk
	image       *oxide.Image
	// others maps each kind of object to the JSON of an object that no call of a cell uses.
	others map[string]string

	// page is the path of the page about the last failed cell.
	page string

	names int
	// baseState is the state of the rack when no cell runs.
	baseState rackState
}

func newEnvironment(t *testing.T, p *proof.Proof, run *harness.Run) (env *environment, err error) {
	defer harness.Catch(&err)
	started, err := run.StartEnvironment(t.Context(), harness.RackOptions{
		Instances: []string{"up", "down", "full"}, QuotaBytes: quota, DiskLimit: diskLimit,
		Args: []string{"--project", otherProject, "--image", fmt.Sprintf("sanity/image=%d", gib),
			"--log-level=error"},
	})
	if err != nil {
		return nil, err
	}
	rack := started.Rack
	env = &environment{Environment: started, ctx: t.Context(), proof: p, run: run,
		up: rack.Instance("up").ID, down: rack.Instance("down").ID, full: rack.Instance("full").ID}
	t.Cleanup(func() { p.Error(env.shutDown()) })
	// The driver reads the IDs of its project and silo before it is ready, and so before any cell.
	env.ctl = harness.Got(env.StartPlugin(env.ctx, harness.PluginOptions{Mode: harness.ModeController,
		Env: map[string]string{"OXIDE_MAX_DISKS": strconv.Itoa(diskLimit)}})).Controller()
	env.createObjects()
	env.fetchOtherObjects()
	env.baseState = env.state()
	return env, env.TakeBaseline(env.ctx)
}

func (env *environment) createObjects() {
	env.boot = env.handmade("boot", rackProject)
	env.foreignDisk = env.handmade("foreign", otherProject)
	env.local = harness.Got(env.Rack.Client.DiskCreate(env.ctx, oxide.DiskCreateParams{
		Project: rackProject, Body: &oxide.DiskCreate{Name: "local", Description: "made by hand",
			Size: oxide.ByteCount(gib), DiskBackend: oxide.DiskBackend{Value: &oxide.DiskBackendLocal{}}}}))
	env.attach(env.handmade("by-hand", rackProject).Id, env.down)
	env.attach(env.boot.Id, env.down)
	for i := range diskLimit {
		env.attach(env.handmade(fmt.Sprintf("filler-%d", i), rackProject).Id, env.full)
	}
	harness.Must(env.Rack.StopInstance(env.ctx, env.down))
	harness.Must(env.Rack.StopInstance(env.ctx, env.full))
	env.bootFrom(oxide.NameOrId(env.down), oxide.NameOrId(env.boot.Id))
	env.source = env.volume("source")
	env.snap = env.snapshot("snap", env.source.GetVolumeId())
	passing := env.volume("passing").GetVolumeId()
	env.orphan = env.snapshot("gone", passing)
	harness.Must(env.Rack.DeleteDisk(env.ctx, passing))
	env.foreign = harness.Got(env.Rack.Client.SnapshotCreate(env.ctx, oxide.SnapshotCreateParams{
		Project: otherProject, Body: &oxide.SnapshotCreate{Name: "foreign",
			Description: "made by hand", Disk: oxide.NameOrId(env.foreignDisk.Id)}}))
	env.image = &harness.Got(env.Rack.Client.ImageList(env.ctx,
		oxide.ImageListParams{Project: rackProject})).Items[0]
}

func (env *environment) fetchOtherObjects() {
	stranger := env.volume("stranger").GetVolumeId()
	env.others = map[string]string{
		"disk":     "/v1/disks/" + stranger,
		"snapshot": "/v1/snapshots/" + env.snapshot("alien", stranger).GetSnapshotId(),
		"instance": "/v1/instances/" + env.up,
		"image":    "/v1/images/" + env.image.Id,
		"project":  "/v1/projects/" + otherProject,
	}
	for kind, path := range env.others {
		env.others[kind] = string(harness.Got(env.Rack.Get(env.ctx, path, nil)))
	}
	// The rack has only one image, one utilization and one user, so these JSON texts are invented.
	env.others["image"] = altered(env.others["image"], func(fields object) {
		fields["id"], fields["size"] = nobody, 3*gib
	})
	env.others["utilization"] = env.others["project"]
	env.others["current"] = text(map[string]string{"silo_id": nobody})
}

func (env *environment) shutDown() (err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(env.ctx), time.Minute)
	defer cancel()
	if env.Baseline != nil {
		err = env.Balance(ctx)
	}
	return errors.Join(err, env.Close())
}

// patience limits a wait that takes milliseconds on an idle machine.
const patience = 30 * time.Second

// rackProject is the project for which the driver is configured.
const rackProject = "sanity"

func (env *environment) name(prefix string) string {
	env.names++
	return fmt.Sprintf("%s-%d", prefix, env.names)
}

func (env *environment) handmade(name, project string) *oxide.Disk {
	return harness.Got(env.Rack.CreateDisk(env.ctx, project, name, gib))
}

func (env *environment) attach(disk, instance string) {
	harness.Must(env.Rack.AttachDisk(env.ctx, disk, instance))
}

func (env *environment) hotplug(mode adminapi.Hotplug) {
	harness.Must(env.Rack.Admin.Switch(env.ctx, map[string]any{"hotplug": mode}))
}

// recordWithoutDevice makes the rack record that a disk is attached to a running instance. The
// instance gets no device (docs/hot-plug.md).
func (env *environment) recordWithoutDevice(disk, instance string) {
	env.hotplug(adminapi.HotplugFull.With(adminapi.RecordFirst))
	defer env.hotplug(adminapi.HotplugFull)
	harness.Got(env.Rack.Admin.AddFault(env.ctx, adminapi.Fault{Operation: "instance_disk_attach",
		Times: 1, Device: &adminapi.DeviceFault{Fails: true}}))
	if err := env.Rack.AttachDisk(env.ctx, disk, instance); err == nil {
		fail("the rack attached the disk in spite of the fault")
	}
	state := env.state()
	for _, d := range state {
		if devices := state["device "+serial(d.Name)].Size; d.ID == disk &&
			(d.At != instance || devices > 0) {
			fail("the disk is %+v with %d devices, want a record without one", d, devices)
		}
	}
	harness.Must(env.Rack.Admin.ClearFaults(env.ctx))
}

func (env *environment) bootFrom(instance, disk oxide.NameOrId) {
	now := harness.Got(env.Rack.Client.InstanceView(env.ctx,
		oxide.InstanceViewParams{Instance: instance}))
	harness.Got(env.Rack.Client.InstanceUpdate(env.ctx, oxide.InstanceUpdateParams{
		Instance: instance,
		Body: &oxide.InstanceUpdate{BootDisk: &disk, Memory: now.Memory, Ncpus: now.Ncpus,
			EnableJumboFrames: oxide.NewPointer(false)},
	}))
}

func (env *environment) volume(name string) *csi.Volume {
	return env.made(harness.CreateRequest(name))
}

func (env *environment) attached(instance string) *csi.Volume {
	volume := env.volume(env.name("attached"))
	env.attach(volume.GetVolumeId(), instance)
	return volume
}

func (env *environment) made(req *csi.CreateVolumeRequest) *csi.Volume {
	return harness.Got(env.ctl.CreateVolume(env.ctx, req)).GetVolume()
}

func (env *environment) snapshot(name, volume string) *csi.Snapshot {
	return harness.Got(env.ctl.CreateSnapshot(env.ctx, harness.SnapshotRequest(name,
		volume))).GetSnapshot()
}

func (env *environment) cleanUp() (err error) {
	defer harness.Catch(&err)
	now := env.state()
	known := now.since(env.baseState)
	for name, object := range now {
		switch {
		case known[name].ID != fresh:
		case strings.HasPrefix(name, "snapshot "):
			env.deleteSnapshot(object.ID)
		default:
			if object.At != "" {
				harness.Must(env.Rack.DetachDisk(env.ctx, object.ID, object.At))
			}
			harness.Must(env.Rack.DeleteDisk(env.ctx, object.ID))
		}
	}
	if difference := env.state().differs(env.baseState); difference != "" {
		return errors.New("these objects were not removed:\n" + difference)
	}
	return nil
}

func static(disk *oxide.Disk) *csi.Volume { return &csi.Volume{VolumeId: disk.Id} }

func (env *environment) deleteSnapshot(id string) {
	harness.Must(env.Rack.Client.SnapshotDelete(env.ctx,
		oxide.SnapshotDeleteParams{Snapshot: oxide.NameOrId(id)}))
}

// restoreRequest returns a request to restore a snapshot. With blockSize = "" the driver chooses
// the block size.
func restoreRequest(name, snapshot, blockSize string) *csi.CreateVolumeRequest {
	req := harness.FromSnapshot(harness.CreateRequest(name), snapshot)
	if blockSize != "" {
		req.Parameters = map[string]string{"blockSize": blockSize}
	}
	return req
}

// rackState is the complete state of the rack. In the keys "disk NAME" and "snapshot NAME", NAME is
// the name that the orchestrator requested, or else the object's name on the rack. "device SERIAL"
// counts loop devices, and "storage" the bytes that the silo uses.
type rackState map[string]item

// item describes an object, or contains a number as Size. From is the ID of the object's source.
type item struct {
	ID, Name, State, At, From string
	Size                      int64
	BlockSize                 int
}

func (state rackState) add(name string, more int64) {
	state[name] = item{Size: state[name].Size + more}
}

// fresh replaces the ID of each object that did not exist when the cell began.
const fresh = "new"

func (env *environment) state() rackState {
	state := harness.Got(env.Rack.Admin.State(env.ctx))
	all := rackState{}
	all.add("storage", state.StorageBytes)
	for _, d := range state.Disks {
		disk := item{ID: d.ID, Name: d.Name, State: d.State.State, At: d.State.Instance,
			Size: d.Size, BlockSize: d.BlockSize}
		for _, source := range []*string{d.SnapshotID, d.ImageID} {
			if source != nil {
				disk.From = *source
			}
		}
		all.insert("disk "+cmp.Or(harness.NameIn(d.Description), d.Name), disk)
	}
	for _, s := range state.Snapshots {
		all.insert("snapshot "+cmp.Or(harness.NameIn(s.Description), s.Name),
			item{ID: s.ID, From: s.DiskID, State: s.State, Size: s.Size})
	}
	for _, d := range state.LoopDevices {
		all.add("device "+d.Serial, 1)
	}
	return all
}

func (state rackState) insert(name string, object item) {
	free := name
	for n := 2; state[free].ID != ""; n++ {
		free = fmt.Sprintf("%s (%d)", name, n)
	}
	state[free] = object
}

// since returns a copy in which the constant fresh replaces each ID that the earlier state lacks.
func (state rackState) since(earlier rackState) rackState {
	now, known := maps.Clone(state), map[string]bool{"": true}
	for _, object := range earlier {
		known[object.ID] = true
	}
	for name, object := range now {
		if !known[object.ID] {
			object.ID, object.Name = fresh, ""
			now[name] = object
		}
	}
	return now
}

func (state rackState) differs(from rackState) string { return gocmp.Diff(from, state) }
