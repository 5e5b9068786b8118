//go:build linux

package sanity

import (
	"context"
	"fmt"
	"math"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

// change is how a spec's request differs from createRequest's.
type change func(*csi.CreateVolumeRequest)

func withMode(mode csi.VolumeCapability_AccessMode_Mode) change {
	return func(req *csi.CreateVolumeRequest) {
		bad := harness.InMode(mode, harness.Mounted(""))
		// One bad capability among good ones is enough to refuse.
		req.VolumeCapabilities = append(req.VolumeCapabilities, bad)
	}
}

func withMount(mount *csi.VolumeCapability_MountVolume) change {
	return func(req *csi.CreateVolumeRequest) {
		req.VolumeCapabilities[0].AccessType = &csi.VolumeCapability_Mount{Mount: mount}
	}
}

func withRange(required, limit int64) change {
	return func(req *csi.CreateVolumeRequest) {
		req.CapacityRange = &csi.CapacityRange{RequiredBytes: required, LimitBytes: limit}
	}
}

func withParameter(key, value string) change {
	return func(req *csi.CreateVolumeRequest) { req.Parameters = map[string]string{key: value} }
}

func withTopology(requirement *csi.TopologyRequirement) change {
	return func(req *csi.CreateVolumeRequest) { req.AccessibilityRequirements = requirement }
}

var _ = describeController("CreateVolume", fixtureOptions{}, func(f *fixture) {
	describeBadCreates(f)
	describeGoodCreates(f)
	describeRepeatedCreates(f)
})

// describeBadCreates registers the requests that are refused before the rack is asked anything.
func describeBadCreates(f *fixture) {
	const (
		refused    = codes.InvalidArgument
		outOfRange = codes.OutOfRange
	)
	DescribeTable("a bad request does nothing and says why",
		func(ctx SpecContext, bad change, code codes.Code, words ...string) {
			req := harness.CreateRequest(fresh("bad"))
			bad(req)
			Expect(f.calls(ctx, func() {
				_, err := f.ctl.CreateVolume(ctx, req)
				expectRefusal(err, code, words...)
			})).To(BeEmpty())
		},
		Entry("CV-2 a name of 129 bytes", change(func(req *csi.CreateVolumeRequest) {
			req.Name = strings.Repeat("n", 129)
		}), refused, "128"),
		Entry("CV-2 a name with a bell", change(func(req *csi.CreateVolumeRequest) {
			req.Name = "ring\a"
		}), refused),
		Entry("CV-2 a name with a control character of the second set",
			change(func(req *csi.CreateVolumeRequest) { req.Name = "next\u0085line" }), refused),
		Entry("CV-4 a capability without an access mode",
			change(func(req *csi.CreateVolumeRequest) {
				req.VolumeCapabilities[0].AccessMode = nil
			}), refused),
		Entry("CV-4 an unknown access mode",
			withMode(csi.VolumeCapability_AccessMode_UNKNOWN), refused),
		Entry("CV-4 a capability without an access type",
			change(func(req *csi.CreateVolumeRequest) {
				req.VolumeCapabilities[0].AccessType = nil
			}), refused),
		Entry("CV-5 many nodes that read",
			withMode(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY), refused,
			"MULTI_NODE_READER_ONLY"),
		Entry("CV-5 many nodes of which one writes",
			withMode(csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER), refused,
			"MULTI_NODE_SINGLE_WRITER"),
		Entry("B-45 many nodes that write, as ReadWriteMany asks for",
			withMode(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER), refused,
			"MULTI_NODE_MULTI_WRITER"),
		Entry("CV-5 one node that only reads",
			withMode(csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY), refused,
			"SINGLE_NODE_READER_ONLY"),
		Entry("CV-5 an unknown mode", withMode(99), refused, "99"),
		Entry("CV-5 a filesystem that the driver does not make",
			withMount(&csi.VolumeCapability_MountVolume{FsType: "ntfs"}), refused, "ntfs"),
		Entry("CV-5 a mount flag that every node refuses",
			func(req *csi.CreateVolumeRequest) {
				req.VolumeCapabilities[0].GetMount().MountFlags = []string{"noatime", "bind"}
			}, refused, "mount flag 2"),
		Entry("CV-5 mount flags of more than 4 KiB",
			withMount(&csi.VolumeCapability_MountVolume{
				MountFlags: []string{strings.Repeat("f", 4097)},
			}), refused),
		Entry("CV-5 a group to mount for",
			withMount(&csi.VolumeCapability_MountVolume{VolumeMountGroup: "1000"}), refused),
		Entry("CV-6 an unknown parameter", withParameter("color", "red"), refused, "color"),
		Entry("CV-6 a block size that no disk has", withParameter("blockSize", "1024"), refused,
			"blockSize", "512", "4096"),
		Entry("CV-6 a block size that is no number", withParameter("blockSize", "big"), refused,
			"blockSize"),
		Entry("CV-6 an unknown disk type", withParameter("diskType", "floppy"), refused,
			"diskType"),
		Entry("CV-6 an image that is named instead of identified",
			withParameter("imageId", "debian"), refused, "imageId"),
		Entry("CV-6 options for mkfs that are not allowed",
			withParameter("mkfsOptions", "device=/dev/sda"), refused, "mkfsOptions"),
		Entry("CV-7 mutable parameters", change(func(req *csi.CreateVolumeRequest) {
			req.MutableParameters = map[string]string{"iops": "1"}
		}), refused),
		Entry("CV-8 a topology, though none is configured",
			withTopology(&csi.TopologyRequirement{Requisite: []*csi.Topology{
				{Segments: map[string]string{topologyRack: "r1"}},
			}}), refused),
		Entry("CV-11 a negative requirement", withRange(-1, 0), refused),
		Entry("CV-11 a negative limit", withRange(harness.GiB, -1), refused),
		Entry("CV-11 a range of nothing", withRange(0, 0), refused),
		Entry("CV-12 a limit below the requirement", withRange(2*harness.GiB, harness.GiB), outOfRange),
		Entry("CV-12 a range without a whole GiB in it",
			withRange(harness.GiB+harness.GiB/2, harness.GiB+harness.GiB*6/10), outOfRange),
		Entry("CV-12 a limit below the smallest disk", withRange(0, harness.GiB-1), outOfRange),
		Entry("CV-12 more than the largest disk", withRange(1023*harness.GiB+1, 0), outOfRange,
			fmt.Sprint(1023*harness.GiB)),
		Entry("CV-12 a size that overflows when it is rounded", withRange(math.MaxInt64, 0),
			outOfRange),
		Entry("CV-13 a clone of a volume", change(func(req *csi.CreateVolumeRequest) {
			req.VolumeContentSource = &csi.VolumeContentSource{
				Type: &csi.VolumeContentSource_Volume{
					Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: someUUID},
				},
			}
		}), refused, "not supported"),
		Entry("CV-13 a source of no kind", change(func(req *csi.CreateVolumeRequest) {
			req.VolumeContentSource = &csi.VolumeContentSource{}
		}), refused),
		Entry("CV-14 a snapshot whose ID is no UUID, which the rack would take for a name",
			change(func(req *csi.CreateVolumeRequest) { harness.FromSnapshot(req, "snapshot") }),
			codes.NotFound, "snapshot"),
	)
}

