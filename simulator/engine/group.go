package engine

import (
	"errors"
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

// Members lists the instances in a group.
func (s Resources) Members(call *Call, k *Kind, scope Scope, sel store.Selector) ([]Member, error) {
	return reading(s.Simulation, func(tx *store.Tx) (members []Member, err error) {
		g, err := s.lookup(call, tx, k, scope, sel)
		if err != nil {
			return nil, err
		}
		for _, id := range tx.Linked(k.Name, g.ID) {
			i, ok, err := store.Instances.Get(tx, id)
			if err != nil {
				return nil, err
			}
			if ok {
				members = append(members, memberOf(i))
			}
		}
		return members, nil
	})
}

// membership finds a group and an instance that may be in it.
func (s Resources) membership(call *Call, tx *store.Tx, k *Kind, scope Scope, sel store.Selector,
	instance Ref) (group store.Resource, i store.Instance, in bool, err error) {
	group, err = s.lookup(call, tx, k, scope, sel)
	if err == nil {
		i, err = lookup(s.Simulation, call, tx, store.Instances, instance)
	}
	for _, id := range tx.Linked(k.Name, group.ID) {
		in = in || id == i.ID
	}
	return group, i, in, err
}

// Member reads an instance in a group.
func (s Resources) Member(call *Call, k *Kind, scope Scope, sel store.Selector, instance Ref) (
	Member, error) {
	return reading(s.Simulation, func(tx *store.Tx) (Member, error) {
		_, i, in, err := s.membership(call, tx, k, scope, sel, instance)
		if err == nil && !in {
			err = notFound(k.Name+"-member", store.Selector{ID: i.ID})
		}
		return memberOf(i), err
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
	return changing(s.Simulation, call, func(tx *store.Tx) (m Member, err error) {
		group, i, in, err := s.membership(call, tx, k, scope, sel, instance)
		switch {
		case err != nil:
			return m, err
		case len(tx.Linked(k.Name, group.ID)) >= maxMembers:
			return m, invalidRequest("%s group already has maximum allowed members (%d)",
				strings.ToUpper(policy[:1])+policy[1:], maxMembers)
		case len(tx.Linked(k.Name, i.ID)) >= maxGroups:
			return m, invalidRequest("Instance already belongs to maximum allowed %s groups (%d)",
				policy, maxGroups)
		case i.Active():
			return m, invalidRequest("Instance cannot be added to %s group with reservation", policy)
		case in:
			return m, alreadyExists(k.Name+"-member", i.ID)
		}
		m = memberOf(i)
		m.Value.RunState = store.RunStopped
		return m, tx.Link(k.Name, i.ID, group.ID)
	})
}

// RemoveMember removes an instance from a group.
func (s Resources) RemoveMember(call *Call, k *Kind, scope Scope, sel store.Selector,
	instance Ref) error {
	return s.store.Update(func(tx *store.Tx) error {
		group, i, in, err := s.membership(call, tx, k, scope, sel, instance)
		if err == nil && !in {
			err = notFound(k.Name+"-member", store.Selector{ID: i.ID})
		}
		if err != nil {
			return err
		}
		_, err = tx.Unlink(k.Name, i.ID, group.ID)
		return errors.Join(err, failHalfway(call))
	})
}

// OfInstance lists the records of a kind that are linked to an instance: its groups, or its SSH
// keys.
func (s Resources) OfInstance(call *Call, k *Kind, instance Ref) ([]store.Resource, error) {
	return ofInstance(s.Simulation, call, instance, func(tx *store.Tx, i store.Instance) (
		items []store.Resource, err error) {
		for _, id := range tx.Linked(k.Name, i.ID) {
			r, ok, err := k.Table().Get(tx, id)
			if err != nil {
				return nil, err
			}
			if ok {
				items = append(items, r)
			}
		}
		return items, nil
	})
}
