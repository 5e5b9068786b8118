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

// errKilled is the error of kubectl after the command was killed.
var errKilled = errors.New("killed")

// cluster simulates kubectl and an API server, and the controllers and kubelets that a change
// needs. Before each read, each controller and kubelet acts once: this is a pass. A disk's content
// is the list of the writes that the disk has acknowledged.
type cluster struct {
	t       *testing.T
	claim   string              // the user's claim, in namespace db
	objects map[string]object   // by resource/namespace/name
	disks   map[string]string   // contents, by handle
	shots   map[string]string   // contents, by handle
	nodes   map[string]*machine // the instances, by their Nodes' names
	idle    map[string]int      // passes since a pod needed the VolumeAttachment
	quota   int64               // of the rack, in bytes; zero is unlimited
	flat    bool                // the driver has no topology: the provisioner needs no scheduler
	serial  int64
	passes  int

	// slow is the number of passes that the provisioner needs to make a disk. It makes the disk even
	// if the claim is deleted meanwhile.
	slow   int
	making []*making

	effects int               // the changes that the command has made
	before  func(verb string) // is called before each command of kubectl

	stops    int
	written  []string // the contents that have to be on a disk that the user can reach
	lost     int
	foreign  []string               // forbidden changes that the command has made
	own      map[string]bool        // the UIDs of what the command has created
	given    map[string]bool        // the UIDs of what the user wants to be changed
	origin   map[string]string      // the UID of the claim for which a disk was made
	kept     map[string]bool        // the disks that a claim of the user has, or had
	dropped  map[string]bool        // the disks that the user has given up
	immortal bool                   // no pod ends
	admits   func(o object) error   // refuses or changes what is to be created
	stuck    bool                   // no snapshot ends
	denied   func(kind string) bool // reports whether a kind must not be read
	lacks    func(right) bool       // reports whether the user lacks a right
	needed   map[right]bool         // the rights that the changes needed
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
	mounted     map[string]int  // passes since a pod used the disk
	runs        map[string]bool // the disks to which containers write
	listed      []any           // volumesInUse
	age, quiet  int             // all passes; those since the last status of the Node
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
	var keys []string
	for key := range c.objects {
		if strings.HasPrefix(key, prefix) {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	found := make([]object, len(keys))
	for i, key := range keys {
		found[i] = c.objects[key]
	}
	return found
}

func (c *cluster) named(kind, namespace, name string) object {
	return c.objects[strings.ToLower(kind)+"/"+namespace+"/"+name]
}

func (c *cluster) volume(name string) object { return c.named("PersistentVolume", "", name) }

// current returns the user's claim.
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

// kubectl does on the simulated cluster what kubectl does with these arguments.
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
	verb, namespace := operands[0], flags["--namespace"]
	if verb == "auth" { // can-i
		needs := right{operands[2], strings.Split(operands[3], ".")[0]}
		if c.lacks != nil && c.lacks(needs) {
			return nil, fmt.Errorf("exit status 1: cannot %s %s", needs.verb, needs.resource)
		}
		return []byte("yes"), nil
	}
	var resource, name string
	var body object
	if err := json.Unmarshal(stdin, &body); err != nil && verb != "get" {
		c.t.Fatal(err)
	}
	switch path := strings.Split(flags["--raw"], "/"); {
	case verb == "create":
		resource = strings.ToLower(body.str("kind")) + "s"
		if err := c.admit(body); err != nil {
			return nil, err
		}
	case verb == "delete":
		namespace, resource, name = path[len(path)-3], path[len(path)-2], path[len(path)-1]
	case len(operands) == 3:
		resource, name = operands[1], operands[2]
	default:
		resource = operands[1]
	}
	if verb == "get" {
		c.pass()
		return c.read(resource, namespace, name, flags)
	}
	needs := right{verb, strings.Split(resource, ".")[0]}
	if c.lacks != nil && c.lacks(needs) {
		return nil, refused("Forbidden", "cannot %s %s", verb, resource)
	}
	if flags["--dry-run"] != "" || body.at("dryRun") != nil {
		return nil, nil
	}
	c.needed[needs] = true
	c.effects++
	err := c.change(verb, resource, namespace, name, body)
	c.checkBytes()
	return nil, err
}

// change applies a request. It returns an error if the request's preconditions do not hold.
func (c *cluster) change(verb, resource, namespace, name string, body object) error {
	o := c.named(kindOf(resource), namespace, name)
	of := map[string]string{"patch": "metadata", "delete": "preconditions"}[verb]
	uid, version := body.str(of, "uid"), body.str(of, "resourceVersion")
	switch {
	case verb == "create":
		return c.create(body)
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

// admit returns the error with which an API server or a webhook refuses to create an object.
func (c *cluster) admit(o object) error {
	if ns := o.str("metadata", "namespace"); ns != "" {
		switch space := c.named("Namespace", "", ns); {
		case space == nil:
			return refused("NotFound", "namespaces %q not found", ns)
		case space.deleting():
			return refused("Forbidden", "unable to create new content in namespace %s because it is "+
				"being terminated", ns)
		}
	}
	if c.admits != nil {
		return c.admits(o)
	}
	return nil
}

type right struct{ verb, resource string }

// kindOf returns the kind of a resource in lower case and singular, as in the keys of objects.
func kindOf(resource string) string {
	kind, _, _ := strings.Cut(resource, ".")
	for _, end := range [][2]string{{"ies", "y"}, {"sses", "ss"}, {"s", ""}} {
		if stem, ok := strings.CutSuffix(kind, end[0]); ok {
			return stem + end[1]
		}
	}
	return kind
}

// global are the kinds without a namespace.
var global = []string{"namespace", "node", "csinode", "storageclass", "volumesnapshotclass",
	"persistentvolume", "volumesnapshotcontent", "volumeattachment"}

func (c *cluster) read(resource, namespace, name string, flags map[string]string) ([]byte, error) {
	kind := kindOf(resource)
	_, everywhere := flags["--all-namespaces"]
	switch o := c.named(kind, namespace, name); {
	case (namespace != "") == slices.Contains(global, kind) && !everywhere:
		c.t.Fatalf("get %s has the wrong namespace %v", resource, flags)
	case c.denied != nil && c.denied(kind):
		return nil, errors.New("exit status 1: Forbidden")
	case o != nil:
		return json.Marshal(o)
	case name != "": // as with --ignore-not-found
		return nil, nil
	}
	items := slices.DeleteFunc(c.of(kind), func(o object) bool {
		fields := flags["--field-selector"]
		return namespace != "" && o.str("metadata", "namespace") != namespace ||
			fields != "" && !strings.HasSuffix(fields, "="+o.str("involvedObject", "name"))
	})
	return json.Marshal(object{"kind": "List", "items": append([]object{}, items...)})
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
		// The user wants the command to change this volume, this claim and the workload, and no others.
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

func (c *cluster) create(o object) error {
	if err := c.admit(o); err != nil { // the namespace may be gone when a late request comes
		return err
	}
	if c.objects[keyOf(o)] != nil {
		return refused("AlreadyExists", "%s %q already exists", o.str("kind"), o.name())
	}
	c.add(o)
	c.own[o.uid()] = true
	return nil
}

// erase deletes an object. If a controller has to complete the deletion, it only marks the object.
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
	if c.passes++; c.passes%4 == 0 {
		c.collect()
	}
	c.checkBytes()
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
			owned = owned || uids[owner.str("uid")] || owner.str("uid") == "" // an operator
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
	for _, v := range pod.list("spec", "volumes") {
		return v.str("persistentVolumeClaim", "claimName")
	}
	return ""
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
		if want[name] = true; c.named("Pod", "db", name) != nil ||
			c.named("Namespace", "", "db").deleting() {
			continue
		}
		if set && c.named("PersistentVolumeClaim", "db", claim) == nil {
			c.put(claimText, claim, "10Gi")
		}
		c.put(`{"kind":"Pod","metadata":{"name":%q,"namespace":"db","ownerReferences":[{"controller":
			true,"apiVersion":"apps/v1","kind":%q,"name":%q,"uid":%q}]},"spec":{"volumes":
			[{"persistentVolumeClaim":{"claimName":%q}}]},"status":{"phase":"Pending"}}`, name,
			w.str("kind"), w.name(), w.uid(), claim)
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

// ready returns the Nodes whose condition Ready is true.
func (c *cluster) ready() []object {
	return slices.DeleteFunc(c.of("Node"), func(n object) bool {
		return len(n.list("status", "conditions")) == 0 ||
			n.list("status", "conditions")[0].str("status") != "True"
	})
}

// schedule assigns a pod to a node. If the pod has a claim, it waits until the claim is bound.
func (c *cluster) schedule(pod object) {
	node := c.named("Node", "", pod.str("spec", "nodeName"))
	switch claim, nodes := c.claimOf(pod, claimOfPod(pod)), c.ready(); {
	case pod.str("spec", "nodeName") != "" && node != nil:
	case pod.str("spec", "nodeName") != "" || pod.deleting():
		delete(c.objects, keyOf(pod)) // the pod's Node is gone, or it never had one
	case len(nodes) == 0 || claimOfPod(pod) != "" && (claim == nil || claim.deleting()):
	case claim == nil || claim.str("status", "phase") == "Bound":
		c.touch(pod, nodes[int(c.serial)%len(nodes)].name(), "spec", "nodeName")
	case claim.annotation(selectedNode)+claim.str("spec", "volumeName") == "":
		c.touch(claim, nodes[0].name(), "metadata", "annotations", selectedNode)
	}
}

// uses reports whether a Node lists a disk in volumesInUse.
func uses(node object, handle string) bool {
	used, _ := node.at("status", "volumesInUse").([]any)
	return slices.Contains(used, inUse(handle))
}

func inUse(handle string) any { return "kubernetes.io/csi/" + volume.DriverName + "^" + handle }

// syncAttachments attaches disks to the nodes of pods that use them. It detaches a disk after the
// unmount. If a node is lost, it detaches the disk later, although the instance may still run.
func (c *cluster) syncAttachments() {
	wanted, attached := map[string]bool{}, map[string]bool{}
	for _, va := range c.of("VolumeAttachment") {
		attached[va.str("spec", "source", "persistentVolumeName")] = true
	}
	for _, pod := range c.of("Pod") {
		pv, _ := c.volumeOfPod(pod)
		node := pod.str("spec", "nodeName")
		if node == "" || ended(pod) || pv.str("spec", "csi", "driver") == "" {
			continue
		}
		wanted["csi-"+pv.name()+"-"+node] = true
		if !attached[pv.name()] {
			c.put(`{"kind":"VolumeAttachment","metadata":{"name":%q},"spec":{"attacher":%q,"nodeName":%q,
				"source":{"persistentVolumeName":%q}},"status":{"attached":true}}`,
				"csi-"+pv.name()+"-"+node, volume.DriverName, node, pv.name())
			attached[pv.name()] = true
		}
	}
	for _, va := range c.of("VolumeAttachment") {
		if wanted[va.name()] {
			c.idle[va.name()] = 0
			continue
		}
		c.idle[va.name()]++
		pv := c.volume(va.str("spec", "source", "persistentVolumeName"))
		handle, name := handleOf(pv), va.str("spec", "nodeName")
		node, m := c.named("Node", "", name), c.nodes[name]
		_, mounted := m.mounted[handle]
		lost := !slices.ContainsFunc(c.ready(), func(n object) bool { return n.name() == name })
		if m.off || c.idle[va.name()] > 5 && !mounted && !uses(node, handle) ||
			c.idle[va.name()] > takenAfter && lost {
			delete(m.mounted, handle)
			delete(m.runs, handle)
			delete(c.idle, va.name())
			delete(c.objects, keyOf(va))
		}
	}
}

const (
	// unmountsAfter is the number of passes that a node takes to unmount a disk that no pod uses.
	unmountsAfter = 20
	// A node that does not report is not ready after lostAfter passes. After takenAfter passes without
	// a pod its disks are detached.
	lostAfter, takenAfter = 120, 250
)

func (c *cluster) runMachine(m *machine) {
	node := c.named("Node", "", m.name)
	switch m.age++; {
	case m.off:
		m.mounted, m.runs, m.listed = map[string]int{}, map[string]bool{}, nil
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

// runPods is a kubelet's pass. A kubelet lists a disk before the mount and until after the unmount.
func (c *cluster) runPods(m *machine, node object) {
	used, changed := map[string]bool{}, m.age%10 == 0 || m.quiet > 0
	for _, pod := range c.of("Pod") {
		if pod.str("spec", "nodeName") != m.name || ended(pod) {
			continue
		}
		pv, handle := c.volumeOfPod(pod)
		va := c.named("VolumeAttachment", "", "csi-"+pv.name()+"-"+m.name)
		_, mounted := m.mounted[handle]
		switch used[handle] = true; {
		case pod.deleting() && c.immortal:
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
		case pv.str("spec", "csi", "driver") != "" && va == nil: // the pod waits to be attached
		case handle != "" && !slices.Contains(m.listed, inUse(handle)):
			m.listed, changed = append(m.listed, inUse(handle)), true
		case handle != "" && !mounted:
			m.mounted[handle] = 0
		default:
			c.touch(pod, "Running", "status", "phase")
			if m.runs[handle] = handle != ""; handle != "" {
				c.write(handle)
			}
		}
	}
	for handle := range m.mounted {
		switch m.mounted[handle]++; {
		case used[handle]:
			m.mounted[handle] = 0
		case m.mounted[handle] == unmountsAfter:
			delete(m.mounted, handle)
			fallthrough
		case m.mounted[handle] == unmountsAfter/2:
			// If a pod was deleted by force, the kubelet ends its containers only now.
			delete(m.runs, handle)
		}
	}
	all := len(m.listed)
	m.listed = slices.DeleteFunc(m.listed, func(v any) bool {
		_, handle, _ := strings.Cut(v.(string), "^")
		_, mounted := m.mounted[handle]
		return !mounted && !used[handle]
	})
	if changed || len(m.listed) != all {
		m.quiet = 0
		c.touch(node, append([]any{}, m.listed...), "status", "volumesInUse")
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

// temporary reports whether the claim is one of the command's own, and not the user's.
func (c *cluster) temporary(claim object) bool {
	return c.own[claim.uid()] && claim.name() != c.claim
}

// checkBytes counts acknowledged writes that are on no disk within the user's reach. Within reach
// are the disks of PersistentVolumes that are retained, or bound to a claim of the user.
func (c *cluster) checkBytes() {
	var reachable []string
	for _, pv := range c.of("PersistentVolume") {
		claim := c.bound(pv)
		if text, exists := c.disks[handleOf(pv)]; exists && (claim != nil && !c.temporary(claim) ||
			pv.policy() == "Retain") {
			reachable = append(reachable, text+" ")
		}
	}
	for _, text := range c.written {
		if !slices.ContainsFunc(reachable, func(disk string) bool {
			return strings.HasPrefix(disk, text+" ")
		}) {
			c.lost++
		}
	}
}

// syncClaim binds a claim. It completes the deletion of a claim that no pod uses.
func (c *cluster) syncClaim(claim object) {
	if claim.deleting() {
		if !slices.ContainsFunc(c.of("Pod"), func(pod object) bool {
			return pod.str("spec", "nodeName") != "" && claimOfPod(pod) == claim.name() &&
				pod.str("metadata", "namespace") == claim.str("metadata", "namespace")
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

// reservedFor reports whether a volume is reserved for this claim, or for none.
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
	c.touch(pv, claim.str("metadata", "namespace"), "spec", "claimRef", "namespace")
	c.touch(pv, claim.name(), "spec", "claimRef", "name")
	c.touch(pv, claim.uid(), "spec", "claimRef", "uid")
	c.touch(pv, "Bound", "status", "phase")
	c.touch(claim, pv.name(), "spec", "volumeName")
	c.touch(claim, "yes", "metadata", "annotations", "pv.kubernetes.io/bind-completed")
	c.touch(claim, "Bound", "status", "phase")
}

// provision begins to make a disk for a claim. If the rack has no room, it removes the annotation
// selectedNode, as the provisioner does.
func (c *cluster) provision(claim object) {
	shot := c.named("VolumeSnapshot", claim.str("metadata", "namespace"), claim.str("spec",
		"dataSource", "name"))
	content := c.contentOf(shot)
	if slices.ContainsFunc(c.making, func(m *making) bool { return m.claim.uid() == claim.uid() }) ||
		claim.at("spec", "dataSource") != nil && (shot.at("status", "readyToUse") != true ||
			content == nil || shot.deleting()) {
		return
	}
	size, err := parseSize(claim.str("spec", "resources", "requests", "storage"))
	if err != nil {
		c.t.Fatal(err)
	}
	used := size
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
		content: c.shots[handle], size: claim.str("spec", "resources", "requests", "storage")})
}

// made counts down, and reports whether it has made the disk, whose claim may be gone by then.
func (c *cluster) made(m *making) bool {
	if m.left--; m.left > 0 {
		return false
	}
	uid, handle := m.claim.uid(), "disk-"+c.next()
	c.disks[handle], c.origin[handle] = m.content, uid
	pv := c.put(pvText, "pvc-"+uid, m.size, handle, m.claim.name(), uid)
	c.touch(pv, m.claim.str("metadata", "namespace"), "spec", "claimRef", "namespace")
	c.touch(pv, volume.DriverName, "metadata", "annotations", "pv.kubernetes.io/provisioned-by")
	if m.shot != "" {
		c.touch(pv, m.shot, "spec", "csi", "volumeAttributes", volume.CtxSnapshotID)
	}
	if policy := c.named("StorageClass", "", "oxide-disk").str("reclaimPolicy"); policy != "" {
		c.touch(pv, policy, "spec", "persistentVolumeReclaimPolicy")
	}
	return true
}

// syncVolume releases a volume whose claim is gone. With the policy Delete it deletes the disk.
func (c *cluster) syncVolume(pv object) {
	if pv.str("spec", "claimRef", "uid") == "" || c.bound(pv) != nil {
		return
	}
	c.touch(pv, "Released", "status", "phase")
	if pv.policy() != "Delete" || slices.ContainsFunc(
		c.of("VolumeAttachment"), func(va object) bool {
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
			if _, mounted := m.mounted[handle]; mounted && taken != "" {
				taken = taken[:strings.LastIndex(taken, " ")] // the last write is not on the disk yet
				break
			}
		}
		c.shots[id] = taken
		o := c.put(`{"kind":"VolumeSnapshotContent","metadata":{"name":%q},"spec":{"driver":%q,"source":
			{"volumeHandle":%q},"volumeSnapshotRef":{"namespace":"db","name":%q,"uid":%q}},"status":
			{"snapshotHandle":%q,"readyToUse":true}}`, "content-"+shot.uid(), volume.DriverName, handle,
			shot.name(), shot.uid(), id)
		if class := c.named("VolumeSnapshotClass", "", shot.str("spec",
			"volumeSnapshotClassName")); class.str("deletionPolicy") != "" {
			c.touch(o, class.str("deletionPolicy"), "spec", "deletionPolicy")
		}
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
)

// newCluster returns a cluster with the running workload "web" of this kind. After a snapshot of
// its claim there was one more write. A StatefulSet has three pods, and the second pod uses the
// claim.
func newCluster(t *testing.T, kind string) *cluster {
	c := &cluster{t: t, claim: "data", needed: map[right]bool{}, objects: map[string]object{},
		disks: map[string]string{}, shots: map[string]string{}, nodes: map[string]*machine{},
		idle: map[string]int{}, own: map[string]bool{}, given: map[string]bool{},
		origin: map[string]string{}, kept: map[string]bool{}, dropped: map[string]bool{}}
	c.put(`{"kind":"Namespace","metadata":{"name":"db"}}`)
	c.addNode("n1")
	c.put(`{"kind":"StorageClass","metadata":{"name":"oxide-disk"},"provisioner":"csi.oxide.computer",
		"volumeBindingMode":"WaitForFirstConsumer"}`)
	c.put(`{"kind":"VolumeSnapshotClass","metadata":{"name":"oxide-snapshot"},"driver":
		"csi.oxide.computer"}`)
	replicas := 1
	if kind == "StatefulSet" {
		c.claim, replicas = "data-web-1", 3
	}
	c.put(claimText, c.claim, "10Gi")
	if kind != "" {
		c.put(`{"kind":%q,"metadata":{"name":"web","namespace":"db"},"spec":{"replicas":%d}}`, kind,
			replicas)
	}
	for range 12 {
		c.pass()
	}
	handle := handleOf(c.volume(c.current().str("spec", "volumeName")))
	c.write(handle)
	c.put(shotText, "then", c.claim)
	c.pass()
	c.pass()
	c.write(handle)
	c.settled()
	return c
}

// addNode adds a Node. If no instance has its name, it also adds the instance.
func (c *cluster) addNode(name string) {
	c.put(`{"kind":"Node","metadata":{"name":%q},"status":{"conditions":[{"type":"Ready","status":
		"True","lastHeartbeatTime":"2026-01-01T00:00:00Z"}]}}`, name)
	c.put(`{"kind":"CSINode","metadata":{"name":%q},"spec":{"drivers":[{"name":
		"csi.oxide.computer"}]}}`, name)
	if c.nodes[name] == nil {
		c.nodes[name] = &machine{name: name, mounted: map[string]int{}, runs: map[string]bool{}}
	}
}