// someUUID is the ID of nothing.
const someUUID = "0e5be1f8-5f0f-4d3c-9a52-2c1f1d4bd20e"

// describeGoodCreates registers what a new volume is like.
func describeGoodCreates(f *fixture) {
	DescribeTable("CV-2 any other name will do", func(ctx SpecContext, name string) {
		volume := f.created(ctx, harness.CreateRequest(name))
		Expect(f.disk(ctx, volume.GetVolumeId()).Name).To(HaveLen(20))
	},
		Entry("CV-2 of 128 bytes", strings.Repeat("Long-Name", 15)[:128]),
		Entry("CV-2 in other scripts and with a tab", "日本/ü\t"),
		Entry("CV-2 of one character", "."),
	)

	DescribeTable("CV-5 what a node can do alone is accepted",
		func(ctx SpecContext, mode csi.VolumeCapability_AccessMode_Mode) {
			for _, capability := range []*csi.VolumeCapability{harness.Mounted(""), harness.Raw()} {
				harness.InMode(mode, capability)
				f.created(ctx, harness.CreateRequest(fresh("mode"), capability))
			}
		},
		Entry("CV-5 one node that writes", csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER),
		Entry("CV-5 one pod that writes",
			csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER),
		Entry("CV-5 several pods of one node that write",
			csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER),
	)

	DescribeTable("D-20 CV-6 a disk without a source is blank, and has the block size",
		func(ctx SpecContext, size string, want int) {
			req := harness.CreateRequest(fresh("blocks"))
			withParameter("blockSize", size)(req)
			volume := f.created(ctx, req)
			disk := f.disk(ctx, volume.GetVolumeId())
			Expect(int(disk.BlockSize)).To(Equal(want))
			Expect(disk.SnapshotId + disk.ImageId).To(BeEmpty())
			Expect(volume.GetVolumeContext()).To(HaveKeyWithValue("blockSize", size))
		},
		Entry("CV-6 512", "512", 512),
		Entry("CV-6 2048", "2048", 2048),
		Entry("CV-6 4096", "4096", 4096),
	)

	It("CV-6 ignores the parameters that Kubernetes adds", func(ctx SpecContext) {
		req := harness.CreateRequest(fresh("kubernetes"))
		req.Parameters = map[string]string{
			"csi.storage.k8s.io/pvc/name": "data", "csi.storage.k8s.io/fstype": "ext4",
		}
		f.created(ctx, req)
	})

	DescribeTable("D-21 CV-12 the size is a whole number of GiB within the range",
		func(ctx SpecContext, required, limit, want int64) {
			req := harness.CreateRequest(fresh("size"))
			withRange(required, limit)(req)
			volume := f.created(ctx, req)
			Expect(volume.GetCapacityBytes()).To(Equal(want))
			Expect(int64(f.disk(ctx, volume.GetVolumeId()).Size)).To(Equal(want))
		},
		Entry("CV-12 rounded up", harness.GiB+harness.GiB/2, int64(0), 2*harness.GiB),
		Entry("CV-12 rounded up to the limit", harness.GiB+1, 2*harness.GiB, 2*harness.GiB),
		Entry("CV-12 as it is", harness.GiB, harness.GiB, harness.GiB),
		Entry("CV-12 the smallest", int64(1), int64(0), harness.GiB),
		Entry("CV-12 the largest", 1023*harness.GiB, int64(0), 1023*harness.GiB),
		Entry("CV-12 as large as a small limit allows", int64(0), 3*harness.GiB+5, 3*harness.GiB),
	)

	It("CV-12 has a default size when none is asked for", func(ctx SpecContext) {
		req := harness.CreateRequest(fresh("default"))
		req.CapacityRange = nil
		size := f.created(ctx, req).GetCapacityBytes()
		Expect(size).To(BeNumerically(">=", harness.GiB))
		Expect(size % harness.GiB).To(BeZero())
	})

	It("CV-22 B-44 is refused without capacity, for which a scheduler can look elsewhere",
		func(ctx SpecContext) {
			f.switched(ctx, "quota_bytes", harness.GiB/2, 1024*harness.GiB)
			_, err := f.ctl.CreateVolume(ctx, harness.CreateRequest(fresh("full")))
			expectRefusal(err, codes.ResourceExhausted)
			Expect(f.disks(ctx)).To(BeEmpty())
		})

	It("CV-23 has no topology when none is configured", func(ctx SpecContext) {
		Expect(f.volume(ctx).GetAccessibleTopology()).To(BeEmpty())
	})

	It("B-1 has an ID and a context far below the limits", func(ctx SpecContext) {
		volume := f.volume(ctx)
		Expect(volume.GetVolumeId()).To(HaveLen(36))
		Expect(volume.GetVolumeContext()).To(HaveKey("diskName"))
		Expect(volume.GetVolumeContext()["diskName"]).To(HaveLen(20))
		published := f.published(ctx, volume, "a")
		for _, context := range []map[string]string{volume.GetVolumeContext(), published} {
			size := 0
			for key, value := range context {
				Expect(len(key)).To(BeNumerically("<=", 128))
				Expect(len(value)).To(BeNumerically("<=", 128))
				size += len(key) + len(value)
			}
			Expect(size).To(BeNumerically("<", 1024))
		}
	})
}

