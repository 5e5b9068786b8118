package simulator

import (
	"net/http"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
)

// served are the operations that this simulator supports, with those of the kinds of resources.
var served = withResources(withPools(map[string]*operation{
	"ping":                           {noAuth: true, serve: ping},
	"current_user_view":              inSilo(engine.Silo.User),
	"utilization_view":               inSilo(engine.Silo.Utilization),
	"current_user_access_token_list": whole(engine.Silo.AccessTokens),
	"rack_list":                      whole(engine.Silo.Racks),
	"silo_view":                      {serve: answer(http.StatusOK, siloView)},
	"silo_quotas_view":               ofSilo(engine.Silo.Quotas),
	"system_quotas_list":             whole(engine.Silo.AllQuotas),
	"silo_utilization_view":          ofSilo(engine.Silo.UtilizationOf),
	"silo_utilization_list":          whole(engine.Silo.AllUtilization),
	"project_list":                   {list: true, serve: answer(http.StatusOK, projectList)},
	"project_view":                   {serve: answer(http.StatusOK, projectView)},

	"disk_list":   {list: true, required: inProject, serve: listIn(engine.Disks.List)},
	"disk_create": {required: inProject, body: parseDiskCreate, serve: createIn(engine.Disks.Create)},
	"disk_view":   {serve: on(http.StatusOK, "disk", engine.Disks.View)},
	"disk_delete": {serve: end("disk", engine.Disks.Delete)},

	"disk_bulk_write_import_start": {serve: end("disk", engine.Disks.StartImport)},
	"disk_bulk_write_import": {body: parseBulkWrite, maxBody: maxBulkWrite,
		serve: nothing(importWrite)},
	"disk_bulk_write_import_stop": {serve: end("disk", engine.Disks.StopImport)},
	"disk_finalize_import":        {body: parseFinalize, serve: nothing(importFinalize)},

	"snapshot_list": {list: true, required: inProject, serve: listIn(engine.Snapshots.List)},
	"snapshot_create": {required: inProject, body: parseSnapshotCreate,
		serve: createIn(engine.Snapshots.Create)},
	"snapshot_view":   {serve: on(http.StatusOK, "snapshot", engine.Snapshots.View)},
	"snapshot_delete": {serve: end("snapshot", engine.Snapshots.Delete)},

	"image_list":    {list: true, serve: listIn(engine.Images.List)},
	"image_create":  {body: parseImageCreate, serve: createIn(engine.Images.Create)},
	"image_view":    {serve: on(http.StatusOK, "image", engine.Images.View)},
	"image_delete":  {serve: end("image", engine.Images.Delete)},
	"image_promote": {serve: on(http.StatusAccepted, "image", engine.Images.Promote)},
	"image_demote":  {required: inProject, serve: answer(http.StatusAccepted, imageDemote)},

	"instance_list": {list: true, required: inProject, serve: listIn(engine.Instances.List)},
	"instance_create": {required: inProject, body: parseInstanceCreate,
		serve: createIn(engine.Instances.Create)},
	"instance_view": {serve: on(http.StatusOK, "instance", engine.Instances.View)},
	"instance_update": {body: parseInstanceUpdate,
		serve: onWith(http.StatusOK, "instance", engine.Instances.Update)},
	"instance_delete": {serve: end("instance", engine.Instances.Delete)},
	"instance_start":  {serve: on(http.StatusAccepted, "instance", engine.Instances.Start)},
	"instance_stop":   {serve: on(http.StatusAccepted, "instance", engine.Instances.Stop)},
	"instance_reboot": {serve: on(http.StatusAccepted, "instance", engine.Instances.Reboot)},

	"instance_serial_console": {serve: serialConsole},

	"instance_disk_list": {list: true, serve: listOf(engine.Attachments.List)},
	"instance_disk_attach": {body: parseDiskPath,
		serve: onWith(http.StatusAccepted, "instance", engine.Attachments.Attach)},
	"instance_disk_detach": {body: parseDiskPath,
		serve: onWith(http.StatusAccepted, "instance", engine.Attachments.Detach)},

	"instance_network_interface_list": {list: true, required: []string{"instance"},
		serve: listOf(engine.Instances.Interfaces)},
	"instance_network_interface_create": {required: []string{"instance"},
		body:  func(f *fields) any { return readInterface(f) },
		serve: onWith(http.StatusCreated, "instance", engine.Instances.CreateInterface)},
	"instance_network_interface_view": {serve: answer(http.StatusOK, interfaceView)},
	"instance_network_interface_update": {body: parseInterfaceUpdate,
		serve: answer(http.StatusOK, interfaceUpdate)},
	"instance_network_interface_delete": {serve: nothing(interfaceDelete)},
	"instance_external_ip_list":         {serve: answer(http.StatusOK, externalIPList)},
	"instance_external_subnet_list":     {serve: answer(http.StatusOK, externalSubnets)},
	"instance_multicast_group_list":     {list: true, serve: answer(http.StatusOK, instanceNothing)},
	"instance_ephemeral_ip_attach": {body: parseEphemeral,
		serve: onWith(http.StatusAccepted, "instance", engine.Instances.AttachEphemeralIP)},
	"instance_ephemeral_ip_detach": {serve: ephemeralIPDetach},

	"instance_ssh_public_key_list":      {list: true, serve: ofInstance(engine.SSHKey)},
	"instance_affinity_group_list":      {list: true, serve: ofInstance(engine.AffinityGroup)},
	"instance_anti_affinity_group_list": {list: true, serve: ofInstance(engine.AntiAffinityGroup)},

	"affinity_group_member_list":                 groupMembers(engine.AffinityGroup),
	"affinity_group_member_instance_view":        member(engine.AffinityGroup, http.StatusOK, engine.Resources.Member),
	"affinity_group_member_instance_add":         member(engine.AffinityGroup, http.StatusCreated, engine.Resources.AddMember),
	"affinity_group_member_instance_delete":      memberDelete(engine.AffinityGroup),
	"anti_affinity_group_member_list":            groupMembers(engine.AntiAffinityGroup),
	"anti_affinity_group_member_instance_view":   member(engine.AntiAffinityGroup, http.StatusOK, engine.Resources.Member),
	"anti_affinity_group_member_instance_add":    member(engine.AntiAffinityGroup, http.StatusCreated, engine.Resources.AddMember),
	"anti_affinity_group_member_instance_delete": memberDelete(engine.AntiAffinityGroup),

	"floating_ip_attach": {selectors: inProject, body: parseFloatingIPAttach,
		serve: join("floating_ip", engine.Resources.AttachFloatingIP)},
	"floating_ip_detach": {selectors: inProject,
		serve: leave("floating_ip", engine.Resources.DetachFloatingIP)},
	"external_subnet_attach": {selectors: inProject, body: parseSubnetAttach,
		serve: join("external_subnet", engine.Resources.AttachExternalSubnet)},
	"external_subnet_detach": {selectors: inProject,
		serve: leave("external_subnet", engine.Resources.DetachExternalSubnet)},

	"vpc_firewall_rules_view": {required: inVPC[:1], selectors: inVPC, serve: answer(http.StatusOK, rulesView)},
	"vpc_firewall_rules_update": {required: inVPC[:1], selectors: inVPC, body: parseRules,
		serve: answer(http.StatusOK, rulesUpdate)},
	"networking_address_lot_list": {list: true, serve: resourceList(engine.AddressLot)},
	"networking_address_lot_create": {body: createBody(engine.AddressLot),
		serve: answer(http.StatusCreated, lotCreate)},
	"networking_address_lot_view":       {serve: answer(http.StatusOK, lotView)},
	"networking_address_lot_delete":     {serve: resourceDelete(engine.AddressLot)},
	"networking_address_lot_block_list": {list: true, serve: listed(lotBlocks)},
	"networking_switch_port_settings_list": {list: true, selectors: inPort,
		serve: resourceList(engine.PortSettings)},
	"networking_switch_port_settings_create": {body: createBody(engine.PortSettings),
		serve: answer(http.StatusCreated, portCreate)},
	"networking_switch_port_settings_view":   {serve: answer(http.StatusOK, portView)},
	"networking_switch_port_settings_delete": {selectors: inPort, serve: nothing(portDelete)},
	"vpc_subnet_list_network_interfaces": {list: true, selectors: inVPC,
		serve: listed(subnetInterfaces)},
}))

var (
	inProject = []string{"project"}
	inVPC     = []string{"vpc", "project"}
	inPort    = []string{"port_settings"}
)
