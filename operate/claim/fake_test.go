package claim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// errKilled is what every call returns once the command has been killed.
var errKilled = errors.New("killed")

// cluster is an API server behind kubectl, with the controllers that a change depends on. They make
// one pass before each read. The content of a disk is the writes that it has acknowledged.
type cluster struct {
	t       *testing.T
	objects map[string]object // by resource/namespace/name
	disks   map[string]string
	idle    map[string]int // passes since a pod used the disk
	shots   map[string]string
	quota   int64 // of the rack, in bytes; zero is unlimited
	flat    bool  // the driver has no topology, so the provisioner tries again without a scheduler
	late    int   // passes before the provisioner makes a disk
	serial  int64

	// The provisioner makes a disk in so many passes, whether the claim is still there or not.
	slow   int
	making []*making

	effects, killAt int // the command is killed at this change
	after           bool
	killed          bool
	before          func(verb string) // is called before each command of kubectl

	stops    int
	written  []string // the content that has to be on a disk with a PersistentVolume
	lost     int
	immortal bool                   // no pod ends
	admits   func(o object) error   // refuses what is to be created
	stuck    bool                   // no snapshot ends
	denied   func(kind string) bool // reports whether a kind must not be read
	lacks    func(right) bool       // reports whether the user lacks a right
	needed   map[right]bool         // the rights that the changes needed
}

// making is a disk that the provisioner is making for a claim.
type making struct {
	claim         object
	content, size string
	left          int // passes
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
	meta["uid"], meta["resourceVersion"], meta["generation"] = "u"+c.next(), c.next(), 1.0
	if o["status"] == nil {
		o["status"] = map[string]any{}
	}
	c.objects[keyOf(o)] = o
}

func keyOf(o object) string {
	return strings.ToLower(o.str("kind")) + "/" + o.str("metadata", "namespace") + "/" + o.name()
}

// of returns the objects of a kind, by their names.
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

// touch changes a field of an object.
func (c *cluster) touch(o object, value any, path ...string) {
	at := map[string]any(o)
	for _, key := range path[:len(path)-1] {
		if at[key] == nil {
			at[key] = map[string]any{}
		}
		at = at[key].(map[string]any)
	}
	last := path[len(path)-1]
	if text, ok := value.(string); ok && at[last] == text {
		return
	}
	if at[last] = value; value == nil {
		delete(at, last)
	}
	o["metadata"].(map[string]any)["resourceVersion"] = c.next()
}

// kubectl does what kubectl does with these arguments.
func (c *cluster) kubectl(_ context.Context, stdin []byte, args ...string) ([]byte, error) {
	if c.killed {
		return nil, errKilled
	}
	flags := map[string]string{}
	var operands []string
	for _, arg := range args {
		if name, value, ok := strings.Cut(arg, "="); ok && strings.HasPrefix(name, "--") {
			flags[name] = value
		} else if strings.HasPrefix(arg, "--") {
			flags[arg] = ""
		} else {
			operands = append(operands, arg)
		}
	}
	if c.before != nil {
		c.before(operands[0])
	}
	if operands[0] == "get" {
		c.pass()
		return c.read(operands, flags)
	}
	var o object
	if operands[0] == "create" {
		if err := json.Unmarshal(stdin, &o); err != nil {
			c.t.Fatal(err)
		}
		if o.str("kind") == "List" {
			return c.review(o)
		}
	}
	act := map[string]func([]string, map[string]string, []byte) error{"patch": c.patch,
		"create": c.create, "delete": c.remove, "scale": c.scale}[operands[0]]
	if act == nil {
		c.t.Fatalf("kubectl %q is not known here", args)
	}
	if c.admits != nil && operands[0] == "create" {
		if err := c.admits(o); err != nil {
			return nil, err
		}
	}
	if flags["--dry-run"] != "" {
		return nil, nil
	}
	c.needs(operands, flags, o)
	c.effects++
	die := c.effects == c.killAt
	if c.killed = die && !c.after; c.killed {
		return nil, errKilled
	}
	err := act(operands, flags, stdin)
	c.checkBytes()
	if c.killed = die; c.killed {
		err = errKilled
	}
	return nil, err
}

