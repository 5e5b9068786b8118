//go:build linux

package model

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// op is a kind of step.
type op int

const (
	createVolume op = iota
	deleteVolume
	attach
	detach
	detachAll
	createSnapshot
	deleteSnapshot
	stage
	stageOther  // with another filesystem than the volume has
	stageAstray // with the disk of another volume
	unstage
	unstageAstray // with the staging path of another volume
	publish
	publishOther // a filesystem as a device, or a device as a filesystem
	unpublish
	unpublishAstray // with the path of another volume
	stats
	write
	writeSynced
	freeze
	thaw
	hold       // a process opens a device, and outlives the pod
	holdByLoop // a loop device uses a device
	letGo
	makeNamesake // an administrator attaches a disk with the volume's serial
	takeNamesake
	fault
	killController
	endController
	killNode
	endNode
	killRack
	startRack
	restartRack
	stopInstance
	startInstance
	wait
)

// forms contains the texts of steps, as they are printed and parsed.
var forms = map[op]string{
	createVolume:    "controller {ctl}: CreateVolume v{vol}",
	deleteVolume:    "controller {ctl}: DeleteVolume v{vol}",
	attach:          "controller {ctl}: ControllerPublish v{vol} → node {node}",
	detach:          "controller {ctl}: ControllerUnpublish v{vol} → node {node}",
	detachAll:       "controller {ctl}: ControllerUnpublish v{vol} from wherever it is",
	createSnapshot:  "controller {ctl}: CreateSnapshot s{snap}",
	deleteSnapshot:  "controller {ctl}: DeleteSnapshot s{snap}",
	stage:           "node {node}: NodeStage v{vol}",
	stageOther:      "node {node}: NodeStage v{vol} as another filesystem",
	stageAstray:     "node {node}: NodeStage v{vol} with the disk of v{other}",
	unstage:         "node {node}: NodeUnstage v{vol}",
	unstageAstray:   "node {node}: NodeUnstage v{vol} at the path of v{other}",
	publish:         "node {node}: NodePublish v{vol} to pod {pod}",
	publishOther:    "node {node}: NodePublish v{vol} to pod {pod} as the other access type",
	unpublish:       "node {node}: NodeUnpublish v{vol} from pod {pod}",
	unpublishAstray: "node {node}: NodeUnpublish v{vol} from pod {pod} at the path of v{other}",
	stats:           "node {node}: NodeGetVolumeStats v{vol} of pod {pod}",
	write:           "pod {pod} on {node}: write v{vol} block {block}",
	writeSynced:     "pod {pod} on {node}: write and fsync v{vol} block {block}",
	freeze:          "pod {pod} on {node}: freeze v{vol}",
	thaw:            "pod {pod} on {node}: thaw v{vol}",
	hold:            "pod {pod} on {node}: keep v{vol} open",
	holdByLoop:      "pod {pod} on {node}: put a loop device over v{vol}",
	letGo:           "pod {pod} on {node}: close v{vol}",
	makeNamesake:    "administrator: attach a namesake of v{vol} → node {node}",
	takeNamesake:    "administrator: delete the namesake of v{vol}",
	fault:           "rack: {fault}",
	killController:  "kill -9 controller {ctl}",
	endController:   "terminate controller {ctl}",
	killNode:        "kill -9 node {node}",
	endNode:         "terminate node {node}",
	killRack:        "kill -9 the rack's simulator",
	startRack:       "start the rack's simulator",
	restartRack:     "terminate and start the rack's simulator",
	stopInstance:    "stop instance {node}",
	startInstance:   "start instance {node}",
	wait:            "wait until all is quiet",
}

// onNode reports whether the step is a call to a node's driver. isCall reports whether it is a call
// to any driver.
func (o op) onNode() bool { return o >= stage && o <= stats }
func (o op) isCall() bool { return o <= stats }

// astray reports whether the call is a mistake: it uses a value of another volume, or another
// access type.
func (o op) astray() bool {
	return o == stageAstray || o == unstageAstray || o == publishOther || o == unpublishAstray
}

// mishap is an event that happens during a call.
type mishap int

const (
	none      mishap = iota
	abandoned        // the caller does not wait for the answer
	killed           // the driver that serves the call is killed, and started again
	rackDies         // the simulator is killed
)

