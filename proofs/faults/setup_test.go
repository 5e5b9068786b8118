package faults_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// rackProject is the project for which the driver is configured.
const rackProject = "sanity"

// setup prepares a cell. A step that fails ends the cell (harness.Must).
type setup struct {
	*environment
	ctx context.Context
}

func (s *setup) name(prefix string) string {
	s.names++
	return fmt.Sprintf("%s-%d", prefix, s.names)
}

func (s *setup) handmade(name, project string) *oxide.Disk {
	return harness.Got(s.Rack.CreateDisk(s.ctx, project, name, gib))
}

func (s *setup) handmadeSnapshot(name, project, disk string) *oxide.Snapshot {
	return harness.Got(s.Rack.Client.SnapshotCreate(s.ctx, oxide.SnapshotCreateParams{
		Project: oxide.NameOrId(project), Body: &oxide.SnapshotCreate{Name: oxide.Name(name),
			Description: "made by hand", Disk: oxide.NameOrId(disk)}}))
}

func (s *setup) attach(disk, instance string) {
	harness.Must(s.Rack.AttachDisk(s.ctx, disk, instance))
}

// hotplug switches what the rack does with the disks of running instances.
func (s *setup) hotplug(mode adminapi.Hotplug) {
	harness.Must(s.Rack.Admin.Switch(s.ctx, map[string]any{"hotplug": mode}))
}

// recordWithoutDevice makes the rack record the attach of a disk to a running instance, which then
// gets no device (docs/hot-plug.md).
func (s *setup) recordWithoutDevice(disk, instance string) {
	s.hotplug(adminapi.HotplugFull.With(adminapi.RecordFirst))
	defer s.hotplug(adminapi.HotplugFull)
	harness.Got(s.Rack.Admin.AddFault(s.ctx, adminapi.Fault{Operation: "instance_disk_attach",
		Times: 1, Device: &adminapi.DeviceFault{Fails: true}}))
	if err := s.Rack.AttachDisk(s.ctx, disk, instance); err == nil {
		harness.Must(errors.New("the rack attached the disk in spite of the fault"))
	}
	state := s.state()
	for _, d := range state.Disks {
		if d.ID == disk && (d.At != instance || state.Devices[serial(d.Name)] > 0) {
			harness.Must(fmt.Errorf("the disk is %+v with %d devices, want a record without one", d,
				state.Devices[serial(d.Name)]))
		}
	}
	harness.Must(s.Rack.Admin.ClearFaults(s.ctx))
}

func (s *setup) bootFrom(instance, disk string) {
	now := harness.Got(s.Rack.Client.InstanceView(s.ctx,
		oxide.InstanceViewParams{Instance: oxide.NameOrId(instance)}))
	boot := oxide.NameOrId(disk)
	harness.Got(s.Rack.Client.InstanceUpdate(s.ctx, oxide.InstanceUpdateParams{
		Instance: oxide.NameOrId(instance),
		Body: &oxide.InstanceUpdate{BootDisk: &boot, Memory: now.Memory, Ncpus: now.Ncpus,
			EnableJumboFrames: oxide.NewPointer(false)},
	}))
}

// volume makes a volume through the driver.
func (s *setup) volume(name string) *csi.Volume { return s.made(harness.CreateRequest(name)) }

func (s *setup) made(req *csi.CreateVolumeRequest) *csi.Volume {
	return harness.Got(s.ctl.CreateVolume(s.ctx, req)).GetVolume()
}

func (s *setup) snapshot(name, volume string) *csi.Snapshot {
	return harness.Got(s.ctl.CreateSnapshot(s.ctx, harness.SnapshotRequest(name,
		volume))).GetSnapshot()
}

// cleanUp removes the objects of a cell, and returns an error if the rack is then not as before it.
func (env *environment) cleanUp(ctx context.Context) (err error) {
	defer harness.Catch(&err)
	s := &setup{environment: env, ctx: ctx}
	now := s.state()
	if now.differs(env.baseState) == "" {
		return nil
	}
	known := now.since(env.baseState)
	for name, d := range now.Disks {
		if known.Disks[name].ID != fresh {
			continue
		}
		if d.At != "" {
			harness.Must(env.Rack.DetachDisk(ctx, d.ID, d.At))
		}
		harness.Must(env.Rack.DeleteDisk(ctx, d.ID))
	}
	for name, sn := range now.Snapshots {
		if known.Snapshots[name].ID == fresh {
			s.deleteSnapshot(sn.ID)
		}
	}
	if difference := s.state().differs(env.baseState); difference != "" {
		return errors.New("these objects were not removed:\n" + difference)
	}
	return nil
}

