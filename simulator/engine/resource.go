package engine

import (
	"encoding/json"
	"iter"
	"maps"
	"slices"
	"strings"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// Kind describes one kind of resource, such as a VPC: an object that has a record, but no data and
// no device. The methods of Resources handle the records of every kind.
type Kind struct {
	// Name is the rack's word for the resource in errors. Operation is the prefix of the names of the
	// kind's operations in the API. Param is the resource's parameter in paths and queries.
	Name, Operation, Param string
	// Parent is the kind of the object that contains the resource. If it is nil, the resource belongs
	// to the user with the ID Owner, or to the silo if Owner is "". Names are unique in a parent.
	Parent *Kind
	Owner  string
	// In is the name of the field with the parent's or the owner's ID, or "" if there is none.
	In string
	// Both is a part of the error message if a request has an ID together with a parent. The field
	// Neither has the beginning of the error message for a name without a parent (A05).
	Both, Neither string
	// Public means that every user of the silo may read the resource, and its owner may change it. The
	// roles in the projects do not matter (A15).
	Public bool
	// Fleet means that only a fleet administrator may call the operations. Hidden names the fields of
	// the record that the methods View, List, Create and Update of Resources do not return.
	Fleet  bool
	Hidden []string
	// Fields has the fields of a request, in the order in which the rack checks them.
	Fields []Field
	// Created, Updated and Deleted change other records after a creation, an update or a deletion.
	Created, Updated, Deleted func(*Change)
	// Permit can refuse an update or a deletion. For a deletion, its second argument is nil.
	Permit func(*Change, *ResourceInput)
	// Holders are the possible reasons to refuse a deletion.
	Holders []Holder
}

// Field is a field of a kind's requests.
type Field struct {
	Name string
	Type FieldType
	// Values are the words that an Enum allows.
	Values []string
	// Of contains the fields inside a Record. A field that is missing in the request becomes null.
	Of []Field
	// Optional means that a creation request may omit the field. The value is then Default.
	Optional bool
	Default  any
	Update   UpdateRule
	// Set checks the value and writes it into the record; nil means a plain write to the field Name.
	Set func(*Change, any)
}

// FieldType determines how a field is parsed, and the Go type of its value.
type FieldType int

// The types of fields. Requests do not have Internal fields.
const (
	Internal      FieldType = iota
	Text                    // string
	Name                    // string
	NameOrID                // store.Selector
	IPv4Net                 // string
	IPv6Net                 // string
	Enum                    // string
	Flag                    // bool
	U8                      // uint8
	U16                     // uint16
	I32                     // int32
	IP                      // string
	IPNet                   // string
	Destination             // map[string]any
	Target                  // map[string]any
	AddressSource           // Allocation
	SubnetSource            // SubnetAllocation
	RuleTargets             // []any
	RuleFilters             // map[string]any
	Blocks                  // []Extent
	Record                  // map[string]any
	Records                 // []any
)

// UpdateRule determines what an update does with a field.
type UpdateRule int

// The rules for updates.
const (
	Fixed    UpdateRule = iota // no update has the field
	Kept                       // an update without the field leaves the value
	Cleared                    // an update without the field sets Default
	Required                   // every update must have the field
)

// Holder is a reason to refuse the deletion of a record: other objects, or the record's state.
type Holder struct {
	// Find reports whether the deletion is refused, and the name of the object that is the reason.
	Find func(*Change) (name string, found bool)
	// Text is the refusal, in which the name replaces %s.
	Text string
}

// holds returns a Holder that refuses to delete a record while it contains objects of table t.
func holds[T store.Record](t store.Table[T], text string) Holder {
	return Holder{func(c *Change) (name string, found bool) {
		first := t.Scan(c.Tx, c.old.ID, store.ByName, nil, 1)
		for _, object := range first {
			name = object.Ident().Name
		}
		return name, len(first) > 0
	}, text}
}

// Table returns the table with the kind's records.
func (k *Kind) Table() store.Table[store.Resource] { return store.Resources(k.Name, k.In) }

// Ancestors returns the parameters of the kinds that contain this one, beginning with the parent.
func (k *Kind) Ancestors() []string {
	params := []string{}
	for p := k.Parent; p != nil; p = p.Parent {
		params = append(params, p.Param)
	}
	return params
}

// ResourceInput has the fields of a request. Name and Description may be nil only in an update.
type ResourceInput struct {
	Name, Description *string
	// Values has all other fields of the request that are not null.
	Values map[string]any
	// id is the ID for the new record, if another record refers to it already; "" means a new ID.
	id string
}

func named(name, description string, values map[string]any) ResourceInput {
	return ResourceInput{Name: &name, Description: &description, Values: values}
}

// Change is a change of one record in a transaction. A refusal ends the transaction.
type Change struct {
	*Simulation
	*store.Tx
	kind   *Kind
	parent store.Resource
	old    store.Resource
	record store.Resource
	// cascade permits the deletion of a record with its dependents.
	cascade bool
	// If derive is set, the ID of a new record depends only on names, so all racks have the same IDs.
	derive bool
}

// Resources has the operations on the records of every kind.
type Resources struct{ *Simulation }

func (s Resources) find(call *Call, tx *store.Tx, k *Kind, sel store.Selector) store.Resource {
	if sel.ID != "" {
		for _, param := range k.Ancestors() {
			tx.Refuse(call.Named[param].Given(),
				invalidRequest("when providing %s should not be specified", k.Both))
		}
		return find(tx, k.Table(), "", sel)
	}
	owner := k.Owner
	if k.Parent != nil {
		above := call.Named[k.Parent.Param]
		tx.Refuse(!above.Given(), invalidRequest("%s should be specified", k.Neither))
		owner = s.find(call, tx, k.Parent, above).ID
	}
	return find(tx, k.Table(), owner, sel)
}

func (s Resources) lookup(call *Call, tx *store.Tx, k *Kind) store.Resource {
	sel := call.Named[k.Param]
	r := s.find(call, tx, k, sel)
	tx.Refuse(k.Fleet && !s.fleetAdmin(), notFound(k.Name, sel))
	if !k.Public {
		s.allow(call, tx, k.Name, sel)
	}
	call.Object = r.Identity
	return r
}

func (s Resources) parent(call *Call, tx *store.Tx, k *Kind) store.Resource {
	if k.Parent != nil {
		return s.lookup(call, tx, k.Parent)
	}
	tx.Refuse(k.Fleet && !s.fleetAdmin() || !s.collaborates() && !call.ReadOnly && !k.Public,
		ErrForbidden)
	return store.Resource{Identity: store.Identity{ID: k.Owner}}
}

// View returns a record.
func (s Resources) View(call *Call, tx *store.Tx) store.Resource {
	return call.Kind.shown(s.lookup(call, tx, call.Kind))
}

// List returns the records of a parent that are in the call's Window.
func (s Resources) List(call *Call, tx *store.Tx) []store.Resource {
	k := call.Kind
	items := scan(tx, call, k.Table(), s.parent(call, tx, k).ID)
	for n := range items {
		items[n] = k.shown(items[n])
	}
	return items
}

// Create creates a record in a parent. The body is a [ResourceInput].
func (s Resources) Create(call *Call, tx *store.Tx) store.Resource {
	c := &Change{Simulation: s.Simulation, Tx: tx}
	r := c.create(call.Kind, s.parent(call, tx, call.Kind), call.Body.(ResourceInput))
	call.Object = r.Identity
	return call.Kind.shown(r)
}

// create creates a record, and the records that Created adds. It checks the name last, because the
// rack finds a taken name only when it writes the record (A01).
func (c *Change) create(k *Kind, parent store.Resource, in ResourceInput) store.Resource {
	id := in.id
	switch {
	case id != "":
	case c.derive:
		id = store.DerivedID(k.Name, parent.ID, *in.Name)
	default:
		id = uuid.NewString()
	}
	n := &Change{Simulation: c.Simulation, Tx: c.Tx, kind: k, parent: parent, derive: c.derive,
		record: store.Resource{Identity: store.NewIdentity(id, *in.Name, *in.Description),
			Fields: map[string]any{}}}
	if k.In != "" {
		n.record.Fields[k.In] = parent.ID
	}
	for _, f := range k.Fields {
		n.set(f, in.Values)
	}
	n.Check(checkDescription(n.record.Description))
	n.Refuse(k.Table().Taken(n.Tx, parent.ID, n.record.Name), alreadyExists(k.Name, n.record.Name))
	n.put()
	if k.Created != nil {
		k.Created(n)
	}
	return n.record
}

func (c *Change) set(f Field, values map[string]any) {
	value, given := values[f.Name]
	if !given {
		value = f.Default
	}
	if f.Set != nil {
		f.Set(c, value)
	} else {
		c.record.Fields[f.Name] = value
	}
}

func (c *Change) put() { c.kind.Table().Put(c.Tx, c.record) }

func (s Resources) change(call *Call, tx *store.Tx, k *Kind) *Change {
	r := s.lookup(call, tx, k)
	c := &Change{Simulation: s.Simulation, Tx: tx, kind: k, old: r, record: r}
	c.record.Fields = map[string]any{}
	maps.Copy(c.record.Fields, r.Fields)
	if k.Parent != nil {
		c.parent = byID(tx, k.Parent.Table(), r.Text(k.In))
	}
	return c
}

// Update changes a record. The body is a [ResourceInput].
func (s Resources) Update(call *Call, tx *store.Tx) store.Resource {
	k, in := call.Kind, call.Body.(ResourceInput)
	c := s.change(call, tx, k)
	if k.Permit != nil {
		k.Permit(c, &in)
	}
	c.update(in)
	return k.shown(c.record)
}

// update writes the request's fields into the record. It answers a taken name with a 500, because
// the rack does not expect this error of its database (A01).
func (c *Change) update(in ResourceInput) {
	for _, f := range c.kind.Fields {
		if _, given := in.Values[f.Name]; f.Update != Fixed && (f.Update != Kept || given) {
			c.set(f, in.Values)
		}
	}
	if in.Description != nil {
		c.record.Description = *in.Description
	}
	if in.Name != nil {
		c.record.Name = *in.Name
	}
	c.Check(checkDescription(c.record.Description))
	t := c.kind.Table()
	c.Refuse(c.record.Name != c.old.Name && t.Taken(c.Tx, t.Parent(c.old), c.record.Name), errInternal)
	c.record.Touch()
	c.put()
	if c.kind.Updated != nil {
		c.kind.Updated(c)
	}
}

// Delete deletes a record and all records in it, unless a Holder refuses it.
func (s Resources) Delete(call *Call, tx *store.Tx) {
	k := call.Kind
	c := s.change(call, tx, k)
	c.cascade = call.Cascade
	if k.Permit != nil {
		k.Permit(c, nil)
	}
	for _, h := range k.Holders {
		name, found := h.Find(c)
		tx.Refuse(found, invalidRequest("%s", strings.ReplaceAll(h.Text, "%s", name)))
	}
	c.drop()
}

func (c *Change) drop() {
	for _, k := range Kinds {
		if k.Parent == c.kind {
			for child := range c.each(k, c.old.ID) {
				child.drop()
			}
		}
	}
	c.UnlinkAll(c.old.ID)
	c.kind.Table().Delete(c.Tx, c.old)
	if c.kind.Deleted != nil {
		c.kind.Deleted(c)
	}
}

// each yields a Change for every record of a kind in a parent.
func (c *Change) each(k *Kind, parent string) iter.Seq[*Change] {
	return func(yield func(*Change) bool) {
		for _, r := range within(c.Tx, k, parent) {
			if !yield(&Change{Simulation: c.Simulation, Tx: c.Tx, kind: k, old: r, record: r}) {
				return
			}
		}
	}
}

func within(tx *store.Tx, k *Kind, parent string) []store.Resource {
	const noLimit = 1 << 30
	return k.Table().Scan(tx, parent, store.ByName, nil, noLimit)
}

func group(policy string) Kind {
	param := strings.ReplaceAll(policy, "-", "_") + "_group"
	return Kind{
		Name: policy + "-group", Operation: param, Param: param, Parent: Project, In: "project_id",
		Both:    param + " as an ID, project",
		Neither: param + " should either be UUID or project",
		Fields: []Field{
			{Name: "policy", Type: Enum, Values: []string{"allow", "fail"}},
			{Name: "failure_domain", Type: Enum, Values: []string{"sled"}},
		},
	}
}

// Item is an object of the API without a record of its own: either a part of a record, such as a
// range of a pool, or an object that every rack has, such as the user.
type Item struct {
	ident  store.Identity
	fields map[string]any
}

func item(key string, fields map[string]any) Item {
	return Item{store.Identity{ID: key, Name: key}, fields}
}

// Ident returns the identity by which a list is sorted.
func (i Item) Ident() store.Identity { return i.ident }

// MarshalJSON writes the fields.
func (i Item) MarshalJSON() ([]byte, error) { return json.Marshal(i.fields) }

func memberOf(i store.Instance) Item {
	return Item{i.Identity, map[string]any{"type": "instance",
		"value": map[string]any{"id": i.ID, "name": i.Name, "run_state": i.RunState}}}
}

func linkedTo[T store.Record](tx *store.Tx, t store.Table[T], k *Kind, id string) (all []T) {
	for _, id := range tx.Linked(k.Name, id) {
		if record, ok := t.Get(tx, id); ok {
			all = append(all, record)
		}
	}
	return all
}

// Members lists the instances in a group.
func (s Resources) Members(call *Call, tx *store.Tx) (members []Item) {
	g := s.lookup(call, tx, call.Kind)
	for _, i := range linkedTo(tx, store.Instances, call.Kind, g.ID) {
		members = append(members, memberOf(i))
	}
	return members
}

func (s Resources) membership(call *Call, tx *store.Tx) (group store.Resource, i store.Instance,
	in bool) {
	group = s.lookup(call, tx, call.Kind)
	i = lookup(s.Simulation, call, tx, store.Instances)
	return group, i, slices.Contains(tx.Linked(call.Kind.Name, group.ID), i.ID)
}

func (s Resources) member(call *Call, tx *store.Tx) (group store.Resource, i store.Instance) {
	group, i, in := s.membership(call, tx)
	tx.Refuse(!in, notFound(call.Kind.Name+"-member", store.Selector{ID: i.ID}))
	return group, i
}

// Member returns an instance in a group.
func (s Resources) Member(call *Call, tx *store.Tx) Item {
	_, i := s.member(call, tx)
	return memberOf(i)
}

const (
	maxMembers = 32
	maxGroups  = 16
)

// AddMember adds an instance to a group. It refuses an instance with a VMM.
func (s Resources) AddMember(call *Call, tx *store.Tx) Item {
	k := call.Kind
	policy := strings.TrimSuffix(k.Name, "-group")
	group, i, in := s.membership(call, tx)
	tx.Refuse(len(tx.Linked(k.Name, group.ID)) >= maxMembers, invalidRequest("%s group already has "+
		"maximum allowed members (%d)", strings.ToUpper(policy[:1])+policy[1:], maxMembers))
	tx.Refuse(len(tx.Linked(k.Name, i.ID)) >= maxGroups,
		invalidRequest("Instance already belongs to maximum allowed %s groups (%d)", policy, maxGroups))
	tx.Refuse(i.Active(),
		invalidRequest("Instance cannot be added to %s group with reservation", policy))
	tx.Refuse(in, alreadyExists(k.Name+"-member", i.ID))
	tx.Link(k.Name, i.ID, group.ID)
	i.RunState = store.RunStopped
	return memberOf(i)
}

// RemoveMember removes an instance from a group.
func (s Resources) RemoveMember(call *Call, tx *store.Tx) {
	group, i := s.member(call, tx)
	tx.Unlink(call.Kind.Name, i.ID, group.ID)
}

// OfInstance lists the records of a kind, groups or SSH keys, that are linked to an instance.
func (s Resources) OfInstance(call *Call, tx *store.Tx) []store.Resource {
	id := lookup(s.Simulation, call, tx, store.Instances).ID
	return linkedTo(tx, call.Kind.Table(), call.Kind, id)
}
