package concurrency

import (
	"context"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
)

const gib = int64(1) << 30

// mounted and raw are a filesystem and a block volume, in a mode of one node.
func mounted(fsType string, mode csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{
			Mount: &csi.VolumeCapability_MountVolume{FsType: fsType},
		},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
	}
}

func raw(mode csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
	}
}

const (
	oneWriter   = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	manyWriters = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
)

func createRequest(name string, sizeBytes int64) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{
		Name:               name,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: sizeBytes},
		VolumeCapabilities: []*csi.VolumeCapability{mounted("", oneWriter)},
	}
}

// exactly asks for a volume of this size and no other.
func exactly(name string, sizeBytes int64) *csi.CreateVolumeRequest {
	req := createRequest(name, sizeBytes)
	req.CapacityRange.LimitBytes = sizeBytes
	return req
}

func publishRequest(volume *csi.Volume, node string) *csi.ControllerPublishVolumeRequest {
	return &csi.ControllerPublishVolumeRequest{
		VolumeId: volume.GetVolumeId(), NodeId: node, VolumeCapability: mounted("", oneWriter),
		VolumeContext: volume.GetVolumeContext(),
	}
}

// client is one of the controllers; they take turns.
func (s *site) client(turn int) csi.ControllerClient {
	return s.controllers[turn%len(s.controllers)].Controller()
}

// created, attached, detached, deleted and snapshotDeleted are what one caller does who does not
// give up.

func (s *site) created(ctx context.Context, req *csi.CreateVolumeRequest) (volume *csi.Volume) {
	s.converge(ctx, "CreateVolume", busy, func(ctx context.Context) error {
		answer, err := s.client(0).CreateVolume(ctx, req)
		volume = answer.GetVolume()
		return err
	})
	return volume
}

func (s *site) attached(ctx context.Context, volume *csi.Volume, n *host) (said map[string]string) {
	s.converge(ctx, "ControllerPublishVolume", busy, func(ctx context.Context) error {
		answer, err := s.client(1).ControllerPublishVolume(ctx,
			publishRequest(volume, n.instance.ID))
		said = answer.GetPublishContext()
		return err
	})
	return said
}

func (s *site) detached(ctx context.Context, id string) {
	s.converge(ctx, "ControllerUnpublishVolume", busy, func(ctx context.Context) error {
		_, err := s.client(0).ControllerUnpublishVolume(ctx,
			&csi.ControllerUnpublishVolumeRequest{VolumeId: id})
		return err
	})
}

func (s *site) deleted(ctx context.Context, id string) {
	s.converge(ctx, "DeleteVolume", busy, func(ctx context.Context) error {
		_, err := s.client(1).DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
		return err
	})
}

func (s *site) snapshotDeleted(ctx context.Context, id string) {
	allowed := busy.and(answers{codes.Aborted: {"SnapshotNotReady"}})
	s.converge(ctx, "DeleteSnapshot", allowed, func(ctx context.Context) error {
		_, err := s.client(0).DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: id})
		return err
	})
}

// disksOf lists the rack's disks of a volume's name, which the driver writes into the description.
func (s *site) disksOf(ctx context.Context, name string) []oxide.Disk {
	s.t.Helper()
	all, err := s.rack.Client.DiskListAllPages(ctx,
		oxide.DiskListParams{Project: oxide.NameOrId(s.rack.Project)})
	if err != nil {
		s.wrong("list the rack's disks: %v", err)
	}
	var found []oxide.Disk
	for _, disk := range all {
		if ownsName(disk.Description, name) {
			found = append(found, disk)
		}
	}
	return found
}

// snapshotsNamed lists the ids of the rack's snapshots of a name.
func (s *site) snapshotsNamed(ctx context.Context, name string) []string {
	all, err := s.rack.Client.SnapshotListAllPages(ctx,
		oxide.SnapshotListParams{Project: oxide.NameOrId(s.rack.Project)})
	if err != nil {
		s.wrong("list the rack's snapshots: %v", err)
	}
	var found []string
	for _, snapshot := range all {
		if ownsName(snapshot.Description, name) {
			found = append(found, snapshot.Id)
		}
	}
	slices.Sort(found)
	return found
}

// ownsName reports whether a description is the one that the driver writes for that name.
func ownsName(description, name string) bool {
	return strings.HasPrefix(description, `csi.oxide.computer {"name":"`+name+`"`)
}

// holderOf is the instance that has the disk, as the rack says; empty when none.
func (s *site) holderOf(ctx context.Context, id string) string {
	disk, err := s.rack.Client.DiskView(ctx, oxide.DiskViewParams{Disk: oxide.NameOrId(id)})
	if err != nil {
		s.wrong("look at the disk %s: %v", id, err)
		return ""
	}
	if attached, ok := disk.State.AsAttached(); ok {
		return attached.Instance
	}
	if disk.State.State() != oxide.DiskStateStateDetached {
		s.wrong("the disk %s is %s when nothing is under way", id, disk.State.State())
	}
	return ""
}
