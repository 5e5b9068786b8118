//go:build linux

package model

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// op is a kind of step. Its text is the format in which steps are printed and parsed. A word in
// braces stands for a field of the Step.
type op string

const (
	createVolume    op = "controller {ctl}: CreateVolume v{vol}"
	deleteVolume    op = "controller {ctl}: DeleteVolume v{vol}"
	attach          op = "controller {ctl}: ControllerPublish v{vol} → node {node}"
	detach          op = "controller {ctl}: ControllerUnpublish v{vol} → node {node}"
	detachAll       op = "controller {ctl}: ControllerUnpublish v{vol} from wherever it is"
	createSnapshot  op = "controller {ctl}: CreateSnapshot s{snap}"
	deleteSnapshot  op = "controller {ctl}: DeleteSnapshot s{snap}"
	stage           op = "node {node}: NodeStage v{vol}"
	stageOther      op = "node {node}: NodeStage v{vol} as another filesystem"
	stageAstray     op = "node {node}: NodeStage v{vol} with the disk of v{other}"
	unstage         op = "node {node}: NodeUnstage v{vol}"
	unstageAstray   op = "node {node}: NodeUnstage v{vol} at the path of v{other}"
	publish         op = "node {node}: NodePublish v{vol} to pod {pod}"
	publishOther    op = "node {node}: NodePublish v{vol} to pod {pod} as the other access type"
	unpublish       op = "node {node}: NodeUnpublish v{vol} from pod {pod}"
	unpublishAstray op = "node {node}: NodeUnpublish v{vol} from pod {pod} at the path of v{other}"
	stats           op = "node {node}: NodeGetVolumeStats v{vol} of pod {pod}"
	write           op = "pod {pod} on {node}: write v{vol} block {block}"
	writeSynced     op = "pod {pod} on {node}: write and fsync v{vol} block {block}"
	freeze          op = "pod {pod} on {node}: freeze v{vol}"
	thaw            op = "pod {pod} on {node}: thaw v{vol}"
	// In these steps, a process that outlives the pod opens the volume's device, or closes it.
	hold       op = "pod {pod} on {node}: keep v{vol} open"
	holdByLoop op = "pod {pod} on {node}: put a loop device over v{vol}"
	letGo      op = "pod {pod} on {node}: close v{vol}"
	// A namesake is another disk, with the same serial as the volume's disk.
	makeNamesake   op = "administrator: attach a namesake of v{vol} → node {node}"
	takeNamesake   op = "administrator: delete the namesake of v{vol}"
	fault          op = "rack: {fault}"
	killController op = "kill -9 controller {ctl}"
	endController  op = "terminate controller {ctl}"
	killNode       op = "kill -9 node {node}"
	endNode        op = "terminate node {node}"
	killRack       op = "kill -9 the rack's simulator"
	startRack      op = "start the rack's simulator"
	restartRack    op = "terminate and start the rack's simulator"
	stopInstance   op = "stop instance {node}"
	startInstance  op = "start instance {node}"
	wait           op = "wait until all is quiet"
)

var (
	callOps = []op{createVolume, deleteVolume, attach, detach, detachAll, createSnapshot,
		deleteSnapshot, stage, stageOther, stageAstray, unstage, unstageAstray, publish, publishOther,
		unpublish, unpublishAstray, stats}
	actOps = []op{write, writeSynced, freeze, thaw, hold, holdByLoop, letGo, makeNamesake,
		takeNamesake, fault, killController, endController, killNode, endNode, killRack, startRack,
		restartRack, stopInstance, startInstance, wait}
)

func (o op) onNode() bool { return strings.HasPrefix(string(o), "node ") }
func (o op) isCall() bool { return slices.Contains(callOps, o) }

func (o op) byPerson() bool {
	return strings.HasPrefix(string(o), "pod ") || strings.HasPrefix(string(o), "administrator: ")
}

// astray reports whether the call is wrong on purpose: it uses a value of another volume, or
// another access type.
func (o op) astray() bool {
	return o == stageAstray || o == unstageAstray || o == publishOther || o == unpublishAstray
}

// Mishap is an event that disturbs a call.
type Mishap int

// A call has at most one of these mishaps.
const (
	None      Mishap = iota
	Abandoned        // the caller does not wait for the answer
	Killed           // the process that serves the call is killed, and started again
	rackDies         // the simulator is killed
	Overtaken        // another process gets calls while the one that serves the call is paused
)