// needs records which right a change needs.
func (c *cluster) needs(operands []string, flags map[string]string, created object) {
	var resource string
	switch operands[0] {
	case "create":
		resource = strings.ToLower(created.str("kind")) + "s"
	case "delete":
		path := strings.Split(flags["--raw"], "/")
		resource = path[len(path)-2]
	default:
		resource, _, _ = strings.Cut(operands[1], "/")
	}
	resource, _, _ = strings.Cut(resource, ".")
	c.needed[right{operands[0], resource}] = true
}

// review answers reviews of the user's rights.
func (c *cluster) review(list object) ([]byte, error) {
	var out []byte
	for _, item := range list.list("items") {
		attributes := func(key string) string { return item.str("spec", "resourceAttributes", key) }
		if namespace := attributes("namespace"); (namespace == "") !=
			slices.Contains(global, kindOf(attributes("resource"))) {
			c.t.Fatalf("a review has the wrong namespace: %v", item)
		}
		allowed := c.lacks == nil || !c.lacks(right{attributes("verb"), attributes("resource")})
		item["status"] = object{"allowed": allowed}
		text, err := json.Marshal(item)
		if err != nil {
			return nil, err
		}
		out = append(out, text...)
	}
	return out, nil
}

// kindOf returns the kind of a resource as the store's keys have it.
func kindOf(resource string) string {
	kind, _, _ := strings.Cut(resource, ".")
	if kind == "storageclasses" || kind == "volumesnapshotclasses" {
		return strings.TrimSuffix(kind, "es")
	}
	if stem, ok := strings.CutSuffix(kind, "ies"); ok {
		return stem + "y"
	}
	return strings.TrimSuffix(kind, "s")
}

// global are the kinds without a namespace.
var global = []string{"node", "csinode", "storageclass", "volumesnapshotclass", "persistentvolume",
	"volumesnapshotcontent"}

func (c *cluster) read(operands []string, flags map[string]string) ([]byte, error) {
	kind := kindOf(operands[1])
	_, everywhere := flags["--all-namespaces"]
	if named := flags["--namespace"] != ""; named == slices.Contains(global, kind) && !everywhere {
		c.t.Fatalf("get %q has the wrong namespace %v", operands, flags)
	}
	if c.denied != nil && c.denied(kind) {
		return nil, errors.New("exit status 1: Forbidden")
	}
	if len(operands) == 3 {
		o := c.named(kind, flags["--namespace"], operands[2])
		if o == nil {
			return nil, nil
		}
		return json.Marshal(o)
	}
	items := slices.DeleteFunc(c.of(kind), func(o object) bool {
		ns, fields := flags["--namespace"], flags["--field-selector"]
		return ns != "" && o.str("metadata", "namespace") != ns ||
			fields != "" && !strings.HasSuffix(fields, "="+o.str("involvedObject", "name"))
	})
	return json.Marshal(object{"kind": "List", "items": append([]object{}, items...)})
}

func merge(into, change map[string]any) {
	for key, value := range change {
		fields, isMap := value.(map[string]any)
		switch have, _ := into[key].(map[string]any); {
		case value == nil:
			delete(into, key)
		case isMap && have != nil:
			merge(have, fields)
		default:
			into[key] = value
		}
	}
}

func (c *cluster) patch(operands []string, flags map[string]string, stdin []byte) error {
	o := c.named(kindOf(operands[1]), flags["--namespace"], operands[2])
	var change object
	if err := json.Unmarshal(stdin, &change); err != nil {
		c.t.Fatal(err)
	}
	if o == nil || change.str("metadata", "resourceVersion") != o.str("metadata", "resourceVersion") {
		return fmt.Errorf("conflict: %s", operands[2])
	}
	merge(o, change)
	c.touch(o, "x", "metadata", "resourceVersion")
	return nil
}

func (c *cluster) create(_ []string, _ map[string]string, stdin []byte) error {
	var o object
	if err := json.Unmarshal(stdin, &o); err != nil {
		c.t.Fatal(err)
	}
	if c.objects[keyOf(o)] != nil {
		return fmt.Errorf("already exists: %s", o.name())
	}
	c.add(o)
	return nil
}

