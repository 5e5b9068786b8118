package simulator

import (
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
)

// withResources adds the operations on the members of groups, and the operations on the engine's
// kinds of resources. The name of the latter is that of a kind and a verb.
func withResources(operations map[string]*operation) map[string]*operation {
	all := maps.Clone(operations)
	for _, k := range []*engine.Kind{engine.AffinityGroup, engine.AntiAffinityGroup} {
		name := k.Operation + "_member_"
		maps.Copy(all, map[string]*operation{
			name + "list": {kind: k, list: true, selectors: k.Ancestors(),
				serve: listed(engine.Resources.Members)},
			name + "instance_view": {kind: k, selectors: k.Ancestors(),
				serve: answer(http.StatusOK, engine.Resources.Member)},
			name + "instance_add": {kind: k, selectors: k.Ancestors(),
				serve: answer(http.StatusCreated, engine.Resources.AddMember)},
			name + "instance_delete": {kind: k, selectors: k.Ancestors(),
				serve: nothing(engine.Resources.RemoveMember)},
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
	op := &operation{kind: k, selectors: above}
	switch verb {
	case "list":
		op.list, op.required = true, above[:min(len(above), 1)]
		op.serve = paged(engine.Resources.List)
	case "create":
		op.required, op.body = above[:min(len(above), 1)], createBody(k)
		op.serve = answer(http.StatusCreated, engine.Resources.Create)
	case "view":
		op.serve = answer(http.StatusOK, engine.Resources.View)
	case "update":
		op.body, op.serve = updateBody(k), answer(http.StatusOK, engine.Resources.Update)
	case "delete":
		op.serve = nothing(engine.Resources.Delete)
	default:
		return nil
	}
	return op
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

func parseRules(f *fields) any {
	rules := []engine.ResourceInput{}
	for _, rule := range f.list("rules") {
		rules = append(rules, readResource(rule, engine.FirewallRule))
	}
	return rules
}

func parseFloatingIPAttach(f *fields) any {
	f.oneOf("kind", []string{"instance"})
	return f.nameOrID("parent")
}

func parseSubnetAttach(f *fields) any { return f.nameOrID("instance") }

func parseEphemeral(f *fields) any { return readPoolSelector(f) }

func ephemeralIPDetach(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	version := r.query.Get("ip_version")
	if r.query.Has("ip_version") && !slices.Contains(ipVersions, version) {
		return 0, nil, badQuery("%s", unknownVariant(version, ipVersions))
	}
	return http.StatusNoContent, nil,
		engine.Instances{Simulation: rack}.DetachEphemeralIP(&r.call, version)
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
			silo + "_list":           {kind: k, list: true, serve: listed(engine.Resources.PoolsOfSilo)},
			silo + "_view":           {kind: k, serve: answer(http.StatusOK, engine.Resources.PoolOfSilo)},
			"silo_" + silo + "_list": {kind: k, list: true, serve: listed(engine.Resources.PoolsOf)},
			system + "_silo_list":    {kind: k, list: true, serve: listed(engine.Resources.PoolLinks)},
			system + "_silo_link": {kind: k, body: parseLink,
				serve: answer(http.StatusCreated, engine.Resources.LinkPool)},
			system + "_silo_update": {kind: k, body: parseDefault,
				serve: answer(http.StatusOK, engine.Resources.UpdatePoolLink)},
			system + "_silo_unlink":        {kind: k, serve: nothing(engine.Resources.UnlinkPool)},
			system + "_" + parts + "_list": {kind: k, list: true, serve: listed(engine.Resources.Extents)},
			system + "_" + parts + "_add": {kind: k, body: add,
				serve: answer(http.StatusCreated, engine.Resources.AddExtent)},
			system + "_" + parts + "_remove": {kind: k, body: remove,
				serve: nothing(engine.Resources.RemoveExtent)},
			system + "_utilization_view": {kind: k,
				serve: answer(http.StatusOK, engine.Resources.PoolUtilization)},
		})
	}
	return all
}

func parseDefault(f *fields) any {
	return engine.PoolLink{IsDefault: number[bool](f, "is_default", "a boolean")}
}

func parseLink(f *fields) any {
	return engine.PoolLink{Silo: f.nameOrID("silo"),
		IsDefault: number[bool](f, "is_default", "a boolean")}
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
