package dataplane

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// IDs are the IDs of objects, by their kind. The IDs under the key Left have no record any more,
// but may still have files.
type IDs map[string][]string

// Left is a key of IDs.
const Left = "left"

// Reconcile makes the data plane match the records, however the last simulator ended. attached are
// the disks of running instances, whose guests must have been added. Reconcile adopts every device
// that is correct, so that its guest notices nothing, and releases all others. It removes the files
// of objects that have no record any more.
func (p *Plane) Reconcile(ctx context.Context, attached []Device, ids IDs) (err error) {
	defer wrap(&err, "reconcile the data plane")
	devices, err := p.OwnDevices()
	if err != nil {
		return err
	}
	adopted, err := p.adoptOrRelease(devices, attached)
	err = errors.Join(err, p.keep(ctx, attached))
	for _, kind := range Kinds {
		err = errors.Join(err, p.removeOrphans(kind, ids[kind], ids[Left]))
	}
	if err = errors.Join(err, p.removeOrphanGuests(ids[Left])); err != nil {
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
			// The bytes of this disk are lost, but the rest of the rack can serve.
			p.Log.Error("the bytes of an attached disk are missing", slog.String("disk", spec.DiskID),
				slog.String("error", err.Error()))
		} else if err != nil {
			return err
		}
	}
	return nil
}

// OwnDevices returns the loop devices whose file belongs to a disk, and those of this rack whose
// file was removed. It does not compare paths, because another container may have the same path. Of
// a device that a killed simulator served, only the name of the file is known, which contains the
// rack's identity and the disk's ID.
func (p *Plane) OwnDevices() ([]loopdev.Device, error) {
	if p.noDevices != nil {
		return nil, nil //nolint:nilerr // a plane without devices is in order
	}
	devices, err := loopdev.List()
	if err != nil {
		return nil, err
	}
	files, err := p.diskInodes()
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

// adoptOrRelease returns the devices that match an attached disk, by disk, and releases all others.
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

// carries reports whether the device is equal to what Plug would create for the disk, and is not
// about to be released.
func (p *Plane) carries(loop loopdev.Device, spec Device) bool {
	return p.Flaky.server == nil && backs(loop, p.DiskPath(spec.DiskID)) &&
		loop.Serial == spec.loopSerial() && loop.SizeBytes == spec.SizeBytes &&
		loop.BlockSize == spec.BlockSize && loop.ReadOnly == spec.ReadOnly && !loop.Releasing
}

// restoreViews keeps the adopted devices in the guests' views and removes everything else. A
// hidden disk stays hidden, because its guest has not restarted.
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
	if err := restoreView(p.view(id), own); err != nil {
		return err
	}
	// The visible devices come first, because they hide others.
	var others []*plugged
	for _, d := range own {
		if d.node == "" && !exists(p.view(id).hiddenPath(d.spec.DiskID)) {
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

// restoreView finds the devices' names in their guest and removes all other entries.
func restoreView(v view, own []*plugged) error {
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
	return v.clearAside()
}

func (p *Plane) removeOrphanGuests(left []string) error {
	guests := p.guests.all()
	var errs []error
	for _, id := range left {
		if guests[id] == nil && backing.MatchString(id+".img") {
			errs = append(errs, RemoveTree(p.GuestDir(id)))
		}
	}
	return errors.Join(errs...)
}
