package claim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

var errKilled = errors.New("killed")

// cluster simulates kubectl and an API server, and the controllers and kubelets that a change
// needs. Before each read, each controller and kubelet acts once: this is a pass. A disk's content
// is the list of the writes that the disk has acknowledged.
type cluster struct {
	t       *testing.T
	claim   string              // the user's claim, in namespace db
	objects map[string]object   // keys: resource/namespace/name
	disks   map[string]string   // from handles to contents
	shots   map[string]string   // from handles to contents
	nodes   map[string]*machine // keys: the names of their Nodes
	idle    map[string]int      // passes since a pod needed the VolumeAttachment
	quota   int64               // the rack's quota in bytes; zero is unlimited
	flat    bool                // the driver has no topology: the provisioner needs no scheduler
	serial  int64
	age     int // the number of passes so far

	// slow is the number of passes that the provisioner needs to make a disk. It makes the disk even
	// if the claim is deleted meanwhile.
	slow   int
	making []*making

	stops   int
	written []string // the contents that have to be on a disk that the user can reach
	lost    int
	foreign []string          // forbidden changes that the command has made
	own     map[string]bool   // the UIDs of the objects that the command has created
	given   map[string]bool   // the UIDs of the user's objects that the command may change
	origin  map[string]string // from disks to the UIDs of the claims for which they were made
	kept    map[string]bool   // the disks that a claim of the user has, or had
	dropped map[string]bool   // the disks that the user has given up
	stuck   bool              // deleted VolumeSnapshots do not disappear
	lacks   func(string) bool // reports whether the user lacks a right, such as "create pods"
	needed  map[string]bool   // the rights that the command's changes needed

	// before() is called before each command of kubectl. admits() refuses or changes a claim that is
	// to be created, as a webhook does.
	before func(verb string)
	admits func(c *cluster, claim object) error
}

type making struct {
	claim               object
	shot, content, size string
	left                int // passes until the disk is made
}

// machine is an instance with a kubelet. If its Node object is deleted, the instance still runs.
type machine struct {
	name        string
	off, silent bool            // the instance is stopped; the API server is unreachable
	disks       map[string]int  // 0: only listed in volumesInUse; n+1: mounted, unused for n passes
	runs        map[string]bool // the disks to which containers write
	age, quiet  int             // passes so far; passes since the last status of the Node
}

func (c *cluster) put(text string, args ...any) object {
	var o object
	if err := json.Unmarshal(fmt.Appendf(nil, text, args...), &o); err != nil {
		c.t.Fatalf("%v: %s", err, text)
	}
	c.add(o)
	return o
}

func (c *cluster) next() string { c.serial++; return strconv.FormatInt(c.serial, 10) }

func (c *cluster) add(o object) {
	meta := o["metadata"].(map[string]any)
	meta["uid"], meta["resourceVersion"] = "u"+c.next(), c.next()
	if o["status"] == nil {
		o["status"] = map[string]any{}
	}
	c.objects[keyOf(o)] = o
}

func keyOf(o object) string {
	return strings.ToLower(o.str("kind")) + "/" + o.str("metadata", "namespace") + "/" + o.name()
}

func (c *cluster) of(kind string) []object {
	prefix := strings.ToLower(kind) + "/"
	found := []object{}
	for key, o := range c.objects {
		if strings.HasPrefix(key, prefix) {
			found = append(found, o)
		}
	}
	slices.SortFunc(found, func(a, b object) int { return strings.Compare(keyOf(a), keyOf(b)) })
	return found
}

func (c *cluster) named(kind, namespace, name string) object {
	return c.objects[strings.ToLower(kind)+"/"+namespace+"/"+name]
}

func (c *cluster) volume(name string) object { return c.named("PersistentVolume", "", name) }

func (c *cluster) current() object { return c.named("PersistentVolumeClaim", "db", c.claim) }

func (c *cluster) claimOf(o object, name string) object {
	return c.named("PersistentVolumeClaim", o.str("metadata", "namespace"), name)
}

// touch sets a field of an object, as a controller does. If the value is nil, it removes the field.
func (c *cluster) touch(o object, value any, path ...string) {
	if reflect.DeepEqual(o.at(path...), value) {
		return
	}
	for _, key := range slices.Backward(path) {
		value = map[string]any{key: value}
	}
	merge(o, value.(map[string]any))
	o["metadata"].(map[string]any)["resourceVersion"] = c.next()
}