func (c *cluster) remove(_ []string, flags map[string]string, stdin []byte) error {
	path := strings.Split(flags["--raw"], "/")
	n := len(path)
	o := c.named(kindOf(path[n-2]), path[n-3], path[n-1])
	var body object
	if err := json.Unmarshal(stdin, &body); err != nil {
		c.t.Fatal(err)
	}
	if o == nil || body.str("preconditions", "uid") != o.uid() || body.str("preconditions",
		"resourceVersion") != o.str("metadata", "resourceVersion") {
		return fmt.Errorf("conflict: %s", flags["--raw"])
	}
	c.touch(o, "now", "metadata", "deletionTimestamp")
	return nil
}

func (c *cluster) scale(operands []string, flags map[string]string, _ []byte) error {
	resource, name, _ := strings.Cut(operands[1], "/")
	o := c.named(kindOf(resource), flags["--namespace"], name)
	if strconv.FormatInt(o.num("spec", "replicas"), 10) != flags["--current-replicas"] {
		return fmt.Errorf("expected replicas to be %s", flags["--current-replicas"])
	}
	to, _ := strconv.ParseFloat(flags["--replicas"], 64)
	if to < float64(o.num("spec", "replicas")) {
		c.stops++
	}
	c.rescale(o, to)
	return nil
}

func (c *cluster) rescale(o object, to float64) {
	c.touch(o, to, "spec", "replicas")
	c.touch(o, float64(o.num("metadata", "generation")+1), "metadata", "generation")
}

// pass is one pass of the controllers.
func (c *cluster) pass() {
	for _, kind := range []string{"Deployment", "StatefulSet"} {
		for _, w := range c.of(kind) {
			c.runWorkload(w)
		}
	}
	for _, o := range c.of("PersistentVolumeClaim") {
		c.syncClaim(o)
	}
	c.making = slices.DeleteFunc(c.making, c.made)
	for _, o := range c.of("PersistentVolume") {
		c.syncVolume(o)
	}
	for _, o := range c.of("VolumeSnapshot") {
		c.syncSnapshot(o)
	}
	c.checkBytes()
}

// claimOfPod returns the claim that a pod uses.
func claimOfPod(pod object) string {
	return pod.list("spec", "volumes")[0].str("persistentVolumeClaim", "claimName")
}

func (c *cluster) runWorkload(w object) {
	want := map[string]string{} // pods, with their claims
	for i := range w.num("spec", "replicas") {
		name := fmt.Sprintf("%s-%d", w.name(), i)
		want[name] = "data"
		if w.str("kind") == "StatefulSet" {
			want[name] = "data-" + name
		}
		if claim := want[name]; w.str("kind") == "StatefulSet" &&
			c.named("PersistentVolumeClaim", "db", claim) == nil {
			c.put(claimText, claim, "10Gi")
		}
		if c.named("Pod", "db", name) == nil {
			c.put(`{"kind":"Pod","metadata":{"name":%q,"namespace":"db","ownerReferences":[{"controller":
				true,"apiVersion":"apps/v1","kind":%q,"name":%q,"uid":%q}]},"spec":{"nodeName":"n1","volumes":
				[{"persistentVolumeClaim":{"claimName":%q}}]},"status":{"phase":"Pending"}}`, name,
				w.str("kind"), w.name(), w.uid(), want[name])
		}
	}
	for _, pod := range c.of("Pod") {
		claim := c.named("PersistentVolumeClaim", "db", claimOfPod(pod))
		pv := c.named("PersistentVolume", "", claim.str("spec", "volumeName"))
		handle := pv.str("spec", "csi", "volumeHandle")
		if pod.controller().str("name") != w.name() {
			continue
		}
		switch _, wanted := want[pod.name()]; {
		case wanted && pod.str("status", "phase") == "Pending":
			if claim.str("status", "phase") == "Bound" && !claim.deleting() {
				c.touch(pod, "Running", "status", "phase")
				c.use(handle, true)
				c.write(handle)
			}
		case !wanted && pod.deleting() && !c.immortal:
			delete(c.objects, keyOf(pod))
		case !wanted:
			c.touch(pod, "now", "metadata", "deletionTimestamp")
		}
	}
	// A node unmounts a disk some time after its pod has ended.
	for handle := range c.disks {
		if c.idle[handle]++; slices.ContainsFunc(c.of("Pod"), func(pod object) bool {
			claim := c.named("PersistentVolumeClaim", "db", claimOfPod(pod))
			pv := c.named("PersistentVolume", "", claim.str("spec", "volumeName"))
			return pv.str("spec", "csi", "volumeHandle") == handle
		}) {
			c.idle[handle] = 0
		}
		if c.idle[handle] == unmountsAfter {
			c.use(handle, false)
		}
	}
}

