package claim

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

// history is one simulated change of a claim. Between two requests of the command, people,
// controllers and other runs of the command may act.
type history struct {
	c                      *cluster
	rnd                    *rand.Rand
	kind, verb, policy     string
	original               int64    // the replicas of the workload before the change
	lines                  []string // the log of the history
	may, acts              []string // the actors that are allowed to act; those that acted
	left, killsLeft, kills int      // acts and kills that may still come; kills so far
	ended                  string

	busy   bool
	next   string      // the verb of the request that comes next
	late   []func()    // requests of killed runs that have not arrived yet
	second func() bool // lets another run make its next request
	stop   func()      // kills the other run

	scaled, paused bool   // somebody scaled the workload; somebody stopped it
	meddled        bool   // somebody has deleted the claim, or its namespace
	then           string // the content of a revert's snapshot when the change began
	last           plan   // the plan as it was read last
}

func (h *history) log(format string, args ...any) {
	h.lines = append(h.lines, fmt.Sprintf(format, args...))
}

func oneOf[T any](rnd *rand.Rand, all ...T) T { return all[rnd.IntN(len(all))] }

// newHistory chooses a history at random: the workload, the change, and what may disturb it.
func newHistory(t *testing.T, seed uint64) *history {
	rnd := rand.New(rand.NewPCG(seed, seed))
	h := &history{rnd: rnd, kind: oneOf(rnd, "Deployment", "StatefulSet", "none", "pod", "job",
		"operator"), verb: oneOf(rnd, Grow, Revert)}
	h.c = newCluster(t, h.kind)
	h.original = h.workload().num("spec", "replicas")
	if rnd.IntN(2) == 0 {
		h.c.addNode("n2")
	}
	h.c.slow = oneOf(rnd, 0, 0, 30)
	h.c.put(`{"kind":"Job","apiVersion":"batch/v1","metadata":{"name":"nightly","namespace":"db"}}`)
	h.c.put(`{"kind":"Cluster","apiVersion":"x/v1","metadata":{"name":"pg","namespace":"db"}}`)
	h.policy = oneOf(rnd, "Retain", "Delete", "Delete", "Delete")
	h.c.touch(h.c.named("StorageClass", "", "oxide-disk"), h.policy, "reclaimPolicy")
	for _, pv := range h.c.of("PersistentVolume") {
		h.c.touch(pv, h.policy, "spec", "persistentVolumeReclaimPolicy")
	}
	h.start()
	h.c.passes(30)
	h.left, h.killsLeft = rnd.IntN(5), rnd.IntN(4)
	names := slices.Sorted(maps.Keys(actors))
	if rnd.IntN(4) == 0 {
		names = slices.DeleteFunc(names, func(name string) bool {
			return !strings.Contains(strings.ToLower(name), "node") && !strings.Contains(name, "pod")
		})
	}
	for range 1 + rnd.IntN(3) {
		h.may = append(h.may, oneOf(rnd, names...))
	}
	h.log("seed %d: %s of the claim of a %s, with %v", seed, h.verb, h.kind, h.may)
	h.c.before = h.between
	return h
}

func (h *history) workload() object {
	return slices.Concat(h.c.of("Deployment"), h.c.of("StatefulSet"), []object{nil})[0]
}

// start() does what a person does to start the workload, or the pod that uses the claim.
func (h *history) start() bool {
	h.paused = false
	switch w := h.workload(); {
	case h.kind == "job":
		return h.c.pod("nightly-0", h.c.claim, h.c.named("Job", "db", "nightly"), "")
	case h.kind == "operator":
		return h.c.pod("pg-1", h.c.claim, h.c.named("Cluster", "db", "pg"), "")
	case w != nil:
		return w.num("spec", "replicas") < h.original && h.rescale(h.original)
	}
	// newHistory creates no pod for the kind "none". While newHistory runs, h.c.before is nil.
	return (h.kind != "none" || h.c.before != nil) && h.c.pod("shell", h.c.claim, nil, "")
}

func (h *history) rescale(to int64) bool {
	w := h.workload()
	if h.scaled = true; w != nil {
		h.c.touch(w, float64(to), "spec", "replicas")
	}
	return w != nil
}

