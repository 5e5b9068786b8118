package simulator

import (
	"maps"
	"net/http"
	"net/netip"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

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