// unmountsAfter is the number of passes after which a node has unmounted a disk that no pod uses.
const unmountsAfter = 40

func (c *cluster) use(handle string, on bool) {
	node, used := c.named("Node", "", "n1"), c.used()
	name := any("kubernetes.io/csi/" + volume.DriverName + "^" + handle)
	used = slices.DeleteFunc(slices.Clone(used), func(v any) bool { return v == name })
	if on {
		used = append(used, name)
	}
	c.touch(node, used, "status", "volumesInUse")
}

// used returns what the node lists as mounted.
func (c *cluster) used() []any {
	used, _ := c.named("Node", "", "n1").at("status", "volumesInUse").([]any)
	return used
}

// write acknowledges a write to a disk.
func (c *cluster) write(handle string) {
	was := c.disks[handle]
	c.disks[handle] = was + " " + c.next()
	c.written = slices.DeleteFunc(c.written, func(text string) bool {
		return strings.HasPrefix(c.disks[handle]+" ", text+" ")
	})
	c.written = append(c.written, c.disks[handle])
}

// checkBytes counts acknowledged writes that are on no disk with a PersistentVolume.
func (c *cluster) checkBytes() {
	for _, text := range c.written {
		if !slices.ContainsFunc(c.of("PersistentVolume"), func(pv object) bool {
			return strings.HasPrefix(c.disks[pv.str("spec", "csi", "volumeHandle")]+" ", text+" ")
		}) {
			c.lost++
		}
	}
}

func (c *cluster) syncClaim(claim object) {
	inUse := slices.ContainsFunc(c.of("Pod"), func(pod object) bool {
		return claimOfPod(pod) == claim.name() && pod.str("status", "phase") == "Running"
	})
	switch pv := c.named("PersistentVolume", "", claim.str("spec", "volumeName")); {
	case claim.deleting() && !inUse:
		delete(c.objects, keyOf(claim))
	case claim.deleting() || claim.str("status", "phase") == "Bound":
	case pv != nil:
		uid := pv.str("spec", "claimRef", "uid")
		if pv.str("spec", "claimRef", "name") == claim.name() && (uid == "" || uid == claim.uid()) {
			c.touch(pv, claim.uid(), "spec", "claimRef", "uid")
			c.touch(pv, "Bound", "status", "phase")
			c.touch(claim, "yes", "metadata", "annotations", "pv.kubernetes.io/bind-completed")
			c.touch(claim, "Bound", "status", "phase")
		}
	case claim.str("spec", "volumeName") == "" && claim.annotation(selectedNode) != "":
		c.provision(claim)
	}
}

