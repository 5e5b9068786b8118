//go:build linux

package sanity

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

var _ = describeController("ControllerPublishVolume", fixtureOptions{rack: withOtherProject},
	func(f *fixture) {
		describeBadAttaches(f)
		describeAttachStates(f)
		describeAttachPlaces(f)
		describeAttachDoubt(f)
	})

func describeBadAttaches(f *fixture) {
	DescribeTable("a bad request does nothing and says why",
		func(ctx SpecContext, bad func(*csi.ControllerPublishVolumeRequest), code codes.Code,
			words ...string) {
			req := harness.PublishRequest(&csi.Volume{VolumeId: someUUID}, someUUID)
			bad(req)
			Expect(f.calls(ctx, func() {
				_, err := f.ctl.ControllerPublishVolume(ctx, req)
				expectRefusal(err, code, words...)
			})).To(BeEmpty())
		},
		Entry("CP-2 a capability without a mode",
			func(req *csi.ControllerPublishVolumeRequest) {
				req.VolumeCapability.AccessMode = nil
			}, codes.InvalidArgument),
		Entry("CP-2 a mode for several nodes", func(req *csi.ControllerPublishVolumeRequest) {
			harness.InMode(
				csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY, req.VolumeCapability)
		}, codes.InvalidArgument, "MULTI_NODE_READER_ONLY"),
		Entry("CP-3 an attachment that only reads",
			func(req *csi.ControllerPublishVolumeRequest) { req.Readonly = true },
			codes.InvalidArgument, "readonly"),
		Entry("CP-4 a volume whose ID is no UUID",
			func(req *csi.ControllerPublishVolumeRequest) { req.VolumeId = "volume" },
			codes.NotFound, "volume"),
		Entry("CP-5 a node whose ID is no UUID",
			func(req *csi.ControllerPublishVolumeRequest) { req.NodeId = "a" },
			codes.NotFound, "a"),
	)

	It("CP-4 says that the volume is missing when the node is missing too",
		func(ctx SpecContext) {
			_, err := f.ctl.ControllerPublishVolume(ctx,
				harness.PublishRequest(&csi.Volume{VolumeId: someUUID}, f.rack.Instance("a").ID))
			expectRefusal(err, codes.NotFound, someUUID)
		})

	It("CP-5 says that there is no such node", func(ctx SpecContext) {
		_, err := f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(f.volume(ctx), someUUID))
		expectRefusal(err, codes.NotFound, someUUID)
	})
}

func describeAttachStates(f *fixture) {
	DescribeTable("OX-3 CP-13 what state the disk is in decides, not the rack's words",
		func(ctx SpecContext, state string, code codes.Code) {
			volume := f.volume(ctx)
			instance := ""
			if state == "detaching" {
				instance = f.rack.Instance("b").ID
			}
			f.pretend(ctx, volume, state, instance)
			f.refuse(ctx, "instance_disk_attach", "", http.StatusBadRequest, "InvalidRequest",
				"no, sorry")
			_, err := f.ctl.ControllerPublishVolume(ctx,
				harness.PublishRequest(volume, f.rack.Instance("a").ID))
			expectRefusal(err, code)
		},
		Entry("CP-13 creating", "creating", codes.Aborted),
		Entry("CP-13 detaching", "detaching", codes.Aborted),
		Entry("CP-13 finalizing", "finalizing", codes.Aborted),
		Entry("CP-13 importing from a URL", "importing_from_url", codes.Aborted),
		Entry("CP-13 importing block by block", "importing_from_bulk_writes", codes.Aborted),
		Entry("CP-13 maintenance, while a snapshot is taken", "maintenance", codes.Aborted),
		Entry("CP-13 faulted", "faulted", codes.FailedPrecondition),
		Entry("CP-13 destroyed, which is gone", "destroyed", codes.NotFound),
	)
}

