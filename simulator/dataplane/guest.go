package dataplane

import (
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// The fields of an NVMe controller have these sizes.
const (
	nvmeSerialBytes = 20
	nvmeModelBytes  = 40
)

func (p *Plane) GuestDir(id string) string { return filepath.Join(p.dir, "guests", id) }

func (p *Plane) blockDir(id string) string { return filepath.Join(p.GuestDir(id), "sys", "block") }

func (p *Plane) nodePath(id, name string) string {
	return filepath.Join(p.GuestDir(id), "dev", name)
}

func (p *Plane) hiddenPath(id, diskID string) string {
	return filepath.Join(p.GuestDir(id), "hidden", diskID)
}

// addGuest makes the tree of an instance's guest. One that is there already keeps its devices.
func (p *Plane) AddGuest(g Guest) error {
	dir := p.GuestDir(g.InstanceID)
	dmi := filepath.Join(dir, "sys", "class", "dmi", "id")
	for _, sub := range []string{dmi, p.blockDir(g.InstanceID), filepath.Join(dir, "dev"),
		filepath.Join(dir, "hidden"), filepath.Join(dir, "aside")} {
		if err := os.MkdirAll(sub, 0o755); err != nil {
			return fmt.Errorf("make the guest of instance %s: %w", g.Name, err)
		}
	}
	// A55: the firmware tells the instance's ID, to root only.
	err := errors.Join(
		writeAttribute(dmi, "sys_vendor", "Oxide\n", 0o444),
		writeAttribute(dmi, "product_name", "OxVM\n", 0o444),
		writeAttribute(dmi, "product_serial", g.InstanceID+"\n", 0o400),
		writeAttribute(dmi, "product_uuid", g.InstanceID+"\n", 0o400))
	if err != nil {
		return fmt.Errorf("make the guest of instance %s: %w", g.Name, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.guests[g.InstanceID] == nil {
		h := fnv.New64a()
		h.Write([]byte(g.InstanceID))
		p.guests[g.InstanceID] = &guest{
			random:  rand.New(rand.NewPCG(p.seed, h.Sum64())),
			plugged: map[string]*plugged{},
		}
	}
	return nil
}

// removeGuest takes the guest's devices away, and its tree. One that is gone already is a success.
func (p *Plane) RemoveGuest(id string) error {
	if g := p.allGuests()[id]; g != nil {
		for _, d := range p.devices(g) {
			if err := p.Unplug(id, d.spec.DiskID); err != nil {
				return fmt.Errorf("remove the guest of instance %s: %w", id, err)
			}
		}
	}
	if g := p.lockGuest(id); g != nil {
		defer g.mu.Unlock()
		g.removed = true
		p.mu.Lock()
		delete(p.guests, id)
		p.mu.Unlock()
	}
	if err := os.RemoveAll(p.GuestDir(id)); err != nil {
		return fmt.Errorf("remove the guest of instance %s: %w", id, err)
	}
	return nil
}

// show makes a device visible in its guest: the node first, and then its directory in sysfs at one
// stroke, so that whoever sees the directory finds the rest.
func (p *Plane) show(spec Device, loop loopdev.Device, name string) error {
	dir := p.GuestDir(spec.InstanceID)
	aside := filepath.Join(dir, "aside", name)
	if err := os.RemoveAll(aside); err != nil {
		return err
	}
	if err := writeBlockDevice(aside, spec, loop); err != nil {
		return err
	}
	node := aside + ".node"
	if err := os.RemoveAll(node); err != nil {
		return err
	}
	dev := int(unix.Mkdev(loop.Major, loop.Minor))
	if err := unix.Mknod(node, unix.S_IFBLK|0o660, dev); err != nil {
		return fmt.Errorf("make node %s: %w", node, err)
	}
	// Whatever the umask.
	if err := os.Chmod(node, 0o660); err != nil {
		return err
	}
	if err := os.Rename(node, p.nodePath(spec.InstanceID, name)); err != nil {
		return err
	}
	return os.Rename(aside, filepath.Join(p.blockDir(spec.InstanceID), name))
}

// writeBlockDevice writes what Linux shows of an NVMe namespace. The controller's fields are
// written with their padding of NULs (A56: a rack leaves the model empty): Linux itself stops at
// the first, other tools pass them on, and who reads a serial must cope with both. There is no
// queue/write_cache, as no value of it would be every rack's (A69).
func writeBlockDevice(dir string, spec Device, loop loopdev.Device) error {
	for _, sub := range []string{"queue", "device"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return err
		}
	}
	ro := 0
	if loop.ReadOnly {
		ro = 1
	}
	padded := func(s string, n int) string { return s + strings.Repeat("\x00", n-len(s)) + "\n" }
	var errs []error
	for name, value := range map[string]string{
		"dev":                      fmt.Sprintf("%d:%d\n", loop.Major, loop.Minor),
		"size":                     fmt.Sprintf("%d\n", loop.SizeBytes/512),
		"ro":                       fmt.Sprintf("%d\n", ro),
		"diskseq":                  fmt.Sprintf("%d\n", loop.Sequence),
		"queue/logical_block_size": fmt.Sprintf("%d\n", loop.BlockSize),
		"device/serial":            padded(spec.serial(), nvmeSerialBytes),
		"device/model":             padded("", nvmeModelBytes),
	} {
		errs = append(errs, writeAttribute(dir, name, value, 0o444))
	}
	return errors.Join(errs...)
}

// hide makes a device invisible, in the opposite order.
func (p *Plane) hide(d *plugged) error {
	d.guest.mu.Lock()
	defer d.guest.mu.Unlock()
	if err := p.removeHidden(d.spec); err != nil || d.node == "" {
		return err
	}
	if err := p.removeEntry(d.spec.InstanceID, d.node); err != nil {
		return err
	}
	d.node = ""
	return nil
}

// removeEntry removes what a guest sees under a name; nothing there is a success.
func (p *Plane) removeEntry(instanceID, name string) error {
	aside := filepath.Join(p.GuestDir(instanceID), "aside", name)
	if err := os.RemoveAll(aside); err != nil {
		return err
	}
	err := os.Rename(filepath.Join(p.blockDir(instanceID), name), aside)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return errors.Join(os.RemoveAll(aside), os.RemoveAll(p.nodePath(instanceID, name)))
}

// removeHidden forgets that an equal serial hid the disk.
func (p *Plane) removeHidden(spec Device) error {
	return os.RemoveAll(p.hiddenPath(spec.InstanceID, spec.DiskID))
}

// freeName chooses a name that no device of the guest has. Its number says nothing of the order in
// which the disks were attached (A57). The caller holds the guest.
func (p *Plane) freeName(instanceID string, g *guest) (string, error) {
	for span := 16; ; span *= 2 {
		for _, n := range g.random.Perm(span) {
			name := fmt.Sprintf("nvme%dn1", n)
			_, err := os.Lstat(filepath.Join(p.blockDir(instanceID), name))
			if errors.Is(err, fs.ErrNotExist) {
				return name, nil
			}
			if err != nil {
				return "", err
			}
		}
	}
}

// writeAttribute writes a file as one of sysfs, unless it says so already: somebody may be reading.
func writeAttribute(dir, name, value string, mode os.FileMode) error {
	path := filepath.Join(dir, name)
	if old, err := os.ReadFile(path); err == nil && string(old) == value {
		return nil
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.WriteFile(path, []byte(value), mode)
}
