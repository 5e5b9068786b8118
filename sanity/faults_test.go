//go:build linux

package sanity

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

var _ = describeController("a rack that answers with an error", fixtureOptions{}, func(f *fixture) {
	It("B-9 a token without rights gets the same codes whatever is called", func(ctx SpecContext) {
		volume := f.volume(ctx)
		for statusCode, want := range map[int]codes.Code{
			http.StatusUnauthorized: codes.Unauthenticated,
			http.StatusForbidden:    codes.PermissionDenied,
		} {
			code := map[int]string{http.StatusUnauthorized: "Unauthorized",
				http.StatusForbidden: "Forbidden"}[statusCode]
			for _, operation := range []string{"disk_create", "disk_delete", "disk_list",
				"disk_view", "instance_disk_attach", "instance_disk_detach", "snapshot_create"} {
				f.refuse(ctx, operation, "", statusCode, code, code)
			}
			node := f.rack.Instance("a").ID
			_, create := f.ctl.CreateVolume(ctx, harness.CreateRequest(fresh("denied")))
			_, list := f.ctl.ListVolumes(ctx, &csi.ListVolumesRequest{})
			_, publish := f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(volume, node))
			_, unpublish := f.ctl.ControllerUnpublishVolume(ctx, harness.UnpublishRequest(volume, node))
			_, remove := f.ctl.DeleteVolume(ctx,
				&csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()})
			_, snapshot := f.ctl.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{
				Name: fresh("denied"), SourceVolumeId: volume.GetVolumeId()})
			for _, err := range []error{create, list, publish, unpublish, remove, snapshot} {
				expectRefusal(err, want)
			}
			Expect(f.rack.Admin.ClearFaults(ctx)).To(Succeed())
		}
	})

	It("OX-8 the rack's request ID is in the message, for its operator", func(ctx SpecContext) {
		f.fault(ctx, adminapi.Fault{Operation: "disk_view", Phase: adminapi.Instead,
			Response: &adminapi.Response{
				Status: http.StatusInternalServerError, ContentType: "application/json",
				Body: `{"request_id":"` + someUUID + `","error_code":"Internal","message":"oh"}`,
			}})
		_, err := f.ctl.ControllerGetVolume(ctx,
			&csi.ControllerGetVolumeRequest{VolumeId: "5e1a9c0e-0c53-4a1c-8f0e-7a3e8f6f0a11"})
		expectRefusal(err, codes.Unavailable, someUUID)
	})

	It("OX-11 a canceled call and a late call get the codes for that", func(ctx SpecContext) {
		f.fault(ctx, adminapi.Fault{Operation: "disk_view", Phase: adminapi.Before,
			Hang: adminapi.Duration(20 * time.Second)})
		req := &csi.ControllerGetVolumeRequest{VolumeId: someUUID}
		short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		defer cancel()
		expectRefusal(errOf(f.ctl.ControllerGetVolume(short, req)), codes.DeadlineExceeded)
		given, giveUp := context.WithCancel(ctx)
		time.AfterFunc(300*time.Millisecond, giveUp)
		_, err := f.ctl.ControllerGetVolume(given, req)
		expectRefusal(err, codes.Canceled)
	})

	It("OX-13 no message shows the rack's address, headers or method", func(ctx SpecContext) {
		for _, code := range []int{400, 401, 403, 404, 409, 410, 418, 500, 503, 507} {
			f.fault(ctx, adminapi.Fault{Operation: "disk_create", Phase: adminapi.Instead, Times: 1,
				Response: &adminapi.Response{Status: code, ErrorCode: "Whatever", Message: "no"}})
			_, err := f.ctl.CreateVolume(ctx, harness.CreateRequest(fresh("quiet")))
			Expect(err).To(HaveOccurred())
			message := strings.ToLower(status.Convert(err).Message())
			for _, leak := range []string{strings.TrimPrefix(f.rack.URL, "http://"),
				"content-type", "x-request-id", "authorization", "/v1/"} {
				Expect(message).NotTo(ContainSubstring(leak))
			}
		}
	})

	It("B-43 an attach with an unknown result does not get a final error",
		func(ctx SpecContext) {
			volume := f.volume(ctx)
			node := f.rack.Instance("a").ID
			f.fault(ctx,
				adminapi.Fault{Operation: "instance_disk_attach", Phase: adminapi.After, Cut: true, Times: 1})
			f.fault(ctx, adminapi.Fault{Operation: "disk_view", Phase: adminapi.Instead, Cut: true})
			_, err := f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(volume, node))
			Expect(codeOf(err)).To(BeElementOf(codes.OK, codes.Unavailable, codes.Aborted,
				codes.DeadlineExceeded), "%v", err)
			Expect(f.rack.Admin.ClearFaults(ctx)).To(Succeed())
			f.published(ctx, volume, "a")
		})
})

// lostAnswers are the ways in which the answer to a completed operation is lost.
var lostAnswers = []TableEntry{
	Entry("a proxy's 520 in its place", adminapi.Fault{Response: &adminapi.Response{
		Status: 520, ContentType: "text/html", Body: "<html>odd</html>"}}),
	Entry("a proxy's 408 in its place", adminapi.Fault{Response: &adminapi.Response{
		Status: http.StatusRequestTimeout, ContentType: "text/html", Body: "<html>late</html>"}}),
	Entry("an error in its place", adminapi.Fault{Response: &adminapi.Response{
		Status: http.StatusInternalServerError, ErrorCode: "Internal", Message: "oh"}}),
	Entry("the connection cut", adminapi.Fault{Cut: true}),
	Entry("the answer truncated", adminapi.Fault{TruncateBody: 20}),
}

