// Package dataplane has the bytes and the devices of a simulated rack: the files of disks,
// snapshots and images, the loop devices of running instances' disks, and for each guest a
// directory that looks like its /sys and /dev. It knows no projects, quotas or states.
//
// [Plane] plugs a disk into a guest and unplugs it, even while the guest uses it. It copies a disk
// without asking the guest. [Plane.Reconcile] adopts or releases the devices of a killed simulator.
// Only one process at a time may use a plane's directory, which contains
//
//	disks/<uuid>.img      the bytes of a disk; likewise snapshots/ and images/
//	identity              the identity of the rack, which is the Owner of its loop devices
//	guests/<uuid>/sys     what that instance's guest sees as /sys
//	guests/<uuid>/dev     what the guest sees as /dev
//	guests/<uuid>/hidden  a file for each disk that stays hidden because of its serial (A54)
//	guests/<uuid>/aside   entries of sys and dev that are being created or removed
//	guests/<uuid>/machine the files of its virtual machine (package machine)
//	tamper                files of the active [Tamper]
//	fuse-…                the files behind the guests' devices, with Config.FlakyDisks
//
// With Config.FlakyDisks this process serves the guests' devices (package flakydisk): it passes
// reads, writes and flushes on to the disk's file, or makes them fail. These devices end with the
// process, so the guests lose them, and the next process creates new ones.
//
// The plane stores nothing else: the kernel keeps the file and serial of each loop device. Devices
// need Linux and root. A plane without devices ([NoDevices]) runs on any system and for any user,
// but its guests see no disks.
package dataplane

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/keylock"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/machine"
)

// Plane is a data plane in a directory.
type Plane struct {
	Config
	Files Files
	// Flaky has the disks that can fail, if Config.FlakyDisks is set.
	Flaky Flaky
	VMs   VMs
	// owner is the rack's identity, and the Owner of its loop devices. Paths do not identify a device,
	// because a rack in another container may have files with the same paths.
	owner string
	// device is the st_dev of the files in Dir. On overlayfs, Dir itself may have another st_dev.
	device uint64
	// noDevices is the reason why disks have no loop devices, or nil.
	noDevices error

	// Stop cancels ctx. working has the goroutines that show delayed devices.
	ctx     context.Context
	cancel  context.CancelFunc
	working sync.WaitGroup

	// disks has a lock for each disk whose file or device is being created, removed or copied.
	disks keylock.Map

	guests    guests
	tampering tampering
}

// Firmware has a guest's identity and, for a virtual machine, its memory and root's SSH keys.
type Firmware struct {
	InstanceID, Name string
	MemoryBytes      int64
	Keys             []string
}

// Device describes a disk that is attached to an instance, as the guest must see it.
type Device struct {
	InstanceID, DiskID, DiskName string
	SizeBytes                    int64
	BlockSize                    int
	ReadOnly                     bool
	// Local means that the device reports no volatile write cache, and executes discards (A69).
	Local bool
}

// serial returns the serial number that the guest sees: as much of the disk's name as fits (A54).
func (d Device) serial() string { return d.DiskName[:min(len(d.DiskName), nvmeSerialBytes)] }

// loopSerial returns a unique serial for the disk's loop device. The guest's serial does not
// suffice: disks of two racks, or with long names, may have the same serial, and mkfs.btrfs treats
// devices with the same serial as one device.
func (d Device) loopSerial() string { return d.serial() + serialEnd + d.DiskID[:8] }

func (d Device) sizeOr(wrong int64) int64 {
	if wrong > 0 {
		return wrong / int64(d.BlockSize) * int64(d.BlockSize)
	}
	return d.SizeBytes
}

// serialEnd follows the guest's serial in a loop device's serial. No disk's name contains it.
const serialEnd = "/"

// SerialOf returns the serial number that the guest sees for one of the rack's loop devices.
func SerialOf(loop loopdev.Device) string {
	serial, _, _ := strings.Cut(loop.Serial, serialEnd)
	return serial
}

// Fault changes a device: it never appears, it appears after Delay, or its size is SizeBytes. If
// Fails is true, Plug returns an error. The zero value changes nothing.
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
	// DevicesIfPossible means NoDevices if this machine or this user cannot create devices.
	DevicesIfPossible Devices = "auto"
)

var errNoDevices = errors.New("the rack was started without devices")

