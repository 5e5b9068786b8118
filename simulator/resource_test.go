package simulator

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"net/http"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/looptest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

var lives = map[string]struct {
	// query names the parent. fields is the JSON of a creation's fields besides name and description,
	// in which the test replaces each N by 1, 2 and so on.
	query, fields string
	// update is the body of an update; "" means that the kind cannot be updated. shows is a text that
	// the updated record must contain.
	update, shows string
	// The request in holder makes a deletion of the record fail with the error in holds. After the
	// requests in release, a deletion succeeds. The test replaces NAME and ID by those of the record.
	holder, holds, release string
}{
	"project": {
		update: `{"name":"NAME","description":"new"}`, shows: `"description":"new"`,
		holds: "project to be deleted contains a vpc: default",
		release: "DELETE /v1/vpc-subnets/default?vpc=default&project=ID\n" +
			"DELETE /v1/vpcs/default?project=ID",
	},
	"ip-pool": {fields: `"ip_version":"v4"`,
		update: `{"description":"new"}`, shows: `"pool_type":"unicast"`,
		holder:  `POST /v1/system/ip-pools/ID/ranges/add {"first":"10.1.0.1","last":"10.1.0.9"}`,
		holds:   "IP Pool cannot be deleted while it contains IP ranges",
		release: `POST /v1/system/ip-pools/ID/ranges/remove {"first":"10.1.0.1","last":"10.1.0.9"}`},
	"subnet-pool": {fields: `"ip_version":"v6"`,
		update: `{"description":"new"}`, shows: `"ip_version":"v6"`,
		holder:  `POST /v1/system/subnet-pools/ID/members/add {"subnet":"fd00::/48"}`,
		holds:   "Cannot delete external subnet pool while it contains members",
		release: `POST /v1/system/subnet-pools/ID/members/remove {"subnet":"fd00::/48"}`},
	"ssh-key": {fields: `"public_key":"ssh-ed25519 key"`},
	"floating-ip": {query: "project=default",
		update: `{"description":"new"}`, shows: `"description":"new"`,
		holder:  `POST /v1/floating-ips/ID/attach {"kind":"instance","parent":"idle"}`,
		holds:   "Floating IP cannot be deleted while attached to an instance",
		release: "POST /v1/floating-ips/ID/detach",
	},
	"external-subnet": {query: "project=default",
		fields: `"allocator":{"type":"explicit","subnet":"10.7.N.0/24"}`,
		update: `{"description":"new"}`, shows: `"subnet":"10.7.1.0/24"`,
		holder:  `POST /v1/external-subnets/ID/attach {"instance":"idle"}`,
		holds:   "Cannot delete external subnet while it is attached to an instance",
		release: "POST /v1/external-subnets/ID/detach",
	},
	"affinity-group": {query: "project=default",
		fields: `"policy":"allow","failure_domain":"sled"`,
		update: `{"description":"new"}`, shows: `"description":"new"`},
	"anti-affinity-group": {query: "project=default",
		fields: `"policy":"fail","failure_domain":"sled"`,
		update: `{"description":"new"}`, shows: `"policy":"fail"`},
	"vpc": {query: "project=default", fields: `"dns_name":"d"`,
		update: `{"dns_name":"other"}`, shows: `"dns_name":"other"`,
		holds:   "VPC cannot be deleted while VPC Subnets exist",
		release: "DELETE /v1/vpc-subnets/default?vpc=ID"},
	"vpc-subnet": {query: "vpc=default&project=default", fields: `"ipv4_block":"10.0.N.0/24"`,
		update: `{"description":"new"}`, shows: `"ipv4_block":"10.0.1.0/24"`,
		holder: `POST /v1/instances?project=default {"name":"inside","description":"","hostname":"i",` +
			`"ncpus":1,"memory":1073741824,"start":false,"network_interfaces":{"type":"create",` +
			`"params":[{"name":"n","description":"","vpc_name":"default","subnet_name":"NAME"}]}}`,
		holds:   "VPC Subnet cannot be deleted while network interfaces in the subnet exist",
		release: "DELETE /v1/instances/inside?project=default"},
	"vpc-router": {query: "vpc=default&project=default",
		update: `{"description":"new"}`, shows: `"kind":"custom"`},
	"router-route": {query: "router=ROUTER",
		fields: `"destination":{"type":"ip_net","value":"10.9.0.0/16"},"target":{"type":"drop"}`,
		update: `{"destination":{"type":"ip","value":"10.9.0.1"},"target":{"type":"ip",` +
			`"value":"172.30.0.7"}}`,
		shows: `"target":{"type":"ip","value":"172.30.0.7"}`},
	"internet-gateway": {query: "vpc=default&project=default"},
}

