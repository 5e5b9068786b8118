package faults_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
)

// rackProject is the project that the driver is configured for.
const rackProject = "sanity"

// stage prepares a cell. What goes wrong there is kept in err, and nothing is done after it.
type stage struct {
	*cast
	ctx context.Context
	err error
}

// must does something unless something else went wrong before. What it returns is never nil.
func must[T any](s *stage, do func() (T, error)) T {
	var none T
	if s.err != nil {
		return none
	}
	value, err := do()
	s.err = err
	return value
}

// name is one that no other cell has.
func (s *stage) name(prefix string) string {
	s.names++
	return fmt.Sprintf("%s-%d", prefix, s.names)
}

func blank() oxide.DiskBackend {
	return oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{
		DiskSource: oxide.DiskSource{Value: &oxide.DiskSourceBlank{BlockSize: 512}},
	}}
}

// handmade makes a disk as an administrator does.
func (s *stage) handmade(name, project string, backend oxide.DiskBackend) *oxide.Disk {
	disk := must(s, func() (*oxide.Disk, error) {
		return s.rack.Client.DiskCreate(s.ctx, oxide.DiskCreateParams{
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

func (s *stage) handmadeSnapshot(name, project, disk string) *oxide.Snapshot {
	return must(s, func() (*oxide.Snapshot, error) {
		return s.rack.Client.SnapshotCreate(s.ctx, oxide.SnapshotCreateParams{
			Project: oxide.NameOrId(project),
			Body: &oxide.SnapshotCreate{Name: oxide.Name(name), Description: "made by hand",
				Disk: oxide.NameOrId(disk)},
		})
	})
}

func (s *stage) attach(disk, instance string) {
	must(s, func() (*oxide.Disk, error) {
		return s.rack.Client.InstanceDiskAttach(s.ctx, oxide.InstanceDiskAttachParams{
			Instance: oxide.NameOrId(instance),
			Body:     &oxide.DiskPath{Disk: oxide.NameOrId(disk)},
		})
	})
}

// stop stops an instance and waits for it.
func (s *stage) stop(instance string) {
	must(s, func() (*oxide.Instance, error) {
		return s.rack.Client.InstanceStop(s.ctx,
			oxide.InstanceStopParams{Instance: oxide.NameOrId(instance)})
	})
	if s.err != nil {
		return
	}
	s.err = await(s.ctx, func() error {
		now, err := s.rack.Client.InstanceView(s.ctx,
			oxide.InstanceViewParams{Instance: oxide.NameOrId(instance)})
		if err == nil && now.RunState != oxide.InstanceStateStopped {
			err = errors.New("the instance is " + string(now.RunState))
		}
		return err
	})
}

// bootFrom makes a disk the boot disk of a stopped instance.
func (s *stage) bootFrom(instance, disk string) {
	must(s, func() (*oxide.Instance, error) {
		now, err := s.rack.Client.InstanceView(s.ctx,
			oxide.InstanceViewParams{Instance: oxide.NameOrId(instance)})
		if err != nil {
			return nil, err
		}
		boot := oxide.NameOrId(disk)
		return s.rack.Client.InstanceUpdate(s.ctx, oxide.InstanceUpdateParams{
			Instance: oxide.NameOrId(instance),
			Body: &oxide.InstanceUpdate{BootDisk: &boot, Memory: now.Memory, Ncpus: now.Ncpus,
				EnableJumboFrames: oxide.NewPointer(false)},
		})
	})
}

// volume makes a volume through the driver.
func (s *stage) volume(name string) *csi.Volume { return s.made(createRequest(name)) }

func (s *stage) made(req *csi.CreateVolumeRequest) *csi.Volume {
	resp := must(s, func() (*csi.CreateVolumeResponse, error) {
		return s.ctl.CreateVolume(s.ctx, req)
	})
	return resp.GetVolume()
}

func (s *stage) snapshot(name, volume string) *csi.Snapshot {
	resp := must(s, func() (*csi.CreateSnapshotResponse, error) {
		return s.ctl.CreateSnapshot(s.ctx, snapshotRequest(name, volume))
	})
	return resp.GetSnapshot()
}

// delete deletes a volume past the driver.
func (s *stage) delete(volume string) {
	if s.err == nil {
		s.err = s.rack.Client.DiskDelete(s.ctx, oxide.DiskDeleteParams{Disk: oxide.NameOrId(volume)})
	}
}

// tidy removes what is not in the rack when no cell plays, and demands that nothing else has
// changed.
func (c *cast) tidy(ctx context.Context) error {
	s := &stage{cast: c, ctx: ctx}
	now := must(s, func() (world, error) { return look(ctx, c.rack.Admin) })
	if s.err == nil && now.differs(c.base) == "" {
		return nil
	}
	known := now.since(c.base)
	for name, d := range now.Disks {
		if known.Disks[name].ID != fresh {
			continue
		}
		if d.At != "" {
			must(s, func() (*oxide.Disk, error) {
				return c.rack.Client.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
					Instance: oxide.NameOrId(d.At),
					Body:     &oxide.DiskPath{Disk: oxide.NameOrId(d.ID)},
				})
			})
		}
		s.delete(d.ID)
	}
	for name, sn := range now.Snapshots {
		if s.err == nil && known.Snapshots[name].ID == fresh {
			s.err = c.rack.Client.SnapshotDelete(ctx,
				oxide.SnapshotDeleteParams{Snapshot: oxide.NameOrId(sn.ID)})
		}
	}
	now = must(s, func() (world, error) { return look(ctx, c.rack.Admin) })
	if difference := now.differs(c.base); s.err == nil && difference != "" {
		s.err = errors.New("it left behind:\n" + difference)
	}
	return s.err
}

// capability is a mounted filesystem's.
func capability() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{
			Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
		},
	}
}

func createRequest(name string) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: gib},
		VolumeCapabilities: []*csi.VolumeCapability{capability()},
	}
}

// restoreRequest asks for a volume from a snapshot, with blocks of that size, "" for any.
func restoreRequest(name, snapshot, blockSize string) *csi.CreateVolumeRequest {
	req := createRequest(name)
	req.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: snapshot},
	}}
	if blockSize != "" {
		req.Parameters = map[string]string{"blockSize": blockSize}
	}
	return req
}

func snapshotRequest(name, volume string) *csi.CreateSnapshotRequest {
	return &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: volume}
}

func publishRequest(volume *csi.Volume, node string) *csi.ControllerPublishVolumeRequest {
	return &csi.ControllerPublishVolumeRequest{
		VolumeId: volume.GetVolumeId(), NodeId: node,
		VolumeCapability: capability(), VolumeContext: volume.GetVolumeContext(),
	}
}

// static is the volume of a disk made by hand.
func static(disk *oxide.Disk) *csi.Volume { return &csi.Volume{VolumeId: disk.Id} }

func (s *stage) deleteSnapshot(id string) {
	if s.err == nil {
		s.err = s.rack.Client.SnapshotDelete(s.ctx,
			oxide.SnapshotDeleteParams{Snapshot: oxide.NameOrId(id)})
	}
}
