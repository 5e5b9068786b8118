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
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/machine"
)

// A plane with Config.Machines runs its guests as virtual machines. Their disks have no loop
// devices, and their views show no devices. A guest that does not run gets its disks when it
// starts.

const (
	// machineTime is how long a change of a machine may take.
	machineTime = 40 * time.Second
	// leastMemory and mostMemory bound the memory of a machine.
	leastMemory, mostMemory = 512 << 20, 1 << 30
)

// ErrNoMemory means that this computer lacks the memory for one more machine.
var ErrNoMemory = errors.New("this computer lacks the memory for one more virtual machine")

func (p *Plane) machineDir(id string) string { return filepath.Join(p.GuestDir(id), "machine") }

// againPath returns the path of a file that exists if the end of a plane has stopped the machine.
func (p *Plane) againPath(id string) string { return filepath.Join(p.machineDir(id), "again") }

func (p *Plane) machineDisk(d *plugged) machine.Disk {
	return machine.Disk{ID: d.spec.DiskID, Serial: d.spec.serial(), Path: p.DiskPath(d.spec.DiskID),
		SizeBytes: d.spec.sizeOr(d.wrongSize), BlockSize: d.spec.BlockSize, ReadOnly: d.spec.ReadOnly}
}

// Run starts the machine of a guest, with the disks that were plugged into it. It does nothing if
// the guests are not virtual machines, or if this one runs.
func (p *Plane) Run(f Firmware) error {
	if p.machines == nil {
		return nil
	}
	p.starting.Lock()
	defer p.starting.Unlock()
	if g := p.guests.all()[f.InstanceID]; g != nil {
		g.copying.Lock()
		defer g.copying.Unlock()
	}
	g := p.guests.lock(f.InstanceID)
	if g == nil {
		return nil
	}
	defer g.mu.Unlock()
	if g.machine.Load() != nil {
		return nil
	}
	memory := min(max(f.MemoryBytes, leastMemory), mostMemory)
	if err := p.hasMemory(memory); err != nil {
		return err
	}
	var disks []machine.Disk
	for _, d := range p.guests.devices(g) {
		if !d.never {
			disks = append(disks, p.machineDisk(d))
		}
	}
	dir := p.machineDir(f.InstanceID)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := os.Remove(p.againPath(f.InstanceID)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	ctx, cancel := context.WithTimeout(p.ctx, machineTime)
	defer cancel()
	m, err := p.machines.Start(ctx, dir, machine.Guest{ID: f.InstanceID, Name: f.Name, CPUs: 1,
		MemoryBytes: memory, Keys: f.Keys}, disks)
	if err != nil {
		return err
	}
	p.has(f.InstanceID, g, m)
	return nil
}

var memoryLine = regexp.MustCompile(`(?m)^(MemTotal|MemAvailable): +(\d+) kB$`)

// hasMemory returns an error unless there is memory for one more machine. All machines of this
// plane together may have three quarters of the computer's memory. It counts all of a machine's
// memory at once, although the machine takes it gradually.
func (p *Plane) hasMemory(more int64) error {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return err
	}
	used := more
	for range p.SSH() {
		used += mostMemory
	}
	return fits(string(text), used, more)
}

// fits returns an error unless a text of /proc/meminfo shows enough memory for a machine of more
// bytes, and for used bytes of all machines together.
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

// has records that a guest has a machine, and waits for the machine's end. The caller holds the
// guest's mu.
func (p *Plane) has(id string, g *guestState, m *machine.Machine) {
	g.machine.Store(m)
	p.working.Go(func() {
		select {
		case <-p.ctx.Done():
			return
		case <-m.Ended():
		}
		_ = m.Release()                       // its process has ended
		if g.machine.CompareAndSwap(m, nil) { // false if the plane has stopped it
			p.Ended(id, m.PoweredOff())
		}
	})
}

// Halt stops the machine of a guest, if it has one, without telling the guest.
func (p *Plane) Halt(id string) error {
	g := p.guests.lock(id)
	if g == nil {
		return nil
	}
	defer g.mu.Unlock()
	m := g.machine.Load()
	if err := g.change((*machine.Machine).Stop); err != nil {
		return err // the machine stays the guest's, because it may still write
	}
	g.machine.CompareAndSwap(m, nil)
	return nil
}

