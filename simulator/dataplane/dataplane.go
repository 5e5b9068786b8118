// Package dataplane has the bytes of a simulated rack and the view of its guests: the files of
// disks, snapshots and images, the loop devices of the disks of running instances, and for each
// guest a directory that looks like its /sys and /dev. It knows nothing of projects, quotas or
// states.
//
// [Plane] plugs a disk into a guest and unplugs it, also by force. It copies disks without the
// cooperation of their guests. [Plane.Reconcile] adopts or releases the devices of a killed
// simulator. Only one process at a time uses the directory of a plane, which contains
//
//	disks/<uuid>.img      the bytes of a disk; likewise snapshots/ and images/
//	identity              the identity of the rack, which its devices carry
//	guests/<uuid>/sys     the /sys of that instance's guest
//	guests/<uuid>/dev     its /dev
//	guests/<uuid>/hidden  disks that are hidden by another with the same serial
//	guests/<uuid>/aside   entries that are being created or removed
//	tamper                files of the active [Tamper]
//	fuse-…                the disks in the guests, if the disks can fail
//
// With Config.FlakyDisks a guest's devices lead to this process (package flakydisk), which passes
// reads, writes and flushes on to the disk's file or makes them fail. These devices end with the
// process, and the next process creates new ones. A guest that uses a device then loses it.
//
// There is no other state: the kernel keeps the file and serial of each loop device. Devices need
// Linux and root. A plane without them ([NoDevices]) has the same files, on any system and for any
// user; only its guests see no disk.
package dataplane

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/keylock"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/machine"
)

// Plane is a data plane in a directory. Open returns one.
type Plane struct {
	Config
	// Flaky has the disks, if they can fail.
	Flaky Flaky
	// owner is the rack's identity. Its devices carry it, because another rack may have the same
	// paths in a container of its own.
	owner string
	// device is the st_dev of the files in Dir. On overlayfs the directory itself may have another.
	device uint64
	// noDevices is the reason why no disk has a loop device, or nil if disks have one.
	noDevices error
	// machines runs the guests as virtual machines, if it is not nil.
	machines *machine.Host
	// starting lets one machine start at a time, so that two do not count on the same free memory.
	starting sync.Mutex

	// Stop cancels ctx. working counts the devices that will appear later, and waits for machines.
	ctx     context.Context
	cancel  context.CancelFunc
	working sync.WaitGroup

	// disks locks a disk's bytes while its device is created, removed or copied.
	disks keylock.Map

	guests    guests
	tampering tampering
}

// Firmware has the ID and the name that a guest's firmware reports, and for a virtual machine its
// memory and the lines of root's authorized_keys.
type Firmware struct {
	InstanceID, Name string
	MemoryBytes      int64
	Keys             []string
}

// Device describes an attached disk as its guest must see it.
type Device struct {
	InstanceID, DiskID, DiskName string
	SizeBytes                    int64
	BlockSize                    int
	ReadOnly                     bool
	// Local means that the device reports no volatile write cache, and carries discards out (A69).
	Local bool
}

// serial returns the serial number of the disk's NVMe controller: as much of the name as fits
// (A54).
func (d Device) serial() string { return d.DiskName[:min(len(d.DiskName), nvmeSerialBytes)] }

// loopSerial returns a unique serial for the disk's loop device. The guest's serial number does not
// suffice: two racks or two long names may have the same, and mkfs.btrfs takes two loop devices
// with the same serial for one device.
func (d Device) loopSerial() string { return d.serial() + serialEnd + d.DiskID[:8] }

// sizeOr returns the size wrong that a fault gives the device, rounded down to whole blocks. If
// wrong is 0, it returns the device's own size.
func (d Device) sizeOr(wrong int64) int64 {
	if wrong > 0 {
		return wrong / int64(d.BlockSize) * int64(d.BlockSize)
	}
	return d.SizeBytes
}

// serialEnd separates the guest's serial number from the rest of a loop device's serial. No name of
// a disk contains it.
const serialEnd = "/"

// SerialOf returns the serial number that a guest sees for a rack's loop device.
func SerialOf(loop loopdev.Device) string {
	serial, _, _ := strings.Cut(loop.Serial, serialEnd)
	return serial
}

// Fault changes a device: it never appears, appears later, or has another size, or (Fails) the disk
// cannot be plugged. The zero value changes nothing.
type Fault struct {
	Never     bool
	Delay     time.Duration
	SizeBytes int64
	Fails     bool
}

// Devices determines whether guests see their disks as devices.
type Devices string

// The zero value requires devices, so that no test runs without them by accident.
const (
	// NoDevices means that disks are files only.
	NoDevices Devices = "none"
	// DevicesIfPossible means NoDevices if the machine cannot have devices, or the user may not create
	// them.
	DevicesIfPossible Devices = "auto"
)

