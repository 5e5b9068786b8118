package engine

import (
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// Silo has the operations on the silo: its user, quota and projects.
type Silo struct{ *Simulation }

// Projects lists the projects.
func (s Silo) Projects(call *Call, tx *store.Tx) []store.Project {
	if s.Switches().Role == adminapi.RoleNone {
		return []store.Project{}
	}
	return scan(tx, call, store.Projects, "")
}

// Project reads a project.
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

// View reads the user's own silo. Another silo does not exist for the user.
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

// User is the user that every token belongs to.
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

// User reads the user that every token belongs to. The user is as old as the silo's first project.
func (s Silo) User(_ *Call, tx *store.Tx) User {
	var at store.Timestamp
	for _, first := range store.Projects.Scan(tx, "", store.ByName, nil, 1) {
		at = first.TimeCreated
	}
	return User{ID: userID, DisplayName: siloName, SiloID: siloID, TimeCreated: at, TimeModified: at,
		FleetViewer: s.fleetAdmin(), SiloName: siloName}
}

// AccessToken describes a token to its user, without the token itself.
type AccessToken struct {
	ID          string           `json:"id"`
	TimeCreated store.Timestamp  `json:"time_created"`
	TimeExpires *store.Timestamp `json:"time_expires"`
}

// Ident returns the ID by which the pages of a list are ordered.
func (t AccessToken) Ident() store.Identity { return store.Identity{ID: t.ID, Name: t.ID} }

// AccessTokens returns the user's only token. It never expires, even if the rack reports an expiry.
func (s Silo) AccessTokens(call *Call, tx *store.Tx) []AccessToken {
	token := AccessToken{ID: store.DerivedID("token", siloName),
		TimeCreated: s.User(call, tx).TimeCreated}
	if at := s.config.TokenExpires; !at.IsZero() {
		expires := store.Timestamp{Time: at.UTC()}
		token.TimeExpires = &expires
	}
	return []AccessToken{token}
}

// ResourceCounts are amounts of the resources that instances and disks use.
type ResourceCounts struct {
	CPUs    int64 `json:"cpus"`
	Memory  int64 `json:"memory"`
	Storage int64 `json:"storage"`
}

// Utilization is the silo's capacity and the provisioned part of it.
type Utilization struct {
	Provisioned ResourceCounts `json:"provisioned"`
	Capacity    ResourceCounts `json:"capacity"`
}

// Ident returns the identity by which the pages of a list are ordered.
func (q SiloQuotas) Ident() store.Identity { return store.Identity{ID: q.SiloID, Name: q.SiloID} }

// Ident returns the identity by which the pages of a list are ordered.
func (u SiloUtilization) Ident() store.Identity {
	return store.Identity{ID: u.SiloID, Name: u.SiloName}
}

// Rack is a rack of the fleet.
type Rack struct {
	ID           string          `json:"id"`
	TimeCreated  store.Timestamp `json:"time_created"`
	TimeModified store.Timestamp `json:"time_modified"`
}

// Ident returns the identity by which the pages of a list are ordered.
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

// Utilization returns the silo's utilization, which every user of the silo may read (A15). It
// counts the CPUs and the memory of an instance while it is not stopped (A20).
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

// SiloUtilization is the utilization of a silo, in the form for requests that name the silo.
type SiloUtilization struct {
	SiloID      string         `json:"silo_id"`
	SiloName    string         `json:"silo_name"`
	Provisioned ResourceCounts `json:"provisioned"`
	Allocated   ResourceCounts `json:"allocated"`
}

// Quotas returns the quotas of the silo, if the caller names their own (A21).
func (s Silo) Quotas(call *Call, tx *store.Tx) SiloQuotas {
	u := s.UtilizationOf(call, tx)
	return SiloQuotas{u.SiloID, u.Allocated}
}

// UtilizationOf returns the utilization of the silo, if the caller names their own (A21).
func (s Silo) UtilizationOf(call *Call, tx *store.Tx) SiloUtilization {
	tx.Check(checkSilo(call.Named["silo"]))
	u := s.Utilization(call, tx)
	return SiloUtilization{siloID, siloName, u.Provisioned, u.Capacity}
}
