//go:build linux

package model

import (
	"fmt"
	"maps"
	"slices"
)

// What there is: volumes v1…, snapshots s1…, nodes a, b, c, each with two pods that may use a
// volume.
type volumeKind struct {
	// fsType is the filesystem, "" for a raw block volume.
	fsType string
	// shared lets both pods of a node have it (SINGLE_NODE_MULTI_WRITER).
	shared bool
	// snap is the number of the snapshot that it is restored from, 0 for a blank one.
	snap int
}

func (k volumeKind) block() bool { return k.fsType == "" }

// kinds are the volumes' by number, snapOf the volume of each snapshot; both begin with 1.
var (
	kinds = []volumeKind{{},
		{fsType: "ext4", shared: true}, {fsType: "xfs"}, {fsType: "btrfs"}, {shared: true},
		{fsType: "ext4", snap: 1}, {snap: 2}, {fsType: "xfs", snap: 3},
	}
	snapOf = []int{0, 1, 4, 2}
	nodes  = []string{"a", "b", "c"}
	pods   = []int{1, 2}
)

// field is one fact of the world, and its value is "" for no:
//
//	v1 disk             the ID of the volume's disk
//	v1 source           the ID of the snapshot that the disk was made from
//	v1 holder           the node whose instance has the disk
//	v1 staged a         yes: something is mounted at the staging path
//	v1 published a/1    yes: something is mounted at the pod's path
//	s1 id, s1 source    the snapshot's ID, and the disk it was taken of
type field string

func diskField(v int) field             { return field(fmt.Sprintf("v%d disk", v)) }
func sourceField(v int) field           { return field(fmt.Sprintf("v%d source", v)) }
func holderField(v int) field           { return field(fmt.Sprintf("v%d holder", v)) }
func stagedField(v int, n string) field { return field(fmt.Sprintf("v%d staged %s", v, n)) }
func publishedField(v int, n string, p int) field {
	return field(fmt.Sprintf("v%d published %s/%d", v, n, p))
}
func snapField(s int) field       { return field(fmt.Sprintf("s%d id", s)) }
func snapSourceField(s int) field { return field(fmt.Sprintf("s%d source", s)) }

const (
	yes = "yes"
	// any stands for an ID that the rack chooses.
	anyID = "*"
)

// facts are what is so, or what somebody saw.
type facts map[field]string

func (f facts) published(v int, n string) bool {
	return slices.ContainsFunc(pods, func(p int) bool { return f[publishedField(v, n, p)] != "" })
}

// mounted reports whether anything of the volume is mounted on the node.
func (f facts) mounted(v int, n string) bool {
	return f[stagedField(v, n)] != "" || f.published(v, n)
}

// assign is what a call makes of a field when it has its effect.
type assign struct {
	field field
	value string
}

// intends are what a call makes of the world if nothing speaks against it. What the rack chooses
// is anyID.
func (s step) intends() []assign {
	v, n := s.vol, s.node
	switch s.op {
	case createVolume:
		return []assign{{diskField(v), anyID}, {sourceField(v), s.source}}
	case deleteVolume:
		return []assign{{diskField(v), ""}, {sourceField(v), ""}}
	case attach:
		return []assign{{holderField(v), n}}
	case detach, detachAll:
		return []assign{{holderField(v), ""}}
	case stage:
		if !kinds[v].block() {
			return []assign{{stagedField(v, n), yes}}
		}
	case unstage:
		return []assign{{stagedField(v, n), ""}}
	case publish:
		return []assign{{publishedField(v, n, s.pod), yes}}
	case unpublish:
		return []assign{{publishedField(v, n, s.pod), ""}}
	case createSnapshot:
		return []assign{{snapField(s.snap), anyID}, {snapSourceField(s.snap), s.source}}
	case deleteSnapshot:
		return []assign{{snapField(s.snap), ""}, {snapSourceField(s.snap), ""}}
	}
	return nil
}

// effects are what a call may change in this state; nil when there is nothing for it to change.
func (s step) effects(f facts) []assign {
	disk, holder := f[diskField(s.vol)], f[holderField(s.vol)]
	mine := disk != "" && (disk == s.id || disk == anyID)
	var possible bool
	switch s.op {
	case createVolume:
		possible = disk == ""
	case deleteVolume, attach:
		possible = mine && holder == ""
	case detach:
		possible = mine && holder == s.node
	case detachAll:
		possible = mine && holder != ""
	case createSnapshot:
		possible = f[snapField(s.snap)] == ""
	case deleteSnapshot:
		possible = f[snapField(s.snap)] == s.id
	default:
		possible = true
	}
	if !possible {
		return nil
	}
	return s.intends()
}

