package proof

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// InstanceID is the ID of the instance of a [GuestView].
const InstanceID = "5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a01"

// SerialBytes is the number of bytes of a disk's name that NVMe shows as the serial.
const SerialBytes = 20

// GuestView is the view of an instance: a /sys and a /dev with loop devices as its disks. Proofs
// that need no rack use it.
type GuestView struct{ dir string }

// detachLeft releases, once for each process, the devices that killed proofs have left. If a
// device is still in use, the kernel releases it with its last user.
var detachLeft = sync.OnceValue(func() error {
	_, err := loopdev.DetachLeft(context.Background())
	if err != nil && !errors.Is(err, loopdev.ErrBusy) {
		return err
	}
	return nil
})

// NewGuestView makes a guest without disks in a directory.
func NewGuestView(dir string) (GuestView, error) {
	if err := detachLeft(); err != nil {
		return GuestView{}, err
	}
	g := GuestView{dir}
	dmi := g.Sys("class/dmi/id")
	for _, d := range []string{dmi, g.Sys("block"), g.Node("")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return g, err
		}
	}
	for name, value := range map[string]string{
		"sys_vendor": "Oxide\n", "product_name": "OxVM\n", "product_serial": InstanceID + "\n",
		"product_uuid": InstanceID + "\n",
	} {
		if err := os.WriteFile(filepath.Join(dmi, name), []byte(value), 0o444); err != nil {
			return g, err
		}
	}
	return g, nil
}

// Sys returns the path of an entry of the guest's /sys.
func (g GuestView) Sys(path string) string { return filepath.Join(g.dir, "sys", path) }

// Node returns the path of a device node in the guest's /dev.
func (g GuestView) Node(name string) string { return filepath.Join(g.dir, "dev", name) }

// Plug adds a disk in the kernel's order: the node first, so that a program that sees the
// directory in /sys also finds the node. The rack fills the serial's 20 bytes with NULs, and
// sysfs ends the line.
func (g GuestView) Plug(name, diskName string, loop loopdev.Device) error {
	serial := make([]byte, SerialBytes)
	copy(serial, diskName)
	err := errors.Join(
		unix.Mknod(g.Node(name), unix.S_IFBLK|0o660, int(unix.Mkdev(loop.Major, loop.Minor))),
		os.MkdirAll(g.Sys("block/"+name+"/device"), 0o755),
		os.MkdirAll(g.Sys("block/"+name+"/queue"), 0o755))
	if err != nil {
		return fmt.Errorf("show %s to the guest: %w", name, err)
	}
	return errors.Join(
		g.SetAttribute(name, "dev", fmt.Sprintf("%d:%d\n", loop.Major, loop.Minor)),
		g.SetAttribute(name, "size", fmt.Sprintf("%d\n", loop.SizeBytes/512)),
		g.SetAttribute(name, "diskseq", fmt.Sprintf("%d\n", loop.Sequence)),
		g.SetAttribute(name, "queue/logical_block_size", fmt.Sprintf("%d\n", loop.BlockSize)),
		g.SetAttribute(name, "device/serial", string(serial)+"\n"))
}

// SetAttribute sets an attribute of a disk in the guest's sysfs, to any value, also a false
// one.
func (g GuestView) SetAttribute(name, attribute, value string) error {
	path := g.Sys("block/" + name + "/" + attribute)
	if err := os.RemoveAll(path); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(value), 0o444)
}

// Unplug removes all disks.
func (g GuestView) Unplug() error {
	var errs []error
	for _, dir := range []string{g.Sys("block"), g.Node("")} {
		entries, err := os.ReadDir(dir)
		errs = append(errs, err)
		for _, e := range entries {
			errs = append(errs, os.RemoveAll(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}