// Config configures a data plane. Fields without a comment are explained in engine.Config.
type Config struct {
	// Dir is an existing directory. Open resolves symbolic links in its path.
	Dir string
	Log *slog.Logger

	Seed                             uint64
	FirstLoop                        int
	Devices                          Devices
	FlakyDisks, NoDiscards, Volatile bool
	Machines, MachineType            string
	// Temporary makes the virtual machines end with this process, even if it is killed.
	Temporary bool
	// Ended is called after a guest has powered its virtual machine off, or QEMU was killed.
	Ended func(instanceID string, poweredOff bool)
	// Removed, if not nil, gets the ID of each object whose files or guest view were removed.
	Removed func(id string)
}

func wrap(err *error, format string, args ...any) {
	if *err != nil {
		*err = fmt.Errorf(format+": %w", append(args, *err)...)
	}
}

// Open prepares the directory. If the config requires devices and this machine or this directory
// cannot have them, it returns an error.
func Open(c Config) (_ *Plane, err error) {
	defer wrap(&err, "open the data plane")
	if c.Dir, err = filepath.Abs(c.Dir); err != nil {
		return nil, err
	}
	// The kernel reports the paths of loop devices' files without symbolic links, so resolve Dir's.
	if c.Dir, err = filepath.EvalSymlinks(c.Dir); err != nil {
		return nil, err
	}
	if c.Removed == nil {
		c.Removed = func(string) {}
	}
	p := &Plane{Config: c, Files: Files{c.Dir, c.Volatile, c.Log}}
	p.tampering.plane, p.tampering.undo = p, map[string][]func() error{}
	p.guests.byID = map[string]*guestState{}
	for _, sub := range append([]string{"guests"}, Kinds...) {
		if err := os.MkdirAll(filepath.Join(p.Dir, sub), 0o755); err != nil {
			return nil, err
		}
	}
	if err := p.Files.flushDir(p.Dir); err != nil {
		return nil, err
	}
	if p.owner, err = p.Files.identify(); err != nil {
		return nil, err
	}
	if c.Machines != "" {
		if p.VMs.host, err = machine.Open(context.Background(), c.Machines); err != nil {
			return nil, err
		}
		p.VMs.host.EndsWithProcess, p.VMs.host.Type = c.Temporary, c.MachineType
		c.Devices = DevicesIfPossible // only to release loop devices of an earlier plane without Machines
	}
	if err := p.findDevices(c.Devices); err != nil {
		return nil, err
	}
	p.Flaky.mark, p.Flaky.path = p.owner+".", p.Files.DiskPath
	if err := p.Flaky.open(p.Dir, c.FlakyDisks); err != nil {
		return nil, err
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.VMs.ctx, p.VMs.guests, p.VMs.files = p.ctx, &p.guests, p.Files
	p.VMs.log, p.VMs.ended = c.Log, c.Ended
	return p, nil
}

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
	if p.VMs.host != nil {
		return nil
	}
	return p.noDevices
}

// Stop ends the goroutines of the plane, and leaves the devices in the guests for the next plane.
func (p *Plane) Stop() {
	p.cancel()
	p.working.Wait()
	p.VMs.watching.Wait()
	for _, g := range p.guests.all() {
		if m := g.machine.Swap(nil); m != nil {
			_ = m.Release() // this leaves the virtual machine running
		}
	}
}