// stops() does what a person does to stop the workload: no pod uses the claim any more.
func (h *history) stops() bool {
	h.paused = true
	h.rescale(0)
	pods := holders(h.c.of("Pod"), h.c.claim)
	for _, pod := range pods {
		if h.c.erase(pod); ended(pod) {
			delete(h.c.objects, keyOf(pod))
		}
	}
	return len(pods) > 0
}

// deletePods deletes by force the pods that use the claim. Their containers still run for a while.
func (h *history) deletePods() bool {
	pods := holders(h.c.of("Pod"), h.c.claim)
	for _, pod := range pods {
		delete(h.c.objects, keyOf(pod))
	}
	return len(pods) > 0
}

// cutsOff makes the API server unreachable for a node's kubelet. The containers continue to run.
func (h *history) cutsOff() bool { h.c.nodes["n1"].silent = true; return true }

// userDeletes deletes a claim. If that deletes the claim's disk, its writes are allowed to be lost.
func (h *history) userDeletes(claim object) bool {
	pv := h.c.volume(claim.str("spec", "volumeName"))
	if pv.policy() == "Delete" || h.next == "patch" {
		// A patch that the command is about to send may set the reclaim policy to Delete.
		h.c.giveUp(handleOf(pv))
	}
	if h.meddled = true; claim != nil {
		h.c.erase(claim)
	}
	return claim != nil
}

func webhook(admits func(c *cluster, claim object) error) func(h *history) bool {
	return func(h *history) bool { h.c.admits = admits; return true }
}

func sets(value any, path ...string) func(*cluster, object) error {
	return func(c *cluster, claim object) error { c.touch(claim, value, path...); return nil }
}

func denies(_ *cluster, o object) error { return refused("Forbidden", "%s is denied", o.name()) }

