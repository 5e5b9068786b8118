package driver

import (
	"context"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
)

func TestAnAnswerThatIsNotAboutWhatWasAskedForIsNotBelieved(t *testing.T) {
	const nothing = `{"id":null,"name":null}`
	refused := rackError(400, "InvalidRequest", "no")
	for _, test := range []struct {
		name  string
		call  func(context.Context, *Controller) error
		lines []exchange
	}{
		{"another project", deleteNothing, []exchange{lost.to(viewDisk),
			ok(viewProject, `{"id":"`+testDisk+`","name":"puppies"}`)}},
		{"no project", deleteNothing, []exchange{lost.to(viewDisk), ok(viewProject, nothing)}},
		{"another instance", publishOwn, []exchange{alone, refused.to(attach),
			ok(viewDisk, diskOf("detached")),
			ok(viewInstance, instanceOf("running", with("id", otherInstance)))}},
		{"no instance", publishOwn, []exchange{alone, refused.to(attach),
			ok(viewDisk, diskOf("detached")), ok(viewInstance, nothing)}},
		{"another image", createFromImage, []exchange{ok(viewImage,
			`{"id":"`+testDisk+`","size":1073741824,"block_size":512}`)}},
		{"no utilization", capacityLeft, []exchange{ok("GET /v1/utilization",
			`{"capacity":null,"provisioned":null}`)}},
	} {
		t.Run(test.name, func(t *testing.T) {
			csitest.Want(t, test.call(t.Context(), rackThat(t, test.lines...)), codes.Internal,
				csierr.RackAnswerWrong)
		})
	}
}

func deleteNothing(ctx context.Context, c *Controller) error {
	_, err := c.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: testDisk})
	return err
}

func publishOwn(ctx context.Context, c *Controller) error {
	_, err := c.ControllerPublishVolume(ctx, publishRequest())
	return err
}

func createFromImage(ctx context.Context, c *Controller) error {
	req := createRequest()
	req.Parameters = map[string]string{volume.ParamImageID: testImage}
	_, err := c.CreateVolume(ctx, req)
	return err
}

func capacityLeft(ctx context.Context, c *Controller) error {
	_, err := c.GetCapacity(ctx, &csi.GetCapacityRequest{})
	return err
}