func describeAttachPlaces(f *fixture) {
	It("CP-6 attaching again where it is attached is a success with the same context",
		func(ctx SpecContext) {
			volume := f.volume(ctx)
			first := f.published(ctx, volume, "a")
			Expect(first).To(HaveKeyWithValue("diskName", volume.GetVolumeContext()["diskName"]))
			Expect(f.published(ctx, volume, "a")).To(Equal(first))
		})

	It("CP-8 a volume of another node stays there, and that node is named",
		func(ctx SpecContext) {
			volume := f.volume(ctx)
			f.published(ctx, volume, "a")
			there := f.rack.Instance("a").ID
			_, err := f.ctl.ControllerPublishVolume(ctx,
				harness.PublishRequest(volume, f.rack.Instance("b").ID))
			expectRefusal(err, codes.FailedPrecondition, there)
			Expect(stateOf(f.disk(ctx, volume.GetVolumeId()))).To(Equal("attached to " + there))
		})

	It("CP-9 one disk more than an instance can hold is refused, until one is detached",
		func(ctx SpecContext) {
			const limit = 12
			node := f.rack.Instance("b").ID
			var volumes []*csi.Volume
			for range limit {
				volume := f.volume(ctx)
				f.published(ctx, volume, "b")
				volumes = append(volumes, volume)
			}
			last := f.volume(ctx)
			_, err := f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(last, node))
			expectRefusal(err, codes.ResourceExhausted)
			_, err = f.ctl.ControllerUnpublishVolume(ctx, harness.UnpublishRequest(volumes[0], node))
			Expect(err).NotTo(HaveOccurred())
			f.published(ctx, last, "b")
		})

	It("CP-9 the limit is the rack's, as the operator says it", func(ctx SpecContext) {
		f.switched(ctx, "disk_limit", 1, 12)
		p := f.controller(ctx, harness.PluginOptions{Env: map[string]string{"OXIDE_MAX_DISKS": "1"}})
		f.published(ctx, f.volume(ctx), "b")
		_, err := p.Controller().ControllerPublishVolume(ctx,
			harness.PublishRequest(f.volume(ctx), f.rack.Instance("b").ID))
		expectRefusal(err, codes.ResourceExhausted)
	})

	It("CP-11 a disk of another project cannot be attached", func(ctx SpecContext) {
		disk := f.rackDisk(ctx, fresh("foreign"), otherProject)
		_, err := f.ctl.ControllerPublishVolume(ctx,
			harness.PublishRequest(&csi.Volume{VolumeId: disk.Id}, f.rack.Instance("a").ID))
		expectRefusal(err, codes.InvalidArgument, "project")
	})

	It("CP-12 a disk that its guest could not tell from another one is not attached",
		func(ctx SpecContext) {
			const prefix = "twenty-bytes-alike-x"
			node := f.rack.Instance("a").ID
			one := &csi.Volume{VolumeId: f.rackDisk(ctx, prefix+"-one", f.rack.Project).Id}
			two := &csi.Volume{VolumeId: f.rackDisk(ctx, prefix+"-two", f.rack.Project).Id}
			f.published(ctx, one, "a")
			_, err := f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(two, node))
			expectRefusal(err, codes.FailedPrecondition, prefix+"-one", prefix+"-two")
			Expect(stateOf(f.disk(ctx, two.GetVolumeId()))).To(Equal("detached"))
			// On another instance it is alone.
			f.published(ctx, two, "b")
		})

	It("UseDiffers: a volume for filesystems is not published as a raw device",
		func(ctx SpecContext) {
			volume := f.volume(ctx)
			req := harness.PublishRequest(volume, f.rack.Instance("a").ID)
			req.VolumeCapability = harness.Raw()
			_, err := f.ctl.ControllerPublishVolume(ctx, req)
			expectReason(err, codes.FailedPrecondition, "UseDiffers")
			Expect(f.attached(ctx, "a")).To(BeEmpty())
			// Published as what it is for, it stays.
			f.published(ctx, volume, "a")
			_, err = f.ctl.ControllerPublishVolume(ctx, req)
			expectReason(err, codes.FailedPrecondition, "UseDiffers")
			Expect(f.attached(ctx, "a")).To(ConsistOf(volume.GetVolumeId()))
		})

	It("D-2 a static volume needs nothing but the UUID of its disk", func(ctx SpecContext) {
		name := fresh("static")
		disk := f.rackDisk(ctx, name, f.rack.Project)
		published := f.published(ctx, &csi.Volume{VolumeId: disk.Id}, "a")
		Expect(published).To(HaveKeyWithValue("diskName", name))
		f.awaitDevice(ctx, "a", name)
	})
}

// describeAttachDoubt registers calls that meet others, or no answer.
func describeAttachDoubt(f *fixture) {
	It("CP-14 a publish that is under way is not begun twice", func(ctx SpecContext) {
		volume := f.volume(ctx)
		node := f.rack.Instance("a").ID
		f.fault(ctx,
			adminapi.Fault{Operation: "instance_disk_attach", Phase: adminapi.Before,
				Delay: adminapi.Duration(time.Second), Times: 1})
		expectOneAborted(atOnce(2, func(context.Context) error {
			_, err := f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(volume, node))
			return err
		}))
		f.unpublishedLater(volume, node)
	})

	It("CP-15 a publish that meets its deadline goes on where it was", func(ctx SpecContext) {
		volume := f.volume(ctx)
		node := f.rack.Instance("a").ID
		f.fault(ctx,
			adminapi.Fault{Operation: "instance_disk_attach", Phase: adminapi.After,
				Hang: adminapi.Duration(30 * time.Second), Times: 1})
		short, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_, err := f.ctl.ControllerPublishVolume(short, harness.PublishRequest(volume, node))
		expectRefusal(err, codes.DeadlineExceeded)
		eventually(ctx, func() error {
			_, err := f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(volume, node))
			if err != nil && codeOf(err) != codes.Aborted {
				Expect(err).NotTo(HaveOccurred())
			}
			return err
		})
		f.unpublishedLater(volume, node)
		Expect(f.attached(ctx, "a")).To(ConsistOf(volume.GetVolumeId()))
	})
}

