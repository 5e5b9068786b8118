package driver

import (
	"context"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
)

func TestAPageWithoutAListIsNoEmptyList(t *testing.T) {
	// An unmarked disk that is attached may be a boot disk: the instances are looked at.
	byHand := listed(1, "attached "+testInstance, with("description", "made by hand"))
	for name, list := range map[string]struct {
		call  func(context.Context, *Controller) error
		lines []exchange
	}{
		"disks": {listVolumes, []exchange{{want: "GET /v1/disks"}}},
		"instances": {listVolumes, []exchange{
			{want: "GET /v1/disks", body: pageOf("", byHand)}, {want: "GET /v1/instances"}}},
		"snapshots": {listSnapshots, []exchange{{want: "GET /v1/snapshots"}}},
	} {
		for _, body := range []string{`{}`, `{"items":null,"next_page":null}`, projectOf()} {
			lines := append([]exchange{}, list.lines...)
			lines[len(lines)-1].body = body
			for i := range lines {
				lines[i].status = 200
			}
			t.Run(name+" as "+body, func(t *testing.T) {
				wantFailure(t, list.call(t.Context(), rackThat(t, lines...)), codes.Internal,
					ReasonRackAnswerWrong)
			})
		}
	}
}

func listVolumes(ctx context.Context, c *Controller) error {
	_, err := c.ListVolumes(ctx, &csi.ListVolumesRequest{})
	return err
}

func listSnapshots(ctx context.Context, c *Controller) error {
	_, err := c.ListSnapshots(ctx, &csi.ListSnapshotsRequest{})
	return err
}
