package dataplane

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
)

// Tamper makes a data plane spoil bytes or devices on purpose, and checks of data must notice it.
// A nil hook does nothing.
type Tamper struct {
	// Name identifies the tamper, and Says describes what it spoils.
	Name, Says string

	// source is called for the file from which a disk will be created.
	source func(p *Plane, path string) (string, error)
	// plug is called before a disk's device is created, unplugged when the device is gone, and
	// removed when the bytes are gone.
	plug      func(p *Plane, spec Device, f *Fault) error
	unplugged func(p *Plane, spec Device) error
	removed   func(p *Plane, diskID string) error
	// shown returns the device that the guest sees, given the other devices of the guest.
	shown func(d Device, others []*plugged) Device
	// copied is called when a disk was copied to a snapshot.
	copied func(ctx context.Context, p *Plane, snapshot *os.File, d *plugged) error
	// keeps leaves the device in its guest when the disk is detached. elsewhere also shows the
	// device in every other guest.
	keeps, elsewhere bool
	// life is called for every event of a disk or a snapshot.
	life func(p *Plane, e event) error
}

// tampering holds the active tamper.
type tampering struct {
	mu sync.Mutex
	// mu guards the fields below.
	now Tamper
	// left are the devices that stay in their guests after their disks were detached.
	left []*plugged
	// elsewhere are devices in the views of other guests, by the IDs of their disks.
	elsewhere map[string][]shownElsewhere
}

// shownElsewhere is a device in the view of a guest that does not have its disk.
type shownElsewhere struct {
	view view
	name string
}

// Tamper activates a tamper; the zero value ends it. It removes what an earlier tamper left in
// the guests.
func (p *Plane) Tamper(t Tamper) error {
	p.tampering.mu.Lock()
	left, elsewhere := p.tampering.left, p.tampering.elsewhere
	p.tampering.now, p.tampering.left, p.tampering.elsewhere = t, nil, nil
	p.tampering.mu.Unlock()
	var errs []error
	for _, all := range elsewhere {
		errs = append(errs, removeElsewhere(all))
	}
	for _, d := range left {
		errs = append(errs, p.hide(d), p.forceDetach(*d.loop, ""))
	}
	return errors.Join(append(errs, RemoveTree(p.tamperPath("")))...)
}

func (p *Plane) tamper() Tamper {
	p.tampering.mu.Lock()
	defer p.tampering.mu.Unlock()
	return p.tampering.now
}

// tamperPath returns the path of a tamper's file.
func (p *Plane) tamperPath(name string) string { return filepath.Join(p.dir, "tamper", name) }

// CreateDisk creates a blank disk, which uses no space. It does not change an existing one.
func (p *Plane) CreateDisk(id string, size int64) error {
	err := p.files.CreateDisk(id, size)
	return errors.Join(err, p.tamperLife(event{what: diskMade, disk: id, bytes: size}, err))
}

// CloneDisk creates a disk with the bytes of source, the file of a snapshot or an image, and
// blank space after them. It does not change an existing disk.
func (p *Plane) CloneDisk(ctx context.Context, id, source string, size int64) (err error) {
	if t := p.tamper(); t.source != nil {
		if source, err = t.source(p, source); err != nil {
			return err
		}
	}
	err = p.files.CloneDisk(ctx, id, source, size)
	return errors.Join(err, p.tamperLife(
		event{what: diskCloned, disk: id, snapshot: source, bytes: size}, err))
}

// RemoveSnapshot removes a snapshot's bytes, if they exist.
func (p *Plane) RemoveSnapshot(id string) error {
	path := p.SnapshotPath(id)
	err := p.tamperLife(event{what: snapshotRemoving, snapshot: path}, nil)
	if err == nil {
		err = p.removeBacking(path)
	}
	if err != nil {
		return fmt.Errorf("remove snapshot %s: %w", id, err)
	}
	p.removed(id)
	return p.tamperLife(event{what: snapshotRemoved, snapshot: path}, nil)
}

// tamperLife reports an event to the tamper, unless the operation failed.
func (p *Plane) tamperLife(e event, failed error) error {
	if t := p.tamper(); failed == nil && t.life != nil {
		return t.life(p, e)
	}
	return nil
}

func (p *Plane) tamperPlug(spec Device, f *Fault) error {
	if t := p.tamper(); t.plug != nil {
		return t.plug(p, spec, f)
	}
	return p.tamperLife(event{what: diskPlugging, disk: spec.DiskID, name: spec.DiskName,
		bytes: spec.SizeBytes}, nil)
}

func (p *Plane) tamperUnplugged(spec Device) error {
	if t := p.tamper(); t.unplugged != nil {
		return t.unplugged(p, spec)
	}
	return p.tamperLife(event{what: diskUnplugged, disk: spec.DiskID}, nil)
}

func (p *Plane) tamperRemoved(diskID string) error {
	if t := p.tamper(); t.removed != nil {
		return t.removed(p, diskID)
	}
	return p.tamperLife(event{what: diskRemoved, disk: diskID}, nil)
}

func (p *Plane) tamperShown(d *plugged) Device {
	if t := p.tamper(); t.shown != nil {
		return t.shown(d.spec, p.guests.devices(d.guest))
	}
	return d.spec
}

func (p *Plane) tamperCopied(ctx context.Context, snapshot *os.File, d *plugged) error {
	if t := p.tamper(); t.copied != nil {
		return t.copied(ctx, p, snapshot, d)
	}
	return nil
}

// tamperElsewhere also shows a device that has appeared to every other guest.
func (p *Plane) tamperElsewhere(d *plugged) error {
	if !p.tamper().elsewhere {
		return nil
	}
	var errs []error
	for id := range p.guests.all() {
		if id == d.spec.InstanceID {
			continue
		}
		other := p.view(id)
		name, err := other.freeName(d.guest.random)
		if err == nil {
			err = other.show(d.spec, *d.loop, name)
		}
		if errs = append(errs, err); err != nil {
			continue
		}
		p.tampering.mu.Lock()
		if p.tampering.elsewhere == nil {
			p.tampering.elsewhere = map[string][]shownElsewhere{}
		}
		p.tampering.elsewhere[d.spec.DiskID] = append(p.tampering.elsewhere[d.spec.DiskID],
			shownElsewhere{other, name})
		p.tampering.mu.Unlock()
	}
	return errors.Join(errs...)
}

// tamperHidden removes a device from the guests to which a tamper has shown it.
func (p *Plane) tamperHidden(diskID string) error {
	p.tampering.mu.Lock()
	all := p.tampering.elsewhere[diskID]
	delete(p.tampering.elsewhere, diskID)
	p.tampering.mu.Unlock()
	return removeElsewhere(all)
}

func removeElsewhere(all []shownElsewhere) error {
	var errs []error
	for _, d := range all {
		errs = append(errs, d.view.remove(d.name))
	}
	return errors.Join(errs...)
}

// tamperKeeps reports whether the device stays in its guest. If so, it records the device.
func (p *Plane) tamperKeeps(d *plugged) bool {
	p.tampering.mu.Lock()
	defer p.tampering.mu.Unlock()
	if !p.tampering.now.keeps || d.loop == nil {
		return false
	}
	p.tampering.left = append(p.tampering.left, d)
	return true
}
