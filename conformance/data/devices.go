package data

import (
	"errors"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
)

// checkDevices attaches two volumes of different sizes, and compares the devices in the instance
// with the answers of rack and driver.
func checkDevices(s *checkRun) {
	var uses []*use
	for i := range 2 {
		uses = append(uses, s.attach(s.create(int64(i+1), nil), s.A))
	}
	for _, u := range uses {
		u.compareDevice()
	}
	s.during("after the detach", func() {
		for _, u := range uses {
			u.detach()
		}
	})
}

// compareDevice demands that the instance shows the volume's disk with the rack's size and block
// size.
func (u *use) compareDevice() {
	disk, err := u.Oxide.DiskView(u.ctx,
		oxide.DiskViewParams{Disk: oxide.NameOrId(u.volume.GetVolumeId())})
	if err != nil {
		u.fail("read the disk of volume %s: %s", u.volume.name, rackMessage(err))
	}
	if name := string(disk.Name); name[:min(len(name), 20)] != u.serial() {
		u.fail("the disk of volume %s is named %q on the rack; the driver names it %q", u.volume.name,
			name, u.serial())
	}
	u.awaitDevices(1)
	facts := got[guest.Facts](u.checkRun)(u.guest.Facts(u.ctx))
	info := got[*csi.NodeGetInfoResponse](u.checkRun)(
		csi.NewNodeClient(u.guest).NodeGetInfo(u.ctx, &csi.NodeGetInfoRequest{}))
	var errs []error
	differ := func(what string, shown, want any) {
		if shown != want {
			errs = append(errs, fmt.Errorf("instance %s, the device with the serial %q: expected %s, %v; "+
				"found %v", u.instance, u.serial(), what, want, shown))
		}
	}
	d := facts.With(u.serial())[0]
	u.Log.note("devices of an instance", 1, "devices")
	differ("the size of the rack's disk", d.SizeBytes, int64(disk.Size))
	differ("the block size of the rack's disk", d.BlockSize, int64(disk.BlockSize))
	differ("the size of the driver's volume", d.SizeBytes, u.volume.GetCapacityBytes())
	differ("the id that the driver has of the instance", facts.InstanceID, info.GetNodeId())
	u.must(errors.Join(errs...))
}
