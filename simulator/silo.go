package simulator

import (
	"net/http"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// served are the operations that this simulator carries out.
var served = map[string]*operation{
	"ping":                  {noAuth: true, serve: (*Server).ping},
	"current_user_view":     {serve: (*Server).currentUser},
	"utilization_view":      {serve: (*Server).utilization},
	"rack_list":             {list: true, serve: (*Server).fleetOnly},
	"silo_quotas_view":      {serve: (*Server).fleetOnly},
	"silo_utilization_list": {list: true, serve: (*Server).fleetOnly},
	"project_list":          {list: true, serve: (*Server).projectList},
	"project_view":          {serve: (*Server).projectView},

	"disk_list":   {list: true, required: inProject, serve: (*Server).diskList},
	"disk_create": {required: inProject, body: parseDiskCreate, serve: (*Server).diskCreate},
	"disk_view":   {serve: (*Server).diskView},
	"disk_delete": {serve: (*Server).diskDelete},

	"snapshot_list": {list: true, required: inProject, serve: (*Server).snapshotList},
	"snapshot_create": {required: inProject, body: parseSnapshotCreate,
		serve: (*Server).snapshotCreate},
	"snapshot_view":   {serve: (*Server).snapshotView},
	"snapshot_delete": {serve: (*Server).snapshotDelete},

	"image_list": {list: true, serve: (*Server).imageList},
	"image_view": {serve: (*Server).imageView},

	"instance_list": {list: true, required: inProject, serve: (*Server).instanceList},
	"instance_create": {required: inProject, body: parseInstanceCreate,
		serve: (*Server).instanceCreate},
	"instance_view":   {serve: (*Server).instanceView},
	"instance_update": {body: parseInstanceUpdate, serve: (*Server).instanceUpdate},
	"instance_delete": {serve: (*Server).instanceDelete},
	"instance_start":  {serve: (*Server).instanceStart},
	"instance_stop":   {serve: (*Server).instanceStop},
	"instance_reboot": {serve: (*Server).instanceReboot},

	"instance_disk_list":   {list: true, serve: (*Server).instanceDiskList},
	"instance_disk_attach": {body: parseDiskPath, serve: (*Server).instanceDiskAttach},
	"instance_disk_detach": {body: parseDiskPath, serve: (*Server).instanceDiskDetach},

	"instance_network_interface_list": {list: true, required: []string{"instance"},
		serve: (*Server).interfaceList},
	"instance_external_ip_list":         {serve: (*Server).externalIPList},
	"instance_external_subnet_list":     {serve: (*Server).instanceNothing},
	"instance_ssh_public_key_list":      {list: true, serve: (*Server).instanceNothing},
	"instance_affinity_group_list":      {list: true, serve: (*Server).instanceNothing},
	"instance_anti_affinity_group_list": {list: true, serve: (*Server).instanceNothing},
	"instance_multicast_group_list":     {list: true, serve: (*Server).instanceNothing},
	"anti_affinity_group_list": {list: true, required: inProject,
		serve: (*Server).projectNothing},
	"floating_ip_list": {list: true, required: inProject, serve: (*Server).projectNothing},
}

var inProject = []string{"project"}

func (s *Server) ping(*request) (int, any, error) {
	return http.StatusOK, struct {
		Status string `json:"status"`
	}{"ok"}, nil
}

var (
	siloName = "simulated"
	siloID   = store.DerivedID("silo", siloName)
	userID   = store.DerivedID("user", siloName)
)

type currentUser struct {
	ID           string          `json:"id"`
	DisplayName  string          `json:"display_name"`
	SiloID       string          `json:"silo_id"`
	TimeCreated  store.Timestamp `json:"time_created"`
	TimeModified store.Timestamp `json:"time_modified"`
	FleetViewer  bool            `json:"fleet_viewer"`
	SiloAdmin    bool            `json:"silo_admin"`
	SiloName     string          `json:"silo_name"`
}

func (s *Server) currentUser(*request) (int, any, error) {
	var user currentUser
	err := s.store.View(func(tx *store.Tx) error {
		// The silo's user is as old as its first project.
		first, err := store.Projects.Scan(tx, "", store.ByName, nil, 1)
		if len(first) > 0 {
			user.TimeCreated, user.TimeModified = first[0].TimeCreated, first[0].TimeCreated
		}
		return err
	})
	user.ID, user.SiloID, user.SiloName, user.DisplayName = userID, siloID, siloName, siloName
	return http.StatusOK, user, err
}

type resourceCounts struct {
	CPUs    int64 `json:"cpus"`
	Memory  int64 `json:"memory"`
	Storage int64 `json:"storage"`
}

type utilization struct {
	Provisioned resourceCounts `json:"provisioned"`
	Capacity    resourceCounts `json:"capacity"`
}

// utilization may be read by everybody in the silo (A15). CPUs and memory count while an instance
// is not stopped (A20).
func (s *Server) utilization(*request) (int, any, error) {
	u := utilization{Capacity: resourceCounts{CPUs: 1024, Memory: 4 * tebibyte,
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
	return http.StatusOK, u, err
}

// fleetOnly answers what an ordinary user of the silo may not see (A21).
func (s *Server) fleetOnly(*request) (int, any, error) { return 0, nil, errForbidden }

func (s *Server) projectList(r *request) (int, any, error) {
	if s.switches.get().Role == adminapi.RoleNone {
		return http.StatusOK, emptyPage(), nil
	}
	return list(s, r, store.Projects, func(*store.Tx) (string, error) { return "", nil })
}

func (s *Server) projectView(r *request) (int, any, error) {
	var p store.Project
	err := s.store.View(func(tx *store.Tx) error {
		sel, _ := store.ParseSelector(r.path.Get("project"))
		var err error
		p, err = s.project(r, tx, sel)
		return err
	})
	r.about(p.Identity)
	return http.StatusOK, p, err
}

// list answers with a page of a table, of the records under the parent that is found.
func list[T any](s *Server, r *request, t store.Table[T], parent func(*store.Tx) (string, error)) (
	int, any, error,
) {
	var items []T
	err := s.store.View(func(tx *store.Tx) error {
		id, err := parent(tx)
		if err != nil {
			return err
		}
		items, err = t.Scan(tx, id, r.scan.SortBy, r.scan.LastSeen, r.scan.limit)
		return err
	})
	return http.StatusOK, newPage(r.scan, items, t.Ident), err
}

// listInProject answers with a page of what a table has in the query's project.
func listInProject[T any](s *Server, r *request, t store.Table[T]) (int, any, error) {
	return list(s, r, t, func(tx *store.Tx) (string, error) {
		p, err := s.queryProject(r, tx)
		return p.ID, err
	})
}

func (s *Server) projectNothing(r *request) (int, any, error) {
	err := s.store.View(func(tx *store.Tx) error {
		_, err := s.queryProject(r, tx)
		return err
	})
	return http.StatusOK, emptyPage(), err
}
