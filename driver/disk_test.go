package driver

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
)

func TestADiskWithoutATypeIsOfAnotherRelease(t *testing.T) {
	c := rackThat(t, ok(viewDisk, diskOf("detached", with("disk_type", nil))))
	_, err := c.ControllerGetVolume(t.Context(),
		&csi.ControllerGetVolumeRequest{VolumeId: testDisk})
	csitest.Want(t, err, codes.Internal, csierr.RackAnswerWrong)
}