// actors contains what may happen between two requests. A function reports whether it did anything.
var actors = map[string]func(h *history) bool{
	"somebody starts the workload": (*history).start,
	"somebody stops the workload":  (*history).stops,
	"a job runs": func(h *history) bool {
		return h.c.pod(fmt.Sprint("once-", h.c.next()), h.c.claim, h.c.named("Job", "db", "nightly"),
			`"ends-at":"soon"`)
	},
	"a pod without the claim runs": func(h *history) bool { return h.c.pod("other", "", nil, "") },
	"a synchronization scales the workload": func(h *history) bool {
		return h.workload().num("spec", "replicas") != h.original && h.rescale(h.original)
	},
	"somebody makes the claim again": func(h *history) bool {
		return h.c.current() == nil && !h.c.named("Namespace", "", "db").deleting() &&
			h.c.put(claimText, h.c.claim, "10Gi") != nil
	},
	"the workload is made again": func(h *history) bool {
		w := h.workload()
		if w != nil {
			h.c.erase(w)
			h.c.put(workloadText, w.str("kind"), 0)
		}
		return h.rescale(h.original)
	},
	"a webhook drops the data source": webhook(sets(nil, "spec", "dataSource")),
	"a webhook makes claims smaller": webhook(sets("5Gi", "spec", "resources", "requests",
		"storage")),
	"a webhook makes claims larger": webhook(sets("30Gi", "spec", "resources", "requests",
		"storage")),
	"a webhook refuses claims": webhook(denies),
	"a webhook refuses the claim": webhook(func(c *cluster, o object) error {
		if o.name() == c.claim {
			return denies(c, o)
		}
		return nil
	}),
	"a foreign volume is reserved for the temporary claim": func(h *history) bool {
		return h.last.ID != "" && h.foreignVolume(h.c.claim+"-"+h.verb+"-"+h.last.ID)
	},
	"a foreign volume is reserved for the claim": func(h *history) bool {
		return h.foreignVolume(h.c.claim)
	},
	"a Node is deleted":         func(h *history) bool { return h.deleteNode() },
	"a node is cut off":         (*history).cutsOff,
	"pods are deleted by force": (*history).deletePods,
	"a node is cut off and its pods are deleted by force": func(h *history) bool {
		return h.cutsOff() && h.deletePods()
	},
	"a node is cut off and its Node lists no volumes": func(h *history) bool {
		if node := h.c.named("Node", "", "n1"); node != nil {
			h.c.touch(node, []any{}, "status", "volumesInUse")
		}
		return h.cutsOff() && h.deletePods()
	},
	"a Node is made again and lists nothing": func(h *history) bool {
		if h.deleteNode() {
			h.c.addNode("n1")
		}
		return h.cutsOff() && h.deletePods()
	},
	"the snapshot is replaced": func(h *history) bool {
		shot := h.c.named("VolumeSnapshot", "db", "then")
		if shot == nil {
			return false
		}
		content, handle := h.c.contentOf(shot), "shot-"+h.c.next()
		h.c.shots[handle] = " 0" + h.c.taken("then")
		delete(h.c.shots, content.str("status", "snapshotHandle"))
		again := h.c.put(shotText, "then", h.c.claim)
		again["status"] = shot["status"]
		h.c.add(content) // it has the same name, and another UID
		h.c.touch(content, handle, "status", "snapshotHandle")
		h.c.touch(content, again.uid(), "spec", "volumeSnapshotRef", "uid")
		return true
	},
	"the namespace is deleted": func(h *history) bool {
		space := h.c.named("Namespace", "", "db")
		if space == nil || space.deleting() {
			return false
		}
		for _, claim := range h.c.of("PersistentVolumeClaim") {
			h.userDeletes(claim)
		}
		h.meddled = true
		h.c.erase(space)
		return true
	},
	"somebody deletes the claim": func(h *history) bool { return h.userDeletes(h.c.current()) },
	"somebody deletes what the command has made": func(h *history) bool {
		for _, o := range slices.Concat(h.c.of("VolumeSnapshot"), h.c.of("PersistentVolumeClaim")) {
			switch {
			case !h.c.own[o.uid()] || h.rnd.IntN(2) == 0:
			case o.name() == h.c.claim:
				return h.userDeletes(o)
			default:
				h.excuse()
				h.c.erase(o)
				return true
			}
		}
		return false
	},
	"the rack has no room": func(h *history) bool { h.c.quota = 15 << 30; return true },
	"reads fail": func(h *history) bool {
		n := 0
		h.c.lacks = func(right string) bool { n++; return right[:4] == "get " && n < 4 }
		return true
	},
	"controllers write": func(h *history) bool {
		for _, kind := range []string{"PersistentVolume", "PersistentVolumeClaim", "Deployment"} {
			for _, o := range h.c.of(kind) {
				h.c.touch(o, "x", "metadata", "resourceVersion")
			}
		}
		return true
	},
	"another run begins": func(h *history) bool {
		if h.second != nil {
			return false
		}
		o := h.options(oneOf(h.rnd, "continue", "undo", "undo", "begin", "other", "forget"))
		requests := func(yield func(struct{}) bool) {
			kubectl, killed := h.calls(0, ""), false
			o.Kubectl = func(ctx context.Context, stdin []byte, args ...string) ([]byte, error) {
				if killed = killed || !yield(struct{}{}); killed {
					return nil, errKilled
				}
				return kubectl(ctx, stdin, args...)
			}
			h.log("      the other run ends: %v", Run(context.Background(), o, io.Discard))
		}
		next, stop := iter.Pull(requests)
		h.second, h.stop = func() bool { _, more := next(); return more }, stop
		h.log("    the other run is %s continue=%t undo=%t", o.Verb, o.Continue, o.Undo)
		return true
	},
}

func (h *history) deleteNode() bool {
	node := h.c.named("Node", "", "n1")
	if node != nil {
		h.c.erase(node)
		h.c.erase(h.c.named("CSINode", "", "n1"))
	}
	return node != nil
}

func (h *history) foreignVolume(claim string) bool {
	path := "/srv/" + h.c.next()
	h.c.disks[path] = "of others"
	h.c.put(`{"kind":"PersistentVolume","metadata":{"name":%q},"spec":{"capacity":{"storage":"50Gi"},
		"persistentVolumeReclaimPolicy":"Delete","storageClassName":"oxide-disk","hostPath":{"path":%q},
		"claimRef":{"namespace":"db","name":%q}}}`, "a"+path[5:], path, claim)
	return true
}

// between() is called before each request of the command. At random, it lets somebody else act.
func (h *history) between(verb string) {
	if h.busy {
		return
	}
	h.busy = true
	defer func() { h.busy = false }()
	h.plan()
	h.next = verb
	if h.kind == "operator" && !h.paused && h.rnd.IntN(10) == 0 {
		h.start()
	}
	if len(h.late) > 0 && h.rnd.IntN(100) == 0 {
		h.comesLate()
	}
	if h.second != nil && h.rnd.IntN(2) == 0 && !h.second() {
		h.second = nil
	}
	rarity := 60
	if verb != "get" {
		rarity = 6
	}
	if h.left > 0 && h.rnd.IntN(rarity) == 0 {
		if name := oneOf(h.rnd, h.may...); actors[name](h) {
			h.left--
			h.acts = append(h.acts, name)
			h.log("  before a %s: %s", verb, name)
		}
	}
}

