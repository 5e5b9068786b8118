package dataplane

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/machine"
)

const (
	// attachTimeout is long, because many processes may request loop devices at the same time.
	attachTimeout = 10 * time.Second
	// forceDetachTimeout gives programs such as udev, which open every new device, time to close it.
	forceDetachTimeout = 300 * time.Millisecond
)

// Plug plugs a disk into a running guest. The guest sees the disk when Plug returns or, if the
// fault has a Delay, later. Plug also succeeds if the guest already has the disk.
func (p *Plane) Plug(spec Device, f Fault) (err error) {
	defer p.disks.Lock(spec.DiskID)()
	defer wrap(&err, "plug disk %s into instance %s", spec.DiskID, spec.InstanceID)
	if err := p.ctx.Err(); err != nil {
		return fmt.Errorf("the data plane is closed: %w", err)
	}
	if d := p.guests.disk(spec.DiskID); d != nil {
		if d.spec.InstanceID != spec.InstanceID {
			return fmt.Errorf("instance %s has it", d.spec.InstanceID)
		}
		return nil
	}
	if f.Fails {
		return errors.New("a fault makes this fail")
	}
	if err := p.tampering.life(event{what: diskPlugging, disk: spec.DiskID,
		name: spec.DiskName, bytes: spec.SizeBytes, fault: &f}, nil); err != nil {
		return err
	}
	d := &plugged{spec: spec, never: f.Never, wrongSize: f.SizeBytes}
	f.Never = f.Never || p.noDevices != nil || p.VMs.host != nil
	if p.VMs.host != nil && !d.never {
		if err := p.Files.resize(spec.DiskID, max(f.SizeBytes, spec.SizeBytes)); err != nil {
			return err
		}
	}
	if !f.Never {
		loop, err := p.attachLoop(spec, f.SizeBytes)
		if err != nil {
			return err
		}
		d.loop = &loop
	}
	err = p.enter(d, f.Delay)
	if err != nil && d.loop != nil {
		err = errors.Join(err, p.forceDetach(*d.loop, spec.DiskID))
	}
	if err == nil && !d.never {
		err = p.VMs.changeDisk(d, (*machine.Machine).Plug)
		if err != nil {
			// QEMU may have plugged the disk in despite the error. Forget the disk only if it is certainly
			// unplugged; until then no other guest can get it.
			out := p.VMs.changeDisk(d, (*machine.Machine).Unplug)
			if err = errors.Join(err, out); out == nil {
				p.guests.forget(d)
			}
		}
	}
	return err
}

func (p *Plane) attachLoop(spec Device, wrongSize int64) (loopdev.Device, error) {
	size := spec.sizeOr(wrongSize)
	if err := p.Files.resize(spec.DiskID, max(size, spec.SizeBytes)); err != nil {
		return loopdev.Device{}, err
	}
	path, err := p.Flaky.plug(spec.DiskID, p.Files.DiskPath(spec.DiskID))
	if err != nil {
		return loopdev.Device{}, err
	}
	ctx, cancel := context.WithTimeout(p.ctx, attachTimeout)
	defer cancel()
	loop, err := loopdev.Attach(ctx, loopdev.Config{Path: path, Serial: spec.loopSerial(),
		Owner: p.owner, BlockSize: spec.BlockSize, ReadOnly: spec.ReadOnly, SizeLimit: size,
		First: p.FirstLoop, NoDiscards: p.NoDiscards && !spec.Local})
	if err != nil {
		err = errors.Join(err, p.Flaky.unplug(spec.DiskID))
	}
	return loop, err
}

// Trim truncates a disk's file to the disk's size, because a fault may have made the file larger.
func (p *Plane) Trim(diskID string, size int64) error {
	defer p.disks.Lock(diskID)()
	return p.Files.trim(diskID, size)
}

