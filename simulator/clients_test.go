package simulator

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// TestOxidesClientsFindTheirWay makes the calls that Oxide's own clients make beside the driver.
func TestOxidesClientsFindTheirWay(t *testing.T) {
	r := serveRack(t, engine.Config{Images: []engine.ImageSpec{{Name: "os", SizeBytes: 1 << 30}}})
	for name, story := range map[string]func(*rackServer){
		"a load balancer of the cloud controller manager": (*rackServer).loadBalancer,
		"a machine of Cluster API":                        (*rackServer).machine,
		"a project of Terraform":                          (*rackServer).project,
		"a second interface of Terraform":                 (*rackServer).secondInterface,
	} {
		t.Run(name, func(t *testing.T) {
			on := *r
			on.t = t
			story(&on)
		})
	}
}

// loadBalancer is the life of a Service of the type LoadBalancer: a floating IP, attached to the
// first node, and to the second one when the first is gone.
func (r *rackServer) loadBalancer() {
	t, ctx := r.t, r.t.Context()
	view := oxide.FloatingIpViewParams{FloatingIp: "cluster-default-web", Project: "default"}
	_, err := r.FloatingIpView(ctx, view)
	gone("floating-ip", "cluster-default-web").check(t, err)
	pool := must[*oxide.SiloIpPool](t)(r.IpPoolView(ctx, oxide.IpPoolViewParams{Pool: "default"}))
	made := must[*oxide.FloatingIp](t)(r.FloatingIpCreate(ctx, oxide.FloatingIpCreateParams{
		Project: "default", Body: &oxide.FloatingIpCreate{Name: "cluster-default-web",
			AddressAllocator: oxide.AddressAllocator{Value: &oxide.AddressAllocatorAuto{
				PoolSelector: oxide.PoolSelector{Value: &oxide.PoolSelectorExplicit{
					Pool: oxide.NameOrId(pool.Id)}}}}}}))
	if address, err := netip.ParseAddr(made.Ip); err != nil || !address.Is4() ||
		made.IpPoolId != pool.Id || made.InstanceId != "" {
		t.Errorf("created: %+v", made)
	}
	ip := oxide.NameOrId(made.Id)
	attach := func(instance string) (*oxide.FloatingIp, error) {
		return r.FloatingIpAttach(ctx, oxide.FloatingIpAttachParams{FloatingIp: ip,
			Body: &oxide.FloatingIpAttach{Kind: oxide.FloatingIpParentKindInstance,
				Parent: oxide.NameOrId(instance)}})
	}
	a, b := r.instance("a").Id, r.instance("b").Id
	for range 2 { // the second time changes nothing
		if got := must[*oxide.FloatingIp](t)(attach(a)); got.InstanceId != a {
			t.Errorf("attached: %+v", got)
		}
	}
	if got := must[*oxide.ExternalIpResultsPage](t)(r.InstanceExternalIpList(ctx,
		oxide.InstanceExternalIpListParams{Instance: oxide.NameOrId(a)})); len(got.Items) != 2 {
		t.Errorf("external addresses of the instance: %+v", got.Items)
	} else if floating, is := got.Items[1].AsFloating(); !is || floating.Ip != made.Ip {
		t.Errorf("the second external address is %+v", got.Items[1])
	}
	_, err = attach(b)
	refusedAs(400, "InvalidRequest", "floating IP cannot be attached to one instance while still "+
		"attached to another").check(t, err)
	for range 2 {
		if got := must[*oxide.FloatingIp](t)(r.FloatingIpDetach(ctx,
			oxide.FloatingIpDetachParams{FloatingIp: ip})); got.InstanceId != "" {
			t.Errorf("detached: %+v", got)
		}
	}
	must[*oxide.FloatingIp](t)(attach(b))
	del := oxide.FloatingIpDeleteParams{FloatingIp: ip}
	refusedAs(400, "InvalidRequest", "Floating IP cannot be deleted while attached to an instance").
		check(t, r.FloatingIpDelete(ctx, del))
	must[*oxide.FloatingIp](t)(r.FloatingIpDetach(ctx, oxide.FloatingIpDetachParams{FloatingIp: ip}))
	refused{}.check(t, r.FloatingIpDelete(ctx, del))
}

