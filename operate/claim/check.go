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

// check reads everything on which a change depends, refuses a change that cannot work, and returns
// the plan and the earlier PersistentVolume. It changes nothing.
func (r *run) check(ctx context.Context) (p plan, old object, err error) {
	claim, err := r.Kubectl.get(ctx, claims, r.Namespace, r.Claim)
	if err != nil {
		return p, nil, err
	}
	if claim.str("status", "phase") != "Bound" || claim.deleting() {
		return p, nil, fmt.Errorf("expected a bound PersistentVolumeClaim %s/%s, found none, or one "+
			"that is not bound or is being deleted", r.Namespace, r.Claim)
	}
	old, err = r.Kubectl.get(ctx, persistentVolumes, "", claim.str("spec", "volumeName"))
	switch f := claim.foreignFinalizer(); {
	case err != nil:
		return p, nil, err
	case old.str("spec", "csi", "driver") != volume.DriverName ||
		old.str("spec", "claimRef", "uid") != claim.uid():
		return p, nil, fmt.Errorf("the volume of the claim has to be one of %s that is bound to it",
			volume.DriverName)
	case old.annotation(planKey) != "":
		return p, nil, fmt.Errorf("PersistentVolume %s has got a plan meanwhile: another run of this "+
			"command changes the claim, or something else writes the annotation %s", old.name(), planKey)
	case old.deleting():
		return p, nil, fmt.Errorf("PersistentVolume %s is being deleted by somebody, and goes when "+
			"nothing is bound to it: make it again for its disk first", old.name())
	case f != "":
		return p, nil, fmt.Errorf("the claim has the finalizer %s: whoever set it has to let the "+
			"claim go first (a VolumeSnapshot of it that is not ready: wait for it, or delete it)", f)
	}
	namespace, err := r.Kubectl.get(ctx, "namespaces", "", r.Namespace)
	if err != nil {
		return p, nil, err
	}
	if c := claim.controller(); c.str("kind") == "Pod" {
		return p, nil, fmt.Errorf("the claim belongs to the pod %s and is deleted with it: it cannot "+
			"be given another disk", c.str("name"))
	}
	p = plan{
		Verb: r.Verb, Namespace: r.Namespace, Claim: r.Claim, ClaimUID: claim.uid(),
		NamespaceUID: namespace.uid(),
		Manifest:     object{"metadata": map[string]any{}, "spec": claim.at("spec")},
		ID:           newID(), Run: r.id,
		OldSize: old.str("spec", "capacity", "storage"), Size: r.Size,
		Old: old.name(), OldUID: old.uid(), Handle: old.str("spec", "csi", "volumeHandle"),
		Policy: old.policy(),
	}
	claim.copyFields(p.Manifest["metadata"].(map[string]any), "metadata", "labels", "annotations",
		"ownerReferences")
	for _, check := range []func(context.Context, object, object, *plan) error{
		r.checkOwner, r.checkNodes, r.checkClass, r.checkSnapshot, r.checkSize, r.rehearse,
		r.checkQuota} {
		if err := check(ctx, claim, old, &p); err != nil {
			return p, nil, err
		}
	}
	return p, old, nil
}

// foreignFinalizer returns a finalizer, or "". It ignores Kubernetes' own, which waits for pods.
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
func (r *run) checkOwner(ctx context.Context, claim, _ object, p *plan) error {
	pods, err := r.Kubectl.all(ctx, "pods", r.Namespace)
	if err != nil {
		return err
	}
	var ofPod object
	for _, pod := range users(pods, r.Claim) {
		o, workload, err := r.ownerOf(ctx, pod)
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
	scalers, err := r.Kubectl.all(ctx, "horizontalpodautoscalers", r.Namespace)
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
			claim.str("metadata", "labels", key)+claim.annotation(key) != "" {
			r.note("%s or its claim has the label %s: suspend the synchronization, or it undoes the "+
				"scale, and write the new size where it reads", p.Owner, key)
		}
	}
	return r.Kubectl.patch(ctx, ofPod, scaled(p.Owner.Target, p.stopMark()), dryRun)
}

// checkNodes records the names and UIDs of the nodes to which the volume is attached. A later step
// waits until these Nodes report that the volume is unmounted. A new Node of the same name does not
// count.
func (r *run) checkNodes(ctx context.Context, _, old object, p *plan) error {
	all, err := r.Kubectl.all(ctx, volumeAttachments, "")
	p.Nodes = map[string]string{}
	for _, a := range all {
		if a.str("spec", "source", "persistentVolumeName") != old.name() {
			continue
		}
		node, err := r.Kubectl.get(ctx, "nodes", "", a.str("spec", "nodeName"))
		if err != nil {
			return err
		}
		p.Nodes[a.str("spec", "nodeName")] = node.uid()
	}
	return err
}

