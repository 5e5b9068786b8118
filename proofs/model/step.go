//go:build linux

package model

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
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

// Mishap is an event that happens during a call.
type Mishap int

// These are the mishaps.
const (
	None      Mishap = iota
	Abandoned        // the caller does not wait for the answer
	Killed           // the process that serves the call is killed, and started again
	rackDies         // the simulator is killed
	Overtaken        // another process gets calls while the one that serves the call is paused
)

var mishapForms = map[Mishap]string{
	Abandoned: ", abandoned after ", Killed: ", killed after ", rackDies: ", the rack dies after ",
}

// Step is one step of a history. Only the fields in its form are used.
type Step struct {
	op                  op
	ctl, vol, snap, pod int
	block, other        int
	node, fault         string
	mishap              Mishap
	after               time.Duration
	with                *Step // another call at the same time, which may have a further one
	id, source          string

	// Around, if it is set, makes the calls of the step or does its act, and may interrupt them.
	Around func(ctx context.Context, do func(context.Context)) (Mishap, error)
	// Starred is set if the line of the step begins with a star.
	Starred bool
	// Driver, if it is set, gets the call instead of the node's driver, which may stand still.
	Driver *harness.Plugin
}

// OnNode reports whether the step is a call to the driver of that node, or the work of a pod there.
func (s Step) OnNode(n string) bool {
	return s.node == n && (s.op.onNode() || s.op == write || s.op == writeSynced)
}

// AbandonedAfter returns the step of an orchestrator that waits so long for an answer.
func (s Step) AbandonedAfter(limit time.Duration) Step {
	if s.op.isCall() {
		s.mishap, s.after = Abandoned, limit
	}
	return s
}

func (s Step) String() string {
	text := strings.NewReplacer("{ctl}", strconv.Itoa(s.ctl), "{vol}", strconv.Itoa(s.vol),
		"{other}", strconv.Itoa(s.other),
		"{snap}", strconv.Itoa(s.snap), "{pod}", strconv.Itoa(s.pod),
		"{block}", strconv.Itoa(s.block), "{node}", s.node, "{fault}", s.fault,
	).Replace(forms[s.op])
	if form := mishapForms[s.mishap]; form != "" {
		text += form + s.after.String()
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
func parseStep(line string) (Step, error) {
	line, rest, both := strings.Cut(strings.TrimSpace(line), " || ")
	s, err := parseOne(line)
	if err != nil || !both {
		return s, err
	}
	other, err := parseStep(rest)
	s.with = &other
	return s, err
}

func parseOne(line string) (Step, error) {
	line, _, _ = strings.Cut(line, " = ")
	for o := range op(len(forms)) {
		match := patterns[o].FindStringSubmatch(line)
		if match == nil {
			continue
		}
		s := Step{op: o}
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
	return Step{}, fmt.Errorf("no step: %q", line)
}

func (s *Step) set(name, text string) {
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
	bring = regexp.MustCompile(`(\* )?(controller \d): bring (v\d) to (pod \d) on (\w)`)
	take  = regexp.MustCompile(`(\* )?(controller \d): take (v\d) from (pod \d) on (\w)`)
)

// ParseHistory parses a history with one step, or one abbreviation, in each line. A line may begin
// with a star. It ignores empty lines and lines that begin with #.
func ParseHistory(text string) ([]Step, error) {
	text = bring.ReplaceAllString(text, "$1$2: ControllerPublish $3 → node $5\n"+
		"${1}node $5: NodeStage $3\n${1}node $5: NodePublish $3 to $4")
	text = take.ReplaceAllString(text, "${1}node $5: NodeUnpublish $3 from $4\n"+
		"${1}node $5: NodeUnstage $3\n$1$2: ControllerUnpublish $3 → node $5")
	var steps []Step
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		line, starred := strings.CutPrefix(line, "* ")
		s, err := parseStep(line)
		if err != nil {
			return nil, err
		}
		s.Starred = starred
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
