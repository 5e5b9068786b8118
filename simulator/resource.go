package simulator

import (
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// withResources adds the operations on the engine's kinds of resources: those of the rack's
// operations whose name is that of a kind and a verb.
func withResources(operations map[string]*operation) map[string]*operation {
	all := maps.Clone(operations)
	for line := range strings.Lines(operationsText) {
		name, _, _ := strings.Cut(line, " ")
		for _, k := range engine.Kinds {
			verb, ok := strings.CutPrefix(name, k.Operation+"_")
			op := resourceOperation(k, verb)
			if k.Operation != "" && ok && op != nil && all[name] == nil {
				all[name] = op
			}
		}
	}
	return all
}

// resourceOperation returns the operation of a kind with that verb, or nil.
func resourceOperation(k *engine.Kind, verb string) *operation {
	above := k.Ancestors()
	op := &operation{selectors: above}
	switch verb {
	case "list":
		op.list, op.required, op.serve = true, above[:min(len(above), 1)], resourceList(k)
	case "create":
		op.required, op.body, op.serve = above[:min(len(above), 1)], createBody(k), resourceCreate(k)
	case "view":
		op.serve = resourceView(k)
	case "update":
		op.body, op.serve = updateBody(k), resourceUpdate(k)
	case "delete":
		op.serve = resourceDelete(k)
	default:
		return nil
	}
	return op
}

type handler = func(*engine.Simulation, *apiRequest) (int, any, error)

func resourceList(k *engine.Kind) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		items, err := rack.Resources.List(&r.call, k, r.scope(), r.scan.window())
		return http.StatusOK, newPage(r.scan, items), err
	}
}

func resourceView(k *engine.Kind) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		record, err := rack.Resources.View(&r.call, k, r.scope(), r.selector(k.Param))
		return http.StatusOK, record, err
	}
}

func resourceCreate(k *engine.Kind) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		record, err := rack.Resources.Create(&r.call, k, r.scope(), r.body.(engine.ResourceInput))
		return http.StatusCreated, record, err
	}
}

func resourceUpdate(k *engine.Kind) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		record, err := rack.Resources.Update(&r.call, k, r.scope(), r.selector(k.Param),
			r.body.(engine.ResourceInput))
		return http.StatusOK, record, err
	}
}

func resourceDelete(k *engine.Kind) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		r.call.Cascade = r.query.Get("cascade") == "true"
		return http.StatusNoContent, nil,
			rack.Resources.Delete(&r.call, k, r.scope(), r.selector(k.Param))
	}
}

// scope returns the objects that the query names.
func (r *apiRequest) scope() engine.Scope {
	scope := engine.Scope{}
	for _, name := range r.op.selectors {
		scope[name] = r.selector(name)
	}
	return scope
}

// selector returns the object that a parameter of the path or of the query names.
func (r *apiRequest) selector(param string) store.Selector {
	value := r.path.Get(param)
	if !r.path.Has(param) {
		value = r.query.Get(param)
	}
	sel, _ := store.ParseSelector(value)
	return sel
}

// createBody returns the parser of a creation's body.
func createBody(k *engine.Kind) func(*fields) any {
	return func(f *fields) any { return readResource(f, k) }
}

func readResource(f *fields, k *engine.Kind) engine.ResourceInput {
	name, description := f.identity()
	in := engine.ResourceInput{Name: &name, Description: &description, Values: map[string]any{}}
	for _, field := range k.Fields {
		if field.Type != engine.Internal && (!field.Optional || f.has(field.Name)) {
			in.Values[field.Name] = f.value(field)
		}
	}
	return in
}

// updateBody returns the parser of an update's body.
func updateBody(k *engine.Kind) func(*fields) any {
	return func(f *fields) any {
		in := engine.ResourceInput{Values: map[string]any{}}
		in.Name, in.Description = f.newIdentity()
		for _, field := range k.Fields {
			if field.Update == engine.Required || field.Update != engine.Fixed && f.has(field.Name) {
				in.Values[field.Name] = f.value(field)
			}
		}
		return in
	}
}

// The operations below are those of one kind alone.

func groupMembers(k *engine.Kind) *operation {
	return &operation{list: true, selectors: k.Ancestors(),
		serve: func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
			members, err := rack.Resources.Members(&r.call, k, r.scope(), r.selector(k.Param))
			return http.StatusOK, slice(r.scan, members), err
		}}
}

// groupMember returns an operation on the membership of one instance.
func groupMember(k *engine.Kind, serve func(*engine.Simulation, *apiRequest, engine.Ref) (int, any,
	error)) *operation {
	return &operation{selectors: k.Ancestors(),
		serve: func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
			return serve(rack, r, r.ref("instance"))
		}}
}

func memberView(k *engine.Kind) *operation {
	return groupMember(k, func(rack *engine.Simulation, r *apiRequest, i engine.Ref) (int, any,
		error) {
		m, err := rack.Resources.Member(&r.call, k, r.scope(), r.selector(k.Param), i)
		return http.StatusOK, m, err
	})
}

