package store

import (
	"encoding/json"
	"errors"
	"fmt"
)

// InsertInstance adds the record of an instance with its network interfaces.
func (tx *Tx) InsertInstance(i Instance, nics []NetworkInterface) error {
	return errors.Join(tx.PutInterfaces(i.ID, nics), Instances.Put(tx, i))
}

// DeleteInstance removes the record of an instance and detaches its disks.
func (tx *Tx) DeleteInstance(i Instance) error {
	attached, err := tx.DisksOf(i.ID)
	if err != nil {
		return err
	}
	for _, d := range attached {
		d.State = DiskState{State: StateDetached}
		if err := tx.PutDisk(d); err != nil {
			return err
		}
	}
	return errors.Join(tx.UnlinkAll(i.ID), tx.Bucket(bucketInterfaces).Delete([]byte(i.ID)),
		tx.CloseSaga(i.ID), Instances.Delete(tx, i))
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
func (tx *Tx) PutInterfaces(instanceID string, nics []NetworkInterface) error {
	return putJSON(tx.Bucket(bucketInterfaces), []byte(instanceID), nics)
}

// Interfaces reads the network interfaces of an instance.
func (tx *Tx) Interfaces(instanceID string) (nics []NetworkInterface, err error) {
	return nics, json.Unmarshal(tx.Bucket(bucketInterfaces).Get([]byte(instanceID)), &nics)
}

// EachInterface calls visit for the network interfaces of every instance.
func (tx *Tx) EachInterface(visit func(NetworkInterface)) error {
	return tx.Bucket(bucketInterfaces).ForEach(func(_, data []byte) error {
		var nics []NetworkInterface
		if err := json.Unmarshal(data, &nics); err != nil {
			return fmt.Errorf("read the network interfaces of an instance: %w", err)
		}
		for _, nic := range nics {
			visit(nic)
		}
		return nil
	})
}

// NextHost returns a number for a network interface, another one each time.
func (tx *Tx) NextHost() (uint64, error) { return tx.Bucket(bucketInterfaces).NextSequence() }
