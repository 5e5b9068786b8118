//go:build linux

package corpus_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// The guest's instance, and how many bytes of a disk's name NVMe shows.
const (
	instanceID  = "5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a01"
	serialBytes = 20
)

// guest is what an instance sees: a /sys and a /dev with loop devices as its disks.
type guest struct{ dir string }

func newGuest(dir string) (guest, error) {
	g := guest{dir}
	dmi := g.sys("class/dmi/id")
	for _, d := range []string{dmi, g.sys("block"), g.node("")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return g, err
		}
	}
	for name, value := range map[string]string{
		"sys_vendor": "Oxide\n", "product_name": "OxVM\n", "product_serial": instanceID + "\n",
		"product_uuid": instanceID + "\n",
	} {
		if err := os.WriteFile(filepath.Join(dmi, name), []byte(value), 0o444); err != nil {
			return g, err
		}
	}
	return g, nil
}

func (g guest) sys(path string) string { return filepath.Join(g.dir, "sys", path) }

func (g guest) node(name string) string { return filepath.Join(g.dir, "dev", name) }

// plug shows a disk, as the kernel would: the node first, so that whoever sees the directory finds
// the rest. The rack fills the serial's 20 bytes with NULs, and sysfs ends the line.
func (g guest) plug(name, diskName string, loop loopdev.Device) error {
	serial := make([]byte, serialBytes)
	copy(serial, diskName)
	err := errors.Join(
		unix.Mknod(g.node(name), unix.S_IFBLK|0o660, int(unix.Mkdev(loop.Major, loop.Minor))),
		os.MkdirAll(g.sys("block/"+name+"/device"), 0o755),
		os.MkdirAll(g.sys("block/"+name+"/queue"), 0o755))
	if err != nil {
		return fmt.Errorf("show %s to the guest: %w", name, err)
	}
	return errors.Join(
		g.setAttribute(name, "dev", fmt.Sprintf("%d:%d\n", loop.Major, loop.Minor)),
		g.setAttribute(name, "size", fmt.Sprintf("%d\n", loop.SizeBytes/512)),
		g.setAttribute(name, "diskseq", fmt.Sprintf("%d\n", loop.Sequence)),
		g.setAttribute(name, "queue/logical_block_size", fmt.Sprintf("%d\n", loop.BlockSize)),
		g.setAttribute(name, "device/serial", string(serial)+"\n"))
}

// setAttribute sets an attribute of a disk in the guest's sysfs, true or not.
func (g guest) setAttribute(name, attribute, value string) error {
	path := g.sys("block/" + name + "/" + attribute)
	if err := os.RemoveAll(path); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(value), 0o444)
}

// unplug takes all disks away.
func (g guest) unplug() error {
	var errs []error
	for _, dir := range []string{g.sys("block"), g.node("")} {
		entries, err := os.ReadDir(dir)
		errs = append(errs, err)
		for _, e := range entries {
			errs = append(errs, os.RemoveAll(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}
