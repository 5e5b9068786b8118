package store

import "iter"

// InsertInstance adds the record of an instance with its network interfaces.
func (tx *Tx) InsertInstance(i Instance, nics []NetworkInterface) {
	tx.PutInterfaces(i.ID, nics)
	Instances.Put(tx, i)
}

// DeleteInstance removes the record of an instance and detaches its disks.
func (tx *Tx) DeleteInstance(i Instance) {
	for _, d := range tx.DisksOf(i.ID) {
		d.State = DiskState{State: StateDetached}
		tx.PutDisk(d)
	}
	tx.UnlinkAll(i.ID)
	tx.drop(bucketInterfaces, i.ID)
	tx.CloseSaga(i.ID)
	Instances.Delete(tx, i)
}

// NetworkInterface is a network interface of an instance.
type NetworkInterface struct {
	Identity
	InstanceID string  `json:"instance_id"`
	VPCID      string  `json:"vpc_id"`
	SubnetID   string  `json:"subnet_id"`
	MAC        string  `json:"mac"`
	Primary    bool    `json:"primary"`
	IPStack    IPStack `json:"ip_stack"`
}

// IPStack is the addresses of an interface: an Address or a DualStack.
type IPStack struct {
	Type  string `json:"type"`
	Value any    `json:"value"`
}

// Addresses returns the interface's addresses. In a record that was read, the Value is a JSON
// object.
func (n NetworkInterface) Addresses() (all []string) {
	switch v := n.IPStack.Value.(type) {
	case Address:
		return []string{v.IP}
	case DualStack:
		return []string{v.V4.IP, v.V6.IP}
	case map[string]any:
		for _, stack := range []any{v, v["v4"], v["v6"]} {
			if fields, ok := stack.(map[string]any); ok {
				if ip, ok := fields["ip"].(string); ok {
					all = append(all, ip)
				}
			}
		}
	}
	return all
}

// Address is an address of one IP version.
type Address struct {
	IP         string   `json:"ip"`
	TransitIPs []string `json:"transit_ips"`
}

// DualStack is an address of each IP version.
type DualStack struct {
	V4 Address `json:"v4"`
	V6 Address `json:"v6"`
}

// PutInterfaces writes the network interfaces of an instance.
func (tx *Tx) PutInterfaces(instanceID string, nics []NetworkInterface) {
	tx.put(bucketInterfaces, instanceID, nics)
}

// Interfaces reads the network interfaces of an instance.
func (tx *Tx) Interfaces(instanceID string) (nics []NetworkInterface) {
	tx.get(bucketInterfaces, instanceID, &nics)
	return nics
}

// AllInterfaces iterates over the network interfaces of every instance.
func (tx *Tx) AllInterfaces() iter.Seq[NetworkInterface] {
	return func(yield func(NetworkInterface) bool) {
		for nics := range As[[]NetworkInterface](tx, string(bucketInterfaces)) {
			for _, nic := range nics {
				if !yield(nic) {
					return
				}
			}
		}
	}
}

// NextHost returns a number for a network interface, another one each time.
func (tx *Tx) NextHost() uint64 {
	n, err := tx.Bucket(bucketInterfaces).NextSequence()
	tx.Check(err)
	return n
}
