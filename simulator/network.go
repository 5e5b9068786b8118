package simulator

import (
	"fmt"
	"net/http"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

type interfaceCreate struct {
	name, description, stack, vpc, subnet string
	// unsupported names a part of it that this simulator does not have.
	unsupported string
}

// The IP stacks that an interface can have.
const (
	stackV4   = "v4"
	stackV6   = "v6"
	stackDual = "dual_stack"
)

// defaultInterface is what the rack gives an instance that asks for nothing else (A52).
var defaultInterface = interfaceCreate{
	name: "net0", description: "default primary interface", stack: stackDual,
	vpc: defaultNetwork, subnet: defaultNetwork,
}

const (
	// defaultNetwork is a project's only VPC, and that one's only subnet (A64).
	defaultNetwork = "default"
	maxInterfaces  = 8
)

// readInterfaces reads what interfaces an instance shall have. None at all is nil, unlike a list of
// none.
func readInterfaces(f *fields) []interfaceCreate {
	if !f.has("network_interfaces") {
		return []interfaceCreate{defaultInterface}
	}
	nics := f.object("network_interfaces")
	nic := defaultInterface
	switch nics.variant("create", "default_ipv4", "default_ipv6", "default_dual_stack", "none") {
	case "none":
		return nil
	case "default_ipv4":
		nic.stack = stackV4
	case "default_ipv6":
		nic.stack = stackV6
	case "create":
		list := []interfaceCreate{}
		for _, p := range nics.list("params") {
			list = append(list, readInterface(p))
		}
		return list
	}
	return []interfaceCreate{nic}
}

func readInterface(f *fields) interfaceCreate {
	c := interfaceCreate{stack: stackDual, vpc: f.name("vpc_name"), subnet: f.name("subnet_name")}
	c.name, c.description = f.identity()
	if _, ok := f.get("ip_config"); !ok {
		return c
	}
	config := f.object("ip_config")
	c.stack = config.variant(stackV4, stackV6, stackDual)
	value := config.object("value")
	versions := []*fields{value}
	if c.stack == stackDual {
		versions = []*fields{value.object("v4"), value.object("v6")}
	}
	for _, version := range versions {
		if version.object("ip").variant("auto", "explicit") == "explicit" {
			c.unsupported = "explicit ip_config"
		}
		c.unsupported = orDefault(version.unsupported("transit_ips"), c.unsupported)
	}
	return c
}

// interfacesProblem is what the rack says before it makes anything of an instance (A64).
func interfacesProblem(create []interfaceCreate) error {
	if len(create) > maxInterfaces {
		return invalidRequest("An instance may not have more than %d network interfaces",
			maxInterfaces)
	}
	vpcs := map[string]bool{}
	for _, c := range create {
		vpcs[c.vpc] = true
	}
	if create != nil && len(vpcs) != 1 {
		return invalidRequest("All interfaces must be in the same VPC")
	}
	return nil
}

// interfaceProblem is why an interface cannot be added to those that its instance has (A64).
func interfaceProblem(c interfaceCreate, others int) error {
	switch {
	case c.vpc != defaultNetwork:
		return notFound("vpc", store.Selector{Name: c.vpc})
	case c.subnet != defaultNetwork:
		return notFound("vpc-subnet", store.Selector{Name: c.subnet})
	case others > 0:
		return invalidRequest("Each interface must be in a distinct VPC Subnet")
	}
	return nil
}

const macFormat = "A8:40:25:F0:%02X:%02X"

// newInterfaces makes the interfaces of an instance, each with an address of its own.
func newInterfaces(tx *store.Tx, i store.Instance, create []interfaceCreate) ([]store.NetworkInterface, error) {
	nics := []store.NetworkInterface{}
	for n, c := range create {
		if err := interfaceProblem(c, n); err != nil {
			return nil, err
		}
		host, err := tx.NextHost()
		if err != nil {
			return nil, err
		}
		nics = append(nics, store.NetworkInterface{
			Identity:   store.NewIdentity(store.DerivedID("interface", i.ID, c.name), c.name, c.description),
			InstanceID: i.ID, Primary: n == 0,
			VPCID:    store.DerivedID("vpc", i.ProjectID, c.vpc),
			SubnetID: store.DerivedID("subnet", i.ProjectID, c.vpc, c.subnet),
			MAC:      fmt.Sprintf(macFormat, byte(host>>8), byte(host)),
			IPStack:  newStack(c.stack, host),
		})
	}
	return nics, nil
}

// newStack numbers hosts behind the five addresses that a subnet keeps for itself (A52).
func newStack(kind string, host uint64) store.IPStack {
	host += 4
	v4 := store.Address{IP: fmt.Sprintf("172.30.%d.%d", byte(host>>8), byte(host)),
		TransitIPs: []string{}}
	v6 := store.Address{IP: fmt.Sprintf("fd30::%x", host), TransitIPs: []string{}}
	stack := store.IPStack{Type: kind, Value: store.DualStack{V4: v4, V6: v6}}
	switch kind {
	case stackV4:
		stack.Value = v4
	case stackV6:
		stack.Value = v6
	}
	return stack
}

// queryInstance finds the instance of a path or, for lists beside instances, of the query.
func (s *Server) queryInstance(r *request, tx *store.Tx) (store.Instance, error) {
	return lookup(s, r, tx, store.Instances, orDefault(r.path.Get("instance"), r.query.Get("instance")))
}

func (s *Server) queryInterfaces(r *request) (nics []store.NetworkInterface, err error) {
	err = s.store.View(func(tx *store.Tx) error {
		i, err := s.queryInstance(r, tx)
		if err != nil {
			return err
		}
		nics, err = tx.Interfaces(i.ID)
		return err
	})
	return nics, err
}

func (s *Server) interfaceList(r *request) (int, any, error) {
	nics, err := s.queryInterfaces(r)
	return http.StatusOK, slice(r.scan, nics,
		func(n store.NetworkInterface) store.Identity { return n.Identity }), err
}

// sourceNAT is the address and the ports with which an instance reaches what is outside.
type sourceNAT struct {
	Kind      string `json:"kind"`
	IP        string `json:"ip"`
	IPPoolID  string `json:"ip_pool_id"`
	FirstPort int    `json:"first_port"`
	LastPort  int    `json:"last_port"`
}

// externalIPList has the one address of an instance whose primary interface speaks IPv4 (A65).
func (s *Server) externalIPList(r *request) (int, any, error) {
	ips := page[sourceNAT]{Items: []sourceNAT{}}
	nics, err := s.queryInterfaces(r)
	for _, n := range nics {
		if n.Primary && n.IPStack.Type != stackV6 {
			ips.Items = append(ips.Items, sourceNATOf(n))
		}
	}
	return http.StatusOK, ips, err
}

// sourceNATOf gives every four instances an address, and each its quarter of the ports (A65).
func sourceNATOf(n store.NetworkInterface) sourceNAT {
	var high, low byte
	if _, err := fmt.Sscanf(n.MAC, macFormat, &high, &low); err != nil {
		panic(err) // it is as putInterfaces wrote it
	}
	const ports = 1 << 14
	host := int(high)<<8 | int(low)
	first := host % 4 * ports
	return sourceNAT{Kind: "snat", IP: fmt.Sprintf("198.18.%d.%d", host>>10, byte(host>>2)),
		IPPoolID: store.DerivedID("ip-pool", "default"), FirstPort: first, LastPort: first + ports - 1}
}

// instanceNothing lists what no instance of this rack has.
func (s *Server) instanceNothing(r *request) (int, any, error) {
	err := s.store.View(func(tx *store.Tx) error {
		_, err := s.queryInstance(r, tx)
		return err
	})
	return http.StatusOK, emptyPage(), err
}