// enter adds a disk to its guest. The guest sees the device after the delay and a random time of up
// to half of the delay, so that devices do not appear in the order of their attachment (A57).
func (p *Plane) enter(d *plugged, delay time.Duration) error {
	g := p.guests.lock(d.spec.InstanceID)
	if g == nil {
		return errors.New("the instance has no guest")
	}
	defer g.mu.Unlock()
	d.guest = g
	if d.loop != nil && delay <= 0 {
		if err := p.appear(d); err != nil {
			return err
		}
	}
	p.guests.note(d)
	if d.loop == nil || delay <= 0 {
		return nil
	}
	delay += time.Duration(g.random.Int64N(int64(delay)/2 + 1))
	ctx, cancel := context.WithCancel(p.ctx)
	d.cancel, d.appeared = cancel, make(chan struct{})
	p.working.Go(func() {
		defer close(d.appeared)
		defer cancel()
		if pause(ctx, delay) != nil {
			return
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		if ctx.Err() != nil {
			return
		}
		// The call that attached the disk has been answered, so the error goes to the log.
		if err := p.appear(d); err != nil {
			p.Log.Error("a device did not appear", slog.String("instance", d.spec.InstanceID),
				slog.String("disk", d.spec.DiskID), slog.String("error", err.Error()))
		}
	})
	return nil
}

// appear() makes the guest see a device. If another visible device has the same serial, the new
// device stays hidden until the guest restarts, because the guest's NVMe driver refuses a second
// controller with the same serial (A54). The caller holds the mu of the guest.
func (p *Plane) appear(d *plugged) error {
	view := p.view(d.spec.InstanceID)
	for _, other := range p.guests.devices(d.guest) {
		if other == d || other.node == "" || other.spec.serial() != d.spec.serial() {
			continue
		}
		p.Log.Warn("a device stays hidden behind another one with the same serial",
			slog.String("instance", d.spec.InstanceID), slog.String("serial", d.spec.serial()),
			slog.String("hidden", d.spec.DiskID), slog.String("visible", other.spec.DiskID))
		return os.WriteFile(view.hiddenPath(d.spec.DiskID), nil, 0o600)
	}
	name, err := view.freeName(d.guest.random)
	if err != nil {
		return err
	}
	if err := view.show(p.tampering.appearance(d), *d.loop, name); err != nil {
		return errors.Join(fmt.Errorf("show %s: %w", name, err), view.remove(name))
	}
	d.node = name
	return p.tampering.showElsewhere(d)
}

// Unplug removes a disk from a guest, even if the guest uses it. When it returns, no further write
// of the guest reaches the disk's file. It also succeeds if the guest does not have the disk.
func (p *Plane) Unplug(instanceID, diskID string) (err error) {
	defer p.disks.Lock(diskID)()
	defer wrap(&err, "unplug disk %s from instance %s", diskID, instanceID)
	d := p.guests.disk(diskID)
	if d == nil || d.spec.InstanceID != instanceID {
		return nil
	}
	if d.cancel != nil {
		d.cancel()
		<-d.appeared
	}
	if p.tampering.keeps(d) {
		p.guests.forget(d)
		return nil
	}
	if err := errors.Join(p.hide(d), p.VMs.changeDisk(d, (*machine.Machine).Unplug)); err != nil {
		return err
	}
	if d.loop != nil {
		if err := p.forceDetach(*d.loop, diskID); err != nil {
			return err
		}
	}
	p.guests.forget(d)
	return p.tampering.life(event{what: diskUnplugged, disk: diskID},
		p.Files.trim(diskID, d.spec.SizeBytes))
}

// forceDetach releases a loop device. If a program keeps the device open for forceDetachTimeout,
// forceDetach cuts the device off from the disk's file. The device then has no size, and exists
// until its last user closes it. Another guest can get the disk at once, as on a rack. diskID is ""
// if the plane knows only the device.
func (p *Plane) forceDetach(loop loopdev.Device, diskID string) error {
	ctx, cancel := context.WithTimeout(context.Background(), forceDetachTimeout)
	defer cancel()
	err := loop.Detach(ctx)
	if !errors.Is(err, loopdev.ErrBusy) {
		return errors.Join(err, p.Flaky.unplug(diskID))
	}
	p.Log.Warn("a disk is detached by force while its guest uses it", slog.String("device", loop.Path),
		slog.String("serial", SerialOf(loop)), slog.String("file", loop.BackingFile))
	// First end the operations that hang, because Cut waits for them.
	return errors.Join(p.Flaky.unplug(diskID), loop.Cut())
}

// RemoveDisk removes a disk's bytes, if they exist. It refuses a disk that a guest has.
func (p *Plane) RemoveDisk(id string) (err error) {
	defer p.disks.Lock(id)()
	defer wrap(&err, "remove disk %s", id)
	if d := p.guests.disk(id); d != nil {
		return fmt.Errorf("instance %s still has it", d.spec.InstanceID)
	}
	err = errors.Join(p.tampering.life(event{what: diskRemoving, disk: id}, nil),
		p.Files.remove(p.Files.DiskPath(id)), p.tampering.life(event{what: diskRemoved, disk: id}, nil))
	if err == nil {
		p.Flaky.forget(id)
		p.Removed(id)
	}
	return err
}

// hide removes a device from its guest view: first the directory in sysfs, then the node.
func (p *Plane) hide(d *plugged) error {
	d.guest.mu.Lock()
	defer d.guest.mu.Unlock()
	view := p.view(d.spec.InstanceID)
	err := errors.Join(p.tampering.hidden(d.spec.DiskID), os.RemoveAll(view.hiddenPath(d.spec.DiskID)))
	if err != nil || d.node == "" {
		return err
	}
	if err := view.remove(d.node); err != nil {
		return err
	}
	d.node = ""
	return nil
}

// IDs maps a kind to the IDs of its objects, and the key Left to the IDs of deleted objects.
type IDs map[string][]string

// Left is the key in [IDs] for objects that have no record any more, but may have files.
const Left = "left"

// Reconcile makes the data plane match the records, even after a kill of the last simulator. The
// slice attached has the disks of running instances, whose guests the caller has added. Reconcile
// keeps each device that matches its disk, so that the guest notices nothing, and releases all
// other devices. It removes the files of objects that have no record any more.
func (p *Plane) Reconcile(ctx context.Context, attached []Device, ids IDs) (err error) {
	defer wrap(&err, "reconcile the data plane")
	devices, err := p.OwnDevices()
	if err != nil {
		return err
	}
	adopted, err := p.adoptOrRelease(devices, attached)
	err = errors.Join(err, p.VMs.keep(ctx, attached))
	for _, kind := range Kinds {
		err = errors.Join(err, p.Files.removeOrphans(kind, ids[kind], ids[Left]))
	}
	guests := p.guests.all()
	for _, id := range ids[Left] {
		if guests[id] == nil && backing.MatchString(id+".img") {
			err = errors.Join(err, RemoveTree(p.GuestDir(id)))
		}
	}
	if err != nil {
		return err
	}
	if err := p.restoreViews(adopted); err != nil {
		return err
	}
	for _, spec := range attached {
		if err := ctx.Err(); err != nil {
			return err
		}
		err := p.Plug(spec, Fault{})
		if errors.Is(err, fs.ErrNotExist) {
			// The bytes of this disk are lost, but the rack can serve its other disks.
			p.Log.Error("the bytes of an attached disk are missing", slog.String("disk", spec.DiskID),
				slog.String("error", err.Error()))
		} else if err != nil {
			return err
		}
	}
	return nil
}

// OwnDevices returns the loop devices of this rack: those whose file is a disk's file, and those
// whose file was removed. It does not compare paths, because a rack in another container may have
// the same paths. If a killed simulator served a device, the kernel knows only the name of the
// device's file. This name contains the rack's identity and the disk's ID.
func (p *Plane) OwnDevices() ([]loopdev.Device, error) {
	if p.noDevices != nil {
		return nil, nil //nolint:nilerr // a plane without devices is not an error
	}
	devices, err := loopdev.List()
	if err != nil {
		return nil, err
	}
	files, err := p.Files.diskInodes()
	if err != nil {
		return nil, err
	}
	inodes := slices.Collect(maps.Values(files))
	return slices.DeleteFunc(devices, func(d loopdev.Device) bool {
		switch {
		case d.Orphaned:
			disk, ours := strings.CutPrefix(filepath.Base(d.BackingFile), p.Flaky.mark)
			_, own := files[disk]
			return !ours || !own
		case p.Flaky.server != nil && d.BackingDevice == p.Flaky.device:
			return false
		}
		ofDisk := d.BackingDevice == p.device && slices.Contains(inodes, d.BackingInode)
		return !ofDisk && (d.Owner != p.owner || !strings.HasSuffix(d.BackingFile, " (deleted)"))
	}), nil
}

func (p *Plane) adoptOrRelease(devices []loopdev.Device, attached []Device) (map[string]*plugged,
	error) {
	adopted := map[string]*plugged{}
	var errs []error
	for _, loop := range devices {
		i := slices.IndexFunc(attached, func(spec Device) bool { return p.carries(loop, spec) })
		if i < 0 || adopted[attached[i].DiskID] != nil {
			errs = append(errs, p.forceDetach(loop, ""))
			continue
		}
		adopted[attached[i].DiskID] = &plugged{spec: attached[i], loop: &loop}
	}
	return adopted, errors.Join(errs...)
}

// carries reports whether loop is as Plug creates it for spec. With a FUSE server it returns false.
func (p *Plane) carries(loop loopdev.Device, spec Device) bool {
	return p.Flaky.server == nil && backs(loop, p.Files.DiskPath(spec.DiskID)) &&
		loop.Serial == spec.loopSerial() && loop.SizeBytes == spec.SizeBytes &&
		loop.BlockSize == spec.BlockSize && loop.ReadOnly == spec.ReadOnly && !loop.Releasing
}

// restoreViews keeps the adopted devices in the guest views and removes all other devices. A hidden
// disk stays hidden, because its guest has not restarted.
func (p *Plane) restoreViews(adopted map[string]*plugged) error {
	for id, g := range p.guests.all() {
		var own []*plugged
		for _, d := range adopted {
			if d.spec.InstanceID == id {
				d.guest = g
				own = append(own, d)
			}
		}
		if err := p.restoreGuest(g, id, own); err != nil {
			return fmt.Errorf("restore what instance %s sees: %w", id, err)
		}
	}
	return nil
}

func (p *Plane) restoreGuest(g *guestState, id string, own []*plugged) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	v := p.view(id)
	names, err := v.names()
	if err != nil {
		return err
	}
	for _, name := range names {
		i := slices.IndexFunc(own, func(d *plugged) bool {
			return d.node == "" && v.shows(name, *d.loop)
		})
		if i >= 0 {
			own[i].node = name
			continue
		}
		if err := v.remove(name); err != nil {
			return err
		}
	}
	if err := v.clearAside(); err != nil {
		return err
	}
	// First note the devices that stay, so that appear() hides others with the same serials.
	var others []*plugged
	for _, d := range own {
		if d.node == "" && !exists(v.hiddenPath(d.spec.DiskID)) {
			others = append(others, d)
			continue
		}
		p.guests.note(d)
	}
	for _, d := range others {
		if err := p.appear(d); err != nil {
			return err
		}
		p.guests.note(d)
	}
	return nil
}

