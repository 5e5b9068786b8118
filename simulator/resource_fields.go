package simulator

import (
	"fmt"
	"math"
	"net/netip"
	"strconv"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
)

func (f *fields) value(field engine.Field) any {
	switch name := field.Name; field.Type {
	case engine.Name:
		return f.name(name)
	case engine.NameOrID:
		return f.nameOrID(name)
	case engine.IPv4Net, engine.IPv6Net:
		return f.network(name, field.Type == engine.IPv4Net)
	case engine.Enum:
		return *f.oneOf(name, field.Values)
	case engine.Flag:
		return number[bool](f, name, "a boolean")
	case engine.U8:
		return number[uint8](f, name, "u8")
	case engine.U16:
		return number[uint16](f, name, "u16")
	case engine.I32:
		return number[int32](f, name, "i32")
	case engine.IP:
		return f.address(name)
	case engine.IPNet:
		return f.prefix(name).String()
	case engine.Blocks:
		blocks := []engine.Extent{}
		for _, block := range f.needed(name) {
			var e engine.Extent
			e.First, _ = netip.ParseAddr(block.address("first_address"))
			e.Last, _ = netip.ParseAddr(block.address("last_address"))
			blocks = append(blocks, e)
		}
		return blocks
	case engine.Record:
		return f.object(name).record(field.Of)
	case engine.Records:
		list := []any{}
		for _, one := range f.needed(name) {
			list = append(list, one.record(field.Of))
		}
		return list
	case engine.Destination:
		return f.object(name).endpoint("ip", "ip_net", "vpc", "subnet")
	case engine.Target:
		return f.object(name).endpoint("ip", "vpc", "subnet", "instance", "internet_gateway", "drop")
	case engine.AddressSource:
		return readAllocation(f.object(name))
	case engine.SubnetSource:
		return readSubnetAllocation(f.object(name))
	case engine.RuleTargets:
		return f.endpoints(name)
	case engine.RuleFilters:
		return readFilters(f.object(name))
	}
	return f.text(field.Name)
}

func (f *fields) network(name string, v4 bool) string {
	prefix, err := netip.ParsePrefix(f.text(name))
	if err != nil || prefix.Addr().Is4() != v4 {
		f.fail(name, "failed to parse IP network")
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0).String()
	}
	return prefix.String()
}

func number[T any](f *fields, name, expected string) (n T) {
	f.read(name, expected, &n)
	return n
}

func (f *fields) record(of []engine.Field) map[string]any {
	values := map[string]any{}
	for _, field := range of {
		values[field.Name] = nil
		if !field.Optional || f.has(field.Name) {
			values[field.Name] = f.value(field)
		}
	}
	return values
}

// needed reads a required list of objects.
func (f *fields) needed(name string) []*fields {
	if _, ok := f.get(name); !ok {
		f.fail("", missingField(name))
	}
	return f.list(name)
}

func (f *fields) address(name string) string {
	address, err := netip.ParseAddr(f.text(name))
	if err != nil {
		f.fail(name, "invalid IP address syntax")
	}
	return address.String()
}

// endpoint reads a tagged value that stands for an address, a network or a named object.
func (f *fields) endpoint(allowed ...string) map[string]any {
	tag := f.variant(allowed...)
	value := map[string]any{"type": tag}
	switch tag {
	case "drop":
	case "ip":
		value["value"] = f.address("value")
	case "ip_net":
		value["value"] = f.prefix("value").String()
	default:
		value["value"] = f.name("value")
	}
	return value
}

// endpoints reads a required list of targets or hosts of a firewall rule.
func (f *fields) endpoints(name string) []any {
	list := []any{}
	for _, one := range f.needed(name) {
		list = append(list, one.endpoint("vpc", "subnet", "instance", "ip", "ip_net"))
	}
	return list
}

// readFilters reads the filters of a firewall rule. A filter that is null matches everything.
func readFilters(f *fields) map[string]any {
	filters := map[string]any{"hosts": nil, "ports": nil, "protocols": nil}
	if f.has("hosts") {
		filters["hosts"] = f.endpoints("hosts")
	}
	if f.has("ports") {
		var ports []string
		f.read("ports", "a sequence", &ports)
		list := []any{}
		for n, port := range ports {
			if problem := portsProblem(port); problem != "" {
				f.fail(fmt.Sprintf("ports[%d]", n), problem)
			}
			list = append(list, port)
		}
		filters["ports"] = list
	}
	if f.has("protocols") {
		list := []any{}
		for _, protocol := range f.list("protocols") {
			list = append(list, protocol.protocol())
		}
		filters["protocols"] = list
	}
	return filters
}

// portsProblem returns the mistake in a port or a range of ports, or "".
func portsProblem(text string) string {
	first, last, isRange := strings.Cut(text, "-")
	switch {
	case isRange && first == "":
		return "range has no start value"
	case isRange && last == "":
		return "range has no end value"
	case !isRange:
		last = first
	}
	for _, port := range []string{first, last} {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return fmt.Sprintf("%q unparsable for type: invalid digit found in string", port)
		}
	}
	return ""
}

func (f *fields) protocol() map[string]any {
	tag := f.variant("tcp", "udp", "icmp", "icmp6")
	if !strings.HasPrefix(tag, "icmp") {
		return map[string]any{"type": tag}
	}
	if !f.nullable("value") {
		return map[string]any{"type": tag, "value": nil}
	}
	icmp := f.object("value")
	var kind uint64
	if icmp.read("icmp_type", "u8", &kind) && kind > math.MaxUint8 {
		icmp.fail("icmp_type", fmt.Sprintf("invalid value: integer `%d`, expected u8", kind))
	}
	value := map[string]any{"icmp_type": kind, "code": nil}
	if icmp.has("code") {
		value["code"] = icmp.text("code")
	}
	return map[string]any{"type": tag, "value": value}
}

// readAllocation reads where the address of a floating IP comes from.
func readAllocation(f *fields) engine.Allocation {
	if f.variant("explicit", "auto") == "explicit" {
		return engine.Allocation{IP: f.address("ip")}
	}
	return readPoolSelector(f)
}

// readSubnetAllocation reads where an external subnet comes from.
func readSubnetAllocation(f *fields) engine.SubnetAllocation {
	if f.variant("explicit", "auto") == "explicit" {
		return engine.SubnetAllocation{Subnet: f.subnet().Subnet}
	}
	var length uint8
	f.read("prefix_length", "u8", &length)
	return engine.SubnetAllocation{Length: int(length), Allocation: readPoolSelector(f)}
}

var ipVersions = []string{engine.StackV4, engine.StackV6}

func readPoolSelector(f *fields) (a engine.Allocation) {
	if !f.has("pool_selector") {
		return a
	}
	pool := f.object("pool_selector")
	if pool.variant("explicit", "auto") == "explicit" {
		a.Pool = pool.nameOrID("pool")
	} else if pool.has("ip_version") {
		a.Version = *pool.oneOf("ip_version", ipVersions)
	}
	return a
}

func readExternalIPs(f *fields) (ips []engine.ExternalIPCreate) {
	for _, ip := range f.list("external_ips") {
		if ip.variant("ephemeral", "floating") == "floating" {
			ips = append(ips, engine.ExternalIPCreate{Floating: ip.nameOrID("floating_ip")})
		} else {
			ips = append(ips, engine.ExternalIPCreate{Ephemeral: readPoolSelector(ip)})
		}
	}
	return ips
}
