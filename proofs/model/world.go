//go:build linux

package model

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// volumeKind describes a volume of the model. The model has the volumes v1…, the snapshots s1…, and
// the nodes a, b and c with two pods each.
type volumeKind struct {
	// fsType is the filesystem, or "" for a raw block volume.
	fsType string
	// shared allows both pods of a node to use the volume (SINGLE_NODE_MULTI_WRITER).
	shared bool
	// snap is the number of the snapshot from which the volume is restored, or 0.
	snap int
}

func (k volumeKind) block() bool { return k.fsType == "" }

// bytes returns the volume's size. A filesystem restored from a snapshot gets a larger disk.
func (k volumeKind) bytes() int64 {
	if k.snap != 0 && !k.block() {
		return 2 * gib
	}
	return gib
}

// A volume's number is its index in kinds. A snapshot's number is its index in snapOf, which
// contains the number of the snapshot's volume. Both numbers begin with 1.
var (
	kinds = []volumeKind{{},
		{fsType: "ext4", shared: true}, {fsType: "xfs"}, {fsType: "btrfs"}, {shared: true},
		{fsType: "ext4", snap: 1}, {snap: 2}, {fsType: "xfs", snap: 3}, {fsType: "btrfs", snap: 4},
	}
	snapOf = []int{0, 1, 4, 2, 3}
	nodes  = []string{"a", "b", "c"}
	pods   = []int{1, 2}
)

// field names a fact. The value of a fact is "" if there is no such ID, node or mount:
//
//	v1 disk             the ID of the volume's disk
//	v1 source           the ID of the snapshot that the disk was made from
//	v1 holder           the node to whose instance the disk is attached
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

// facts contains the values that the model expects or that the test has observed.
type facts map[field]string

func (f facts) published(v int, n string) bool {
	return slices.ContainsFunc(pods, func(p int) bool { return f[publishedField(v, n, p)] != "" })
}

func (f facts) mounted(v int, n string) bool {
	return f[stagedField(v, n)] != "" || f.published(v, n)
}

// assign is one effect of a call: the field gets the value.
type assign struct {
	field field
	value string
}

// intends returns the changes of a call that succeeds.
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

// effects returns the changes that the call may make in the state f.
func (s Step) effects(f facts) []assign {
	disk, holder := f[diskField(s.vol)], f[holderField(s.vol)]
	mine := disk != "" && (disk == s.id || disk == anyID)
	possible := true
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
	}
	if !possible {
		return nil
	}
	return s.intends()
}

func (s Step) then(f facts) facts {
	next := maps.Clone(f)
	for _, a := range s.effects(f) {
		next[a.field] = a.value
	}
	return next
}

// world is the state of the model: the facts that were observed last, the content of the volumes,
// and everything else on which the answers to calls depend.
type world struct {
	seen facts
	// doubts contains the changes of unfinished calls. Each has perhaps happened, or may still happen.
	doubts []assign
	// places maps keys such as "v1 a" (volume and node) to the part of the state that seen lacks.
	places map[string]*place
	// contents maps the number of a volume, and snapshots the ID of a snapshot, to the expected
	// content. value is the last value that a pod wrote.
	contents  map[int]*content
	snapshots map[string]*content
	value     uint64
	// serials contains the serial of each volume's device, which is the name of its disk.
	serials map[int]string
	// recordsFirst is set if the rack may record an attach although the instance gets no device.
	recordsFirst bool

	down map[string]bool
	// rackDown is set while the rack's API does not answer. Its disks still work.
	rackDown bool
	// faults contains the names of the faults that may still apply.
	faults []string
	// open maps the target of each call that was answered UNAVAILABLE to a time. Until this time, the
	// controller may answer EffectUnknown, because it perhaps does not know the call's effect.
	open map[string]time.Time
}

// lateLimit is how long the driver waits for the effect of a change that the rack has not answered.
const lateLimit = time.Minute

// target returns the step's key in world.open.
func (s Step) target() string {
	if s.op == createSnapshot || s.op == deleteSnapshot {
		return fmt.Sprintf("s%d", s.snap)
	}
	return fmt.Sprintf("v%d", s.vol)
}