func (c *cluster) kubectl(_ context.Context, stdin []byte, args ...string) ([]byte, error) {
	flags := map[string]string{}
	var operands []string
	for _, arg := range args {
		if name, value, _ := strings.Cut(arg, "="); strings.HasPrefix(name, "--") {
			flags[name] = value
		} else {
			operands = append(operands, arg)
		}
	}
	if c.before != nil {
		c.before(operands[0])
	}
	var body object
	if err := json.Unmarshal(stdin, &body); err != nil && stdin != nil {
		c.t.Fatal(err)
	}
	verb, namespace := operands[0], flags["--namespace"]
	dry := flags["--dry-run"] != "" || body.at("dryRun") != nil
	switch verb {
	case "auth": // can-i
		verb, operands, dry = operands[2], operands[2:], true
	case "create":
		operands = []string{verb, strings.ToLower(body.str("kind")) + "s", body.name()}
		namespace = body.str("metadata", "namespace")
	case "delete":
		path := strings.Split(flags["--raw"], "/")
		operands = path[len(path)-3:]
		namespace = operands[0]
	}
	resource, name := operands[1], strings.Join(operands[2:], "")
	needs := verb + " " + strings.Split(resource, ".")[0]
	switch space := c.named("Namespace", "", namespace); {
	case c.lacks != nil && c.lacks(needs):
		return nil, refused("Forbidden", "cannot %s", needs)
	case verb == "get":
		c.pass()
		return c.read(resource, namespace, name, flags)
	case verb == "create" && space == nil:
		return nil, refused("NotFound", "namespaces %q not found", namespace)
	case verb == "create" && space.deleting():
		return nil, refused("Forbidden", "unable to create new content in namespace %s because it is "+
			"being terminated", namespace)
	case verb == "create" && c.admits != nil && resource == claims:
		if err := c.admits(c, body); err != nil {
			return nil, err
		}
	}
	if dry {
		return nil, nil
	}
	c.needed[needs] = true
	err := c.change(verb, resource, namespace, name, body)
	c.lost += len(c.unreachable(true))
	return nil, err
}

func (c *cluster) change(verb, resource, namespace, name string, body object) error {
	o := c.named(kindOf(resource), namespace, name)
	of := map[string]string{"patch": "metadata", "delete": "preconditions"}[verb]
	uid, version := body.str(of, "uid"), body.str(of, "resourceVersion")
	switch {
	case verb == "create" && o != nil:
		return refused("AlreadyExists", "%s %q already exists", o.str("kind"), o.name())
	case verb == "create":
		c.add(body)
		c.own[body.uid()] = true
	case o == nil:
		return refused("NotFound", "%s %q not found", resource, name)
	case uid != "" && uid != o.uid():
		return refused("Conflict", "Precondition failed: UID in precondition: %s, UID in object meta: %s",
			uid, o.uid())
	case version != "" && version != o.str("metadata", "resourceVersion"):
		return refused("Conflict", "Operation cannot be fulfilled on %s %q: the object has been "+
			"modified; please apply your changes to the latest version and try again", resource, name)
	case verb == "patch":
		c.patch(o, body)
	case verb == "delete":
		c.mayChange("delete", o)
		c.erase(o)
	default:
		c.t.Fatalf("kubectl %s is not known here", verb)
	}
	return nil
}

// kindOf returns the kind of a resource in lower case and singular, as in the keys of objects.
func kindOf(resource string) string {
	kind, _, _ := strings.Cut(resource, ".")
	return strings.TrimSuffix(strings.NewReplacer("ies", "ys", "sses", "sss").Replace(kind), "s")
}

// read returns an object, or a list if name is "". For cluster-wide kinds, namespace is "".
func (c *cluster) read(resource, namespace, name string, flags map[string]string) ([]byte, error) {
	kind, fields := kindOf(resource), flags["--field-selector"]
	_, everywhere := flags["--all-namespaces"]
	if o := c.named(kind, namespace, name); o != nil {
		return json.Marshal(o)
	} else if name != "" { // as with --ignore-not-found
		return nil, nil
	}
	return json.Marshal(object{"kind": "List", "items": slices.DeleteFunc(c.of(kind),
		func(o object) bool {
			return !everywhere && o.str("metadata", "namespace") != namespace ||
				fields != "" && !strings.HasSuffix(fields, "="+o.str("involvedObject", "name"))
		})})
}

