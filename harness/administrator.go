package harness

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// Administrator uses a rack without the driver.
type Administrator struct{ Client *oxide.Client }

// CreateDisk creates a blank disk.
func (a Administrator) CreateDisk(
	ctx context.Context, project, name string, sizeBytes int64,
) (*oxide.Disk, error) {
	return a.Client.DiskCreate(ctx, oxide.DiskCreateParams{
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

// Get returns the unchanged JSON of an answer of the rack.
func (a Administrator) Get(
	ctx context.Context, path string, query map[string]string,
) ([]byte, error) {
	resp, err := a.Client.MakeRequest(ctx,
		oxide.Request{Method: http.MethodGet, Path: path, Query: query})
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET %s: %s: %s", path, resp.Status, body)
	}
	return body, err
}

// NameIn returns the orchestrator's name in a description that the driver wrote, or "".
func NameIn(description string) string {
	var mark struct{ Name string }
	_, text, _ := strings.Cut(description, "csi.oxide.computer ")
	_ = json.Unmarshal([]byte(text), &mark) // an administrator may write anything there
	return mark.Name
}

// AttachDisk attaches a disk.
func (a Administrator) AttachDisk(ctx context.Context, disk, instance string) error {
	_, err := a.Client.InstanceDiskAttach(ctx, oxide.InstanceDiskAttachParams{
		Instance: oxide.NameOrId(instance),
		Body:     &oxide.DiskPath{Disk: oxide.NameOrId(disk)},
	})
	return err
}

// DetachDisk detaches a disk.
func (a Administrator) DetachDisk(ctx context.Context, disk, instance string) error {
	_, err := a.Client.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
		Instance: oxide.NameOrId(instance),
		Body:     &oxide.DiskPath{Disk: oxide.NameOrId(disk)},
	})
	return err
}

// DeleteDisk deletes a disk.
func (a Administrator) DeleteDisk(ctx context.Context, disk string) error {
	return a.Client.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: oxide.NameOrId(disk)})
}

// StopInstance stops an instance and waits until it is stopped.
func (a Administrator) StopInstance(ctx context.Context, id string) error {
	_, err := a.Client.InstanceStop(ctx, oxide.InstanceStopParams{Instance: oxide.NameOrId(id)})
	if err != nil {
		return err
	}
	return a.awaitInstance(ctx, id, oxide.InstanceStateStopped)
}

// StartInstance starts an instance and waits until it runs.
func (a Administrator) StartInstance(ctx context.Context, id string) error {
	_, err := a.Client.InstanceStart(ctx, oxide.InstanceStartParams{Instance: oxide.NameOrId(id)})
	if err != nil {
		return err
	}
	return a.awaitInstance(ctx, id, oxide.InstanceStateRunning)
}

func (a Administrator) awaitInstance(
	ctx context.Context, id string, want oxide.InstanceState,
) error {
	return Await(ctx, StartTimeout, func() error {
		instance, err := a.Client.InstanceView(ctx,
			oxide.InstanceViewParams{Instance: oxide.NameOrId(id)})
		if err == nil && instance.RunState != want {
			err = fmt.Errorf("instance %s is %s, not %s", id, instance.RunState, want)
		}
		return err
	})
}
