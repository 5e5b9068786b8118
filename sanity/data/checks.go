package data

import (
	"context"
	"errors"
	"fmt"
)

// The operations that most checks make.
var (
	ofVolume = []string{"CreateVolume", "DeleteVolume", "disk_create", "disk_delete"}
	ofUse    = append([]string{"ControllerPublishVolume", "ControllerUnpublishVolume",
		"NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume",
		"instance_disk_attach", "instance_disk_detach"}, ofVolume...)
)

// Checks is the table of checks.
func Checks() []Check {
	return []Check{
		{
			ID:     "D01",
			Says:   "a volume keeps every block over unpublish, unstage and detach, and back",
			Why:    "a workload that is restarted would find other data than it left",
			Source: "CSI 1.13, NodeUnstageVolume and ControllerUnpublishVolume; RFD 595",
			Needs:  Needs{Hotplug: true}, Calls: ofUse,
			Run: eachAccess(checkReturn),
		},
	}
}

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
		if err := u.write(ctx, u.pattern(generation), false); err != nil {
			return err
		}
		if err := u.unmount(ctx); err != nil {
			return err
		}
		if err := u.mount(ctx); err != nil {
			return err
		}
		if err := u.verify(ctx, u.pattern(generation)); err != nil {
			return fmt.Errorf("after unstaging and staging: %w", err)
		}
		if err := u.leave(ctx); err != nil {
			return err
		}
		if u, err = s.inUse(ctx, v, s.A); err != nil {
			return err
		}
		if err := u.verify(ctx, u.pattern(generation)); err != nil {
			return fmt.Errorf("after detaching and attaching: %w", err)
		}
	}
	return errors.Join(u.leave(ctx))
}
