package engine

import (
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// Silo has the operations on the silo: its user, quota and projects.
type Silo struct{ *Simulation }

// Projects lists the projects.
func (s Silo) Projects(call *Call) ([]store.Project, error) {
	if s.Switches().Role == adminapi.RoleNone {
		return []store.Project{}, nil
	}
	return listOfSilo(s.Simulation, store.Projects, call.Window)
}

// Project reads a project.
func (s Silo) Project(call *Call) (store.Project, error) {
	return reading(s.Simulation, func(tx *store.Tx) store.Project {
		p := find(tx, store.Projects, "", call.Named["project"])
		call.Object = p.Identity
		s.allow(call, tx, "project", call.Named["project"])
		return p
	})
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
func (s Silo) View(call *Call) (silo SiloView, err error) {
	if err := checkSilo(call.Named["silo"]); err != nil {
		return silo, err
	}
	user, err := s.User(call)
	silo = SiloView{Identity: store.Identity{ID: siloID, Name: siloName,
		Description: "made by the simulator", TimeCreated: user.TimeCreated,
		TimeModified: user.TimeCreated}, Discoverable: true, IdentityMode: "local_only",
		MappedFleetRoles: map[string][]string{}}
	call.Object = silo.Identity
	return silo, err
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
func (s Silo) User(*Call) (User, error) {
	first, err := listOfSilo(s.Simulation, store.Projects, Window{SortBy: store.ByName, Limit: 1})
	var at store.Timestamp
	if len(first) > 0 {
		at = first[0].TimeCreated
	}
	return User{ID: userID, DisplayName: siloName, SiloID: siloID, TimeCreated: at, TimeModified: at,
		FleetViewer: s.fleetAdmin(), SiloName: siloName}, err
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
func (s Silo) AccessTokens(call *Call) ([]AccessToken, error) {
	user, err := s.User(call)
	token := AccessToken{ID: store.DerivedID("token", siloName), TimeCreated: user.TimeCreated}
	if at := s.config.TokenExpires; !at.IsZero() {
		expires := store.Timestamp{Time: at.UTC()}
		token.TimeExpires = &expires
	}
	return []AccessToken{token}, err
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
func (s Silo) Racks(call *Call) ([]Rack, error) {
	user, err := s.User(call)
	return []Rack{{store.DerivedID("rack", siloName), user.TimeCreated, user.TimeCreated}},
		s.seesFleet(err)
}

// AllQuotas lists the quotas of all silos (A21).
func (s Silo) AllQuotas(call *Call) ([]SiloQuotas, error) {
	u, err := s.Utilization(call)
	return []SiloQuotas{{siloID, u.Capacity}}, s.seesFleet(err)
}

// AllUtilization lists the utilization of all silos (A21).
func (s Silo) AllUtilization(call *Call) ([]SiloUtilization, error) {
	u, err := s.Utilization(call)
	return []SiloUtilization{{siloID, siloName, u.Provisioned, u.Capacity}}, s.seesFleet(err)
}

func (s Silo) seesFleet(err error) error {
	if err == nil && !s.fleetAdmin() {
		err = ErrForbidden
	}
	return err
}

// Utilization returns the silo's utilization, which every user of the silo may read (A15). It
// counts the CPUs and the memory of an instance while it is not stopped (A20).
func (s Silo) Utilization(*Call) (Utilization, error) {
	u := Utilization{Capacity: ResourceCounts{CPUs: 1024, Memory: 4 * tebibyte,
		Storage: int64(s.Switches().QuotaBytes)}}
	err := s.store.View(func(tx *store.Tx) {
		for i := range store.Instances.All(tx) {
			if i.Active() {
				u.Provisioned.CPUs += int64(i.NCPUs)
				u.Provisioned.Memory += i.Memory
			}
		}
		u.Provisioned.Storage = tx.Storage()
	})
	return u, err
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
func (s Silo) Quotas(call *Call) (SiloQuotas, error) {
	u, err := s.UtilizationOf(call)
	return SiloQuotas{u.SiloID, u.Allocated}, err
}

// UtilizationOf returns the utilization of the silo, if the caller names their own (A21).
func (s Silo) UtilizationOf(call *Call) (SiloUtilization, error) {
	if err := checkSilo(call.Named["silo"]); err != nil {
		return SiloUtilization{}, err
	}
	u, err := s.Utilization(call)
	return SiloUtilization{siloID, siloName, u.Provisioned, u.Capacity}, err
}