func (h *history) comesLate() {
	do := h.late[0]
	h.late = h.late[1:]
	h.excuse()
	do()
}

// excuse permits two effects of a late request that creates a temporary claim, which Kubernetes
// deletes later. If the class retains disks, the disk of the claim may stay. Foreign volumes that
// are reserved for the claim may be deleted.
func (h *history) excuse() {
	h.meddled = h.meddled || h.policy == "Retain"
	for _, pv := range h.c.of("PersistentVolume") {
		h.c.dropped[pv.str("spec", "hostPath", "path")] = true
	}
}

func (h *history) plan() *plan {
	p := h.c.plan()
	if p != nil {
		if p.ID != h.last.ID {
			h.then = h.c.taken("then")
		}
		h.last = *p
	}
	return p
}

var other = map[string]string{Grow: Revert, Revert: Grow}

func (h *history) options(mode string) Options {
	o := h.c.options(cmp.Or(map[string]string{"begin": h.verb, "other": other[h.verb]}[mode], mode))
	if o.Continue || o.Undo {
		o.Verb = h.verb
	}
	return o
}

// calls() returns a replacement of kubectl. The parameter dies is the number of the change at which
// the run is killed. If it is 0, the run is not killed.
func (h *history) calls(dies int, how string) func(context.Context, []byte, ...string) ([]byte,
	error) {
	dead, n := false, 0
	return func(ctx context.Context, stdin []byte, args ...string) ([]byte, error) {
		if dead {
			return nil, errKilled
		}
		if args[0] == "get" || args[0] == "auth" || slices.Contains(args, "--dry-run=server") ||
			strings.Contains(string(stdin), `"dryRun"`) {
			return h.c.kubectl(ctx, stdin, args...)
		}
		what := args[0] + " " + strings.Join(args[1:min(3, len(args))], " ")
		if args[0] == "create" {
			var o object
			_ = json.Unmarshal(stdin, &o)
			what = "create " + keyOf(o)
		}
		act := func() error {
			_, err := h.c.kubectl(ctx, stdin, args...)
			h.log("    %s: %.90v", what, err)
			return err
		}
		if n++; n != dies {
			return nil, act()
		}
		dead = true
		h.kills++
		h.log("    killed %s %s", how, what)
		switch how {
		case "while":
			h.late = append(h.late, func() { h.log("    late:"); _ = act() })
		case "after":
			_ = act()
		}
		return nil, errKilled
	}
}

func (h *history) run(mode string) error {
	o, dies := h.options(mode), 0
	if h.killsLeft > 0 {
		h.killsLeft--
		dies = 1 + h.rnd.IntN(16)
	}
	o.Kubectl = h.calls(dies, oneOf(h.rnd, "before", "after", "while"))
	if p := h.plan(); mode == "forget" && p != nil && p.Finished {
		delete(h.c.kept, p.Handle) // the user gives up the earlier disk
		if p.Verb == Revert {
			h.c.giveUp(p.Handle)
		}
		if h.policy == "Retain" {
			delete(h.c.origin, p.Handle) // the disk stays, and belongs to the user
		}
	}
	h.log("run: %s", mode)
	err := Run(context.Background(), o, io.Discard)
	h.log("  ended: %v", err)
	return err
}

// calm ends all faults, as if people had repaired the cluster.
func (h *history) calm() {
	h.left, h.c.admits, h.c.quota, h.c.lacks, h.killsLeft = 0, nil, 0, nil, 0
	if h.second != nil {
		h.stop()
		h.second = nil
	}
	for len(h.late) > 0 {
		h.comesLate()
	}
	for _, m := range h.c.nodes {
		if m.silent || m.off || h.c.named("Node", "", m.name) == nil {
			m.silent, m.off = false, true
			h.c.passes(2)
			if m.off = false; h.c.named("Node", "", m.name) == nil {
				h.c.addNode(m.name)
			}
		}
	}
	h.c.passes(60)
}

