package harness

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
)

// These are units of sizes. The size of a rack's disk is a number of whole GiB.
const (
	MiB = int64(1) << 20
	GiB = int64(1) << 30
)

// Mounted returns the capability of a mounted filesystem, with the access mode SINGLE_NODE_WRITER,
// which every orchestrator supports. If fsType is empty, the driver chooses the filesystem.
func Mounted(fsType string, flags ...string) *csi.VolumeCapability {
	mount := &csi.VolumeCapability_MountVolume{FsType: fsType, MountFlags: flags}
	return InMode(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
		&csi.VolumeCapability{AccessType: &csi.VolumeCapability_Mount{Mount: mount}})
}

// Raw returns the capability of a raw block volume, with the access mode SINGLE_NODE_WRITER.
func Raw() *csi.VolumeCapability {
	block := &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	return InMode(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
		&csi.VolumeCapability{AccessType: block})
}

// Access returns Raw for the name "block", and Mounted for the name of a filesystem.
func Access(name string) *csi.VolumeCapability {
	if name == "block" {
		return Raw()
	}
	return Mounted(name)
}

// InMode sets the capability's access mode, and returns the capability.
func InMode(mode csi.VolumeCapability_AccessMode_Mode,
	capability *csi.VolumeCapability) *csi.VolumeCapability {
	capability.AccessMode = &csi.VolumeCapability_AccessMode{Mode: mode}
	return capability
}

// CreateRequest returns a request for 1 GiB. If capabilities is empty, it asks for Mounted("").
func CreateRequest(name string, capabilities ...*csi.VolumeCapability) *csi.CreateVolumeRequest {
	if len(capabilities) == 0 {
		capabilities = []*csi.VolumeCapability{Mounted("")}
	}
	return &csi.CreateVolumeRequest{Name: name, VolumeCapabilities: capabilities,
		CapacityRange: &csi.CapacityRange{RequiredBytes: GiB}}
}

// FromSnapshot makes the request ask for a volume from the snapshot, and returns the request.
func FromSnapshot(req *csi.CreateVolumeRequest, snapshot string) *csi.CreateVolumeRequest {
	source := &csi.VolumeContentSource_SnapshotSource{SnapshotId: snapshot}
	req.VolumeContentSource = &csi.VolumeContentSource{
		Type: &csi.VolumeContentSource_Snapshot{Snapshot: source}}
	return req
}

// SnapshotRequest returns a request for a snapshot of a volume.
func SnapshotRequest(name, volumeID string) *csi.CreateSnapshotRequest {
	return &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: volumeID}
}

// PublishRequest returns a request to attach a volume with a filesystem to a node.
func PublishRequest(volume *csi.Volume, node string) *csi.ControllerPublishVolumeRequest {
	return &csi.ControllerPublishVolumeRequest{VolumeId: volume.GetVolumeId(), NodeId: node,
		VolumeCapability: Mounted(""), VolumeContext: volume.GetVolumeContext()}
}

// UnpublishRequest returns a request to detach a volume from a node or, with "", from all nodes.
func UnpublishRequest(volume *csi.Volume, node string) *csi.ControllerUnpublishVolumeRequest {
	return &csi.ControllerUnpublishVolumeRequest{VolumeId: volume.GetVolumeId(), NodeId: node}
}

// Placement makes the node calls for one volume, as an orchestrator does.
type Placement struct {
	Volume         *csi.Volume
	Capability     *csi.VolumeCapability
	PublishContext map[string]string
	// Staging is a directory that the orchestrator creates. The driver creates Target.
	Staging, Target string
	ReadOnly        bool
}

// MakeDirs creates the directories that an orchestrator creates: Staging, and Target's parent.
func (p *Placement) MakeDirs() error {
	return errors.Join(os.MkdirAll(p.Staging, 0o750), os.MkdirAll(filepath.Dir(p.Target), 0o750))
}

// Stage calls NodeStageVolume.
func (p *Placement) Stage(ctx context.Context, node csi.NodeClient) error {
	_, err := node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: p.Volume.GetVolumeId(), StagingTargetPath: p.Staging,
		VolumeCapability: p.Capability, PublishContext: p.PublishContext,
		VolumeContext: p.Volume.GetVolumeContext()})
	return err
}

