package data

import (
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
)

// checkReturn takes a volume away from its instance twice. The second round detects a disk that
// returns older content than the last.
func checkReturn(s *checkRun) {
	u := s.newInUse(s.A)
	for generation := uint64(1); generation <= 2; generation++ {
		// Nothing syncs these blocks, because unstaging must write them to the disk.
		u.writeAll(generation, false)
		s.must(u.unmount(s.ctx))
		u.mount()
		s.during("after unstaging and staging", func() { u.verifyAll(generation) })
		u.leave()
		u = s.inUse(u.volume, s.A)
		s.during("after detaching and attaching", func() { u.verifyAll(generation) })
	}
}

// checkMove moves a volume to the other instance and back.
func checkMove(s *checkRun) {
	u := s.newInUse(s.A)
	written := []guest.Pattern{u.pattern(1)}
	for _, g := range []*guest.AgentClient{s.B, s.A} {
		last := written[len(written)-1]
		u.write(false, last)
		u.leave()
		u = s.inUse(u.volume, g)
		s.during("moved to "+g.Name, func() { u.verify(written...) })
		// The volume's own instance shows the device by now. The other instance must never show it.
		away := *u
		if away.guest, away.instance = s.A, "of this machine"; g == s.A {
			away.guest, away.instance = s.B, "the second"
		}
		s.during("moved to "+g.Name+", the volume is in another instance, too", func() {
			away.awaitDevices(0)
		})
		written = append(written, next(last))
	}
}

// checkRestart stops and starts the instance that has a volume attached.
func checkRestart(s *checkRun) {
	u := s.newInUse(s.B)
	u.write(true, u.pattern(1))
	s.must(u.restart(s.ctx))
	u.mount()
	s.during("after the instance was stopped and started", func() { u.verify(u.pattern(1)) })
}

// checkCut detaches a volume that is mounted and being written.
func checkCut(s *checkRun) {
	lost := s.newInUse(s.A)
	synced, dirty := lost.pattern(1), next(lost.pattern(1))
	lost.write(true, synced)
	lost.write(false, dirty)
	lost.detach()
	u := s.inUse(lost.volume, s.B)
	s.during("after a detach while it was mounted", func() { u.verify(synced) })
	report := got[guest.Report](s)(u.guest.Verify(s.ctx, u.place(), dirty))
	for _, f := range report.Findings {
		if f.Kind != guest.Zero && f.Kind != guest.Missing {
			s.fail("block %d, which was written and never synced, is %s: it may be what was "+
				"written, or zero, and nothing else", f.Block, f.What)
		}
	}
}
