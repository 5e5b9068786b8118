package engine

import (
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// group returns the kind of the groups with a policy of that name.
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

// Member is an instance in a group.
type Member struct {
	Type  string      `json:"type"`
	Value MemberValue `json:"value"`
}

// MemberValue describes the instance.
type MemberValue struct {
	ID       string `json:"id"`
	Name     string `json:"name"`
	RunState string `json:"run_state"`
}

// Ident returns the identity by which the pages of a list are ordered.
func (m Member) Ident() store.Identity {
	return store.Identity{ID: m.Value.ID, Name: m.Value.Name}
}

func memberOf(i store.Instance) Member {
	return Member{"instance", MemberValue{i.ID, i.Name, i.RunState}}
}

// linkedTo returns the records of a table that a link of a kind connects with an object.
func linkedTo[T any](tx *store.Tx, t store.Table[T], k *Kind, id string) (all []T) {
	for _, id := range tx.Linked(k.Name, id) {
		if record, ok := t.Get(tx, id); ok {
			all = append(all, record)
		}
	}
	return all
}

// Members lists the instances in a group.
func (s Resources) Members(call *Call, k *Kind, scope Scope, sel store.Selector) ([]Member, error) {
	return reading(s.Simulation, func(tx *store.Tx) (members []Member) {
		g := s.lookup(call, tx, k, scope, sel)
		for _, i := range linkedTo(tx, store.Instances, k, g.ID) {
			members = append(members, memberOf(i))
		}
		return members
	})
}

// membership finds a group and an instance that may be in it.
func (s Resources) membership(call *Call, tx *store.Tx, k *Kind, scope Scope, sel store.Selector,
	instance Ref) (group store.Resource, i store.Instance, in bool) {
	group = s.lookup(call, tx, k, scope, sel)
	i = lookup(s.Simulation, call, tx, store.Instances, instance)
	return group, i, slices.Contains(tx.Linked(k.Name, group.ID), i.ID)
}

// member finds a group and an instance that is in it.
func (s Resources) member(call *Call, tx *store.Tx, k *Kind, scope Scope, sel store.Selector,
	instance Ref) (group store.Resource, i store.Instance) {
	group, i, in := s.membership(call, tx, k, scope, sel, instance)
	if !in {
		tx.Check(notFound(k.Name+"-member", store.Selector{ID: i.ID}))
	}
	return group, i
}

// Member reads an instance in a group.
func (s Resources) Member(call *Call, k *Kind, scope Scope, sel store.Selector, instance Ref) (
	Member, error) {
	return reading(s.Simulation, func(tx *store.Tx) Member {
		_, i := s.member(call, tx, k, scope, sel, instance)
		return memberOf(i)
	})
}

// These are the rack's limits of groups.
const (
	maxMembers = 32
	maxGroups  = 16
)

// AddMember adds a stopped instance to a group. The answer shows it as stopped.
func (s Resources) AddMember(call *Call, k *Kind, scope Scope, sel store.Selector, instance Ref) (
	Member, error) {
	policy := strings.TrimSuffix(k.Name, "-group")
	return changing(s.Simulation, call, func(tx *store.Tx) Member {
		group, i, in := s.membership(call, tx, k, scope, sel, instance)
		switch {
		case len(tx.Linked(k.Name, group.ID)) >= maxMembers:
			tx.Check(invalidRequest("%s group already has maximum allowed members (%d)",
				strings.ToUpper(policy[:1])+policy[1:], maxMembers))
		case len(tx.Linked(k.Name, i.ID)) >= maxGroups:
			tx.Check(invalidRequest("Instance already belongs to maximum allowed %s groups (%d)",
				policy, maxGroups))
		case i.Active():
			tx.Check(invalidRequest("Instance cannot be added to %s group with reservation", policy))
		case in:
			tx.Check(alreadyExists(k.Name+"-member", i.ID))
		}
		tx.Link(k.Name, i.ID, group.ID)
		i.RunState = store.RunStopped
		return memberOf(i)
	})
}

// RemoveMember removes an instance from a group.
func (s Resources) RemoveMember(call *Call, k *Kind, scope Scope, sel store.Selector,
	instance Ref) error {
	return s.store.Update(func(tx *store.Tx) {
		group, i := s.member(call, tx, k, scope, sel, instance)
		tx.Unlink(k.Name, i.ID, group.ID)
		failHalfway(call, tx)
	})
}

// OfInstance lists the records of a kind that are linked to an instance: its groups, or its SSH
// keys.
func (s Resources) OfInstance(call *Call, k *Kind, instance Ref) ([]store.Resource, error) {
	return ofInstance(s.Simulation, call, instance, func(tx *store.Tx,
		i store.Instance) []store.Resource {
		return linkedTo(tx, k.Table(), k, i.ID)
	})
}