// Publish calls NodePublishVolume.
func (p *Placement) Publish(ctx context.Context, node csi.NodeClient) error {
	_, err := node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: p.Volume.GetVolumeId(), StagingTargetPath: p.Staging, TargetPath: p.Target,
		VolumeCapability: p.Capability, Readonly: p.ReadOnly, PublishContext: p.PublishContext,
		VolumeContext: p.Volume.GetVolumeContext()})
	return err
}

// Unpublish calls NodeUnpublishVolume.
func (p *Placement) Unpublish(ctx context.Context, node csi.NodeClient) error {
	_, err := node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{
		VolumeId: p.Volume.GetVolumeId(), TargetPath: p.Target})
	return err
}

// Unstage calls NodeUnstageVolume.
func (p *Placement) Unstage(ctx context.Context, node csi.NodeClient) error {
	_, err := node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{
		VolumeId: p.Volume.GetVolumeId(), StagingTargetPath: p.Staging})
	return err
}

// Remove unpublishes and unstages the volume.
func (p *Placement) Remove(ctx context.Context, node csi.NodeClient) error {
	if err := p.Unpublish(ctx, node); err != nil {
		return err
	}
	return p.Unstage(ctx, node)
}

// Stats calls NodeGetVolumeStats for Target.
func (p *Placement) Stats(ctx context.Context,
	node csi.NodeClient) (*csi.NodeGetVolumeStatsResponse, error) {
	return node.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{
		VolumeId: p.Volume.GetVolumeId(), VolumePath: p.Target, StagingTargetPath: p.Staging})
}

// Administrator calls a rack with Oxide's own client, not through a driver.
type Administrator struct{ Client *oxide.Client }

// CreateDisk creates a blank distributed disk.
func (a Administrator) CreateDisk(ctx context.Context, project, name string,
	sizeBytes int64) (*oxide.Disk, error) {
	return a.Client.DiskCreate(ctx, oxide.DiskCreateParams{Project: oxide.NameOrId(project),
		Body: &oxide.DiskCreate{Name: oxide.Name(name), Description: "made by hand",
			Size: oxide.ByteCount(sizeBytes), DiskBackend: BlankBackend()}})
}

// BlankBackend returns the backend of a blank distributed disk with blocks of 512 bytes.
func BlankBackend() oxide.DiskBackend {
	blank := oxide.DiskSource{Value: &oxide.DiskSourceBlank{BlockSize: 512}}
	return oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{DiskSource: blank}}
}

// Get makes a GET request to the rack, and returns the JSON of the answer unchanged.
func (a Administrator) Get(ctx context.Context, path string, query map[string]string) ([]byte,
	error) {
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

// NameIn returns the CSI name in a disk's description, or "" if the driver did not write it.
func NameIn(description string) string {
	var mark struct{ Name string }
	_, text, _ := strings.Cut(description, "csi.oxide.computer ")
	_ = json.Unmarshal([]byte(text), &mark) // an administrator may have written another text
	return mark.Name
}

// AttachDisk attaches a disk to an instance.
func (a Administrator) AttachDisk(ctx context.Context, disk, instance string) error {
	_, err := a.Client.InstanceDiskAttach(ctx, oxide.InstanceDiskAttachParams{
		Instance: oxide.NameOrId(instance), Body: &oxide.DiskPath{Disk: oxide.NameOrId(disk)}})
	return err
}

// DetachDisk detaches a disk from an instance.
func (a Administrator) DetachDisk(ctx context.Context, disk, instance string) error {
	_, err := a.Client.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
		Instance: oxide.NameOrId(instance), Body: &oxide.DiskPath{Disk: oxide.NameOrId(disk)}})
	return err
}

// DeleteDisk deletes a disk.
func (a Administrator) DeleteDisk(ctx context.Context, disk string) error {
	return a.Client.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: oxide.NameOrId(disk)})
}

// StopInstance stops an instance, and waits until the rack reports it as stopped.
func (a Administrator) StopInstance(ctx context.Context, id string) error {
	_, err := a.Client.InstanceStop(ctx, oxide.InstanceStopParams{Instance: oxide.NameOrId(id)})
	if err == nil {
		_, err = a.AwaitState(ctx, StartTimeout, id, oxide.InstanceStateStopped)
	}
	return err
}

