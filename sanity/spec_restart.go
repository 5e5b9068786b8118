package sanity

import (
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

// The simulator is no part of a rack that could fail alone: a disk goes on while the rack's API is
// away. So it must not matter to a workload that the simulator ends, in whatever way.
var _ = onNodes("the rack's API goes away under volumes in use", func(s *nodeScene) {
	BeforeEach(func(ctx SpecContext) {
		if !s.rack.proc.running() { // a spec that failed left it so
			Expect(s.rack.Start(ctx)).To(Succeed())
		}
	})

	DescribeTable("B-38 killed, and the volumes do not notice",
		func(ctx SpecContext, name string) {
			p := s.settled(ctx, s.volume(ctx, access(name)), s.a, access(name))
			Expect(p.write(0)).To(Succeed())

			s.rack.Kill()
			Expect(p.holds(0)).To(Succeed(), "while the rack is away")
			Expect(p.write(1)).To(Succeed(), "while the rack is away")
			Expect(s.rack.Start(ctx)).To(Succeed())

			Expect(p.holds(1)).To(Succeed())
			Expect(p.write(2)).To(Succeed())
			Expect(s.a.shows(p.volume.GetVolumeContext()["diskName"])).To(Succeed())
			Expect(p.stage(ctx)).To(Succeed(), "again the same")
			Expect(p.publish(ctx)).To(Succeed(), "again the same")
			s.detached(ctx, p)

			moved := s.settled(ctx, p.volume, s.b, access(name))
			for seed := range uint64(3) {
				Expect(moved.holds(seed)).To(Succeed())
			}
		},
		Entry("killed under ext4", "ext4"), Entry("killed under xfs", "xfs"),
		Entry("killed under btrfs", "btrfs"), Entry("killed under block", "block"))

	DescribeTable("B-38 stopped, which says what it could not take away, and what was on the disks "+
		"is there again",
		func(ctx SpecContext, name string) {
			p := s.settled(ctx, s.volume(ctx, access(name)), s.a, access(name))
			Expect(p.writeThrough(0)).To(Succeed())

			ended := s.rack.proc.stop()
			if name == "block" { // nobody has it open
				Expect(ended).To(Succeed())
			} else {
				Expect(ended).To(MatchError(ContainSubstring("still held")))
				Expect(ended).To(MatchError(ContainSubstring(p.volume.GetVolumeId())))
			}
			Expect(s.rack.Start(ctx)).To(Succeed())
			eventually(ctx, func() error {
				return s.a.shows(p.volume.GetVolumeContext()["diskName"])
			})
			_ = p.write(1) // it may go nowhere

			p.leave(ctx)
			p.settle(ctx)
			Expect(p.holds(0)).To(Succeed())
			Expect(p.write(2)).To(Succeed())
			s.detached(ctx, p)
			moved := s.settled(ctx, p.volume, s.b, access(name))
			Expect(moved.holds(0)).To(Succeed())
			Expect(moved.holds(2)).To(Succeed())
		},
		Entry("stopped under ext4", "ext4"), Entry("stopped under xfs", "xfs"),
		Entry("stopped under btrfs", "btrfs"), Entry("stopped under block", "block"))

	It("B-38 and a pod that writes all the time loses no line", func(ctx SpecContext) {
		p := s.settled(ctx, s.volume(ctx), s.a, mounted())
		pod := p.keepWriting()
		for range 3 {
			s.rack.Kill()
			Expect(s.rack.Start(ctx)).To(Succeed())
		}
		lines, err := pod.stop()
		Expect(err).NotTo(HaveOccurred())
		s.detached(ctx, p)
		moved := s.settled(ctx, p.volume, s.b, mounted())
		moved.holdsLines(lines)
	})

	It("B-38 and volumes can be taken off their node meanwhile, and are found where they were",
		func(ctx SpecContext) {
			p := s.settled(ctx, s.volume(ctx), s.a, mounted())
			Expect(p.write(0)).To(Succeed())
			s.rack.Kill()
			p.leave(ctx)
			Expect(p.stage(ctx)).To(Succeed(), "its device is still there")
			Expect(p.publish(ctx)).To(Succeed())
			Expect(p.holds(0)).To(Succeed())
			p.leave(ctx)
			Expect(s.rack.Start(ctx)).To(Succeed())
			p.settle(ctx)
			Expect(p.holds(0)).To(Succeed())
		})
})
