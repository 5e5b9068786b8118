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

// State returns the rack's objects, attachments, virtual machines and loop devices.
func (r *Simulation) State() (adminapi.State, error) {
	state, _, err := r.RecordedState()
	if err != nil {
		return state, err
	}
	devices, err := r.plane.OwnDevices()
	for _, d := range devices {
		state.LoopDevices = append(state.LoopDevices, adminapi.LoopDevice{Path: d.Path,
			Serial: dataplane.SerialOf(d), BackingFile: d.BackingFile})
	}
	return state, err
}

// RecordedState returns the state without the loop devices, and a version that increases with every
// change of the records.
func (r *Simulation) RecordedState() (state adminapi.State, version int, err error) {
	state.Attachments, state.LoopDevices = []adminapi.Attachment{}, []adminapi.LoopDevice{}
	err = r.store.View(func(tx *store.Tx) {
		version, state.StorageBytes = tx.ID(), tx.Storage()
		state.Projects = collect(tx, store.Projects)
		state.Instances = collect(tx, store.Instances)
		state.Disks = collect(tx, store.Disks)
		state.Snapshots = collect(tx, store.Snapshots)
		state.Images = collect(tx, store.Images)
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

// Machines returns the running virtual machines, with the last bytes of their consoles.
func (r *Simulation) Machines() (all []adminapi.Machine) {
	const last = 400
	ssh := r.plane.VMs.SSH()
	for _, id := range slices.Sorted(maps.Keys(ssh)) {
		m := adminapi.Machine{InstanceID: id, SSH: ssh[id]}
		if text, _, err := r.plane.VMs.Console(id, -1-last, last); err == nil {
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

func collect[T store.Record](tx *store.Tx, t store.Table[T]) []T {
	return slices.AppendSeq([]T{}, t.All(tx))
}

const (
	// defaultDiskLimit is how many disks an instance may have, including its boot disk (A16).
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
	// mu guards the fields below.
	now adminapi.Switches
	// changed is closed by the next change of the switches.
	changed chan struct{}
}

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

// diskLimit returns how many disks of the rack an instance may have (A16). A virtual machine
// without a boot disk of the rack boots from its own root disk, which also counts.
func (c *Config) diskLimit(now adminapi.Switches, hasBootDisk bool) int {
	switch {
	case c.Machines == "":
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

// ChangeSwitches applies a change. If the result is invalid, it fails and changes nothing.
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

// Silo has the operations on the silo: its user, quota and projects.
type Silo struct{ *Simulation }

// Projects lists the projects.
func (s Silo) Projects(call *Call, tx *store.Tx) []store.Project {
	if s.Switches().Role == adminapi.RoleNone {
		return []store.Project{}
	}
	return scan(tx, call, store.Projects, "")
}

// Project returns a project.
func (s Silo) Project(call *Call, tx *store.Tx) store.Project {
	p := find(tx, store.Projects, "", call.Named["project"])
	call.Object = p.Identity
	s.allow(call, tx, "project", call.Named["project"])
	return p
}

var (
	siloName = "simulated"
	siloID   = store.DerivedID("silo", siloName)
	userID   = store.DerivedID("user", siloName)
)

// View returns the user's own silo. For any other silo the answer is Not Found.
func (s Silo) View(call *Call, tx *store.Tx) Item {
	tx.Check(checkSilo(call.Named["silo"]))
	at := began(tx)
	call.Object = store.Identity{ID: siloID, Name: siloName}
	return Item{call.Object, map[string]any{"id": siloID, "name": siloName,
		"description": "made by the simulator", "time_created": at, "time_modified": at,
		"discoverable": true, "identity_mode": "local_only", "mapped_fleet_roles": map[string]any{}}}
}

// began returns the silo's time of creation: that of its first project in the order of the names.
func began(tx *store.Tx) (at store.Timestamp) {
	for _, first := range store.Projects.Scan(tx, "", store.ByName, nil, 1) {
		at = first.TimeCreated
	}
	return at
}

// User returns the user to whom every token belongs.
func (s Silo) User(_ *Call, tx *store.Tx) Item {
	at := began(tx)
	return item(userID, map[string]any{"id": userID, "display_name": siloName, "silo_id": siloID,
		"time_created": at, "time_modified": at, "fleet_viewer": s.fleetAdmin(), "silo_admin": false,
		"silo_name": siloName})
}

// AccessTokens returns the user's only token, without its secret. The rack accepts the token even
// after its expiry.
func (s Silo) AccessTokens(_ *Call, tx *store.Tx) []Item {
	id := store.DerivedID("token", siloName)
	token := item(id, map[string]any{"id": id, "time_created": began(tx), "time_expires": nil})
	if at := s.config.TokenExpires; !at.IsZero() {
		token.fields["time_expires"] = store.Timestamp{Time: at.UTC()}
	}
	return []Item{token}
}

// ResourceCounts are amounts of resources.
type ResourceCounts struct {
	CPUs    int64 `json:"cpus"`
	Memory  int64 `json:"memory"`
	Storage int64 `json:"storage"`
}

// Utilization has the silo's capacity, and how much of it is provisioned.
type Utilization struct {
	Provisioned ResourceCounts `json:"provisioned"`
	Capacity    ResourceCounts `json:"capacity"`
}

// Racks lists the fleet's only rack (A21).
func (s Silo) Racks(_ *Call, tx *store.Tx) []Item {
	tx.Refuse(!s.fleetAdmin(), ErrForbidden)
	at, id := began(tx), store.DerivedID("rack", siloName)
	return []Item{item(id, map[string]any{"id": id, "time_created": at, "time_modified": at})}
}

// AllQuotas lists the quotas of all silos (A21).
func (s Silo) AllQuotas(call *Call, tx *store.Tx) []Item { return s.all(call, tx, s.Quotas) }

// AllUtilization lists the utilization of all silos (A21).
func (s Silo) AllUtilization(call *Call, tx *store.Tx) []Item {
	return s.all(call, tx, s.UtilizationOf)
}

func (s Silo) all(call *Call, tx *store.Tx, of func(*Call, *store.Tx) Item) []Item {
	tx.Refuse(!s.fleetAdmin(), ErrForbidden)
	call.Named["silo"] = store.Selector{ID: siloID}
	return []Item{of(call, tx)}
}

// Utilization returns the silo's utilization, which every user of the silo may read (A15). CPUs and
// memory are provisioned from the start of an instance until it is stopped (A20).
func (s Silo) Utilization(_ *Call, tx *store.Tx) Utilization {
	u := Utilization{Capacity: ResourceCounts{CPUs: 1024, Memory: 4 * tebibyte,
		Storage: int64(s.Switches().QuotaBytes)}}
	for i := range store.Instances.All(tx) {
		if i.Active() {
			u.Provisioned.CPUs += int64(i.NCPUs)
			u.Provisioned.Memory += i.Memory
		}
	}
	u.Provisioned.Storage = tx.Storage()
	return u
}

// Quotas returns the silo's quotas. For any other silo the answer is Not Found (A21).
func (s Silo) Quotas(call *Call, tx *store.Tx) Item {
	tx.Check(checkSilo(call.Named["silo"]))
	most := s.Utilization(call, tx).Capacity
	return item(siloID, map[string]any{"silo_id": siloID, "cpus": most.CPUs, "memory": most.Memory,
		"storage": most.Storage})
}

// UtilizationOf returns the silo's utilization. For any other silo the answer is Not Found (A21).
func (s Silo) UtilizationOf(call *Call, tx *store.Tx) Item {
	tx.Check(checkSilo(call.Named["silo"]))
	u := s.Utilization(call, tx)
	return Item{store.Identity{ID: siloID, Name: siloName}, map[string]any{"silo_id": siloID,
		"silo_name": siloName, "provisioned": u.Provisioned, "allocated": u.Capacity}}
}
