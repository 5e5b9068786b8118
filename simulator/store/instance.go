package store

import (
	"encoding/json"
	"errors"
	"fmt"
)

// InsertInstance adds the record of an instance. made are the disks that UnwindInstance removes
// if the creation fails.
func (tx *Tx) InsertInstance(i Instance, nics []NetworkInterface, made []string) error {
	if err := tx.putInterfaces(i.ID, nics); err != nil {
		return err
	}
	if made != nil {
		data, err := json.Marshal(made)
		if err != nil {
			return err
		}
		if err := tx.Bucket(bucketSagas).Put([]byte(i.ID), data); err != nil {
			return err
		}
	}
	return Instances.Put(tx, i)
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
	return errors.Join(tx.Bucket(bucketInterfaces).Delete([]byte(i.ID)),
		tx.Bucket(bucketSagas).Delete([]byte(i.ID)), Instances.Delete(tx, i))
}

// UnwindInstance removes an instance that is being created, together with the disks that were
// created for it.
func (tx *Tx) UnwindInstance(id string) error {
	var made []string
	if err := json.Unmarshal(tx.Bucket(bucketSagas).Get([]byte(id)), &made); err != nil {
		return fmt.Errorf("read what was made for instance %s: %w", id, err)
	}
	i, ok, err := Instances.Get(tx, id)
	if err == nil && !ok {
		err = fmt.Errorf("there is no record of instance %s, which was being created", id)
	}
	if err != nil {
		return err
	}
	if err := tx.DeleteInstance(i); err != nil {
		return err
	}
	for _, diskID := range made {
		d, ok, err := Disks.Get(tx, diskID)
		if err != nil {
			return err
		}
		if !ok {
			continue
		}
		if err := errors.Join(Disks.Delete(tx, d), tx.AddStorage(-d.Size)); err != nil {
			return err
		}
	}
	return nil
}

// UnfinishedInstances returns the IDs of the instances that are being created.
func (tx *Tx) UnfinishedInstances() (ids []string, err error) {
	err = tx.Bucket(bucketSagas).ForEach(func(id, _ []byte) error {
		ids = append(ids, string(id))
		return nil
	})
	return ids, err
}

// FinishInstance ends the creation of an instance.
func (tx *Tx) FinishInstance(i Instance) error {
	return errors.Join(tx.Bucket(bucketSagas).Delete([]byte(i.ID)), Instances.Put(tx, i))
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

func (tx *Tx) putInterfaces(instanceID string, nics []NetworkInterface) error {
	data, err := json.Marshal(nics)
	if err != nil {
		return err
	}
	return tx.Bucket(bucketInterfaces).Put([]byte(instanceID), data)
}

// Interfaces reads the network interfaces of an instance.
func (tx *Tx) Interfaces(instanceID string) (nics []NetworkInterface, err error) {
	return nics, json.Unmarshal(tx.Bucket(bucketInterfaces).Get([]byte(instanceID)), &nics)
}

// NextHost returns a number for a network interface. It returns each number once.
func (tx *Tx) NextHost() (uint64, error) { return tx.Bucket(bucketInterfaces).NextSequence() }