var mishapForms = map[mishap]string{
	abandoned: ", abandoned after ", killed: ", killed after ", rackDies: ", the rack dies after ",
}

// step is one step of a history. Only the fields in its form are used.
type step struct {
	op                  op
	ctl, vol, snap, pod int
	block, other        int
	node, fault         string
	mishap              mishap
	after               time.Duration
	with                *step // another call at the same time, which may have a further one
	id, source          string
}

func (s step) String() string {
	text := strings.NewReplacer("{ctl}", strconv.Itoa(s.ctl), "{vol}", strconv.Itoa(s.vol),
		"{other}", strconv.Itoa(s.other),
		"{snap}", strconv.Itoa(s.snap), "{pod}", strconv.Itoa(s.pod),
		"{block}", strconv.Itoa(s.block), "{node}", s.node, "{fault}", s.fault,
	).Replace(forms[s.op])
	if s.mishap != none {
		text += mishapForms[s.mishap] + s.after.String()
	}
	if s.with != nil {
		text += " || " + s.with.String()
	}
	return text
}

var places = regexp.MustCompile(`\\\{(\w+)\\\}`)

// patterns contains the forms as regular expressions, in the order of the operations.
var patterns = func() map[op]*regexp.Regexp {
	all := map[op]*regexp.Regexp{}
	for o, form := range forms {
		text := strings.ReplaceAll(regexp.QuoteMeta(form), `\{fault\}`, `(?P<fault>.+?)`)
		text = places.ReplaceAllString(text, `(?P<$1>\w+)`)
		all[o] = regexp.MustCompile(`^` + text + `(?:, (abandoned|killed|the rack dies) after (\S+))?$`)
	}
	return all
}()

// parseStep parses a step in the format of String. It ignores an answer at the end ("… = OK").
func parseStep(line string) (step, error) {
	line, rest, both := strings.Cut(strings.TrimSpace(line), " || ")
	s, err := parseOne(line)
	if err != nil || !both {
		return s, err
	}
	other, err := parseStep(rest)
	s.with = &other
	return s, err
}

func parseOne(line string) (step, error) {
	line, _, _ = strings.Cut(line, " = ")
	for o := range op(len(forms)) {
		match := patterns[o].FindStringSubmatch(line)
		if match == nil {
			continue
		}
		s := step{op: o}
		names := patterns[o].SubexpNames()
		for i, name := range names {
			s.set(name, match[i])
		}
		how, after := match[len(match)-2], match[len(match)-1]
		for m, form := range mishapForms {
			if how != "" && form == ", "+how+" after " {
				s.mishap = m
			}
		}
		var err error
		if after != "" {
			s.after, err = time.ParseDuration(after)
		}
		return s, err
	}
	return step{}, fmt.Errorf("no step: %q", line)
}

func (s *step) set(name, text string) {
	number, _ := strconv.Atoi(text) // node and fault are no numbers
	switch name {
	case "ctl":
		s.ctl = number
	case "vol":
		s.vol = number
	case "snap":
		s.snap = number
	case "pod":
		s.pod = number
	case "block":
		s.block = number
	case "other":
		s.other = number
	case "node":
		s.node = text
	case "fault":
		s.fault = text
	}
}

// bring and take are abbreviations in histories: for the three calls that bring a volume to a pod,
// and for those that take it away.
var (
	bring = regexp.MustCompile(`(controller \d): bring (v\d) to (pod \d) on (\w)`)
	take  = regexp.MustCompile(`(controller \d): take (v\d) from (pod \d) on (\w)`)
)

// parseHistory parses a history with one step, or one abbreviation, in each line. It ignores empty
// lines and lines that begin with #.
func parseHistory(text string) ([]step, error) {
	text = bring.ReplaceAllString(text, "$1: ControllerPublish $2 → node $4\n"+
		"node $4: NodeStage $2\nnode $4: NodePublish $2 to $3")
	text = take.ReplaceAllString(text, "node $4: NodeUnpublish $2 from $3\n"+
		"node $4: NodeUnstage $2\n$1: ControllerUnpublish $2 → node $4")
	var steps []step
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		s, err := parseStep(line)
		if err != nil {
			return nil, err
		}
		steps = append(steps, s)
	}
	return steps, nil
}

// faultNames returns the names of all faults, in order.
func faultNames() []string {
	var names []string
	for name := range faults {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}
