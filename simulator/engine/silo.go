package engine

import (
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// Silo has the operations on the silo: its user, quota, projects and images.
type Silo struct{ *Simulation }

// Projects lists the projects.
func (s Silo) Projects(w Window) ([]store.Project, error) {
	if s.switches.get().Role == adminapi.RoleNone {
		return []store.Project{}, nil
	}
	return listOfSilo(s.Simulation, store.Projects, w)
}

// Project reads a project.
func (s Silo) Project(call *Call, sel store.Selector) (p store.Project, err error) {
	err = s.store.View(func(tx *store.Tx) error {
		p, err = s.project(call, tx, sel)
		return err
	})
	call.Object = p.Identity
	return p, err
}

// Images returns the images of a project or, without a project, of the silo (A44).
func (s Silo) Images(call *Call, project store.Selector, w Window) ([]store.Image, error) {
	if project.Given() {
		return list(s.Simulation, call, store.Images, project, w)
	}
	return listOfSilo(s.Simulation, store.Images, w)
}

// Image reads an image.
func (s Silo) Image(call *Call, ref Ref) (store.Image, error) {
	return view(s.Simulation, call, store.Images, ref)
}

var (
	siloName = "simulated"
	siloID   = store.DerivedID("silo", siloName)
	userID   = store.DerivedID("user", siloName)
)

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

// User reads the user that every token belongs to.
func (s Silo) User() (User, error) {
	var user User
	err := s.store.View(func(tx *store.Tx) error {
		// The silo's user is as old as its first project.
		first, err := store.Projects.Scan(tx, "", store.ByName, nil, 1)
		if len(first) > 0 {
			user.TimeCreated, user.TimeModified = first[0].TimeCreated, first[0].TimeCreated
		}
		return err
	})
	user.ID, user.SiloID, user.SiloName, user.DisplayName = userID, siloID, siloName, siloName
	return user, err
}

// AccessToken describes a token to its user, without the token itself.
type AccessToken struct {
	ID          string           `json:"id"`
	TimeCreated store.Timestamp  `json:"time_created"`
	TimeExpires *store.Timestamp `json:"time_expires"`
}

// Ident returns the ID by which the pages of a list are ordered.
func (t AccessToken) Ident() store.Identity { return store.Identity{ID: t.ID, Name: t.ID} }

// AccessTokens returns the user's tokens, of which there is one. It never expires, whatever
// expiry the rack reports.
func (s Silo) AccessTokens() ([]AccessToken, error) {
	user, err := s.User()
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

// Utilization returns the silo's utilization, which everybody in the silo may read (A15). CPUs
// and memory count while an instance is not stopped (A20).
func (s Silo) Utilization() (Utilization, error) {
	u := Utilization{Capacity: ResourceCounts{CPUs: 1024, Memory: 4 * tebibyte,
		Storage: s.switches.get().QuotaBytes}}
	err := s.store.View(func(tx *store.Tx) error {
		err := store.Instances.Each(tx, func(i store.Instance) error {
			if i.Active() {
				u.Provisioned.CPUs += int64(i.NCPUs)
				u.Provisioned.Memory += i.Memory
			}
			return nil
		})
		if err != nil {
			return err
		}
		u.Provisioned.Storage, err = tx.Storage()
		return err
	})
	return u, err
}
