//go:build linux

package model

import (
	"fmt"
	"maps"
	"slices"
	"time"
)

// volumeKind describes a volume of the model. There are the volumes v1…, the snapshots s1…, and the
// nodes a, b and c, each with two pods.
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

// field names a fact. Its value is "" if the object does not exist, or is not in that state:
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

// facts contains the values of fields, in the model or as they were observed.
type facts map[field]string

func (f facts) published(v int, n string) bool {
	return slices.ContainsFunc(pods, func(p int) bool { return f[publishedField(v, n, p)] != "" })
}

// mounted reports whether the volume has a mount on the node.
func (f facts) mounted(v int, n string) bool {
	return f[stagedField(v, n)] != "" || f.published(v, n)
}

// assign is a change of a field by a call.
type assign struct {
	field field
	value string
}

// intends returns the changes of a call that succeeds. A value that the rack chooses is anyID.
func (s Step) intends() []assign {
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

// effects returns the changes that a call may make in this state.
func (s Step) effects(f facts) []assign {
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
func (s Step) then(f facts) facts {
	next := maps.Clone(f)
	for _, a := range s.effects(f) {
		next[a.field] = a.value
	}
	return next
}

// world is the state of the model: the facts that were observed last, the changes that abandoned
// calls may still make, and what the facts do not show.
type world struct {
	seen facts
	// doubts are the effects that abandoned calls may still have.
	doubts []assign
	// The keys of these maps are volume and node, such as "v1 a".

	// lost contains the volumes that were detached from a node that had them mounted. The mounts do
	// not work any more.
	lost map[string]bool
	// half contains the lost volumes whose detach the rack may not have finished. The guest does not
	// show the disk, but the mounts may still work.
	half map[string]bool
	// frozen contains the volumes whose filesystem was frozen, and may still be. held contains the
	// volumes whose device is kept open.
	frozen, held map[string]bool
	// namesakes contains the volumes whose disk has the same serial as another disk of the instance.
	// The guest shows one of the two devices (A54); shown contains the volumes for which it shows the
	// other disk's.
	namesakes, shown map[string]bool
	// bare contains the volumes that are attached without a device. recordsFirst is set if an attach
	// may end in this way.
	bare         map[string]bool
	recordsFirst bool
	// slow contains the volumes whose device may appear late.
	slow map[string]bool

	// down contains the instances that are stopped.
	down map[string]bool
	// rackDown is set while the rack's API does not answer. Its disks still work.
	rackDown bool
	// faults contains the fault rules that may still apply.
	faults []string
	// open contains the volumes and snapshots of which a call was answered UNAVAILABLE, with the time
	// until which a controller may not know the effect, and answers EffectUnknown to further calls.
	open map[string]time.Time
}

// lateLimit is the driver's time for a change that the rack has not answered.
const lateLimit = time.Minute

// target is the key of open.
func (s Step) target() string {
	if s.op == createSnapshot || s.op == deleteSnapshot {
		return fmt.Sprintf("s%d", s.snap)
	}
	return fmt.Sprintf("v%d", s.vol)
}

func newWorld() *world {
	return &world{seen: facts{}, lost: map[string]bool{}, half: map[string]bool{},
		slow: map[string]bool{}, frozen: map[string]bool{}, held: map[string]bool{},
		down: map[string]bool{}, bare: map[string]bool{}, namesakes: map[string]bool{},
		shown: map[string]bool{}, open: map[string]time.Time{}}
}

func at(v int, n string) string { return fmt.Sprintf("v%d %s", v, n) }

// doubtful reports whether an abandoned call may still change a fact on which the call depends.
func (w *world) doubtful(s Step) bool {
	return slices.ContainsFunc(w.doubts, func(d assign) bool { return about(d.field, s) })
}

// about reports whether a call depends on a field: one of its volume, its snapshot or its source.
func about(f field, s Step) bool {
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

// outcome is what the orchestrator knows about the effect of a call.
type outcome int

const (
	// succeeded: the call answered OK, so it has its effect.
	succeeded outcome = iota
	// refusedCall: the call answered an error and changed nothing.
	refusedCall
	// unclear: the call answered an error after a fault. It may have had its effect.
	unclear
	// openCall: the call was abandoned. It may have its effect at any time, or never.
	openCall
)

// ended is a call that has ended, with the effects that were possible in the state before it.
type ended struct {
	Step
	how     outcome
	effects []assign
}

// allowed returns the values that a field may have after calls that ran at the same time.
func (w *world) allowed(f field, calls []ended) []string {
	before := w.seen[f]
	var sure, perhaps []string
	for _, c := range calls {
		if key := at(c.vol, c.node); f == stagedField(c.vol, c.node) &&
			(c.op == stage && w.lost[key] || c.op == unstage && w.held[key]) {
			perhaps = append(perhaps, "") // the driver unmounts, and then it may refuse
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