// ownerOf returns the object that decides whether a pod runs. The command can stop only a
// Deployment or StatefulSet that no other object manages. Only a person can stop other owners.
func (r *run) ownerOf(ctx context.Context, pod object) (owner, object, error) {
	top := pod
	for range 3 {
		c := top.controller()
		if c == nil {
			break
		}
		kind, ok := kinds[c.str("kind")]
		if !ok || kind.scales == "" || !strings.HasPrefix(c.str("apiVersion"), "apps/") {
			return owner{Kind: c.str("kind"), Name: c.str("name"), UID: c.str("uid"), Person: true,
				Pod: pod.name()}, nil, nil
		}
		var err error
		if top, err = r.Kubectl.get(ctx, kind.resource, r.Namespace, c.str("name")); err != nil {
			return owner{}, nil, err
		}
		if top.uid() != c.str("uid") {
			return owner{}, nil, fmt.Errorf("the pod %s belongs to %s %s, which is gone: wait until the "+
				"pod is gone", pod.name(), c.str("kind"), c.str("name"))
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
func (r *run) checkClass(ctx context.Context, claim, old object, p *plan) error {
	name := claim.str("spec", "storageClassName")
	class, err := r.Kubectl.get(ctx, storageClasses, "", name)
	switch {
	case err != nil:
		return err
	case class.str("provisioner") != volume.DriverName:
		return fmt.Errorf("the claim's StorageClass %q makes no disks of %s, so it cannot make another",
			name, volume.DriverName)
	case class.str("parameters", "diskType") == "local":
		return errors.New("the claim's disk is a local one, which has no snapshots")
	}
	p.ClassUID, p.Retains = class.uid(), class.str("reclaimPolicy") == "Retain"
	if class.str("volumeBindingMode") != "WaitForFirstConsumer" {
		p.Node = ""
		return nil
	}
	nodes, err := r.Kubectl.all(ctx, "csinodes.storage.k8s.io", "")
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
	switch selected := claim.annotation(selectedNode); {
	case slices.Contains(able, p.Node):
	case slices.Contains(able, selected):
		p.Node = selected
	case len(able) == 0 || old.at("spec", "nodeAffinity") != nil:
		return errors.New("no node that has used the claim runs the driver now, and the new disk is " +
			"made near a node: start the workload once")
	default:
		p.Node = able[0]
	}
	return nil
}

func (r *run) checkSnapshot(ctx context.Context, claim, _ object, p *plan) error {
	if r.Verb == Grow {
		return r.findSnapshotClass(ctx, p)
	}
	o, err := r.Kubectl.get(ctx, snapshots, r.Namespace, r.Snapshot)
	if err != nil {
		return err
	}
	if o.at("status", "readyToUse") != true || o.deleting() {
		return fmt.Errorf("expected a VolumeSnapshot %s/%s that is ready, found none, or one that is not",
			r.Namespace, r.Snapshot)
	}
	if p.Shot, err = r.Kubectl.shotOf(ctx, o, p.earlier()); err != nil {
		return err
	}
	least := o.str("status", "restoreSize")
	if p.Size == "" {
		p.Size = larger(claim.str("spec", "resources", "requests", "storage"), least)
	}
	if larger(p.Size, least) != p.Size {
		return fmt.Errorf("--size: the snapshot needs a disk of at least %s", least)
	}
	return nil
}

func larger(a, b string) string {
	aBytes, _ := parseSize(a)
	bBytes, err := parseSize(b)
	if err == nil && bBytes > aBytes {
		return b
	}
	return a
}

func (r *run) findSnapshotClass(ctx context.Context, p *plan) error {
	p.Shot.Name = p.temporary()
	all, err := r.Kubectl.all(ctx, snapshotClasses, "")
	if err != nil {
		return err
	}
	ours := slices.DeleteFunc(all, func(class object) bool {
		return class.str("driver") != volume.DriverName ||
			r.SnapshotClass != "" && class.name() != r.SnapshotClass
	})
	if len(ours) != 1 {
		return fmt.Errorf("expected one VolumeSnapshotClass of %s, found %d (%s): name one with "+
			"--snapshot-class", volume.DriverName, len(ours), names(ours))
	}
	p.SnapshotClass, p.SnapshotClassUID = ours[0].name(), ours[0].uid()
	if ours[0].str("deletionPolicy") == "Retain" {
		r.note("VolumeSnapshotClass %s has the deletionPolicy Retain: the snapshot stays on the rack, "+
			"and in its quota, until you delete its VolumeSnapshotContent with the policy Delete",
			p.SnapshotClass)
	}
	return nil
}

func (r *run) checkSize(_ context.Context, _, _ object, p *plan) error {
	was, err := parseSize(p.OldSize)
	if err != nil {
		return fmt.Errorf("the capacity %q of PersistentVolume %s %w", p.OldSize, p.Old, err)
	}
	size, err := parseSize(p.Size)
	switch {
	case err != nil:
		return fmt.Errorf("the size %q of the claim %w", p.Size, err)
	case size > volume.MaxDistributedBytes:
		return fmt.Errorf("--size: a disk has at most %d GiB", volume.MaxDistributedBytes/volume.GiB)
	case p.Verb == Grow && size <= was:
		return fmt.Errorf("--size: the claim's disk has %s already, and no disk shrinks", p.OldSize)
	}
	return nil
}

// rehearse sends each kind of request that a change needs, as a dry run. An admission webhook or a
// ResourceQuota may refuse one. The user may lack a right to an object, or to an owner that the
// object names. Without this check the change would stop halfway, with the workload stopped.
func (r *run) rehearse(ctx context.Context, claim, old object, p *plan) error {
	text, err := json.Marshal(p)
	if err != nil {
		return err
	}
	if len(text) > 200<<10 {
		return errors.New("the claim's annotations are too large to be recorded with the plan")
	}
	again := p.newClaim(p.Old)
	again["metadata"].(object)["name"] = p.temporary() // the claim still has its own name
	kept := annotate(planKey, string(text), reserve(p.kept(), nil))
	maps.Copy(kept["spec"].(object), withPolicy("Retain"))
	mark := annotate(planKey, p.Run, nil)
	for what, err := range map[string]error{
		"the plan":                          r.Kubectl.patch(ctx, old, kept, dryRun),
		"the deletion of the claim":         r.Kubectl.remove(ctx, claim, dryRun),
		"the mark of the claim":             r.Kubectl.patch(ctx, claim, mark, dryRun),
		"the claim of the earlier disk":     r.Kubectl.create(ctx, p.keptClaim(), dryRun),
		"the claim of the new disk":         r.Kubectl.create(ctx, p.temporaryClaim(), dryRun),
		"the claim, when it is made again,": r.createOwned(ctx, again, dryRun),
		"the snapshot":                      r.rehearseSnapshot(ctx, *p),
	} {
		if err != nil {
			return fmt.Errorf("%s would be refused: %w. Nothing has been changed; the rights that a "+
				"change needs are in docs/howto/grow-a-volume.md", what, err)
		}
	}
	return nil
}

func (r *run) rehearseSnapshot(ctx context.Context, p plan) error {
	if p.SnapshotClass == "" {
		return nil
	}
	// A change needs these rights only later: after the workload has stopped, or for an undo.
	if _, err := r.Kubectl.get(ctx, snapshotContents, "", p.temporary()); err != nil {
		return err
	}
	if _, _, err := r.Kubectl.refusal(ctx, p); err != nil {
		return err
	}
	if _, err := r.Kubectl(ctx, nil, "auth", "can-i", "delete", snapshots,
		"--namespace="+p.Namespace); err != nil {
		return fmt.Errorf("you may not delete volumesnapshots: %w", err)
	}
	return r.Kubectl.create(ctx, p.ownSnapshot(), dryRun)
}

// peak returns how much of the rack's quota the change uses until "claim forget". A snapshot counts
// with the size of its disk.
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
// refuses its requests. So it may be wrong by any amount, and a margin would not help. If it is too
// small, the change is refused, unless a person who knows better sets --ignore-capacity.
func (r *run) checkQuota(ctx context.Context, claim, _ object, p *plan) error {
	class := claim.str("spec", "storageClassName")
	best, left, err := r.Kubectl.published(ctx, class, p.Node)
	switch {
	case err != nil:
		r.quota = fmt.Sprintf("This is not checked: the published capacities cannot be read (%v).", err)
		return ctx.Err()
	case best == nil:
		r.quota = fmt.Sprintf("This is not checked: the cluster publishes no capacity of StorageClass "+
			"%s.", class)
		return nil
	}
	object := fmt.Sprintf("CSIStorageCapacity %s/%s of StorageClass %s",
		best.str("metadata", "namespace"), best.name(), class)
	need, parts := p.peak()
	size, _ := parseSize(p.Size)
	most, err := parseQuantity(best.str("maximumVolumeSize"))
	var problem string
	switch {
	case need > left:
		problem = fmt.Sprintf("expected room for %s in the rack's quota (%s), found %s left, by %s. Ask "+
			"for quota, or remove snapshots and disks that nobody needs", volume.SizeText(need), parts,
			volume.SizeText(left), object)
	case err == nil && size > most:
		problem = fmt.Sprintf("--size: expected a disk of at most %s, by %s, and %s is asked for",
			volume.SizeText(most), object, p.Size)
	default:
		r.quota = fmt.Sprintf("%s is left, by %s.", volume.SizeText(left), object)
		return nil
	}
	if r.IgnoreCapacity {
		r.quota = "Continued by --ignore-capacity: " + problem + "."
		return nil
	}
	return fmt.Errorf("%s. Nothing has been changed. The object follows the rack with a delay, a "+
		"minute by default: if there is room now, repeat the command later, or with --ignore-capacity",
		problem)
}

// published() returns the CSIStorageCapacity of a class with the most capacity left, or nil. If the
// disk is made near a node, it considers only objects whose topology contains the node.
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
// which the provisioner writes. It ignores expressions, so that it refuses nothing by mistake.
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
