package broken

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// guests are the mutations of a guest's view. Most of them change a device immediately after its
// disk was attached. The next attach creates a correct device again.
var guests = []Mutation{
	{Name: "A54-serial-of-id", DriverSays: "DeviceNotFound",
		Says: "a guest sees the first 20 bytes of a disk's ID as its serial",
		After: plugged(func(disk store.Disk, dir string) error {
			return os.WriteFile(filepath.Join(dir, "device/serial"), []byte(disk.ID[:20]+"\n"), 0o444)
		})},
	{Name: "A54-twice", DriverSays: "DeviceNotUnique",
		Says:   "a guest sees each disk as two devices with one serial",
		Before: hideSecond,
		After: plugged(func(_ store.Disk, dir string) error {
			return os.CopyFS(second(dir), os.DirFS(dir))
		})},
	{Name: "A55-other-serial",
		Says: "the firmware's serial number is not the instance's UUID",
		Guests: func(rack *engine.Simulation, broken bool) error {
			dirs, err := os.ReadDir(rack.Plane().GuestDir(""))
			for _, dir := range dirs {
				id := dir.Name()
				path := filepath.Join(rack.Plane().GuestDir(id), "sys/class/dmi/id/product_serial")
				if broken {
					id = uuid.NewSHA1(uuid.NameSpaceOID, []byte(id)).String()
				}
				err = errors.Join(err, os.WriteFile(path, []byte(id+"\n"), 0o400))
			}
			return err
		}},
	{Name: "A56-spaces", Says: "spaces pad the serials, as the NVMe standard says",
		After: plugged(func(disk store.Disk, dir string) error {
			padded := (disk.Name + strings.Repeat(" ", 20))[:20] + "\n"
			return os.WriteFile(filepath.Join(dir, "device/serial"), []byte(padded), 0o444)
		})},
	{Name: "A57-comes-again", Says: "a detach removes the guest's other devices and adds them again",
		After: func(x *Interception) {
			if !x.Is("instance_disk_detach") {
				return
			}
			for _, disk := range x.disks() {
				if dir := x.device(disk); dir != "" {
					_ = os.WriteFile(filepath.Join(dir, "diskseq"), []byte("1000000\n"), 0o444)
				}
			}
		}},
	{Name: "A69-write-through", Says: "a distributed disk reports no volatile write cache",
		After: plugged(func(_ store.Disk, dir string) error {
			return os.WriteFile(filepath.Join(dir, "queue/write_cache"), []byte("write through\n"), 0o444)
		})},
}

// device returns the directory of a disk's device in the sysfs of the request's instance, or "".
func (x *Interception) device(disk store.Disk) string {
	serials, _ := filepath.Glob(filepath.Join(x.Rack.Plane().GuestDir(x.instance().ID),
		"sys/block/*/device/serial"))
	for _, path := range serials {
		text, err := os.ReadFile(path)
		serial := strings.TrimRight(string(text), "\x00\n")
		dir := filepath.Dir(filepath.Dir(path))
		if err == nil && serial == disk.Name[:min(len(disk.Name), 20)] && !strings.HasSuffix(dir, more) {
			return dir
		}
	}
	return ""
}

// more is the suffix of the name of a disk's second device.
const more = "00n1"

// second returns the directory of the second device for the disk of a device.
func second(dir string) string { return strings.TrimSuffix(dir, "n1") + more }

// hideSecond removes the second device of a disk before the disk is detached.
func hideSecond(x *Interception) {
	if dir := x.device(x.disk()); dir != "" && x.Is("instance_disk_detach") {
		_ = os.RemoveAll(second(dir))
	}
}

// plugged returns a hook that changes a device when its disk has been attached to a running
// instance.
func plugged(change func(disk store.Disk, dir string) error) func(*Interception) {
	return func(x *Interception) {
		if !x.Is("instance_disk_attach") || x.Answer.Status >= 300 {
			return
		}
		if dir := x.device(x.disk()); dir != "" {
			if err := change(x.disk(), dir); err != nil {
				x.Refuse(500, "Internal", "Internal Server Error")
			}
		}
	}
}
