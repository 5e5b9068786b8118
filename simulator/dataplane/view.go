package dataplane

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// The fields of an NVMe controller have these sizes.
const (
	nvmeSerialBytes = 20
	nvmeModelBytes  = 40
)

// view is the directory that contains the /sys and /dev of one guest.
type view string

func (v view) blockDir() string { return filepath.Join(string(v), "sys", "block") }

func (v view) nodePath(name string) string { return filepath.Join(string(v), "dev", name) }

func (v view) asideDir() string { return filepath.Join(string(v), "aside") }

// hiddenPath returns the path of a file that exists while the disk is hidden by another one with
// the same serial.
func (v view) hiddenPath(diskID string) string { return filepath.Join(string(v), "hidden", diskID) }

// make creates the directory. Devices in it stay.
func (v view) make(instanceID string) error {
	dmi := filepath.Join(string(v), "sys", "class", "dmi", "id")
	for _, sub := range []string{dmi, v.blockDir(), v.nodePath(""), v.hiddenPath(""), v.asideDir()} {
		if err := os.MkdirAll(sub, 0o755); err != nil {
			return err
		}
	}
	// A55: the firmware reports the instance's ID, which only root can read.
	return errors.Join(
		writeAttribute(dmi, "sys_vendor", "Oxide\n", 0o444),
		writeAttribute(dmi, "product_name", "OxVM\n", 0o444),
		writeAttribute(dmi, "product_serial", instanceID+"\n", 0o400),
		writeAttribute(dmi, "product_uuid", instanceID+"\n", 0o400))
}

// show makes a device visible. It creates the node first, and then its directory in sysfs by a
// rename, so that a program that sees the directory also finds the node.
func (v view) show(spec Device, loop loopdev.Device, name string) error {
	aside := filepath.Join(v.asideDir(), name)
	if err := os.RemoveAll(aside); err != nil {
		return err
	}
	if err := writeBlockDevice(aside, spec, loop); err != nil {
		return err
	}
	node := aside + ".node"
	if err := os.Remove(node); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := makeNode(node, loop); err != nil {
		return err
	}
	if err := os.Rename(node, v.nodePath(name)); err != nil {
		return err
	}
	return os.Rename(aside, filepath.Join(v.blockDir(), name))
}

// shows reports whether the guest has exactly this attachment of the device under that name.
func (v view) shows(name string, loop loopdev.Device) bool {
	sequence, err := os.ReadFile(filepath.Join(v.blockDir(), name, "diskseq"))
	return err == nil && string(sequence) == fmt.Sprintf("%d\n", loop.Sequence) &&
		isNodeOf(v.nodePath(name), loop)
}

// deviceName matches the names of the devices. Other files in the directories are the guest's own.
var deviceName = regexp.MustCompile(`^nvme\d+n1$`)

// names returns the names of the devices that have a directory or a node.
func (v view) names() ([]string, error) {
	var names []string
	for _, dir := range []string{v.blockDir(), v.nodePath("")} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if deviceName.MatchString(e.Name()) {
				names = append(names, e.Name())
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

func (v view) remove(name string) error {
	aside := filepath.Join(v.asideDir(), name)
	if err := os.RemoveAll(aside); err != nil {
		return err
	}
	err := os.Rename(filepath.Join(v.blockDir(), name), aside)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	err = os.Remove(v.nodePath(name))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, os.RemoveAll(aside))
}

// clearAside removes the entries that were being created or removed when a simulator ended.
func (v view) clearAside() error {
	return errors.Join(os.RemoveAll(v.asideDir()), os.MkdirAll(v.asideDir(), 0o755))
}

// freeName chooses a name that no device has. Its number does not depend on the order in which
// the disks were attached (A57).
func (v view) freeName(random *rand.Rand) (string, error) {
	for span := 16; ; span *= 2 {
		for _, n := range random.Perm(span) {
			name := fmt.Sprintf("nvme%dn1", n)
			_, err := os.Lstat(filepath.Join(v.blockDir(), name))
			if errors.Is(err, fs.ErrNotExist) {
				return name, nil
			}
			if err != nil {
				return "", err
			}
		}
	}
}

// writeBlockDevice writes the files that Linux shows of an NVMe namespace. The controller's fields
// are padded with NULs, and the model is empty (A56).
func writeBlockDevice(dir string, spec Device, loop loopdev.Device) error {
	for _, sub := range []string{"queue", "device", "holders"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return err
		}
	}
	ro := 0
	if loop.ReadOnly {
		ro = 1
	}
	writeCache := "write back"
	if spec.Local {
		writeCache = "write through"
	}
	padded := func(s string, n int) string { return s + strings.Repeat("\x00", n-len(s)) + "\n" }
	var errs []error
	for name, value := range map[string]string{
		"dev":                      fmt.Sprintf("%d:%d\n", loop.Major, loop.Minor),
		"size":                     fmt.Sprintf("%d\n", loop.SizeBytes/512),
		"ro":                       fmt.Sprintf("%d\n", ro),
		"diskseq":                  fmt.Sprintf("%d\n", loop.Sequence),
		"queue/write_cache":        writeCache + "\n",
		"queue/logical_block_size": fmt.Sprintf("%d\n", loop.BlockSize),
		"device/serial":            padded(spec.serial(), nvmeSerialBytes),
		"device/model":             padded("", nvmeModelBytes),
	} {
		errs = append(errs, writeAttribute(dir, name, value, 0o444))
	}
	return errors.Join(errs...)
}

// writeAttribute writes a file of sysfs. It does not touch a file that already has the value,
// because other programs may read it.
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