// ErrCannotFail means that the rack was started without Config.FlakyDisks.
var ErrCannotFail = errors.New("the disks of this rack cannot fail")

// Flaky has the disks of a plane with Config.FlakyDisks. A detached disk keeps its faults for its
// next guest.
type Flaky struct {
	path func(id string) string
	dir  string
	// mark identifies the rack. The names of all files in dir begin with it.
	mark string
	// server is nil without Config.FlakyDisks. device is the st_dev of the files that it serves.
	server *flakydisk.Server
	device uint64

	// mu guards disks, whose keys are the disks' IDs.
	mu    sync.Mutex
	disks map[string]*flakyDisk
}

// flakyDisk has a disk's faults. While the disk is plugged in, it also has the open file.
type flakyDisk struct {
	*flakydisk.Disk
	file flakydisk.File
}

// open removes mounts that killed simulators left in dir, and mounts a FUSE server if requested.
func (f *Flaky) open(dir string, serve bool) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		number, ours := strings.CutPrefix(e.Name(), fusePrefix)
		if _, no := strconv.ParseUint(number, 10, 64); ours && no == nil && e.IsDir() {
			err = errors.Join(err, removeMount(filepath.Join(dir, e.Name())))
		}
	}
	if err != nil || !serve {
		return err
	}
	f.disks = map[string]*flakyDisk{}
	// The name is new, so a process that cleans up after the last simulator cannot remove this mount.
	if f.dir, err = os.MkdirTemp(dir, fusePrefix); err != nil {
		return err
	}
	if f.server, err = flakydisk.Mount(f.dir); err != nil {
		return err
	}
	if f.device, err = deviceOf(f.dir); err != nil {
		return errors.Join(err, f.close())
	}
	return nil
}