// machine is the life of a machine: an instance with the user's keys, a boot disk from an image and
// an external address; stopped and deleted with its disk. A floating IP and a group outlive it.
func (r *rackServer) machine() {
	t, ctx := r.t, r.t.Context()
	key := must[*oxide.SshKey](t)(r.CurrentUserSshKeyCreate(ctx,
		oxide.CurrentUserSshKeyCreateParams{Body: &oxide.SshKeyCreate{Name: "key", PublicKey: "ssh"}}))
	group := must[*oxide.AntiAffinityGroup](t)(r.AntiAffinityGroupCreate(ctx,
		oxide.AntiAffinityGroupCreateParams{Project: "default", Body: &oxide.AntiAffinityGroupCreate{
			Name: "workers", Policy: oxide.AffinityPolicyFail,
			FailureDomain: oxide.FailureDomainSled}}))
	floating := must[*oxide.FloatingIp](t)(r.FloatingIpCreate(ctx, oxide.FloatingIpCreateParams{
		Project: "default", Body: &oxide.FloatingIpCreate{Name: "endpoint"}}))
	image := must[*oxide.Image](t)(r.ImageView(ctx, oxide.ImageViewParams{Image: "os"}))

	body := r.instanceBody("machine")
	body.SshPublicKeys = []oxide.NameOrId{"key"}
	body.AntiAffinityGroups = []oxide.NameOrId{"workers"}
	body.ExternalIps = []oxide.ExternalIpCreate{
		{Value: &oxide.ExternalIpCreateEphemeral{}},
		{Value: &oxide.ExternalIpCreateFloating{FloatingIp: oxide.NameOrId(floating.Id)}}}
	disk := createdDisk("machine-boot")
	disk.Value.(*oxide.InstanceDiskAttachmentCreate).DiskBackend.Value =
		&oxide.DiskBackendDistributed{DiskSource: imageSource(image.Id, false)}
	body.BootDisk = disk
	machine := must[*oxide.Instance](t)(r.doCreate(body))
	r.awaitState("machine", "running")
	id := oxide.NameOrId(machine.Id)

	keys := must[[]oxide.SshKey](t)(r.InstanceSshPublicKeyListAllPages(ctx,
		oxide.InstanceSshPublicKeyListParams{Instance: id}))
	if len(keys) != 1 || keys[0].Id != key.Id {
		t.Errorf("its keys: %+v", keys)
	}
	external := must[*oxide.ExternalIpResultsPage](t)(r.InstanceExternalIpList(ctx,
		oxide.InstanceExternalIpListParams{Instance: id})).Items
	kinds := ""
	for _, ip := range external {
		kinds += string(ip.Kind()) + " "
	}
	if kinds != "snat ephemeral floating " {
		t.Errorf("its external addresses: %s", kinds)
	}
	again := must[*oxide.ExternalIp](t)(r.InstanceEphemeralIpAttach(ctx,
		oxide.InstanceEphemeralIpAttachParams{Instance: id, Body: &oxide.EphemeralIpCreate{}}))
	before, _ := external[1].AsEphemeral()
	if after, is := again.AsEphemeral(); !is || after.Ip != before.Ip {
		t.Errorf("a second ephemeral address: got %+v, want %+v", after, before)
	}
	detach := oxide.InstanceEphemeralIpDetachParams{Instance: id}
	refused{}.check(t, r.InstanceEphemeralIpDetach(ctx, detach))
	refusedAs(400, "InvalidRequest", "instance does not have an ephemeral IP attached").
		check(t, r.InstanceEphemeralIpDetach(ctx, detach))
	must[*oxide.ExternalIp](t)(r.InstanceEphemeralIpAttach(ctx,
		oxide.InstanceEphemeralIpAttachParams{Instance: id, Body: &oxide.EphemeralIpCreate{
			PoolSelector: oxide.PoolSelector{Value: &oxide.PoolSelectorExplicit{
				Pool: "default-ipv6"}}}}))
	_, err := r.InstanceEphemeralIpAttach(ctx, oxide.InstanceEphemeralIpAttachParams{Instance: id,
		Body: &oxide.EphemeralIpCreate{PoolSelector: oxide.PoolSelector{
			Value: &oxide.PoolSelectorAuto{IpVersion: oxide.IpVersionV6}}}})
	refusedAs(404, "ObjectNotFound", "not found: default unicast IPv6 pool for current silo").
		check(t, err)

	r.membership(id, oxide.NameOrId(group.Id))
	r.doStop("machine")
	refused{}.check(t, r.InstanceDelete(ctx, oxide.InstanceDeleteParams{Instance: id}))
	refused{}.check(t, r.doDelete("machine-boot"))
	if got := must[*oxide.FloatingIp](t)(r.FloatingIpView(ctx, oxide.FloatingIpViewParams{
		FloatingIp: oxide.NameOrId(floating.Id)})); got.InstanceId != "" {
		t.Errorf("the floating IP after the end of its instance: %+v", got)
	}
	refused{}.check(t, r.FloatingIpDelete(ctx, oxide.FloatingIpDeleteParams{FloatingIp: "endpoint",
		Project: "default"}))
	refused{}.check(t, r.AntiAffinityGroupDelete(ctx, oxide.AntiAffinityGroupDeleteParams{
		AntiAffinityGroup: "workers", Project: "default"}))
	refused{}.check(t, r.CurrentUserSshKeyDelete(ctx,
		oxide.CurrentUserSshKeyDeleteParams{SshKey: "key"}))
}

