package controller

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func TestAResponseAboutAnotherObjectIsRejected(t *testing.T) {
	const nothing = `{"id":null,"name":null}`
	deletion := &csi.DeleteVolumeRequest{VolumeId: racktest.Disk}
	refused := racktest.Error(400, "InvalidRequest", "no")
	for _, test := range []struct {
		name  string
		call  proto.Message
		lines script
	}{
		{"another project", deletion, script{noDisk,
			racktest.OK(racktest.ViewProject, `{"id":"`+racktest.Disk+`","name":"puppies"}`)}},
		{"no project", deletion, script{noDisk, racktest.OK(racktest.ViewProject, nothing)}},
		{"another instance", publishRequest(), script{alone, free, refused.To(attach),
			free, racktest.OK(viewInstance, racktest.InstanceOf("running",
				racktest.With("id", racktest.OtherInstance)))}},
		{"no instance", publishRequest(), script{alone, free, refused.To(attach), free,
			racktest.OK(viewInstance, nothing)}},
		{"another image", creating(createRequest(), func(r *csi.CreateVolumeRequest) {
			r.Parameters = map[string]string{volume.ParamImageID: racktest.Image}
		}), script{racktest.OK(viewImage,
			`{"id":"`+racktest.Disk+`","size":1073741824,"block_size":512}`)}},
		{"a disk without a type", &csi.ControllerGetVolumeRequest{VolumeId: racktest.Disk},
			script{shown("detached", racktest.With("disk_type", nil))}},
		{"a snapshot without a time", &csi.ListSnapshotsRequest{}, script{racktest.OK(listSnaps,
			racktest.PageOf("", racktest.SnapshotOf("ready", racktest.With("time_created", nil))))}},
		{"no utilization", &csi.GetCapacityRequest{}, script{racktest.OK("GET /v1/utilization",
			`{"capacity":null,"provisioned":null}`)}},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := csitest.Call(t.Context(), rackThat(t, test.lines...), test.call)
			csitest.Want(t, err, codes.Unavailable, csierr.RackResponseInvalid)
		})
	}
}
