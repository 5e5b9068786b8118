//go:build linux

package crash_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// deviceless is the shape of a lifecycle on a rack that records an attach before the instance has
// the device, and then gives it none (docs/hot-plug.md).
const deviceless = "deviceless"

// leastDeviceless is the minimum number of its points that are tried.
const leastDeviceless = 3

// withoutDevice adds the steps of a volume with data that is attached without a device. A detach
// heals it. Only the attach and the detach have points.
func (l *lifecycle) withoutDevice(v *volume) {
	l.add(step{rpc: "CreateVolume", call: v.create})
	l.add(unwatched(append(v.up(driverB), v.down(driverB)...))...)
	attach, detach := v.up(driverA)[0], v.down(driverA)[2]
	attach.then = func() error { return v.checkDevices(0) }
	l.add(step{rpc: "Fault", call: l.failDevices}, attach, detach,
		step{rpc: "Fault", on: "ends", call: l.mendDevices})
	up := unwatched(v.up(driverA))
	up[0].then = func() error { return v.checkDevices(1) }
	l.add(up...)
	l.add(unwatched(v.down(driverA))...)
	l.add(step{rpc: "DeleteVolume", call: v.delete})
}

// failDevices makes every attach a record without a device.
func (l *lifecycle) failDevices(ctx context.Context) error {
	_, err := l.Rack.Admin.AddFault(ctx, adminapi.Fault{Operation: "instance_disk_attach",
		Device: &adminapi.DeviceFault{Fails: true}})
	return errors.Join(err, l.Rack.Admin.Switch(ctx, map[string]any{
		"hotplug": adminapi.HotplugFull.With(adminapi.RecordFirst)}))
}

func (l *lifecycle) mendDevices(ctx context.Context) error {
	return errors.Join(l.Rack.Admin.ClearFaults(ctx), l.Rack.Admin.Switch(ctx,
		map[string]any{"hotplug": adminapi.HotplugFull}))
}

// checkDevices returns an error unless instance a has so many devices of the volume.
func (v *volume) checkDevices(want int) error {
	devices, err := v.Rack.Instance(driverA).Devices()
	if err != nil {
		return err
	}
	got := 0
	for _, d := range devices {
		if d.Serial == v.created.GetVolumeContext()["diskName"] {
			got++
		}
	}
	if got != want {
		return fmt.Errorf("volume %s is attached with %d devices, want %d", v.name, got, want)
	}
	return nil
}