// Close removes every device from its guest and releases it. If a device is in use, Close returns
// an error that names it. The device keeps its bytes until its last user closes it, so that the
// guest can unmount the filesystem.
func (p *Plane) Close() (err error) {
	defer wrap(&err, "close the data plane")
	errs := []error{p.Tamper(Tamper{})}
	for id, g := range p.guests.all() {
		if g.machine.Load() != nil {
			errs = append(errs, os.WriteFile(p.VMs.againPath(id), nil, 0o600), p.VMs.Halt(id))
		}
	}
	p.Stop()
	var devices []*plugged
	for _, g := range p.guests.all() {
		devices = append(devices, p.guests.devices(g)...)
	}
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

// VMs has the virtual machines of a plane with Config.Machines. Their disks have no loop devices,
// and their guest views show no devices. A guest that does not run gets its disks when it starts.
type VMs struct {
	// host is nil if the guests are only guest views.
	host   *machine.Host
	guests *guests
	files  Files
	log    *slog.Logger
	ended  func(instanceID string, poweredOff bool)
	// starting is locked while a machine starts, so that no two machines claim the same free memory.
	starting sync.Mutex
	// ctx is the plane's context. watching has the goroutines that wait for the end of a machine.
	ctx      context.Context
	watching sync.WaitGroup
}

const (
	// machineTime limits how long a virtual machine may take to start, stop or make a change.
	machineTime             = 40 * time.Second
	leastMemory, mostMemory = 512 << 20, 1 << 30
)

// ErrNoMemory means that the host lacks the memory for one more virtual machine.
var ErrNoMemory = errors.New("this computer lacks the memory for one more virtual machine")

func (v *VMs) dir(id string) string { return filepath.Join(guestDir(v.files.dir, id), "machine") }

// againPath returns the path of a file by which Close tells Adopt that Close stopped the machine.
func (v *VMs) againPath(id string) string { return filepath.Join(v.dir(id), "again") }

func (v *VMs) disk(d *plugged) machine.Disk {
	return machine.Disk{ID: d.spec.DiskID, Serial: d.spec.serial(),
		Path: v.files.DiskPath(d.spec.DiskID), SizeBytes: d.spec.sizeOr(d.wrongSize),
		BlockSize: d.spec.BlockSize, ReadOnly: d.spec.ReadOnly}
}

// Run starts the virtual machine of a guest, with the disks that were plugged into the guest. If
// the machine runs already, or if the guests are not virtual machines, Run does nothing.
func (v *VMs) Run(f Firmware) error {
	if v.host == nil {
		return nil
	}
	v.starting.Lock()
	defer v.starting.Unlock()
	if g := v.guests.all()[f.InstanceID]; g != nil {
		g.copying.Lock()
		defer g.copying.Unlock()
	}
	g := v.guests.lock(f.InstanceID)
	if g == nil {
		return nil
	}
	defer g.mu.Unlock()
	if g.machine.Load() != nil {
		return nil
	}
	memory := min(max(f.MemoryBytes, leastMemory), mostMemory)
	if err := v.hasMemory(memory); err != nil {
		return err
	}
	var disks []machine.Disk
	for _, d := range v.guests.devices(g) {
		if !d.never {
			disks = append(disks, v.disk(d))
		}
	}
	dir := v.dir(f.InstanceID)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := os.Remove(v.againPath(f.InstanceID)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	ctx, cancel := context.WithTimeout(v.ctx, machineTime)
	defer cancel()
	m, err := v.host.Start(ctx, dir, machine.Guest{ID: f.InstanceID, Name: f.Name, CPUs: 1,
		MemoryBytes: memory, Keys: f.Keys}, disks)
	if err != nil {
		return err
	}
	v.has(f.InstanceID, g, m)
	return nil
}

var memoryLine = regexp.MustCompile(`(?m)^(MemTotal|MemAvailable): +(\d+) kB$`)

// hasMemory fails if there is no room for a new machine with "more" bytes. QEMU allocates memory
// gradually, so each running machine counts as mostMemory.
func (v *VMs) hasMemory(more int64) error {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return err
	}
	return fits(string(text), int64(len(v.SSH()))*mostMemory+more, more)
}

func fits(meminfo string, used, more int64) error {
	has := map[string]int64{}
	for _, m := range memoryLine.FindAllStringSubmatch(meminfo, -1) {
		kib, _ := strconv.ParseInt(m[2], 10, 64) // the pattern matches only digits
		has[m[1]] = kib << 10
	}
	if used > has["MemTotal"]/4*3 || more > has["MemAvailable"] {
		return fmt.Errorf("%w: of %d MiB %d are available, and its machines may take %d",
			ErrNoMemory, has["MemTotal"]>>20, has["MemAvailable"]>>20, used>>20)
	}
	return nil
}

// has() sets a guest's virtual machine and watches for its end. The caller holds the guest's mu.
func (v *VMs) has(id string, g *guestState, m *machine.Machine) {
	g.machine.Store(m)
	v.watching.Go(func() {
		select {
		case <-v.ctx.Done():
			return
		case <-m.Ended():
		}
		_ = m.Release()                       // the QEMU process has ended
		if g.machine.CompareAndSwap(m, nil) { // false if Halt or Stop ended it
			v.ended(id, m.PoweredOff())
		}
	})
}

// Halt stops the virtual machine of a guest, if it has one, without telling the guest.
func (v *VMs) Halt(id string) error {
	g := v.guests.lock(id)
	if g == nil {
		return nil
	}
	defer g.mu.Unlock()
	m := g.machine.Load()
	if err := g.change((*machine.Machine).Stop); err != nil {
		return err // g keeps the virtual machine, because it may still write
	}
	g.machine.CompareAndSwap(m, nil)
	return nil
}

// Reset restarts a guest that is a virtual machine, and reports whether it is one.
func (v *VMs) Reset(id string) (has bool, err error) {
	g := v.guests.all()[id]
	if g == nil || v.host == nil {
		return false, nil
	}
	return true, g.change((*machine.Machine).Reset)
}

func (g *guestState) change(do func(*machine.Machine, context.Context) error) error {
	m := g.machine.Load()
	if m == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), machineTime)
	defer cancel()
	return do(m, ctx)
}

