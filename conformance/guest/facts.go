package guest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
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

// With returns the devices that have a serial.
func (f Facts) With(serial string) []Device {
	var found []Device
	for _, d := range f.Devices {
		if d.Serial == serial {
			found = append(found, d)
		}
	}
	return found
}

// Open opens the device for reading, and compares its number.
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

// Facts reads the facts of the instance.
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

// Devices reads from an instance's sysfs the block devices that have a serial. It skips a device
// that disappears in the meantime.
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

// attribute reads a file of sysfs and removes the padding of the firmware's fields.
func attribute(dir, name string) (string, error) {
	text, err := ReadFile(filepath.Join(dir, name))
	return strings.Trim(string(text), "\x00 \n"), err
}
