package engine

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// State returns everything that the rack has.
func (r *Simulation) State() (adminapi.State, error) {
	state, _, err := r.RecordedState()
	if err != nil {
		return state, err
	}
	devices, err := r.plane.OwnDevices()
	for _, d := range devices {
		state.LoopDevices = append(state.LoopDevices,
			adminapi.LoopDevice{
				Path: d.Path, Serial: dataplane.SerialOf(d), BackingFile: d.BackingFile})
	}
	return state, err
}

// RecordedState returns the state without the devices, and the version of the records, which
// increases with every change.
func (r *Simulation) RecordedState() (state adminapi.State, version int, err error) {
	state.Attachments, state.LoopDevices = []adminapi.Attachment{}, []adminapi.LoopDevice{}
	err = r.store.View(func(tx *store.Tx) {
		version, state.StorageBytes = tx.ID(), tx.Storage()
		collect(tx, store.Projects.Name, &state.Projects)
		collect(tx, store.Instances.Name, &state.Instances)
		collect(tx, store.Disks.Name, &state.Disks)
		collect(tx, store.Snapshots.Name, &state.Snapshots)
		collect(tx, store.Images.Name, &state.Images)
	})
	if err != nil {
		return state, 0, err
	}
	state.Machines = r.Machines()
	for _, d := range state.Disks {
		if d.State.Instance != "" {
			state.Attachments = append(state.Attachments,
				adminapi.Attachment{InstanceID: d.State.Instance, DiskID: d.ID})
		}
	}
	return state, version, nil
}

// Machines returns the virtual machines that run.
func (r *Simulation) Machines() (all []adminapi.Machine) {
	const last = 400
	ssh := r.plane.SSH()
	for _, id := range slices.Sorted(maps.Keys(ssh)) {
		m := adminapi.Machine{InstanceID: id, SSH: ssh[id]}
		if text, _, err := r.plane.Console(id, -1-last, last); err == nil {
			m.Console = string(text)
		}
		all = append(all, m)
	}
	return all
}

// Version returns the version of the records.
func (r *Simulation) Version() (version int, err error) {
	return Reading(r, func(tx *store.Tx) int { return tx.ID() })
}

// collect decodes every record of a table into the admin listener's type, which has the same JSON
// keys as the record.
func collect[T any](tx *store.Tx, table string, into *[]T) {
	*into = slices.AppendSeq([]T{}, store.As[T](tx, table))
}

const (
	// A16: an instance may have twelve disks, including its boot disk.
	defaultDiskLimit = 12
	defaultQuota     = 64 * tebibyte
)

func checkSwitches(s adminapi.Switches) error {
	switch {
	case s.QuotaBytes < 0:
		return fmt.Errorf("quota_bytes is %d; it cannot be negative", s.QuotaBytes)
	case s.DiskLimit < 0:
		return fmt.Errorf("disk_limit is %d; it cannot be negative", s.DiskLimit)
	}
	if err := s.Hotplug.Check(); err != nil {
		return err
	}
	if slices.Contains([]string{adminapi.RoleCollaborator, adminapi.RoleViewer, adminapi.RoleNone,
		adminapi.RoleFleetAdmin}, s.Role) {
		return nil
	}
	return fmt.Errorf("role is %q; use %s, %s, %s or %s", s.Role, adminapi.RoleCollaborator,
		adminapi.RoleViewer, adminapi.RoleNone, adminapi.RoleFleetAdmin)
}

type switchboard struct {
	mu sync.Mutex
	// mu guards now and changed.
	now adminapi.Switches
	// changed is closed at the next change.
	changed chan struct{}
}

// watch returns the present switches, and a channel that is closed when they change.
func (b *switchboard) watch() (now adminapi.Switches, changed <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.now, b.changed
}

func (c Config) switches() adminapi.Switches {
	return adminapi.Switches{
		Hotplug:       cmp.Or(c.Hotplug, adminapi.HotplugFull),
		DeviceDelay:   adminapi.Duration(c.DeviceDelay),
		CreateHold:    adminapi.Duration(c.CreateHold),
		SnapshotHold:  adminapi.Duration(c.SnapshotHold),
		FreeDelay:     adminapi.Duration(c.FreeDelay),
		QuotaFirst:    c.QuotaFirst,
		InstanceDelay: adminapi.Duration(c.InstanceDelay),
		QuotaBytes:    adminapi.Size(cmp.Or(c.QuotaBytes, defaultQuota)),
		DiskLimit:     cmp.Or(c.DiskLimit, defaultDiskLimit),
		Role:          cmp.Or(c.Role, adminapi.RoleCollaborator),
	}
}

// diskLimit returns how many disks of the rack an instance may have (A16). The guest of a virtual
// machine without a boot disk of the rack sees the machine's own root disk in its place.
func (r *Simulation) diskLimit(now adminapi.Switches, hasBootDisk bool) int {
	switch {
	case r.config.Machines == "":
		return now.DiskLimit
	case hasBootDisk:
		return min(now.DiskLimit, defaultDiskLimit)
	}
	return min(now.DiskLimit, defaultDiskLimit-1)
}

// Switches returns the present switches.
func (r *Simulation) Switches() adminapi.Switches {
	now, _ := r.switches.watch()
	return now
}

// ChangeSwitches applies a change as a whole. It returns an error, and changes nothing, if the
// switches would become invalid.
func (r *Simulation) ChangeSwitches(apply func(*adminapi.Switches) error) (
	adminapi.Switches, error) {
	b := &r.switches
	b.mu.Lock()
	defer b.mu.Unlock()
	next := b.now
	err := apply(&next)
	if err == nil {
		err = checkSwitches(next)
	}
	if err == nil {
		close(b.changed)
		b.now, b.changed = next, make(chan struct{})
	}
	return b.now, err
}

func (r *Simulation) resetSwitches() error {
	_, err := r.ChangeSwitches(func(now *adminapi.Switches) error {
		*now = r.config.switches()
		return nil
	})
	return err
}