var mishaps = map[string]Mishap{"abandoned": Abandoned, "killed": Killed, "the rack dies": rackDies}

// Step is one step of a history. It uses only those of its fields that its op names in braces, such
// as {node}.
type Step struct {
	op                  op
	ctl, vol, snap, pod int
	block, other        int
	node, fault         string
	mishap              Mishap
	after               time.Duration
	with                *Step // the next one of the calls that are made at the same time
	id, source          string

	// Around, if not nil, runs the step: it calls do(), and may interrupt do().
	Around func(ctx context.Context, do func(context.Context)) (Mishap, error)
	// Starred, a star before the line, marks a step in which the crash proof disturbs a process.
	Starred bool
	// Driver, if not nil, gets the call instead of the node's driver, which may be paused.
	Driver *harness.Plugin
}

// OnNode reports whether the step is a call to the node's driver, or a pod's write on the node.
func (s Step) OnNode(n string) bool {
	return s.node == n && (s.op.onNode() || s.op == write || s.op == writeSynced)
}

// AbandonedAfter returns the step with a caller that waits for the answer no longer than limit.
func (s Step) AbandonedAfter(limit time.Duration) Step {
	if s.op.isCall() {
		s.mishap, s.after = Abandoned, limit
	}
	return s
}

// calls returns the calls that the step makes at the same time, each as a step of its own.
func (s Step) calls() (all []*Step) {
	for one := &s; one != nil; one = one.with {
		alone := *one
		alone.with = nil
		all = append(all, &alone)
	}
	return all
}

func (s Step) String() string {
	fields := s.fields()
	text := places.ReplaceAllStringFunc(string(s.op), func(place string) string {
		switch field := fields[strings.Trim(place, "{}")].(type) {
		case *int:
			return strconv.Itoa(*field)
		case *string:
			return *field
		}
		return place
	})
	for form, mishap := range mishaps {
		if mishap == s.mishap {
			text += ", " + form + " after " + s.after.String()
		}
	}
	if s.with != nil {
		text += " || " + s.with.String()
	}
	return text
}

// fields maps each name that an op can have in braces to a pointer to the step's field.
func (s *Step) fields() map[string]any {
	return map[string]any{"ctl": &s.ctl, "vol": &s.vol, "snap": &s.snap, "pod": &s.pod,
		"block": &s.block, "other": &s.other, "node": &s.node, "fault": &s.fault}
}

var places = regexp.MustCompile(`\{(\w+)\}`)