// servedPath returns the path of a served operation, without the last parameter.
func servedPath(k *engine.Kind, verb string) (path string, ok bool) {
	for _, op := range routes {
		if op.name == k.Operation+"_"+verb && op.serve != nil {
			return "/" + strings.TrimSuffix(strings.Join(op.path, "/"), "/{"+k.Param+"}"), true
		}
	}
	return "", false
}

// The test restarts the rack between the creation and the update of the records.
func TestEveryKindOfResourceCanBeCreatedUpdatedAndDeleted(t *testing.T) {
	r := serveRack(t, engine.Config{Role: adminapi.RoleFleetAdmin})
	router := unmarshal[store.Identity](r.t, r.demand(201, "",
		`POST /v1/vpc-routers?vpc=default&project=default {"name":"for-routes","description":""}`))
	for _, request := range []string{
		`POST /v1/system/subnet-pools {"name":"of-life","description":"","ip_version":"v4"}`,
		`POST /v1/system/subnet-pools/of-life/members/add {"subnet":"10.7.0.0/16"}`,
		`POST /v1/system/subnet-pools/of-life/silos {"silo":"simulated","is_default":false}`,
	} {
		r.demand(201, "", request)
	}
	begun := map[string][]string{}
	r.eachKind("", func(r *rackServer, k *engine.Kind, path string) {
		life := lives[k.Name]
		query := strings.ReplaceAll(life.query, "ROUTER", router.ID)
		begun[k.Name] = r.beginLife(k, path, query, life.fields)
	})
	if len(begun) != len(lives) {
		r.t.Errorf("%d kinds were created and there are %d lives", len(begun), len(lives))
	}
	r = r.again()
	r.become(adminapi.RoleFleetAdmin)
	r.eachKind(" after a restart", func(r *rackServer, k *engine.Kind, path string) {
		if life := begun[k.Name]; life != nil {
			r.endLife(k, path, life[0], life[1])
		}
	})
}

// eachKind runs test in a subtest for each kind of resource that clients can create.
func (r *rackServer) eachKind(when string, test func(*rackServer, *engine.Kind, string)) {
	for _, k := range engine.Kinds {
		if path, ok := servedPath(k, "create"); ok {
			r.t.Run(k.Name+when, func(t *testing.T) {
				test(r.on(t), k, path)
			})
		}
	}
}

func (r *rackServer) beginLife(k *engine.Kind, path, query, fields string) []string {
	if fields != "" {
		fields = "," + fields
	}
	create := func(n, description string) string {
		return fmt.Sprintf(`POST %s?%s {"name":"mine","description":%q%s}`, path, query, description,
			strings.ReplaceAll(fields, "N", n))
	}
	made := r.demand(201, `"name":"mine","description":"d"`, create("1", "d"))
	id := unmarshal[store.Identity](r.t, made).ID
	r.demand(400, fmt.Sprintf(`already exists: %s \"mine\"`, k.Name), create("2", "d"))
	r.demand(400, "missing field `name`", fmt.Sprintf("POST %s?%s {}", path, query))
	r.demand(500, "Internal", create("3", strings.Repeat("x", 513)))
	r.demand(200, made, fmt.Sprintf("GET %s/%s", path, id))
	r.demand(200, made, fmt.Sprintf("GET %s/mine?%s", path, query))
	r.demand(200, made, fmt.Sprintf("GET %s?%s", path, query))
	r.demand(200, made, fmt.Sprintf("GET %s?%s&sort_by=id_ascending&limit=10000", path, query))
	r.demand(404, fmt.Sprintf(`not found: %s with name \"nope\"`, k.Name),
		fmt.Sprintf("GET %s/nope?%s", path, query))
	if k.Parent != nil {
		r.demand(400, "when providing "+k.Both, fmt.Sprintf("GET %s/%s?%s", path, id, query))
		r.demand(400, k.Neither+" should be specified", fmt.Sprintf("GET %s/mine", path))
		r.demand(400, fmt.Sprintf("missing field `%s`", k.Parent.Param), "GET "+path)
	}
	return []string{id, made}
}

func (r *rackServer) accept(request string) {
	r.t.Helper()
	if got := r.send(request); got.status >= http.StatusBadRequest {
		r.t.Fatalf("%s: HTTP %d: %s", request, got.status, got.body)
	}
}