// describeRepeatedCreates registers what a second create of a name gets.
func describeRepeatedCreates(f *fixture) {
	It("D-13 CV-18 a repeated create finds the volume, whatever compatible range it names",
		func(ctx SpecContext) {
			req := harness.CreateRequest(fresh("again"))
			withRange(2*harness.GiB, 4*harness.GiB)(req)
			first := f.created(ctx, req)
			for _, again := range []change{withRange(2*harness.GiB, 4*harness.GiB), withRange(harness.GiB,
				2*harness.GiB),
				withRange(2*harness.GiB, 0), func(req *csi.CreateVolumeRequest) { req.CapacityRange = nil }} {
				again(req)
				resp, err := f.ctl.CreateVolume(ctx, req)
				Expect(err).NotTo(HaveOccurred())
				Expect(resp.GetVolume().GetVolumeId()).To(Equal(first.GetVolumeId()))
				Expect(resp.GetVolume().GetVolumeContext()).To(Equal(first.GetVolumeContext()))
				Expect(resp.GetVolume().GetCapacityBytes()).To(Equal(2 * harness.GiB))
			}
			Expect(f.disks(ctx)).To(HaveLen(1))
		})

	DescribeTable("CV-19 a second create that wants another volume is refused",
		func(ctx SpecContext, other change, word string) {
			req := harness.CreateRequest(fresh("other"))
			withRange(2*harness.GiB, 2*harness.GiB)(req)
			first := f.created(ctx, req)
			before := f.disk(ctx, first.GetVolumeId())
			other(req)
			_, err := f.ctl.CreateVolume(ctx, req)
			expectRefusal(err, codes.AlreadyExists, word)
			Expect(f.disk(ctx, first.GetVolumeId())).To(Equal(before))
		},
		Entry("CV-19 a larger one", withRange(3*harness.GiB, 0), "bytes"),
		Entry("CV-19 a smaller one", withRange(0, harness.GiB), "bytes"),
		Entry("CV-19 one with other blocks", withParameter("blockSize", "512"), "512"),
		Entry("CV-19 one on local storage", withParameter("diskType", "local"), "local"),
	)

	It("CV-19 a second create from a snapshot is refused when the first was blank",
		func(ctx SpecContext) {
			snapshot := f.snapshotted(ctx, f.volume(ctx))
			req := harness.CreateRequest(fresh("blank"))
			f.created(ctx, req)
			_, err := f.ctl.CreateVolume(ctx, harness.FromSnapshot(req, snapshot.GetSnapshotId()))
			expectRefusal(err, codes.AlreadyExists, "source")
		})

	It("CV-19 a disk that somebody else made under the volume's name is not taken over",
		func(ctx SpecContext) {
			name := fresh("taken")
			resp, err := f.ctl.CreateVolume(ctx, harness.CreateRequest(name))
			Expect(err).NotTo(HaveOccurred())
			_, err = f.ctl.DeleteVolume(ctx,
				&csi.DeleteVolumeRequest{VolumeId: resp.GetVolume().GetVolumeId()})
			Expect(err).NotTo(HaveOccurred())
			diskName := resp.GetVolume().GetVolumeContext()["diskName"]
			f.rackDisk(ctx, diskName, f.rack.Project)
			_, err = f.ctl.CreateVolume(ctx, harness.CreateRequest(name))
			expectRefusal(err, codes.AlreadyExists, diskName)
		})

	It("CV-20 a create that meets another of its name under way is aborted",
		func(ctx SpecContext) {
			f.switched(ctx, "create_hold", "1s", "0s")
			req := harness.CreateRequest(fresh("flight"))
			var id string
			errs := atOnce(2, func(context.Context) error {
				resp, err := f.ctl.CreateVolume(ctx, req)
				if err == nil {
					id = resp.GetVolume().GetVolumeId()
				}
				return err
			})
			expectOneAborted(errs)
			f.deletedLater(id)
		})

	It("CV-20 a disk that another controller is still creating is not answered as made",
		func(ctx SpecContext) {
			second := f.controller(ctx, harness.PluginOptions{})
			f.switched(ctx, "create_hold", "2s", "0s")
			req := harness.CreateRequest(fresh("replica"))
			first := inBackground(func() (*csi.CreateVolumeResponse, error) {
				return second.Controller().CreateVolume(ctx, req)
			})
			f.awaitDisk(ctx, "creating")
			short, cancel := context.WithTimeout(ctx, callTimeout/60)
			defer cancel()
			_, err := f.ctl.CreateVolume(short, req)
			Expect(codeOf(err)).To(BeElementOf(codes.Aborted, codes.DeadlineExceeded), "%v", err)
			made := first()
			f.deletedLater(made.GetVolume().GetVolumeId())
			resp, err := f.ctl.CreateVolume(ctx, req)
			Expect(err).NotTo(HaveOccurred())
			Expect(resp.GetVolume().GetVolumeId()).To(Equal(made.GetVolume().GetVolumeId()))
		})

	It("CV-21 a disk that has become faulted is reported and not replaced",
		func(ctx SpecContext) {
			req := harness.CreateRequest(fresh("faulted"))
			volume := f.created(ctx, req)
			f.pretend(ctx, volume, "faulted", "")
			_, err := f.ctl.CreateVolume(ctx, req)
			expectRefusal(err, codes.Internal, "faulted")
			Expect(f.disks(ctx)).To(HaveLen(1))
		})
}
