package simulator

import (
	"encoding/json"
	"fmt"
	"net/http"
)

type networkInterface struct {
	identity
	InstanceID string  `json:"instance_id"`
	VPCID      string  `json:"vpc_id"`
	SubnetID   string  `json:"subnet_id"`
	MAC        string  `json:"mac"`
	Primary    bool    `json:"primary"`
	IPStack    ipStack `json:"ip_stack"`
}

type ipStack struct {
	Type  string `json:"type"`
	Value any    `json:"value"`
}

type address struct {
	IP         string   `json:"ip"`
	TransitIPs []string `json:"transit_ips"`
}

type dualStack struct {
	V4 address `json:"v4"`
	V6 address `json:"v6"`
}

type interfaceCreate struct{ name, description, stack, vpc, subnet string }

// The IP stacks that an interface can have.
const (
	stackV4   = "v4"
	stackV6   = "v6"
	stackDual = "dual_stack"
)

// defaultInterface is what the rack gives an instance that asks for nothing else (A52).
var defaultInterface = interfaceCreate{
	name: "net0", description: "default primary interface", stack: stackDual,
	vpc: "default", subnet: "default",
}

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
		var list []interfaceCreate
		for _, p := range nics.list("params") {
			list = append(list, interfaceCreate{p.name("name"), p.text("description"), stackDual,
				p.name("vpc_name"), p.name("subnet_name")})
		}
		return list
	}
	return []interfaceCreate{nic}
}

// putInterfaces gives an instance its interfaces, each with an address of its own.
func (tx *tx) putInterfaces(i instance, create []interfaceCreate) error {
	bucket := tx.Bucket(bucketInterfaces)
	nics := []networkInterface{}
	for n, c := range create {
		host, err := bucket.NextSequence()
		if err != nil {
			return err
		}
		nics = append(nics, networkInterface{
			identity:   newIdentity(derivedID("interface", i.ID, c.name), c.name, c.description),
			InstanceID: i.ID, Primary: n == 0,
			VPCID:    derivedID("vpc", i.ProjectID, c.vpc),
			SubnetID: derivedID("subnet", i.ProjectID, c.vpc, c.subnet),
			MAC:      fmt.Sprintf("A8:40:25:F0:%02X:%02X", byte(host>>8), byte(host)),
			IPStack:  newStack(c.stack, host),
		})
	}
	data, err := json.Marshal(nics)
	if err != nil {
		return err
	}
	return bucket.Put([]byte(i.ID), data)
}

// newStack numbers hosts behind the five addresses that a subnet keeps for itself (A52).
func newStack(kind string, host uint64) ipStack {
	host += 4
	v4 := address{fmt.Sprintf("172.30.%d.%d", byte(host>>8), byte(host)), []string{}}
	v6 := address{fmt.Sprintf("fd30::%x", host), []string{}}
	switch kind {
	case stackV4:
		return ipStack{kind, v4}
	case stackV6:
		return ipStack{kind, v6}
	}
	return ipStack{stackDual, dualStack{v4, v6}}
}

// queryInstance finds the instance of a path or, for lists beside instances, of the query.
func (s *Server) queryInstance(r *request, tx *tx) (instance, error) {
	return lookup(s, r, tx, instances, orDefault(r.path.Get("instance"), r.query.Get("instance")))
}

func (s *Server) interfaceList(r *request) (int, any, error) {
	var nics []networkInterface
	err := s.store.view(func(tx *tx) error {
		i, err := s.queryInstance(r, tx)
		if err != nil {
			return err
		}
		return json.Unmarshal(tx.Bucket(bucketInterfaces).Get([]byte(i.ID)), &nics)
	})
	return http.StatusOK, slice(r.scan, nics,
		func(n networkInterface) identity { return n.identity }), err
}

// instanceNothing lists what no instance of this rack has.
func (s *Server) instanceNothing(r *request) (int, any, error) {
	err := s.store.view(func(tx *tx) error {
		_, err := s.queryInstance(r, tx)
		return err
	})
	return http.StatusOK, emptyPage(), err
}