// membership takes an instance out of its group. It can only join again when it is stopped.
func (r *rackServer) membership(instance, group oxide.NameOrId) {
	t, ctx := r.t, r.t.Context()
	groups := must[[]oxide.AntiAffinityGroup](t)(r.InstanceAntiAffinityGroupListAllPages(ctx,
		oxide.InstanceAntiAffinityGroupListParams{Instance: instance}))
	members := must[[]oxide.AntiAffinityGroupMember](t)(r.AntiAffinityGroupMemberListAllPages(ctx,
		oxide.AntiAffinityGroupMemberListParams{AntiAffinityGroup: group}))
	if len(groups) != 1 || groups[0].Id != string(group) || len(members) != 1 {
		t.Errorf("its groups %+v and their members %+v", groups, members)
	}
	must[*oxide.AntiAffinityGroupMember](t)(r.AntiAffinityGroupMemberInstanceView(ctx,
		oxide.AntiAffinityGroupMemberInstanceViewParams{AntiAffinityGroup: group,
			Instance: instance}))
	leave := oxide.AntiAffinityGroupMemberInstanceDeleteParams{AntiAffinityGroup: group,
		Instance: instance}
	refused{}.check(t, r.AntiAffinityGroupMemberInstanceDelete(ctx, leave))
	refusedAs(404, "ObjectNotFound", "not found: anti-affinity-group-member with id %q", instance).
		check(t, r.AntiAffinityGroupMemberInstanceDelete(ctx, leave))
	_, err := r.AntiAffinityGroupMemberInstanceAdd(ctx,
		oxide.AntiAffinityGroupMemberInstanceAddParams{AntiAffinityGroup: group, Instance: instance})
	refusedAs(400, "InvalidRequest",
		"Instance cannot be added to anti-affinity group with reservation").check(t, err)
	idle := oxide.NameOrId(r.instance("idle").Id)
	join := oxide.AntiAffinityGroupMemberInstanceAddParams{AntiAffinityGroup: group, Instance: idle}
	must[*oxide.AntiAffinityGroupMember](t)(r.AntiAffinityGroupMemberInstanceAdd(ctx, join))
	_, err = r.AntiAffinityGroupMemberInstanceAdd(ctx, join)
	refusedAs(400, "ObjectAlreadyExists", "already exists: anti-affinity-group-member %q", idle).
		check(t, err)
}