func (r *rackServer) endLife(k *engine.Kind, path, id, made string) {
	life := lives[k.Name]
	fill := strings.NewReplacer("ID", id, "NAME", "renamed").Replace
	one := path + "/" + id
	r.demand(200, made, "GET "+one)
	if _, ok := servedPath(k, "update"); ok != (life.update != "") {
		r.t.Errorf("whether it can be updated: got %v", ok)
	} else if ok {
		var update map[string]any
		looptest.Must(r.t, json.Unmarshal([]byte(fill(life.update)), &update))
		update["name"] = "renamed"
		body, _ := json.Marshal(update)
		updated := r.demand(200, `"name":"renamed"`, fmt.Sprintf("PUT %s %s", one, body))
		r.demand(200, life.shows, "GET "+one)
		r.demand(200, updated, "GET "+one)
	}
	if life.holder != "" {
		r.accept(fill(life.holder))
	}
	if life.holds != "" {
		r.demand(400, life.holds, "DELETE "+one)
		for _, request := range strings.Split(fill(life.release), "\n") {
			r.accept(request)
		}
	}
	r.demand(204, "", "DELETE "+one)
	r.demand(404, fmt.Sprintf(`not found: %s with id \"%s\"`, k.Name, id), "GET "+one)
}

// The test sends the requests of Oxide clients other than the driver.
func TestTheRackServesTerraformClusterAPIAndCloudController(t *testing.T) {
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

// loadBalancer sends the requests for a Service of the type LoadBalancer: it attaches a floating IP
// to the first node, and then moves the IP to the second node.
func (r *rackServer) loadBalancer() {
	r.play(`
404 GET floating-ips/web?IN => floating-ip with name \"web\"
201 POST floating-ips?IN {NAME=web,"address_allocator":{"type":"auto","pool_selector":
	{"type":"explicit","pool":"default"}}} => "instance_id":null
202 POST floating-ips/web/attach?IN {"kind":"instance","parent":"a"} => FIRST
202 POST floating-ips/web/attach?IN {"kind":"instance","parent":"a"} => FIRST
200 GET instances/a/external-ips?IN => "kind":"floating"
400 POST floating-ips/web/attach?IN {"kind":"instance","parent":"b"}
	=> cannot be attached to one instance while still attached to another
202 POST floating-ips/web/detach?IN => "instance_id":null
202 POST floating-ips/web/detach?IN => "instance_id":null
202 POST floating-ips/web/attach?IN {"kind":"instance","parent":"b"} => SECOND
400 DELETE floating-ips/web?IN => Floating IP cannot be deleted while attached to an instance
202 POST floating-ips/web/detach?IN => "instance_id":null
204 DELETE floating-ips/web?IN`, "IN", "project=default", "FIRST", r.instance("a").ID,
		"SECOND", r.instance("b").ID)
}

// machine() creates and deletes an instance. The floating IP and the group must remain.
func (r *rackServer) machine() {
	id := func(answer string) string { return unmarshal[store.Identity](r.t, answer).ID }
	words := []string{"IN", "project=default", "KEY",
		id(r.play(`201 POST me/ssh-keys {NAME=key,"public_key":"ssh"}`)),
		"GROUP", id(r.play(`201 POST anti-affinity-groups?project=default {NAME=workers,"policy":"fail",
	"failure_domain":"sled"}`)),
		"FLOATING", id(r.play(`201 POST floating-ips?project=default {NAME=endpoint}`)),
		"IMAGE", id(r.play("200 GET images/os")), "IDLE", r.instance("idle").ID}
	words = append(words, "ID", id(r.play(`
201 POST instances?IN {NAME=machine,"hostname":"i","ncpus":1,"memory":1073741824,
	"ssh_public_keys":["key"],"anti_affinity_groups":["workers"],"external_ips":[{"type":"ephemeral"},
	{"type":"floating","floating_ip":"FLOATING"}],"boot_disk":{"type":"create",NAME=machine-boot,
	"size":1073741824,"disk_backend":{"type":"distributed","disk_source":
	{"type":"image","image_id":"IMAGE","read_only":false}}}}`, words...)))
	r.awaitState("machine", "running")
	r.play(`200 GET instances/ID/ssh-public-keys => KEY`, words...)
	kinds, ephemeral := []string{}, ""
	for _, ip := range unmarshal[page[map[string]any]](r.t,
		r.play(`200 GET instances/ID/external-ips`, words...)).Items {
		kinds = append(kinds, ip["kind"].(string))
		if ip["kind"] == "ephemeral" {
			ephemeral = ip["ip"].(string)
		}
	}
	if got := strings.Join(kinds, " "); got != "snat ephemeral floating" {
		r.t.Errorf("the instance has the external addresses %s", got)
	}
	// A second attach returns the same address. A running instance cannot join a group.
	r.play(`
202 POST instances/ID/external-ips/ephemeral {} => ADDRESS
204 DELETE instances/ID/external-ips/ephemeral
400 DELETE instances/ID/external-ips/ephemeral => instance does not have an ephemeral IP attached
202 POST instances/ID/external-ips/ephemeral {"pool_selector":
	{"type":"explicit","pool":"default-ipv6"}}
404 POST instances/ID/external-ips/ephemeral {"pool_selector":{"type":"auto","ip_version":"v6"}}
	=> not found: default unicast IPv6 pool for current silo
200 GET instances/ID/anti-affinity-groups => GROUP
200 GET anti-affinity-groups/GROUP/members => ID
200 GET anti-affinity-groups/GROUP/members/instance/ID => ID
204 DELETE anti-affinity-groups/GROUP/members/instance/ID
404 DELETE anti-affinity-groups/GROUP/members/instance/ID
	=> anti-affinity-group-member with id \"ID
400 POST anti-affinity-groups/GROUP/members/instance/ID
	=> Instance cannot be added to anti-affinity group with reservation
201 POST anti-affinity-groups/GROUP/members/instance/IDLE
400 POST anti-affinity-groups/GROUP/members/instance/IDLE
	=> already exists: anti-affinity-group-member`, append(words, "ADDRESS", ephemeral)...)
	r.change("stop", "machine", "stopped")
	r.play(`
204 DELETE instances/machine?IN
204 DELETE disks/machine-boot?IN
200 GET floating-ips/FLOATING => "instance_id":null
204 DELETE floating-ips/FLOATING
204 DELETE anti-affinity-groups/workers?IN
204 DELETE me/ssh-keys/key`, words...)
}

func (r *rackServer) project() {
	id := unmarshal[store.Identity](r.t, r.play(`201 POST projects {NAME=tf}`)).ID
	vpc := unmarshal[store.Resource](r.t, r.demand(200, "", "GET /v1/vpcs/default?project="+id))
	want := func(list, answer string) {
		r.t.Helper()
		var names []string
		got := unmarshal[struct{ Rules, Items []store.Identity }](r.t, answer)
		for _, i := range append(got.Rules, got.Items...) {
			names = append(names, i.Name)
		}
		if got := strings.Join(names, " "); got != list {
			r.t.Errorf("got %s, want %s", got, list)
		}
	}
	words := []string{"TF", id, "NETWORK", vpc.ID, "SYSTEM", vpc.Text("system_router_id"),
		"IDLE", r.instance("idle").ID, "DENY", `"description":"","action":"deny",` +
			`"direction":"inbound","status":"enabled","priority":50,"filters":{"ports":["80-81"],` +
			`"protocols":[{"type":"tcp"}]},"targets":[{"type":"vpc","value"`}
	want("allow-icmp allow-internal-inbound allow-ssh",
		r.play("200 GET vpc-firewall-rules?vpc=NETWORK", words...))
	routes := r.play("200 GET vpc-router-routes?router=SYSTEM", words...)
	want("default default-v4 default-v6", routes)
	words = append(words, "V4", unmarshal[page[store.Identity]](r.t, routes).Items[1].ID)
	want("no-web", r.play(`
400 DELETE vpc-router-routes/V4 => DELETE not allowed on system routes
400 DELETE vpc-routers/SYSTEM => cannot delete system router
200 PUT vpc-firewall-rules?vpc=NETWORK {"rules":[{"name":"no-web",DENY:"default"}]}]}`, words...))
	r.play(`
400 PUT vpc-firewall-rules?vpc=NETWORK {"rules":[{"name":"same",DENY:"default"}]},
	{"name":"same",DENY:"default"}]}]} => Rule names must be unique. Duplicates: [\"same\"]
400 PUT vpc-firewall-rules?vpc=NETWORK {"rules":[{"name":"other",DENY:"elsewhere"}]}]}
	=> cross-VPC firewall target unsupported
500 PUT projects/TF {"name":"default"} => Internal Server Error
201 POST floating-ips?project=TF {NAME=f}
400 POST floating-ips/f/attach?project=TF {"kind":"instance","parent":"IDLE"}
	=> floating IP must be in the same project as the instance
400 DELETE projects/TF => project to be deleted contains a floating ip: f
204 DELETE floating-ips/f?project=TF
400 DELETE projects/TF => project to be deleted contains a vpc: default
204 DELETE vpc-subnets/default?vpc=NETWORK
204 DELETE vpcs/NETWORK
204 DELETE projects/TF`, words...)
}

func (r *rackServer) secondInterface() {
	words := []string{"OF", "project=default&instance", "SECOND", `"vpc_name":"default",` +
		`"subnet_name":"second"`}
	made := r.play(`
201 POST vpc-subnets?vpc=default&project=default {NAME=second,"ipv4_block":"192.168.0.0/26"}
400 POST network-interfaces?OF=a {NAME=nic,SECOND}
	=> Instance must be stopped to attach a new network interface
201 POST network-interfaces?OF=idle {NAME=nic,SECOND} => "ip":"192.168.0.5"`, words...)
	r.play(`
200 GET network-interfaces/nic?OF=idle => ID
400 POST network-interfaces?OF=idle {NAME=third,SECOND}
	=> Each interface must be in a distinct VPC Subnet
200 PUT network-interfaces/ID {"primary":true} => "primary":true
400 DELETE network-interfaces/ID => may not be deleted while secondary interfaces are still attached
204 DELETE network-interfaces/net0?OF=idle
200 PUT network-interfaces/ID {"name":"only"} => "name":"only"
204 DELETE network-interfaces/ID
404 GET network-interfaces/ID => instance-network-interface`,
		append(words, "ID", unmarshal[store.Identity](r.t, made).ID)...)
}

var update = flag.Bool("update", false, "write docs/operations.md and docs/console.png")

const coveragePage = "../docs/operations.md"

// coverage returns a page that lists the rack's operations and whether the simulator serves each.
func coverage() (page string, served int) {
	rows := map[string][2][]string{} // the operations that are served, and the others
	for _, op := range routes {
		path, _, _ := strings.Cut(strings.Join(op.path, "/"), "/{")
		row, column := rows[path], 1
		if op.serve != nil {
			served, column = served+1, 0
		}
		row[column] = append(row[column], "`"+op.name+"`")
		rows[path] = row
	}
	var b strings.Builder
	fmt.Fprintf(&b, `# Operations of the simulated rack

<!-- Written by go test ./simulator -run Coverage -update from simulator/operations.txt. -->

The [simulator](howto/simulator.md) serves %d of the %d operations that a rack has at version
%s of its API, and answers 501 to the others. Disks, snapshots, images and instances have
real bytes and devices. The other objects are records: the simulator makes a rack's checks, but no
packet follows a route, a firewall rule or an external address.

| path up to its first parameter | served | 501 |
|---|---|---|
`, served, len(routes), apiVersion)
	for _, path := range slices.Sorted(maps.Keys(rows)) {
		fmt.Fprintf(&b, "| `/%s` | %s | %s |\n", path, strings.Join(rows[path][0], ", "),
			strings.Join(rows[path][1], ", "))
	}
	return b.String(), served
}

func TestTheCoveragePageListsEveryOperation(t *testing.T) {
	want, served := coverage()
	fmt.Printf("FIGURE operations served=%d of=%d\n", served, len(routes))
	if *update {
		if err := os.WriteFile(coveragePage, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	howto, err := os.ReadFile("../docs/howto/simulator.md")
	text := strings.Join(strings.Fields(string(howto)), " ")
	if says := fmt.Sprintf("%d of the %d operations", served, len(routes)); !strings.Contains(text,
		says) {
		t.Errorf("docs/howto/simulator.md does not say %q (%v)", says, err)
	}
	aliases, err := os.ReadFile("server.go")
	for _, spec := range []any{Config{}, InstanceSpec{}, ImageSpec{}, DiskSpec{}} {
		for f := range reflect.TypeOf(spec).Fields() {
			if !strings.Contains(string(aliases), f.Name) {
				t.Errorf("the alias of %T does not mention %s (%v)", spec, f.Name, err)
			}
		}
	}
	got, err := os.ReadFile(coveragePage)
	if err != nil || string(got) != want {
		t.Errorf("%s is not what the operations are (%v): go test ./simulator -run Coverage -update "+
			"writes it", coveragePage, err)
	}
}

func TestEveryOperationOfTheRackHasARoute(t *testing.T) {
	names := map[string]bool{}
	for _, op := range routes {
		names[op.name] = true
		path := "/" + regexp.MustCompile(`{[^}]*}`).
			ReplaceAllString(strings.Join(op.path, "/"), "x")
		got, _, err := route(op.method, path)
		if err != nil || got.name != op.name {
			t.Errorf("%s %s leads to %+v (%v), want %s", op.method, path, got, err, op.name)
		}
	}
	for name := range served {
		if !names[name] {
			t.Errorf("%s is served but no operation of the rack", name)
		}
	}
}
