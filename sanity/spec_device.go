package sanity

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// impatience is how long the node service of some specs waits for a device.
const impatience = 500 * time.Millisecond

// impatientNode is a node service that gives up soon.
func (s *nodeScene) impatientNode(ctx context.Context) *node {
	GinkgoHelper()
	return s.node(ctx, "a", PluginOptions{
		Args: []string{"--device-timeout=" + impatience.String()},
	})
}

// shows says whether the instance sees a device for the disk of that name.
func (n *node) shows(diskName string) error {
	serial := diskName[:min(len(diskName), 20)]
	paths, err := devicesWith(n.instance, serial)
	if err != nil {
		return err
	}
	if len(paths) != 1 {
		return fmt.Errorf("instance %s has %d devices with serial %q",
			n.instance.Name, len(paths), serial)
	}
	return exists(paths[0])
}

// attachedByHand attaches a disk as an administrator does, and detaches it when the spec ends.
func (s *scene) attachedByHand(ctx context.Context, disk, instance string) {
	GinkgoHelper()
	id := oxide.NameOrId(s.rack.Instance(instance).ID)
	_, err := s.rack.Client.InstanceDiskAttach(ctx, oxide.InstanceDiskAttachParams{
		Instance: id, Body: &oxide.DiskPath{Disk: oxide.NameOrId(disk)},
	})
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func(ctx SpecContext) { s.detachByHand(ctx, disk, instance) },
		NodeTimeout(callTimeout))
}

// detachByHand takes a disk away from an instance without asking who uses it. One that is already
// detached stays so.
func (s *scene) detachByHand(ctx context.Context, disk, instance string) {
	GinkgoHelper()
	_, err := s.rack.Client.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
		Instance: oxide.NameOrId(s.rack.Instance(instance).ID),
		Body:     &oxide.DiskPath{Disk: oxide.NameOrId(disk)},
	})
	if err != nil {
		Expect(stateOf(s.disk(ctx, disk))).To(Equal("detached"), "%v", err)
	}
}

var _ = onNodes("a device", func(s *nodeScene) {
	describeAppearance(s)
	describeEqualSerials(s)
	describeYank(s)
})

func describeAppearance(s *nodeScene) {
	attaching := func(how adminapi.DeviceFault) adminapi.Fault {
		return adminapi.Fault{Operation: "instance_disk_attach", Times: 1, Device: &how}
	}

	It("NS-5 is waited for when it appears late", func(ctx SpecContext) {
		s.fault(ctx, attaching(adminapi.DeviceFault{Delay: adminapi.Duration(time.Second)}))
		p := s.placed(ctx, s.volume(ctx), s.a, mounted())
		p.settle(ctx)
		Expect(p.write(0)).To(Succeed())
	})

	It("NS-5 is not found when it never appears, and the serials that are there are told",
		func(ctx SpecContext) {
			bystander := s.placed(ctx, s.volume(ctx), s.a, mounted())
			Expect(bystander.stage(ctx)).To(Succeed())
			s.fault(ctx, attaching(adminapi.DeviceFault{Never: true}))
			p := s.placed(ctx, s.volume(ctx), s.impatientNode(ctx), mounted())
			expectRefusal(p.stage(ctx), codes.NotFound,
				p.volume.GetVolumeContext()["diskName"],
				bystander.volume.GetVolumeContext()["diskName"])
			Expect(mountsAt(p.staging)).To(BeEmpty())

			// What an administrator does then helps.
			s.detached(ctx, p)
			again := s.settled(ctx, p.volume, s.a, mounted())
			Expect(again.write(0)).To(Succeed())
		})

	It("NS-5 is not waited for longer than the caller waits", func(ctx SpecContext) {
		s.fault(ctx, attaching(adminapi.DeviceFault{Never: true}))
		p := s.placed(ctx, s.volume(ctx), s.a, mounted())
		brief, cancel := context.WithTimeout(ctx, impatience)
		defer cancel()
		Expect(codeOf(p.stage(brief))).To(Equal(codes.DeadlineExceeded))
		// And the volume is free for the next call at once.
		eventually(ctx, func() error {
			brief, cancel := context.WithTimeout(ctx, impatience)
			defer cancel()
			if code := codeOf(p.stage(brief)); code != codes.DeadlineExceeded {
				return fmt.Errorf("the volume is %s", code)
			}
			return nil
		})
		// The caller's time ends a moment before the driver's call does, and with it the lock (B-12).
		eventually(ctx, func() error { return p.unpublish(ctx) })
	})

	It("NS-10 is left alone when its size is not the disk's", func(ctx SpecContext) {
		s.fault(ctx, attaching(adminapi.DeviceFault{SizeBytes: gib / 2}))
		p := s.placed(ctx, s.volume(ctx), s.a, mounted())
		eventually(ctx, func() error {
			return s.a.shows(p.volume.GetVolumeContext()["diskName"])
		})
		expectRefusal(p.stage(ctx), codes.FailedPrecondition,
			fmt.Sprint(gib/2), fmt.Sprint(gib))
		Expect(blank(edges(p.device()))).To(BeTrue(), "it was formatted all the same")
	})
}