func static(disk *oxide.Disk) *csi.Volume { return &csi.Volume{VolumeId: disk.Id} }

func (s *setup) deleteSnapshot(id string) {
	harness.Must(s.Rack.Client.SnapshotDelete(s.ctx,
		oxide.SnapshotDeleteParams{Snapshot: oxide.NameOrId(id)}))
}

// restoreRequest returns a request for a volume from a snapshot, with that block size; ""
// allows any.
func restoreRequest(name, snapshot, blockSize string) *csi.CreateVolumeRequest {
	req := harness.FromSnapshot(harness.CreateRequest(name), snapshot)
	if blockSize != "" {
		req.Parameters = map[string]string{"blockSize": blockSize}
	}
	return req
}

// rackState is the complete state of the rack. The keys of disks and snapshots are the
// orchestrator's names or, if they have none, their own.
type rackState struct {
	Disks     map[string]disk
	Snapshots map[string]snapshot
	// Devices is the number of loop devices for each serial.
	Devices map[string]int
	Storage int64
}

type disk struct {
	ID, Name, State, At, From string
	Size                      int64
	BlockSize                 int
}

type snapshot struct {
	ID, Disk, State string
	Size            int64
}

// fresh replaces the IDs of objects that did not exist when the cell began.
const fresh = "new"

func (s *setup) state() rackState {
	state := harness.Got(s.Rack.Admin.State(s.ctx))
	w := rackState{Disks: map[string]disk{}, Snapshots: map[string]snapshot{},
		Devices: map[string]int{}, Storage: state.StorageBytes}
	for _, d := range state.Disks {
		entry := disk{ID: d.ID, Name: d.Name, State: d.State.State, At: d.State.Instance,
			Size: d.Size, BlockSize: d.BlockSize}
		if d.SnapshotID != nil {
			entry.From = *d.SnapshotID
		}
		if d.ImageID != nil {
			entry.From = *d.ImageID
		}
		insert(w.Disks, d.Name, d.Description, entry)
	}
	for _, s := range state.Snapshots {
		insert(w.Snapshots, s.Name, s.Description,
			snapshot{ID: s.ID, Disk: s.DiskID, State: s.State, Size: s.Size})
	}
	for _, d := range state.LoopDevices {
		w.Devices[d.Serial]++
	}
	return w
}

// insert adds an object to a table. If the name is taken, insert adds a number to it.
func insert[T any](table map[string]T, name, description string, object T) {
	if given := harness.NameIn(description); given != "" {
		name = given
	}
	for n := 2; ; n++ {
		if _, taken := table[name]; !taken {
			table[name] = object
			return
		}
		name = fmt.Sprintf("%s (%d)", strings.TrimSuffix(name, fmt.Sprintf(" (%d)", n-1)), n)
	}
}

func (state rackState) clone() rackState {
	return rackState{Disks: maps.Clone(state.Disks), Snapshots: maps.Clone(state.Snapshots),
		Devices: maps.Clone(state.Devices), Storage: state.Storage}
}

// since returns the state with the ID fresh for all objects that an earlier state does not have.
func (state rackState) since(earlier rackState) rackState {
	now, known := state.clone(), map[string]bool{}
	for _, d := range earlier.Disks {
		known[d.ID] = true
	}
	for _, s := range earlier.Snapshots {
		known[s.ID] = true
	}
	for name, d := range now.Disks {
		if !known[d.ID] {
			d.ID, d.Name = fresh, ""
			now.Disks[name] = d
		}
	}
	for name, s := range now.Snapshots {
		if !known[s.ID] {
			s.ID = fresh
			now.Snapshots[name] = s
		}
	}
	return now
}

// differs returns the difference from another state, or "" if the states are equal.
func (state rackState) differs(from rackState) string { return cmp.Diff(from, state) }