func refused(reason, text string, args ...any) error {
	return fmt.Errorf("exit status 1: Error from server (%s): %s", reason, fmt.Sprintf(text, args...))
}

func merge(into, change map[string]any) {
	for key, value := range change {
		fields, isMap := value.(map[string]any)
		switch have, _ := into[key].(map[string]any); {
		case value == nil:
			delete(into, key)
		case isMap:
			if have == nil {
				have = map[string]any{}
				into[key] = have
			}
			merge(have, fields)
		default:
			into[key] = value
		}
	}
}

func (c *cluster) patch(o, change object) {
	plan := "csi.oxide.computer/claim-plan"
	if o.str("kind") == "PersistentVolume" && o.annotation(plan) == "" &&
		change.annotation(plan) != "" && o.str("spec", "claimRef", "name") == c.claim {
		// Of the user's objects, the command may change only this volume, its claim and the workloads.
		c.given = map[string]bool{o.uid(): true, o.str("spec", "claimRef", "uid"): true}
		for _, w := range append(c.of("Deployment"), c.of("StatefulSet")...) {
			c.given[w.uid()] = true
		}
	}
	c.mayChange("patch", o)
	replicas := o.num("spec", "replicas")
	merge(o, change)
	c.touch(o, "x", "metadata", "resourceVersion")
	if o.num("spec", "replicas") < replicas {
		c.stops++
	}
}

// mayChange records a change as forbidden unless the command created the object or the user wants
// the command to change it.
func (c *cluster) mayChange(verb string, o object) {
	made := c.own[o.uid()] && (verb != "delete" || o.name() != c.claim ||
		o.str("status", "phase") != "Bound") // the user may have written to the new disk
	if !made && !c.given[o.uid()] && !c.own[c.origin[handleOf(o)]] {
		c.foreign = append(c.foreign, fmt.Sprintf("the command made a %s of %s (%s)", verb, keyOf(o),
			o.uid()))
	}
}

// erase deletes an object, or only marks it if a controller has to complete the deletion.
func (c *cluster) erase(o object) {
	c.touch(o, "2026-01-01T00:00:00Z", "metadata", "deletionTimestamp")
	switch o.str("kind") {
	case "Pod", "PersistentVolumeClaim", "PersistentVolume", "VolumeSnapshot", "Namespace":
	default:
		delete(c.objects, keyOf(o))
	}
}

func (c *cluster) pass() {
	each := func(kind string, sync func(object)) {
		for _, o := range c.of(kind) {
			sync(o)
		}
	}
	each("Deployment", c.runWorkload)
	each("StatefulSet", c.runWorkload)
	each("Pod", c.schedule)
	each("PersistentVolumeClaim", c.syncClaim)
	c.making = slices.DeleteFunc(c.making, c.made)
	c.syncAttachments()
	for _, name := range slices.Sorted(maps.Keys(c.nodes)) {
		c.runMachine(c.nodes[name])
	}
	each("PersistentVolume", c.syncVolume)
	each("VolumeSnapshot", c.syncSnapshot)
	if c.age++; c.age%4 == 0 {
		c.collect()
	}
	c.lost += len(c.unreachable(true))
}

// passes() simulates n passes. After 60, the controllers and kubelets have nothing left to do.
func (c *cluster) passes(n int) {
	for range n {
		c.pass()
	}
}

// collect deletes the objects in a deleted namespace, and the objects all of whose owners are gone.
func (c *cluster) collect() {
	uids, rest := map[string]bool{}, map[string]bool{}
	for _, o := range c.objects {
		uids[o.uid()] = true
		rest[o.str("metadata", "namespace")] = true
	}
	for _, key := range slices.Sorted(maps.Keys(c.objects)) {
		o, owned := c.objects[key], false
		owners := o.list("metadata", "ownerReferences")
		for _, owner := range owners {
			owned = owned || uids[owner.str("uid")] || owner.str("uid") == "" // a pod without an owner
		}
		switch space := c.named("Namespace", "", o.str("metadata", "namespace")); {
		case o.str("kind") == "Namespace" && o.deleting() && !rest[o.name()]:
			delete(c.objects, key)
		case !o.deleting() && (space.deleting() || len(owners) > 0 && !owned):
			c.erase(o)
		}
	}
}

func claimOfPod(pod object) string {
	return pod.list("spec", "volumes")[0].str("persistentVolumeClaim", "claimName")
}

