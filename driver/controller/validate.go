package controller

import (
	"context"
	"fmt"
	"strconv"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/rack"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// ValidateVolumeCapabilities says whether a disk, which may have been made by hand, can be what the
// request describes. No is not an error but an answer without confirmation.
func (c *Service) ValidateVolumeCapabilities(ctx context.Context,
	req *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	id, objection, err := validationOf(req)
	if err != nil {
		return nil, err
	}
	disk, err := c.Rack.Disk(ctx, id)
	if err != nil {
		return nil, err
	}
	if objection == "" {
		objection = c.useProblem(disk, req.GetVolumeCapabilities()...)
	}
	if objection == "" {
		objection = unlike(disk, req.GetVolumeContext(), req.GetParameters())
	}
	if objection != "" {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: objection}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{
		Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
			VolumeContext:      req.GetVolumeContext(),
			VolumeCapabilities: req.GetVolumeCapabilities(),
			Parameters:         req.GetParameters(),
		},
	}, nil
}

// validationOf checks the request. objection is what no disk can be, and is told only for a disk
// that exists.
func validationOf(req *csi.ValidateVolumeCapabilitiesRequest) (id oxide.NameOrId, objection string,
	err error) {
	switch {
	case req.GetVolumeId() == "":
		return "", "", volumeIDMissing()
	case len(req.GetVolumeCapabilities()) == 0:
		return "", "", csierr.New(csierr.FieldMissing,
			"volume_capabilities is missing")
	}
	for _, capability := range req.GetVolumeCapabilities() {
		switch p := volume.CapabilityProblem(capability); {
		case p.Malformed:
			return "", "", csierr.New(csierr.CapabilityInvalid, "%s", p.Message)
		case p.Unsupported:
			objection = p.Message
		}
		_, err := volume.ParseMountFlags(capability.GetMount().GetMountFlags())
		if err != nil && objection == "" {
			objection = err.Error()
		}
	}
	if objection == "" && len(req.GetMutableParameters()) > 0 {
		objection = "mutable_parameters are not supported"
	}
	id, ok := rack.ID(req.GetVolumeId())
	if !ok {
		return "", "", rack.VolumeNotFound(req.GetVolumeId())
	}
	return id, objection, nil
}

// unlike says in what a disk is not what context and parameters say, or "".
func unlike(disk *oxide.Disk, volumeContext, values map[string]string) string {
	for key, value := range volumeContext {
		if text := contextProblem(disk, key, value); text != "" {
			return text
		}
	}
	p, err := volume.ParseParameters(values)
	if err != nil {
		return csierr.Message(err)
	}
	m, _ := volume.ParseTag(disk.Description)
	switch {
	case rack.ReadOnly(disk):
		return "the disk is read-only"
	case p.BlockSize != 0 && p.BlockSize != int(disk.BlockSize):
		return fmt.Sprintf("blockSize: the disk has blocks of %d bytes", disk.BlockSize)
	case values[volume.ParamDiskType] != "" && string(p.DiskType) != string(disk.DiskType):
		return fmt.Sprintf("diskType: the disk is %s", disk.DiskType)
	case p.ImageID != "" && p.ImageID != disk.ImageId:
		return "imageId: the disk was made from something else"
	case values[volume.ParamMkfsOptions] != "" && p.MkfsOptions.String() != m.MkfsOptions:
		return "mkfsOptions: the volume was made with others"
	}
	return ""
}

func contextProblem(disk *oxide.Disk, key, value string) string {
	m, marked := volume.ParseTag(disk.Description)
	switch {
	case volume.ForeignKey(key):
	case key == volume.CtxDiskName && value != string(disk.Name):
		return fmt.Sprintf("volume_context: %s: the disk's name is %s", key, disk.Name)
	case key == volume.CtxDiskID && value != disk.Id:
		return fmt.Sprintf("volume_context: %s: the disk's id is %s", key, disk.Id)
	case key == volume.CtxBlockSize && value != strconv.Itoa(int(disk.BlockSize)):
		return fmt.Sprintf("volume_context: %s: the disk has blocks of %d bytes", key,
			disk.BlockSize)
	case key == volume.CtxMkfsOptions && marked && value != m.MkfsOptions:
		return fmt.Sprintf("volume_context: %s: the volume was made with others", key)
	case key == volume.CtxMkfsOptions:
		if _, err := volume.ParseMkfsOptions(value); err != nil {
			return csierr.Plain(err.Error())
		}
	case key != volume.CtxDiskName && key != volume.CtxDiskID && key != volume.CtxBlockSize:
		return fmt.Sprintf("volume_context: the key %.80q means nothing to this driver", key)
	}
	return ""
}
