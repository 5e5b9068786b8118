package engine

import (
	"fmt"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// InterfaceCreate has the parameters of a new network interface.
type InterfaceCreate struct {
	Name, Description, Stack, VPC, Subnet string
	// Unsupported names a part of it that this simulator does not support.
	Unsupported string
}

// The IP stacks that an interface can have.
const (
	StackV4   = "v4"
	StackV6   = "v6"
	StackDual = "dual_stack"
)

// DefaultInterface is the interface of an instance whose request names none (A52).
var DefaultInterface = InterfaceCreate{
	Name: "net0", Description: "default primary interface", Stack: StackDual,
	VPC: defaultNetwork, Subnet: defaultNetwork,
}

const (
	// defaultNetwork is a project's only VPC, and its only subnet (A64).
	defaultNetwork = "default"
	maxInterfaces  = 8
)

// interfacesProblem returns the mistake in the interfaces that the rack finds before it creates
// any part of an instance (A64).
func interfacesProblem(create []InterfaceCreate) error {
	if len(create) > maxInterfaces {
		return invalidRequest("An instance may not have more than %d network interfaces",
			maxInterfaces)
	}
	vpcs := map[string]bool{}
	for _, c := range create {
		vpcs[c.VPC] = true
	}
	if create != nil && len(vpcs) != 1 {
		return invalidRequest("All interfaces must be in the same VPC")
	}
	return nil
}

// interfaceProblem returns the reason why an interface cannot be added to the instance's other
// interfaces (A64).
func interfaceProblem(c InterfaceCreate, others int) error {
	switch {
	case c.VPC != defaultNetwork:
		return notFound("vpc", store.Selector{Name: c.VPC})
	case c.Subnet != defaultNetwork:
		return notFound("vpc-subnet", store.Selector{Name: c.Subnet})
	case others > 0:
		return invalidRequest("Each interface must be in a distinct VPC Subnet")
	}
	return nil
}

const macFormat = "A8:40:25:F0:%02X:%02X"

// newInterfaces creates the interfaces of an instance. Each gets an address of its own.
func newInterfaces(tx *store.Tx, i store.Instance,
	create []InterfaceCreate) ([]store.NetworkInterface, error) {
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
			Identity:   store.NewIdentity(store.DerivedID("interface", i.ID, c.Name), c.Name, c.Description),
			InstanceID: i.ID, Primary: n == 0,
			VPCID:    store.DerivedID("vpc", i.ProjectID, c.VPC),
			SubnetID: store.DerivedID("subnet", i.ProjectID, c.VPC, c.Subnet),
			MAC:      fmt.Sprintf(macFormat, byte(host>>8), byte(host)),
			IPStack:  newStack(c.Stack, host),
		})
	}
	return nics, nil
}

// newStack returns the addresses of a host. It skips the first five addresses of a subnet, which
// the rack reserves (A52).
func newStack(kind string, host uint64) store.IPStack {
	host += 4
	v4 := store.Address{IP: fmt.Sprintf("172.30.%d.%d", byte(host>>8), byte(host)),
		TransitIPs: []string{}}
	v6 := store.Address{IP: fmt.Sprintf("fd30::%x", host), TransitIPs: []string{}}
	stack := store.IPStack{Type: kind, Value: store.DualStack{V4: v4, V6: v6}}
	switch kind {
	case StackV4:
		stack.Value = v4
	case StackV6:
		stack.Value = v6
	}
	return stack
}

// Interfaces lists the network interfaces of an instance.
func (s Instances) Interfaces(call *Call, ref Ref) (nics []store.NetworkInterface, err error) {
	err = s.store.View(func(tx *store.Tx) error {
		i, err := lookup(s.Simulation, call, tx, store.Instances, ref)
		if err != nil {
			return err
		}
		nics, err = tx.Interfaces(i.ID)
		return err
	})
	return nics, err
}

// SourceNAT is the address and the ports from which an instance connects to the outside.
type SourceNAT struct {
	Kind      string `json:"kind"`
	IP        string `json:"ip"`
	IPPoolID  string `json:"ip_pool_id"`
	FirstPort int    `json:"first_port"`
	LastPort  int    `json:"last_port"`
}

// ExternalIPs returns the external address of an instance whose primary interface has IPv4, and
// no address for other instances (A65).
func (s Instances) ExternalIPs(call *Call, ref Ref) ([]SourceNAT, error) {
	ips := []SourceNAT{}
	nics, err := s.Interfaces(call, ref)
	for _, n := range nics {
		if n.Primary && n.IPStack.Type != StackV6 {
			ips = append(ips, natOf(n))
		}
	}
	return ips, err
}

// natOf returns the address that four instances share, and the instance's quarter of the ports
// (A65).
func natOf(n store.NetworkInterface) SourceNAT {
	var high, low byte
	if _, err := fmt.Sscanf(n.MAC, macFormat, &high, &low); err != nil {
		panic(err) // newInterfaces wrote it
	}
	const ports = 1 << 14
	host := int(high)<<8 | int(low)
	first := host % 4 * ports
	return SourceNAT{Kind: "snat", IP: fmt.Sprintf("198.18.%d.%d", host>>10, byte(host>>2)),
		IPPoolID: store.DerivedID("ip-pool", "default"), FirstPort: first, LastPort: first + ports - 1}
}