func ended(pod object) bool {
	return pod.str("status", "phase") == "Succeeded" || pod.str("status", "phase") == "Failed"
}

func (c *cluster) volumeOfPod(pod object) (pv object, handle string) {
	claim := c.claimOf(pod, claimOfPod(pod))
	pv = c.volume(claim.str("spec", "volumeName"))
	return pv, handleOf(pv)
}

func handleOf(pv object) string {
	return pv.str("spec", "csi", "volumeHandle") + pv.str("spec", "hostPath", "path")
}

func (c *cluster) runWorkload(w object) {
	set, want, n := w.str("kind") == "StatefulSet", map[string]bool{}, 0.0
	for i := range w.num("spec", "replicas") {
		name := fmt.Sprintf("%s-%d", w.name(), i)
		claim := "data"
		if set {
			claim = "data-" + name
		}
		want[name] = true
		if c.pod(name, claim, w, "") && set && c.named("PersistentVolumeClaim", "db", claim) == nil {
			c.put(claimText, claim, "10Gi")
		}
	}
	for _, pod := range c.of("Pod") {
		if pod.controller().str("uid") == w.uid() {
			if n++; !want[pod.name()] {
				c.erase(pod)
			}
		}
	}
	c.touch(w, n, "status", "replicas")
}

// pod creates a pod. If claim is not "", the pod uses the claim. If owner is not nil, it controls
// the pod. In a namespace that is being deleted, pod creates nothing and returns false.
func (c *cluster) pod(name, claim string, owner object, notes string) bool {
	space := c.named("Namespace", "", "db")
	if c.named("Pod", "db", name) != nil || space == nil || space.deleting() {
		return false
	}
	c.put(`{"kind":"Pod","metadata":{"name":%q,"namespace":"db","annotations":{%s},"ownerReferences":[
		{"controller":%t,"apiVersion":%q,"kind":%q,"name":%q,"uid":%q}]},"spec":{"volumes":[{
		"persistentVolumeClaim":{"claimName":%q}}]},"status":{"phase":"Pending"}}`, name, notes,
		owner != nil, owner.str("apiVersion"), owner.str("kind"), owner.name(), owner.uid(), claim)
	return true
}

func (c *cluster) ready() []object {
	return slices.DeleteFunc(c.of("Node"), func(n object) bool {
		return n.list("status", "conditions")[0].str("status") != "True"
	})
}

func (c *cluster) schedule(pod object) {
	node := c.named("Node", "", pod.str("spec", "nodeName"))
	switch claim, nodes := c.claimOf(pod, claimOfPod(pod)), c.ready(); {
	case pod.str("spec", "nodeName") != "" && node != nil:
	case pod.str("spec", "nodeName") != "" || pod.deleting():
		delete(c.objects, keyOf(pod)) // the pod's Node is gone, or the pod never had one
	case len(nodes) == 0 || claimOfPod(pod) != "" && (claim == nil || claim.deleting()):
	case claim == nil || claim.str("status", "phase") == "Bound":
		c.touch(pod, nodes[int(c.serial)%len(nodes)].name(), "spec", "nodeName")
	case claim.annotation(selectedNode)+claim.str("spec", "volumeName") == "":
		c.touch(claim, nodes[0].name(), "metadata", "annotations", selectedNode)
	}
}

func inUse(handle string) any { return "kubernetes.io/csi/" + volume.DriverName + "^" + handle }

// syncAttachments attaches disks to the nodes of pods that use them. It detaches a disk after the
// unmount. If a node is lost, it detaches the disk later, although the instance may still run.
func (c *cluster) syncAttachments() {
	attached := map[string]bool{}
	for _, va := range c.of("VolumeAttachment") {
		attached[va.str("spec", "source", "persistentVolumeName")] = true
		c.idle[va.name()]++
	}
	for _, pod := range c.of("Pod") {
		pv, _ := c.volumeOfPod(pod)
		node := pod.str("spec", "nodeName")
		if node == "" || ended(pod) || pv.str("spec", "csi", "driver") == "" {
			continue
		}
		name := "csi-" + pv.name() + "-" + node
		if c.idle[name] = 0; !attached[pv.name()] {
			c.put(`{"kind":"VolumeAttachment","metadata":{"name":%q},"spec":{"attacher":%q,"nodeName":%q,
				"source":{"persistentVolumeName":%q}},"status":{"attached":true}}`, name, volume.DriverName,
				node, pv.name())
			attached[pv.name()] = true
		}
	}
	for _, va := range c.of("VolumeAttachment") {
		handle := handleOf(c.volume(va.str("spec", "source", "persistentVolumeName")))
		name, idle := va.str("spec", "nodeName"), c.idle[va.name()]
		used, _ := c.named("Node", "", name).at("status", "volumesInUse").([]any)
		m, listed := c.nodes[name], slices.Contains(used, inUse(handle))
		lost := !slices.ContainsFunc(c.ready(), func(n object) bool { return n.name() == name })
		if idle > 0 && m.off || idle > 5 && m.disks[handle] == 0 && !listed ||
			idle > takenAfter && lost {
			delete(m.disks, handle)
			delete(m.runs, handle)
			delete(c.idle, va.name())
			delete(c.objects, keyOf(va))
		}
	}
}

