package simulator

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// fields parses a JSON object as the rack does: a required field must exist, an unknown field is
// ignored, and a known field may occur only once. The error names the path of the first invalid
// field (A06).
type fields struct {
	raw      map[string]json.RawMessage
	repeated map[string]bool
	path     string
	err      *error
}

func parseFields(body []byte) (*fields, error) {
	var err error
	f := &fields{err: &err}
	f.decode(body)
	return f, err
}

// decode parses one object and ignores any text after the object.
func (f *fields) decode(data []byte) {
	f.raw, f.repeated = map[string]json.RawMessage{}, map[string]bool{}
	data = bytes.TrimSpace(data)
	if len(data) == 0 {
		f.fail("", "EOF while parsing a value")
		return
	}
	if data[0] != '{' && json.Valid(data) {
		f.fail("", unexpected(data, "an object"))
		return
	}
	if err := f.decodeMembers(json.NewDecoder(bytes.NewReader(data))); errors.Is(err, io.EOF) ||
		errors.Is(err, io.ErrUnexpectedEOF) {
		f.fail("", "EOF while parsing an object")
	} else if err != nil {
		f.fail("", "expected value")
	}
}

func (f *fields) decodeMembers(d *json.Decoder) error {
	_, err := d.Token()
	for err == nil && d.More() {
		var key json.Token
		if key, err = d.Token(); err != nil {
			return err
		}
		var value json.RawMessage
		err = d.Decode(&value)
		name, _ := key.(string)
		_, f.repeated[name] = f.raw[name]
		f.raw[name] = value
	}
	if err == nil {
		_, err = d.Token()
	}
	return err
}

// unexpected returns the message of serde (the rack's JSON library) for a value of the wrong type.
func unexpected(raw json.RawMessage, expected string) string {
	found, what := string(raw), "type"
	switch {
	case found[0] == 'n':
	case found[0] == '"':
		found = "string " + found
	case found[0] == '{':
		found = "map"
	case found[0] == '[':
		found = "sequence"
	case found[0] == 't' || found[0] == 'f':
		found = "boolean `" + found + "`"
	case strings.ContainsAny(found, ".eE"):
		found = "floating point `" + found + "`"
	default:
		found = "integer `" + found + "`"
		if strings.HasPrefix(expected, "u") {
			what = "value"
		}
	}
	return fmt.Sprintf("invalid %s: %s, expected %s", what, found, expected)
}

// fail records a problem with a field. It keeps an earlier error, and ignores an empty problem.
func (f *fields) fail(name, problem string) {
	if *f.err != nil || problem == "" {
		return
	}
	if path := f.at(name); path != "" {
		problem = path + ": " + problem
	}
	*f.err = badBody("%s", problem)
}

func (f *fields) at(name string) string {
	if f.path == "" || name == "" {
		return f.path + name
	}
	return f.path + "." + name
}

// get returns a field that the rack knows. It records an error if the field occurs twice (A63).
func (f *fields) get(name string) (json.RawMessage, bool) {
	if f.repeated[name] {
		f.fail("", duplicateField(name))
	}
	raw, ok := f.raw[name]
	return raw, ok
}

func (f *fields) has(name string) bool {
	raw, ok := f.get(name)
	return ok && string(raw) != "null"
}

func (f *fields) read(name, expected string, into any) bool {
	raw, ok := f.get(name)
	if !ok {
		f.fail("", missingField(name))
		return false
	}
	if string(raw) == "null" || json.Unmarshal(raw, into) != nil {
		f.fail(name, unexpected(raw, expected))
		return false
	}
	return true
}

// identity reads a name and a description. The error for an invalid name has no path (A06).
func (f *fields) identity() (name, description string) {
	name = f.text("name")
	f.fail("", store.CheckName(name))
	return name, f.text("description")
}

func (f *fields) newIdentity() (name, description *string) {
	if f.has("name") {
		text := f.text("name")
		f.fail("", store.CheckName(text))
		name = &text
	}
	if f.has("description") {
		text := f.text("description")
		description = &text
	}
	return name, description
}

func (f *fields) text(name string) string { return valueOf[string](f, name, "a string") }

// valueOf reads a value of a simple type. The parameter expected is serde's word for the type.
func valueOf[T any](f *fields, name, expected string) (value T) {
	f.read(name, expected, &value)
	return value
}

func (f *fields) flag(name string, absent bool) bool {
	if _, ok := f.get(name); !ok {
		return absent
	}
	f.read(name, "a boolean", &absent)
	return absent
}

func (f *fields) name(name string) string {
	s := f.text(name)
	f.fail(name, store.CheckName(s))
	return s
}

func (f *fields) nameOrID(name string) store.Selector {
	sel, problem := store.ParseSelector(f.text(name))
	f.fail(name, problem)
	return sel
}

func (f *fields) namesOrIDs(name string) []store.Selector {
	list := []store.Selector{}
	for n, text := range valueOf[[]string](f, name, "a sequence") {
		sel, problem := store.ParseSelector(text)
		f.fail(fmt.Sprintf("%s[%d]", name, n), problem)
		list = append(list, sel)
	}
	return list
}

