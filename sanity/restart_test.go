//go:build linux

package sanity

import (
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// On a real rack the disks keep working while the API is away. So a workload must not notice if
// the simulator ends, in whatever way.
var _ = describeOutage("the rack's API goes away under volumes in use", func(f *nodeFixture) {
	BeforeEach(func(ctx SpecContext) {
		if !f.rack.Running() { // a failed spec left it stopped
			Expect(f.rack.Start(ctx)).To(Succeed())
		}
	})

	DescribeTable("B-38 killed, and the volumes do not notice",
		func(ctx SpecContext, name string) {
			p := f.inUse(ctx, f.volume(ctx, harness.Access(name)), f.a, harness.Access(name))
			Expect(p.write(0)).To(Succeed())

			f.rack.Kill()
			Expect(p.verify(0)).To(Succeed(), "while the rack is away")
			Expect(p.write(1)).To(Succeed(), "while the rack is away")
			Expect(f.rack.Start(ctx)).To(Succeed())

			Expect(p.verify(1)).To(Succeed())
			Expect(p.write(2)).To(Succeed())
			Expect(p.shown()).To(Succeed())
			Expect(p.stage(ctx)).To(Succeed(), "again the same")
			Expect(p.publish(ctx)).To(Succeed(), "again the same")
			f.detached(ctx, p)

			moved := f.inUse(ctx, p.Volume, f.b, harness.Access(name))
			for seed := range 3 {
				Expect(moved.verify(seed)).To(Succeed())
			}
		},
		Entry("killed under ext4", "ext4"), Entry("killed under xfs", "xfs"),
		Entry("killed under btrfs", "btrfs"), Entry("killed under block", "block"))

	DescribeTable("B-38 stopped, and reports the devices in use, and the disks have their data "+
		"when it is started again",
		func(ctx SpecContext, name string) {
			p := f.inUse(ctx, f.volume(ctx, harness.Access(name)), f.a, harness.Access(name))
			Expect(p.writeThrough(0)).To(Succeed())

			ended := f.rack.Terminate()
			if name == "block" { // a block volume is not open
				Expect(ended).To(Succeed())
			} else {
				Expect(ended).To(MatchError(ContainSubstring("still held")))
				Expect(ended).To(MatchError(ContainSubstring(p.Volume.GetVolumeId())))
			}
			Expect(f.rack.Start(ctx)).To(Succeed())
			eventually(ctx, p.shown)
			_ = p.write(1) // it may have no effect

			p.remove(ctx)
			p.stageAndPublish(ctx)
			Expect(p.verify(0)).To(Succeed())
			Expect(p.write(2)).To(Succeed())
			f.detached(ctx, p)
			moved := f.inUse(ctx, p.Volume, f.b, harness.Access(name))
			Expect(moved.verify(0)).To(Succeed())
			Expect(moved.verify(2)).To(Succeed())
		},
		Entry("stopped under ext4", "ext4"), Entry("stopped under xfs", "xfs"),
		Entry("stopped under btrfs", "btrfs"), Entry("stopped under block", "block"))

	It("B-38 and a pod that writes all the time loses no line", func(ctx SpecContext) {
		p := f.inUse(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		pod := p.keepWriting()
		for range 3 {
			f.rack.Kill()
			Expect(f.rack.Start(ctx)).To(Succeed())
		}
		lines, err := pod.stop()
		Expect(err).NotTo(HaveOccurred())
		f.detached(ctx, p)
		moved := f.inUse(ctx, p.Volume, f.b, harness.Mounted(""))
		moved.holdsLines(lines)
	})

	It("B-38 and volumes can be taken off their node meanwhile, and are found where they were",
		func(ctx SpecContext) {
			p := f.inUse(ctx, f.volume(ctx), f.a, harness.Mounted(""))
			Expect(p.write(0)).To(Succeed())
			f.rack.Kill()
			p.remove(ctx)
			Expect(p.stage(ctx)).To(Succeed(), "its device is still there")
			Expect(p.publish(ctx)).To(Succeed())
			Expect(p.verify(0)).To(Succeed())
			p.remove(ctx)
			Expect(f.rack.Start(ctx)).To(Succeed())
			p.stageAndPublish(ctx)
			Expect(p.verify(0)).To(Succeed())
		})
})