const (
	// unmountsAfter is the number of passes that a node takes to unmount a disk that no pod uses.
	unmountsAfter = 20
	// After lostAfter passes without a report, a node is not ready. Its disks are detached after
	// takenAfter passes without a pod.
	lostAfter, takenAfter = 120, 250
)

func (c *cluster) runMachine(m *machine) {
	node := c.named("Node", "", m.name)
	switch m.age++; {
	case m.off:
		m.disks, m.runs = map[string]int{}, map[string]bool{}
		fallthrough
	case m.silent || node == nil:
		if m.quiet++; m.quiet > lostAfter && node != nil {
			c.touch(node, "Unknown", "status", "state")
			node.list("status", "conditions")[0]["status"] = "Unknown"
		}
	default:
		c.runPods(m, node)
	}
	for _, handle := range slices.Sorted(maps.Keys(m.runs)) {
		if m.age%7 == 0 {
			c.write(handle)
		}
	}
}

// runPods is a kubelet's pass. The Node lists a disk from before its mount until after its unmount.
func (c *cluster) runPods(m *machine, node object) {
	used, changed := map[string]bool{}, m.age%10 == 0 || m.quiet > 0
	for _, pod := range c.of("Pod") {
		if pod.str("spec", "nodeName") != m.name || ended(pod) {
			continue
		}
		pv, handle := c.volumeOfPod(pod)
		va := c.named("VolumeAttachment", "", "csi-"+pv.name()+"-"+m.name)
		state, listed := m.disks[handle]
		switch used[handle] = true; {
		case pod.deleting():
			if m.runs[handle] {
				c.write(handle) // the container saves its state
			}
			delete(m.runs, handle)
			delete(c.objects, keyOf(pod))
		case pod.annotation("ends-at") != "" && m.runs[handle]:
			c.write(handle)
			delete(m.runs, handle)
			c.touch(pod, "Succeeded", "status", "phase")
		case pod.str("status", "phase") == "Running":
			m.runs[handle] = handle != ""
		case pv.str("spec", "csi", "driver") != "" && va == nil: // the volume is not attached yet
		case handle != "" && !listed:
			m.disks[handle], changed = 0, true
		case handle != "" && state == 0:
			m.disks[handle] = 1
		default:
			c.touch(pod, "Running", "status", "phase")
			if m.runs[handle] = handle != ""; handle != "" {
				c.write(handle)
			}
		}
	}
	for handle, state := range m.disks {
		switch m.disks[handle]++; {
		case used[handle]:
			m.disks[handle] = min(state, 1)
		case state == 0, state == unmountsAfter:
			delete(m.disks, handle)
			changed = true
			fallthrough
		case state == unmountsAfter/2:
			// The containers of a pod that was deleted by force end only now.
			delete(m.runs, handle)
		}
	}
	if changed {
		m.quiet = 0
		listed := []any{}
		for _, handle := range slices.Sorted(maps.Keys(m.disks)) {
			listed = append(listed, inUse(handle))
		}
		c.touch(node, listed, "status", "volumesInUse")
		c.touch(node, []any{map[string]any{"type": "Ready", "status": "True", "lastHeartbeatTime": time.
			Unix(1e9+c.serial, 0).UTC().Format(time.RFC3339)}}, "status", "conditions")
	}
}

func (c *cluster) write(handle string) {
	was, exists := c.disks[handle]
	if !exists {
		return
	}
	if c.disks[handle] = was + " " + c.next(); c.dropped[handle] {
		return
	}
	c.written = slices.DeleteFunc(c.written, func(text string) bool {
		return strings.HasPrefix(c.disks[handle]+" ", text+" ")
	})
	c.written = append(c.written, c.disks[handle])
}