func describeEqualSerials(s *nodeScene) {
	It("NS-6 is left alone when another one has its serial", func(ctx SpecContext) {
		p := s.placed(ctx, s.volume(ctx), s.a, mounted())
		eventually(ctx, func() error {
			return s.a.shows(p.volume.GetVolumeContext()["diskName"])
		})
		device := p.device()
		twin := "nvme99n1"
		s.a.showTwin(device, twin)
		expectRefusal(p.stage(ctx), codes.FailedPrecondition, device, twin,
			p.volume.GetVolumeContext()["diskName"])
		Expect(blank(edges(device))).To(BeTrue(), "it was formatted all the same")
	})

	It("NS-6 CP-12 stays hidden when another one has its serial, and is not taken for that one",
		func(ctx SpecContext) {
			const prefix = "twenty-bytes-equal-x"
			one := s.rackDisk(ctx, prefix+"-one", s.rack.Project)
			two := s.rackDisk(ctx, prefix+"-two", s.rack.Project)
			s.attachedByHand(ctx, one.Id, "a")
			eventually(ctx, func() error { return s.a.shows(prefix) })

			_, err := s.ctl.ControllerPublishVolume(ctx,
				publishRequest(&csi.Volume{VolumeId: two.Id}, s.a.instance.ID))
			expectRefusal(err, codes.FailedPrecondition, string(one.Name))
			Expect(stateOf(s.disk(ctx, two.Id))).To(Equal("detached"))

			// Attached by hand it is hidden, until the instance starts without the other.
			s.attachedByHand(ctx, two.Id, "a")
			s.detachByHand(ctx, one.Id, "a")
			impatient := s.impatientNode(ctx)
			p := s.placed(ctx, &csi.Volume{VolumeId: two.Id}, impatient, mounted())
			expectRefusal(p.stage(ctx), codes.NotFound, prefix)
			s.stopInstance(ctx, s.a.instance.ID)
			s.startInstance(ctx, s.a.instance.ID)
			eventually(ctx, func() error { return p.stage(ctx) })
			Expect(p.publish(ctx)).To(Succeed())
			Expect(p.write(0)).To(Succeed())
		})
}

// showTwin gives the node a second device with the same serial, as a kernel would that did not
// compare them. It is gone when the spec ends.
func (n *node) showTwin(device, name string) {
	GinkgoHelper()
	block := filepath.Join(n.instance.Guest, "sys/block")
	twin := filepath.Join(block, name)
	Expect(os.CopyFS(twin, os.DirFS(filepath.Join(block, filepath.Base(device))))).To(Succeed())
	DeferCleanup(os.RemoveAll, twin)
	Expect(os.WriteFile(filepath.Join(twin, "dev"), []byte("259:9999\n"), 0o600)).To(Succeed())
}

func describeYank(s *nodeScene) {
	DescribeTable("UP-5 B-38 yanked from under a pod can be cleaned away, and takes nothing with it",
		func(ctx SpecContext, name string) {
			p := s.settled(ctx, s.volume(ctx, access(name)), s.a, access(name))
			Expect(p.writeThrough(0)).To(Succeed())
			// A pod that has a raw volume has it open. That keeps the device's number from going
			// to another disk, as a mount does.
			pod, err := p.open(0, os.O_RDONLY)
			Expect(err).NotTo(HaveOccurred())
			defer pod.Close()
			s.detachByHand(ctx, p.volume.GetVolumeId(), "a")
			eventually(ctx, func() error {
				if p.shows(p.volume.GetVolumeContext()["diskName"]) == nil {
					return errors.New("the device is still there")
				}
				return nil
			})
			Expect(p.complaints(ctx)).To(Equal(
				[]csi.VolumeHealthErrorType{csi.VolumeHealthErrorType_INACCESSIBLE}))
			_ = p.write(1) // it may seem to work, but goes nowhere

			// Another node can have the disk while the first still shows what is left of it.
			moved := s.settled(ctx, p.volume, s.b, access(name))
			Expect(moved.holds(0)).To(Succeed())
			Expect(moved.holds(1)).NotTo(Succeed())
			Expect(moved.writeThrough(2)).To(Succeed())

			Expect(pod.Close()).To(Succeed())
			Expect(p.unpublish(ctx)).To(Succeed())
			expectGone(p.target)
			Expect(p.unstage(ctx)).To(Succeed())
			Expect(mountsAt(p.staging)).To(BeEmpty())
			Expect(moved.holds(2)).To(Succeed())
			s.detached(ctx, moved)
			back := s.settled(ctx, p.volume, s.a, access(name))
			Expect(back.holds(0)).To(Succeed())
			Expect(back.holds(2)).To(Succeed())
		},
		Entry("UP-5 ext4", "ext4"), Entry("UP-5 ext3", "ext3"), Entry("UP-5 xfs", "xfs"),
		Entry("UP-5 btrfs", "btrfs"), Entry("UP-5 block", "block"))

	It("NP-8 yanked from a pod that has it not open is free for another instance, although the "+
		"first still shows what was there", func(ctx SpecContext) {
		p := s.settled(ctx, s.volume(ctx, raw()), s.a, raw())
		Expect(p.writeThrough(0)).To(Succeed())
		s.detachByHand(ctx, p.volume.GetVolumeId(), "a")
		moved := s.settled(ctx, p.volume, s.b, raw())
		Expect(moved.holds(0)).To(Succeed())
		p.leave(ctx)
		expectGone(p.target)
		Expect(moved.writeThrough(1)).To(Succeed())
		Expect(moved.holds(1)).To(Succeed())
	})
}
