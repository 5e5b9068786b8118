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
		state.LoopDevices = append(state.LoopDevices,
			adminapi.LoopDevice{
				Path: d.Path, Serial: dataplane.SerialOf(d), BackingFile: d.BackingFile})
	}
	return state, err
}

// RecordedState returns the state without the loop devices. version increases with every change of
// the records.
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

// Machines returns the running virtual machines, with the last lines of their consoles.
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

func collect[T store.Record](tx *store.Tx, t store.Table[T]) []T {
	return slices.AppendSeq([]T{}, t.All(tx))
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

// diskLimit returns how many disks of the rack an instance may have (A16). A virtual machine
// without a boot disk of the rack boots from its own root disk, which also counts.
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

// ChangeSwitches applies a change. If the switches would become invalid, it returns an error and
// changes nothing.
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

// SiloView is a silo in the form of the API.
type SiloView struct {
	store.Identity
	Discoverable     bool                `json:"discoverable"`
	IdentityMode     string              `json:"identity_mode"`
	MappedFleetRoles map[string][]string `json:"mapped_fleet_roles"`
}

// View returns the user's own silo. For any other silo the answer is Not Found.
func (s Silo) View(call *Call, tx *store.Tx) SiloView {
	tx.Check(checkSilo(call.Named["silo"]))
	user := s.User(call, tx)
	silo := SiloView{Identity: store.Identity{ID: siloID, Name: siloName,
		Description: "made by the simulator", TimeCreated: user.TimeCreated,
		TimeModified: user.TimeCreated}, Discoverable: true, IdentityMode: "local_only",
		MappedFleetRoles: map[string][]string{}}
	call.Object = silo.Identity
	return silo
}

// User is a user of the silo. Every token belongs to the same one.
type User struct {
	ID           string          `json:"id"`
	DisplayName  string          `json:"display_name"`
	SiloID       string          `json:"silo_id"`
	TimeCreated  store.Timestamp `json:"time_created"`
	TimeModified store.Timestamp `json:"time_modified"`
	FleetViewer  bool            `json:"fleet_viewer"`
	SiloAdmin    bool            `json:"silo_admin"`
	SiloName     string          `json:"silo_name"`
}

// User returns the user to whom every token belongs. The user is as old as the first project.
func (s Silo) User(_ *Call, tx *store.Tx) User {
	var at store.Timestamp
	for _, first := range store.Projects.Scan(tx, "", store.ByName, nil, 1) {
		at = first.TimeCreated
	}
	return User{ID: userID, DisplayName: siloName, SiloID: siloID, TimeCreated: at, TimeModified: at,
		FleetViewer: s.fleetAdmin(), SiloName: siloName}
}

// AccessToken describes a token to its user. It does not contain the secret.
type AccessToken struct {
	ID          string           `json:"id"`
	TimeCreated store.Timestamp  `json:"time_created"`
	TimeExpires *store.Timestamp `json:"time_expires"`
}

// Ident returns the ID by which a list is sorted.
func (t AccessToken) Ident() store.Identity { return store.Identity{ID: t.ID, Name: t.ID} }

// AccessTokens returns the user's only token. The rack accepts it even after its expiry.
func (s Silo) AccessTokens(call *Call, tx *store.Tx) []AccessToken {
	token := AccessToken{ID: store.DerivedID("token", siloName),
		TimeCreated: s.User(call, tx).TimeCreated}
	if at := s.config.TokenExpires; !at.IsZero() {
		expires := store.Timestamp{Time: at.UTC()}
		token.TimeExpires = &expires
	}
	return []AccessToken{token}
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

// Ident returns the identity by which a list is sorted.
func (q SiloQuotas) Ident() store.Identity { return store.Identity{ID: q.SiloID, Name: q.SiloID} }

// Ident returns the identity by which a list is sorted.
func (u SiloUtilization) Ident() store.Identity {
	return store.Identity{ID: u.SiloID, Name: u.SiloName}
}

// Rack is a rack in the form of the API.
type Rack struct {
	ID           string          `json:"id"`
	TimeCreated  store.Timestamp `json:"time_created"`
	TimeModified store.Timestamp `json:"time_modified"`
}

// Ident returns the identity by which a list is sorted.
func (r Rack) Ident() store.Identity { return store.Identity{ID: r.ID, Name: r.ID} }

// Racks lists the fleet's only rack (A21).
func (s Silo) Racks(call *Call, tx *store.Tx) []Rack {
	tx.Refuse(!s.fleetAdmin(), ErrForbidden)
	at := s.User(call, tx).TimeCreated
	return []Rack{{store.DerivedID("rack", siloName), at, at}}
}

// AllQuotas lists the quotas of all silos (A21).
func (s Silo) AllQuotas(call *Call, tx *store.Tx) []SiloQuotas {
	tx.Refuse(!s.fleetAdmin(), ErrForbidden)
	return []SiloQuotas{{siloID, s.Utilization(call, tx).Capacity}}
}

// AllUtilization lists the utilization of all silos (A21).
func (s Silo) AllUtilization(call *Call, tx *store.Tx) []SiloUtilization {
	tx.Refuse(!s.fleetAdmin(), ErrForbidden)
	u := s.Utilization(call, tx)
	return []SiloUtilization{{siloID, siloName, u.Provisioned, u.Capacity}}
}

// Utilization returns the silo's utilization, which every user of the silo may read (A15). CPUs and
// memory count from the start of an instance until it is stopped (A20).
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

// SiloQuotas are the quotas of a silo.
type SiloQuotas struct {
	SiloID string `json:"silo_id"`
	ResourceCounts
}

// SiloUtilization is the utilization of a silo, as the API reports it for a named silo.
type SiloUtilization struct {
	SiloID      string         `json:"silo_id"`
	SiloName    string         `json:"silo_name"`
	Provisioned ResourceCounts `json:"provisioned"`
	Allocated   ResourceCounts `json:"allocated"`
}

// Quotas returns the silo's quotas. For any other silo the answer is Not Found (A21).
func (s Silo) Quotas(call *Call, tx *store.Tx) SiloQuotas {
	u := s.UtilizationOf(call, tx)
	return SiloQuotas{u.SiloID, u.Allocated}
}

// UtilizationOf returns the silo's utilization. For any other silo the answer is Not Found (A21).
func (s Silo) UtilizationOf(call *Call, tx *store.Tx) SiloUtilization {
	tx.Check(checkSilo(call.Named["silo"]))
	u := s.Utilization(call, tx)
	return SiloUtilization{siloID, siloName, u.Provisioned, u.Capacity}
}