// giveUp allows the writes of a disk to be lost, because the user has given up the disk.
func (c *cluster) giveUp(handle string) {
	delete(c.kept, handle)
	c.dropped[handle] = true
	c.written = slices.DeleteFunc(c.written, func(text string) bool {
		return strings.HasPrefix(c.disks[handle]+" ", text+" ")
	})
}

func (c *cluster) bound(pv object) object {
	claim := c.named("PersistentVolumeClaim", pv.str("spec", "claimRef", "namespace"),
		pv.str("spec", "claimRef", "name"))
	if claim.uid() != pv.str("spec", "claimRef", "uid") {
		return nil
	}
	return claim
}

func (c *cluster) temporary(claim object) bool {
	return c.own[claim.uid()] && claim.name() != c.claim
}

// unreachable returns the acknowledged writes that are on no disk within the user's reach. A disk
// is within reach if its PersistentVolume is bound to a claim of the user or, if retained is set,
// has the reclaim policy Retain.
func (c *cluster) unreachable(retained bool) []string {
	var reachable []string
	for _, pv := range c.of("PersistentVolume") {
		claim := c.bound(pv)
		if text, exists := c.disks[handleOf(pv)]; exists && (claim != nil && !c.temporary(claim) ||
			retained && pv.policy() == "Retain") {
			reachable = append(reachable, text+" ")
		}
	}
	return slices.DeleteFunc(slices.Clone(c.written), func(text string) bool {
		return slices.ContainsFunc(reachable, func(disk string) bool {
			return strings.HasPrefix(disk, text+" ")
		})
	})
}

func (c *cluster) syncClaim(claim object) {
	if claim.deleting() {
		if !slices.ContainsFunc(c.of("Pod"), func(pod object) bool {
			return pod.str("spec", "nodeName") != "" && claimOfPod(pod) == claim.name()
		}) && !slices.ContainsFunc(c.of("VolumeSnapshot"), func(shot object) bool {
			// Kubernetes keeps a claim (pvc-as-source-protection) until its snapshots are ready.
			return shot.str("spec", "source", "persistentVolumeClaimName") == claim.name() &&
				shot.at("status", "readyToUse") != true && !shot.deleting()
		}) {
			delete(c.objects, keyOf(claim))
		}
		return
	}
	pv := c.volume(claim.str("spec", "volumeName"))
	if claim.str("spec", "volumeName") == "" {
		for _, o := range c.of("PersistentVolume") {
			if pv == nil && o.at("spec", "claimRef") != nil && reservedFor(o, claim) {
				pv = o
			}
		}
	}
	switch was := claim.str("status", "phase"); {
	case pv != nil && reservedFor(pv, claim):
		c.bind(pv, claim)
	case was == "Bound":
		c.touch(claim, "Lost", "status", "phase")
	case claim.str("spec", "volumeName") == "" && claim.annotation(selectedNode) != "":
		c.provision(claim)
	}
}

// reservedFor reports whether a volume is reserved for this claim or for no claim.
func reservedFor(pv, claim object) bool {
	ref := func(key string) string { return pv.str("spec", "claimRef", key) }
	return pv.at("spec", "claimRef") == nil || ref("name") == claim.name() && ref("namespace") ==
		claim.str("metadata", "namespace") && (ref("uid") == "" || ref("uid") == claim.uid())
}

func (c *cluster) bind(pv, claim object) {
	handle := handleOf(pv)
	if claim.str("status", "phase") != "Bound" && c.own[claim.uid()] && !c.given[pv.uid()] &&
		!c.own[c.origin[handle]] && claim.name() == c.claim {
		c.foreign = append(c.foreign, "the claim made again was bound to "+pv.name())
	}
	if !c.temporary(claim) {
		c.kept[handle] = true
	}
	c.touch(pv, map[string]any{"namespace": claim.str("metadata", "namespace"), "name": claim.name(),
		"uid": claim.uid()}, "spec", "claimRef")
	c.touch(pv, "Bound", "status", "phase")
	c.touch(claim, pv.name(), "spec", "volumeName")
	c.touch(claim, "yes", "metadata", "annotations", "pv.kubernetes.io/bind-completed")
	c.touch(claim, "Bound", "status", "phase")
}

