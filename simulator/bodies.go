package simulator

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/netip"
	"regexp"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

func parseDiskCreate(f *fields) any { return readDiskCreate(f) }

func readDiskCreate(f *fields) engine.DiskCreate {
	var c engine.DiskCreate
	c.Name, c.Description = f.identity()
	c.Size = f.byteCount("size")
	backend := f.object("disk_backend")
	c.Backend = backend.variant(store.TypeLocal, store.TypeDistributed)
	if c.Backend == store.TypeLocal {
		c.Source.BlockSize = engine.LocalBlockSize
		return c
	}
	source := backend.object("disk_source")
	c.Source.Kind = source.variant(engine.SourceBlank, engine.SourceSnapshot, engine.SourceImage,
		engine.SourceImporting)
	switch c.Source.Kind {
	case engine.SourceBlank, engine.SourceImporting:
		c.Source.BlockSize = source.blockSize("block_size")
	case engine.SourceSnapshot, engine.SourceImage:
		c.Source.ID = source.uuid(c.Source.Kind + "_id")
		c.Source.ReadOnly = source.flag("read_only", false)
	}
	return c
}

func parseSnapshotCreate(f *fields) any {
	name, description := f.identity()
	return engine.SnapshotCreate{Name: name, Description: description, Disk: f.nameOrID("disk")}
}

func parseDiskPath(f *fields) any { return f.nameOrID("disk") }

func parseBulkWrite(f *fields) any {
	return engine.BulkWrite{Offset: valueOf[uint64](f, "offset", "u64"),
		Base64: f.text("base64_encoded_data")}
}

// parseFinalize returns the name for a snapshot of the finalized disk, or "" for no snapshot.
func parseFinalize(f *fields) any {
	if !f.has("snapshot_name") {
		return ""
	}
	return f.name("snapshot_name")
}

func parseImageCreate(f *fields) any {
	var c engine.ImageCreate
	c.Name, c.Description = f.identity()
	c.OS, c.Version = f.text("os"), f.text("version")
	source := f.object("source")
	source.variant("snapshot")
	c.SnapshotID = source.uuid("id")
	return c
}

const (
	maxUserData = 32 << 10
	maxHostname = 253
)