// StartInstance starts an instance, and waits until the rack reports it as running.
func (a Administrator) StartInstance(ctx context.Context, id string) error {
	_, err := a.Client.InstanceStart(ctx, oxide.InstanceStartParams{Instance: oxide.NameOrId(id)})
	if err == nil {
		_, err = a.AwaitState(ctx, StartTimeout, id, oxide.InstanceStateRunning)
	}
	return err
}

// AwaitState waits until an instance is in one of the states, and returns the state.
func (a Administrator) AwaitState(ctx context.Context, timeout time.Duration, id string,
	want ...oxide.InstanceState) (found oxide.InstanceState, err error) {
	err = Await(ctx, timeout, func() error {
		i, err := a.Client.InstanceView(ctx, oxide.InstanceViewParams{Instance: oxide.NameOrId(id)})
		if err != nil {
			return Wrap(Refusal(err), "read instance %s", id)
		}
		if found = i.RunState; !slices.Contains(want, found) {
			return fmt.Errorf("instance %s is %s, expected %q", id, found, want)
		}
		return nil
	})
	return found, err
}

// Refusal returns an error with the rack's message, without the client's dump of the response.
func Refusal(err error) error {
	refused := (*oxide.HTTPError)(nil)
	switch {
	case !errors.As(err, &refused):
		return err
	case refused.ErrorResponse == nil:
		return fmt.Errorf("HTTP status %d, without a message of the rack",
			refused.HTTPResponse.StatusCode)
	}
	r := refused.ErrorResponse
	return fmt.Errorf("%s (%s, request %s)", r.Message, r.ErrorCode, r.RequestId)
}

// pieceStride is the distance between the starts of two pieces on a raw block volume.
const pieceStride = 64 * MiB

// Data writes and verifies a workload's data in a published volume: numbered pieces of random
// bytes. A piece is a file in a filesystem, or a range of a device.
type Data struct {
	Rack *Rack
	// Target is the path at which the volume is published. Raw means that Target is a device.
	Target string
	Raw    bool
	// Seed distinguishes the pieces of one volume from those of another.
	Seed       uint64
	PieceBytes int64
}

// Piece returns the content of piece n, which depends on Seed and n.
func (d Data) Piece(n int) []byte {
	var key [32]byte
	copy(key[:], fmt.Sprint(d.Seed, " ", n))
	content := make([]byte, d.PieceBytes)
	_, _ = rand.NewChaCha8(key).Read(content)
	return content
}

// Open opens the file of piece n. If Raw, it opens the device at the piece's offset, and returns an
// error unless the device is a disk of Rack.
func (d Data) Open(n, flags int) (file *os.File, err error) {
	defer Catch(&err)
	if !d.Raw {
		return os.OpenFile(filepath.Join(d.Target, fmt.Sprint("piece-", n)), flags, 0o640)
	}
	file = Got(os.OpenFile(d.Target, flags&^os.O_CREATE, 0))
	if err = d.Rack.Owns(file); err == nil {
		_, err = file.Seek(int64(n)*pieceStride, io.SeekStart)
	}
	return Opened(file, err)
}

// Write writes piece n. With sync, Write returns when the piece is on the disk.
func (d Data) Write(n int, sync bool) (err error) {
	defer Catch(&err)
	file := Got(d.Open(n, os.O_WRONLY|os.O_CREATE))
	_, err = file.Write(d.Piece(n))
	if err == nil && sync {
		err = file.Sync()
	}
	return errors.Join(err, file.Close())
}

// Verify reads piece n, and returns an error if it differs from what Write has written.
func (d Data) Verify(n int) (err error) {
	defer Catch(&err)
	file := Got(d.Open(n, os.O_RDONLY))
	defer file.Close()
	content := make([]byte, d.PieceBytes)
	_, err = io.ReadFull(file, content)
	Must(Wrap(err, "read piece %d", n))
	if !bytes.Equal(content, d.Piece(n)) {
		return fmt.Errorf("piece %d at %s is not what was written", n, d.Target)
	}
	return nil
}
