package controller

import (
	"context"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

func TestAResponseAboutAnotherObjectIsRejected(t *testing.T) {
	const nothing = `{"id":null,"name":null}`
	refused := racktest.Error(400, "InvalidRequest", "no")
	for _, test := range []struct {
		name  string
		call  func(context.Context, *Service) error
		lines []racktest.Exchange
	}{
		{"another project", deleteNothing, []racktest.Exchange{racktest.NotFound.To(racktest.ViewDisk),
			racktest.OK(racktest.ViewProject, `{"id":"`+racktest.Disk+`","name":"puppies"}`)}},
		{"no project", deleteNothing, []racktest.Exchange{racktest.NotFound.To(racktest.ViewDisk),
			racktest.OK(racktest.ViewProject,
				nothing)}},
		{"another instance", publishOwn, []racktest.Exchange{alone, free, refused.To(attach),
			racktest.OK(racktest.ViewDisk, racktest.DiskOf("detached")),
			racktest.OK(viewInstance, racktest.InstanceOf("running", racktest.With("id",
				racktest.OtherInstance)))}},
		{"no instance", publishOwn, []racktest.Exchange{alone, free, refused.To(attach),
			racktest.OK(racktest.ViewDisk, racktest.DiskOf("detached")), racktest.OK(viewInstance,
				nothing)}},
		{"another image", createFromImage, []racktest.Exchange{racktest.OK(viewImage,
			`{"id":"`+racktest.Disk+`","size":1073741824,"block_size":512}`)}},
		{"no utilization", capacityLeft, []racktest.Exchange{racktest.OK("GET /v1/utilization",
			`{"capacity":null,"provisioned":null}`)}},
	} {
		t.Run(test.name, func(t *testing.T) {
			csitest.Want(t, test.call(t.Context(), rackThat(t, test.lines...)), codes.Internal,
				csierr.RackResponseInvalid)
		})
	}
}

func deleteNothing(ctx context.Context, c *Service) error {
	_, err := c.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: racktest.Disk})
	return err
}

func publishOwn(ctx context.Context, c *Service) error {
	_, err := c.ControllerPublishVolume(ctx, publishRequest())
	return err
}

func createFromImage(ctx context.Context, c *Service) error {
	req := createRequest()
	req.Parameters = map[string]string{volume.ParamImageID: racktest.Image}
	_, err := c.CreateVolume(ctx, req)
	return err
}

func capacityLeft(ctx context.Context, c *Service) error {
	_, err := c.GetCapacity(ctx, &csi.GetCapacityRequest{})
	return err
}
