package simulator

import (
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// withResources adds the operations on the members of groups, and the operations on the engine's
// kinds of resources. The name of the latter is that of a kind and a verb.
func withResources(operations map[string]*operation) map[string]*operation {
	all := maps.Clone(operations)
	for _, k := range []*engine.Kind{engine.AffinityGroup, engine.AntiAffinityGroup} {
		name := k.Operation + "_member_"
		maps.Copy(all, map[string]*operation{
			name + "list":            groupMembers(k),
			name + "instance_view":   member(k, http.StatusOK, engine.Resources.Member),
			name + "instance_add":    member(k, http.StatusCreated, engine.Resources.AddMember),
			name + "instance_delete": memberDelete(k),
		})
	}
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
		op.required, op.body = above[:min(len(above), 1)], createBody(k)
		op.serve = answer(http.StatusCreated, func(s engine.Resources, r *apiRequest) (store.Resource,
			error) {
			return s.Create(&r.call, k, r.scope(), r.body.(engine.ResourceInput))
		})
	case "view":
		op.serve = answer(http.StatusOK, func(s engine.Resources, r *apiRequest) (store.Resource, error) {
			return s.View(&r.call, k, r.scope(), r.selector(k.Param))
		})
	case "update":
		op.body = updateBody(k)
		op.serve = answer(http.StatusOK, func(s engine.Resources, r *apiRequest) (store.Resource, error) {
			return s.Update(&r.call, k, r.scope(), r.selector(k.Param), r.body.(engine.ResourceInput))
		})
	case "delete":
		op.serve = resourceDelete(k)
	default:
		return nil
	}
	return op
}

func resourceList(k *engine.Kind) handler {
	return answer(http.StatusOK, func(s engine.Resources, r *apiRequest) (page[store.Resource],
		error) {
		items, err := s.List(&r.call, k, r.scope(), r.scan.window())
		return newPage(r.scan, items), err
	})
}

func resourceDelete(k *engine.Kind) handler {
	return nothing(func(s engine.Resources, r *apiRequest) error {
		r.call.Cascade = r.query.Get("cascade") == "true"
		return s.Delete(&r.call, k, r.scope(), r.selector(k.Param))
	})
}

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

// Each of the operations below exists only for one or two kinds.

func groupMembers(k *engine.Kind) *operation {
	return &operation{list: true, selectors: k.Ancestors(),
		serve: listed(func(s engine.Resources, r *apiRequest) ([]engine.Member, error) {
			return s.Members(&r.call, k, r.scope(), r.selector(k.Param))
		})}
}

// member is an operation on the membership of one instance in a group.
func member(k *engine.Kind, status int, do func(engine.Resources, *engine.Call, *engine.Kind,
	engine.Scope, store.Selector, engine.Ref) (engine.Member, error)) *operation {
	return &operation{selectors: k.Ancestors(),
		serve: answer(status, func(s engine.Resources, r *apiRequest) (engine.Member, error) {
			return do(s, &r.call, k, r.scope(), r.selector(k.Param), r.ref("instance"))
		})}
}

func memberDelete(k *engine.Kind) *operation {
	return &operation{selectors: k.Ancestors(),
		serve: nothing(func(s engine.Resources, r *apiRequest) error {
			return s.RemoveMember(&r.call, k, r.scope(), r.selector(k.Param), r.ref("instance"))
		})}
}

func ofInstance(k *engine.Kind) handler {
	return listed(func(s engine.Resources, r *apiRequest) ([]store.Resource, error) {
		return s.OfInstance(&r.call, k, r.ref("instance"))
	})
}

func subnetInterfaces(s engine.Resources, r *apiRequest) ([]store.NetworkInterface, error) {
	return s.Interfaces(&r.call, r.scope(), r.selector("subnet"))
}

// firewallRules has the form of the API's VpcFirewallRules.
type firewallRules struct {
	Rules []store.Resource `json:"rules"`
}

func rulesView(s engine.Resources, r *apiRequest) (firewallRules, error) {
	rules, err := s.FirewallRules(&r.call, r.scope(), r.selector("vpc"))
	return firewallRules{rules}, err
}

