package dataplane

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/machine"
)

// GuestDir returns the directory of an instance's guest view, which contains sys and dev.
func (p *Plane) GuestDir(id string) string { return filepath.Join(p.dir, "guests", id) }

func (p *Plane) view(id string) view { return view(p.GuestDir(id)) }

// AddGuest creates the view of an instance's guest. An existing view keeps its devices.
func (p *Plane) AddGuest(g Firmware) error {
	if err := p.view(g.InstanceID).make(g.InstanceID); err != nil {
		return fmt.Errorf("make the guest of instance %s: %w", g.Name, err)
	}
	p.guests.add(g.InstanceID, p.seed)
	return nil
}

// RemoveGuest removes a guest and its devices, if it exists.
func (p *Plane) RemoveGuest(id string) error {
	if err := p.Halt(id); err != nil {
		return fmt.Errorf("remove the guest of instance %s: %w", id, err)
	}
	if g := p.guests.all()[id]; g != nil {
		for _, d := range p.guests.devices(g) {
			if err := p.Unplug(id, d.spec.DiskID); err != nil {
				return fmt.Errorf("remove the guest of instance %s: %w", id, err)
			}
		}
	}
	p.guests.remove(id)
	if err := RemoveTree(p.GuestDir(id)); err != nil {
		return fmt.Errorf("remove the guest of instance %s: %w", id, err)
	}
	p.removed(id)
	return nil
}

// Empty removes every disk from its guest and forgets the guests. Their views stay for guests that
// are added again. Reconcile removes the others.
func (p *Plane) Empty() error {
	for id, g := range p.guests.all() {
		if err := errors.Join(p.Halt(id), RemoveTree(p.machineDir(id))); err != nil {
			return err
		}
		for _, d := range p.guests.devices(g) {
			if err := p.Unplug(id, d.spec.DiskID); err != nil {
				return err
			}
		}
		p.guests.remove(id)
	}
	return nil
}

type guestState struct {
	// plugged are its disks, by ID. The mu of guests guards it.
	plugged map[string]*plugged

	mu sync.Mutex
	// mu guards the guest's view, the nodes of its devices, and the fields below. Lock it before the
	// mu of guests.
	//
	// random chooses the numbers of its devices.
	random *rand.Rand
	// removed is set when the guest no longer belongs to the plane.
	removed bool

	// copying keeps the machine from starting or continuing while a disk is copied.
	copying sync.Mutex
	// machine runs the guest, or is nil. It is started and stopped while mu is held.
	machine atomic.Pointer[machine.Machine]
}

// plugged is a disk of a guest, visible or not.
type plugged struct {
	spec  Device
	guest *guestState
	// loop is nil for a device that never appears, as all do in a plane without devices.
	loop *loopdev.Device
	// never means that a machine does not get the disk. wrongSize is its size in a machine, or 0.
	never     bool
	wrongSize int64
	// node is the device's name in the guest, "" while it is not visible.
	node string
	// cancel ends the wait for the device's appearance. appeared is closed when the wait has ended.
	cancel   context.CancelFunc
	appeared chan struct{}
}

type guests struct {
	mu sync.Mutex
	// mu guards byID and the plugged disks of each guest. It is never held while files are written.
	byID map[string]*guestState
}

func (g *guests) add(instanceID string, seed uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.byID == nil {
		g.byID = map[string]*guestState{}
	}
	if g.byID[instanceID] == nil {
		h := fnv.New64a()
		h.Write([]byte(instanceID))
		g.byID[instanceID] = &guestState{
			random:  rand.New(rand.NewPCG(seed, h.Sum64())),
			plugged: map[string]*plugged{},
		}
	}
}

func (g *guests) remove(instanceID string) {
	guest := g.lock(instanceID)
	if guest == nil {
		return
	}
	defer guest.mu.Unlock()
	guest.removed = true
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.byID, instanceID)
}

func (g *guests) all() map[string]*guestState {
	g.mu.Lock()
	defer g.mu.Unlock()
	return maps.Clone(g.byID)
}

func (g *guests) devices(of *guestState) []*plugged {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Collect(maps.Values(of.plugged))
}

// lock locks the mu of an instance's guest and returns the guest, or nil if there is none.
func (g *guests) lock(instanceID string) *guestState {
	guest := g.all()[instanceID]
	if guest == nil {
		return nil
	}
	guest.mu.Lock()
	if guest.removed {
		guest.mu.Unlock()
		return nil
	}
	return guest
}

func (g *guests) note(d *plugged) {
	g.mu.Lock()
	defer g.mu.Unlock()
	d.guest.plugged[d.spec.DiskID] = d
}

func (g *guests) forget(d *plugged) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(d.guest.plugged, d.spec.DiskID)
}

// disk returns the plugged disk from the guest that has it, or nil.
func (g *guests) disk(id string) *plugged {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, guest := range g.byID {
		if d := guest.plugged[id]; d != nil {
			return d
		}
	}
	return nil
}
