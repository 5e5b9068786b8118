package simulator

import (
	"maps"
	"net/http"
	"net/netip"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// withPools adds the operations on the links, the ranges and the members of pools.
func withPools(operations map[string]*operation) map[string]*operation {
	all := maps.Clone(operations)
	for parts, k := range map[string]*engine.Kind{"range": engine.IPPool,
		"member": engine.SubnetPool} {
		system, silo := k.Operation, strings.TrimPrefix(k.Operation, "system_")
		remove := parseExtent
		if k == engine.SubnetPool {
			remove = parseSubnet
		}
		add := map[*engine.Kind]func(*fields) any{engine.IPPool: parseExtent,
			engine.SubnetPool: parseMember}[k]
		maps.Copy(all, map[string]*operation{
			silo + "_list":                   poolList(k),
			silo + "_view":                   poolView(k),
			"silo_" + silo + "_list":         poolsOfSilo(k),
			system + "_silo_list":            poolLinks(k),
			system + "_silo_link":            {body: parseLink, serve: poolLink(k)},
			system + "_silo_update":          {body: parseDefault, serve: poolLinkUpdate(k)},
			system + "_silo_unlink":          {serve: poolUnlink(k)},
			system + "_" + parts + "_list":   extentList(k),
			system + "_" + parts + "_add":    {body: add, serve: extentAdd(k)},
			system + "_" + parts + "_remove": {body: remove, serve: extentRemove(k)},
			system + "_utilization_view":     {serve: poolUtilization(k)},
		})
	}
	return all
}

func poolList(k *engine.Kind) *operation {
	return &operation{list: true, serve: func(rack *engine.Simulation, r *apiRequest) (int, any,
		error) {
		pools, err := rack.Resources.PoolsOfSilo(k)
		return http.StatusOK, slice(r.scan, pools), err
	}}
}

func poolView(k *engine.Kind) *operation {
	return &operation{serve: func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		pool, err := rack.Resources.PoolOfSilo(&r.call, k, r.selector("pool"))
		return http.StatusOK, pool, err
	}}
}

func poolsOfSilo(k *engine.Kind) *operation {
	return &operation{list: true, serve: func(rack *engine.Simulation, r *apiRequest) (int, any,
		error) {
		pools, err := rack.Resources.PoolsOf(k, r.selector("silo"))
		return http.StatusOK, slice(r.scan, pools), err
	}}
}

func poolLinks(k *engine.Kind) *operation {
	return &operation{list: true, serve: func(rack *engine.Simulation, r *apiRequest) (int, any,
		error) {
		links, err := rack.Resources.PoolLinks(&r.call, k, r.selector("pool"))
		return http.StatusOK, slice(r.scan, links), err
	}}
}

// poolLinkBody has the fields of a request about a link.
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

func poolLink(k *engine.Kind) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		b := r.body.(poolLinkBody)
		link, err := rack.Resources.LinkPool(&r.call, k, r.selector("pool"), b.silo, b.isDefault)
		return http.StatusCreated, link, err
	}
}

func poolLinkUpdate(k *engine.Kind) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		link, err := rack.Resources.UpdatePoolLink(&r.call, k, r.selector("pool"),
			r.selector("silo"), r.body.(poolLinkBody).isDefault)
		return http.StatusOK, link, err
	}
}

func poolUnlink(k *engine.Kind) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		return http.StatusNoContent, nil,
			rack.Resources.UnlinkPool(&r.call, k, r.selector("pool"), r.selector("silo"))
	}
}

func extentList(k *engine.Kind) *operation {
	return &operation{list: true, serve: func(rack *engine.Simulation, r *apiRequest) (int, any,
		error) {
		parts, err := rack.Resources.Extents(&r.call, k, r.selector("pool"))
		return http.StatusOK, slice(r.scan, parts), err
	}}
}

func extentAdd(k *engine.Kind) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		part, err := rack.Resources.AddExtent(&r.call, k, r.selector("pool"),
			r.body.(engine.Extent))
		return http.StatusCreated, part, err
	}
}

func extentRemove(k *engine.Kind) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		return http.StatusNoContent, nil,
			rack.Resources.RemoveExtent(&r.call, k, r.selector("pool"), r.body.(engine.Extent))
	}
}

func poolUtilization(k *engine.Kind) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		u, err := rack.Resources.PoolUtilization(&r.call, k, r.selector("pool"))
		return http.StatusOK, u, err
	}
}

// parseExtent reads a range of addresses, of which the rack says no more than that it is none.
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

// subnet reads a network of either version, whose host part need not be zero.
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