func memberAdd(k *engine.Kind) *operation {
	return groupMember(k, func(rack *engine.Simulation, r *apiRequest, i engine.Ref) (int, any,
		error) {
		m, err := rack.Resources.AddMember(&r.call, k, r.scope(), r.selector(k.Param), i)
		return http.StatusCreated, m, err
	})
}

func memberDelete(k *engine.Kind) *operation {
	return groupMember(k, func(rack *engine.Simulation, r *apiRequest, i engine.Ref) (int, any,
		error) {
		return http.StatusNoContent, nil,
			rack.Resources.RemoveMember(&r.call, k, r.scope(), r.selector(k.Param), i)
	})
}

// ofInstance lists the records of a kind that belong to an instance.
func ofInstance(k *engine.Kind) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		items, err := rack.Resources.OfInstance(&r.call, k, r.instance())
		return http.StatusOK, slice(r.scan, items), err
	}
}

func subnetInterfaces(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	nics, err := rack.Resources.Interfaces(&r.call, r.scope(), r.selector("subnet"))
	return http.StatusOK, slice(r.scan, nics), err
}

// firewallRules has the form of the API's VpcFirewallRules.
type firewallRules struct {
	Rules []store.Resource `json:"rules"`
}

func rulesView(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	rules, err := rack.Resources.FirewallRules(&r.call, r.scope(), r.selector("vpc"))
	return http.StatusOK, firewallRules{rules}, err
}

func rulesUpdate(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	rules, err := rack.Resources.ReplaceFirewallRules(&r.call, r.scope(), r.selector("vpc"),
		r.body.([]engine.ResourceInput))
	return http.StatusOK, firewallRules{rules}, err
}

func parseRules(f *fields) any {
	rules := []engine.ResourceInput{}
	for _, rule := range f.list("rules") {
		rules = append(rules, readResource(rule, engine.FirewallRule))
	}
	return rules
}

func lotCreate(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	lot, err := rack.Resources.CreateLot(&r.call, r.body.(engine.ResourceInput))
	return http.StatusCreated, lot, err
}

func lotView(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	lot, err := rack.Resources.Lot(&r.call, r.selector("address_lot"))
	return http.StatusOK, lot, err
}

func lotBlocks(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	lot, err := rack.Resources.Lot(&r.call, r.selector("address_lot"))
	return http.StatusOK, slice(r.scan, lot.Blocks), err
}

func portCreate(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	settings, err := rack.Resources.Replace(&r.call, engine.PortSettings,
		r.body.(engine.ResourceInput))
	return http.StatusCreated, settings, err
}

func portView(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	settings, err := rack.Resources.PortSettings(&r.call, r.selector("port"))
	return http.StatusOK, settings, err
}

func portDelete(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	return http.StatusNoContent, nil,
		rack.Resources.DeletePortSettings(&r.call, r.selector("port_settings"))
}

func parseFloatingIPAttach(f *fields) any {
	f.oneOf("kind", []string{"instance"})
	return f.nameOrID("parent")
}

func floatingIPAttach(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	ip, err := rack.Resources.AttachFloatingIP(&r.call, r.scope(), r.selector("floating_ip"),
		r.body.(store.Selector))
	return http.StatusAccepted, ip, err
}

func floatingIPDetach(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	ip, err := rack.Resources.DetachFloatingIP(&r.call, r.scope(), r.selector("floating_ip"))
	return http.StatusAccepted, ip, err
}

func parseSubnetAttach(f *fields) any { return f.nameOrID("instance") }

func externalSubnetAttach(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	subnet, err := rack.Resources.AttachExternalSubnet(&r.call, r.scope(),
		r.selector("external_subnet"), r.body.(store.Selector))
	return http.StatusAccepted, subnet, err
}

func externalSubnetDetach(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	subnet, err := rack.Resources.DetachExternalSubnet(&r.call, r.scope(),
		r.selector("external_subnet"))
	return http.StatusAccepted, subnet, err
}

func externalSubnets(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	subnets, err := rack.Resources.ExternalSubnets(&r.call, r.instance())
	r.scan = scan{SortBy: store.ByID, limit: maxLimit}
	items := slice(r.scan, subnets)
	items.NextPage = nil
	return http.StatusOK, items, err
}

func parseEphemeral(f *fields) any { return readPoolSelector(f) }

func ephemeralIPAttach(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	ip, err := rack.Instances.AttachEphemeralIP(&r.call, r.instance(), r.body.(engine.Allocation))
	return http.StatusAccepted, ip, err
}

func ephemeralIPDetach(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	version := r.query.Get("ip_version")
	if r.query.Has("ip_version") && !slices.Contains(ipVersions, version) {
		return 0, nil, badQuery("%s", unknownVariant(version, ipVersions))
	}
	return http.StatusNoContent, nil,
		rack.Instances.DetachEphemeralIP(&r.call, r.instance(), version)
}