var patterns = func() map[op]*regexp.Regexp {
	all := map[op]*regexp.Regexp{}
	for _, o := range slices.Concat(callOps, actOps) {
		text := strings.ReplaceAll(string(o), "{fault}", "(?P<fault>.+?)")
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

func parseOne(line string) (s Step, err error) {
	line, _, _ = strings.Cut(line, " = ")
	for o, pattern := range patterns {
		match := pattern.FindStringSubmatch(line)
		if match == nil {
			continue
		}
		s.op = o
		fields := s.fields()
		for i, name := range pattern.SubexpNames() {
			switch field := fields[name].(type) {
			case *int:
				*field, _ = strconv.Atoi(match[i])
			case *string:
				*field = match[i]
			}
		}
		s.mishap = mishaps[match[len(match)-2]]
		if after := match[len(match)-1]; after != "" {
			s.after, err = time.ParseDuration(after)
		}
		return s, err
	}
	return s, fmt.Errorf("no step: %q", line)
}

// abbreviations contains abbreviations in histories, and the steps that replace them. A star before
// an abbreviation stands before each of its steps.
var abbreviations = []struct {
	form  *regexp.Regexp
	steps string
}{
	{regexp.MustCompile(`(.*): create (v\d), and bring it to`),
		"$1: CreateVolume $2\n$1: bring $2 to"},
	{regexp.MustCompile(`(.*): bring (v\d) to (pod \d) on (\w), which writes block (\d)`),
		"$1: bring $2 to $3 on $4\n$3 on $4: write and fsync $2 block $5"},
	{regexp.MustCompile(`(\* )?(controller \d): bring (v\d) to (pod \d) on (\w)`),
		"$1$2: ControllerPublish $3 → node $5\n${1}node $5: give $3 to $4"},
	{regexp.MustCompile(`(\* )?(controller \d): take (v\d) from (pod \d) on (\w)`),
		"${1}node $5: withdraw $3 from $4\n$1$2: ControllerUnpublish $3 → node $5"},
	{regexp.MustCompile(`((?:\* )?node \w): give (v\d) to (pod \d)`),
		"$1: NodeStage $2\n$1: NodePublish $2 to $3"},
	{regexp.MustCompile(`((?:\* )?node \w): withdraw (v\d) from (pod \d)`),
		"$1: NodeUnpublish $2 from $3\n$1: NodeUnstage $2"},
}

// ParseHistory parses a history with one step, or one abbreviation, in each line. A line may begin
// with a star. ParseHistory ignores empty lines and lines that begin with #.
func ParseHistory(text string) ([]Step, error) {
	for _, a := range abbreviations {
		text = a.form.ReplaceAllString(text, a.steps)
	}
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

func faultNames() []string { return slices.Sorted(maps.Keys(faults)) }

// orchestrator chooses the steps of a history, and knows what its calls have answered.
type orchestrator struct {
	world      *world
	transcript *transcript
	// volumes and taken contain the volumes and the snapshot IDs of the last answers, which may be out
	// of date. given contains the publications that were tried and not undone.
	volumes map[int]*csi.Volume
	taken   map[int]string
	given   map[field]bool
	// goals contains the node on which the orchestrator wants to use each volume.
	goals map[int]string
	last  Step
}

// prepare adds the IDs that the orchestrator sends with the calls of a step, and notes what it will
// have to undo. It returns false if the orchestrator cannot make the calls in this state.
func (o *orchestrator) prepare(steps []*Step) bool {
	w := o.world
	for _, one := range steps {
		if !o.identify(one) || one.op.onNode() && w.down[one.node] ||
			one.op == stageOther && !w.contents[one.vol].hasFilesystem() ||
			one.op == createSnapshot && kinds[snapOf[one.snap]].fsType == "btrfs" &&
				w.seen[diskField(snapOf[one.snap])] != "" &&
				!w.contents[snapOf[one.snap]].hasFilesystem() || // refused with BtrfsTwin
			one.op.astray() && (len(steps) > 1 || !w.sensible(*one)) {
			return false
		}
	}
	for _, one := range steps {
		switch one.op {
		case stage:
			w.place(*one).tried = true
		case publish:
			o.given[publishedField(one.vol, one.node, one.pod)] = true
		}
	}
	return true
}

// identify adds the IDs that the orchestrator sends with a call. It returns false if the
// orchestrator cannot make the call, because it lacks a value of an earlier answer.
func (o *orchestrator) identify(s *Step) bool {
	here, source := o.world.place(*s), o.volumes[snapOf[s.snap]]
	s.id = o.volumes[s.vol].GetVolumeId()
	switch s.op {
	case createVolume:
		s.id, s.source = cmp.Or(s.id, anyID), o.taken[kinds[s.vol].snap]
		return kinds[s.vol].snap == 0 || s.source != ""
	case createSnapshot:
		s.id, s.source = anyID, source.GetVolumeId()
		return source != nil
	case deleteSnapshot:
		s.id = o.taken[s.snap]
		return s.id != ""
	case stage, stageOther, publish, publishOther:
		return here.context != nil
	case stageAstray:
		return here.context != nil && o.world.at(s.other, s.node).context != nil
	}
	return o.volumes[s.vol] != nil
}

// learn updates the model and the orchestrator's knowledge after an answer. It keeps the ID of a
// deleted object, because a later call may still use the ID.
func (o *orchestrator) learn(s *Step, a answer) {
	here := o.world.place(*s)
	if s.op == attach && slices.Contains(o.world.faults, "slow device") {
		here.slow = true
	}
	if !s.op.onNode() && status.Code(a.err) == codes.Unavailable {
		o.world.open[s.target()] = time.Now().Add(lateLimit)
	}
	if a.err != nil {
		return
	}
	content, block := o.world.contents[s.vol], kinds[s.vol].block()
	switch s.op {
	case createVolume:
		volume := a.reply.(*csi.CreateVolumeResponse).GetVolume()
		if o.volumes[s.vol].GetVolumeId() != volume.GetVolumeId() {
			for _, n := range nodes {
				o.world.at(s.vol, n).context = nil
			}
		}
		o.volumes[s.vol], s.id = volume, volume.GetVolumeId()
		o.world.serials[s.vol] = volume.GetVolumeContext()["diskName"]
	case createSnapshot:
		s.id = a.reply.(*csi.CreateSnapshotResponse).GetSnapshot().GetSnapshotId()
		o.taken[s.snap] = s.id
	case attach:
		here.context = a.reply.(*csi.ControllerPublishVolumeResponse).GetPublishContext()
	case stage:
		if o.world.seen[stagedField(s.vol, s.node)] == "" || here.lost {
			here.frozen = false
		}
		here.slow, here.staged = false, true
		here.lost = here.lost && block // a dead mount was replaced by a new one
		if content != nil && !block {
			content.formatted = true
		}
	case unstage, unpublish:
		if s.op == unstage {
			here.frozen, here.staged, here.tried = false, false, false
		} else {
			o.given[publishedField(s.vol, s.node, s.pod)] = false
		}
		flushes := block == (s.op == unpublish)
		if content != nil && flushes && !here.lost && o.world.seen.mounted(s.vol, s.node) {
			content.flushed()
		}
	}
}

// towards returns the orchestrator's next step to publish the volume to pods on the node.
func (o *orchestrator) towards(v int, n string) Step {
	w, f, here := o.world, o.world.seen, o.world.at(v, n)
	holder, done := f[holderField(v)], len(o.transcript.lines)
	ctl := 1 + int(w.value+uint64(done))%2
	switch {
	case w.rackDown:
		return Step{op: startRack}
	case here.namesake && done%3 == 0:
		return Step{op: takeNamesake, vol: v} // the driver refuses calls while the namesake exists
	case f[diskField(v)] == "" || o.volumes[v].GetVolumeId() != f[diskField(v)]:
		return o.towardsDisk(v, ctl)
	case holder != "" && holder != n:
		return o.away(v)
	case holder == "" || here.context == nil:
		return Step{op: attach, ctl: ctl, vol: v, node: n}
	case w.down[n]:
		return Step{op: startInstance, node: n}
	case here.bare && done%3 == 1:
		return Step{op: stopInstance, node: n} // a started instance has the devices of all its disks
	case here.lost || here.bare && done%3 == 2:
		return o.away(v)
	case !here.staged || !kinds[v].block() && f[stagedField(v, n)] == "":
		return Step{op: stage, vol: v, node: n}
	case !f.published(v, n):
		return Step{op: publish, vol: v, node: n, pod: 1}
	case kinds[v].shared && f[publishedField(v, n, 2)] == "":
		return Step{op: publish, vol: v, node: n, pod: 2}
	}
	s := Step{op: writeSynced, vol: v, node: n, pod: 1, block: int(w.value) % blocks}
	if f[publishedField(v, n, 1)] == "" {
		s.pod = 2
	}
	return s
}

// towardsDisk returns the next call to create the volume. If the volume is restored from a
// snapshot, the orchestrator first creates the snapshot and the snapshot's volume.
func (o *orchestrator) towardsDisk(v, ctl int) Step {
	snap := kinds[v].snap
	switch {
	case snap == 0 || o.taken[snap] != "" && o.world.seen[snapField(snap)] == o.taken[snap]:
		return Step{op: createVolume, ctl: ctl, vol: v}
	case o.volumes[snapOf[snap]] == nil || o.world.seen[diskField(snapOf[snap])] == "":
		return o.towardsDisk(snapOf[snap], ctl)
	}
	return Step{op: createSnapshot, ctl: ctl, snap: snap}
}

// away returns the orchestrator's next step to delete a volume, which it first unpublishes and
// unstages. If the volume does not exist, the step has no op.
func (o *orchestrator) away(v int) Step {
	f, ctl := o.world.seen, 1+len(o.transcript.lines)%2
	for _, n := range nodes {
		if o.world.down[n] {
			continue // the node has no mounts, and no driver runs
		}
		for _, p := range pods {
			if f[publishedField(v, n, p)] != "" || o.given[publishedField(v, n, p)] {
				return Step{op: unpublish, vol: v, node: n, pod: p}
			}
		}
		if o.world.at(v, n).open != nil {
			return Step{op: letGo, vol: v, node: n, pod: 1}
		}
		if f[stagedField(v, n)] != "" || o.world.at(v, n).tried {
			return Step{op: unstage, vol: v, node: n}
		}
	}
	switch {
	case f[holderField(v)] != "":
		return Step{op: detach, ctl: ctl, vol: v, node: f[holderField(v)]}
	case f[diskField(v)] == "":
		return Step{}
	case o.volumes[v].GetVolumeId() != f[diskField(v)]:
		return Step{op: createVolume, ctl: ctl, vol: v}
	}
	return Step{op: deleteVolume, ctl: ctl, vol: v}
}

func capabilityOf(v int) *csi.VolumeCapability { return accessOf(v, kinds[v].fsType) }

// accessOf returns the volume's capability with the given filesystem, or with raw access for "".
func accessOf(v int, fsType string) *csi.VolumeCapability {
	mode := csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	if kinds[v].shared {
		mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	}
	if fsType == "" {
		return harness.InMode(mode, harness.Raw())
	}
	return harness.InMode(mode, harness.Mounted(fsType))
}

// call sends the request of the step. reply is the answer of a controller, or nil.
func (h *History) call(ctx context.Context, s Step) (reply any, err error) {
	if s.op.onNode() {
		return nil, h.callNode(ctx, s)
	}
	ctl := h.env.Controllers[s.ctl-1].Controller()
	switch s.op {
	case createVolume:
		return ctl.CreateVolume(ctx, createRequest(s))
	case deleteVolume:
		return ctl.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: s.id})
	case attach:
		req := harness.PublishRequest(h.orchestrator.volumes[s.vol], h.env.Rack.Instance(s.node).ID)
		req.VolumeId, req.VolumeCapability = s.id, capabilityOf(s.vol)
		return ctl.ControllerPublishVolume(ctx, req)
	case detach, detachAll:
		req := &csi.ControllerUnpublishVolumeRequest{VolumeId: s.id}
		if s.op == detach {
			req.NodeId = h.env.Rack.Instance(s.node).ID
		}
		return ctl.ControllerUnpublishVolume(ctx, req)
	case createSnapshot:
		return ctl.CreateSnapshot(ctx, harness.SnapshotRequest(name("s", s.snap), s.source))
	}
	return ctl.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: s.id})
}

