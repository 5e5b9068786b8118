//go:build linux

package model

import (
	"slices"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// faultCodes maps the kind of a fault to the code that the driver answers if the fault affected a
// request to the rack. Other faults change no answer.
var faultCodes = map[string]codes.Code{
	"503": codes.Unavailable, "429": codes.Unavailable, "cut": codes.Unavailable,
	"500": codes.Unavailable, "403": codes.PermissionDenied,
}

// codes returns the answers that the model allows for a call in this state, by CSI's tables of
// errors and, where these leave a choice, by the requirements.
func (w *world) codes(s Step, f facts) []codes.Code {
	var list []codes.Code
	if s.op.onNode() {
		list = w.nodeCodes(s, f)
	} else {
		list = w.controllerCodes(s, f)
	}
	if w.doubtful(s) {
		// An abandoned call still works on the same objects.
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
	if s.op == attach && list[0] == codes.OK && w.namesakes[at(s.vol, s.node)] {
		list = []codes.Code{codes.FailedPrecondition} // CP-12
	}
	if w.rackDown {
		return []codes.Code{codes.Unavailable}
	}
	for _, fault := range w.faults {
		if code, ok := faultCodes[faults[fault].code]; ok {
			list = append(list, code)
		}
		// The driver repeats a request whose answer was lost, and the rack may still work on the first.
		list = append(list, codes.Aborted)
	}
	return list
}

// calmCodes returns the answers that a controller may give if the rack works without faults.
func calmCodes(s Step, f facts) []codes.Code {
	disk, holder := f[diskField(s.vol)], f[holderField(s.vol)]
	absent := disk == "" || disk != s.id && disk != anyID
	snap := f[snapField(s.snap)]
	switch s.op {
	case createVolume:
		return createCodes(s, f)
	case deleteVolume:
		if !absent && holder != "" {
			return []codes.Code{codes.FailedPrecondition} // DV-3
		}
	case attach:
		switch {
		case absent:
			return []codes.Code{codes.NotFound} // CP-4
		case holder != "" && holder != s.node:
			return []codes.Code{codes.FailedPrecondition} // CP-8
		}
	case createSnapshot:
		source := f[diskField(snapOf[s.snap])]
		switch {
		case snap != "" && f[snapSourceField(s.snap)] != s.source:
			return []codes.Code{codes.AlreadyExists} // CS-6
		case snap == "" && source != s.source:
			return []codes.Code{codes.NotFound} // CS-4
		}
	}
	return []codes.Code{codes.OK}
}

func createCodes(s Step, f facts) []codes.Code {
	exists := f[diskField(s.vol)] != ""
	gone := s.source != "" && f[snapField(kinds[s.vol].snap)] != s.source
	same := f[sourceField(s.vol)] == s.source
	switch {
	case exists && same:
		return []codes.Code{codes.OK} // CV-18, even if the source does not exist any more
	case gone:
		return []codes.Code{codes.NotFound} // CV-14
	case exists:
		return []codes.Code{codes.AlreadyExists} // CV-19
	}
	return []codes.Code{codes.OK}
}

func (w *world) nodeCodes(s Step, f facts) []codes.Code {
	here := f[diskField(s.vol)] != "" && f[diskField(s.vol)] == s.id &&
		f[holderField(s.vol)] == s.node && !w.down[s.node] && !w.bare[at(s.vol, s.node)]
	lost := w.lost[at(s.vol, s.node)]
	var list []codes.Code
	switch s.op {
	case stage:
		list = w.stageCodes(s, f, here, lost)
	case stageOther:
		list = stageOtherCodes(s, f, here, lost)
	case stageAstray:
		// NS-8, and the other reasons to refuse the other disk.
		return []codes.Code{codes.NotFound, codes.AlreadyExists, codes.FailedPrecondition,
			codes.InvalidArgument}
	case publishOther:
		return []codes.Code{codes.NotFound, codes.AlreadyExists, codes.FailedPrecondition}
	case unstageAstray:
		if f.mounted(s.vol, s.node) || w.held[at(s.vol, s.node)] {
			return []codes.Code{codes.Internal} // NU-5
		}
	case unstage:
		list = unstageCodes(s, f, lost)
		if w.held[at(s.vol, s.node)] && !lost {
			list = []codes.Code{codes.Internal} // NU-5
		}
	case publish:
		list = publishCodes(s, f, here, lost)
		if w.slow[at(s.vol, s.node)] {
			list = append(list, codes.NotFound) // NP-5: the call does not wait
		}
	case stats:
		list = []codes.Code{codes.NotFound} // VS-2
		if f[publishedField(s.vol, s.node, s.pod)] != "" {
			list = []codes.Code{codes.OK}
			if lost {
				list = append(list, codes.NotFound, codes.Internal, codes.FailedPrecondition)
			}
		}
	default:
		list = []codes.Code{codes.OK}
	}
	if len(list) == 0 {
		list = []codes.Code{codes.OK}
	}
	if w.shown[at(s.vol, s.node)] {
		list = namesakeCodes(s, f, list)
	}
	if w.half[at(s.vol, s.node)] && s.op != stageOther {
		list = append(list, codes.OK, codes.NotFound, codes.FailedPrecondition,
			codes.AlreadyExists, codes.Internal)
	}
	if s.op != unpublish && s.op != stats && w.shadowed(s.vol, s.node) {
		list = append(list, codes.FailedPrecondition, codes.Internal)
	}
	return list
}

// namesakeCodes returns the answers if the guest shows a namesake's device in place of the
// volume's. A volume in use stays in use, and can be unpublished and unstaged.
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

// shadowed reports whether another block volume is published on the node without its device. This
// volume's device may have the number of that device, and then seems to be in use.
func (w *world) shadowed(v int, n string) bool {
	for other := range kinds {
		if other != v && kinds[other].block() && w.lost[at(other, n)] {
			return true
		}
	}
	return false
}

func (w *world) stageCodes(s Step, f facts, here, lost bool) []codes.Code {
	switch {
	case !here:
		return []codes.Code{codes.NotFound} // NS-5
	case lost && f.published(s.vol, s.node) && !kinds[s.vol].block():
		return []codes.Code{codes.FailedPrecondition}
	case w.held[at(s.vol, s.node)] && !kinds[s.vol].block() && f[stagedField(s.vol, s.node)] == "":
		return []codes.Code{codes.FailedPrecondition} // DeviceHeld
	}
	return []codes.Code{codes.OK}
}

// stageOtherCodes returns the answers to a stage as another filesystem. OK is never allowed,
// because a disk with data must not be formatted.
func stageOtherCodes(s Step, f facts, here, lost bool) []codes.Code {
	switch {
	case kinds[s.vol].block():
		return []codes.Code{codes.FailedPrecondition} // the volume was not created for filesystems
	case !here:
		return []codes.Code{codes.NotFound}
	case lost:
		return []codes.Code{codes.FailedPrecondition, codes.AlreadyExists}
	case f[stagedField(s.vol, s.node)] != "":
		return []codes.Code{codes.AlreadyExists} // NS-8
	}
	return []codes.Code{codes.FailedPrecondition} // NS-10
}

func unstageCodes(s Step, f facts, lost bool) []codes.Code {
	published := f.published(s.vol, s.node)
	switch {
	case published && lost && kinds[s.vol].block():
		// The device of the published node is gone, or belongs to another disk.
		return []codes.Code{codes.OK, codes.Internal}
	case published:
		return []codes.Code{codes.Internal} // NU-5
	}
	return []codes.Code{codes.OK}
}

func publishCodes(s Step, f facts, here, lost bool) []codes.Code {
	k, v, n := kinds[s.vol], s.vol, s.node
	others := slices.ContainsFunc(pods, func(p int) bool {
		return p != s.pod && f[publishedField(v, n, p)] != ""
	})
	switch {
	case !here:
		return []codes.Code{codes.NotFound} // NP-5
	case lost && k.block():
		return []codes.Code{codes.OK, codes.FailedPrecondition, codes.AlreadyExists}
	case lost:
		return []codes.Code{codes.FailedPrecondition, codes.AlreadyExists}
	case !k.block() && f[stagedField(v, n)] == "":
		return []codes.Code{codes.FailedPrecondition} // NP-5
	case f[publishedField(v, n, s.pod)] != "":
		return []codes.Code{codes.OK} // NP-6
	case others && !k.shared:
		return []codes.Code{codes.FailedPrecondition} // NP-8
	}
	return []codes.Code{codes.OK}
}

// rule is a fault with its kind: a key of faultCodes, or "" for a fault that changes no answer.
type rule struct {
	code string
	adminapi.Fault
}

// noDevice is a fault of a rack that records an attach first: the rack answers 500, and the disk is
// attached without a device (docs/hot-plug.md).
const noDevice = "no device"

// faults contains the faults of the rack, by name. Each applies once.
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
