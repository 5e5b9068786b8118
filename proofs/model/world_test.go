//go:build linux

package model

import (
	"fmt"
	"maps"
	"slices"
)

// The objects of the world: volumes v1…, snapshots s1…, and nodes a, b, c, each with two pods
// that may use a volume.
type volumeKind struct {
	// fsType is the filesystem, "" for a raw block volume.
	fsType string
	// shared allows both pods of a node to use the volume (SINGLE_NODE_MULTI_WRITER).
	shared bool
	// snap is the number of the snapshot from which the volume is restored, or 0 for a blank
	// volume.
	snap int
}

func (k volumeKind) block() bool { return k.fsType == "" }

// bytes returns the size of the volume. A filesystem is restored to a larger disk.
func (k volumeKind) bytes() int64 {
	if k.snap != 0 && !k.block() {
		return 2 * gib
	}
	return gib
}

// kinds contains the kinds of volumes by number. snapOf contains the volume of each snapshot.
// Both begin with number 1.
var (
	kinds = []volumeKind{{},
		{fsType: "ext4", shared: true}, {fsType: "xfs"}, {fsType: "btrfs"}, {shared: true},
		{fsType: "ext4", snap: 1}, {snap: 2}, {fsType: "xfs", snap: 3}, {fsType: "btrfs", snap: 4},
	}
	snapOf = []int{0, 1, 4, 2, 3}
	nodes  = []string{"a", "b", "c"}
	pods   = []int{1, 2}
)

// field is one fact of the world. Its value is "" if the fact is not so:
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
	// anyID is a placeholder for an ID that the rack chooses.
	anyID = "*"
)

// facts contains the values of fields, as they are in the model or as they were observed.
type facts map[field]string

func (f facts) published(v int, n string) bool {
	return slices.ContainsFunc(pods, func(p int) bool { return f[publishedField(v, n, p)] != "" })
}

// mounted reports whether the volume has a mount on the node.
func (f facts) mounted(v int, n string) bool {
	return f[stagedField(v, n)] != "" || f.published(v, n)
}

// assign is the value that a field gets from the effect of a call.
type assign struct {
	field field
	value string
}

// intends returns the changes that a call makes if nothing prevents it. A value that the rack
// chooses is anyID.
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

// effects returns the changes that a call may make in this state. It returns nil if the call
// has nothing to change.
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

// then returns the state after the effect of the call.
func (s step) then(f facts) facts {
	next := maps.Clone(f)
	for _, a := range s.effects(f) {
		next[a.field] = a.value
	}
	return next
}

// world is the model. For each field it has the value that was observed last, and the values
// that it may have got since from calls whose end was not observed.
type world struct {
	seen facts
	// doubts are the effects that abandoned calls may still have.
	doubts []assign
	// lost contains, by "v1 a", the volumes that a node had mounted when the disk was taken away
	// from it. The mounts are dead and have to be unmounted.
	lost map[string]bool
	// half contains those of the lost volumes for which the rack died while it took the disk away.
	// The guest does not see the disk any more, but the mounts may still work.
	half map[string]bool
	// frozen contains the volumes whose filesystem a pod froze and that were not certainly thawed.
	// held contains the volumes whose device is kept open. The keys are like "v1 a".
	frozen, held map[string]bool
	// namesakes contains, by "v1 a", the volumes whose device has the same serial as another
	// device of the node's instance. The guest shows one of the two (A54). shown contains those
	// for which it shows the other one.
	namesakes, shown map[string]bool
	// bare contains, by "v1 a", the volumes that are attached to a node without a device.
	// recordsFirst reports whether an attach may end like that.
	bare         map[string]bool
	recordsFirst bool
	// slow contains the volumes whose device may appear late on their node.
	slow map[string]bool
	// down contains the instances that are stopped.
	down map[string]bool
	// rackDown reports whether the rack's API does not answer. The disks still work then.
	rackDown bool
	// faults contains the fault rules that may still apply.
	faults []string
	// open contains the volumes and snapshots of which the last call was not answered by the rack.
	// Until that change is old enough, others are answered EffectUnknown.
	open map[string]bool
}

// target is the key of open.
func (s step) target() string { return fmt.Sprintf("v%d s%d", s.vol, s.snap) }

func newWorld() *world {
	return &world{seen: facts{}, lost: map[string]bool{}, half: map[string]bool{},
		slow: map[string]bool{}, frozen: map[string]bool{}, held: map[string]bool{},
		down: map[string]bool{}, bare: map[string]bool{}, namesakes: map[string]bool{},
		shown: map[string]bool{}, open: map[string]bool{}}
}

func at(v int, n string) string { return fmt.Sprintf("v%d %s", v, n) }

// doubtful reports whether a fact about the call's volume or snapshot may still change because
// of an abandoned call.
func (w *world) doubtful(s step) bool {
	return slices.ContainsFunc(w.doubts, func(d assign) bool { return about(d.field, s) })
}

// about reports whether a call depends on a field: of its volume, its snapshot, or its source.
func about(f field, s step) bool {
	var kind byte
	var number int
	if _, err := fmt.Sscanf(string(f), "%c%d", &kind, &number); err != nil {
		panic(err) // every field begins in this way
	}
	if kind == 's' {
		return number == s.snap || s.op == createVolume && number == kinds[s.vol].snap
	}
	return number == s.vol || s.op == createSnapshot && number == snapOf[s.snap]
}

// outcome is how a call ended.
type outcome int

const (
	// succeeded: the call answered OK, so it has its effect.
	succeeded outcome = iota
	// refusedCall: the call answered an error and changed nothing.
	refusedCall
	// unclear: the call answered an error after a fault. It may have its effect or not.
	unclear
	// openCall: the caller did not wait for the answer. The effect may happen at any time, or
	// never.
	openCall
)

// ended is a call that has ended, with the effects that were possible in the state before it.
type ended struct {
	step
	how     outcome
	effects []assign
}

// allowed returns the values that a field may have after the calls, which ran at the same
// time.
func (w *world) allowed(f field, calls []ended) []string {
	before := w.seen[f]
	var sure, perhaps []string
	for _, c := range calls {
		if c.op == stage && f == stagedField(c.vol, c.node) && w.lost[at(c.vol, c.node)] {
			perhaps = append(perhaps, "") // a dead mount goes before what else may refuse the call
		}
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

// isAllowed reports whether a value is allowed. A disk that does not exist has no holder.
func isAllowed(value string, allowed []string) bool {
	return slices.Contains(allowed, value) || value != "" && slices.Contains(allowed, anyID)
}
