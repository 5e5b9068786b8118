package faults_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// rackProject is the project for which the driver is configured.
const rackProject = "sanity"

// setup prepares a cell. It keeps the first error in err, and does nothing after that.
type setup struct {
	*environment
	ctx context.Context
	err error
}

// must calls do unless an earlier step failed. Its result is never nil.
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

// handmade makes a disk as an administrator does.
func (s *setup) handmade(name, project string, backend oxide.DiskBackend) *oxide.Disk {
	disk := must(s, func() (*oxide.Disk, error) {
		return s.Rack.Client.DiskCreate(s.ctx, oxide.DiskCreateParams{
			Project: oxide.NameOrId(project),
			Body: &oxide.DiskCreate{Name: oxide.Name(name), Description: "made by hand",
				Size: oxide.ByteCount(gib), DiskBackend: backend},
		})
	})
	if disk == nil {
		return &oxide.Disk{}
	}
	return disk
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

// cleanUp removes everything that the rack does not have between cells, and returns an error
// if something else has changed.
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
		s.err = errors.New("it left behind:\n" + difference)
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