var hostnames = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?` +
	`(\.[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?)*$`)

func parseInstanceCreate(f *fields) any {
	c := engine.InstanceCreate{
		Hostname: f.text("hostname"), NCPUs: int(valueOf[uint16](f, "ncpus", "u16")),
		Memory:      f.byteCount("memory"),
		Start:       f.flag("start", true),
		JumboFrames: f.flag("enable_jumbo_frames", false),
	}
	c.Name, c.Description = f.identity()
	switch { // A50
	case len(c.Hostname) > maxHostname:
		f.fail("hostname", fmt.Sprintf("Max hostname length is %d", maxHostname))
	case !hostnames.MatchString(c.Hostname):
		f.fail("hostname", "Hostnames must comply with RFC 1035")
	}
	if f.has("user_data") {
		data, err := base64.StdEncoding.DecodeString(f.text("user_data"))
		if err != nil {
			f.fail("user_data", "invalid value: invalid base64 string, expected a valid base64 string")
		}
		if len(data) > maxUserData {
			f.fail("user_data", fmt.Sprintf("invalid length %d, expected less than 32 KiB", len(data)))
		}
	}
	if f.has("auto_restart_policy") {
		c.AutoRestartPolicy = f.oneOf("auto_restart_policy", engine.RestartPolicies)
	}
	if f.has("cpu_platform") {
		c.CPUPlatform = f.oneOf("cpu_platform", engine.CPUPlatforms)
	}
	if f.has("boot_disk") {
		boot := readAttachment(f.object("boot_disk"))
		c.Boot = &boot
	}
	for _, d := range f.list("disks") {
		c.Disks = append(c.Disks, readAttachment(d))
	}
	c.Interfaces = readInterfaces(f)
	c.ExternalIPs = readExternalIPs(f)
	if f.has("ssh_public_keys") {
		keys := f.namesOrIDs("ssh_public_keys")
		c.SSHKeys = &keys
	}
	if f.has("anti_affinity_groups") {
		c.Groups = f.namesOrIDs("anti_affinity_groups")
	}
	c.Unsupported = f.unsupported("multicast_groups")
	for _, nic := range c.Interfaces {
		c.Unsupported = cmp.Or(c.Unsupported, nic.Unsupported)
	}
	return c
}

// unsupported returns the first of the names whose list in the request is not empty, or "".
func (f *fields) unsupported(names ...string) string {
	for _, name := range names {
		var wanted []json.RawMessage
		if f.has(name) && f.read(name, "a sequence", &wanted) && len(wanted) > 0 {
			return name
		}
	}
	return ""
}

func readAttachment(f *fields) engine.DiskAttachment {
	if f.variant("create", "attach") == "attach" {
		return engine.DiskAttachment{Attach: f.name("name")}
	}
	create := readDiskCreate(f)
	create.ID = uuid.NewString()
	return engine.DiskAttachment{Create: &create}
}

func parseInstanceUpdate(f *fields) any {
	u := engine.InstanceUpdate{NCPUs: int(valueOf[uint16](f, "ncpus", "u16")),
		Memory: f.byteCount("memory")}
	if f.nullable("boot_disk") {
		u.BootDisk = f.nameOrID("boot_disk")
	}
	if f.nullable("auto_restart_policy") {
		u.AutoRestartPolicy = f.oneOf("auto_restart_policy", engine.RestartPolicies)
	}
	if f.nullable("cpu_platform") {
		u.CPUPlatform = f.oneOf("cpu_platform", engine.CPUPlatforms)
	}
	f.read("enable_jumbo_frames", "a boolean", &u.JumboFrames)
	u.Unsupported = f.unsupported("multicast_groups")
	return u
}

// readInterfaces returns nil for "none", and an empty list for a "create" without interfaces.
func readInterfaces(f *fields) []engine.InterfaceCreate {
	if !f.has("network_interfaces") {
		return []engine.InterfaceCreate{engine.DefaultInterface}
	}
	nics := f.object("network_interfaces")
	nic := engine.DefaultInterface
	switch nics.variant("create", "default_ipv4", "default_ipv6", "default_dual_stack", "none") {
	case "none":
		return nil
	case "default_ipv4":
		nic.Stack = engine.StackV4
	case "default_ipv6":
		nic.Stack = engine.StackV6
	case "create":
		list := []engine.InterfaceCreate{}
		for _, p := range nics.list("params") {
			list = append(list, readInterface(p))
		}
		return list
	}
	return []engine.InterfaceCreate{nic}
}

func parseInterfaceUpdate(f *fields) any {
	u := engine.InterfaceUpdate{Primary: f.flag("primary", false),
		Unsupported: f.unsupported("transit_ips")}
	u.Name, u.Description = f.newIdentity()
	return u
}

func readInterface(f *fields) engine.InterfaceCreate {
	c := engine.InterfaceCreate{Stack: engine.StackDual, VPC: f.name("vpc_name"),
		Subnet: f.name("subnet_name")}
	c.Name, c.Description = f.identity()
	if _, ok := f.get("ip_config"); !ok {
		return c
	}
	config := f.object("ip_config")
	c.Stack = config.variant(engine.StackV4, engine.StackV6, engine.StackDual)
	value := config.object("value")
	v4, v6 := value, value
	if c.Stack == engine.StackDual {
		v4, v6 = value.object("v4"), value.object("v6")
	}
	if c.Stack != engine.StackV6 {
		c.V4 = v4.assignment("IPv4", netip.Addr.Is4)
		c.Unsupported = v4.unsupported("transit_ips")
	}
	if c.Stack != engine.StackV4 {
		c.V6 = v6.assignment("IPv6", netip.Addr.Is6)
		c.Unsupported = cmp.Or(c.Unsupported, v6.unsupported("transit_ips"))
	}
	return c
}

// assignment returns an address, or the zero value for the type "auto".
func (f *fields) assignment(version string, is func(netip.Addr) bool) (address netip.Addr) {
	ip := f.object("ip")
	if ip.variant("auto", "explicit") == "explicit" {
		address, _ = netip.ParseAddr(ip.text("value"))
		if !is(address) || address.Zone() != "" {
			ip.fail("value", "invalid "+version+" address syntax")
		}
	}
	return address
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

func parseDefault(f *fields) any {
	return engine.PoolLink{IsDefault: valueOf[bool](f, "is_default", "a boolean")}
}

func parseLink(f *fields) any {
	return engine.PoolLink{Silo: f.nameOrID("silo"),
		IsDefault: valueOf[bool](f, "is_default", "a boolean")}
}

// parseExtent reads a range of addresses. The rack has one error message for all invalid ranges.
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

// subnet reads an IPv4 or IPv6 network. The result's Subnet keeps the host bits of the request.
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
	return int(valueOf[uint8](f, name, "u8"))
}