// follow does what the text of an error demands, and returns the mode of the next run.
func (h *history) follow(text, mode string) string {
	says := func(words string) bool { return strings.Contains(text, words) }
	switch current := h.c.current(); {
	case says("another PersistentVolumeClaim"):
		h.stops()
		h.c.passes(60)
		h.c.giveUp(handleOf(h.c.volume(current.str("spec", "volumeName"))))
		if current != nil {
			h.c.erase(current)
		}
	case says("you to stop"), says("used by"), says("the end of"), says("stop one"),
		says("is being deleted"):
		h.stops()
	case says("start its workload"), says("to run with the new disk"), says("start the workload"):
		h.start()
	case says("give it the reclaim policy Retain"), says("was not made by this change"):
		for _, pv := range h.c.of("PersistentVolume") {
			if pv.str("spec", "hostPath", "path") != "" {
				h.c.touch(pv, "Retain", "spec", "persistentVolumeReclaimPolicy")
			}
		}
	case says("is a revert, not") || says("is a grow, not"):
		h.verb = h.last.Verb
	case says("detached from node"):
		h.c.nodes["n1"].off = true
	}
	h.c.passes(60)
	undo, on := says("--undo"), says("--continue")
	switch {
	case says("claim forget") && !undo && !on:
		return "forget"
	case undo && on:
		return oneOf(h.rnd, "undo", "continue")
	case undo:
		return "undo"
	case on:
		return "continue"
	}
	return mode
}

// play runs the command, and does what its errors demand, until the change is complete or undone.
func (h *history) play(mode string) error {
	for try := 0; ; try++ {
		err := h.run(mode)
		switch {
		case errors.Is(err, errKilled) && h.plan() == nil && mode == "begin":
		case errors.Is(err, errKilled):
			if mode = oneOf(h.rnd, "continue", "undo"); h.last.Finished {
				mode = "forget"
			}
		case err == nil && (h.plan() == nil || h.last.Finished && mode != "forget"):
			return h.end()
		case err == nil:
			mode = "undo"
		case strings.Contains(err.Error(), "by hand") && h.meddled:
			h.ended = "by hand"
			return h.check(false)
		case h.plan() == nil && mode == "begin": // the change was refused
			return h.end()
		default:
			mode = h.follow(err.Error(), mode)
		}
		if err := h.check(false); err != nil {
			return err
		}
		if try >= 4 {
			h.calm()
		}
		if try == 16 {
			return fmt.Errorf("no way out: %w", err)
		}
	}
}

// end checks the state after a change, runs "claim forget", and calls nothingIsLeft.
func (h *history) end() error {
	h.calm()
	p := h.plan()
	done := p != nil
	if h.ended = "undone"; done {
		h.ended, h.verb = "done", p.Verb // perhaps the verb of another run
	}
	if done && !p.Finished {
		return h.play("undo") // a late request has overwritten the finished plan
	}
	w := h.workload()
	switch mark := w.annotation("csi.oxide.computer/claim-change"); {
	case mark != "":
		return fmt.Errorf("the workload has the mark %q left", mark)
	case w != nil && !h.scaled && w.num("spec", "replicas") != h.original:
		return fmt.Errorf("the workload is left with %d replicas", w.num("spec", "replicas"))
	case len(h.acts) == 0 && !h.scaled && h.c.stops > 1:
		return fmt.Errorf("the workload was stopped %d times", h.c.stops)
	}
	h.start()
	h.c.passes(100)
	if err := h.check(!done || h.verb == Grow); err != nil {
		return err
	}
	for try := 0; done && h.plan() != nil; try++ {
		err := h.run("forget")
		if err != nil && strings.Contains(err.Error(), "by hand") && h.meddled {
			h.ended = "by hand"
			return h.check(false)
		}
		h.start()
		if h.c.passes(60); try == 8 {
			return fmt.Errorf("no way out of forget: %w", err)
		}
	}
	h.c.passes(100)
	_ = h.run("continue") // this deletes what a late request has created
	h.c.passes(10)
	if err := h.check(true); err != nil {
		return err
	}
	return h.nothingIsLeft(done)
}

// check returns an error for lost writes and changed foreign objects. If settled is set, the disks
// of the user's claims together must have all acknowledged writes.
func (h *history) check(settled bool) error {
	c := h.c
	switch texts := c.unreachable(false); {
	case c.lost > 0:
		return fmt.Errorf("lost: acknowledged writes are out of reach: %q of %v", c.written, c.disks)
	case len(c.foreign) > 0:
		return fmt.Errorf("foreign: %s", strings.Join(c.foreign, "; "))
	case settled && !h.meddled && len(texts) > 0:
		return fmt.Errorf("lost: no claim of the user has the writes %q, only %v", texts, c.disks)
	}
	return nil
}

