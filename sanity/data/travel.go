package data

import (
	"context"
	"errors"
	"fmt"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/guest"
)

// checkReturn takes a volume away from its instance twice. The second time tells a disk that shows
// what it held earlier from one that shows what it held last.
func checkReturn(ctx context.Context, s *session, access string) error {
	v, err := s.create(ctx, access, 1, nil)
	if err != nil {
		return err
	}
	u, err := s.inUse(ctx, v, s.A)
	if err != nil {
		return err
	}
	for generation := uint64(1); generation <= 2; generation++ {
		// Nothing asks for it to be on the disk: that is what unstaging is for.
		if err := u.writeAll(ctx, generation, false); err != nil {
			return err
		}
		if err := u.unmount(ctx); err != nil {
			return err
		}
		if err := u.mount(ctx); err != nil {
			return err
		}
		if err := u.verifyAll(ctx, generation); err != nil {
			return fmt.Errorf("after unstaging and staging: %w", err)
		}
		if err := u.leave(ctx); err != nil {
			return err
		}
		if u, err = s.inUse(ctx, v, s.A); err != nil {
			return err
		}
		if err := u.verifyAll(ctx, generation); err != nil {
			return fmt.Errorf("after detaching and attaching: %w", err)
		}
	}
	return nil
}

// checkMove moves a volume to the other instance and back.
func checkMove(ctx context.Context, s *session, access string) error {
	v, err := s.create(ctx, access, 1, nil)
	if err != nil {
		return err
	}
	first, err := s.inUse(ctx, v, s.A)
	if err != nil {
		return err
	}
	written := []guest.Pattern{first.pattern(1)}
	for _, g := range []*guest.Guest{s.B, s.A} {
		u := s.uses[len(s.uses)-1]
		if err := u.write(ctx, written[len(written)-1], false); err != nil {
			return err
		}
		if err := u.leave(ctx); err != nil {
			return err
		}
		if u, err = s.inUse(ctx, v, g); err != nil {
			return err
		}
		if err := u.verify(ctx, written...); err != nil {
			return fmt.Errorf("moved to %s: %w", g.Name, err)
		}
		// Its own instance shows the device by now, and the other one never may.
		away := *u
		if away.guest, away.instance = s.A, "of this machine"; g == s.A {
			away.guest, away.instance = s.B, "the second"
		}
		if err := away.awaitDevices(ctx, 0); err != nil {
			return fmt.Errorf("moved to %s, the volume is in another instance, too: %w", g.Name, err)
		}
		written = append(written, next(written[len(written)-1]))
	}
	return nil
}

// checkRestart stops and starts the instance that has a volume.
func checkRestart(ctx context.Context, s *session, access string) error {
	v, err := s.create(ctx, access, 1, nil)
	if err != nil {
		return err
	}
	u, err := s.inUse(ctx, v, s.B)
	if err != nil {
		return err
	}
	if err := u.write(ctx, u.pattern(1), true); err != nil {
		return err
	}
	if err := u.restart(ctx); err != nil {
		return err
	}
	if err := u.mount(ctx); err != nil {
		return err
	}
	if err := u.verify(ctx, u.pattern(1)); err != nil {
		return fmt.Errorf("after the instance was stopped and started: %w", err)
	}
	return nil
}

// checkCut detaches a volume that is mounted and being written.
func checkCut(ctx context.Context, s *session, access string) error {
	v, err := s.create(ctx, access, 1, nil)
	if err != nil {
		return err
	}
	lost, err := s.inUse(ctx, v, s.A)
	if err != nil {
		return err
	}
	synced, dirty := lost.pattern(1), next(lost.pattern(1))
	err = errors.Join(lost.write(ctx, synced, true), lost.write(ctx, dirty, false))
	if err != nil {
		return err
	}
	if err := lost.detach(ctx); err != nil {
		return err
	}
	u, err := s.inUse(ctx, v, s.B)
	if err != nil {
		return err
	}
	if err := u.verify(ctx, synced); err != nil {
		return fmt.Errorf("after a detach while it was mounted: %w", err)
	}
	report, err := u.guest.Verify(ctx, u.place(), dirty)
	if err != nil {
		return err
	}
	for _, f := range report.Findings {
		if f.Kind != guest.Zero && f.Kind != guest.Missing {
			return fmt.Errorf("block %d, which was written and never synced, is %s: it may be what was "+
				"written, or zero, and nothing else", f.Block, f.What)
		}
	}
	return nil
}
