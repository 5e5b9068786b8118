package controller

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/racktest"
)

func TestADiskWithoutATypeIsRejected(t *testing.T) {
	c := rackThat(t, racktest.OK(racktest.ViewDisk, racktest.DiskOf("detached",
		racktest.With("disk_type",
			nil))))
	_, err := c.ControllerGetVolume(t.Context(),
		&csi.ControllerGetVolumeRequest{VolumeId: racktest.Disk})
	csitest.Want(t, err, codes.Internal, csierr.RackResponseInvalid)
}