// place is the state of a volume on a node.
type place struct {
	// lost is set if the volume was detached while it was mounted on the node. Then the mounts no
	// longer work. half is also set until the rack has certainly finished this detach. Until then,
	// the mounts perhaps still work, although the guest does not show the disk.
	lost, half bool
	// frozen is set from a freeze until a thaw, an unmount, a new mount or the instance's stop.
	frozen bool
	// open is the file or loop device that keeps the volume's device open, or nil.
	open io.Closer
	// namesake is set if another disk of the instance has the same serial as the volume's disk. The
	// guest shows a device for only one of the disks (A54). shown is set if that is the other disk.
	namesake, shown bool
	// bare is set if the volume is attached without a device. slow is set if its device may be late.
	bare, slow bool
	// staged is set if the last stage answered OK. tried is set if a stage was sent and not undone.
	staged, tried bool
	// context is the publish context in the answer to the last attach.
	context map[string]string
}

func newWorld() *world {
	w := &world{seen: facts{}, places: map[string]*place{}, contents: map[int]*content{},
		snapshots: map[string]*content{}, serials: map[int]string{}, down: map[string]bool{},
		open: map[string]time.Time{}}
	for v, n := range everywhere {
		w.places[at(v, n)] = &place{}
	}
	return w
}

func at(v int, n string) string { return fmt.Sprintf("v%d %s", v, n) }

// at returns the state of a volume on a node, which is empty for an unknown volume or node.
func (w *world) at(v int, n string) *place {
	if p := w.places[at(v, n)]; p != nil {
		return p
	}
	return &place{}
}

func (w *world) place(s Step) *place { return w.at(s.vol, s.node) }

func everywhere(yield func(v int, n string) bool) {
	for v := 1; v < len(kinds); v++ {
		for _, n := range nodes {
			if !yield(v, n) {
				return
			}
		}
	}
}

// about reports whether the field belongs to a volume or snapshot that the step names or copies.
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

type ended struct {
	Step
	how     outcome
	effects []assign
}

