package claim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// proposal is a change before it begins: what was asked for, and what was found out about it.
type proposal struct {
	Options
	log        func(format string, args ...any)
	claim, old object
	plan       plan
	notes      []string
	quota      string // a sentence for the user about the rack's quota
}

// check reads everything on which the change depends, refuses a change that cannot work, and makes
// the run's plan. It changes nothing.
func (c *proposal) check(ctx context.Context, run string) error {
	claim, err := c.Kubectl.get(ctx, claims, c.Namespace, c.Claim)
	if err != nil {
		return err
	}
	if claim.str("status", "phase") != "Bound" || claim.deleting() {
		return fmt.Errorf("expected a bound PersistentVolumeClaim %s/%s, found none, or one that is not "+
			"bound or is being deleted", c.Namespace, c.Claim)
	}
	old, err := c.Kubectl.get(ctx, persistentVolumes, "", claim.str("spec", "volumeName"))
	switch f := claim.foreignFinalizer(); {
	case err != nil:
		return err
	case old.str("spec", "csi", "driver") != volume.DriverName ||
		old.str("spec", "claimRef", "uid") != claim.uid():
		return fmt.Errorf("the volume of the claim has to be one of %s that is bound to it",
			volume.DriverName)
	case old.annotation(planKey) != "":
		return fmt.Errorf("PersistentVolume %s has got a plan meanwhile: another run of this command "+
			"changes the claim, or something else writes the annotation %s", old.name(), planKey)
	case old.deleting():
		return fmt.Errorf("PersistentVolume %s is being deleted by somebody, and goes when nothing is "+
			"bound to it: make it again for its disk first", old.name())
	case f != "":
		return fmt.Errorf("the claim has the finalizer %s: whoever set it has to let the claim "+
			"go first (a VolumeSnapshot of it that is not ready: wait for it, or delete it)", f)
	}
	namespace, err := c.Kubectl.get(ctx, "namespaces", "", c.Namespace)
	if err != nil {
		return err
	}
	if o := claim.controller(); o.str("kind") == "Pod" {
		return fmt.Errorf("the claim belongs to the pod %s and is deleted with it: it cannot be given "+
			"another disk", o.str("name"))
	}
	c.claim, c.old, c.plan = claim, old, plan{
		Verb: c.Verb, Namespace: c.Namespace, Claim: c.Claim, ClaimUID: claim.uid(),
		NamespaceUID: namespace.uid(),
		Manifest:     object{"metadata": map[string]any{}, "spec": claim.at("spec")},
		ID:           newID(), Run: run,
		OldSize: old.str("spec", "capacity", "storage"), Size: c.Size,
		Old: old.name(), OldUID: old.uid(), Handle: old.str("spec", "csi", "volumeHandle"),
		Policy: old.policy(),
	}
	claim.copyFields(c.plan.Manifest["metadata"].(map[string]any), "metadata", "labels", "annotations",
		"ownerReferences")
	for _, check := range []func(context.Context) error{c.checkOwner, c.checkNodes, c.checkClass,
		c.checkSnapshot, c.checkSize, c.rehearse, c.checkQuota} {
		if err := check(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (c *proposal) describe() {
	p := c.plan
	c.log("%s of PersistentVolumeClaim %s: from %s to %s", p.Verb, p.path(), p.OldSize, p.Size)
	_, peak := p.peak()
	c.log("The rack's quota needs room for %s beside what is used, until claim forget. %s The "+
		"namespace's quota needs room for another claim of %s until the end.", peak, c.quota, p.Size)
	c.log("The workload is stopped from the step stop to the step start. The rack copies nothing " +
		"for a snapshot or a new disk, so this takes as long as stop, unmount, attach and mount: about " +
		"a minute, and a stop of the node more on a rack without hot-plug.")
	if p.Owner.Kind == "StatefulSet" {
		c.log("note: the volumeClaimTemplates of %s keep their size: a replica that is added later "+
			"gets a disk of that size. To change it, delete the StatefulSet with --cascade=orphan and "+
			"apply it with the new size.", p.Owner)
	}
	for _, n := range c.notes {
		c.log("note: %s", n)
	}
}

// foreignFinalizer returns a finalizer, or "". It skips the one that Kubernetes removes by itself.
func (o object) foreignFinalizer() string {
	all, _ := o.at("metadata", "finalizers").([]any)
	for _, f := range all {
		if text, _ := f.(string); text != "kubernetes.io/pvc-protection" {
			return text
		}
	}
	return ""
}

// checkOwner finds the owner of the pods that use the claim, and checks that it can be stopped.
func (c *proposal) checkOwner(ctx context.Context) error {
	p := &c.plan
	pods, err := c.Kubectl.all(ctx, "pods", c.Namespace)
	if err != nil {
		return err
	}
	var ofPod object
	for _, pod := range users(pods, c.Claim) {
		o, workload, err := c.ownerOf(ctx, pod)
		if err != nil {
			return err
		}
		switch {
		case p.Owner.Kind == "":
			p.Owner, ofPod, p.Node = o, workload, pod.str("spec", "nodeName")
		case p.Owner.Kind != o.Kind || p.Owner.Name != o.Name:
			return fmt.Errorf("expected one workload that uses the claim, found %s and %s: stop one",
				p.Owner, o)
		}
	}
	if p.Owner.resource() == "" {
		return nil
	}
	if mark := ofPod.annotation(changeKey); mark != "" {
		return fmt.Errorf("%s has the annotation %s of another change (%.80q): complete or undo that "+
			"one first; if nobody knows of one, remove the annotation", p.Owner, changeKey, mark)
	}
	if ofPod.str("spec", "persistentVolumeClaimRetentionPolicy", "whenScaled") == "Delete" {
		return fmt.Errorf("%s deletes the claims of the pods that it stops: set its "+
			"persistentVolumeClaimRetentionPolicy.whenScaled to Retain first", p.Owner)
	}
	scalers, err := c.Kubectl.all(ctx, "horizontalpodautoscalers", c.Namespace)
	if err != nil {
		return err
	}
	for _, s := range scalers {
		if s.str("spec", "scaleTargetRef", "kind") == p.Owner.Kind &&
			s.str("spec", "scaleTargetRef", "name") == p.Owner.Name {
			return fmt.Errorf("the HorizontalPodAutoscaler %s would start %s again: delete it first, or "+
				"stop the workload yourself", s.name(), p.Owner)
		}
	}
	for _, key := range []string{"argocd.argoproj.io/instance", "argocd.argoproj.io/tracking-id",
		"kustomize.toolkit.fluxcd.io/name", "helm.toolkit.fluxcd.io/name"} {
		if ofPod.str("metadata", "labels", key) != "" || ofPod.annotation(key) != "" ||
			c.claim.str("metadata", "labels", key)+c.claim.annotation(key) != "" {
			c.notes = append(c.notes, fmt.Sprintf("%s or its claim has the label %s: suspend the "+
				"synchronization, or it undoes the scale, and write the new size where it reads", p.Owner, key))
		}
	}
	return c.Kubectl.patch(ctx, ofPod, scaled(p.Owner.Target, p.stopMark()), dryRun)
}

// checkNodes records the names and UIDs of the nodes to which the volume is attached. A later step
// waits until these Nodes report that the volume is unmounted. A new Node of the same name does not
// count.
func (c *proposal) checkNodes(ctx context.Context) error {
	all, err := c.Kubectl.all(ctx, volumeAttachments, "")
	c.plan.Nodes = map[string]string{}
	for _, a := range all {
		if a.str("spec", "source", "persistentVolumeName") != c.plan.Old {
			continue
		}
		node, err := c.Kubectl.get(ctx, "nodes", "", a.str("spec", "nodeName"))
		if err != nil {
			return err
		}
		c.plan.Nodes[a.str("spec", "nodeName")] = node.uid()
	}
	return err
}

// ownerOf returns the object that decides whether a pod runs. The command can stop only a
// Deployment or StatefulSet that no other object manages. Only a person can stop other owners.
func (c *proposal) ownerOf(ctx context.Context, pod object) (owner, object, error) {
	top := pod
	for range 3 {
		ref := top.controller()
		if ref == nil {
			break
		}
		kind, ok := kinds[ref.str("kind")]
		if !ok || kind.scales == "" || !strings.HasPrefix(ref.str("apiVersion"), "apps/") {
			return owner{Kind: ref.str("kind"), Name: ref.str("name"), UID: ref.str("uid"), Person: true,
				Pod: pod.name()}, nil, nil
		}
		var err error
		if top, err = c.Kubectl.get(ctx, kind.resource, c.Namespace, ref.str("name")); err != nil {
			return owner{}, nil, err
		}
		if top.uid() != ref.str("uid") {
			return owner{}, nil, fmt.Errorf("the pod %s belongs to %s %s, which is gone: wait until the "+
				"pod is gone", pod.name(), ref.str("kind"), ref.str("name"))
		}
	}
	o := owner{Kind: top.str("kind"), Name: top.name(), UID: top.uid(), Pod: pod.name(),
		Replicas: top.num("spec", "replicas"), Person: kinds[top.str("kind")].scales != "yes"}
	if o.Kind == "StatefulSet" { // pods with lower ordinals need not stop
		ordinal, err := strconv.ParseInt(pod.name()[strings.LastIndex(pod.name(), "-")+1:], 10, 64)
		if err != nil {
			return owner{}, nil, fmt.Errorf("the pod %s of %s has no ordinal", pod.name(), o)
		}
		o.Target = ordinal - top.num("spec", "ordinals", "start")
	}
	if !o.Person && o.Replicas <= o.Target {
		return owner{}, nil, fmt.Errorf("%s is being scaled down to %d: wait until it has stopped, "+
			"and repeat the command", o, o.Replicas)
	}
	return o, top, nil
}

// checkClass checks that the claim's StorageClass makes disks from snapshots. If the class waits
// for a pod, checkClass chooses the node near which the new disk is made.
func (c *proposal) checkClass(ctx context.Context) error {
	name := c.claim.str("spec", "storageClassName")
	class, err := c.Kubectl.get(ctx, storageClasses, "", name)
	switch {
	case err != nil:
		return err
	case class.str("provisioner") != volume.DriverName:
		return fmt.Errorf("the claim's StorageClass %q makes no disks of %s, so it cannot make another",
			name, volume.DriverName)
	case class.str("parameters", "diskType") == "local":
		return errors.New("the claim's disk is a local one, which has no snapshots")
	}
	c.plan.ClassUID, c.plan.Retains = class.uid(), class.str("reclaimPolicy") == "Retain"
	if class.str("volumeBindingMode") != "WaitForFirstConsumer" {
		c.plan.Node = ""
		return nil
	}
	nodes, err := c.Kubectl.all(ctx, "csinodes.storage.k8s.io", "")
	if err != nil {
		return err
	}
	var able []string
	for _, n := range nodes {
		for _, d := range n.list("spec", "drivers") {
			if d.str("name") == volume.DriverName {
				able = append(able, n.name())
			}
		}
	}
	switch selected := c.claim.annotation(selectedNode); {
	case slices.Contains(able, c.plan.Node):
	case slices.Contains(able, selected):
		c.plan.Node = selected
	case len(able) == 0 || c.old.at("spec", "nodeAffinity") != nil:
		return errors.New("no node that has used the claim runs the driver now, and the new disk is " +
			"made near a node: start the workload once")
	default:
		c.plan.Node = able[0]
	}
	return nil
}

func (c *proposal) checkSnapshot(ctx context.Context) error {
	if c.Verb == Grow {
		return c.findSnapshotClass(ctx)
	}
	o, err := c.Kubectl.get(ctx, snapshots, c.Namespace, c.Snapshot)
	if err != nil {
		return err
	}
	if o.at("status", "readyToUse") != true || o.deleting() {
		return fmt.Errorf("expected a VolumeSnapshot %s/%s that is ready, found none, or one that is not",
			c.Namespace, c.Snapshot)
	}
	if c.plan.Shot, err = c.Kubectl.shotOf(ctx, o, c.plan.earlier()); err != nil {
		return err
	}
	least := o.str("status", "restoreSize")
	if c.plan.Size == "" {
		c.plan.Size = larger(c.claim.str("spec", "resources", "requests", "storage"), least)
	}
	if larger(c.plan.Size, least) != c.plan.Size {
		return fmt.Errorf("--size: the snapshot needs a disk of at least %s", least)
	}
	return nil
}

func larger(a, b string) string {
	aBytes, _ := parseSize(a)
	if bBytes, _ := parseSize(b); bBytes > aBytes {
		return b
	}
	return a
}

func (c *proposal) findSnapshotClass(ctx context.Context) error {
	c.plan.Shot.Name = c.plan.temporary()
	all, err := c.Kubectl.all(ctx, snapshotClasses, "")
	if err != nil {
		return err
	}
	ours := slices.DeleteFunc(all, func(class object) bool {
		return class.str("driver") != volume.DriverName ||
			c.SnapshotClass != "" && class.name() != c.SnapshotClass
	})
	if len(ours) != 1 {
		return fmt.Errorf("expected one VolumeSnapshotClass of %s, found %d (%s): name one with "+
			"--snapshot-class", volume.DriverName, len(ours), names(ours))
	}
	c.plan.SnapshotClass, c.plan.SnapshotClassUID = ours[0].name(), ours[0].uid()
	if ours[0].str("deletionPolicy") == "Retain" {
		c.notes = append(c.notes, fmt.Sprintf("VolumeSnapshotClass %s has the deletionPolicy Retain: "+
			"the snapshot stays on the rack, and in its quota, until you delete its VolumeSnapshotContent "+
			"with the policy Delete", c.plan.SnapshotClass))
	}
	return nil
}

func (c *proposal) checkSize(context.Context) error {
	was, err := parseSize(c.plan.OldSize)
	if err != nil {
		return fmt.Errorf("the capacity %q of PersistentVolume %s %w", c.plan.OldSize, c.plan.Old, err)
	}
	size, err := parseSize(c.plan.Size)
	switch {
	case err != nil:
		return fmt.Errorf("the size %q of the claim %w", c.plan.Size, err)
	case size > volume.MaxDistributedBytes:
		return fmt.Errorf("--size: a disk has at most %d GiB", volume.MaxDistributedBytes/volume.GiB)
	case c.plan.Verb == Grow && size <= was:
		return fmt.Errorf("--size: the claim's disk has %s already, and no disk shrinks", c.plan.OldSize)
	}
	return nil
}

// rehearse sends each kind of request that a change needs, as a dry run, so that a refusal does not
// end the change halfway, with the workload stopped. An admission webhook or a ResourceQuota may
// refuse a request. The user may lack a right to an object, or to an owner that the object names.
func (c *proposal) rehearse(ctx context.Context) error {
	text, err := json.Marshal(c.plan)
	if err != nil {
		return err
	}
	if len(text) > 200<<10 {
		return errors.New("the claim's annotations are too large to be recorded with the plan")
	}
	again := c.plan.newClaim(c.plan.Old)
	again["metadata"].(object)["name"] = c.plan.temporary() // the claim still has its own name
	kept := annotate(planKey, string(text), reserve(c.plan.kept(), nil))
	maps.Copy(kept["spec"].(object), withPolicy("Retain"))
	mark := annotate(planKey, c.plan.Run, nil)
	for what, err := range map[string]error{
		"the plan":                          c.Kubectl.patch(ctx, c.old, kept, dryRun),
		"the deletion of the claim":         c.Kubectl.remove(ctx, c.claim, dryRun),
		"the mark of the claim":             c.Kubectl.patch(ctx, c.claim, mark, dryRun),
		"the claim of the earlier disk":     c.Kubectl.create(ctx, c.plan.keptClaim(), dryRun),
		"the claim of the new disk":         c.Kubectl.create(ctx, c.plan.temporaryClaim(), dryRun),
		"the claim, when it is made again,": c.Kubectl.createOwned(ctx, c.log, again, dryRun),
		"the snapshot":                      c.rehearseSnapshot(ctx),
	} {
		if err != nil {
			return fmt.Errorf("%s would be refused: %w. Nothing has been changed; the rights that a "+
				"change needs are in docs/howto/grow-a-volume.md", what, err)
		}
	}
	return nil
}

func (c *proposal) rehearseSnapshot(ctx context.Context) error {
	if c.plan.SnapshotClass == "" {
		return nil
	}
	// Check rights that a change needs only after the workload has stopped, or for an undo.
	if _, err := c.Kubectl.get(ctx, snapshotContents, "", c.plan.temporary()); err != nil {
		return err
	}
	if _, _, err := c.Kubectl.refusal(ctx, c.plan); err != nil {
		return err
	}
	if _, err := c.Kubectl(ctx, nil, "auth", "can-i", "delete", snapshots,
		"--namespace="+c.plan.Namespace); err != nil {
		return fmt.Errorf("you may not delete volumesnapshots: %w", err)
	}
	return c.Kubectl.create(ctx, c.plan.ownSnapshot(), dryRun)
}

// peak returns how much of the rack's quota the change uses until "claim forget". A snapshot uses
// as much as its disk.
func (p plan) peak() (sizeBytes int64, text string) {
	sizeBytes, _ = parseSize(p.Size)
	sizeBytes += (volume.GiB - sizeBytes%volume.GiB) % volume.GiB // disks have whole GiB
	if p.SnapshotClass == "" {
		return sizeBytes, p.Size + " (new disk)"
	}
	snapshotBytes, _ := parseSize(p.OldSize)
	return sizeBytes + snapshotBytes, p.OldSize + " (snapshot) and " + p.Size + " (new disk)"
}

// checkQuota compares the capacity that the change needs with the one that the cluster publishes
// for the claim's StorageClass.
//
// A published capacity has no timestamp. The provisioner updates it late, or never while the rack
// refuses its requests. So the capacity may be wrong by any amount, and a margin does not help. If
// the published capacity is too small, the change is refused, unless --ignore-capacity is set.
func (c *proposal) checkQuota(ctx context.Context) error {
	class := c.claim.str("spec", "storageClassName")
	best, left, err := c.Kubectl.published(ctx, class, c.plan.Node)
	switch {
	case err != nil:
		c.quota = fmt.Sprintf("This is not checked: the published capacities cannot be read (%v).", err)
		return ctx.Err()
	case best == nil:
		c.quota = fmt.Sprintf("This is not checked: the cluster publishes no capacity of StorageClass "+
			"%s.", class)
		return nil
	}
	object := fmt.Sprintf("CSIStorageCapacity %s/%s of StorageClass %s",
		best.str("metadata", "namespace"), best.name(), class)
	need, parts := c.plan.peak()
	size, _ := parseSize(c.plan.Size)
	most, err := parseQuantity(best.str("maximumVolumeSize"))
	var problem string
	switch {
	case need > left:
		problem = fmt.Sprintf("expected room for %s in the rack's quota (%s), found %s left, by %s. Ask "+
			"for quota, or remove snapshots and disks that nobody needs", volume.SizeText(need), parts,
			volume.SizeText(left), object)
	case err == nil && size > most:
		problem = fmt.Sprintf("--size: expected a disk of at most %s, by %s, and %s is asked for",
			volume.SizeText(most), object, c.plan.Size)
	default:
		c.quota = fmt.Sprintf("%s is left, by %s.", volume.SizeText(left), object)
		return nil
	}
	if c.IgnoreCapacity {
		c.quota = "Continued by --ignore-capacity: " + problem + "."
		return nil
	}
	return fmt.Errorf("%s. Nothing has been changed. The object follows the rack with a delay, a "+
		"minute by default: if there is room now, repeat the command later, or with --ignore-capacity",
		problem)
}

// published() returns the StorageClass's CSIStorageCapacity that has the most capacity, or nil. If
// the disk is made near a node, it considers only objects whose topology contains the node.
func (k Kubectl) published(ctx context.Context, class, node string) (best object, left int64,
	err error) {
	all, err := k.all(ctx, "csistoragecapacities.storage.k8s.io", "", "--all-namespaces")
	if err != nil {
		return nil, 0, err
	}
	near, err := k.get(ctx, "nodes", "", node)
	if err != nil {
		return nil, 0, err
	}
	for _, o := range all {
		if o.str("storageClassName") != class || near != nil && !o.reaches(near) {
			continue
		}
		// A CSIStorageCapacity without capacity means that the provisioner does not know it now.
		if n, err := parseQuantity(o.str("capacity")); err == nil && (best == nil || n > left) {
			best, left = o, n
		}
	}
	return best, left, nil
}

// reaches reports whether a node is in the topology of a CSIStorageCapacity. It compares labels,
// which the provisioner writes, and ignores expressions, so that it refuses nothing by mistake.
func (o object) reaches(node object) bool {
	if o.at("nodeTopology") == nil {
		return false // it is accessible from no node
	}
	labels, _ := o.at("nodeTopology", "matchLabels").(map[string]any)
	for key, value := range labels {
		if node.at("metadata", "labels", key) != value {
			return false
		}
	}
	return true
}
