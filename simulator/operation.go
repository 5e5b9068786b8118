package simulator

// served are the operations that this simulator supports.
var served = map[string]*operation{
	"ping":                           {noAuth: true, serve: ping},
	"current_user_view":              {serve: currentUser},
	"utilization_view":               {serve: utilization},
	"current_user_access_token_list": {list: true, serve: accessTokens},
	"rack_list":                      {list: true, serve: fleetOnly},
	"silo_quotas_view":               {serve: fleetOnly},
	"silo_utilization_list":          {list: true, serve: fleetOnly},
	"project_list":                   {list: true, serve: projectList},
	"project_view":                   {serve: projectView},

	"disk_list":   {list: true, required: inProject, serve: diskList},
	"disk_create": {required: inProject, body: parseDiskCreate, serve: diskCreate},
	"disk_view":   {serve: diskView},
	"disk_delete": {serve: diskDelete},

	"snapshot_list": {list: true, required: inProject, serve: snapshotList},
	"snapshot_create": {required: inProject, body: parseSnapshotCreate,
		serve: snapshotCreate},
	"snapshot_view":   {serve: snapshotView},
	"snapshot_delete": {serve: snapshotDelete},

	"image_list": {list: true, serve: imageList},
	"image_view": {serve: imageView},

	"instance_list": {list: true, required: inProject, serve: instanceList},
	"instance_create": {required: inProject, body: parseInstanceCreate,
		serve: instanceCreate},
	"instance_view":   {serve: instanceView},
	"instance_update": {body: parseInstanceUpdate, serve: instanceUpdate},
	"instance_delete": {serve: instanceDelete},
	"instance_start":  {serve: instanceStart},
	"instance_stop":   {serve: instanceStop},
	"instance_reboot": {serve: instanceReboot},

	"instance_disk_list":   {list: true, serve: instanceDiskList},
	"instance_disk_attach": {body: parseDiskPath, serve: instanceDiskAttach},
	"instance_disk_detach": {body: parseDiskPath, serve: instanceDiskDetach},

	"instance_network_interface_list": {list: true, required: []string{"instance"},
		serve: interfaceList},
	"instance_external_ip_list":         {serve: externalIPList},
	"instance_external_subnet_list":     {serve: instanceNothing},
	"instance_ssh_public_key_list":      {list: true, serve: instanceNothing},
	"instance_affinity_group_list":      {list: true, serve: instanceNothing},
	"instance_anti_affinity_group_list": {list: true, serve: instanceNothing},
	"instance_multicast_group_list":     {list: true, serve: instanceNothing},
	"anti_affinity_group_list": {list: true, required: inProject,
		serve: projectNothing},
	"floating_ip_list": {list: true, required: inProject, serve: projectNothing},
}

var inProject = []string{"project"}
