package store

import (
	"bytes"
	"encoding/json"
	"errors"
	"iter"
	"strings"
)

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

// Resource is a record of an object that has no data plane, in the form of the API.
type Resource struct {
	Identity
	// Fields has the other fields by their names.
	Fields map[string]any
}

// Text returns a field that contains a text, or "".
func (r Resource) Text(name string) string {
	text, _ := r.Fields[name].(string)
	return text
}

// MarshalJSON writes the identity and then the other fields.
func (r Resource) MarshalJSON() ([]byte, error) {
	identity, err := json.Marshal(r.Identity)
	if err != nil || len(r.Fields) == 0 {
		return identity, err
	}
	fields, err := json.Marshal(r.Fields)
	if err != nil {
		return nil, err
	}
	return append(append(identity[:len(identity)-1], ','), fields[1:]...), nil
}

// UnmarshalJSON reads what MarshalJSON writes.
func (r *Resource) UnmarshalJSON(data []byte) error {
	if err := json.Unmarshal(data, &r.Identity); err != nil {
		return err
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	r.Fields = map[string]any{}
	if err := d.Decode(&r.Fields); err != nil {
		return err
	}
	for _, name := range identityFields {
		delete(r.Fields, name)
	}
	return nil
}

var identityFields = []string{"id", "name", "description", "time_created", "time_modified"}

// Resources returns the table of one kind of resource. parent is the field with the ID of the
// parent, or "" if the silo is the parent.
func Resources(kind, parent string) Table[Resource] {
	return Table[Resource]{kind, func(r Resource) string { return r.Text(parent) }}
}

// bucketLinks has a key for each direction of every link.
var bucketLinks = []byte("links")

// Link records that two objects belong together, such as an instance and its SSH key.
func (tx *Tx) Link(kind, a, b string) {
	links := tx.Bucket(bucketLinks)
	tx.Check(errors.Join(links.Put(linkKey(a, kind, b), nil), links.Put(linkKey(b, kind, a), nil)))
}

// Unlink removes a link.
func (tx *Tx) Unlink(kind, a, b string) {
	links := tx.Bucket(bucketLinks)
	tx.Check(errors.Join(links.Delete(linkKey(a, kind, b)), links.Delete(linkKey(b, kind, a))))
}

// Linked returns the IDs of the objects that a link of that kind connects with an object.
func (tx *Tx) Linked(kind, id string) []string { return tx.keys(bucketLinks, id+"/"+kind+"/") }

// UnlinkAll removes all links of an object.
func (tx *Tx) UnlinkAll(id string) {
	for _, rest := range tx.keys(bucketLinks, id+"/") {
		kind, other, _ := strings.Cut(rest, "/")
		tx.Unlink(kind, id, other)
	}
}

func linkKey(a, kind, b string) []byte { return []byte(a + "/" + kind + "/" + b) }