const fusePrefix = "fuse-"

// close lets operations that hang continue, and stops the FUSE server.
func (f *Flaky) close() error {
	if f.server == nil {
		return nil
	}
	f.HealAll()
	return errors.Join(f.server.Close(), os.Remove(f.dir))
}

// HealAll removes the faults of all disks.
func (f *Flaky) HealAll() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, d := range f.disks {
		d.Heal()
	}
}

// disk returns a disk's entry, and creates it if it is missing. The caller holds mu.
func (f *Flaky) disk(id string) *flakyDisk {
	if f.disks[id] == nil {
		f.disks[id] = &flakyDisk{Disk: flakydisk.NewDisk(nil)}
	}
	return f.disks[id]
}

// replace makes d the entry of a disk, and gives d the disk's faults. The caller holds mu.
func (f *Flaky) replace(id string, d *flakyDisk) {
	for _, fault := range f.disk(id).Faults() {
		d.AddFault(fault)
	}
	f.disks[id] = d
}

// plug returns the path of a disk's file on the FUSE server or, without a server, the given path.
func (f *Flaky) plug(id, path string) (string, error) {
	if f.server == nil {
		return path, nil
	}
	file, err := flakydisk.OpenFile(path)
	if err != nil {
		return "", err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	d := &flakyDisk{Disk: flakydisk.NewDisk(file), file: file}
	f.replace(id, d)
	return f.server.Put(f.mark+filepath.Base(path), d.Disk), nil
}

// unplug makes a disk's hanging operations fail and closes its file, which gets no more writes.
func (f *Flaky) unplug(id string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	d := f.disks[id]
	if d == nil || d.file.File == nil {
		return nil
	}
	f.replace(id, &flakyDisk{Disk: flakydisk.NewDisk(nil)})
	d.Cut()
	f.server.Remove(f.mark + filepath.Base(d.file.Name()))
	return d.file.Close()
}

func (f *Flaky) forget(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.disks, id)
}

