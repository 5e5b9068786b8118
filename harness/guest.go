package harness

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"

	"github.com/moby/sys/mountinfo"
)

// GuestDevice is a disk as the kernel of an instance shows it. Number is "major:minor", and Path is
// the path of the device's node.
type GuestDevice struct{ Name, Serial, Number, Path string }

// Devices lists the disks that the guest shows. A disk may disappear during the call.
func (i Instance) Devices() ([]GuestDevice, error) {
	entries, err := os.ReadDir(filepath.Join(i.Guest, "sys/block"))
	if err != nil {
		return nil, err
	}
	var devices []GuestDevice
	for _, e := range entries {
		dir := filepath.Join(i.Guest, "sys/block", e.Name())
		serial, err1 := os.ReadFile(filepath.Join(dir, "device/serial"))
		number, err2 := os.ReadFile(filepath.Join(dir, "dev"))
		if err1 == nil && err2 == nil {
			devices = append(devices, GuestDevice{e.Name(), string(bytes.Trim(serial, "\x00 \n")),
				string(bytes.TrimSpace(number)), filepath.Join(i.Guest, "dev", e.Name())})
		}
	}
	return devices, nil
}

// Device returns the only disk that the guest shows with the name of that disk as its serial.
func (i Instance) Device(diskName string) (GuestDevice, error) {
	serial := diskName[:min(len(diskName), 20)]
	devices, err := i.Devices()
	var found []GuestDevice
	for _, d := range devices {
		if d.Serial == serial {
			found = append(found, d)
		}
	}
	if err == nil && len(found) != 1 {
		err = fmt.Errorf("instance %s has %d devices with serial %q", i.Name, len(found), serial)
	}
	if err != nil {
		return GuestDevice{}, err
	}
	_, err = os.Stat(found[0].Path)
	return found[0], err
}

// MountsAt returns the mounts at a path of this namespace, the lowest first.
func MountsAt(path string) ([]*mountinfo.Info, error) {
	return mountinfo.GetMounts(func(info *mountinfo.Info) (skip, stop bool) {
		return info.Mountpoint != path, false
	})
}