// provision begins to make a disk for a claim. If the rack has no room, it takes the node away, as
// the provisioner does.
func (c *cluster) provision(claim object) {
	if slices.ContainsFunc(c.making, func(m *making) bool { return m.claim.uid() == claim.uid() }) {
		return
	}
	size, err := parseSize(claim.str("spec", "resources", "requests", "storage"))
	if err != nil {
		c.t.Fatal(err)
	}
	if c.late--; c.late > 0 {
		return
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
	c.making = append(c.making, &making{claim: claim, left: c.slow,
		content: c.shots[claim.str("spec", "dataSource", "name")],
		size:    claim.str("spec", "resources", "requests", "storage")})
}

// made reports whether the provisioner has made a disk, for a claim that may be gone.
func (c *cluster) made(m *making) bool {
	if m.left--; m.left > 0 {
		return false
	}
	uid, handle := m.claim.uid(), "disk-"+c.next()
	c.disks[handle] = m.content
	pv := c.put(pvText, "pvc-"+uid, m.size, handle, m.claim.name(), uid)
	if policy := c.named("StorageClass", "", "oxide-disk").str("reclaimPolicy"); policy != "" {
		c.touch(pv, policy, "spec", "persistentVolumeReclaimPolicy")
	}
	if claim := c.named("PersistentVolumeClaim", "db", m.claim.name()); claim.uid() == uid {
		c.touch(claim, "pvc-"+uid, "spec", "volumeName")
		c.touch(claim, "Bound", "status", "phase")
	}
	return true
}

func (c *cluster) syncVolume(pv object) {
	uid := pv.str("spec", "claimRef", "uid")
	if uid == "" || slices.ContainsFunc(c.of("PersistentVolumeClaim"), func(claim object) bool {
		return claim.uid() == uid
	}) {
		return
	}
	if c.touch(pv, "Released", "status", "phase"); pv.str("spec",
		"persistentVolumeReclaimPolicy") == "Delete" {
		delete(c.disks, pv.str("spec", "csi", "volumeHandle"))
		delete(c.objects, keyOf(pv))
	}
}

func (c *cluster) syncSnapshot(shot object) {
	if shot.deleting() && c.stuck {
		return
	}
	if shot.deleting() {
		delete(c.shots, shot.name())
		delete(c.objects, "volumesnapshotcontent//content-"+shot.name())
		delete(c.objects, keyOf(shot))
		return
	}
	claim := c.named("PersistentVolumeClaim", "db", shot.str("spec", "source",
		"persistentVolumeClaimName"))
	pv := c.named("PersistentVolume", "", claim.str("spec", "volumeName"))
	if shot.at("status", "readyToUse") == true || pv == nil {
		return
	}
	handle := pv.str("spec", "csi", "volumeHandle")
	c.shots[shot.name()] = c.disks[handle]
	if slices.Contains(c.used(), any("kubernetes.io/csi/"+volume.DriverName+"^"+handle)) {
		// The last write is not on the disk before it is unmounted.
		c.shots[shot.name()] = c.disks[handle][:strings.LastIndex(c.disks[handle], " ")]
	}
	c.put(`{"kind":"VolumeSnapshotContent","metadata":{"name":%q},"spec":{"driver":%q,"source":
		{"volumeHandle":%q}}}`, "content-"+shot.name(), volume.DriverName, handle)
	c.touch(shot, "content-"+shot.name(), "status", "boundVolumeSnapshotContentName")
	c.touch(shot, pv.str("spec", "capacity", "storage"), "status", "restoreSize")
	c.touch(shot, true, "status", "readyToUse")
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

// newCluster returns a cluster with a workload web of one kind whose pods run, and a snapshot of
// its claim that was taken before its last write. A StatefulSet has three pods, and the claim is
// that of the second one.
func newCluster(t *testing.T, kind string) (c *cluster, claim string) {
	c = &cluster{t: t, needed: map[right]bool{},
		objects: map[string]object{}, disks: map[string]string{},
		shots: map[string]string{}, idle: map[string]int{}}
	c.put(`{"kind":"Node","metadata":{"name":"n1"}}`)
	c.put(`{"kind":"CSINode","metadata":{"name":"n1"},"spec":{"drivers":[{"name":
		"csi.oxide.computer"}]}}`)
	c.put(`{"kind":"StorageClass","metadata":{"name":"oxide-disk"},"provisioner":"csi.oxide.computer",
		"volumeBindingMode":"WaitForFirstConsumer"}`)
	c.put(`{"kind":"VolumeSnapshotClass","metadata":{"name":"oxide-snapshot"},"driver":
		"csi.oxide.computer"}`)
	claim, replicas := "data", 1
	if kind == "StatefulSet" {
		claim, replicas = "data-web-1", 3
	}
	c.put(claimText, claim, "10Gi")
	if kind != "" {
		c.put(`{"kind":%q,"metadata":{"name":"web","namespace":"db"},"spec":{"replicas":%d}}`, kind,
			replicas)
	}
	c.pass()
	c.pass()
	c.pass()
	pv := c.named("PersistentVolumeClaim", "db", claim).str("spec", "volumeName")
	handle := c.named("PersistentVolume", "", pv).str("spec", "csi", "volumeHandle")
	c.write(handle)
	c.put(shotText, "then", claim)
	c.pass()
	c.write(handle)
	return c, claim
}