func rulesUpdate(s engine.Resources, r *apiRequest) (firewallRules, error) {
	rules, err := s.ReplaceFirewallRules(&r.call, r.scope(), r.selector("vpc"),
		r.body.([]engine.ResourceInput))
	return firewallRules{rules}, err
}

func parseRules(f *fields) any {
	rules := []engine.ResourceInput{}
	for _, rule := range f.list("rules") {
		rules = append(rules, readResource(rule, engine.FirewallRule))
	}
	return rules
}

func lotCreate(s engine.Resources, r *apiRequest) (engine.Lot, error) {
	return s.CreateLot(&r.call, r.body.(engine.ResourceInput))
}

func lotBlocks(s engine.Resources, r *apiRequest) ([]engine.Part, error) {
	lot, err := s.Lot(&r.call, r.selector("address_lot"))
	return lot.Blocks, err
}

func portCreate(s engine.Resources, r *apiRequest) (store.Resource, error) {
	return s.Replace(&r.call, engine.PortSettings, r.body.(engine.ResourceInput))
}

func portDelete(s engine.Resources, r *apiRequest) error {
	return s.DeletePortSettings(&r.call, r.selector("port_settings"))
}

// join attaches a record to the instance that the body names.
func join(param string, do func(engine.Resources, *engine.Call, engine.Scope, store.Selector,
	store.Selector) (store.Resource, error)) handler {
	return answer(http.StatusAccepted, func(s engine.Resources, r *apiRequest) (store.Resource,
		error) {
		return do(s, &r.call, r.scope(), r.selector(param), r.body.(store.Selector))
	})
}

// leave detaches a record from its instance.
func leave(param string, do func(engine.Resources, *engine.Call, engine.Scope, store.Selector) (
	store.Resource, error)) handler {
	return answer(http.StatusAccepted, func(s engine.Resources, r *apiRequest) (store.Resource,
		error) {
		return do(s, &r.call, r.scope(), r.selector(param))
	})
}

func parseFloatingIPAttach(f *fields) any {
	f.oneOf("kind", []string{"instance"})
	return f.nameOrID("parent")
}

func parseSubnetAttach(f *fields) any { return f.nameOrID("instance") }

func externalSubnets(s engine.Resources, r *apiRequest) (page[store.Resource], error) {
	subnets, err := s.ExternalSubnets(&r.call, r.ref("instance"))
	items := slice(scan{SortBy: store.ByID, limit: maxLimit}, subnets)
	items.NextPage = nil
	return items, err
}

func parseEphemeral(f *fields) any { return readPoolSelector(f) }

func ephemeralIPDetach(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	version := r.query.Get("ip_version")
	if r.query.Has("ip_version") && !slices.Contains(ipVersions, version) {
		return 0, nil, badQuery("%s", unknownVariant(version, ipVersions))
	}
	return http.StatusNoContent, nil,
		engine.Instances{Simulation: rack}.DetachEphemeralIP(&r.call, r.ref("instance"), version)
}