func createRequest(s Step) *csi.CreateVolumeRequest {
	req := harness.CreateRequest(name("v", s.vol), capabilityOf(s.vol))
	req.CapacityRange.RequiredBytes = kinds[s.vol].bytes()
	if s.source != "" {
		harness.FromSnapshot(req, s.source)
	}
	return req
}

// placement returns the volume and paths of a node call. One value is wrong if s.op.astray().
func (h *History) placement(s Step) *harness.Placement {
	h.preparing.Lock()
	defer h.preparing.Unlock()
	volume := h.orchestrator.volumes[s.vol]
	p := &harness.Placement{
		Volume:         &csi.Volume{VolumeId: s.id, VolumeContext: volume.GetVolumeContext()},
		Capability:     capabilityOf(s.vol),
		PublishContext: h.world.place(s).context,
		Staging:        h.env.staging(s.vol, s.node), Target: h.env.target(s.vol, s.node, s.pod),
		ReadOnly: s.node == h.ReadOnlyAt,
	}
	switch s.op {
	case stageOther:
		fsType := "xfs"
		if kinds[s.vol].fsType == fsType {
			fsType = "ext4"
		}
		p.Capability = accessOf(s.vol, fsType)
	case stageAstray:
		p.PublishContext = h.world.at(s.other, s.node).context
		p.Volume.VolumeContext = nil
	case publishOther:
		fsType := "ext4"
		if !kinds[s.vol].block() {
			fsType = ""
		}
		p.Capability = accessOf(s.vol, fsType)
	case unstageAstray:
		p.Staging = h.env.staging(s.other, s.node)
	case unpublishAstray:
		p.Target = h.env.target(s.other, s.node, s.pod)
	}
	return p
}

func (h *History) callNode(ctx context.Context, s Step) error {
	p, node := h.placement(s), cmp.Or(s.Driver, h.env.Nodes[s.node]).Node()
	switch s.op {
	case stage:
		if err := os.MkdirAll(p.Staging, 0o750); err != nil {
			return err
		}
		return p.Stage(ctx, node)
	case stageOther, stageAstray:
		return p.Stage(ctx, node)
	case unstage, unstageAstray:
		return p.Unstage(ctx, node)
	case publish, publishOther:
		if err := os.MkdirAll(filepath.Dir(p.Target), 0o750); err != nil {
			return err
		}
		return p.Publish(ctx, node)
	case unpublish, unpublishAstray:
		return p.Unpublish(ctx, node)
	}
	p.Staging = ""
	_, err := p.Stats(ctx, node)
	return err
}