func (f *fields) uuid(name string) string {
	id, err := uuid.Parse(f.text(name))
	if err != nil {
		f.fail(name, "UUID parsing failed: "+err.Error())
	}
	return id.String()
}

// byteCount reads a number of bytes. The rack keeps it as a signed 64-bit number (A07).
func (f *fields) byteCount(name string) int64 {
	var size uint64
	if f.read(name, "u64", &size) && size > math.MaxInt64 {
		f.fail(name, "value is too large for a byte count")
	}
	return int64(size)
}

// blockSize reads a block size. A rack checks it during parsing, so the error has no code (A08).
func (f *fields) blockSize(name string) int {
	var size uint32
	if f.read(name, "u32", &size) && size != 512 && size != 2048 && size != 4096 {
		f.fail(name, fmt.Sprintf("invalid block size %d", size))
	}
	return int(size)
}

func (f *fields) object(name string) *fields {
	nested := &fields{path: f.at(name), err: f.err}
	var raw json.RawMessage
	if f.read(name, "an object", &raw) {
		nested.decode(raw)
	}
	return nested
}

func (f *fields) list(name string) []*fields {
	if _, ok := f.get(name); !ok {
		return nil
	}
	raw := valueOf[[]json.RawMessage](f, name, "a sequence")
	list := make([]*fields, len(raw))
	for i := range raw {
		list[i] = &fields{path: fmt.Sprintf("%s[%d]", f.at(name), i), err: f.err}
		list[i].decode(raw[i])
	}
	return list
}

// variant reads the field "type", which selects one of the allowed variants of a tagged union.
func (f *fields) variant(allowed ...string) string {
	tag := f.text("type")
	if !slices.Contains(allowed, tag) {
		f.fail("", unknownVariant(tag, allowed))
	}
	return tag
}

// nullable checks that a field exists, and reports whether it is not null.
func (f *fields) nullable(name string) bool {
	if _, ok := f.get(name); !ok {
		f.fail("", missingField(name))
	}
	return f.has(name)
}

func (f *fields) oneOf(name string, allowed []string) *string {
	s := f.text(name)
	if !slices.Contains(allowed, s) {
		f.fail(name, unknownVariant(s, allowed))
	}
	return &s
}

func (f *fields) value(field engine.Field) any {
	switch name := field.Name; field.Type {
	case engine.Name:
		return f.name(name)
	case engine.NameOrID:
		return f.nameOrID(name)
	case engine.Enum:
		return *f.oneOf(name, field.Values)
	case engine.Flag:
		return valueOf[bool](f, name, "a boolean")
	case engine.U8:
		return valueOf[uint8](f, name, "u8")
	case engine.U16:
		return valueOf[uint16](f, name, "u16")
	case engine.I32:
		return valueOf[int32](f, name, "i32")
	case engine.IP:
		return f.address(name)
	case engine.IPNet, engine.IPv4Net, engine.IPv6Net:
		prefix := f.prefix(name)
		if v4 := prefix.Addr().Is4(); v4 && field.Type == engine.IPv6Net ||
			!v4 && field.Type == engine.IPv4Net {
			f.fail(name, "failed to parse IP network")
		}
		return prefix.String()
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

// endpoint reads an object's type and, except for "drop", its value: an address, network or name.
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

func (f *fields) endpoints(name string) []any {
	list := []any{}
	for _, one := range f.needed(name) {
		list = append(list, one.endpoint("vpc", "subnet", "instance", "ip", "ip_net"))
	}
	return list
}

// readFilters reads the filters of a firewall rule. A filter that is nil matches everything.
func readFilters(f *fields) map[string]any {
	filters := map[string]any{"hosts": nil, "ports": nil, "protocols": nil}
	if f.has("hosts") {
		filters["hosts"] = f.endpoints("hosts")
	}
	if f.has("ports") {
		list := []any{}
		for n, port := range valueOf[[]string](f, "ports", "a sequence") {
			f.fail(fmt.Sprintf("ports[%d]", n), portsProblem(port))
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

// portsProblem returns the rack's message for an invalid port or range of ports, or "".
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

func readAllocation(f *fields) engine.Allocation {
	if f.variant("explicit", "auto") == "explicit" {
		return engine.Allocation{IP: f.address("ip")}
	}
	return readPoolSelector(f)
}

func readSubnetAllocation(f *fields) engine.SubnetAllocation {
	if f.variant("explicit", "auto") == "explicit" {
		return engine.SubnetAllocation{Subnet: f.subnet().Subnet}
	}
	return engine.SubnetAllocation{Length: int(valueOf[uint8](f, "prefix_length", "u8")),
		Allocation: readPoolSelector(f)}
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
		var c engine.ExternalIPCreate
		if ip.variant("ephemeral", "floating") == "floating" {
			c.Floating = ip.nameOrID("floating_ip")
		} else {
			c.Ephemeral = readPoolSelector(ip)
		}
		ips = append(ips, c)
	}
	return ips
}