var errNoDevices = errors.New("the rack was started without devices")

// Config configures a data plane. The fields without a comment are those of a rack's Config in
// package engine.
type Config struct {
	// Dir is an existing directory. Open replaces symbolic links in its path.
	Dir string
	Log *slog.Logger

	Seed                             uint64
	FirstLoop                        int
	Devices                          Devices
	FlakyDisks, NoDiscards, Volatile bool
	Machines, MachineType            string
	// Temporary makes the machines end with this process, however it ends.
	Temporary bool
	// Ended is called for each machine that ends by itself: powered off by its guest, or killed.
	Ended func(instanceID string, poweredOff bool)
	// Removed is called with the ID of each object whose files or guest view were removed. It may be
	// nil.
	Removed func(id string)
}

// wrap adds to an error what has failed; nil stays nil.
func wrap(err *error, format string, args ...any) {
	if *err != nil {
		*err = fmt.Errorf(format+": %w", append(args, *err)...)
	}
}

// Open prepares the directory. If the config requires devices, it returns an error if this machine
// or this directory cannot have them.
func Open(c Config) (_ *Plane, err error) {
	defer wrap(&err, "open the data plane")
	if c.Dir, err = filepath.Abs(c.Dir); err != nil {
		return nil, err
	}
	// The kernel shows the files of its loop devices without symbolic links.
	if c.Dir, err = filepath.EvalSymlinks(c.Dir); err != nil {
		return nil, err
	}
	if c.Removed == nil {
		c.Removed = func(string) {}
	}
	p := &Plane{Config: c}
	p.tampering.plane, p.tampering.undo = p, map[string][]func() error{}
	for _, sub := range append([]string{"guests"}, Kinds...) {
		if err := os.MkdirAll(filepath.Join(p.Dir, sub), 0o755); err != nil {
			return nil, err
		}
	}
	if err := p.flushDir(p.Dir); err != nil {
		return nil, err
	}
	if p.owner, err = p.identify(); err != nil {
		return nil, err
	}
	if c.Machines != "" {
		if p.machines, err = machine.Open(context.Background(), c.Machines); err != nil {
			return nil, err
		}
		p.machines.EndsWithProcess, p.machines.Type = c.Temporary, c.MachineType
		c.Devices = DevicesIfPossible // to release the devices of a rack without machines
	}
	if err := p.findDevices(c.Devices); err != nil {
		return nil, err
	}
	p.Flaky.mark, p.Flaky.path = p.owner+".", p.DiskPath
	if err := p.Flaky.open(p.Dir, c.FlakyDisks); err != nil {
		return nil, err
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	return p, nil
}

// findDevices verifies that disks can have devices, or records why they have none.
func (p *Plane) findDevices(want Devices) (err error) {
	switch want {
	case NoDevices:
		p.noDevices = errNoDevices
		return nil
	case "", DevicesIfPossible:
	default:
		return fmt.Errorf("devices are %q; use %q, %q or nothing", want, NoDevices, DevicesIfPossible)
	}
	if err = loopdev.Available(); err == nil {
		p.device, err = checkNodes(p.Dir)
	}
	if err != nil && want == DevicesIfPossible {
		p.noDevices, err = err, nil
	}
	return err
}

// NoDevices returns the reason why no guest sees a disk, or nil if guests see their disks.
func (p *Plane) NoDevices() error {
	if p.machines != nil {
		return nil
	}
	return p.noDevices
}

// Stop ends the work in the background. The guests keep their devices, and the next plane adopts
// them.
func (p *Plane) Stop() {
	p.cancel()
	p.working.Wait()
	for _, g := range p.guests.all() {
		if m := g.machine.Swap(nil); m != nil {
			_ = m.Release() // this closes only the connection to the machine
		}
	}
}

// Close removes every device from its guest and releases it. A device in use stays, with its
// bytes, until its last user closes it, so that a filesystem on it can be unmounted properly;
// Close returns an error that names it.
func (p *Plane) Close() (err error) {
	defer wrap(&err, "close the data plane")
	errs := []error{p.Tamper(Tamper{})}
	for id, g := range p.guests.all() {
		if g.machine.Load() != nil {
			errs = append(errs, os.WriteFile(p.againPath(id), nil, 0o600), p.Halt(id))
		}
	}
	p.Stop()
	var devices []*plugged
	for _, g := range p.guests.all() {
		devices = append(devices, p.guests.devices(g)...)
	}
	// Wait once for all devices in use instead of once for each.
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	for _, d := range devices {
		errs = append(errs, p.hide(d))
		if d.loop != nil {
			errs = append(errs, d.loop.Detach(ctx))
		}
	}
	return errors.Join(append(errs, p.Flaky.close())...)
}