// withPools adds the operations on the links, ranges and members of pools.
func withPools(operations map[string]*operation) map[string]*operation {
	all := maps.Clone(operations)
	for parts, k := range map[string]*engine.Kind{"range": engine.IPPool,
		"member": engine.SubnetPool} {
		system, silo := k.Operation, strings.TrimPrefix(k.Operation, "system_")
		add, remove := parseExtent, parseExtent
		if k == engine.SubnetPool {
			add, remove = parseMember, parseSubnet
		}
		maps.Copy(all, map[string]*operation{
			silo + "_list": {list: true, serve: listed(func(s engine.Resources, _ *apiRequest) (
				[]store.Resource, error) {
				return s.PoolsOfSilo(k)
			})},
			silo + "_view": {serve: answer(http.StatusOK, ofPool(k, engine.Resources.PoolOfSilo))},
			"silo_" + silo + "_list": {list: true, serve: listed(func(s engine.Resources,
				r *apiRequest) ([]store.Resource, error) {
				return s.PoolsOf(k, r.selector("silo"))
			})},
			system + "_silo_list": {list: true, serve: listed(ofPool(k, engine.Resources.PoolLinks))},
			system + "_silo_link": {body: parseLink, serve: answer(http.StatusCreated,
				func(s engine.Resources, r *apiRequest) (engine.Part, error) {
					b := r.body.(poolLinkBody)
					return s.LinkPool(&r.call, k, r.selector("pool"), b.silo, b.isDefault)
				})},
			system + "_silo_update": {body: parseDefault, serve: answer(http.StatusOK,
				func(s engine.Resources, r *apiRequest) (engine.Part, error) {
					return s.UpdatePoolLink(&r.call, k, r.selector("pool"), r.selector("silo"),
						r.body.(poolLinkBody).isDefault)
				})},
			system + "_silo_unlink": {serve: nothing(func(s engine.Resources, r *apiRequest) error {
				return s.UnlinkPool(&r.call, k, r.selector("pool"), r.selector("silo"))
			})},
			system + "_" + parts + "_list": {list: true,
				serve: listed(ofPool(k, engine.Resources.Extents))},
			system + "_" + parts + "_add": {body: add, serve: answer(http.StatusCreated,
				func(s engine.Resources, r *apiRequest) (engine.Part, error) {
					return s.AddExtent(&r.call, k, r.selector("pool"), r.body.(engine.Extent))
				})},
			system + "_" + parts + "_remove": {body: remove,
				serve: nothing(func(s engine.Resources, r *apiRequest) error {
					return s.RemoveExtent(&r.call, k, r.selector("pool"), r.body.(engine.Extent))
				})},
			system + "_utilization_view": {serve: answer(http.StatusOK,
				ofPool(k, engine.Resources.PoolUtilization))},
		})
	}
	return all
}

func ofPool[T any](k *engine.Kind, read func(engine.Resources, *engine.Call, *engine.Kind,
	store.Selector) (T, error)) func(engine.Resources, *apiRequest) (T, error) {
	return func(s engine.Resources, r *apiRequest) (T, error) {
		return read(s, &r.call, k, r.selector("pool"))
	}
}

type poolLinkBody struct {
	silo      store.Selector
	isDefault bool
}

func parseDefault(f *fields) any {
	var b poolLinkBody
	f.read("is_default", "a boolean", &b.isDefault)
	return b
}

func parseLink(f *fields) any {
	b := poolLinkBody{silo: f.nameOrID("silo")}
	f.read("is_default", "a boolean", &b.isDefault)
	return b
}

// parseExtent reads a range of addresses. The rack has one error for every mistake in it.
func parseExtent(f *fields) any {
	var ends [2]netip.Addr
	for n, name := range []string{"first", "last"} {
		if f.has(name) {
			ends[n], _ = netip.ParseAddr(f.text(name))
		}
	}
	first, last := ends[0], ends[1]
	if !first.IsValid() || first.BitLen() != last.BitLen() || last.Less(first) ||
		first.Zone()+last.Zone() != "" {
		f.fail("", "data did not match any variant of untagged enum IpRange")
	}
	return engine.Extent{First: first, Last: last}
}

// subnet reads a network of either IP version. Its host part need not be zero.
func (f *fields) subnet() engine.Extent {
	prefix := f.prefix("subnet")
	if !prefix.IsValid() {
		return engine.Extent{}
	}
	return engine.SubnetExtent(prefix)
}

func (f *fields) prefix(name string) netip.Prefix {
	prefix, err := netip.ParsePrefix(f.text(name))
	if err != nil {
		f.fail(name, "failed to parse IP network")
	}
	return prefix
}

func parseSubnet(f *fields) any { return f.subnet() }

func parseMember(f *fields) any {
	e := f.subnet()
	e.MinPrefix, e.MaxPrefix = e.Subnet.Bits(), e.First.BitLen()
	e.MinPrefix = f.prefixLength("min_prefix_length", e.MinPrefix)
	e.MaxPrefix = f.prefixLength("max_prefix_length", e.MaxPrefix)
	return e
}

func (f *fields) prefixLength(name string, absent int) int {
	if !f.has(name) {
		return absent
	}
	var n uint8
	f.read(name, "u8", &n)
	return int(n)
}
