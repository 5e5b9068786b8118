package dataplane

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/machine"
)

// A plane with Config.Machines runs its guests as virtual machines. Their disks have no loop
// devices, and the directories of their views no devices. A guest that does not run gets its disks
// when it starts.

// machineTime is how long a change of a machine may take.
const machineTime = 40 * time.Second

// machineDir returns the directory of a guest's machine.
func (p *Plane) machineDir(id string) string { return filepath.Join(p.GuestDir(id), "machine") }

// machineDisk returns a disk as a machine gets it.
func (p *Plane) machineDisk(d *plugged) machine.Disk {
	size := d.spec.SizeBytes
	if d.wrongSize > 0 {
		size = d.wrongSize / int64(d.spec.BlockSize) * int64(d.spec.BlockSize)
	}
	return machine.Disk{ID: d.spec.DiskID, Serial: d.spec.serial(), Path: p.DiskPath(d.spec.DiskID),
		SizeBytes: size, BlockSize: d.spec.BlockSize, ReadOnly: d.spec.ReadOnly}
}

// Run starts the machine of a guest, with the disks that were plugged into it. It does nothing if
// the guests are no machines, or if this one runs.
func (p *Plane) Run(f Firmware) error {
	g := p.guests.lock(f.InstanceID)
	if g == nil || p.machines == nil {
		return nil
	}
	defer g.mu.Unlock()
	if g.machine != nil {
		return nil
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
	ctx, cancel := context.WithTimeout(p.ctx, machineTime)
	defer cancel()
	m, err := p.machines.Start(ctx, dir, machine.Guest{ID: f.InstanceID, Name: f.Name, CPUs: 1,
		MemoryBytes: min(max(f.MemoryBytes, 512<<20), 1<<30), Keys: f.Keys}, disks)
	if err != nil {
		return err
	}
	p.has(f.InstanceID, g, m)
	return nil
}

// has notes that a guest has a machine. The caller holds the guest's mu.
func (p *Plane) has(id string, g *guestState, m *machine.Machine) {
	g.machine = m
	p.working.Go(func() {
		select {
		case <-p.ctx.Done():
			return
		case <-m.Ended():
		}
		g.mu.Lock()
		mine := g.machine == m
		if mine {
			g.machine = nil
		}
		g.mu.Unlock()
		if mine { // else the plane has stopped it
			p.ended(id, m.PoweredOff())
		}
	})
}

// Halt stops the machine of a guest, if it has one. Its guest notices nothing before.
func (p *Plane) Halt(id string) error {
	g := p.guests.lock(id)
	if g == nil {
		return nil
	}
	defer g.mu.Unlock()
	if g.machine == nil {
		return nil
	}
	m := g.machine
	g.machine = nil
	ctx, cancel := context.WithTimeout(context.Background(), machineTime)
	defer cancel()
	return m.Stop(ctx)
}

// Reset restarts the guest in its machine, and reports whether it has one.
func (p *Plane) Reset(id string) (has bool, err error) {
	g := p.guests.all()[id]
	if g == nil || p.machines == nil {
		return false, nil
	}
	return true, p.change(g, func(ctx context.Context, m *machine.Machine) error {
		return m.Reset(ctx)
	})
}

// change changes the machine of a guest, if it has one.
func (p *Plane) change(g *guestState, do func(context.Context, *machine.Machine) error) error {
	g.mu.Lock()
	m := g.machine
	g.mu.Unlock()
	if m == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), machineTime)
	defer cancel()
	return do(ctx, m)
}

// still stops the processors of a guest's machine, if it has one, until resume is called.
func (p *Plane) still(g *guestState) (resume func(), err error) {
	resume = func() {}
	err = p.change(g, func(ctx context.Context, m *machine.Machine) error {
		resume = func() {
			if err := m.Resume(context.Background()); err != nil {
				p.log.Error("a guest cannot go on", slog.String("error", err.Error()))
			}
		}
		return m.Pause(ctx)
	})
	return resume, err
}

// Adopt finds the machines that an earlier plane has started, and returns the guests of these that
// have none any more.
func (p *Plane) Adopt(running []string) (gone []string, err error) {
	if p.machines == nil {
		return nil, nil
	}
	var errs []error
	for _, id := range running {
		g := p.guests.lock(id)
		if g == nil {
			continue
		}
		m, err := p.machines.Find(p.ctx, p.machineDir(id), id)
		switch {
		case errors.Is(err, os.ErrNotExist) || err == nil && m == nil:
			gone = append(gone, id)
		case err != nil:
			errs = append(errs, fmt.Errorf("find the machine of instance %s: %w", id, err))
		default:
			p.log.Info("an instance still runs", slog.String("instance", id))
			p.has(id, g, m)
		}
		g.mu.Unlock()
	}
	return gone, errors.Join(errs...)
}

// SSHPort returns the port of loopback that leads to the guest's sshd, or 0 if it has no machine.
func (p *Plane) SSHPort(id string) int {
	g := p.guests.lock(id)
	if g == nil {
		return 0
	}
	defer g.mu.Unlock()
	if g.machine == nil {
		return 0
	}
	return g.machine.SSHPort()
}

// Console returns the last bytes of what a guest has written to its serial console.
func (p *Plane) Console(id string, most int64) ([]byte, error) {
	return machine.Console(p.machineDir(id), most)
}