// Fail adds a fault to a disk, in its present guest and in every later one.
func (f *Flaky) Fail(id string, fault flakydisk.Fault) error {
	return f.with(id, func(d *flakyDisk) { d.AddFault(fault) })
}

// Heal removes all faults of a disk. Operations that hang then continue.
func (f *Flaky) Heal(id string) error { return f.with(id, func(d *flakyDisk) { d.Heal() }) }

// Faults returns the faults of a disk.
func (f *Flaky) Faults(id string) (faults []flakydisk.Fault, err error) {
	err = f.with(id, func(d *flakyDisk) { faults = d.Faults() })
	return faults, err
}

// Activity counts a disk's operations in each of the last seconds. Plug clears these counts.
func (f *Flaky) Activity(id string) (all []flakydisk.Activity, err error) {
	err = f.with(id, func(d *flakyDisk) { all = d.Activity(time.Now()) })
	return all, err
}

// with() passes the entry of a disk to do(), even while operations of the disk hang.
func (f *Flaky) with(id string, do func(*flakyDisk)) error {
	if f.server == nil {
		return ErrCannotFail
	}
	if _, err := os.Stat(f.path(id)); err != nil {
		return fmt.Errorf("there is no disk %q: %w", id, err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	do(f.disk(id))
	return nil
}
