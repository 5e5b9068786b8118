package simulator

import (
	"net/http"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
)

// served are the operations that this simulator supports, with those of the kinds of resources.
var served = withResources(withPools(map[string]*operation{
	"ping":                           {noAuth: true, serve: ping},
	"current_user_view":              {serve: currentUser},
	"utilization_view":               {serve: utilization},
	"current_user_access_token_list": {list: true, serve: accessTokens},
	"rack_list":                      fleetList(engine.Silo.Racks),
	"silo_view":                      {serve: siloView},
	"silo_quotas_view":               {serve: siloQuotas},
	"system_quotas_list":             fleetList(engine.Silo.AllQuotas),
	"silo_utilization_view":          {serve: siloUtilization},
	"silo_utilization_list":          fleetList(engine.Silo.AllUtilization),
	"project_list":                   {list: true, serve: projectList},
	"project_view":                   {serve: projectView},

	"disk_list":   {list: true, required: inProject, serve: diskList},
	"disk_create": {required: inProject, body: parseDiskCreate, serve: diskCreate},
	"disk_view":   {serve: diskView},
	"disk_delete": {serve: onDisk(engine.Disks.Delete)},

	"disk_bulk_write_import_start": {serve: onDisk(engine.Disks.StartImport)},
	"disk_bulk_write_import": {body: parseBulkWrite, maxBody: maxBulkWrite,
		serve: importWrite},
	"disk_bulk_write_import_stop": {serve: onDisk(engine.Disks.StopImport)},
	"disk_finalize_import":        {body: parseFinalize, serve: importFinalize},

	"snapshot_list": {list: true, required: inProject, serve: snapshotList},
	"snapshot_create": {required: inProject, body: parseSnapshotCreate,
		serve: snapshotCreate},
	"snapshot_view":   {serve: snapshotView},
	"snapshot_delete": {serve: snapshotDelete},

	"image_list":    {list: true, serve: imageList},
	"image_create":  {body: parseImageCreate, serve: imageCreate},
	"image_view":    {serve: imageView},
	"image_delete":  {serve: imageDelete},
	"image_promote": {serve: imagePromote},
	"image_demote":  {required: inProject, serve: imageDemote},

	"instance_list": {list: true, required: inProject, serve: instanceList},
	"instance_create": {required: inProject, body: parseInstanceCreate,
		serve: instanceCreate},
	"instance_view":   {serve: onInstance(http.StatusOK, engine.Instances.View)},
	"instance_update": {body: parseInstanceUpdate, serve: instanceUpdate},
	"instance_delete": {serve: instanceDelete},
	"instance_start":  {serve: onInstance(http.StatusAccepted, engine.Instances.Start)},
	"instance_stop":   {serve: onInstance(http.StatusAccepted, engine.Instances.Stop)},
	"instance_reboot": {serve: onInstance(http.StatusAccepted, engine.Instances.Reboot)},

	"instance_serial_console": {serve: serialConsole},

	"instance_disk_list":   {list: true, serve: instanceDiskList},
	"instance_disk_attach": {body: parseDiskPath, serve: instanceDiskAttach},
	"instance_disk_detach": {body: parseDiskPath, serve: instanceDiskDetach},

	"instance_network_interface_list": {list: true, required: []string{"instance"},
		serve: interfaceList},
	"instance_network_interface_create": {required: []string{"instance"},
		body: func(f *fields) any { return readInterface(f) }, serve: interfaceCreate},
	"instance_network_interface_view":   {serve: interfaceView},
	"instance_network_interface_update": {body: parseInterfaceUpdate, serve: interfaceUpdate},
	"instance_network_interface_delete": {serve: interfaceDelete},
	"instance_external_ip_list":         {serve: externalIPList},
	"instance_external_subnet_list":     {serve: externalSubnets},
	"instance_multicast_group_list":     {list: true, serve: instanceNothing},
	"instance_ephemeral_ip_attach":      {body: parseEphemeral, serve: ephemeralIPAttach},
	"instance_ephemeral_ip_detach":      {serve: ephemeralIPDetach},

	"instance_ssh_public_key_list":      {list: true, serve: ofInstance(engine.SSHKey)},
	"instance_affinity_group_list":      {list: true, serve: ofInstance(engine.AffinityGroup)},
	"instance_anti_affinity_group_list": {list: true, serve: ofInstance(engine.AntiAffinityGroup)},

	"affinity_group_member_list":                 groupMembers(engine.AffinityGroup),
	"affinity_group_member_instance_view":        memberView(engine.AffinityGroup),
	"affinity_group_member_instance_add":         memberAdd(engine.AffinityGroup),
	"affinity_group_member_instance_delete":      memberDelete(engine.AffinityGroup),
	"anti_affinity_group_member_list":            groupMembers(engine.AntiAffinityGroup),
	"anti_affinity_group_member_instance_view":   memberView(engine.AntiAffinityGroup),
	"anti_affinity_group_member_instance_add":    memberAdd(engine.AntiAffinityGroup),
	"anti_affinity_group_member_instance_delete": memberDelete(engine.AntiAffinityGroup),

	"floating_ip_attach": {selectors: inProject, body: parseFloatingIPAttach,
		serve: floatingIPAttach},
	"floating_ip_detach": {selectors: inProject, serve: floatingIPDetach},
	"external_subnet_attach": {selectors: inProject, body: parseSubnetAttach,
		serve: externalSubnetAttach},
	"external_subnet_detach": {selectors: inProject, serve: externalSubnetDetach},

	"vpc_firewall_rules_view": {required: inVPC[:1], selectors: inVPC, serve: rulesView},
	"vpc_firewall_rules_update": {required: inVPC[:1], selectors: inVPC, body: parseRules,
		serve: rulesUpdate},
	"networking_address_lot_list":       {list: true, serve: resourceList(engine.AddressLot)},
	"networking_address_lot_create":     {body: createBody(engine.AddressLot), serve: lotCreate},
	"networking_address_lot_view":       {serve: lotView},
	"networking_address_lot_delete":     {serve: resourceDelete(engine.AddressLot)},
	"networking_address_lot_block_list": {list: true, serve: lotBlocks},
	"networking_switch_port_settings_list": {list: true, selectors: inPort,
		serve: resourceList(engine.PortSettings)},
	"networking_switch_port_settings_create": {body: createBody(engine.PortSettings),
		serve: portCreate},
	"networking_switch_port_settings_view":   {serve: portView},
	"networking_switch_port_settings_delete": {selectors: inPort, serve: portDelete},
	"vpc_subnet_list_network_interfaces":     {list: true, selectors: inVPC, serve: subnetInterfaces},
}))

var (
	inProject = []string{"project"}
	inVPC     = []string{"vpc", "project"}
	inPort    = []string{"port_settings"}
)
