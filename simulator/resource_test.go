package simulator

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// lives has the requests for each kind of resource that clients may create.
var lives = map[string]struct {
	// query names the parent. fields are the fields of a creation except name and description; N in
	// them stands for the number of the creation.
	query, fields string
	// update are the fields of an update. shows is a part of the record after it. Without update
	// the kind cannot be updated.
	update, shows string
	// holder is a request that creates an object that forbids the deletion of the record. holds is the
	// error of the deletion, and release removes the object. NAME and ID stand for those of the
	// record.
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

// servedPath reports whether the simulator has an operation of a kind, and returns its path without
// the parameter.
func servedPath(k *engine.Kind, verb string) (path string, ok bool) {
	for _, op := range routes {
		if op.name == k.Operation+"_"+verb && op.serve != nil {
			return "/" + strings.TrimSuffix(strings.Join(op.path, "/"), "/{"+k.Param+"}"), true
		}
	}
	return "", false
}

// TestEveryKindOfResourceCanBeCreatedUpdatedAndDeleted creates, lists, reads, renames, updates and
// deletes a record of each kind that clients may create, and restarts the rack in between.
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

// eachKind runs a subtest for each kind that can be created.
func (r *rackServer) eachKind(when string, test func(*rackServer, *engine.Kind, string)) {
	for _, k := range engine.Kinds {
		if path, ok := servedPath(k, "create"); ok {
			r.t.Run(k.Name+when, func(t *testing.T) {
				test(r.on(t), k, path)
			})
		}
	}
}

// beginLife creates a record, and returns its ID and its JSON.
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

// endLife updates the record of an earlier process and deletes it.
func (r *rackServer) endLife(k *engine.Kind, path, id, made string) {
	life := lives[k.Name]
	fill := strings.NewReplacer("ID", id, "NAME", "renamed").Replace
	one := path + "/" + id
	r.demand(200, made, "GET "+one)
	if _, ok := servedPath(k, "update"); ok != (life.update != "") {
		r.t.Errorf("whether it can be updated: got %v", ok)
	} else if ok {
		var update map[string]any
		simtest.NoError(r.t, json.Unmarshal([]byte(fill(life.update)), &update))
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