// project is the life of a project with a network of its own.
func (r *rackServer) project() {
	t, ctx := r.t, r.t.Context()
	made := must[*oxide.Project](t)(r.ProjectCreate(ctx, oxide.ProjectCreateParams{
		Body: &oxide.ProjectCreate{Name: "tf", Description: "d"}}))
	id := oxide.NameOrId(made.Id)
	vpc := must[*oxide.Vpc](t)(r.VpcView(ctx, oxide.VpcViewParams{Vpc: "default", Project: id}))
	rules := must[*oxide.VpcFirewallRules](t)(r.VpcFirewallRulesView(ctx,
		oxide.VpcFirewallRulesViewParams{Vpc: oxide.NameOrId(vpc.Id)}))
	if len(rules.Rules) != 3 || rules.Rules[2].Name != "allow-ssh" {
		t.Errorf("the rules of a new VPC: %+v", rules)
	}
	routes := must[[]oxide.RouterRoute](t)(r.VpcRouterRouteListAllPages(ctx,
		oxide.VpcRouterRouteListParams{Router: oxide.NameOrId(vpc.SystemRouterId)}))
	if len(routes) != 3 || routes[0].Name != "default" || routes[1].Name != "default-v4" {
		t.Errorf("the routes of a new VPC: %+v", routes)
	}
	refusedAs(400, "InvalidRequest", "DELETE not allowed on system routes").check(t,
		r.VpcRouterRouteDelete(ctx, oxide.VpcRouterRouteDeleteParams{
			Route: oxide.NameOrId(routes[1].Id)}))
	refusedAs(400, "InvalidRequest", "cannot delete system router").check(t,
		r.VpcRouterDelete(ctx, oxide.VpcRouterDeleteParams{
			Router: oxide.NameOrId(vpc.SystemRouterId)}))

	rule := func(name oxide.Name, of string) oxide.VpcFirewallRuleUpdate {
		return oxide.VpcFirewallRuleUpdate{Name: name, Action: "deny", Direction: "inbound",
			Status: "enabled", Priority: oxide.NewPointer(50),
			Targets: []oxide.VpcFirewallRuleTarget{{Value: &oxide.VpcFirewallRuleTargetVpc{
				Value: oxide.Name(of)}}},
			Filters: oxide.VpcFirewallRuleFilter{Ports: []oxide.L4PortRange{"80-81"},
				Protocols: []oxide.VpcFirewallRuleProtocol{
					{Value: &oxide.VpcFirewallRuleProtocolTcp{}}}}}
	}
	update := func(rules ...oxide.VpcFirewallRuleUpdate) (*oxide.VpcFirewallRules, error) {
		return r.VpcFirewallRulesUpdate(ctx, oxide.VpcFirewallRulesUpdateParams{
			Vpc:  oxide.NameOrId(vpc.Id),
			Body: &oxide.VpcFirewallRuleUpdateParams{Rules: rules}})
	}
	rules = must[*oxide.VpcFirewallRules](t)(update(rule("no-web", "default")))
	if len(rules.Rules) != 1 || rules.Rules[0].Name != "no-web" {
		t.Errorf("after their replacement: %+v", rules)
	}
	_, err := update(rule("same", "default"), rule("same", "default"))
	refusedAs(400, "InvalidValue", `unsupported value for "rules": Rule names must be unique. `+
		`Duplicates: ["same"]`).check(t, err)
	_, err = update(rule("other", "elsewhere"))
	refusedAs(400, "InvalidRequest", "cross-VPC firewall target unsupported").check(t, err)

	_, err = r.ProjectUpdate(ctx, oxide.ProjectUpdateParams{Project: id,
		Body: &oxide.ProjectUpdate{Name: "default"}})
	refusedAs(500, "Internal", "Internal Server Error").check(t, err)
	del := oxide.ProjectDeleteParams{Project: id}
	r.demand(201, "", fmt.Sprintf(`POST /v1/floating-ips?project=%s {"name":"f","description":""}`,
		id))
	r.demand(400, "floating IP must be in the same project as the instance", fmt.Sprintf(
		`POST /v1/floating-ips/f/attach?project=%s {"kind":"instance","parent":%q}`, id,
		r.instance("idle").Id))
	refusedAs(400, "InvalidRequest", "project to be deleted contains a floating ip: f").
		check(t, r.ProjectDelete(ctx, del))
	r.demand(204, "", fmt.Sprintf("DELETE /v1/floating-ips/f?project=%s", id))
	refusedAs(400, "InvalidRequest", "project to be deleted contains a vpc: default").
		check(t, r.ProjectDelete(ctx, del))
	refused{}.check(t, r.VpcSubnetDelete(ctx, oxide.VpcSubnetDeleteParams{Subnet: "default",
		Vpc: "default", Project: id}))
	refused{}.check(t, r.VpcDelete(ctx, oxide.VpcDeleteParams{Vpc: "default", Project: id}))
	refused{}.check(t, r.ProjectDelete(ctx, del))
}

// secondInterface adds an interface to a stopped instance, makes it the primary one and removes
// the first.
func (r *rackServer) secondInterface() {
	const in = "project=default&instance=idle"
	r.demand(201, "", `POST /v1/vpc-subnets?vpc=default&project=default {"name":"second",`+
		`"description":"","ipv4_block":"192.168.0.0/26"}`)
	create := func(name, instance string) string {
		return fmt.Sprintf(`POST /v1/network-interfaces?project=default&instance=%s {"name":%q,`+
			`"description":"","vpc_name":"default","subnet_name":"second"}`, instance, name)
	}
	r.demand(400, "Instance must be stopped to attach a new network interface",
		create("nic", "a"))
	made := r.demand(201, `"ip":"192.168.0.5"`, create("nic", "idle"))
	id := unmarshal[store.Identity](r.t, made).ID
	r.demand(200, id, "GET /v1/network-interfaces/nic?"+in)
	r.demand(400, "Each interface must be in a distinct VPC Subnet",
		create("third", "idle"))
	r.demand(200, `"primary":true`, "PUT /v1/network-interfaces/"+id+` {"primary":true}`)
	r.demand(400, "may not be deleted while secondary interfaces are still attached",
		"DELETE /v1/network-interfaces/"+id)
	r.demand(204, "", "DELETE /v1/network-interfaces/net0?"+in)
	r.demand(200, `"name":"only"`, "PUT /v1/network-interfaces/"+id+` {"name":"only"}`)
	r.demand(204, "", "DELETE /v1/network-interfaces/"+id)
	r.demand(404, "instance-network-interface", "GET /v1/network-interfaces/"+id)
}
