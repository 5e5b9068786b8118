//go:build linux

package sanity

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// impatience is the time for which the node service of some specs waits for a device.
const impatience = 500 * time.Millisecond

// impatientNode starts a node service that gives up soon.
func (f *nodeFixture) impatientNode(ctx context.Context) *node {
	GinkgoHelper()
	return f.node(ctx, "a", harness.PluginOptions{
		Args: []string{"--device-timeout=" + impatience.String()},
	})
}

// attachedByHand attaches a disk as an administrator does, and detaches it when the spec ends.
func (f *rackFixture) attachedByHand(ctx context.Context, disk, instance string) {
	GinkgoHelper()
	Expect(f.rack.AttachDisk(ctx, disk, f.rack.Instance(instance).ID)).To(Succeed())
	DeferCleanup(func(ctx SpecContext) { f.detachByHand(ctx, disk, instance) },
		NodeTimeout(callTimeout))
}

// detachByHand detaches a disk from an instance that may still use it. A detached disk stays
// detached.
func (f *rackFixture) detachByHand(ctx context.Context, disk, instance string) {
	GinkgoHelper()
	if err := f.rack.DetachDisk(ctx, disk, f.rack.Instance(instance).ID); err != nil {
		Expect(stateOf(f.disk(ctx, disk))).To(Equal("detached"), "%v", err)
	}
}

var _ = describeOutage("a device", func(f *nodeFixture) {
	describeEqualSerials(f)
	describeYank(f)
})

// expectGone demands that nothing exists at a path.
func expectGone(path string) {
	GinkgoHelper()
	_, err := os.Lstat(path)
	Expect(errors.Is(err, fs.ErrNotExist)).To(BeTrue(), "%s is still there: %v", path, err)
}

func describeEqualSerials(f *nodeFixture) {
	It("NS-6 CP-12 stays hidden when another has its serial, and the driver does not use that one",
		func(ctx SpecContext) {
			const prefix = "twenty-bytes-equal-x"
			one := f.rackDisk(ctx, prefix+"-one", f.rack.Project)
			two := f.rackDisk(ctx, prefix+"-two", f.rack.Project)
			f.attachedByHand(ctx, one.Id, "a")
			f.awaitDevice(ctx, "a", prefix)

			_, err := f.ctl.ControllerPublishVolume(ctx,
				harness.PublishRequest(&csi.Volume{VolumeId: two.Id}, f.a.Instance.ID))
			expectRefusal(err, codes.FailedPrecondition, string(one.Name))
			Expect(stateOf(f.disk(ctx, two.Id))).To(Equal("detached"))

			// A disk that an administrator attaches stays hidden until the instance starts without the
			// other disk.
			f.attachedByHand(ctx, two.Id, "a")
			f.detachByHand(ctx, one.Id, "a")
			impatient := f.impatientNode(ctx)
			p := f.attachedTo(ctx, &csi.Volume{VolumeId: two.Id}, impatient, harness.Mounted(""))
			expectRefusal(p.stage(ctx), codes.NotFound, prefix)
			f.stopInstance(ctx, f.a.Instance.ID)
			f.startInstance(ctx, f.a.Instance.ID)
			eventually(ctx, func() error { return p.stage(ctx) })
			Expect(p.publish(ctx)).To(Succeed())
			Expect(p.write(0)).To(Succeed())
		})
}

func describeYank(f *nodeFixture) {
	DescribeTable("UP-5 B-38 can be cleaned up after it was yanked from a pod, and loses no data",
		func(ctx SpecContext, name string) {
			p := f.inUse(ctx, f.volume(ctx, harness.Access(name)), f.a, harness.Access(name))
			Expect(p.writeThrough(0)).To(Succeed())
			// The pod keeps its raw volume open, so that the device's number cannot go to another disk. A
			// mount has the same effect.
			pod, err := p.data().Open(0, os.O_RDONLY)
			Expect(err).NotTo(HaveOccurred())
			defer pod.Close()
			f.detachByHand(ctx, p.Volume.GetVolumeId(), "a")
			eventually(ctx, func() error {
				if p.shown() == nil {
					return errors.New("the device is still there")
				}
				return nil
			})
			Expect(p.complaints(ctx)).To(Equal(
				[]csi.VolumeHealthErrorType{csi.VolumeHealthErrorType_INACCESSIBLE}))
			_ = p.write(1) // it may seem to succeed, but writes nothing

			// Another node can use the disk while the first still shows its remains.
			moved := f.inUse(ctx, p.Volume, f.b, harness.Access(name))
			Expect(moved.verify(0)).To(Succeed())
			Expect(moved.verify(1)).NotTo(Succeed())
			Expect(moved.writeThrough(2)).To(Succeed())

			Expect(pod.Close()).To(Succeed())
			Expect(p.unpublish(ctx)).To(Succeed())
			expectGone(p.Target)
			Expect(p.unstage(ctx)).To(Succeed())
			Expect(mountsAt(p.Staging)).To(BeEmpty())
			Expect(moved.verify(2)).To(Succeed())
			f.detached(ctx, moved)
			back := f.inUse(ctx, p.Volume, f.a, harness.Access(name))
			Expect(back.verify(0)).To(Succeed())
			Expect(back.verify(2)).To(Succeed())
		},
		Entry("UP-5 ext4", "ext4"), Entry("UP-5 ext3", "ext3"), Entry("UP-5 xfs", "xfs"),
		Entry("UP-5 btrfs", "btrfs"), Entry("UP-5 block", "block"))

	It("NP-8 can be attached to another instance after it was yanked from a pod that does not have "+
		"it open, although the first instance still shows it", func(ctx SpecContext) {
		p := f.inUse(ctx, f.volume(ctx, harness.Raw()), f.a, harness.Raw())
		Expect(p.writeThrough(0)).To(Succeed())
		f.detachByHand(ctx, p.Volume.GetVolumeId(), "a")
		moved := f.inUse(ctx, p.Volume, f.b, harness.Raw())
		Expect(moved.verify(0)).To(Succeed())
		p.remove(ctx)
		expectGone(p.Target)
		Expect(moved.writeThrough(1)).To(Succeed())
		Expect(moved.verify(1)).To(Succeed())
	})
}