// Reset restarts a guest that has a machine, and reports whether it has one.
func (p *Plane) Reset(id string) (has bool, err error) {
	g := p.guests.all()[id]
	if g == nil || p.machines == nil {
		return false, nil
	}
	return true, g.change((*machine.Machine).Reset)
}

// change changes the machine of a guest, if it has one.
func (g *guestState) change(do func(*machine.Machine, context.Context) error) error {
	m := g.machine.Load()
	if m == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), machineTime)
	defer cancel()
	return do(m, ctx)
}

// changeDisk calls do, which plugs or unplugs a disk, for the machine of the disk's guest. It does
// nothing if the guest has none.
func (p *Plane) changeDisk(d *plugged,
	do func(*machine.Machine, context.Context, machine.Disk) error) error {
	return d.guest.change(func(m *machine.Machine, ctx context.Context) error {
		return do(m, ctx, p.machineDisk(d))
	})
}

// still pauses a guest's machine, if it has one, until resume is called. Meanwhile no machine of
// the guest starts.
func (p *Plane) still(g *guestState) (resume func(), err error) {
	if p.machines == nil {
		return func() {}, nil
	}
	g.copying.Lock()
	resume = func() {
		defer g.copying.Unlock()
		err := g.change((*machine.Machine).Resume)
		if err != nil && !errors.Is(err, machine.ErrGone) {
			p.Log.Error("a guest cannot continue", slog.String("error", err.Error()))
		}
	}
	err = g.change((*machine.Machine).Pause)
	if err != nil && !errors.Is(err, machine.ErrGone) {
		resume() // QEMU may stop it later
		return nil, err
	}
	return resume, nil
}

// Adopt takes over the machines that an earlier plane has started, and stops those of instances
// that are not running. It returns the running instances without a machine (gone), and those of
// them whose machine the end of the earlier plane has stopped (again).
func (p *Plane) Adopt(running []string) (gone, again []string, err error) {
	found, err := os.ReadDir(filepath.Join(p.Dir, "guests"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	errs := []error{err}
	for _, e := range found {
		if !e.IsDir() {
			continue
		}
		id := e.Name()
		runs := slices.Contains(running, id) && p.machines != nil
		m, err := machine.Find(p.ctx, p.machineDir(id), id)
		switch {
		case errors.Is(err, fs.ErrNotExist) || err == nil && m == nil:
			if runs {
				gone = append(gone, id)
			}
			if runs && exists(p.againPath(id)) {
				again = append(again, id)
			}
		case err != nil:
			errs = append(errs, fmt.Errorf("find the machine of instance %s: %w", id, err))
		case !runs:
			ctx, cancel := context.WithTimeout(p.ctx, machineTime)
			errs = append(errs, m.Stop(ctx), m.Release())
			cancel()
		default:
			p.Log.Info("an instance still runs", slog.String("instance", id))
			if g := p.guests.lock(id); g != nil {
				p.has(id, g, m)
				g.mu.Unlock()
			}
			// The earlier plane may have been killed while it paused or started the machine.
			errs = append(errs, m.Resume(p.ctx))
		}
	}
	return gone, again, errors.Join(errs...)
}

// keep removes from each machine the disks that are not attached to its instance.
func (p *Plane) keep(ctx context.Context, attached []Device) error {
	var errs []error
	for id, g := range p.guests.all() {
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

// SSH returns the local addresses that are forwarded to the guests' sshd, by the IDs of the
// instances with a machine.
func (p *Plane) SSH() map[string]string {
	addresses := map[string]string{}
	for id, g := range p.guests.all() {
		if m := g.machine.Load(); m != nil {
			addresses[id] = net.JoinHostPort("127.0.0.1", strconv.Itoa(m.SSHPort()))
		}
	}
	return addresses
}

// SSHKey returns the path of the private key with which root can log in to each machine, or "" if
// the guests are not virtual machines.
func (p *Plane) SSHKey() string {
	if p.machines == nil {
		return ""
	}
	return p.machines.Key()
}

// Console reads up to most bytes that a guest's serial console has printed since its last start,
// from an offset. A negative offset counts back from the end: -1 is the end. It returns the offset
// behind the last byte.
func (p *Plane) Console(id string, from, most int64) (text []byte, end int64, err error) {
	text, end, err = machine.Console(p.machineDir(id), from, most)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return text, end, err
}
