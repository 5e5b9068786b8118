//go:build linux

package sanity

import (
	"context"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// change modifies the request that createRequest returns.
type change func(*csi.CreateVolumeRequest)

func withRange(required, limit int64) change {
	return func(req *csi.CreateVolumeRequest) {
		req.CapacityRange = &csi.CapacityRange{RequiredBytes: required, LimitBytes: limit}
	}
}

func withParameter(key, value string) change {
	return func(req *csi.CreateVolumeRequest) { req.Parameters = map[string]string{key: value} }
}

// someUUID is a UUID that belongs to no object.
const someUUID = "0e5be1f8-5f0f-4d3c-9a52-2c1f1d4bd20e"

// The driver's own tests have the table of bad requests. This table has one for each reason.
var _ = describeController("CreateVolume", fixtureOptions{}, func(f *fixture) {
	DescribeTable("a bad request is refused with its reason and without a request to the rack",
		func(ctx SpecContext, bad change, code codes.Code, reason string) {
			req := harness.CreateRequest(fresh("bad"))
			bad(req)
			Expect(f.calls(ctx, func() {
				expectReason(errOf(f.ctl.CreateVolume(ctx, req)), code, reason)
			})).To(BeEmpty())
		},
		Entry("B-45 many nodes that write, as ReadWriteMany asks for",
			change(func(req *csi.CreateVolumeRequest) {
				harness.InMode(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER,
					req.VolumeCapabilities[0])
			}), codes.InvalidArgument, "CapabilityUnsupported"),
		Entry("CV-6 an unknown parameter", withParameter("color", "red"), codes.InvalidArgument,
			"ParameterInvalid"),
		Entry("CV-8 a topology although none is configured",
			change(func(req *csi.CreateVolumeRequest) {
				req.AccessibilityRequirements = &csi.TopologyRequirement{
					Requisite: []*csi.Topology{at(topologyRack, "R1")}}
			}), codes.InvalidArgument, "TopologyInvalid"),
		Entry("CV-11 a range of nothing", withRange(0, 0), codes.InvalidArgument, "CapacityInvalid"),
		Entry("CV-12 a range without a whole GiB in it",
			withRange(harness.GiB+harness.GiB/2, harness.GiB+harness.GiB*6/10), codes.OutOfRange,
			"CapacityOutOfRange"),
		Entry("CV-13 a clone of a volume", change(func(req *csi.CreateVolumeRequest) {
			req.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
				Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: someUUID}}}
		}), codes.InvalidArgument, "SourceUnsupported"),
		Entry("CV-14 a snapshot whose ID is no UUID, which the rack would take for a name",
			change(func(req *csi.CreateVolumeRequest) { harness.FromSnapshot(req, "snapshot") }),
			codes.NotFound, "SnapshotNotFound"),
	)

	It("CV-22 B-44 is refused without capacity, for which a scheduler can look elsewhere",
		func(ctx SpecContext) {
			f.switched(ctx, "quota_bytes", harness.GiB/2, 1024*harness.GiB)
			_, err := f.ctl.CreateVolume(ctx, harness.CreateRequest(fresh("full")))
			expectRefusal(err, codes.ResourceExhausted)
			Expect(f.disks(ctx)).To(BeEmpty())
		})

	It("D-13 CV-18 a repeated create finds the volume, whatever compatible range it names",
		func(ctx SpecContext) {
			req := harness.CreateRequest(fresh("again"))
			withRange(2*harness.GiB, 4*harness.GiB)(req)
			first := f.created(ctx, req)
			for _, again := range []change{withRange(2*harness.GiB, 4*harness.GiB), withRange(harness.GiB,
				2*harness.GiB),
				withRange(2*harness.GiB, 0), func(req *csi.CreateVolumeRequest) { req.CapacityRange = nil }} {
				again(req)
				resp := expectOK(ctx, f.ctl.CreateVolume, req)
				Expect(resp.GetVolume().GetVolumeId()).To(Equal(first.GetVolumeId()))
				Expect(resp.GetVolume().GetVolumeContext()).To(Equal(first.GetVolumeContext()))
				Expect(resp.GetVolume().GetCapacityBytes()).To(Equal(2 * harness.GiB))
			}
			Expect(f.disks(ctx)).To(HaveLen(1))
		})

	It("CV-19 a second create that wants a larger volume is refused", func(ctx SpecContext) {
		req := harness.CreateRequest(fresh("other"))
		first := f.created(ctx, req)
		before := f.disk(ctx, first.GetVolumeId())
		withRange(3*harness.GiB, 0)(req)
		expectRefusal(errOf(f.ctl.CreateVolume(ctx, req)), codes.AlreadyExists, "bytes")
		Expect(f.disk(ctx, first.GetVolumeId())).To(Equal(before))
	})

	It("CV-20 a disk that another controller is still creating is not reported as created",
		func(ctx SpecContext) {
			second := f.controller(ctx, harness.PluginOptions{})
			f.switched(ctx, "create_hold", "1s", "0s")
			req := harness.CreateRequest(fresh("replica"))
			first := inBackground(func() (*csi.CreateVolumeResponse, error) {
				return second.Controller().CreateVolume(ctx, req)
			})
			f.awaitDisk(ctx, "creating")
			short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
			defer cancel()
			_, err := f.ctl.CreateVolume(short, req)
			Expect(codeOf(err)).To(BeElementOf(codes.Aborted, codes.DeadlineExceeded), "%v", err)
			made := first()
			f.deletedLater(made.GetVolume().GetVolumeId())
			resp := expectOK(ctx, f.ctl.CreateVolume, req)
			Expect(resp.GetVolume().GetVolumeId()).To(Equal(made.GetVolume().GetVolumeId()))
		})
})

