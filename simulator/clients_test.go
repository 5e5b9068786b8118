package simulator

import (
	"fmt"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// TestTheRackServesOxidesClients makes the calls of Oxide's own clients that the driver does not
// make.
func TestTheRackServesOxidesClients(t *testing.T) {
	r := serveRack(t, engine.Config{Images: []engine.ImageSpec{{Name: "os", SizeBytes: 1 << 30}}})
	for name, story := range map[string]func(*rackServer){
		"a load balancer of the cloud controller manager": (*rackServer).loadBalancer,
		"a machine of Cluster API":                        (*rackServer).machine,
		"a project of Terraform":                          (*rackServer).project,
		"a second interface of Terraform":                 (*rackServer).secondInterface,
	} {
		t.Run(name, func(t *testing.T) { story(r.on(t)) })
	}
}

// loadBalancer makes the calls for a Service of the type LoadBalancer: it attaches a floating IP to
// the first node, and to the second node when the first one is gone.
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
		r.demand(202, r.instance("a").ID, attach("a"))
	}
	r.demand(200, `"kind":"floating"`, "GET /v1/instances/a/external-ips?project=default")
	r.demand(400, "cannot be attached to one instance while still attached to another", attach("b"))
	for range 2 {
		r.demand(202, `"instance_id":null`, detach)
	}
	r.demand(202, r.instance("b").ID, attach("b"))
	r.demand(400, "Floating IP cannot be deleted while attached to an instance", remove)
	r.demand(202, `"instance_id":null`, detach)
	r.demand(204, "", remove)
}

// machine creates an instance with the user's keys, a boot disk from an image and external
// addresses, and deletes the instance and its disk. A floating IP and a group outlive the instance.
func (r *rackServer) machine() {
	made := func(request string) string {
		return unmarshal[store.Identity](r.t, r.demand(201, "", request)).ID
	}
	key := made(`POST /v1/me/ssh-keys {"name":"key","description":"","public_key":"ssh"}`)
	group := made(`POST /v1/anti-affinity-groups?project=default {"name":"workers","description":"",` +
		`"policy":"fail","failure_domain":"sled"}`)
	floating := made(`POST /v1/floating-ips?project=default {"name":"endpoint","description":""}`)
	image := unmarshal[store.Image](r.t, r.demand(200, "", "GET /v1/images/os")).ID
	id := made(newInstance("machine", fmt.Sprintf(`,"ssh_public_keys":["key"],`+
		`"anti_affinity_groups":["workers"],"external_ips":[{"type":"ephemeral"},{"type":"floating",`+
		`"floating_ip":%q}],"boot_disk":{"type":"create","name":"machine-boot","description":"",`+
		`"size":1073741824,"disk_backend":{"type":"distributed","disk_source":%s}}`, floating,
		source("image", image))))
	r.awaitState("machine", "running")

	r.demand(200, key, "GET /v1/instances/"+id+"/ssh-public-keys")
	external := r.demand(200, "", "GET /v1/instances/"+id+"/external-ips")
	var kinds []string
	ephemeralIP := ""
	for _, ip := range unmarshal[page[map[string]any]](r.t, external).Items {
		kinds = append(kinds, ip["kind"].(string))
		if ip["kind"] == "ephemeral" {
			ephemeralIP = ip["ip"].(string)
		}
	}
	if got := strings.Join(kinds, " "); got != "snat ephemeral floating" {
		r.t.Errorf("the instance has the external addresses %s", got)
	}
	ephemeral := fmt.Sprintf(" /v1/instances/%s/external-ips/ephemeral", id)
	r.demand(202, ephemeralIP, "POST"+ephemeral+" {}") // an instance keeps the one that it has
	r.demand(204, "", "DELETE"+ephemeral)
	r.demand(400, "instance does not have an ephemeral IP attached", "DELETE"+ephemeral)
	r.demand(202, "", "POST"+ephemeral+` {"pool_selector":{"type":"explicit","pool":"default-ipv6"}}`)
	r.demand(404, "not found: default unicast IPv6 pool for current silo",
		"POST"+ephemeral+` {"pool_selector":{"type":"auto","ip_version":"v6"}}`)

	r.membership(id, group)
	r.change("stop", "machine", "stopped")
	r.delete("instances/machine")
	r.delete("disks/machine-boot")
	r.demand(200, `"instance_id":null`, "GET /v1/floating-ips/"+floating)
	r.demand(204, "", "DELETE /v1/floating-ips/"+floating)
	r.delete("anti-affinity-groups/workers")
	r.demand(204, "", "DELETE /v1/me/ssh-keys/key")
}