// attached lists the disks of an instance, as the rack has it.
func (f *rackFixture) attached(ctx context.Context, instance string) []string {
	GinkgoHelper()
	disks, err := f.rack.Client.InstanceDiskListAllPages(ctx, oxide.InstanceDiskListParams{
		Instance: oxide.NameOrId(f.rack.Instance(instance).ID)})
	Expect(err).NotTo(HaveOccurred())
	ids := []string{}
	for _, disk := range disks {
		ids = append(ids, disk.Id)
	}
	return ids
}

var _ = describeController("ControllerUnpublishVolume", fixtureOptions{}, func(f *fixture) {
	describeUnpublish(f)
	describeUnpublishDoubt(f)
})

func describeUnpublish(f *fixture) {
	It("CU-2 without a node detaches from wherever it is", func(ctx SpecContext) {
		volume := f.volume(ctx)
		f.published(ctx, volume, "b")
		_, err := f.ctl.ControllerUnpublishVolume(ctx, harness.UnpublishRequest(volume, ""))
		Expect(err).NotTo(HaveOccurred())
		Expect(stateOf(f.disk(ctx, volume.GetVolumeId()))).To(Equal("detached"))
	})

	It("CU-3 from a node that does not have it leaves it where it is", func(ctx SpecContext) {
		volume := f.volume(ctx)
		f.published(ctx, volume, "a")
		_, err := f.ctl.ControllerUnpublishVolume(ctx,
			harness.UnpublishRequest(volume, f.rack.Instance("b").ID))
		Expect(err).NotTo(HaveOccurred())
		Expect(stateOf(f.disk(ctx, volume.GetVolumeId()))).
			To(Equal("attached to " + f.rack.Instance("a").ID))
	})

	It("CU-3 when it is attached nowhere has nothing to do", func(ctx SpecContext) {
		_, err := f.ctl.ControllerUnpublishVolume(ctx,
			harness.UnpublishRequest(f.volume(ctx), f.rack.Instance("a").ID))
		Expect(err).NotTo(HaveOccurred())
	})

	DescribeTable("CU-4 of a disk that is gone has nothing to do",
		func(ctx SpecContext, id string) {
			_, err := f.ctl.ControllerUnpublishVolume(ctx,
				harness.UnpublishRequest(&csi.Volume{VolumeId: id}, f.rack.Instance("a").ID))
			Expect(err).NotTo(HaveOccurred())
		},
		Entry("CU-4 with a UUID", someUUID),
		Entry("CU-4 with an ID that is none", "volume"),
	)

	DescribeTable("CU-5 from an instance that is gone has nothing to do",
		func(ctx SpecContext, node string) {
			volume := f.volume(ctx)
			_, err := f.ctl.ControllerUnpublishVolume(ctx, harness.UnpublishRequest(volume, node))
			Expect(err).NotTo(HaveOccurred())
			Expect(stateOf(f.disk(ctx, volume.GetVolumeId()))).To(Equal("detached"))
		},
		Entry("CU-5 with a UUID", someUUID),
		Entry("CU-5 with an ID that is none", "node"),
	)

	It("CU-6 cannot be taken for done while the disk says that it is attached there",
		func(ctx SpecContext) {
			volume := f.volume(ctx)
			f.published(ctx, volume, "a")
			f.refuse(ctx, "instance_disk_detach", "", http.StatusNotFound, "ObjectNotFound",
				"not found: instance")
			f.refuse(ctx, "instance_view", "", http.StatusNotFound, "ObjectNotFound",
				"not found: instance")
			_, err := f.ctl.ControllerUnpublishVolume(ctx,
				harness.UnpublishRequest(volume, f.rack.Instance("a").ID))
			expectRefusal(err, codes.NotFound, f.rack.Instance("a").ID)
		})

	It("CU-8 of the boot disk is refused", func(ctx SpecContext) {
		volume := f.volume(ctx)
		instance := f.rack.Instance("b")
		f.published(ctx, volume, "b")
		f.stopInstance(ctx, instance.ID)
		boot := oxide.NameOrId(volume.GetVolumeId())
		f.setBootDisk(ctx, instance.ID, &boot)
		DeferCleanup(func(ctx SpecContext) {
			f.setBootDisk(ctx, instance.ID, nil)
			f.startInstance(ctx, instance.ID)
		}, NodeTimeout(callTimeout))
		_, err := f.ctl.ControllerUnpublishVolume(ctx, harness.UnpublishRequest(volume, instance.ID))
		expectRefusal(err, codes.FailedPrecondition, "boot disk")
		Expect(f.attached(ctx, "b")).To(ConsistOf(volume.GetVolumeId()))
	})

	It("CU-10 is done when the disk can be attached elsewhere at once", func(ctx SpecContext) {
		volume := f.volume(ctx)
		for _, name := range []string{"a", "b", "a"} {
			node := f.rack.Instance(name).ID
			_, err := f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(volume, node))
			Expect(err).NotTo(HaveOccurred())
			_, err = f.ctl.ControllerUnpublishVolume(ctx, harness.UnpublishRequest(volume, node))
			Expect(err).NotTo(HaveOccurred())
			Expect(stateOf(f.disk(ctx, volume.GetVolumeId()))).To(Equal("detached"))
		}
	})
}

