package harness

import (
	"context"
	"fmt"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// CreateDisk creates a blank disk in the rack without the driver, as an administrator does.
func (r *Rack) CreateDisk(
	ctx context.Context, project, name string, sizeBytes int64,
) (*oxide.Disk, error) {
	return r.Client.DiskCreate(ctx, oxide.DiskCreateParams{
		Project: oxide.NameOrId(project),
		Body: &oxide.DiskCreate{Name: oxide.Name(name), Description: "made by hand",
			Size: oxide.ByteCount(sizeBytes), DiskBackend: BlankBackend()},
	})
}

// BlankBackend returns the API's description of a blank distributed disk.
func BlankBackend() oxide.DiskBackend {
	return oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{
		DiskSource: oxide.DiskSource{Value: &oxide.DiskSourceBlank{BlockSize: 512}},
	}}
}

// AttachDisk attaches a disk without the driver.
func (r *Rack) AttachDisk(ctx context.Context, disk, instance string) error {
	_, err := r.Client.InstanceDiskAttach(ctx, oxide.InstanceDiskAttachParams{
		Instance: oxide.NameOrId(instance),
		Body:     &oxide.DiskPath{Disk: oxide.NameOrId(disk)},
	})
	return err
}

// DetachDisk detaches a disk without the driver.
func (r *Rack) DetachDisk(ctx context.Context, disk, instance string) error {
	_, err := r.Client.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
		Instance: oxide.NameOrId(instance),
		Body:     &oxide.DiskPath{Disk: oxide.NameOrId(disk)},
	})
	return err
}

// DeleteDisk deletes a disk without the driver.
func (r *Rack) DeleteDisk(ctx context.Context, disk string) error {
	return r.Client.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: oxide.NameOrId(disk)})
}

// StopInstance stops an instance and waits until it is stopped.
func (r *Rack) StopInstance(ctx context.Context, id string) error {
	_, err := r.Client.InstanceStop(ctx, oxide.InstanceStopParams{Instance: oxide.NameOrId(id)})
	if err != nil {
		return err
	}
	return r.awaitInstance(ctx, id, oxide.InstanceStateStopped)
}

// StartInstance starts an instance and waits until it runs.
func (r *Rack) StartInstance(ctx context.Context, id string) error {
	_, err := r.Client.InstanceStart(ctx, oxide.InstanceStartParams{Instance: oxide.NameOrId(id)})
	if err != nil {
		return err
	}
	return r.awaitInstance(ctx, id, oxide.InstanceStateRunning)
}

func (r *Rack) awaitInstance(ctx context.Context, id string, want oxide.InstanceState) error {
	return Await(ctx, StartTimeout, func() error {
		instance, err := r.Client.InstanceView(ctx,
			oxide.InstanceViewParams{Instance: oxide.NameOrId(id)})
		if err == nil && instance.RunState != want {
			err = fmt.Errorf("instance %s is %s, not %s", id, instance.RunState, want)
		}
		return err
	})
}
