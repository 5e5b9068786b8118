package concurrency

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
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
		if disk.Description == ownDescription(name) {
			found = append(found, disk)
		}
	}
	return found
}

// ownDescription is what the driver writes into the description of the disk of that name.
func ownDescription(name string) string {
	return `csi.oxide.computer {"name":"` + name + `"}`
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