// provision begins to make a disk for a claim. If the rack has no room, provision removes the
// annotation selectedNode, as the provisioner does.
func (c *cluster) provision(claim object) {
	shot := c.named("VolumeSnapshot", claim.str("metadata", "namespace"), claim.str("spec",
		"dataSource", "name"))
	content := c.contentOf(shot)
	if slices.ContainsFunc(c.making, func(m *making) bool { return m.claim.uid() == claim.uid() }) ||
		claim.at("spec", "dataSource") != nil && (shot.at("status", "readyToUse") != true ||
			content == nil || shot.deleting()) {
		return
	}
	size := claim.str("spec", "resources", "requests", "storage")
	used, err := parseSize(size)
	if err != nil {
		c.t.Fatal(err)
	}
	for _, pv := range c.of("PersistentVolume") {
		n, _ := parseSize(pv.str("spec", "capacity", "storage"))
		used += n
	}
	if c.quota > 0 && used > c.quota {
		c.put(`{"kind":"Event","metadata":{"name":"e%s","namespace":"db"},"type":"Warning",
			"involvedObject":{"name":%q},"message":"RackFull: no room","lastTimestamp":"%09d"}`, c.next(),
			claim.name(), c.serial)
		if !c.flat {
			c.touch(claim, nil, "metadata", "annotations", selectedNode)
		}
		return
	}
	handle := content.str("status", "snapshotHandle")
	c.making = append(c.making, &making{claim: claim, left: c.slow, shot: handle,
		content: c.shots[handle], size: size})
}

// made() reports whether the disk exists. The call that counts m.left down to 0 makes the disk,
// even if the claim is gone.
func (c *cluster) made(m *making) bool {
	if m.left--; m.left > 0 {
		return false
	}
	uid, handle := m.claim.uid(), "disk-"+c.next()
	c.disks[handle], c.origin[handle] = m.content, uid
	pv := c.put(pvText, "pvc-"+uid, m.size, handle, m.claim.name(), uid)
	c.touch(pv, m.shot, "spec", "csi", "volumeAttributes", volume.CtxSnapshotID)
	class := c.named("StorageClass", "", "oxide-disk")
	c.touch(pv, class.str("reclaimPolicy"), "spec", "persistentVolumeReclaimPolicy")
	return true
}

func (c *cluster) syncVolume(pv object) {
	if pv.str("spec", "claimRef", "uid") == "" || c.bound(pv) != nil {
		return
	}
	c.touch(pv, "Released", "status", "phase")
	if pv.policy() != "Delete" || slices.ContainsFunc(c.of("VolumeAttachment"), func(va object) bool {
		return va.str("spec", "source", "persistentVolumeName") == pv.name()
	}) {
		return
	}
	handle := handleOf(pv)
	if c.kept[handle] || c.origin[handle] == "" && !c.dropped[handle] {
		c.foreign = append(c.foreign, "the disk of "+pv.name()+" was deleted, which is the user's")
	}
	delete(c.disks, handle)
	delete(c.objects, keyOf(pv))
}

func (c *cluster) contentOf(shot object) object {
	return c.named("VolumeSnapshotContent", "", shot.str("status", "boundVolumeSnapshotContentName"))
}

func (c *cluster) taken(name string) string {
	return c.shots[c.contentOf(c.named("VolumeSnapshot", "db", name)).str("status", "snapshotHandle")]
}

func (c *cluster) syncSnapshot(shot object) {
	content := c.contentOf(shot)
	claim := c.claimOf(shot, shot.str("spec", "source", "persistentVolumeClaimName"))
	pv := c.volume(claim.str("spec", "volumeName"))
	handle := handleOf(pv)
	switch {
	case shot.deleting() && c.stuck || !shot.deleting() && shot.at("status", "readyToUse") == true:
	case shot.deleting():
		if content.str("spec", "deletionPolicy") != "Retain" {
			delete(c.shots, content.str("status", "snapshotHandle"))
			delete(c.objects, keyOf(content))
		}
		delete(c.objects, keyOf(shot))
	case content != nil:
		c.touch(shot, true, "status", "readyToUse")
	case claim.str("status", "phase") == "Bound" && !claim.deleting():
		taken, id := c.disks[handle], "shot-"+c.next()
		for _, m := range c.nodes {
			if m.disks[handle] > 0 && taken != "" {
				taken = taken[:strings.LastIndex(taken, " ")] // the last write is not on the disk yet
				break
			}
		}
		c.shots[id] = taken
		o := c.put(`{"kind":"VolumeSnapshotContent","metadata":{"name":%q},"spec":{"driver":%q,"source":
			{"volumeHandle":%q},"volumeSnapshotRef":{"namespace":"db","name":%q,"uid":%q}},"status":
			{"snapshotHandle":%q,"readyToUse":true}}`, "content-"+shot.uid(), volume.DriverName, handle,
			shot.name(), shot.uid(), id)
		class := c.named("VolumeSnapshotClass", "", shot.str("spec", "volumeSnapshotClassName"))
		c.touch(o, class.str("deletionPolicy"), "spec", "deletionPolicy")
		c.touch(shot, o.name(), "status", "boundVolumeSnapshotContentName")
		c.touch(shot, pv.str("spec", "capacity", "storage"), "status", "restoreSize")
	}
}

