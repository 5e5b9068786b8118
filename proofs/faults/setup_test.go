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

// setup prepares a cell. It keeps the first error, after which its methods do nothing.
type setup struct {
	*environment
	ctx context.Context
	err error
}

// must calls do unless an earlier step failed.
func must[T any](s *setup, do func() (T, error)) T {
	var none T
	if s.err != nil {
		return none
	}
	value, err := do()
	s.err = err
	return value
}

// do is must for a function that returns only an error.
func (s *setup) do(do func() error) {
	if s.err == nil {
		s.err = do()
	}
}

// name returns a name that no other cell has.
func (s *setup) name(prefix string) string {
	s.names++
	return fmt.Sprintf("%s-%d", prefix, s.names)
}

// handmade creates a disk as an administrator does.
func (s *setup) handmade(name, project string) *oxide.Disk {
	return s.madeDisk(func() (*oxide.Disk, error) {
		return s.Rack.CreateDisk(s.ctx, project, name, gib)
	})
}

// madeDisk is must for a disk. Its result is never nil.
func (s *setup) madeDisk(do func() (*oxide.Disk, error)) *oxide.Disk {
	if disk := must(s, do); disk != nil {
		return disk
	}
	return &oxide.Disk{}
}

func (s *setup) handmadeSnapshot(name, project, disk string) *oxide.Snapshot {
	return must(s, func() (*oxide.Snapshot, error) {
		return s.Rack.Client.SnapshotCreate(s.ctx, oxide.SnapshotCreateParams{
			Project: oxide.NameOrId(project),
			Body: &oxide.SnapshotCreate{Name: oxide.Name(name), Description: "made by hand",
				Disk: oxide.NameOrId(disk)},
		})
	})
}

func (s *setup) attach(disk, instance string) {
	s.do(func() error { return s.Rack.AttachDisk(s.ctx, disk, instance) })
}

// recordWithoutDevice makes the rack record the attach of a disk to a running instance, which then
// gets no device (docs/hot-plug.md).
func (s *setup) recordWithoutDevice(disk, instance string) {
	admin := s.Rack.Admin
	s.do(func() error {
		return admin.Switch(s.ctx, map[string]any{
			"hotplug": adminapi.HotplugFull.With(adminapi.RecordFirst)})
	})
	must(s, func() (string, error) {
		return admin.AddFault(s.ctx, adminapi.Fault{Operation: "instance_disk_attach", Times: 1,
			Device: &adminapi.DeviceFault{Fails: true}})
	})
	s.do(func() error {
		if err := s.Rack.AttachDisk(s.ctx, disk, instance); err == nil {
			return errors.New("the rack attached the disk in spite of the fault")
		}
		state, err := readState(s.ctx, admin)
		for _, d := range state.Disks {
			if d.ID == disk && (d.At != instance || state.Devices[serial(d.Name)] > 0) {
				err = fmt.Errorf("the disk is %+v with %d devices, want a record without one", d,
					state.Devices[serial(d.Name)])
			}
		}
		return errors.Join(err, admin.ClearFaults(s.ctx),
			admin.Switch(s.ctx, map[string]any{"hotplug": adminapi.HotplugFull}))
	})
}

func (s *setup) stop(instance string) {
	s.do(func() error { return s.Rack.StopInstance(s.ctx, instance) })
}

// bootFrom makes a disk the boot disk of a stopped instance.
func (s *setup) bootFrom(instance, disk string) {
	must(s, func() (*oxide.Instance, error) {
		now, err := s.Rack.Client.InstanceView(s.ctx,
			oxide.InstanceViewParams{Instance: oxide.NameOrId(instance)})
		if err != nil {
			return nil, err
		}
		boot := oxide.NameOrId(disk)
		return s.Rack.Client.InstanceUpdate(s.ctx, oxide.InstanceUpdateParams{
			Instance: oxide.NameOrId(instance),
			Body: &oxide.InstanceUpdate{BootDisk: &boot, Memory: now.Memory, Ncpus: now.Ncpus,
				EnableJumboFrames: oxide.NewPointer(false)},
		})
	})
}

// volume makes a volume through the driver.
func (s *setup) volume(name string) *csi.Volume { return s.made(harness.CreateRequest(name)) }

func (s *setup) made(req *csi.CreateVolumeRequest) *csi.Volume {
	resp := must(s, func() (*csi.CreateVolumeResponse, error) {
		return s.ctl.CreateVolume(s.ctx, req)
	})
	return resp.GetVolume()
}

func (s *setup) snapshot(name, volume string) *csi.Snapshot {
	resp := must(s, func() (*csi.CreateSnapshotResponse, error) {
		return s.ctl.CreateSnapshot(s.ctx, harness.SnapshotRequest(name, volume))
	})
	return resp.GetSnapshot()
}

// delete deletes a volume without the driver.
func (s *setup) delete(volume string) {
	s.do(func() error { return s.Rack.DeleteDisk(s.ctx, volume) })
}

// cleanUp removes the objects of a cell, and returns an error if the rack is then not as before it.
func (env *environment) cleanUp(ctx context.Context) error {
	s := &setup{environment: env, ctx: ctx}
	now := must(s, func() (rackState, error) { return readState(ctx, env.Rack.Admin) })
	if s.err == nil && now.differs(env.baseState) == "" {
		return nil
	}
	known := now.since(env.baseState)
	for name, d := range now.Disks {
		if known.Disks[name].ID != fresh {
			continue
		}
		if d.At != "" {
			s.do(func() error { return env.Rack.DetachDisk(ctx, d.ID, d.At) })
		}
		s.delete(d.ID)
	}
	for name, sn := range now.Snapshots {
		if known.Snapshots[name].ID == fresh {
			s.deleteSnapshot(sn.ID)
		}
	}
	now = must(s, func() (rackState, error) { return readState(ctx, env.Rack.Admin) })
	if difference := now.differs(env.baseState); s.err == nil && difference != "" {
		s.err = errors.New("these objects were not removed:\n" + difference)
	}
	return s.err
}

// static returns the volume of a disk that was made by hand.
func static(disk *oxide.Disk) *csi.Volume { return &csi.Volume{VolumeId: disk.Id} }

func (s *setup) deleteSnapshot(id string) {
	s.do(func() error {
		return s.Rack.Client.SnapshotDelete(s.ctx,
			oxide.SnapshotDeleteParams{Snapshot: oxide.NameOrId(id)})
	})
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

// readState reads the rack's state.
func readState(ctx context.Context, admin adminapi.Client) (rackState, error) {
	w := rackState{Disks: map[string]disk{}, Snapshots: map[string]snapshot{},
		Devices: map[string]int{}}
	state, err := admin.State(ctx)
	if err != nil {
		return w, err
	}
	w.Storage = state.StorageBytes
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
	return w, nil
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