// membership removes an instance from its group. The instance can join again only when it is
// stopped.
func (r *rackServer) membership(instance, group string) {
	members := "/v1/anti-affinity-groups/" + group + "/members"
	one, idle := members+"/instance/"+instance, members+"/instance/"+r.instance("idle").ID
	r.demand(200, group, "GET /v1/instances/"+instance+"/anti-affinity-groups")
	r.demand(200, instance, "GET "+members)
	r.demand(200, instance, "GET "+one)
	r.demand(204, "", "DELETE "+one)
	r.demand(404, `anti-affinity-group-member with id \"`+instance, "DELETE "+one)
	r.demand(400, "Instance cannot be added to anti-affinity group with reservation", "POST "+one)
	r.demand(201, "", "POST "+idle)
	r.demand(400, "already exists: anti-affinity-group-member", "POST "+idle)
}

// project creates, changes and deletes a project with its network.
func (r *rackServer) project() {
	id := unmarshal[store.Identity](r.t, r.demand(201, "",
		`POST /v1/projects {"name":"tf","description":"d"}`)).ID
	vpc := unmarshal[store.Resource](r.t, r.demand(200, "", "GET /v1/vpcs/default?project="+id))
	rules := "/v1/vpc-firewall-rules?vpc=" + vpc.ID
	names := func(answer string) string {
		var list []string
		got := unmarshal[struct{ Rules, Items []store.Identity }](r.t, answer)
		for _, i := range append(got.Rules, got.Items...) {
			list = append(list, i.Name)
		}
		return strings.Join(list, " ")
	}
	want := func(list, answer string) {
		r.t.Helper()
		if got := names(answer); got != list {
			r.t.Errorf("got %s, want %s", got, list)
		}
	}
	want("allow-icmp allow-internal-inbound allow-ssh", r.demand(200, "", "GET "+rules))
	router := vpc.Text("system_router_id")
	routes := r.demand(200, "", "GET /v1/vpc-router-routes?router="+router)
	want("default default-v4 default-v6", routes)
	v4 := unmarshal[page[store.Identity]](r.t, routes).Items[1].ID
	r.demand(400, "DELETE not allowed on system routes", "DELETE /v1/vpc-router-routes/"+v4)
	r.demand(400, "cannot delete system router", "DELETE /v1/vpc-routers/"+router)

	rule := func(name, target string) string {
		return fmt.Sprintf(`{"name":%q,"description":"","action":"deny","direction":"inbound",`+
			`"status":"enabled","priority":50,"targets":[{"type":"vpc","value":%q}],`+
			`"filters":{"ports":["80-81"],"protocols":[{"type":"tcp"}]}}`, name, target)
	}
	replace := func(list ...string) string {
		return fmt.Sprintf(`PUT %s {"rules":[%s]}`, rules, strings.Join(list, ","))
	}
	want("no-web", r.demand(200, "", replace(rule("no-web", "default"))))
	r.demand(400, `Rule names must be unique. Duplicates: [\"same\"]`,
		replace(rule("same", "default"), rule("same", "default")))
	r.demand(400, "cross-VPC firewall target unsupported", replace(rule("other", "elsewhere")))

	r.demand(500, "Internal Server Error", "PUT /v1/projects/"+id+` {"name":"default"}`)
	remove := "DELETE /v1/projects/" + id
	r.demand(201, "", "POST /v1/floating-ips?project="+id+` {"name":"f","description":""}`)
	r.demand(400, "floating IP must be in the same project as the instance", fmt.Sprintf(
		`POST /v1/floating-ips/f/attach?project=%s {"kind":"instance","parent":%q}`, id,
		r.instance("idle").ID))
	r.demand(400, "project to be deleted contains a floating ip: f", remove)
	r.demand(204, "", fmt.Sprintf("DELETE /v1/floating-ips/f?project=%s", id))
	r.demand(400, "project to be deleted contains a vpc: default", remove)
	r.demand(204, "", fmt.Sprintf("DELETE /v1/vpc-subnets/default?vpc=%s", vpc.ID))
	r.demand(204, "", fmt.Sprintf("DELETE /v1/vpcs/%s", vpc.ID))
	r.demand(204, "", remove)
}

// secondInterface adds an interface to a stopped instance, makes the new interface the primary one,
// and removes the first one.
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