// then is the state that follows when the call has its effect.
func (s step) then(f facts) facts {
	next := maps.Clone(f)
	for _, a := range s.effects(f) {
		next[a.field] = a.value
	}
	return next
}

// world is the model of what is so: for each field what was seen last, and what it may have become
// meanwhile, by calls whose end nobody has seen.
type world struct {
	seen facts
	// doubts are the effects that calls which were given up may still have.
	doubts []assign
	// lost are the volumes that a node had mounted when the disk was taken away from it: what is
	// mounted there is dead, and waits to be taken down. By "v1 a".
	lost map[string]bool
	// half are those of them of which the rack died while it took the disk away: the guest does not
	// see it any more, but what is mounted may live.
	half map[string]bool
	// frozen are the volumes whose filesystem a pod froze, and nobody thawed for certain; held those
	// whose device is kept open. By "v1 a".
	frozen, held map[string]bool
	// namesakes are the volumes whose device has the serial of another one that the node's instance
	// has. The guest shows one of the two (A54); shown are those for which it is the other one. By
	// "v1 a".
	namesakes, shown map[string]bool
	// slow are the volumes whose device may show late on their node.
	slow map[string]bool
	// down are the instances that are stopped.
	down map[string]bool
	// rackDown reports whether the rack's API is away, though the disks are not.
	rackDown bool
	// faults are the rules that may still apply.
	faults []string
}

func newWorld() *world {
	return &world{seen: facts{}, lost: map[string]bool{}, half: map[string]bool{},
		slow: map[string]bool{}, frozen: map[string]bool{}, held: map[string]bool{},
		down: map[string]bool{}, namesakes: map[string]bool{}, shown: map[string]bool{}}
}

func at(v int, n string) string { return fmt.Sprintf("v%d %s", v, n) }

// doubtful reports whether anything of the volume or snapshot that the call is about may change by
// itself.
func (w *world) doubtful(s step) bool {
	return slices.ContainsFunc(w.doubts, func(d assign) bool { return about(d.field, s) })
}

// about reports whether a call depends on a field: its volume's, its snapshot's, or its source's.
// And while a snapshot is taken, the simulator holds the volume's filesystem open on its node.
func about(f field, s step) bool {
	var kind byte
	var number int
	if _, err := fmt.Sscanf(string(f), "%c%d", &kind, &number); err != nil {
		panic(err) // all fields begin so
	}
	if kind == 's' {
		return number == s.snap || s.op == createVolume && number == kinds[s.vol].snap ||
			s.op.onNode() && snapOf[number] == s.vol
	}
	return number == s.vol || s.op == createSnapshot && number == snapOf[s.snap]
}

// outcome is how a call ended.
type outcome int

const (
	// succeeded: it answered OK, so the effect is there.
	succeeded outcome = iota
	// refused: it answered an error, and nothing has changed.
	refusedCall
	// unclear: it answered an error after a fault; the effect may be there or not.
	unclear
	// openCall: nobody waited for the answer. The effect may be there now, later, or never.
	openCall
)

// ended is a call that has ended, with what it could do in the state before.
type ended struct {
	step
	how     outcome
	effects []assign
}

// allowed are the values that a field may have after the calls, which ran at the same time.
func (w *world) allowed(f field, calls []ended) []string {
	before := w.seen[f]
	var sure, perhaps []string
	for _, c := range calls {
		for _, e := range c.effects {
			switch {
			case e.field != f:
			case c.how == succeeded:
				sure = append(sure, e.value)
			case c.how != refusedCall:
				perhaps = append(perhaps, e.value)
			}
		}
	}
	for _, d := range w.doubts {
		if d.field == f {
			perhaps = append(perhaps, d.value)
		}
	}
	if len(sure) > 0 {
		return append(sure, perhaps...)
	}
	return append([]string{before}, perhaps...)
}

// isAllowed reports whether a value is among the allowed ones. A disk that is gone has no holder.
func isAllowed(value string, allowed []string) bool {
	return slices.Contains(allowed, value) || value != "" && slices.Contains(allowed, anyID)
}
