//go:build linux

package sanity

import (
	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
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
		Entry("CV-15 a snapshot and an image", change(func(req *csi.CreateVolumeRequest) {
			withParameter("imageId", someUUID)(harness.FromSnapshot(req, someUUID))
		}), codes.InvalidArgument, "SourceIncompatible"),
	)

	It("CV-22 B-44 is refused without capacity, for which a scheduler can look elsewhere",
		func(ctx SpecContext) {
			f.switched(ctx, "quota_bytes", harness.GiB/2, 1024*harness.GiB)
			_, err := f.ctl.CreateVolume(ctx, harness.CreateRequest(fresh("full")))
			expectRefusal(err, codes.ResourceExhausted)
			Expect(f.disks(ctx)).To(BeEmpty())
		})
})
