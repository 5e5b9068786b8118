package simulator

import (
	"fmt"
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
	const web = "/v1/floating-ips/web%s?project=default"
	attach := func(instance string) string {
		return fmt.Sprintf("POST "+web+` {"kind":"instance","parent":%q}`, "/attach", instance)
	}
	detach, remove := fmt.Sprintf("POST "+web, "/detach"), fmt.Sprintf("DELETE "+web, "")
	r.demand(404, `floating-ip with name \"web\"`, fmt.Sprintf("GET "+web, ""))
	r.demand(201, `"instance_id":null`, `POST /v1/floating-ips?project=default {"name":"web",`+
		`"description":"","address_allocator":{"type":"auto","pool_selector":{"type":"explicit",`+
		`"pool":"default"}}}`)
	for range 2 { // the second time changes nothing
		r.demand(202, r.instance("a").Id, attach("a"))
	}
	r.demand(200, `"kind":"floating"`, "GET /v1/instances/a/external-ips?project=default")
	r.demand(400, "cannot be attached to one instance while still attached to another", attach("b"))
	for range 2 {
		r.demand(202, `"instance_id":null`, detach)
	}
	r.demand(202, r.instance("b").Id, attach("b"))
	r.demand(400, "Floating IP cannot be deleted while attached to an instance", remove)
	r.demand(202, `"instance_id":null`, detach)
	r.demand(204, "", remove)
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
	before, _ := external[1].AsEphemeral()
	ephemeral := fmt.Sprintf(" /v1/instances/%s/external-ips/ephemeral", id)
	r.demand(202, before.Ip, "POST"+ephemeral+" {}") // it has one
	r.demand(204, "", "DELETE"+ephemeral)
	r.demand(400, "instance does not have an ephemeral IP attached", "DELETE"+ephemeral)
	r.demand(202, "", "POST"+ephemeral+` {"pool_selector":{"type":"explicit","pool":"default-ipv6"}}`)
	r.demand(404, "not found: default unicast IPv6 pool for current silo",
		"POST"+ephemeral+` {"pool_selector":{"type":"auto","ip_version":"v6"}}`)

	r.membership(machine.Id, group.Id)
	r.doStop("machine")
	refused{}.check(t, r.InstanceDelete(ctx, oxide.InstanceDeleteParams{Instance: id}))
	refused{}.check(t, r.doDelete("machine-boot"))
	r.demand(200, `"instance_id":null`, "GET /v1/floating-ips/"+floating.Id)
	r.demand(204, "", "DELETE /v1/floating-ips/"+floating.Id)
	refused{}.check(t, r.AntiAffinityGroupDelete(ctx, oxide.AntiAffinityGroupDeleteParams{
		AntiAffinityGroup: "workers", Project: "default"}))
	refused{}.check(t, r.CurrentUserSshKeyDelete(ctx,
		oxide.CurrentUserSshKeyDeleteParams{SshKey: "key"}))
}

// membership takes an instance out of its group. It can only join again when it is stopped.
func (r *rackServer) membership(instance, group string) {
	members := "/v1/anti-affinity-groups/" + group + "/members"
	one, idle := members+"/instance/"+instance, members+"/instance/"+r.instance("idle").Id
	r.demand(200, group, "GET /v1/instances/"+instance+"/anti-affinity-groups")
	r.demand(200, instance, "GET "+members)
	r.demand(200, instance, "GET "+one)
	r.demand(204, "", "DELETE "+one)
	r.demand(404, `anti-affinity-group-member with id \"`+instance, "DELETE "+one)
	r.demand(400, "Instance cannot be added to anti-affinity group with reservation", "POST "+one)
	r.demand(201, "", "POST "+idle)
	r.demand(400, "already exists: anti-affinity-group-member", "POST "+idle)
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
	r.demand(400, "DELETE not allowed on system routes", "DELETE /v1/vpc-router-routes/"+routes[1].Id)
	r.demand(400, "cannot delete system router", "DELETE /v1/vpc-routers/"+vpc.SystemRouterId)

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

	r.demand(500, "Internal Server Error", "PUT /v1/projects/"+made.Id+` {"name":"default"}`)
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
	r.demand(204, "", fmt.Sprintf("DELETE /v1/vpc-subnets/default?vpc=%s", vpc.Id))
	r.demand(204, "", fmt.Sprintf("DELETE /v1/vpcs/%s", vpc.Id))
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