const (
	claimText = `{"kind":"PersistentVolumeClaim","apiVersion":"v1","metadata":{"name":%q,"namespace":
		"db","labels":{"app":"web"},"annotations":{"team":"blue","volume.kubernetes.io/selected-node":
		"n1"}},"spec":{"accessModes":["ReadWriteOnce"],"storageClassName":"oxide-disk","volumeMode":
		"Filesystem","resources":{"requests":{"storage":%q}}}}`
	pvText = `{"kind":"PersistentVolume","metadata":{"name":%q},"spec":{"capacity":{"storage":%q},
		"persistentVolumeReclaimPolicy":"Delete","storageClassName":"oxide-disk","csi":{"driver":
		"csi.oxide.computer","volumeHandle":%q},"claimRef":{"namespace":"db","name":%q,"uid":%q}},
		"status":{"phase":"Bound"}}`
	shotText = `{"kind":"VolumeSnapshot","metadata":{"name":%q,"namespace":"db"},"spec":{"source":
		{"persistentVolumeClaimName":%q}}}`
	workloadText = `{"kind":%q,"apiVersion":"apps/v1","metadata":{"name":"web","namespace":"db"},
		"spec":{"replicas":%d}}`
)

// newCluster returns a cluster with a claim, a snapshot of it, and writes after the snapshot. If
// kind is Deployment or StatefulSet, the workload "web" uses the claim. A StatefulSet has three
// pods, the second of which uses the claim.
func newCluster(t *testing.T, kind string) *cluster {
	c := &cluster{t: t, claim: "data", needed: map[string]bool{}, objects: map[string]object{},
		disks: map[string]string{}, shots: map[string]string{}, nodes: map[string]*machine{},
		idle: map[string]int{}, own: map[string]bool{}, given: map[string]bool{},
		origin: map[string]string{}, kept: map[string]bool{}, dropped: map[string]bool{}}
	c.put(`{"kind":"Namespace","metadata":{"name":"db"}}`)
	c.addNode("n1")
	c.put(`{"kind":"StorageClass","metadata":{"name":"oxide-disk"},"provisioner":"csi.oxide.computer",
		"reclaimPolicy":"Delete","volumeBindingMode":"WaitForFirstConsumer"}`)
	c.put(`{"kind":"VolumeSnapshotClass","metadata":{"name":"oxide-snapshot"},"driver":
		"csi.oxide.computer"}`)
	replicas := 1
	if kind == "StatefulSet" {
		c.claim, replicas = "data-web-1", 3
	}
	c.put(claimText, c.claim, "10Gi")
	if kind == "Deployment" || kind == "StatefulSet" {
		c.put(workloadText, kind, replicas)
	}
	c.passes(12)
	handle := handleOf(c.volume(c.current().str("spec", "volumeName")))
	c.write(handle)
	c.put(shotText, "then", c.claim)
	c.passes(2)
	c.write(handle)
	c.passes(60)
	return c
}

// addNode adds a Node. If no instance has its name, it also adds the instance.
func (c *cluster) addNode(name string) {
	c.put(`{"kind":"Node","metadata":{"name":%q},"status":{"conditions":[{"type":"Ready","status":
		"True","lastHeartbeatTime":"2026-01-01T00:00:00Z"}]}}`, name)
	c.put(`{"kind":"CSINode","metadata":{"name":%q},"spec":{"drivers":[{"name":
		"csi.oxide.computer"}]}}`, name)
	if c.nodes[name] == nil {
		c.nodes[name] = &machine{name: name, disks: map[string]int{}, runs: map[string]bool{}}
	}
}