func (v *VMs) changeDisk(d *plugged,
	do func(*machine.Machine, context.Context, machine.Disk) error) error {
	return d.guest.change(func(m *machine.Machine, ctx context.Context) error {
		return do(m, ctx, v.disk(d))
	})
}

// still() pauses a guest's virtual machine, or prevents its start, until the caller calls resume.
func (v *VMs) still(g *guestState) (resume func(), err error) {
	if v.host == nil {
		return func() {}, nil
	}
	g.copying.Lock()
	resume = func() {
		defer g.copying.Unlock()
		err := g.change((*machine.Machine).Resume)
		if err != nil && !errors.Is(err, machine.ErrGone) {
			v.log.Error("a guest cannot continue", slog.String("error", err.Error()))
		}
	}
	err = g.change((*machine.Machine).Pause)
	if err != nil && !errors.Is(err, machine.ErrGone) {
		resume() // despite the error, QEMU may carry out the pause later
		return nil, err
	}
	return resume, nil
}

// Adopt takes over the virtual machines that an earlier plane has started, and stops those of
// instances that are not running. It returns in gone the running instances without a virtual
// machine, and in again those of them whose machine was stopped by the earlier plane's Close.
func (v *VMs) Adopt(running []string) (gone, again []string, err error) {
	found, err := os.ReadDir(guestDir(v.files.dir, ""))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	errs := []error{err}
	for _, e := range found {
		if !e.IsDir() {
			continue
		}
		id := e.Name()
		runs := slices.Contains(running, id) && v.host != nil
		m, err := machine.Find(v.ctx, v.dir(id), id)
		switch {
		case errors.Is(err, fs.ErrNotExist) || err == nil && m == nil:
			if runs {
				gone = append(gone, id)
			}
			if runs && exists(v.againPath(id)) {
				again = append(again, id)
			}
		case err != nil:
			errs = append(errs, fmt.Errorf("find the machine of instance %s: %w", id, err))
		case !runs:
			ctx, cancel := context.WithTimeout(v.ctx, machineTime)
			errs = append(errs, m.Stop(ctx), m.Release())
			cancel()
		default:
			v.log.Info("an instance still runs", slog.String("instance", id))
			if g := v.guests.lock(id); g != nil {
				v.has(id, g, m)
				g.mu.Unlock()
			}
			// The earlier plane may have been killed while it paused or started this virtual machine.
			errs = append(errs, m.Resume(v.ctx))
		}
	}
	return gone, again, errors.Join(errs...)
}

// keep unplugs from each virtual machine every disk that is not attached to its instance.
func (v *VMs) keep(ctx context.Context, attached []Device) error {
	var errs []error
	for id, g := range v.guests.all() {
		var ids []string
		for _, d := range attached {
			if d.InstanceID == id {
				ids = append(ids, d.DiskID)
			}
		}
		if m := g.machine.Load(); m != nil {
			errs = append(errs, m.Keep(ctx, ids...))
		}
	}
	return errors.Join(errs...)
}

// SSH maps the ID of each instance with a virtual machine to the local address of its sshd.
func (v *VMs) SSH() map[string]string {
	addresses := map[string]string{}
	for id, g := range v.guests.all() {
		if m := g.machine.Load(); m != nil {
			addresses[id] = net.JoinHostPort("127.0.0.1", strconv.Itoa(m.SSHPort()))
		}
	}
	return addresses
}

// SSHKey returns the path of root's private key, or "" if the guests are not virtual machines.
func (v *VMs) SSHKey() string {
	if v.host == nil {
		return ""
	}
	return v.host.Key()
}

// Console calls [machine.Console] for a guest. Before the guest's first start it returns no text.
func (v *VMs) Console(id string, from, most int64) (text []byte, end int64, err error) {
	text, end, err = machine.Console(v.dir(id), from, most)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return text, end, err
}
