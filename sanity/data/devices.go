package data

import (
	"context"
	"errors"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
)

// checkDevices attaches two volumes of different sizes, and compares the devices that the instance
// shows with what rack and driver say.
func checkDevices(ctx context.Context, b *Bench) error {
	return b.session(ctx, func(s *session) error {
		var uses []*use
		for i := range 2 {
			v, err := s.create(ctx, s.accesses()[0], int64(i+1), nil)
			if err != nil {
				return err
			}
			u, err := s.attach(ctx, v, s.A)
			if err != nil {
				return err
			}
			uses = append(uses, u)
		}
		for _, u := range uses {
			if err := u.compareDevice(ctx); err != nil {
				return err
			}
		}
		for _, u := range uses {
			if err := u.detach(ctx); err != nil {
				return fmt.Errorf("after the detach: %w", err)
			}
		}
		return nil
	})
}

// compareDevice demands that the instance shows the volume's disk as the rack has it.
func (u *use) compareDevice(ctx context.Context) error {
	disk, err := u.Oxide.DiskView(ctx,
		oxide.DiskViewParams{Disk: oxide.NameOrId(u.volume.GetVolumeId())})
	if err != nil {
		return fmt.Errorf("read the disk of volume %s: %s", u.volume.name, rackMessage(err))
	}
	if name := string(disk.Name); name[:min(len(name), 20)] != u.serial() {
		return fmt.Errorf("the disk of volume %s is named %q on the rack; the driver names it %q",
			u.volume.name, name, u.serial())
	}
	if err := u.awaitDevices(ctx, 1); err != nil {
		return err
	}
	facts, err := u.guest.Facts(ctx)
	if err != nil {
		return err
	}
	info, err := u.node().NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	if err != nil {
		return err
	}
	var errs []error
	differ := func(what string, shown, want any) {
		if shown != want {
			errs = append(errs, fmt.Errorf("instance %s, the device with the serial %q: expected %s, %v; "+
				"found %v", u.instance, u.serial(), what, want, shown))
		}
	}
	d := facts.With(u.serial())[0]
	differ("the size of the rack's disk", d.SizeBytes, int64(disk.Size))
	differ("the block size of the rack's disk", d.BlockSize, int64(disk.BlockSize))
	differ("the size of the driver's volume", d.SizeBytes, u.volume.GetCapacityBytes())
	differ("the id that the driver has of the instance", facts.InstanceID, info.GetNodeId())
	return errors.Join(errs...)
}