// nothingIsLeft checks that the command left no object, and that the claim has the right disk.
func (h *history) nothingIsLeft(done bool) error {
	c := h.c
	for _, key := range slices.Sorted(maps.Keys(c.objects)) {
		o := c.objects[key]
		for _, note := range []string{"claim-plan", "claim-change", "claim-replaces"} {
			if o.annotation("csi.oxide.computer/"+note) != "" {
				return fmt.Errorf("left: %s has the annotation %s", key, note)
			}
		}
		if c.own[o.uid()] && o.name() != h.c.claim {
			return fmt.Errorf("left: %s", key)
		}
		if pv := o; pv.str("kind") == "PersistentVolume" && pv.at("spec", "csi") != nil && !h.meddled &&
			(c.bound(pv) == nil && (h.policy == "Delete" || c.own[c.origin[handleOf(pv)]]) ||
				pv.policy() != h.policy) {
			return fmt.Errorf("left: %s, with the policy %s, bound to %v", key, pv.policy(),
				c.bound(pv).name())
		}
	}
	pv := c.named("PersistentVolume", "", h.c.current().str("spec", "volumeName"))
	text, size := c.disks[handleOf(pv)], pv.str("spec", "capacity", "storage")
	switch {
	case h.meddled || h.c.current() == nil:
	case h.c.current().str("metadata", "labels", "app") != "web",
		h.c.current().annotation("team") != "blue":
		return fmt.Errorf("the claim has other labels or annotations: %v", h.c.current())
	case done && h.verb == Grow && size != "20Gi" && size != "30Gi":
		return fmt.Errorf("the claim has %s", size)
	case done && h.verb == Revert && !strings.HasPrefix(text+" ", h.then+" "):
		return fmt.Errorf("foreign: the claim holds %q, and the snapshot %q", text, h.then)
	}
	return nil
}

// The test plays one history for each seed. PROOF_SEED is the first seed. If PROOF_DURATION is set,
// the test plays histories for that time.
func TestAChangeOfAClaimLosesNoWriteAndTouchesNoForeignObject(t *testing.T) {
	seed, err := strconv.ParseUint(os.Getenv("PROOF_SEED"), 10, 64)
	if err != nil {
		seed = 1
	}
	duration, _ := time.ParseDuration(os.Getenv("PROOF_DURATION"))
	most, began := 600, time.Now()
	if testing.Short() && duration == 0 {
		short.Left(t, most-55)
		most = 55
	}
	var steps, acts, kills, n int
	happened := map[string]int{} // counts acts, and how histories ended or failed
	for ; n < most && duration == 0 || time.Since(began) < duration; n++ {
		var h *history
		synctest.Test(t, func(t *testing.T) { // if this t fails, the whole test ends
			h = newHistory(t, seed+uint64(n))
			if err = h.play("begin"); err == nil && !h.meddled { // another change follows
				h.verb = other[h.verb]
				h.left, h.killsLeft, h.scaled = h.rnd.IntN(3), h.rnd.IntN(2), true
				err = h.play("begin")
			}
			h.calm()
		})
		steps, acts, kills = steps+len(h.lines), acts+len(h.acts), kills+h.kills
		for _, what := range append(h.acts, h.ended) {
			happened[what]++
		}
		if err == nil {
			continue
		}
		failure, _, _ := strings.Cut(err.Error(), ":")
		if failure != "lost" && failure != "foreign" {
			failure = "stuck"
		}
		happened[failure]++
		t.Errorf("%v, repeat with PROOF_SEED=%d:\n%s", err, seed+uint64(n), strings.Join(h.lines, "\n"))
	}
	t.Logf("FIGURE claim-model histories=%d steps=%d actors=%d kills=%d lost=%d foreign=%d "+
		"no_way_out=%d seed=%d", n, steps, acts, kills, happened["lost"], happened["foreign"],
		happened["stuck"], seed)
	t.Log(happened)
	for _, what := range append(slices.Collect(maps.Keys(actors)), "done", "undone") {
		if n >= 600 && happened[what] == 0 {
			t.Errorf("no history has this: %s", what)
		}
	}
}