// allowed returns the values that a field may have after calls that ran at the same time.
func (w *world) allowed(f field, calls []ended) []string {
	var sure, perhaps []string
	for _, c := range calls {
		if here := w.at(c.vol, c.node); f == stagedField(c.vol, c.node) &&
			(c.op == stage && here.lost || c.op == unstage && here.open != nil) {
			perhaps = append(perhaps, "") // the driver may unmount the volume, and then refuse
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
	return append([]string{w.seen[f]}, perhaps...)
}

// isAllowed reports whether the list allows the value. A list with anyID allows all except "".
func isAllowed(value string, allowed []string) bool {
	return slices.Contains(allowed, value) || value != "" && slices.Contains(allowed, anyID)
}

// faultCodes maps a kind of fault to the code that the driver may answer if a request to the rack
// has such a fault. Other kinds of faults do not change the driver's answer.
var faultCodes = map[string]codes.Code{
	"503": codes.Unavailable, "429": codes.Unavailable, "cut": codes.Unavailable,
	"500": codes.Unavailable, "403": codes.PermissionDenied,
}

// codes returns the codes that the model allows for a call in the state f. They follow CSI's tables
// of errors and, where these leave a choice, the requirements of the driver.
func (w *world) codes(s Step, f facts) []codes.Code {
	var list []codes.Code
	if s.op.onNode() {
		list = w.nodeCodes(s, f)
	} else {
		list = w.controllerCodes(s, f)
	}
	if slices.ContainsFunc(w.doubts, func(d assign) bool { return about(d.field, s) }) {
		// An abandoned call may still work on the same objects.
		list = append(list, codes.Aborted, codes.NotFound, codes.FailedPrecondition,
			codes.AlreadyExists, codes.Internal)
		if s.op != stageOther && s.op != stageAstray && s.op != publishOther {
			list = append(list, codes.OK)
		}
	}
	return list
}

func (w *world) controllerCodes(s Step, f facts) []codes.Code {
	list := calmCodes(s, f)
	if s.op == attach && list[0] == codes.OK && w.at(s.vol, s.node).namesake {
		list = []codes.Code{codes.FailedPrecondition} // CP-12
	}
	if w.rackDown {
		return []codes.Code{codes.Unavailable}
	}
	for _, fault := range w.faults {
		if code, ok := faultCodes[faults[fault].code]; ok {
			list = append(list, code)
		}
		// When the driver repeats an unanswered request, the rack may still work on the first one.
		list = append(list, codes.Aborted)
	}
	return list
}

type answers struct {
	apply   bool
	allowed []codes.Code
}

func when(apply bool, allowed ...codes.Code) answers { return answers{apply, allowed} }

// first returns the codes of the first element that applies, or OK if none applies.
func first(all ...answers) []codes.Code {
	for _, a := range all {
		if a.apply {
			return a.allowed
		}
	}
	return []codes.Code{codes.OK}
}

// calmCodes returns the codes that a controller may answer if the rack works without faults.
func calmCodes(s Step, f facts) []codes.Code {
	disk, holder := f[diskField(s.vol)], f[holderField(s.vol)]
	absent := disk == "" || disk != s.id && disk != anyID
	snap := f[snapField(s.snap)]
	switch s.op {
	case createVolume:
		// CV-18 is first: a repeated call succeeds even if its source is gone. CV-14 and CV-19 follow.
		return first(when(disk != "" && f[sourceField(s.vol)] == s.source, codes.OK),
			when(s.source != "" && f[snapField(kinds[s.vol].snap)] != s.source, codes.NotFound),
			when(disk != "", codes.AlreadyExists))
	case deleteVolume:
		return first(when(!absent && holder != "", codes.FailedPrecondition)) // DV-3
	case attach:
		return first(when(absent, codes.NotFound), // CP-4
			when(holder != "" && holder != s.node, codes.FailedPrecondition)) // CP-8
	case createSnapshot:
		return first(
			when(snap != "" && f[snapSourceField(s.snap)] != s.source, codes.AlreadyExists), // CS-6
			when(snap == "" && f[diskField(snapOf[s.snap])] != s.source, codes.NotFound))    // CS-4
	}
	return first()
}

// calmNodeCodes returns the codes that a node may answer, without the special cases in nodeCodes.
func (w *world) calmNodeCodes(s Step, f facts) []codes.Code {
	here, disk, block := w.at(s.vol, s.node), f[diskField(s.vol)], kinds[s.vol].block()
	present := disk != "" && disk == s.id && f[holderField(s.vol)] == s.node && !w.down[s.node] &&
		!here.bare
	held, staged := here.open != nil, f[stagedField(s.vol, s.node)] != ""
	published, toPod := f.published(s.vol, s.node), f[publishedField(s.vol, s.node, s.pod)] != ""
	switch s.op {
	case stage:
		return first(when(!present, codes.NotFound), // NS-5
			when(here.lost && published && !block, codes.FailedPrecondition),
			when(held && !block && !staged, codes.FailedPrecondition)) // DeviceHeld
	case stageOther: // never OK, because a disk with data must not be formatted
		return first(when(block, codes.FailedPrecondition), // it was not created for filesystems
			when(!present, codes.NotFound),
			when(here.lost, codes.FailedPrecondition, codes.AlreadyExists),
			when(staged, codes.AlreadyExists),    // NS-8
			when(true, codes.FailedPrecondition)) // NS-10
	case stageAstray: // NS-8, and other reasons to refuse another volume's disk
		return []codes.Code{codes.NotFound, codes.AlreadyExists, codes.FailedPrecondition,
			codes.InvalidArgument}
	case publishOther:
		return []codes.Code{codes.NotFound, codes.AlreadyExists, codes.FailedPrecondition}
	case unstageAstray:
		return first(when(staged || published || held, codes.Internal)) // NU-5
	case unstage:
		return first(when(held && !here.lost, codes.Internal), // NU-5
			// The device behind the pod's path may be gone, or another disk's device may have its number.
			// The model does not know which.
			when(published && here.lost && block, codes.OK, codes.Internal),
			when(published, codes.Internal)) // NU-5
	case publish:
		list := first(when(!present, codes.NotFound), // NP-5
			when(here.lost && block, codes.OK, codes.FailedPrecondition, codes.AlreadyExists),
			when(here.lost, codes.FailedPrecondition, codes.AlreadyExists),
			when(!block && !staged, codes.FailedPrecondition), // NP-5
			when(toPod, codes.OK), // NP-6
			when(published && !kinds[s.vol].shared, codes.FailedPrecondition)) // NP-8
		if here.slow {
			list = append(list, codes.NotFound) // NP-5: the call does not wait
		}
		return list
	case stats:
		return first(when(!toPod, codes.NotFound), // VS-2
			when(here.lost, codes.OK, codes.NotFound, codes.Internal, codes.FailedPrecondition))
	}
	return first()
}

func (w *world) nodeCodes(s Step, f facts) []codes.Code {
	list, here := w.calmNodeCodes(s, f), w.at(s.vol, s.node)
	if s.op == stageAstray || s.op == publishOther || s.op == unstageAstray && list[0] != codes.OK {
		return list
	}
	if here.shown {
		list = namesakeCodes(s, f, list)
	}
	if here.half && s.op != stageOther {
		list = append(list, codes.OK, codes.NotFound, codes.FailedPrecondition,
			codes.AlreadyExists, codes.Internal)
	}
	if s.op != unpublish && s.op != stats && w.shadowed(s.vol, s.node) {
		list = append(list, codes.FailedPrecondition, codes.Internal)
	}
	return list
}

// namesakeCodes returns the codes that are allowed while the guest shows another disk's device with
// the volume's serial. list has the codes for the volume's own device.
func namesakeCodes(s Step, f facts, list []codes.Code) []codes.Code {
	switch {
	case s.op == stage && f[stagedField(s.vol, s.node)] != "",
		s.op == publish && (f[publishedField(s.vol, s.node, s.pod)] != "" || !kinds[s.vol].block()):
		return append(list, codes.FailedPrecondition)
	case s.op == stage, s.op == stageOther, s.op == publish:
		return []codes.Code{codes.FailedPrecondition}
	}
	return list
}

// shadowed reports whether another block volume is still published on the node although its device
// is gone. If v's device got the gone device's number, the driver may report that v is in use.
func (w *world) shadowed(v int, n string) bool {
	for other := range kinds {
		if other != v && kinds[other].block() && w.at(other, n).lost {
			return true
		}
	}
	return false
}

// rule is a fault of the rack. code is a key of faultCodes, or "" if the fault changes no answer.
type rule struct {
	code string
	adminapi.Fault
}

// noDevice is a fault of an attach: the rack answers 500 and shows the disk as attached, but the
// instance has no device (docs/hot-plug.md).
const noDevice = "no device"

// faults contains the faults of the rack, by name. Each affects one request.
var faults = func() map[string]rule {
	all := map[string]rule{
		"slow device": {"", adminapi.Fault{Operation: "instance_disk_attach",
			Device: &adminapi.DeviceFault{Delay: adminapi.Duration(150 * time.Millisecond)}}},
		noDevice: {"", adminapi.Fault{Operation: "instance_disk_attach",
			Device: &adminapi.DeviceFault{Fails: true}}},
	}
	for _, operation := range []string{"disk_create", "disk_delete", "instance_disk_attach",
		"instance_disk_detach", "snapshot_create", "snapshot_delete"} {
		for _, phase := range []adminapi.Phase{adminapi.Before, adminapi.Instead, adminapi.After} {
			for code, answer := range map[string]*adminapi.Response{
				"503": {Status: 503, ErrorCode: "ServiceNotAvailable", Message: "not now"},
				"429": {Status: 429, Message: "too many requests"},
				"500": {Status: 500, ErrorCode: "Internal", Message: "Internal Server Error"},
				"403": {Status: 403, ErrorCode: "Forbidden", Message: "Forbidden"},
				"cut": nil,
			} {
				all[operation+" "+string(phase)+" "+code] = rule{code, adminapi.Fault{
					Operation: operation, Phase: phase, Response: answer, Cut: answer == nil}}
			}
		}
		all[operation+" twice"] = rule{"", adminapi.Fault{Operation: operation, Phase: adminapi.Twice}}
		all[operation+" late"] = rule{"", adminapi.Fault{
			Operation: operation, Phase: adminapi.Before, Delay: adminapi.Duration(60 * time.Millisecond)}}
	}
	for _, operation := range []string{"disk_view", "instance_view", "snapshot_view"} {
		all[operation+" before 503"] = rule{"503", adminapi.Fault{Operation: operation,
			Phase: adminapi.Before, Response: &adminapi.Response{Status: 503}}}
		all[operation+" before cut"] = rule{"cut", adminapi.Fault{Operation: operation,
			Phase: adminapi.Before, Cut: true}}
	}
	for name, r := range all {
		r.Times = 1
		all[name] = r
	}
	return all
}()
