package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// Nothing is the argument or the result of a call that has no argument or no result.
type Nothing struct{}

// Facts describes an instance, as seen from inside.
type Facts struct {
	// InstanceID is the ID that the firmware reports by SMBIOS.
	InstanceID string
	Devices    []Device
}

// Device is a block device as the guest's sysfs shows it.
type Device struct {
	// Number is the device number, as major:minor.
	Name, Number, Serial string
	SizeBytes, BlockSize int64
}

// With returns the devices that have this serial.
func (f Facts) With(serial string) []Device {
	return slices.DeleteFunc(slices.Clone(f.Devices),
		func(d Device) bool { return d.Serial != serial })
}

// Open opens the device for reading, and checks that the node has the device's number.
func (d Device) Open(devRoot string) (*os.File, error) {
	file, err := os.OpenFile(filepath.Join(devRoot, d.Name), os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	number, err := deviceNumber(file)
	if err == nil && number != d.Number {
		err = fmt.Errorf("%s is the device %s, expected %s", file.Name(), number, d.Number)
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// Facts reads the instance's ID from the firmware, and its devices from sysfs.
func (a *Agent) Facts(context.Context, Nothing) (Facts, error) {
	a.mu.Lock()
	root := a.config.SysfsRoot
	a.mu.Unlock()
	id, _, errID := Firmware(root)
	if errors.Is(errID, fs.ErrNotExist) {
		errID = nil // the machine has no SMBIOS
	}
	devices, err := Devices(root)
	return Facts{id, devices}, errors.Join(errID, err)
}

// Firmware reads the ID of an instance, and the vendor that its firmware names, from its sysfs.
func Firmware(sysfsRoot string) (instanceID, vendor string, err error) {
	dmi := filepath.Join(sysfsRoot, "class", "dmi", "id")
	instanceID, errID := attribute(dmi, "product_serial")
	vendor, errVendor := attribute(dmi, "sys_vendor")
	return strings.ToLower(instanceID), vendor, errors.Join(errID, errVendor)
}

// Devices returns the block devices with a serial. It skips those that disappear meanwhile.
func Devices(sysfsRoot string) ([]Device, error) {
	dirs, err := filepath.Glob(filepath.Join(sysfsRoot, "block", "*"))
	if err != nil {
		return nil, err
	}
	var devices []Device
	for _, dir := range dirs {
		d, err := blockDevice(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read the block device %s: %w", filepath.Base(dir), err)
		}
		devices = append(devices, d)
	}
	return devices, nil
}

func blockDevice(dir string) (Device, error) {
	d := Device{Name: filepath.Base(dir)}
	texts := map[string]string{}
	for _, name := range []string{"dev", "size", "queue/logical_block_size", "device/serial"} {
		text, err := attribute(dir, name)
		if err != nil {
			return d, err
		}
		texts[name] = text
	}
	sectors, errSize := strconv.ParseInt(texts["size"], 10, 64)
	blockSize, errBlock := strconv.ParseInt(texts["queue/logical_block_size"], 10, 64)
	d.Number, d.Serial = texts["dev"], texts["device/serial"]
	d.SizeBytes, d.BlockSize = sectors*512, blockSize
	return d, errors.Join(errSize, errBlock)
}

// attribute reads a file of sysfs without the firmware's padding of NULs and spaces.
func attribute(dir, name string) (string, error) {
	text, err := ReadFile(filepath.Join(dir, name))
	return strings.Trim(string(text), "\x00 \n"), err
}

// markFile is a file in each directory that this program makes. It contains the purpose.
const markFile = ".oxide-conformance"

// ErrNotOwn means that nothing proves that this program made a directory.
var ErrNotOwn = errors.New("nothing proves that this program made it, so it was left")

// MarkOwn marks a directory that this process has made with its purpose.
func MarkOwn(dir, purpose string) error {
	file, err := os.OpenFile(filepath.Join(dir, markFile), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("mark a directory: %w", err)
	}
	_, err = fmt.Fprintln(file, purpose)
	return errors.Join(err, file.Close())
}

// RemoveOwn removes a directory with its content, or does nothing if it does not exist. It refuses
// a link, a directory that another user owns or may write to, one without the mark of this purpose,
// and one with a mount below it.
func RemoveOwn(path, purpose string) error {
	parent, err := os.OpenRoot(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer parent.Close()
	name := filepath.Base(path)
	named, err := parent.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil || !named.IsDir() || !IsOwn(named) {
		return errors.Join(fmt.Errorf("%s: %w", path, ErrNotOwn), err)
	}
	dir, err := parent.OpenRoot(name)
	if err != nil {
		return err
	}
	defer dir.Close()
	opened, errOpened := dir.Stat(".")
	mark, errMark := dir.Lstat(markFile)
	if err := errors.Join(errOpened, errMark); err != nil || !os.SameFile(named, opened) ||
		!mark.Mode().IsRegular() || !IsOwn(mark) {
		return fmt.Errorf("%s: %w: %w", path, ErrNotOwn, errors.Join(err, errors.New("no mark")))
	}
	if text, err := dir.ReadFile(markFile); err != nil || strings.TrimSpace(string(text)) != purpose {
		return errors.Join(fmt.Errorf("%s: %w: its mark is %.40q", path, ErrNotOwn, text), err)
	}
	mounts, err := harness.MountsBelow(path)
	if err != nil || len(mounts) > 0 {
		return errors.Join(fmt.Errorf("%s was left: mounted below it are %q", path, mounts), err)
	}
	entries, err := fs.ReadDir(dir.FS(), ".")
	for _, entry := range entries {
		if entry.Name() != markFile { // the mark is removed last, so that a second try is possible
			err = errors.Join(err, dir.RemoveAll(entry.Name()))
		}
	}
	if err != nil {
		return err
	}
	return errors.Join(dir.Remove(markFile), parent.Remove(name))
}

// IsOwn reports whether a file belongs to this user and nobody else may write to it.
func IsOwn(info fs.FileInfo) bool {
	st, is := info.Sys().(*syscall.Stat_t)
	return is && int(st.Uid) == os.Geteuid() && info.Mode().Perm()&0o022 == 0
}

// maxFile limits what ReadFile reads.
const maxFile = 16 << 20

// ReadFile reads a regular file. It never blocks on a FIFO or a device.
func ReadFile(path string) ([]byte, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s: expected a regular file; found %s", path, info.Mode())
	}
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.LimitReader(file, maxFile))
}