// decided are the operations whose lost answer is resolved within the same call, if there is an
// answer at all.
var decided = []string{"disk_create", "snapshot_create", "instance_disk_attach"}

// converge repeats a call until it succeeds, as every orchestrator does.
func converge[T any](ctx context.Context, call func() (T, error)) T {
	GinkgoHelper()
	var result T
	eventually(ctx, func() (err error) {
		result, err = call()
		return err
	})
	return result
}

var _ = describeController("an answer that is lost", fixtureOptions{}, lostAnswerSpecs)

func lostAnswerSpecs(f *fixture) {
	DescribeTable("B-10 B-42 OX-8 of each change in a volume's life is resolved by the same call, "+
		"or by the next one", func(ctx SpecContext, lost adminapi.Fault) {
		req := harness.CreateRequest(fresh("lost"))
		var volume *csi.Volume
		var snapshot *csi.Snapshot
		for _, change := range []struct {
			operation string
			call      func() error
			then      func()
		}{
			{"disk_create", func() error {
				resp, err := f.ctl.CreateVolume(ctx, req)
				volume = resp.GetVolume()
				return err
			}, func() { Expect(f.disks(ctx)).To(HaveLen(1)) }},
			{"instance_disk_attach", func() error { return f.publish(ctx, volume, "a") }, func() {
				Expect(f.attached(ctx, "a")).To(ConsistOf(volume.GetVolumeId()))
			}},
			{"snapshot_create", func() error {
				resp, err := f.ctl.CreateSnapshot(ctx,
					harness.SnapshotRequest(req.GetName(), volume.GetVolumeId()))
				snapshot = resp.GetSnapshot()
				return err
			}, func() { Expect(f.snapshotIDs(ctx)).To(HaveLen(1)) }},
			{"instance_disk_detach", func() error { return f.unpublish(ctx, volume, "a") },
				func() { f.remains(ctx, volume, "detached") }},
			{"snapshot_delete", func() error {
				return errOf(f.ctl.DeleteSnapshot(ctx,
					&csi.DeleteSnapshotRequest{SnapshotId: snapshot.GetSnapshotId()}))
			}, func() { Expect(f.snapshotIDs(ctx)).To(BeEmpty()) }},
			{"disk_delete", func() error { return f.delete(ctx, volume.GetVolumeId()) },
				func() { Expect(f.disks(ctx)).To(BeEmpty()) }},
		} {
			if lost.TruncateBody == 0 || !strings.HasSuffix(change.operation, "_delete") { // no body
				fault := lost
				fault.Operation, fault.Phase, fault.Times = change.operation, adminapi.After, 1
				f.fault(ctx, fault)
			}
			err := change.call()
			if lost.Response != nil && slices.Contains(decided, change.operation) {
				Expect(err).NotTo(HaveOccurred(), change.operation)
			}
			if err != nil {
				eventually(ctx, change.call)
			}
			change.then()
		}
	}, lostAnswers)

	It("B-10 an attach and a detach converge when the rack cannot read the disk again",
		func(ctx SpecContext) {
			volume := f.volume(ctx)
			node := f.rack.Instance("a").ID
			unread := func(operation string, call func() error) {
				rule := f.fault(ctx, adminapi.Fault{Operation: operation, Phase: adminapi.Reread, Times: 1})
				err := call()
				Expect(codeOf(err)).To(BeElementOf(codes.OK, codes.Unavailable, codes.Aborted),
					"%v", err)
				Expect(f.rack.Admin.Fired(ctx, rule)).To(Equal(1))
			}
			unread("instance_disk_attach", func() error {
				return errOf(f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(volume, node)))
			})
			Expect(f.attached(ctx, "a")).To(ConsistOf(volume.GetVolumeId()))
			f.published(ctx, volume, "a")
			Expect(f.attached(ctx, "a")).To(ConsistOf(volume.GetVolumeId()))

			unread("instance_disk_detach", func() error {
				return errOf(f.ctl.ControllerUnpublishVolume(ctx, harness.UnpublishRequest(volume, node)))
			})
			Expect(stateOf(f.disk(ctx, volume.GetVolumeId()))).To(Equal("detached"))
			expectOK(ctx, f.ctl.ControllerUnpublishVolume, harness.UnpublishRequest(volume, node))
		})

	It("OX-1 a repeated create finds its volume although the quota is used up",
		func(ctx SpecContext) {
			f.switched(ctx, "quota_bytes", harness.GiB, 1024*harness.GiB)
			req := harness.CreateRequest(fresh("quota"))
			first := f.created(ctx, req)
			again := expectOK(ctx, f.ctl.CreateVolume, req)
			Expect(again.GetVolume().GetVolumeId()).To(Equal(first.GetVolumeId()))
			_, err := f.ctl.CreateVolume(ctx, harness.CreateRequest(fresh("quota")))
			expectRefusal(err, codes.ResourceExhausted)
		})

	It("OX-1 a repeated snapshot is found although the quota is used up",
		func(ctx SpecContext) {
			f.switched(ctx, "quota_bytes", 2*harness.GiB, 1024*harness.GiB)
			req := &csi.CreateSnapshotRequest{
				Name: fresh("quota"), SourceVolumeId: f.volume(ctx).GetVolumeId(),
			}
			first := expectOK(ctx, f.ctl.CreateSnapshot, req)
			f.snapshotDeletedLater(first.GetSnapshot().GetSnapshotId())
			again := expectOK(ctx, f.ctl.CreateSnapshot, req)
			Expect(again.GetSnapshot()).To(BeComparableTo(first.GetSnapshot(), protoCmp))
		})
}