func (f *rackFixture) setBootDisk(ctx context.Context, id string, disk *oxide.NameOrId) {
	GinkgoHelper()
	instance, err := f.rack.Client.InstanceView(ctx,
		oxide.InstanceViewParams{Instance: oxide.NameOrId(id)})
	Expect(err).NotTo(HaveOccurred())
	_, err = f.rack.Client.InstanceUpdate(ctx, oxide.InstanceUpdateParams{
		Instance: oxide.NameOrId(id),
		Body: &oxide.InstanceUpdate{
			BootDisk: disk, Memory: instance.Memory, Ncpus: instance.Ncpus,
			EnableJumboFrames: oxide.NewPointer(false),
		},
	})
	Expect(err).NotTo(HaveOccurred())
}

func describeUnpublishDoubt(f *fixture) {
	It("CU-9 that is under way is not begun twice", func(ctx SpecContext) {
		volume := f.volume(ctx)
		f.published(ctx, volume, "a")
		f.fault(ctx,
			adminapi.Fault{Operation: "instance_disk_detach", Phase: adminapi.Before,
				Delay: adminapi.Duration(time.Second), Times: 1})
		expectOneAborted(atOnce(2, func(context.Context) error {
			_, err := f.ctl.ControllerUnpublishVolume(ctx,
				harness.UnpublishRequest(volume, f.rack.Instance("a").ID))
			return err
		}))
	})

	It("CU-9 B-10 that is told OK comes after an attach that is done although its caller gave up",
		func(ctx SpecContext) {
			volume := f.volume(ctx)
			slow := f.fault(ctx, adminapi.Fault{Operation: "instance_disk_attach",
				Phase: adminapi.Before, Delay: adminapi.Duration(2 * time.Second), Times: 1})
			impatient, leave := context.WithCancel(ctx)
			given := inBackground(func() (codes.Code, error) {
				return codeOf(f.publish(impatient, volume, "a")), nil
			})
			eventually(ctx, func() error {
				fired, err := f.rack.Admin.Fired(ctx, slow)
				if err == nil && fired == 0 {
					err = errors.New("the rack has no attach yet")
				}
				return err
			})
			leave()
			Expect(given()).To(Equal(codes.Canceled))
			Expect(f.calls(ctx, func() {
				eventually(ctx, func() error { return f.unpublish(ctx, volume, "a") })
			})).To(ContainElement("instance_disk_attach"))
			f.remains(ctx, volume, "detached")
		})

	It("CU-9 of a disk that is still being attached is for later", func(ctx SpecContext) {
		volume := f.volume(ctx)
		node := f.rack.Instance("a").ID
		f.pretend(ctx, volume, "attaching", node)
		f.refuse(ctx, "instance_disk_detach", "", http.StatusBadRequest, "InvalidRequest",
			"no, sorry")
		_, err := f.ctl.ControllerUnpublishVolume(ctx, harness.UnpublishRequest(volume, node))
		expectRefusal(err, codes.Aborted)
	})

	It("CU-10 is not done while the rack says that the disk is still detaching",
		func(ctx SpecContext) {
			volume := f.volume(ctx)
			node := f.rack.Instance("a").ID
			f.published(ctx, volume, "a")
			disk := f.rackJSON(ctx, "/v1/disks/"+volume.GetVolumeId(), nil)
			disk["state"] = diskState("detaching", node)
			f.answer(ctx, "instance_disk_detach", "", disk)
			f.pretend(ctx, volume, "detaching", node)
			short, cancel := context.WithTimeout(ctx, 2*time.Second)
			defer cancel()
			_, err := f.ctl.ControllerUnpublishVolume(short, harness.UnpublishRequest(volume, node))
			Expect(codeOf(err)).To(BeElementOf(codes.Aborted, codes.DeadlineExceeded),
				fmt.Sprint(err))
		})
}
