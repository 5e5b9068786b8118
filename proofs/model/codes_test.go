//go:build linux

package model

import (
	"slices"

	"google.golang.org/grpc/codes"
)

// faultCodes says which code a driver's answer has when that fault struck its call to the rack.
// What is not here disturbs no answer.
var faultCodes = map[string]codes.Code{
	"503": codes.Unavailable, "429": codes.Unavailable, "cut": codes.Unavailable,
	"500": codes.Unavailable, "403": codes.PermissionDenied,
}

// codes are the answers that the model allows a call that is made in this state. They come from
// the tables of CSI; what depends on the driver's choice is as requirements say.
func (w *world) codes(s step, f facts) []codes.Code {
	var list []codes.Code
	if s.op.onNode() {
		list = w.nodeCodes(s, f)
	} else {
		list = w.controllerCodes(s, f)
	}
	if w.doubtful(s) {
		// Something that was given up is still at work on the same objects.
		list = append(list, codes.Aborted, codes.NotFound, codes.FailedPrecondition,
			codes.AlreadyExists, codes.Internal)
		if s.op != stageOther && s.op != stageAstray && s.op != publishOther {
			list = append(list, codes.OK)
		}
	}
	return list
}

func (w *world) controllerCodes(s step, f facts) []codes.Code {
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
		// Whoever asks again for what the rack failed to say may find it at work.
		list = append(list, codes.Aborted)
	}
	return list
}

// calmCodes are a controller's answers on a rack in good order.
func calmCodes(s step, f facts) []codes.Code {
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

func createCodes(s step, f facts) []codes.Code {
	exists := f[diskField(s.vol)] != ""
	gone := s.source != "" && f[snapField(kinds[s.vol].snap)] != s.source
	same := f[sourceField(s.vol)] == s.source
	switch {
	case exists && same:
		return []codes.Code{codes.OK} // CV-18, whether the source is still there or not
	case gone:
		return []codes.Code{codes.NotFound} // CV-14
	case exists:
		return []codes.Code{codes.AlreadyExists} // CV-19
	}
	return []codes.Code{codes.OK}
}

func (w *world) nodeCodes(s step, f facts) []codes.Code {
	here := f[diskField(s.vol)] != "" && f[diskField(s.vol)] == s.id &&
		f[holderField(s.vol)] == s.node && !w.down[s.node]
	lost := w.lost[at(s.vol, s.node)]
	var list []codes.Code
	switch s.op {
	case stage:
		list = w.stageCodes(s, f, here, lost)
	case stageOther:
		list = stageOtherCodes(s, f, here, lost)
	case stageAstray:
		// NS-8, and what else speaks against the other disk.
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
			list = append(list, codes.NotFound) // NP-5: it does not wait
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

// namesakeCodes are the answers where the guest shows another device with the volume's serial
// instead. What is in use already stays so, and can be taken down.
func namesakeCodes(s step, f facts, list []codes.Code) []codes.Code {
	switch {
	case s.op == stage && f[stagedField(s.vol, s.node)] != "",
		s.op == publish && (f[publishedField(s.vol, s.node, s.pod)] != "" || !kinds[s.vol].block()):
		return append(list, codes.FailedPrecondition)
	case s.op == stage, s.op == stageOther, s.op == publish:
		return []codes.Code{codes.FailedPrecondition}
	}
	return list
}

// shadowed reports whether the node has a dead publication of another block volume: its device
// number may have gone to this volume's device, which then seems to be in use.
func (w *world) shadowed(v int, n string) bool {
	for other := range kinds {
		if other != v && kinds[other].block() && w.lost[at(other, n)] {
			return true
		}
	}
	return false
}

func (w *world) stageCodes(s step, f facts, here, lost bool) []codes.Code {
	switch {
	case !here:
		return []codes.Code{codes.NotFound} // NS-5
	case lost && f.published(s.vol, s.node) && !kinds[s.vol].block():
		return []codes.Code{codes.FailedPrecondition}
	}
	return []codes.Code{codes.OK}
}

// stageOtherCodes never has OK: what holds something is not formatted.
func stageOtherCodes(s step, f facts, here, lost bool) []codes.Code {
	switch {
	case kinds[s.vol].block():
		return []codes.Code{codes.FailedPrecondition} // it was not created for filesystems
	case !here:
		return []codes.Code{codes.NotFound}
	case lost:
		return []codes.Code{codes.FailedPrecondition, codes.AlreadyExists}
	case f[stagedField(s.vol, s.node)] != "":
		return []codes.Code{codes.AlreadyExists} // NS-8
	}
	return []codes.Code{codes.FailedPrecondition} // NS-10
}

func unstageCodes(s step, f facts, lost bool) []codes.Code {
	published := f.published(s.vol, s.node)
	switch {
	case published && lost && kinds[s.vol].block():
		// The device is gone, or another: what is published is a dead name.
		return []codes.Code{codes.OK, codes.Internal}
	case published:
		return []codes.Code{codes.Internal} // NU-5
	}
	return []codes.Code{codes.OK}
}

func publishCodes(s step, f facts, here, lost bool) []codes.Code {
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