// In these specs the rack holds the first call for a moment, so that two calls for one object run
// at the same time.
var _ = describeController("of two calls at once", fixtureOptions{}, func(f *fixture) {
	DescribeTable("one is aborted",
		func(ctx SpecContext, operation string, prepare func(ctx context.Context) func() error) {
			call := prepare(ctx)
			f.fault(ctx, adminapi.Fault{Operation: operation, Phase: adminapi.Before,
				Delay: adminapi.Duration(300 * time.Millisecond), Times: 1})
			expectOneAborted(atOnce(2, func(context.Context) error { return call() }))
		},
		Entry("CV-20 of CreateVolume", "disk_create", func(ctx context.Context) func() error {
			req := harness.CreateRequest(fresh("flight"))
			return func() error {
				resp, err := f.ctl.CreateVolume(ctx, req)
				if err == nil {
					f.deletedLater(resp.GetVolume().GetVolumeId())
				}
				return err
			}
		}),
		Entry("CS-7 of CreateSnapshot", "snapshot_create", func(ctx context.Context) func() error {
			req := harness.SnapshotRequest(fresh("flight"), f.volume(ctx).GetVolumeId())
			return func() error {
				resp, err := f.ctl.CreateSnapshot(ctx, req)
				if err == nil {
					f.snapshotDeletedLater(resp.GetSnapshot().GetSnapshotId())
				}
				return err
			}
		}),
		Entry("DS-5 of DeleteSnapshot", "snapshot_delete", func(ctx context.Context) func() error {
			req := &csi.DeleteSnapshotRequest{
				SnapshotId: f.snapshotted(ctx, f.volume(ctx)).GetSnapshotId()}
			return func() error { _, err := f.ctl.DeleteSnapshot(ctx, req); return err }
		}),
		Entry("CP-14 of ControllerPublishVolume", "instance_disk_attach",
			func(ctx context.Context) func() error {
				volume := f.volume(ctx)
				f.unpublishedLater(volume, f.rack.Instance("a").ID)
				return func() error { return f.publish(ctx, volume, "a") }
			}),
		Entry("CU-9 of ControllerUnpublishVolume", "instance_disk_detach",
			func(ctx context.Context) func() error {
				volume := f.volume(ctx)
				f.published(ctx, volume, "a")
				return func() error { return f.unpublish(ctx, volume, "a") }
			}),
		Entry("DV-5 of DeleteVolume", "disk_delete", func(ctx context.Context) func() error {
			req := &csi.DeleteVolumeRequest{VolumeId: f.volume(ctx).GetVolumeId()}
			return func() error { _, err := f.ctl.DeleteVolume(ctx, req); return err }
		}),
	)
})
