// Package store keeps the simulated rack's records: projects, instances, disks, snapshots and
// images, how much of the quota they use, and the indexes that find them.
//
// A change is one transaction in a bbolt file. Unless the store is volatile, the change is on disk
// when [Store.Update] returns, so a power cut cannot undo a change that the rack has acknowledged.
// The record types have the form of the API's JSON. Package engine has the rules of the rack.
package store

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"strings"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

//nolint:revive // one comment for all: these records have the forms of the API's objects
type (
	Identity       = adminapi.Identity
	Timestamp      = adminapi.Timestamp
	Project        = adminapi.Project
	Disk           = adminapi.Disk
	DiskState      = adminapi.DiskState
	Snapshot       = adminapi.Snapshot
	SnapshotRecord = adminapi.SnapshotRecord
	Image          = adminapi.Image
	Instance       = adminapi.Instance
)

// NewIdentity returns the identity of a new object.
func NewIdentity(id, name, description string) Identity {
	t := adminapi.Now()
	return Identity{ID: id, Name: name, Description: description, TimeCreated: t, TimeModified: t}
}

// The states of disks.
const (
	StateCreating    = "creating"
	StateDetached    = "detached"
	StateAttached    = "attached"
	StateMaintenance = "maintenance"
	StateImportReady = "import_ready"
	StateImporting   = "importing_from_bulk_writes"
	StateFinalizing  = "finalizing"
	StateFaulted     = "faulted"
)

// The types of disks.
const (
	TypeDistributed = "distributed"
	TypeLocal       = "local"
)

// The states of snapshots.
const (
	SnapshotCreating = "creating"
	SnapshotReady    = "ready"
)

// The run states of instances.
const (
	RunStarting  = "starting"
	RunRunning   = "running"
	RunStopping  = "stopping"
	RunStopped   = "stopped"
	RunRebooting = "rebooting"
	RunFailed    = "failed"
)

// MaxName is the greatest length of a name.
const MaxName = 63

// CheckName returns the rack's error for an invalid name, or "" (A04). The pattern in the API's
// schema allows upper case, but the rack does not.
func CheckName(name string) string {
	switch {
	case name == "":
		return "name requires at least one character"
	case len(name) > MaxName:
		return "name may contain at most 63 characters"
	case name[0] < 'a' || name[0] > 'z':
		return "name must begin with an ASCII lowercase character"
	}
	for _, c := range name {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return fmt.Sprintf("name contains invalid character: %q (allowed characters are "+
				"lowercase ASCII, digits, and \"-\")", string(c))
		}
	}
	if strings.HasSuffix(name, "-") {
		return `name cannot end with "-"`
	}
	if _, err := uuid.Parse(name); err == nil {
		return "name cannot be a UUID to avoid ambiguity with IDs"
	}
	return ""
}

// Selector names an object, like the API's type NameOrId. A text in the form of a UUID is an ID,
// and every other text is a name (A05). The zero value names nothing.
type Selector struct{ ID, Name string }

// InvalidNameOrID is the rack's error for a text that is neither a name nor an ID (A05).
const InvalidNameOrID = "data did not match any variant of untagged enum NameOrId"

// ParseSelector parses a name or an ID. For any other text, problem is the rack's error.
func ParseSelector(s string) (sel Selector, problem string) {
	if id, err := uuid.Parse(s); err == nil {
		return Selector{ID: id.String()}, ""
	}
	if CheckName(s) != "" {
		problem = InvalidNameOrID
	}
	return Selector{Name: s}, problem
}

func (s Selector) String() string {
	if s.ID != "" {
		return s.ID
	}
	return s.Name
}

// Given reports whether the selector has a name or an ID.
func (s Selector) Given() bool { return s != Selector{} }

// DerivedID returns an ID that depends only on the words, so that an object of the config has the
// same ID in every directory and on every machine.
func DerivedID(words ...string) string {
	return uuid.NewSHA1(namespace, []byte(strings.Join(words, "/"))).String()
}

var namespace = uuid.MustParse("e1a6c2d4-5c0b-4d0e-9a7b-6f1d2f6c0de5")

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

// IPStack contains the addresses of an interface. Value has the field "ip". In a dual stack it has
// the fields "v4" and "v6" instead, each with an object that has the field "ip".
type IPStack struct {
	Type  string         `json:"type"`
	Value map[string]any `json:"value"`
}

// Addresses returns the addresses of an interface.
func (n NetworkInterface) Addresses() (all []string) {
	value := n.IPStack.Value
	for _, stack := range []any{value, value["v4"], value["v6"]} {
		if fields, ok := stack.(map[string]any); ok {
			if ip, ok := fields["ip"].(string); ok {
				all = append(all, ip)
			}
		}
	}
	return all
}

// PutInterfaces replaces the network interfaces of an instance.
func (tx *Tx) PutInterfaces(instanceID string, nics []NetworkInterface) {
	tx.put(bucketInterfaces, instanceID, nics)
}

// Interfaces returns the network interfaces of an instance.
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

// NextHost returns a number for an interface's MAC address. It returns no number twice.
func (tx *Tx) NextHost() uint64 {
	n, err := tx.Bucket(bucketInterfaces).NextSequence()
	tx.Check(err)
	return n
}

// Resource is the record of an object that has no data and no device, such as a VPC.
type Resource struct {
	Identity
	// Fields has the other JSON fields by their names.
	Fields map[string]any
}

// Text returns the text in a field, or "" if the field has no text.
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

// Resources returns the table of one kind of resource. The parameter parent names the field with
// the parent's ID; "" means that the silo is the parent.
func Resources(kind, parent string) Table[Resource] {
	return Table[Resource]{kind, func(r Resource) string { return r.Text(parent) }}
}

// bucketLinks has two keys for every link: one for each of the two linked objects.
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

// Linked returns the IDs of the objects that are linked to an object by links of a kind.
func (tx *Tx) Linked(kind, id string) []string { return tx.keys(bucketLinks, id+"/"+kind+"/") }

// UnlinkAll removes all links of an object.
func (tx *Tx) UnlinkAll(id string) {
	for _, rest := range tx.keys(bucketLinks, id+"/") {
		kind, other, _ := strings.Cut(rest, "/")
		tx.Unlink(kind, id, other)
	}
}

func linkKey(a, kind, b string) []byte { return []byte(a + "/" + kind + "/" + b) }
